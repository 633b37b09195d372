// What a stream of requests asks of a Replay Manager, wherever that is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pearl {

// Every method is safe from any thread. Arrays are the caller's; no method keeps a pointer.
class ReplayOperations {
 public:
  virtual ~ReplayOperations() = default;

  // New items at `indices`; `priorities` may be null: the initial one. Each occurrence gives a new generation.
  virtual void insert(const std::int64_t* indices, const float* priorities, std::size_t count) = 0;
  virtual void sample(std::size_t count, double beta, std::int64_t* indices, float* weights,
                      std::uint32_t* generations) = 0;
  // Returns how many were applied; with `generations`, stale ones are dropped and counted.
  virtual std::size_t update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                             std::size_t count) = 0;
  virtual bool prioritized() const = 0;
  virtual std::size_t capacity() const = 0;
};

}  // namespace pearl
