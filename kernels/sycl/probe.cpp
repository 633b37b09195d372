#include "probe.hpp"

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

}  // namespace

std::vector<double> launch_times_us(DeviceQueue& queue, std::size_t launches, std::size_t repeats) {
  const auto kernels = queue.compile("probe", {"pearl_increment"});
  const DeviceArray<unsigned> x(queue, 64, Placement::device);
  const sycl::kernel& kernel = (*kernels)["pearl_increment"];
  return times_us(repeats, [&] {
    for (std::size_t i = 0; i < launches; ++i) queue.launch(kernel, 1, 64, x.data());
    queue.wait();
  });
}

std::vector<double> memory_times_us(DeviceQueue& queue, std::size_t bytes, std::size_t repeats) {
  const DeviceArray<char> source(queue, bytes, Placement::device), target(queue, bytes, Placement::device);
  sycl::queue on = queue.sycl();
  return times_us(repeats, [&] {
    on.memcpy(target.data(), source.data(), bytes);
    queue.wait();
  });
}

std::vector<double> copy_times_us(DeviceQueue& queue, std::size_t bytes, bool to_device, std::size_t repeats) {
  const DeviceArray<char> there(queue, bytes, Placement::device);
  const std::vector<char> here(bytes);
  sycl::queue target = queue.sycl();
  return times_us(repeats, [&] {
    char* const source = const_cast<char*>(here.data());
    target.memcpy(to_device ? there.data() : source, to_device ? source : there.data(), bytes);
    queue.wait();
  });
}

}  // namespace pearl::device
