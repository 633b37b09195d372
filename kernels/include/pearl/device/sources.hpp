// The texts of kernels (kernels/sycl/*.sycl.cpp, kernels/cuda/*.cu) and of the headers that they include. CMake embeds
// those of one kind in each module; the runtime compiles them for a device.
#pragma once

#include <string>
#include <vector>

namespace pearl::device {

struct SourceFile {
  std::string name, text;
};

const std::vector<SourceFile>& device_sources();
const std::vector<SourceFile>& device_headers();
// A hexadecimal hash of all of them.
const char* device_sources_hash();

}  // namespace pearl::device
