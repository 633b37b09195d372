// Autorun kernels: single tasks that are launched once, are joined by pipes, and serve requests until told to stop.
//
// A host must never use the runtime's own waits for such a program: the emulator may run one of its endless kernels on
// the waiting thread. All waits here poll the state of events, and time out.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autorun_program.hpp"
#include "sycl_queue.hpp"

namespace pearl::device {

// For one thread at a time.
class Autorun {
 public:
  // Compiles the program and launches its stages. `patience` is the timeout of each wait. Throws DeviceError where the
  // program does not compile, or where the device does not run all stages at once.
  Autorun(const std::shared_ptr<SyclQueue>& device, const AutorunProgram& program,
          std::chrono::duration<double> patience);
  // Leaks stages that still run: first tell them to stop, then join().
  ~Autorun();
  Autorun(const Autorun&) = delete;
  Autorun& operator=(const Autorun&) = delete;

  // Launches a bridge, by its index in the program, on its own queue. Throws as wait().
  template <class... Arguments>
  void launch(std::size_t bridge, Arguments... arguments) {
    require_sound();
    Task& task = parts_->bridges[bridge];
    try {
      task.event = task.queue->launch_task(task.kernel, arguments...);
    } catch (const DeviceError& error) {
      failure_ = error.what();  // the bridges launched before wait for this one forever
      throw;
    }
    task.launched = true;
  }
  // Waits until all launched bridges have ended; more `items` get more time. Throws DeviceError naming the kernels that
  // hang or have failed; from then on the program is stalled.
  void wait(std::uint64_t items);
  // Waits until all stages have ended; the caller has told them to stop. Throws as wait().
  void join();

  // Whether a kernel failed or did not end in time. Kernels may still use their arguments, which must not be freed.
  bool stalled() const { return !failure_.empty(); }
  // Throws again the error of the stall, if there was one.
  void require_sound() const;
  // Kernels launched so far.
  std::uint64_t stage_launches() const { return launches(parts_->stages); }
  std::uint64_t bridge_launches() const { return launches(parts_->bridges); }

 private:
  struct Task {
    std::string name;
    std::unique_ptr<SyclQueue> queue;
    sycl::kernel kernel;
    sycl::event event;
    bool launched = false;
  };
  struct Parts {
    std::vector<Task> stages;
    std::vector<Task> bridges;
  };
  enum class State { waiting, running, ended, failed };

  // Throws DeviceError if the device, which runs `most` kernels at once (0: any number), has too few left. Stages that
  // wait for one would stall all pipelines.
  void require_room(std::size_t most) const;

  static State state(const Task& task);
  static std::string describe(const std::vector<Task>& tasks);
  static std::uint64_t launches(const std::vector<Task>& tasks);
  // Waits until every launched task has at least the state `wanted`.
  void wait_until(const std::vector<Task>& tasks, State wanted, std::chrono::duration<double> limit, const char* what,
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
