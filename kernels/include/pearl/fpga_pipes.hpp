// Pipes between the autorun kernels of an FPGA program, and numbers of exactly as many bits as a design needs.
//
// A stage is a function template over the pipes that it reads and writes, so that a generated program only names the
// pipes and says which stage sits between which (kernels/sycl/fpga_program.cpp).
#pragma once

#include <cstdint>

namespace pearl::fpga {

#if defined(__clang__)
template <unsigned bits>
using Word = unsigned _BitInt(bits);
#else
template <unsigned bits>
using Word = std::uint64_t;
#endif

#if defined(__SYCL_DEVICE_ONLY__) || defined(PEARL_AHEAD_OF_TIME)

// The at-th pipe of a program, which `Program` names; `items` fit into it.
template <class Program, int at>
struct PipeName;

template <class Program, int at, class Item, int items>
using Pipe = sycl::ext::intel::pipe<PipeName<Program, at>, Item, items>;

#endif

}  // namespace pearl::fpga
