// The Learner on an FPGA: an autorun pipeline (pearl/fpga_learner.hpp), alone (setting 1), or joined by pipes to the
// Replay Manager (setting 2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autorun.hpp"
#include "pearl/device/column_store.hpp"
#include "fpga_learner_program.hpp"
#include "fpga_replay.hpp"
#include "pearl/device/learner.hpp"
#include "pearl/fpga_learner.hpp"

namespace pearl::device {

// How a pipeline is divided: DP copies (0: 2; fewer where not all stages can run at once), and multiply-accumulates per
// stage.
struct PipelineCut {
  int copies = 0;
  std::vector<std::vector<int>> unroll = {{16}};  // of each network and layer; a single one is for all
  double timeout_s = 120.0;
};

// Trains as DeviceLearner does, with the lagged critic of CF'22 Sec. 3.2.4: an actor learns from the critic's weights
// before the step. The program is generated for the first batch, and again when the batch size grows or an optimizer's
// rule changes. For one thread.
class FpgaLearner {
 public:
  using Cut = PipelineCut;
  using Queue = SyclQueue;

  // Throws LearnerError for networks that are not chains, or have more layers than can run at once.
  FpgaLearner(const std::shared_ptr<SyclQueue>& queue, LearnerModel model, PipelineCut cut);
  // Stops the stages.
  ~FpgaLearner();

  void set(const LearnerSettings& settings) { settings_ = settings; }
  void set_optimizer(LearnerWhich which, const OptimizerSettings& settings);
  void set_batch(std::size_t rows, const DeviceBatch& batch);
  DeviceBatch own_batch(std::size_t rows);
  // Starts step number `step`, from 0; finish() waits for it. Throws DeviceError where the pipeline stalls.
  void launch_step(std::int64_t step);
  LearnerMetrics finish();
  // May be repeated; throws DeviceError where stages do not stop.
  void close();

  // Joins the Replay Manager's program, which also stops it; from then on train() does the steps.
  void join(const std::shared_ptr<FpgaReplay>& replay, const std::shared_ptr<ColumnStore>& storage, std::size_t rows);
  // Samples, trains and updates once.
  LearnerMetrics train(std::int64_t step, double beta);

  RowBytes row_bytes() const { return model_.row_bytes(); }
  int copies() const { return shape_.copies; }
  std::uint64_t stage_launches() const { return autorun_ ? autorun_->stage_launches() : 0; }
  std::uint64_t bridge_launches() const { return autorun_ ? autorun_->bridge_launches() : 0; }
  // The program for batches of `rows`.
  std::string source(std::uint32_t rows) const;

 private:
  void require_sound() const;
  void prepare(std::int64_t step);
  // The shape that the current settings and optimizers need.
  LearnerShape shape_for(std::size_t rows) const;

  const std::shared_ptr<SyclQueue> queue_;
  const LearnerModel model_;
  const PipelineCut cut_;
  LearnerShape shape_;
  LearnerSettings settings_;
  OptimizerSettings optimizers_[3];
  bool trains_[3] = {};  // which optimizers are set
  // The memory that stages read and write. Leaked where they hang.
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
  std::string failure_;                 // why stages did not start; some may hang forever
  std::shared_ptr<FpgaReplay> replay_;  // joined
  std::size_t rows_ = 0;
  bool moves_policy_ = false;
};

}  // namespace pearl::device
