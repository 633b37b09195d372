// Setting 2 on one FPGA: the Replay Manager's answers stream to the Learner, and its priorities back, without the host
// (PEARL Sec. IV-A): LAQ and LDQ are pipes.
#pragma once

#include "pearl/fpga_learner.hpp"
#include "pearl/fpga_replay.hpp"

#if defined(__SYCL_DEVICE_ONLY__) || defined(PEARL_AHEAD_OF_TIME)

namespace pearl::fpga {

// The interface of a Learner (up to `rows` rows per batch) to `feed` and `collect`.
template <std::uint32_t rows, class Pipelines, class Answers>
struct TrainingLearner {
  static void begin(const LearnerContext* context) { Pipelines::begin(context); }
  static void send(const LearnerContext* context, std::uint64_t row, std::uint32_t slot, std::uint32_t generation) {
    Detail place{};
    place.slot = slot;
    place.generation = generation;
    Pipelines::send(context, row, slot, place);
  }
  static void weigh(std::uint64_t row, float importance) { Pipelines::weigh(row, importance); }
  static void stop() { Pipelines::stop(); }

  // If a priority is invalid or does not fit the tree's scale, slots are only read, and the host does the update.
  template <class Out>
  static void update(const Command& command, LearnerContext* context) {
    Result results[rows];  // with epsilon
    float loss = 0.0f, td_error = 0.0f, largest = 0.0f;
    bool sound = true;
    for (std::uint32_t row = 0; row < context->batch; ++row) {
      Result result = Answers::read(row);
      context->priorities[row] = result.priority;
      loss += result.loss;
      td_error += result.priority;
      sound = sound && std::bit_cast<std::uint32_t>(result.priority) < kInfinityBits;
      result.priority = raised(result.priority, command.epsilon);
      results[row] = result;
      largest = result.priority > largest ? result.priority : largest;
    }
    context->loss = loss;
    context->td_error = td_error;
    const bool fits = sound && (largest == 0.0f || excess_bits(largest, command.alpha_q28, command.scale) == 0);
    context->unfit = !fits;
    for (std::uint32_t row = 0; row < context->batch; ++row) {
      Request request{};
      request.operation = fits ? Operation::update : Operation::retrieve;
      request.checked = true;
      request.last = row + 1 == context->batch;
      request.slot = results[row].slot;
      request.generation = results[row].generation;
      request.priority = std::bit_cast<std::uint32_t>(results[row].priority);
      if (fits) request.value = quantise(results[row].priority, command.alpha_q28, command.scale);
      Out::write(request);
    }
  }
};

}  // namespace pearl::fpga

#endif
