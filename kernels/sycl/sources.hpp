// The texts of kernels/sycl/*.sycl.cpp and of the headers that they include, as CMake put them into this library: what
// the runtime compiles for a device.
#pragma once

#include <string>
#include <vector>

namespace pearl::device {

struct SourceFile {
  std::string name, text;
};

const std::vector<SourceFile>& device_sources();
const std::vector<SourceFile>& device_headers();
// Hexadecimal digits that change with any of them.
const char* device_sources_hash();

}  // namespace pearl::device
