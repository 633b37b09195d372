#include "pearl/device/queue.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace pearl::device {

const Kernel& Kernels::operator[](std::string_view name) const {
  for (const auto& [known, kernel] : kernels_)
    if (known == name) return *kernel;
  throw DeviceError("There is no kernel " + std::string(name) + " among those compiled.");
}

std::size_t DeviceQueue::lanes(std::size_t count) const {
  const std::size_t step = team_ > 1 ? 32 : 16;  // whole warps, or vectors
  return std::min(most_lanes_, (std::max<std::size_t>(count, 1) + step - 1) / step * step);
}

thread_local bool DeviceQueue::recording_here = false;

std::unique_ptr<const Recording> DeviceQueue::record(const std::function<void()>& work) {
  const RecordingHere recording;
  return recorded(work);
}

std::unique_ptr<const Recording> DeviceQueue::recorded(const std::function<void()>&) {
  throw DeviceError("Launches on " + name() + " are not recorded.");
}

void DeviceQueue::enqueue(const Recording&) { throw DeviceError("Launches on " + name() + " are not recorded."); }

void DeviceQueue::settle() {
  try {
    wait();
  } catch (const DeviceError&) {  // its first error was thrown where it occurred
  }
}

std::size_t DeviceQueue::cluster_of(std::size_t groups, std::size_t most) const {
  std::size_t cluster = 1;
  while (2 * cluster <= std::min(most, most_cluster()) && 2 * cluster * groups <= most_clustered()) cluster *= 2;
  return cluster;
}

std::string gigabytes(std::size_t bytes) {
  const double amount = static_cast<double>(bytes) / 1e9;
  std::ostringstream text;
  text << std::fixed << std::setprecision(amount < 10 ? 2 : amount < 100 ? 1 : 0) << amount << " GB";
  return text.str();
}

std::string shortened(const std::string& log) {
  constexpr int kLogLines = 60;
  std::size_t end = 0;
  for (int line = 0; line < kLogLines; ++line) {
    end = log.find('\n', end);
    if (end == std::string::npos) return log;
    ++end;
  }
  const auto more = std::count(log.begin() + static_cast<std::ptrdiff_t>(end), log.end(), '\n');
  return more == 0 ? log : log.substr(0, end) + "... and " + std::to_string(more) + " more lines";
}

}  // namespace pearl::device
