// Autorun kernels: programs of single tasks that are launched once, are joined by pipes, and serve what is fed to them
// until they are told to stop.
//
// A host must never wait for such a program by the runtime's own waits: on the emulator the waiting thread may be given
// one of its endless kernels to run. All waits here ask for the state of events, and give up after a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autorun_program.hpp"
#include "device_queue.hpp"

namespace pearl::device {

// Not safe from more than one thread at a time.
class Autorun {
 public:
  // Compiles the program and launches its stages. `patience` is how long nothing may happen before that is an error.
  // Throws DeviceError where it does not compile, or where the device does not run all stages at once.
  Autorun(const std::shared_ptr<DeviceQueue>& device, const AutorunProgram& program,
          std::chrono::duration<double> patience);
  // Leaves stages that still run to the end of the process: first have them stop, then join().
  ~Autorun();
  Autorun(const Autorun&) = delete;
  Autorun& operator=(const Autorun&) = delete;

  // Launches a bridge, by its place in the program, with a queue of its own. Throws as wait().
  template <class... Arguments>
  void launch(std::size_t bridge, Arguments... arguments) {
    require_sound();
    Task& task = parts_->bridges[bridge];
    try {
      task.event = task.queue->launch_task(task.kernel, arguments...);
    } catch (const DeviceError& error) {
      failure_ = error.what();  // bridges that were launched before wait for this one
      throw;
    }
    task.launched = true;
  }
  // Until all bridges that were launched have ended. A bridge that handles many items is given more time. Throws
  // DeviceError naming what stands still or has failed; then, and ever after, the program is stalled.
  void wait(std::uint64_t items);
  // Until all stages have ended, which whoever feeds them has told them to. Throws as wait().
  void join();

  // Whether something failed or did not end in time: kernels may hold on to their arguments, which then must not be
  // freed.
  bool stalled() const { return !failure_.empty(); }
  // Throws what was thrown when the program stalled.
  void require_sound() const;
  // Kernels launched so far.
  std::uint64_t stage_launches() const;
  std::uint64_t bridge_launches() const;

 private:
  struct Task {
    std::string name;
    std::unique_ptr<DeviceQueue> queue;
    sycl::kernel kernel;
    sycl::event event;
    bool launched = false;
  };
  struct Parts {
    std::vector<Task> stages;
    std::vector<Task> bridges;
  };
  enum class State { waiting, running, ended, failed };

  static State state(const Task& task);
  static std::string told(const std::vector<Task>& tasks);
  // Until every task that was launched is at least at `wanted`.
  void until(const std::vector<Task>& tasks, State wanted, std::chrono::duration<double> limit, const char* what,
             const char* advice);
  [[noreturn]] void fail(const std::string& what, const char* advice);

  const std::string name_;
  const std::string device_;
  const std::chrono::duration<double> patience_;
  std::string failure_;
  bool joined_ = false;
  std::unique_ptr<Parts> parts_;
};

}  // namespace pearl::device
