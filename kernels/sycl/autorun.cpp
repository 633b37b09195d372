#include "autorun.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>
#include <thread>

namespace pearl::device {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kSecondsPerItem{1e-3};
constexpr const char* kStalled =
    "Its data is lost. Create it again, with a longer timeout if the machine is busy; if it stalls again, end the "
    "process, which frees the device.";
constexpr const char* kLost =
    "Its data is lost. If the device has disappeared or was reset, start again; `pearl devices` lists the usable "
    "devices.";
constexpr const char* kTooMany =
    "All stages must run at once. Close other pipelines, or use fewer stages (a larger fanout). The emulator runs 31 "
    "kernels at once, or 160 after `pearl devices --setup-fpga-emulator`.";
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};

// Stages of this process that run, or that were left running. The emulator is a single device of the process.
std::atomic<std::size_t> running_stages{0};

}  // namespace

Autorun::State Autorun::state(const Task& task) {
  using Status = sycl::info::event_command_status;
  switch (task.event.get_info<sycl::info::event::command_execution_status>()) {
    case Status::submitted: return State::waiting;
    case Status::running: return State::running;
    case Status::complete: return State::ended;
    default: return State::failed;  // the runtime returns an error code that is not in its enumeration
  }
}

std::string Autorun::describe(const std::vector<Task>& tasks) {
  std::string text;
  for (const Task& task : tasks) {
    if (!task.launched) continue;
    const State now = state(task);
    text += (text.empty() ? "" : ", ") + task.name +
            (now == State::failed    ? " has failed"
             : now == State::ended   ? " has ended"
             : now == State::running ? " runs"
                                     : " has not begun");
  }
  return text;
}

Autorun::Autorun(const std::shared_ptr<SyclQueue>& device, const AutorunProgram& program, Seconds patience)
    : name_(program.name), device_(device->name()), patience_(patience), parts_(std::make_unique<Parts>()) {
  std::vector<std::string> names = program.stages;
  names.insert(names.end(), program.bridges.begin(), program.bridges.end());
  const auto kernels = device->compile_own(program.name, program.text, names);
  const auto kernel_of = [&](const std::string& name) {
    return static_cast<const SyclKernel&>((*kernels)[name]).kernel;
  };
  const auto tasks = [&](const std::vector<std::string>& of) {
    std::vector<Task> made;
    for (const std::string& name : of)
      made.push_back({name.substr(program.prefix.size()), device->sibling(), kernel_of(name), {}, false});
    return made;
  };
  parts_->stages = tasks(program.stages);
  parts_->bridges = tasks(program.bridges);
  const std::lock_guard lock(WaitingForFpga::mutex());
  require_room(device->kernels_at_once());
  running_stages += parts_->stages.size();
  try {
    for (Task& stage : parts_->stages) {
      stage.event = stage.queue->launch_task(stage.kernel);
      stage.launched = true;
    }
    wait_until(parts_->stages, State::running, patience_, "did not start", kTooMany);
  } catch (...) {
    static_cast<void>(parts_.release());
    throw;
  }
}

void Autorun::require_room(std::size_t most) const {
  const std::size_t stages = parts_->stages.size(), bridges = parts_->bridges.size(), others = running_stages;
  if (most == 0 || others + stages + bridges <= most) return;
  std::ostringstream text;
  text << "The pipeline " << name_ << " does not fit on " << device_ << ", which runs " << most
       << " kernels of a process at once: it needs " << stages << " for its stages and " << bridges
       << " to move data; stages of other pipelines take " << others << ". " << kTooMany;
  throw DeviceError(text.str());
}

Autorun::~Autorun() {
  if (!joined_) static_cast<void>(parts_.release());  // freeing them would wait for stages that still run
}

void Autorun::require_sound() const {
  if (stalled()) throw DeviceError(failure_);
}

void Autorun::wait_until(const std::vector<Task>& tasks, State wanted, Seconds limit, const char* what,
                         const char* advice) {
  const auto end = std::chrono::steady_clock::now() + limit;
  auto nap = kShortestNap;
  const auto reached = [&](const Task& task) {
    if (!task.launched) return true;
    const State now = state(task);
    if (now == State::failed) fail("failed", kLost);
    return now >= wanted;
  };
  try {
    while (!std::all_of(tasks.begin(), tasks.end(), reached)) {
      if (std::chrono::steady_clock::now() > end) {
        std::ostringstream text;
        text << what << " within " << limit.count() << " s";
        fail(text.str(), advice);
      }
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  } catch (const sycl::exception& error) {
    fail(std::string("failed (") + error.what() + ")", kLost);
  }
}

void Autorun::fail(const std::string& what, const char* advice) {
  failure_ = "The pipeline " + name_ + " on " + device_ + " " + what + ": ";
  try {
    failure_ += describe(parts_->bridges);
    const std::string stages = describe(parts_->stages);
    failure_ += (failure_.ends_with(": ") ? "" : "; ") + stages;
  } catch (const sycl::exception&) {
    failure_ += "the device does not answer";
  }
  failure_ += std::string(". ") + advice;
  throw DeviceError(failure_);
}

void Autorun::wait(std::uint64_t items) {
  require_sound();
  wait_until(parts_->bridges, State::ended, patience_ + kSecondsPerItem * static_cast<double>(items),
             "stalled: it did not answer", kStalled);
  for (Task& bridge : parts_->bridges) bridge.launched = false;
}

void Autorun::join() {
  if (joined_) return;
  require_sound();
  wait_until(parts_->stages, State::ended, patience_, "was told to stop and did not", kStalled);
  joined_ = true;
  running_stages -= parts_->stages.size();
}

std::uint64_t Autorun::launches(const std::vector<Task>& tasks) {
  std::uint64_t launches = 0;
  for (const Task& task : tasks) launches += task.queue->launches();
  return launches;
}

}  // namespace pearl::device
