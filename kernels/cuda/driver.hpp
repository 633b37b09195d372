// NVIDIA's driver and NVRTC, its run-time compiler, loaded when first needed: PEARL is built without CUDA, and runs
// where it is absent. This file declares only the functions that PEARL calls, as in cuda.h and nvrtc.h of CUDA 12 and
// 13.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pearl::cuda {

using Result = int;
using Device = int;
using Pointer = unsigned long long;
struct ContextState;
struct StreamState;
struct ModuleState;
struct FunctionState;
struct GraphState;
struct GraphExecState;
using Context = ContextState*;
using Stream = StreamState*;
using Module = ModuleState*;
using Function = FunctionState*;
using Graph = GraphState*;
using GraphExec = GraphExecState*;

// CUlaunchAttribute and CUlaunchConfig.
struct alignas(8) LaunchAttribute {
  int id;
  alignas(8) unsigned values[16];
};
constexpr int kClusterDimension = 4;  // an id
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

// Of a device.
enum Attribute : int {
  kMultiprocessors = 16,
  kComputeMajor = 75,
  kComputeMinor = 76,
  kConcurrentManagedAccess = 89,
  kMostBlockBytes = 97,  // that a kernel can be given
};

// Of a kernel.
enum FunctionAttribute : int {
  kOwnBlockBytes = 1,    // what it declares
  kGivenBlockBytes = 8,  // what a launch may add
};

// The functions of libcuda.so.1, by the driver's names.
struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuDeviceGet)(Device*, int);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGetName)(char*, int, Device);
  Result (*cuDeviceGetAttribute)(int*, Attribute, Device);
  Result (*cuDevicePrimaryCtxRetain)(Context*, Device);
  Result (*cuCtxPushCurrent_v2)(Context);
  Result (*cuCtxPopCurrent_v2)(Context*);
  Result (*cuStreamCreate)(Stream*, unsigned);
  Result (*cuStreamDestroy_v2)(Stream);
  Result (*cuStreamSynchronize)(Stream);
  Result (*cuStreamBeginCapture_v2)(Stream, int);
  Result (*cuStreamEndCapture)(Stream, Graph*);
  Result (*cuGraphInstantiateWithFlags)(GraphExec*, Graph, unsigned long long);
  Result (*cuGraphLaunch)(GraphExec, Stream);
  Result (*cuGraphExecDestroy)(GraphExec);
  Result (*cuGraphDestroy)(Graph);
  Result (*cuModuleLoadData)(Module*, const void*);
  Result (*cuModuleGetFunction)(Function*, Module, const char*);
  Result (*cuFuncGetAttribute)(int*, FunctionAttribute, Function);
  Result (*cuFuncSetAttribute)(Function, FunctionAttribute, int);
  Result (*cuLaunchKernelEx)(const LaunchConfig*, Function, void**, void**);  // since CUDA 11.8
  Result (*cuMemGetInfo_v2)(std::size_t*, std::size_t*);
  Result (*cuMemAlloc_v2)(Pointer*, std::size_t);
  Result (*cuMemAllocManaged)(Pointer*, std::size_t, unsigned);
  Result (*cuMemHostAlloc)(void**, std::size_t, unsigned);
  Result (*cuMemFree_v2)(Pointer);
  Result (*cuMemFreeHost)(void*);
  Result (*cuMemcpyAsync)(Pointer, Pointer, std::size_t, Stream);
  Result (*cuMemsetD8Async)(Pointer, unsigned char, std::size_t, Stream);
  Result (*cuPointerGetAttribute)(void*, int, Pointer);
};

// Loads the driver once. Throws DeviceError where there is none, or where it is too old.
const Driver& driver();
// Throws DeviceError for a failed call `what` on `device`.
void check(Result result, const char* what, const std::string& device);

struct Header {
  std::string name, text;
};

// Compiles the CUDA C++ `text` to a binary for compute capability `major`.`minor`. `library` is the path of libnvrtc.
// Throws DeviceError with the compiler's log, or where NVRTC is missing or does not know the device.
std::vector<char> compiled(const std::string& library, const std::string& name, const std::string& text,
                           const std::vector<Header>& headers, int major, int minor,
                           const std::vector<std::string>& options);
// For example "13.0".
std::string compiler_version(const std::string& library);

}  // namespace pearl::cuda
