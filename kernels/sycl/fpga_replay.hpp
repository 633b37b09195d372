// The Replay Manager on an FPGA: an autorun pipeline with a stage for each level of the sum tree
// (pearl/fpga_replay.hpp). It equals the CPU's (pearl/sum_tree_replay.hpp) bit for bit.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "autorun.hpp"
#include "fpga_program.hpp"
#include "pearl/fpga_learner.hpp"
#include "pearl/fpga_replay.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace pearl::device {

// Priorities, generations and counts of samples are on the device only. The host keeps one bit per slot (whether it was
// written) and running totals of the answers. With these it checks each request before sending it.
//
// Every method is thread-safe, waits for its answer, and throws DeviceError on a timeout. After one, every request
// throws.
class FpgaReplay {
 public:
  FpgaReplay(const std::shared_ptr<SyclQueue>& queue, std::int64_t capacity, unsigned fanout, double alpha,
             std::uint64_t seed, bool stratified, float initial_priority, float priority_epsilon,
             std::chrono::duration<double> patience);
  ~FpgaReplay();

  // As in pearl::SumTreeReplay, for draws with replacement in proportion to priorities.
  void insert(const std::int64_t* indices, const float* priorities, std::size_t count);
  void sample(std::size_t count, double beta, std::int64_t* indices, float* weights, std::uint32_t* generations);
  std::size_t update(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                     std::size_t count);
  void retrieve(const std::int64_t* indices, float* priorities, std::size_t count);
  void set_alpha(double alpha);
  ReplayState state() const;
  ReplayStatistics statistics() const;
  ReplayState save(float* priorities, std::uint32_t* generations, std::uint32_t* leaves, std::uint16_t* times,
                   std::vector<std::int64_t>* order) const;
  void load(const ReplayState& state, const float* priorities, const std::uint32_t* generations,
            const std::uint32_t* leaves, const std::uint16_t* times, const std::int64_t* order,
            std::size_t order_count);
  // Stops the stages. Throws DeviceError where they do not stop.
  void close();

  // Moves the tree into `program`, a training_program(), which this launches with all the current data.
  std::shared_ptr<Autorun> join(const AutorunProgram& program);
  // Samples, lets the Learner train with `context`, and applies its priorities, all through pipes. Afterwards last_slot
  // and last_weights describe the batch, and the context has its priorities.
  void train(std::size_t count, double beta, fpga::LearnerContext* context);
  std::size_t last_slot(std::size_t row) const { return last_.slots[row]; }
  const std::vector<std::uint32_t>& last_slots() const { return last_.slots; }
  const std::vector<float>& last_weights() const { return last_.weights; }

  std::size_t capacity() const { return shape_.capacity; }
  bool prioritized() const { return true; }
  const TreeShape& shape() const { return shape_; }
  // Kernels launched: stages once, bridges for each request.
  std::uint64_t stage_launches() const { return autorun_->stage_launches(); }
  std::uint64_t bridge_launches() const { return autorun_->bridge_launches(); }

 private:
  // The host memory that kernels read and write, for `count` items.
  struct Staging {
    Staging(SyclQueue& queue, std::size_t count);
    DeviceArray<fpga::Command> command;  // two, for train(): sample and update
    DeviceArray<fpga::Summary> summary;
    DeviceArray<fpga::Item> items;
    DeviceArray<fpga::Held> held;
    DeviceArray<float> weights;
  };

  void require_open() const;
  Staging& stage(std::size_t count) const;
  fpga::Command command(fpga::Operation operation, std::size_t count) const;
  // Sends a command for the staged items, and waits for its answers.
  fpga::Summary request(const fpga::Command& command) const;
  const fpga::Held* held_at(const std::int64_t* indices, std::size_t count) const;
  std::vector<fpga::Held> held(std::size_t count) const;
  void load_tree(std::vector<fpga::Held> slots);
  void fit_scale(float priority);
  void recover_scale();
  int highest_scale(const std::vector<fpga::Held>& slots) const;
  // Quantises the priorities of all slots to another scale.
  void set_scale(std::vector<fpga::Held> slots, int scale);
  float largest_fresh(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                      std::size_t count) const;
  void stage_visits(std::size_t count);
  void stop_stages();
  std::size_t update_locked(const std::int64_t* indices, const float* priorities, const std::uint32_t* generations,
                            std::size_t count);
  void sampled(std::size_t count);
  std::size_t updated(fpga::Summary done, std::size_t count);

  const std::shared_ptr<SyclQueue> queue_;
  const TreeShape shape_;
  const bool stratified_;
  const float initial_;
  const float epsilon_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  ReplayState progress_;
  std::uint64_t large_ = 0;  // the sum of large() of all leaves
  std::vector<bool> written_;
  std::size_t end_ = 0;  // one past the highest written slot
  struct {
    std::vector<std::uint32_t> slots;
    std::vector<float> weights;
    std::vector<std::uint32_t> generations;
    std::uint32_t inserts = 0;
  } last_;  // the last batch
  mutable std::unique_ptr<Staging> staging_;
  std::shared_ptr<Autorun> autorun_;
  const std::chrono::duration<double> patience_;
};

}  // namespace pearl::device
