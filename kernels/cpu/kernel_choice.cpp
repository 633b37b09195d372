// The instruction set that the kernels use, chosen at run time.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "pearl/errors.hpp"
#include "pearl/gae.hpp"
#include "pearl/learner/kernels.hpp"
#include "pearl/replay_kernels.hpp"

namespace pearl {
namespace {

template <class Table>
using Variants = std::vector<const Table*>;

// Of all variants, those that this machine has; the others are null.
template <class Table>
Variants<Table> present(const Variants<Table>& all) {
  Variants<Table> found;
  for (const Table* kernels : all)
    if (kernels != nullptr) found.push_back(kernels);
  return found;
}

Variants<ReplayKernels> replay_variants() {
#if defined(__x86_64__)
  return present<ReplayKernels>({&plain_replay_kernels(), avx2_replay_kernels(), avx512_replay_kernels()});
#else
  return {&plain_replay_kernels()};
#endif
}

Variants<learner::LearnerKernels> learner_variants() {
  using namespace learner;
#if defined(__x86_64__)
  return present<LearnerKernels>(
      {&plain_learner_kernels(), avx2_learner_kernels(), avx512_learner_kernels(), amx_learner_kernels(false)});
#else
  return {&plain_learner_kernels()};
#endif
}

Variants<GaeKernels> gae_variants() {
#if defined(__x86_64__)
  return present<GaeKernels>({&plain_gae_kernels(), avx2_gae_kernels(), avx512_gae_kernels()});
#else
  return {&plain_gae_kernels()};
#endif
}

template <class Table>
std::vector<std::string> names_of(const Variants<Table>& variants) {
  std::vector<std::string> names;
  for (const Table* kernels : variants) names.emplace_back(kernels->name);
  return names;
}

template <class Table>
const Table* variant_named(const Variants<Table>& variants, const std::string& name, const char* origin) {
  std::string known;
  for (const Table* kernels : variants) {
    if (name == kernels->name) return kernels;
    known += std::string(known.empty() ? "" : ", ") + kernels->name;
  }
  throw ConfigurationError(std::string(origin) + " must name kernels that this machine has (" + known +
                           "); found \"" + name + "\".");
}

// Kernels without a variant of this name take their fastest one instead: only a Learner's have one for AMX.
template <class Table>
const Table* default_variant(const Variants<Table>& variants) {
  const char* forced = std::getenv("PEARL_ISA");
  if (forced == nullptr || *forced == '\0') return variants.back();
  const std::vector<std::string> of_learners = names_of(learner_variants());
  const bool known = std::find(of_learners.begin(), of_learners.end(), forced) != of_learners.end();
  const std::vector<std::string> own = names_of(variants);
  if (known && std::find(own.begin(), own.end(), forced) == own.end()) return variants.back();
  return variant_named(variants, forced, "PEARL_ISA");
}

bool is_reduced(const std::string& name, const char* origin) {
  if (name == "high" || name == "highest") return name == "high";
  throw ConfigurationError(std::string(origin) + " must be \"highest\" (float32) or \"high\" (16 bits of each factor); " +
                           "found \"" + name + "\".");
}

std::atomic<bool>& reduced_products() {
  static std::atomic<bool> reduced = [] {
    const char* wanted = std::getenv("PEARL_MATMUL");
    return wanted != nullptr && *wanted != '\0' && is_reduced(wanted, "PEARL_MATMUL");
  }();
  return reduced;
}

std::atomic<const ReplayKernels*>& selected_replay() {
  static std::atomic<const ReplayKernels*> kernels = default_variant(replay_variants());
  return kernels;
}

std::atomic<const learner::LearnerKernels*>& selected_learner() {
  static std::atomic<const learner::LearnerKernels*> kernels = default_variant(learner_variants());
  return kernels;
}

std::atomic<const GaeKernels*>& selected_gae() {
  static std::atomic<const GaeKernels*> kernels = default_variant(gae_variants());
  return kernels;
}

}  // namespace

const ReplayKernels& replay_kernels() { return *selected_replay().load(std::memory_order_relaxed); }
std::vector<std::string> replay_kernel_variants() { return names_of(replay_variants()); }
void select_replay_kernels(const std::string& name) {
  selected_replay() = variant_named(replay_variants(), name, "kernels");
}

const GaeKernels& gae_kernels() { return *selected_gae().load(std::memory_order_relaxed); }
std::vector<std::string> gae_kernel_variants() { return names_of(gae_variants()); }
void select_gae_kernels(const std::string& name) { selected_gae() = variant_named(gae_variants(), name, "kernels"); }

namespace learner {

const LearnerKernels& learner_kernels() {
  const LearnerKernels* selected = selected_learner().load(std::memory_order_relaxed);
  const bool reduced = reduced_products().load(std::memory_order_relaxed);
  return reduced && selected == amx_learner_kernels(false) ? *amx_learner_kernels(true) : *selected;
}
std::vector<std::string> learner_kernel_variants() { return names_of(learner_variants()); }
void select_learner_kernels(const std::string& name) {
  selected_learner() = variant_named(learner_variants(), name, "kernels");
}
void select_matmul_precision(const std::string& name) { reduced_products() = is_reduced(name, "The precision"); }

}  // namespace learner
}  // namespace pearl
