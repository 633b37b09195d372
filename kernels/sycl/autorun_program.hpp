// A generated program of autorun kernels.
#pragma once

#include <string>
#include <vector>

namespace pearl::device {

// Kernels are single tasks, `extern "C"`. Their names begin with `prefix`, which errors omit.
struct AutorunProgram {
  std::string name;  // in errors
  std::string prefix;
  std::string text;
  std::vector<std::string> stages;   // launched once; read and write only pipes
  std::vector<std::string> bridges;  // launched for each request; move data between host memory and pipes
};

}  // namespace pearl::device
