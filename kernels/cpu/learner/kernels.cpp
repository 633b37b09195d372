#include "pearl/learner/kernels.hpp"

#include <atomic>
#include <cstdlib>

#include "pearl/errors.hpp"

namespace pearl::learner {
namespace {

std::vector<const LearnerKernels*> variants() {
  std::vector<const LearnerKernels*> found = {&plain_learner_kernels()};
  for (const LearnerKernels* kernels : {avx2_learner_kernels(), avx512_learner_kernels()})
    if (kernels != nullptr) found.push_back(kernels);
  return found;
}

const LearnerKernels* variant_named(const std::string& name, const char* origin) {
  std::string known;
  for (const LearnerKernels* kernels : variants()) {
    if (name == kernels->name) return kernels;
    known += std::string(known.empty() ? "" : ", ") + kernels->name;
  }
  throw ConfigurationError(std::string(origin) + " must name kernels that this machine has (" + known + "); found \"" +
                     name + "\".");
}

std::atomic<const LearnerKernels*>& selected() {
  static std::atomic<const LearnerKernels*> kernels = [] {
    const char* forced = std::getenv("PEARL_ISA");
    return forced != nullptr && *forced != '\0' ? variant_named(forced, "PEARL_ISA") : variants().back();
  }();
  return kernels;
}

}  // namespace

const LearnerKernels& learner_kernels() { return *selected().load(std::memory_order_relaxed); }

std::vector<std::string> learner_kernel_variants() {
  std::vector<std::string> names;
  for (const LearnerKernels* kernels : variants()) names.emplace_back(kernels->name);
  return names;
}

void select_learner_kernels(const std::string& name) { selected() = variant_named(name, "kernels"); }

}  // namespace pearl::learner
