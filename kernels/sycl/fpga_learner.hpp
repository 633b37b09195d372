// The Learner on an FPGA: an autorun pipeline (pearl/fpga_learner.hpp), alone (setting 1), or joined by pipes to the
// Replay Manager (setting 2).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autorun.hpp"
#include "column_store.hpp"
#include "fpga_learner_program.hpp"
#include "fpga_replay.hpp"
#include "learner.hpp"
#include "pearl/fpga_learner.hpp"

namespace pearl::device {

// How a pipeline is cut: DP copies (0: 2; in any case no more than run side by side), and multiply-accumulates of a
// stage at once.
struct PipelineCut {
  int copies = 0;
  std::vector<std::vector<int>> unroll = {{16}};  // of each network and layer; one for all where there is one
  double timeout_s = 120.0;
};

// Trains as DeviceLearner does, with the lagged critic of CF'22 Sec. 3.2.4: an actor learns from the critic's weights
// of before the step. Its program is generated when the size of a batch is known, and anew where that or the optimizer's
// rule changes. One thread.
class FpgaLearner {
 public:
  // Throws LearnerError for networks that are no chains, or of more layers than run at once.
  FpgaLearner(const std::shared_ptr<DeviceQueue>& queue, LearnerModel model, PipelineCut cut);
  // Stops the stages.
  ~FpgaLearner();

  void set(const LearnerSettings& settings) { settings_ = settings; }
  void set_optimizer(LearnerWhich which, const OptimizerSettings& settings);
  void set_batch(std::size_t rows, const DeviceBatch& batch);
  DeviceBatch own_batch(std::size_t rows);
  // One step, the `step`-th of all, from 0; finish() waits for it. Throws DeviceError where the pipeline stalls.
  void launch(std::int64_t step);
  LearnerMetrics finish();
  // May be repeated; throws DeviceError where stages do not stop.
  void close();

  // From now on the Learner is a part of the Replay Manager's program, which stops it; steps are those of train().
  void join(const std::shared_ptr<FpgaReplay>& replay, const std::shared_ptr<ColumnStore>& storage, std::size_t rows);
  // Sample, train and update once.
  LearnerMetrics train(std::int64_t step, double beta);

  std::size_t observation_size() const { return model_.observation_size; }
  std::size_t action_bytes() const;
  int copies() const { return shape_.copies; }
  std::uint64_t stage_launches() const { return autorun_ ? autorun_->stage_launches() : 0; }
  std::uint64_t bridge_launches() const { return autorun_ ? autorun_->bridge_launches() : 0; }
  // The program for batches of `rows`.
  std::string source(std::uint32_t rows) const;

 private:
  void require_sound() const;
  void prepare(std::int64_t step);
  // What the settings and optimizers of now need.
  LearnerShape shape_for(std::size_t rows) const;

  const std::shared_ptr<DeviceQueue> queue_;
  const LearnerModel model_;
  const PipelineCut cut_;
  LearnerShape shape_;
  LearnerSettings settings_;
  OptimizerSettings optimizers_[3];
  bool trains_[3] = {};  // whether there is such an optimizer
  // What stages read and write. Not freed where they stand still.
  struct Memory {
    DeviceArray<fpga::LearnerContext> context;
    DeviceArray<float> scales;
    OwnBatch own;
    DeviceArray<float> priorities;  // joined
    std::shared_ptr<ColumnStore> storage;
  };
  fpga::LearnerContext& context() const { return memory_->context[0]; }

  std::unique_ptr<Memory> memory_;
  std::shared_ptr<Autorun> autorun_;
  std::string failure_;                 // why stages did not start; some may stand still for good
  std::shared_ptr<FpgaReplay> replay_;  // joined
  std::size_t rows_ = 0;
  bool moves_policy_ = false;
};

}  // namespace pearl::device
