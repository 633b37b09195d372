#include "pearl/device/gae.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pearl::device {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kFewestLanes = 32;  // a warp

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// An array of the caller, and its place in the memory.
struct Piece {
  const void* from;
  std::size_t bytes, at;
};

}  // namespace

GaeOnDevice::GaeOnDevice(std::shared_ptr<DeviceQueue> queue, const GaeFactors& factors, bool in_device_memory)
    : queue_(std::move(queue)), factors_(factors), in_device_memory_(in_device_memory) {}

void GaeOnDevice::abandon_memory() {
  static_cast<void>(new DeviceArray<std::uint8_t>(std::move(host_)));
  static_cast<void>(new DeviceArray<std::uint8_t>(std::move(device_)));
}

void GaeOnDevice::estimate(const GaeCall& call) {
  if (call.count() == 0) return;
  const std::lock_guard lock(mutex_);
  const std::size_t results = bytes_of(call.count(), sizeof(float));
  // The memory begins with the results. Rewards and values in float32 lie there too; the other inputs follow.
  const bool in_place = call.number_bytes == sizeof(float);
  std::size_t end = in_place ? 0 : 2 * aligned(results);
  const auto piece = [&](const void* from, std::size_t bytes) {
    const std::size_t at = std::exchange(end, end + aligned(bytes));
    return Piece{from, bytes, at};
  };
  const std::size_t begin = end;
  const Piece pieces[] = {piece(call.rewards.data, call.count() * call.number_bytes),
                          piece(call.values.data, call.count() * call.number_bytes),
                          piece(call.last_values, call.envs * sizeof(float)),
                          piece(call.ends, call.count()),
                          piece(call.bonus, call.bonus != nullptr ? results : 0)};
  if (host_.size() < end) {
    // Allocates both or neither, since the size of `host_` stands for both.
    DeviceArray<std::uint8_t> host(*queue_, end, Placement::pinned);
    if (in_device_memory_) device_ = {*queue_, end, Placement::device};
    host_ = std::move(host);
  }
  for (const Piece& each : pieces)
    if (each.bytes > 0) std::memcpy(host_.data() + each.at, each.from, each.bytes);
  std::uint8_t* const memory = (in_device_memory_ ? device_ : host_).data();
  if (in_device_memory_) queue_->copy(host_.data() + begin, memory + begin, end - begin);

  GaeCall there = call;
  const auto floats = [&](std::size_t at) { return reinterpret_cast<float*>(memory + at); };
  there.rewards.data = memory + pieces[0].at;
  there.values.data = memory + pieces[1].at;
  there.last_values = floats(pieces[2].at);
  there.ends = memory + pieces[3].at;
  there.bonus = call.bonus != nullptr ? floats(pieces[4].at) : nullptr;
  there.advantages = floats(0);
  there.returns = floats(aligned(results));
  scan(there);

  if (in_device_memory_) queue_->copy(memory, host_.data(), aligned(results) + results);
  std::memcpy(call.advantages, host_.data(), results);
  std::memcpy(call.returns, host_.data() + aligned(results), results);
}

Gae::Gae(std::shared_ptr<DeviceQueue> queue, double gamma, double gae_lambda)
    : GaeOnDevice(queue, GaeFactors::of(gamma, gae_lambda), !queue->is_cpu()),
      kernels_(queue->compile("gae", {"pearl_gae"})) {}

void Gae::scan(const GaeCall& call) {
  // As many work-groups as possible, each with the fewest lanes: each lane waits for a chain of steps.
  const std::size_t share = (call.envs + queue_->most_groups() - 1) / queue_->most_groups();
  const std::size_t lanes = queue_->lanes(std::max(share, kFewestLanes));
  const std::size_t groups = std::min((call.envs + lanes - 1) / lanes, queue_->most_groups());
  queue_->launch((*kernels_)["pearl_gae"], groups, lanes, std::uint64_t{call.horizon}, std::uint64_t{call.envs},
                 static_cast<std::uint32_t>(call.number_bytes), call.rewards.data, call.rewards.offset,
                 call.rewards.scale, call.values.data, call.values.offset, call.values.scale, call.bonus,
                 call.last_values, call.ends, call.advantages, call.returns, factors_.gamma, factors_.decay);
  queue_->wait();
}

}  // namespace pearl::device
