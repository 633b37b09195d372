#include "autorun.hpp"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <thread>

namespace pearl::device {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kSecondsPerItem{1e-3};
constexpr const char* kAnew =
    "What it held is lost. Make it anew, with a longer timeout where the machine is busy; if it stalls again, end the "
    "process, which frees the device.";
constexpr const char* kGone =
    "What it held is lost. If the device has disappeared or was reset, start again; `pearl devices` lists what can be "
    "used.";
constexpr const char* kRoom =
    "All stages must run at once. Close other pipelines, or make one of fewer stages (a larger fanout). The emulator "
    "runs 31 kernels at once, or 160 after `pearl devices --setup-fpga-emulator`.";
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};

// Stages must all be running before any thread of this process waits for the device.
std::mutex& starting() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

Autorun::State Autorun::state(const Task& task) {
  using Status = sycl::info::event_command_status;
  switch (task.event.get_info<sycl::info::event::command_execution_status>()) {
    case Status::submitted: return State::waiting;
    case Status::running: return State::running;
    case Status::complete: return State::ended;
    default: return State::failed;  // the runtime gives an error's number, which its enumeration lacks
  }
}

std::string Autorun::told(const std::vector<Task>& tasks) {
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

Autorun::Autorun(const std::shared_ptr<DeviceQueue>& device, const AutorunProgram& program, Seconds patience)
    : name_(program.name), device_(device->name()), patience_(patience), parts_(std::make_unique<Parts>()) {
  std::vector<KernelNeeds> needs;
  for (const auto* names : {&program.stages, &program.bridges})
    for (const std::string& name : *names) needs.push_back({name.c_str(), {}});
  const auto kernels = device->compile_own(program.name, program.text, needs);
  const auto tasks = [&](const std::vector<std::string>& names) {
    std::vector<Task> made;
    for (const std::string& name : names)
      made.push_back({name.substr(program.prefix.size()), device->sibling(), (*kernels)[name.c_str()], {}, false});
    return made;
  };
  parts_->stages = tasks(program.stages);
  parts_->bridges = tasks(program.bridges);
  const std::lock_guard lock(starting());
  try {
    for (Task& stage : parts_->stages) {
      stage.event = stage.queue->launch_task(stage.kernel);
      stage.launched = true;
    }
    until(parts_->stages, State::running, patience_, "did not start", kRoom);
  } catch (...) {
    static_cast<void>(parts_.release());
    throw;
  }
}

Autorun::~Autorun() {
  if (!joined_) static_cast<void>(parts_.release());  // the runtime would wait for what still runs
}

void Autorun::require_sound() const {
  if (stalled()) throw DeviceError(failure_);
}

void Autorun::until(const std::vector<Task>& tasks, State wanted, Seconds limit, const char* what,
                    const char* advice) {
  const auto end = std::chrono::steady_clock::now() + limit;
  auto nap = kShortestNap;
  const auto there = [&](const Task& task) {
    if (!task.launched) return true;
    const State now = state(task);
    if (now == State::failed) fail("failed", kGone);
    return now >= wanted;
  };
  try {
    while (!std::all_of(tasks.begin(), tasks.end(), there)) {
      if (std::chrono::steady_clock::now() > end) {
        std::ostringstream text;
        text << what << " within " << limit.count() << " s";
        fail(text.str(), advice);
      }
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  } catch (const sycl::exception& error) {
    fail(std::string("failed (") + error.what() + ")", kGone);
  }
}

void Autorun::fail(const std::string& what, const char* advice) {
  failure_ = "The pipeline " + name_ + " on " + device_ + " " + what + ": ";
  try {
    failure_ += told(parts_->bridges);
    const std::string stages = told(parts_->stages);
    failure_ += (failure_.ends_with(": ") ? "" : "; ") + stages;
  } catch (const sycl::exception&) {
    failure_ += "the device does not answer";
  }
  failure_ += std::string(". ") + advice;
  throw DeviceError(failure_);
}

void Autorun::wait(std::uint64_t items) {
  require_sound();
  until(parts_->bridges, State::ended, patience_ + kSecondsPerItem * static_cast<double>(items),
        "stalled: it did not answer", kAnew);
  for (Task& bridge : parts_->bridges) bridge.launched = false;
}

void Autorun::join() {
  if (joined_) return;
  require_sound();
  until(parts_->stages, State::ended, patience_, "was told to stop and did not", kAnew);
  joined_ = true;
}

std::uint64_t Autorun::stage_launches() const {
  std::uint64_t launches = 0;
  for (const Task& stage : parts_->stages) launches += stage.queue->launches();
  return launches;
}

std::uint64_t Autorun::bridge_launches() const {
  std::uint64_t launches = 0;
  for (const Task& bridge : parts_->bridges) launches += bridge.queue->launches();
  return launches;
}

}  // namespace pearl::device
