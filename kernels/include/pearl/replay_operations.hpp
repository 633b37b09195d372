// The operations of a Replay Manager on any device that a stream of requests needs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pearl {

// Every method is safe from any thread. Arrays are the caller's; no method keeps a pointer.
class ReplayOperations {
 public:
  virtual ~ReplayOperations() = default;

  // New items at `indices`; `priorities` may be null: the initial priority. Each occurrence gets a new generation.
  virtual void insert(const std::int64_t* indices, const float* priorities, std::size_t count) = 0;
  virtual void sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
                      std::uint32_t* generations) = 0;
  // Returns how many updates were applied; with `generations`, drops and counts stale ones.
  virtual std::size_t update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                             std::size_t count) = 0;
  virtual bool prioritized() const = 0;
  virtual std::size_t capacity() const = 0;
};

}  // namespace pearl
