#include "pearl/device/probe.hpp"

#include <chrono>

namespace pearl::device {
namespace {

template <class Work>
std::vector<double> times_us(std::size_t repeats, Work work) {
  std::vector<double> times;
  for (std::size_t i = 0; i <= repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::micro> passed = std::chrono::steady_clock::now() - start;
    if (i > 0) times.push_back(passed.count());  // the first run warms up
  }
  return times;
}

std::vector<double> copied_us(DeviceQueue& queue, void* to, const void* from, std::size_t bytes, std::size_t repeats) {
  return times_us(repeats, [&] { queue.copy(from, to, bytes); });
}

}  // namespace

std::vector<double> launch_times_us(DeviceQueue& queue, std::size_t launches, std::size_t repeats) {
  const auto kernels = queue.compile("probe", {"pearl_increment"});
  const DeviceArray<unsigned> x(queue, 64, Placement::device);
  const Kernel& kernel = (*kernels)["pearl_increment"];
  const auto launch = [&] {
    for (std::size_t i = 0; i < launches; ++i) queue.launch(kernel, 1, 64, x.data());
  };
  std::unique_ptr<const Recording> recording;
  if (queue.records()) {
    launch();  // drivers load kernels when they are first launched
    queue.wait();
    recording = queue.record(launch);
  }
  return times_us(repeats, [&] {
    if (recording != nullptr)
      queue.launch(*recording);
    else
      launch();
    queue.wait();
  });
}

std::vector<double> memory_times_us(DeviceQueue& queue, std::size_t bytes, std::size_t repeats) {
  const DeviceArray<char> source(queue, bytes, Placement::device), target(queue, bytes, Placement::device);
  return copied_us(queue, target.data(), source.data(), bytes, repeats);
}

std::vector<double> copy_times_us(DeviceQueue& queue, std::size_t bytes, bool to_device, std::size_t repeats,
                                  bool pinned) {
  const DeviceArray<char> there(queue, bytes, Placement::device);
  const DeviceArray<char> held(queue, pinned ? bytes : 0, Placement::pinned);
  std::vector<char> pageable(pinned ? 0 : bytes);
  char* const here = pinned ? held.data() : pageable.data();
  void* const to = to_device ? there.data() : here;
  const void* const from = to_device ? here : there.data();
  return copied_us(queue, to, from, bytes, repeats);
}

}  // namespace pearl::device
