#include "pearl/learner/dqn.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "pearl/errors.hpp"

namespace pearl::learner {
namespace {

const std::int64_t* actions_of(const Batch& batch) { return static_cast<const std::int64_t*>(batch.actions); }

// The action with the largest value in a panel's column: the first of equals; NaN counts as largest, as in torch.
std::size_t best_action(const float* values, std::size_t actions, std::size_t panel) {
  std::size_t best = 0;
  for (std::size_t a = 1; a < actions; ++a) {
    const float value = values[a * panel], leader = values[best * panel];
    if (value > leader || (std::isnan(value) && !std::isnan(leader))) best = a;
  }
  return best;
}

// Sets the values in a panel's first `count` columns to -infinity where masks (count, actions) forbid the action.
void forbid(const std::uint8_t* masks, std::size_t actions, std::size_t count, std::size_t panel, float* values) {
  for (std::size_t a = 0; a < actions; ++a)
    for (std::size_t c = 0; c < count; ++c)
      if (masks[c * actions + a] == 0) values[a * panel + c] = -std::numeric_limits<float>::infinity();
}

}  // namespace

DqnWorker::DqnWorker(const Network& network, std::size_t panels, std::size_t quantiles)
    : training(network, panels, true),
      next(network, panels, false),
      next_values(panels * network.output_width() * network.kernels().panel) {
  if (quantiles == 0) return;
  const std::size_t panel = network.kernels().panel;
  means = AlignedArray<float>(network.output_width() / quantiles * panel);
  for (AlignedArray<float>* array : {&taken, &targets, &slopes}) *array = AlignedArray<float>(quantiles * panel);
  sums = AlignedArray<float>(2 * panel);
}

DqnLearner::DqnLearner(const Network& network, float* online, float* target, std::size_t threads, std::size_t quantiles)
    : TeamLearner(network.kernels(), threads),
      network_(network),
      online_(online),
      target_(target),
      quantiles_(quantiles),
      gradients_(threads, network.parameters()) {
  if (quantiles > 0 && network.output_width() % quantiles != 0)
    throw LearnerError("A network must give " + std::to_string(quantiles) + " quantiles of each action; found " +
                       std::to_string(network.output_width()) + " outputs.");
  for (std::size_t worker = 0; worker < threads; ++worker)
    workers_.push_back(std::make_unique<DqnWorker>(network, network.group_panels(), quantiles));
}

StepMetrics DqnLearner::step(const Batch& batch, std::uint64_t step, Optimizer& optimizer, float* priorities,
                             const PrioritiesKnown& known) {
  const std::size_t actions = this->actions();
  for (std::size_t i = 0; i < batch.rows; ++i)
    if (actions_of(batch)[i] < 0 || actions_of(batch)[i] >= static_cast<std::int64_t>(actions))
      throw LearnerError("Actions must lie in [0, " + std::to_string(actions) + "); found " +
                         std::to_string(actions_of(batch)[i]) + " at position " + std::to_string(i) + " of the batch.");
  if (resizes(batch.rows)) {
    for (const auto& worker : workers_) {
      worker->training.clear();
      worker->next.clear();
    }
  }

  const Shares shares(batch.rows, team_.size(), network_.grain());
  Outcome outcome;
  writing_.store(team_.size(), std::memory_order_relaxed);
  auto work = [&](std::size_t index) {
    DqnWorker& worker = *workers_[index];
    worker.loss = worker.td_error = 0.0;
    if (index < shares.used)
      train(worker, batch, shares.begin(index), shares.end(index), gradients_.of(index), priorities, known);
    else
      priorities_written(known);
    if (!apply(index, gradients_, shares.used, &DqnWorker::loss, optimizer, settings_.max_grad_norm, online_, outcome))
      return;
    const std::size_t begin = gradients_.begin(index), end = gradients_.end(index);
    if (settings_.tau < 1.0)
      kernels_.move_toward(online_ + begin, static_cast<float>(settings_.tau), target_ + begin, end - begin);
    else if (step % settings_.target_update_interval == 0)
      std::copy(online_ + begin, online_ + end, target_ + begin);
  };
  team_.run(work);

  if (!outcome.finite()) diverged("", outcome, "The weights were left as they were.");
  optimizer.commit();
  return metrics(outcome, batch.rows);
}

void DqnLearner::train(DqnWorker& worker, const Batch& batch, std::size_t begin, std::size_t end, float* gradients,
                       float* priorities, const PrioritiesKnown& known) {
  const std::size_t panel = kernels_.panel, group = network_.group_panels() * panel;
  const auto row_of = [&](const void* rows, std::size_t row) {
    return static_cast<const char*>(rows) + row * network_.input_bytes();
  };
  const std::size_t last_columns = network_.last_columns(end - begin, group);
  for (std::size_t first = begin; first < end; first += group) {
    const std::size_t last = std::min(end, first + group), panels = (last - first + panel - 1) / panel;
    const auto count_in = [&](std::size_t p) { return std::min(panel, last - first - p * panel); };
    // One network after the other, so that each network's weights stay in cache.
    for (std::size_t p = 0; p < panels; ++p)
      network_.load(row_of(batch.next_obs, first + p * panel), count_in(p), worker.next, p);
    evaluate_next(worker, panels, last - first, last_columns);
    if (settings_.double_q) network_.forward(online_, worker.next, panels, last - first, last_columns);
    for (std::size_t p = 0; p < panels; ++p)
      network_.load(row_of(batch.obs, first + p * panel), count_in(p), worker.training, p);
    network_.forward(online_, worker.training, panels, last - first, last_columns);
    for (std::size_t p = 0; p < panels; ++p) {
      if (quantiles_ > 0)
        differentiate_quantiles(worker, batch, first + p * panel, p, count_in(p), priorities);
      else
        differentiate(worker, batch, first + p * panel, p, count_in(p), priorities);
    }
    if (last == end) priorities_written(known);
    network_.backward(online_, gradients, worker.training, panels, last - first, last_columns, first != begin, 0);
  }
}

void DqnLearner::evaluate_next(DqnWorker& worker, std::size_t panels, std::size_t count, std::size_t last_columns) {
  network_.forward(target_, worker.next, panels, count, last_columns);
  const std::size_t floats = network_.output_width() * kernels_.panel * panels;
  std::copy_n(worker.next.value(network_.output(), 0), floats, worker.next_values.data());
}

void DqnLearner::differentiate(DqnWorker& worker, const Batch& batch, std::size_t begin, std::size_t panel,
                               std::size_t count, float* priorities) {
  const std::size_t size = kernels_.panel, actions = network_.output_width();
  const float* values = worker.training.value(network_.output(), panel);
  const float* judged = worker.next_values.data() + panel * actions * size;
  // Of the online network in double Q-learning, else of the target network: then the same as `judged`.
  float* choosing = worker.next.value(network_.output(), panel);
  if (batch.next_masks != nullptr) forbid(batch.next_masks + begin * actions, actions, count, size, choosing);
  float* slopes = worker.training.gradient(network_.output(), panel);
  std::fill(slopes, slopes + actions * size, 0.0f);
  const float rows = static_cast<float>(batch.rows);
  for (std::size_t c = 0; c < count; ++c) {
    const std::size_t i = begin + c;
    const float next = judged[best_action(choosing + c, actions, size) * size + c];
    const float target = batch.rewards[i] + batch.discounts[i] * next;
    const std::size_t at = static_cast<std::size_t>(actions_of(batch)[i]) * size + c;
    const float error = values[at] - target, distance = std::fabs(error);
    const float share = batch.weights[i] / rows;
    float loss = 0.0f;
    if (settings_.loss == Loss::mse) {
      loss = error * error;
      slopes[at] = 2.0f * error * share;
    } else if (distance < 1.0f) {
      loss = 0.5f * error * error;
      slopes[at] = error * share;
    } else {
      loss = distance - 0.5f;
      // A NaN stays a NaN.
      slopes[at] = error > 0.0f ? share : error < 0.0f ? -share : error;
    }
    worker.loss += static_cast<double>(batch.weights[i] * loss);
    worker.td_error += static_cast<double>(distance);
    priorities[i] = distance;
  }
}

void DqnLearner::differentiate_quantiles(DqnWorker& worker, const Batch& batch, std::size_t begin, std::size_t panel,
                                         std::size_t count, float* priorities) {
  const std::size_t size = kernels_.panel, actions = this->actions(), of_action = quantiles_ * size;
  const float* const values = worker.training.value(network_.output(), panel);
  const float* const judged = worker.next_values.data() + panel * actions * of_action;
  const float* const choosing = worker.next.value(network_.output(), panel);
  float *const means = worker.means.data(), *const taken = worker.taken.data(), *const targets = worker.targets.data();
  for (std::size_t a = 0; a < actions; ++a)
    kernels_.sum_features(choosing + a * of_action, quantiles_, means + a * size);
  if (batch.next_masks != nullptr) forbid(batch.next_masks + begin * actions, actions, count, size, means);
  // Behind the last transition, zeros: their losses and slopes are zeros too.
  if (count < size) {
    std::fill_n(taken, of_action, 0.0f);
    std::fill_n(targets, of_action, 0.0f);
  }
  for (std::size_t c = 0; c < count; ++c) {
    const float* const next = judged + best_action(means + c, actions, size) * of_action + c;
    const float* const own = values + static_cast<std::size_t>(actions_of(batch)[begin + c]) * of_action + c;
    const float reward = batch.rewards[begin + c], discount = batch.discounts[begin + c];
    for (std::size_t q = 0; q < of_action; q += size) {
      taken[q + c] = own[q];
      targets[q + c] = reward + discount * next[q];
    }
  }
  float *const losses = worker.sums.data(), *const errors = losses + size;
  kernels_.sum_features(taken, quantiles_, losses);
  kernels_.sum_features(targets, quantiles_, errors);
  for (std::size_t c = 0; c < count; ++c) {
    const float distance = std::fabs(losses[c] - errors[c]) / static_cast<float>(quantiles_);
    worker.td_error += static_cast<double>(distance);
    priorities[begin + c] = distance;
  }
  kernels_.quantile_regression({quantiles_, quantiles_, taken, targets, losses, worker.slopes.data()});
  float* const slopes = worker.training.gradient(network_.output(), panel);
  std::fill_n(slopes, actions * of_action, 0.0f);
  for (std::size_t c = 0; c < count; ++c) {
    const float weight = batch.weights[begin + c], share = weight / static_cast<float>(batch.rows);
    float* const own = slopes + static_cast<std::size_t>(actions_of(batch)[begin + c]) * of_action + c;
    for (std::size_t q = 0; q < of_action; q += size) own[q] = share * worker.slopes.data()[q + c];
    worker.loss += static_cast<double>(weight * losses[c]);
  }
}

std::vector<std::size_t> DqnAlgorithm::item_bytes() const {
  const std::size_t obs = learner_.network().input_bytes();
  std::vector<std::size_t> bytes = {obs, sizeof(std::int64_t), sizeof(float), obs, sizeof(float)};
  if (masked_) bytes.push_back(learner_.actions());
  return bytes;
}

StepMetrics DqnAlgorithm::step(const Batch& batch, float* priorities, const PrioritiesKnown& known) {
  const auto number = static_cast<std::uint64_t>(*steps_ + 1);
  const StepMetrics metrics = learner_.step(batch, number, optimizer_, priorities, known);
  ++*steps_;
  return metrics;
}

}  // namespace pearl::learner
