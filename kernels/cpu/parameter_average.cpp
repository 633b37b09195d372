#include "pearl/parameter_average.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl {
namespace {

constexpr std::size_t kPiece = 1024;  // numbers on their way into a Snapshot, in the cache
constexpr std::size_t kBlock = 32;    // numbers that are added at once, in registers

// The kernels are compiled for each instruction set; results do not depend on it, since nothing is contracted.
struct Kernels {
  // out[0 .. count) = the mean of `vectors` from `first` on.
  void (*mean)(const float* const* vectors, std::size_t learners, std::size_t first, std::size_t count, float* out);
  void (*correct)(float* values, const float* average, const float* handed_in, std::size_t count);
  void (*correct_bounded)(float* values, const float* average, const float* handed_in, std::size_t count);
};

// `count` numbers, a constant where that is possible: their sums then stay in registers.
template <class Round>
[[gnu::always_inline]] inline void mean_block(const float* const* vectors, std::size_t learners, std::size_t first,
                                              std::size_t count, Round round, float* out) {
  double total[kBlock];
  for (std::size_t i = 0; i < count; ++i) total[i] = vectors[0][first + i];
  for (std::size_t learner = 1; learner < learners; ++learner)
    for (std::size_t i = 0; i < count; ++i) total[i] += vectors[learner][first + i];
  for (std::size_t i = 0; i < count; ++i) out[i] = round(total[i]);
}

template <class Round>
[[gnu::always_inline]] inline void mean_blocks(const float* const* vectors, std::size_t learners, std::size_t first,
                                               std::size_t count, Round round, float* out) {
  std::size_t at = 0;
  for (; at + kBlock <= count; at += kBlock) mean_block(vectors, learners, first + at, kBlock, round, out + at);
  if (at < count) mean_block(vectors, learners, first + at, count - at, round, out + at);
}

[[gnu::always_inline]] inline void mean_body(const float* const* vectors, std::size_t learners, std::size_t first,
                                             std::size_t count, float* out) {
  const auto divisor = static_cast<double>(learners);
  const double factor = 1.0 / divisor;
  if ((learners & (learners - 1)) == 0)  // the factor is exact, and sooner multiplied
    mean_blocks(vectors, learners, first, count, [=](double sum) { return static_cast<float>(sum * factor); }, out);
  else
    mean_blocks(vectors, learners, first, count, [=](double sum) { return static_cast<float>(sum / divisor); }, out);
}

[[gnu::always_inline]] inline float corrected(float value, float average, float handed_in) {
  const double change = static_cast<double>(average) - static_cast<double>(handed_in);
  return static_cast<float>(static_cast<double>(value) + change);
}

[[gnu::always_inline]] inline void correct_body(float* values, const float* average, const float* handed_in,
                                                std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] = corrected(values[i], average[i], handed_in[i]);
}

[[gnu::always_inline]] inline void correct_bounded_body(float* values, const float* average, const float* handed_in,
                                                        std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float least = std::min(values[i], average[i]);
    const float greatest = std::max(values[i], average[i]);
    values[i] = std::min(std::max(corrected(values[i], average[i], handed_in[i]), least), greatest);
  }
}

void mean_plain(const float* const* vectors, std::size_t learners, std::size_t first, std::size_t count, float* out) {
  mean_body(vectors, learners, first, count, out);
}
void correct_plain(float* values, const float* average, const float* handed_in, std::size_t count) {
  correct_body(values, average, handed_in, count);
}
void correct_bounded_plain(float* values, const float* average, const float* handed_in, std::size_t count) {
  correct_bounded_body(values, average, handed_in, count);
}

#ifdef __x86_64__
[[gnu::target("avx2")]] void mean_avx2(const float* const* vectors, std::size_t learners, std::size_t first,
                                       std::size_t count, float* out) {
  mean_body(vectors, learners, first, count, out);
}
[[gnu::target("avx2")]] void correct_avx2(float* values, const float* average, const float* handed_in,
                                          std::size_t count) {
  correct_body(values, average, handed_in, count);
}
[[gnu::target("avx2")]] void correct_bounded_avx2(float* values, const float* average, const float* handed_in,
                                                  std::size_t count) {
  correct_bounded_body(values, average, handed_in, count);
}
#endif

Kernels fastest() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return {mean_avx2, correct_avx2, correct_bounded_avx2};
#endif
  return {mean_plain, correct_plain, correct_bounded_plain};
}

const Kernels& kernels() {
  static const Kernels found = fastest();
  return found;
}

}  // namespace

void mean_of(const std::vector<const float*>& vectors, std::size_t count, float* out) {
  if (vectors.empty()) throw Error("A mean needs a vector.");
  kernels().mean(vectors.data(), vectors.size(), 0, count, out);
}

std::uint64_t write_mean(Snapshot& snapshot, const void* head, std::size_t head_bytes,
                         const std::vector<const float*>& vectors, std::size_t count) {
  if (vectors.empty()) throw Error("A mean needs a vector.");
  if (head_bytes % 8 != 0 || head_bytes + count * sizeof(float) != snapshot.payload_bytes())
    throw QueueError("A head of " + std::to_string(head_bytes) + " bytes and " + std::to_string(count) +
                     " numbers do not fit a Snapshot's payload of " + std::to_string(snapshot.payload_bytes()) +
                     " bytes.");
  const std::uint64_t version = snapshot.begin_write();
  snapshot.put(version, 0, head, head_bytes);
  float piece[kPiece];
  for (std::size_t first = 0; first < count; first += kPiece) {
    const std::size_t numbers = std::min(kPiece, count - first);
    kernels().mean(vectors.data(), vectors.size(), first, numbers, piece);
    snapshot.put(version, head_bytes + first * sizeof(float), piece, numbers * sizeof(float));
  }
  snapshot.end_write(version);
  return version;
}

ParameterArrays::ParameterArrays(std::vector<Part> parts) : parts_(std::move(parts)) {
  for (const Part& part : parts_) count_ += part.count;
}

void ParameterArrays::gather(float* out) const {
  for (const Part& part : parts_) {
    std::memcpy(out, part.values, part.count * sizeof(float));
    out += part.count;
  }
}

void ParameterArrays::scatter(const float* vector) const {
  for (const Part& part : parts_) {
    std::memcpy(part.values, vector, part.count * sizeof(float));
    vector += part.count;
  }
}

void ParameterArrays::correct(const float* average, const float* handed_in) const {
  for (const Part& part : parts_) {
    const auto kernel = part.bounded ? kernels().correct_bounded : kernels().correct;
    kernel(part.values, average, handed_in, part.count);
    average += part.count;
    handed_in += part.count;
  }
}

}  // namespace pearl
