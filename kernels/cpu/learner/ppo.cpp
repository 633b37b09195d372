#include "pearl/learner/ppo.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "pearl/errors.hpp"
#include "pearl/shuffle.hpp"

namespace pearl::learner {
namespace {

constexpr double kSmallest = 1e-8;  // added to the deviation of advantages
constexpr double kKlExcess = 1.5;   // training ends beyond so many times target_kl

// Of categorical parts.
const std::int64_t* actions_of(const Rollout& rollout) { return static_cast<const std::int64_t*>(rollout.actions); }

}  // namespace

PpoWorker::PpoWorker(const PolicyAndValue& networks, std::size_t panels)
    : policy(*networks.policy, panels, true), value(*networks.value, panels, true, &policy) {
  const std::size_t panel = networks.policy->kernels().panel;
  const ActionDistribution& distribution = networks.distribution;
  obs.resize(networks.policy->input_width() * panel);
  for (std::vector<float>* column : {&old_log_prob, &old_value, &target, &log_prob, &slope})
    column->resize(panel);
  log_sum.resize(distribution.sizes.size() * panel);
  part_entropy.resize(distribution.sizes.size() * panel);
  if (distribution.categorical()) return;
  action.resize(distribution.size * panel);
  inverse_deviation.resize(distribution.size);
  log_std_slope.resize(distribution.size);
}

PpoLearner::PpoLearner(const PolicyAndValue& networks, float* weights, std::size_t threads)
    : TeamLearner(networks.policy->kernels(), threads),
      networks_(networks),
      weights_(weights),
      gradients_(threads, networks.policy->parameters()),
      shared_(networks.policy->shares_parameters(*networks.value)) {
  networks_.check();
  for (std::size_t worker = 0; worker < threads; ++worker)
    workers_.push_back(std::make_unique<PpoWorker>(networks_, kGroup / kernels_.panel));
}

PpoMetrics PpoLearner::train(const Rollout& rollout, const PpoSchedule& schedule, Optimizer& optimizer,
                             std::int64_t* steps) {
  check(rollout, schedule);
  order_.resize(schedule.count);
  PpoMetrics metrics;
  std::size_t minibatches = 0;
  bool goes_on = true;
  while (goes_on && metrics.epochs < schedule.epochs) {
    ++metrics.epochs;
    for (std::size_t i = 0; i < schedule.count; ++i) order_[i] = schedule.row(i);
    shuffle(schedule.seed, static_cast<std::uint64_t>(*steps), order_.data(), schedule.count);
    for (std::size_t first = 0; goes_on && first < schedule.count; first += schedule.batch_size) {
      const std::size_t count = std::min(schedule.batch_size, schedule.count - first);
      ++minibatches;
      goes_on = step({rollout, order_.data() + first, count}, optimizer, metrics);
      if (!goes_on) break;
      ++metrics.steps;
      ++*steps;
    }
  }
  for (double* sum : {&metrics.policy_loss, &metrics.value_loss, &metrics.entropy, &metrics.approximate_kl,
                      &metrics.clip_fraction})
    *sum /= static_cast<double>(std::max<std::size_t>(minibatches, 1));
  metrics.gradient_norm /= static_cast<double>(std::max<std::size_t>(metrics.steps, 1));
  return metrics;
}

void PpoLearner::check(const Rollout& rollout, const PpoSchedule& schedule) const {
  const std::vector<std::size_t>& sizes = networks_.distribution.sizes;
  for (std::size_t i = 0; i < schedule.count; ++i) {
    const std::int64_t row = schedule.row(i);
    if (row < 0 || row >= static_cast<std::int64_t>(rollout.rows))
      throw LearnerError("Rows must lie in [0, " + std::to_string(rollout.rows) + "); found " + std::to_string(row) +
                         " at position " + std::to_string(i) + ".");
    for (std::size_t part = 0; part < sizes.size(); ++part) {
      const std::int64_t action = actions_of(rollout)[static_cast<std::size_t>(row) * sizes.size() + part];
      if (action < 0 || action >= static_cast<std::int64_t>(sizes[part]))
        throw LearnerError("Actions must lie in [0, " + std::to_string(sizes[part]) + "); found " +
                           std::to_string(action) + " in row " + std::to_string(row) + " of the rollout.");
    }
  }
}

// One step; false, and no step, if the divergence is too large.
bool PpoLearner::step(const Minibatch& batch, Optimizer& optimizer, PpoMetrics& sums) {
  if (resizes(batch.count))
    for (const auto& worker : workers_) {
      worker->policy.clear();
      worker->value.clear();
      worker->advantage.resize(batch.count + kernels_.panel);  // whole panels are read
    }
  const Shares shares(batch.count, team_.size(), kernels_.panel / 2);
  const auto rows = static_cast<double>(batch.count);
  const double limit = kKlExcess * settings_.target_kl;
  Outcome outcome;
  bool stops = false;
  auto work = [&](std::size_t index) {
    PpoWorker& worker = *workers_[index];
    prepare(worker, batch);
    if (index < shares.used)
      compute_gradients(worker, batch, shares.begin(index), shares.end(index), gradients_.of(index));
    if (settings_.target_kl > 0.0) {
      team_.barrier();
      if (sum(&PpoWorker::divergence) / rows > limit) {
        if (index == 0) stops = true;
        return;
      }
    }
    apply(index, gradients_, shares.used, &PpoWorker::loss, optimizer, settings_.max_grad_norm, weights_, outcome);
  };
  team_.run(work);

  if (!stops && !outcome.finite())
    diverged("", outcome, "The weights were left as the minibatch before had made them.");
  sums.policy_loss += sum(&PpoWorker::policy_loss) / rows;
  sums.value_loss += sum(&PpoWorker::value_loss) / rows;
  sums.entropy += sum(&PpoWorker::entropy) / rows;
  sums.approximate_kl += sum(&PpoWorker::divergence) / rows;
  sums.clip_fraction += sum(&PpoWorker::clipped) / rows;
  if (stops) return false;
  optimizer.commit();
  sums.gradient_norm += outcome.norm;
  return true;
}

// Clears the worker's sums, and computes the values that depend on all rows of the minibatch, such as the moments of
// its advantages. Every worker computes the same values.
void PpoLearner::prepare(PpoWorker& worker, const Minibatch& batch) const {
  static_cast<PpoSums&>(worker) = {};
  worker.loss = worker.entropy = 0.0;
  std::fill(worker.log_std_slope.begin(), worker.log_std_slope.end(), 0.0);
  for (std::size_t j = 0; j < worker.inverse_deviation.size(); ++j)
    worker.inverse_deviation[j] = std::exp(-weights_[static_cast<std::size_t>(networks_.distribution.log_std) + j]);
  float* const advantages = worker.advantage.data();
  double even = 0.0, odd = 0.0;  // In double: equal advantages have exactly their own mean. Two chains of additions.
  for (std::size_t i = 0; i < batch.count; ++i) {
    advantages[i] = batch.rollout.advantages[batch.rows[i]];
    (i % 2 == 0 ? even : odd) += static_cast<double>(advantages[i]);
  }
  if (!settings_.normalize_advantages) return;
  const double mean = (even + odd) / static_cast<double>(batch.count);
  double squares[2] = {};
  for (std::size_t i = 0; i < batch.count; ++i) {
    const double distance = static_cast<double>(advantages[i]) - mean;
    squares[i % 2] += distance * distance;
  }
  const double deviation =
      std::sqrt((squares[0] + squares[1]) / static_cast<double>(std::max<std::size_t>(batch.count, 2) - 1));
  const double scale = batch.count < 2 ? 0.0 : 1.0 / (deviation + kSmallest);
  for (std::size_t i = 0; i < batch.count; ++i)
    advantages[i] = static_cast<float>((static_cast<double>(advantages[i]) - mean) * scale);
}

void PpoLearner::compute_gradients(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t end,
                                   float* gradients) {
  const Network &policy = *networks_.policy, &value = *networks_.value;
  const std::size_t panel = kernels_.panel, last_columns = policy.last_columns(end - begin, kGroup);
  if (shared_) std::fill_n(gradients, policy.parameters(), 0.0f);
  for (std::size_t first = begin; first < end; first += kGroup) {
    const std::size_t last = std::min(end, first + kGroup), panels = (last - first + panel - 1) / panel;
    const auto count_in = [&](std::size_t p) { return std::min(panel, last - first - p * panel); };
    const bool accumulate = shared_ || first != begin;
    // One network after the other: the results of its forward pass are still in cache in its backward pass.
    for (std::size_t p = 0; p < panels; ++p) load(worker, batch, first + p * panel, p, count_in(p));
    policy.forward(weights_, worker.policy, panels, last - first, last_columns);
    for (std::size_t p = 0; p < panels; ++p) differentiate_policy(worker, batch, first + p * panel, p, count_in(p));
    policy.backward(weights_, gradients, worker.policy, panels, last - first, last_columns, accumulate, 0);
    for (std::size_t p = 0; p < panels; ++p) {
      const float* const loaded = worker.policy.value(0, p);
      float* const inputs = worker.value.value(0, p);
      if (inputs != loaded)  // they are the same if the networks have their memory in common
        std::copy_n(loaded, policy.input_width() * panel, inputs);
    }
    value.forward(weights_, worker.value, panels, last - first, last_columns);
    for (std::size_t p = 0; p < panels; ++p) differentiate_values(worker, batch, first + p * panel, p, count_in(p));
    value.backward(weights_, gradients, worker.value, panels, last - first, last_columns, accumulate, 0);
  }
  worker.loss = worker.policy_loss + settings_.value_coefficient * worker.value_loss -
                settings_.entropy_coefficient * worker.entropy;
  for (std::size_t j = 0; j < worker.log_std_slope.size(); ++j)
    gradients[static_cast<std::size_t>(networks_.distribution.log_std) + j] =
        static_cast<float>(worker.log_std_slope[j]);
}

// The observations of a panel.
void PpoLearner::load(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                      std::size_t count) const {
  const Network& policy = *networks_.policy;
  const std::size_t inputs = policy.input_width(), size = kernels_.panel;
  const std::int64_t* const rows = batch.rows + begin;
  const float* const obs = batch.rollout.obs;
  if (inputs <= kernels_.narrow) {
    float* const x = worker.policy.value(0, panel);
    if (count < size) std::fill_n(x, inputs * size, 0.0f);
    for (std::size_t c = 0; c < count; ++c) {
      const float* const from = obs + static_cast<std::size_t>(rows[c]) * inputs;
      for (std::size_t f = 0; f < inputs; ++f) x[f * size + c] = from[f];
    }
  } else {
    for (std::size_t c = 0; c < count; ++c)
      std::copy_n(obs + static_cast<std::size_t>(rows[c]) * inputs, inputs, worker.obs.data() + c * inputs);
    policy.load(worker.obs.data(), count, worker.policy, panel);
  }
}

// The loss of a minibatch of n rows is the mean of
//
//   -min(r A, clip(r) A)  +  value_coefficient * (v - R)^2  -  entropy_coefficient * H,    r = exp(log p - log p_old)
//
// with the probability p of the action, the advantage A, the value v, the return R and the entropy H. By the log
// probability, the first part has the derivative -r A, but 0 where clip(r) is the smaller product: where r > 1 + range
// and A > 0, or r < 1 - range and A < 0. With value clipping, the squared error is the larger one of v and of
// v_old + clip(v - v_old), whose derivative by v is 0 beyond the range. v_old is R - A unless the rollout states it.
void PpoLearner::differentiate_policy(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                                      std::size_t count) const {
  const bool categorical = networks_.distribution.categorical();
  const std::int64_t* const rows = batch.rows + begin;
  for (std::size_t c = 0; c < count; ++c) worker.old_log_prob[c] = batch.rollout.log_probs[rows[c]];
  if (categorical)
    evaluate_parts(worker, batch, begin, panel, count);
  else
    evaluate_normal(worker, batch, begin, panel, count);
  const PpoPolicyRows of_policy = {worker.log_prob.data(), worker.old_log_prob.data(), worker.advantage.data() + begin};
  kernels_.ppo.policy_slopes({share(batch), static_cast<float>(settings_.clip_range)}, of_policy, count,
                             worker.slope.data(), worker);
  if (categorical)
    part_slopes(worker, batch, begin, panel, count);
  else
    kernels_.ppo.normal_slopes(normal_rows(worker, panel), worker.slope.data(), count,
                               worker.policy.gradient(networks_.policy->output(), panel), worker.log_std_slope.data());
}

void PpoLearner::differentiate_values(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                                      std::size_t count) const {
  const std::int64_t* const rows = batch.rows + begin;
  for (std::size_t c = 0; c < count; ++c) {
    worker.target[c] = batch.rollout.returns[rows[c]];
    worker.old_value[c] = batch.rollout.values == nullptr ? worker.target[c] - batch.rollout.advantages[rows[c]]
                                                          : batch.rollout.values[rows[c]];
  }
  const std::size_t output = networks_.value->output();
  const PpoValueRows of_values = {worker.value.value(output, panel), worker.old_value.data(), worker.target.data()};
  const auto coefficient = static_cast<float>(settings_.value_coefficient);
  kernels_.ppo.value_slopes({coefficient * 2.0f * share(batch), static_cast<float>(settings_.value_clip_range)},
                            of_values, count, worker.value.gradient(output, panel), worker);
}

// Log probabilities and entropies of a panel; leaves the logits' probabilities in the place of their slopes.
void PpoLearner::evaluate_parts(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                                std::size_t count) const {
  const std::size_t size = kernels_.panel, parts = networks_.distribution.size;
  const std::int64_t* actions = actions_of(batch.rollout);
  float* logits = worker.policy.value(networks_.policy->output(), panel);
  if (batch.rollout.masks != nullptr) set_forbidden(batch, begin, count, kForbiddenLogit, logits);
  float* probabilities = worker.policy.gradient(networks_.policy->output(), panel);
  std::fill(worker.log_prob.begin(), worker.log_prob.end(), 0.0f);
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t choices = networks_.distribution.sizes[part];
    float* log_sums = worker.log_sum.data() + part * size;
    worker.entropy +=
        kernels_.ppo.softmax(logits, choices, count, probabilities, log_sums, worker.part_entropy.data() + part * size);
    for (std::size_t c = 0; c < count; ++c) {
      const auto row = static_cast<std::size_t>(batch.rows[begin + c]);
      worker.log_prob[c] += logits[static_cast<std::size_t>(actions[row * parts + part]) * size + c] - log_sums[c];
    }
    logits += choices * size;
    probabilities += choices * size;
  }
}

void PpoLearner::part_slopes(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                             std::size_t count) const {
  const std::size_t size = kernels_.panel, parts = networks_.distribution.size;
  const std::int64_t* actions = actions_of(batch.rollout);
  const float* logits = worker.policy.value(networks_.policy->output(), panel);
  float* slopes = worker.policy.gradient(networks_.policy->output(), panel);
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t choices = networks_.distribution.sizes[part];
    const SoftmaxRows rows = {choices, logits, worker.log_sum.data() + part * size,
                              worker.part_entropy.data() + part * size};
    kernels_.ppo.softmax_slopes(rows, worker.slope.data(), entropy_slope(batch), count, slopes);
    for (std::size_t c = 0; c < count; ++c) {
      const auto row = static_cast<std::size_t>(batch.rows[begin + c]);
      slopes[static_cast<std::size_t>(actions[row * parts + part]) * size + c] += worker.slope[c];
    }
    logits += choices * size;
    slopes += choices * size;
  }
  // A forbidden choice's logit is a constant.
  if (batch.rollout.masks != nullptr)
    set_forbidden(batch, begin, count, 0.0f, worker.policy.gradient(networks_.policy->output(), panel));
}

// Sets a panel's outputs of the policy, or their slopes, to `value` where the masks forbid a choice.
void PpoLearner::set_forbidden(const Minibatch& batch, std::size_t begin, std::size_t count, float value,
                               float* outputs) const {
  const std::size_t size = kernels_.panel, choices = networks_.policy->output_width();
  for (std::size_t c = 0; c < count; ++c) {
    const std::uint8_t* mask = batch.rollout.masks + static_cast<std::size_t>(batch.rows[begin + c]) * choices;
    for (std::size_t k = 0; k < choices; ++k)
      if (mask[k] == 0) outputs[k * size + c] = value;
  }
}

NormalRows PpoLearner::normal_rows(PpoWorker& worker, std::size_t panel) const {
  const ActionDistribution& distribution = networks_.distribution;
  return {distribution.size, worker.action.data(), worker.policy.value(networks_.policy->output(), panel),
          worker.inverse_deviation.data(), weights_ + distribution.log_std};
}

// Log probabilities and entropies of a panel; leaves the actions' distances in the place of the slopes.
// H = sum of (s_j + 1/2 + log(2 pi) / 2).
void PpoLearner::evaluate_normal(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                                 std::size_t count) const {
  const ActionDistribution& distribution = networks_.distribution;
  const std::size_t size = kernels_.panel;
  const auto* actions = static_cast<const float*>(batch.rollout.actions);
  for (std::size_t c = 0; c < count; ++c) {
    const float* const from = actions + static_cast<std::size_t>(batch.rows[begin + c]) * distribution.size;
    for (std::size_t j = 0; j < distribution.size; ++j) worker.action[j * size + c] = from[j];
  }
  kernels_.ppo.normal_log_probs(normal_rows(worker, panel), worker.policy.gradient(networks_.policy->output(), panel),
                                worker.log_prob.data());
  double entropy = 0.0;
  for (std::size_t j = 0; j < distribution.size; ++j)
    entropy += static_cast<double>(weights_[static_cast<std::size_t>(distribution.log_std) + j] + 0.5f + kHalfLog2Pi);
  worker.entropy += entropy * static_cast<double>(count);
  // The entropy's derivative by each log deviation is 1, in every row.
  for (double& slope : worker.log_std_slope)
    slope += static_cast<double>(entropy_slope(batch)) * static_cast<double>(count);
}

}  // namespace pearl::learner
