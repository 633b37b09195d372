#include "pearl/learner/ppo.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "pearl/errors.hpp"
#include "pearl/shuffle.hpp"

namespace pearl::learner {
namespace {

constexpr float kHalfLog2Pi = 0.9189385332046727f;
constexpr double kSmallest = 1e-8;  // added to the deviation of advantages
constexpr double kKlExcess = 1.5;   // training ends beyond so many times target_kl

// Of categorical parts.
const std::int64_t* actions_of(const Rollout& rollout) { return static_cast<const std::int64_t*>(rollout.actions); }

}  // namespace

PpoWorker::PpoWorker(const PolicyAndValue& networks, std::size_t panels)
    : policy(*networks.policy, panels, true), value(*networks.value, panels, true) {
  const std::size_t panel = networks.policy->kernels().panel;
  const ActionDistribution& distribution = networks.distribution;
  obs.resize(networks.policy->input_width() * panel);
  log_prob.resize(panel);
  slope.resize(panel);
  log_sum.resize(distribution.sizes.size() * panel);
  part_entropy.resize(distribution.sizes.size() * panel);
  if (distribution.categorical()) return;
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

// Clears the worker's sums, and computes what all rows of the minibatch share: every worker does, and finds the same.
void PpoLearner::prepare(PpoWorker& worker, const Minibatch& batch) const {
  worker.loss = worker.policy_loss = worker.value_loss = 0.0;
  worker.entropy = worker.divergence = worker.clipped = 0.0;
  std::fill(worker.log_std_slope.begin(), worker.log_std_slope.end(), 0.0);
  for (std::size_t j = 0; j < worker.inverse_deviation.size(); ++j)
    worker.inverse_deviation[j] = std::exp(-weights_[static_cast<std::size_t>(networks_.distribution.log_std) + j]);
  if (!settings_.normalize_advantages) return;
  // In double: equal advantages have exactly their own mean.
  const float* advantages = batch.rollout.advantages;
  double sum = 0.0, squares = 0.0;
  for (std::size_t i = 0; i < batch.count; ++i) sum += static_cast<double>(advantages[batch.rows[i]]);
  const double mean = sum / static_cast<double>(batch.count);
  for (std::size_t i = 0; i < batch.count; ++i) {
    const double distance = static_cast<double>(advantages[batch.rows[i]]) - mean;
    squares += distance * distance;
  }
  worker.advantage_mean = mean;
  worker.advantage_scale =
      batch.count < 2 ? 0.0 : 1.0 / (std::sqrt(squares / static_cast<double>(batch.count - 1)) + kSmallest);
}

void PpoLearner::compute_gradients(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t end,
                                   float* gradients) {
  const Network &policy = *networks_.policy, &value = *networks_.value;
  const std::size_t panel = kernels_.panel, last_columns = policy.last_columns(end - begin, kGroup);
  if (shared_) std::fill_n(gradients, policy.parameters(), 0.0f);
  for (std::size_t first = begin; first < end; first += kGroup) {
    const std::size_t last = std::min(end, first + kGroup), panels = (last - first + panel - 1) / panel;
    const auto count_in = [&](std::size_t p) { return std::min(panel, last - first - p * panel); };
    // One network after the other, so that its weights stay in cache.
    for (std::size_t p = 0; p < panels; ++p) load(worker, batch, first + p * panel, p, count_in(p));
    policy.forward(weights_, worker.policy, panels, last_columns);
    value.forward(weights_, worker.value, panels, last_columns);
    for (std::size_t p = 0; p < panels; ++p) differentiate(worker, batch, first + p * panel, p, count_in(p));
    const bool accumulate = shared_ || first != begin;
    value.backward(weights_, gradients, worker.value, panels, last - first, last_columns, accumulate, 0);
    policy.backward(weights_, gradients, worker.policy, panels, last - first, last_columns, accumulate, 0);
  }
  for (std::size_t j = 0; j < worker.log_std_slope.size(); ++j)
    gradients[static_cast<std::size_t>(networks_.distribution.log_std) + j] =
        static_cast<float>(worker.log_std_slope[j]);
}

// The observations of a panel, for both networks.
void PpoLearner::load(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                      std::size_t count) const {
  const Network& policy = *networks_.policy;
  const std::size_t inputs = policy.input_width();
  for (std::size_t c = 0; c < count; ++c)
    std::copy_n(batch.rollout.obs + static_cast<std::size_t>(batch.rows[begin + c]) * inputs, inputs,
                worker.obs.data() + c * inputs);
  policy.load(worker.obs.data(), count, worker.policy, panel);
  std::copy_n(worker.policy.value(0, panel), inputs * kernels_.panel, worker.value.value(0, panel));
}

// The loss of a minibatch of n rows is the mean of
//
//   -min(r A, clip(r) A)  +  value_coefficient * (v - R)^2  -  entropy_coefficient * H,    r = exp(log p - log p_old)
//
// with the probability p of the action, the advantage A, the value v, the return R and the entropy H. By the log
// probability, the first part has the derivative -r A, but 0 where clip(r) is the smaller product: where r > 1 + range
// and A > 0, or r < 1 - range and A < 0. With value clipping, the squared error is the larger one of v and of
// v_old + clip(v - v_old), whose derivative by v is 0 beyond the range. v_old is R - A.
void PpoLearner::differentiate(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                               std::size_t count) const {
  const bool categorical = networks_.distribution.categorical();
  const std::size_t size = kernels_.panel;
  const auto share = 1.0f / static_cast<float>(batch.count);
  const auto range = static_cast<float>(settings_.clip_range);
  const float low = 1.0f - range, high = 1.0f + range;
  const auto value_range = static_cast<float>(settings_.value_clip_range);
  const auto value_slope = static_cast<float>(settings_.value_coefficient) * 2.0f * share;
  const float* values = worker.value.value(networks_.value->output(), panel);
  float* value_slopes = worker.value.gradient(networks_.value->output(), panel);
  std::fill_n(value_slopes, size, 0.0f);

  const double entropy = worker.entropy;
  if (categorical)
    evaluate_parts(worker, batch, begin, panel, count);
  else
    evaluate_normal(worker, batch, begin, panel, count);

  double policy_loss = 0.0, value_loss = 0.0;
  for (std::size_t c = 0; c < count; ++c) {
    const auto row = static_cast<std::size_t>(batch.rows[begin + c]);
    const float raw = batch.rollout.advantages[row], target = batch.rollout.returns[row];
    float advantage = raw;
    if (settings_.normalize_advantages)
      advantage = static_cast<float>((static_cast<double>(raw) - worker.advantage_mean) * worker.advantage_scale);
    const float log_ratio = worker.log_prob[c] - batch.rollout.log_probs[row], ratio = std::exp(log_ratio);
    const bool clips = advantage > 0.0f ? ratio > high : advantage < 0.0f && ratio < low;
    policy_loss -= static_cast<double>((clips ? std::clamp(ratio, low, high) : ratio) * advantage);
    // An infinite ratio gives NaN even where it is clipped, as in torch: the step is refused.
    worker.slope[c] = (clips ? 0.0f : -advantage) * ratio * share;
    worker.divergence += static_cast<double>(ratio - 1.0f - log_ratio);
    worker.clipped += std::fabs(ratio - 1.0f) > range ? 1.0 : 0.0;

    const float error = values[c] - target;
    float squared = error * error;
    value_slopes[c] = value_slope * error;
    if (value_range > 0.0f) {
      const float old = target - raw, moved = values[c] - old;
      const float near = old + std::clamp(moved, -value_range, value_range) - target;
      if (near * near > squared) {
        squared = near * near;
        if (std::fabs(moved) > value_range) value_slopes[c] = 0.0f;
      }
    }
    value_loss += static_cast<double>(squared);
  }
  worker.policy_loss += policy_loss;
  worker.value_loss += value_loss;
  worker.loss += policy_loss + settings_.value_coefficient * value_loss -
                 settings_.entropy_coefficient * (worker.entropy - entropy);

  float* slopes = worker.policy.gradient(networks_.policy->output(), panel);
  if (count < size)
    for (std::size_t k = 0; k < networks_.policy->output_width(); ++k)
      std::fill(slopes + k * size + count, slopes + (k + 1) * size, 0.0f);
  if (categorical)
    part_slopes(worker, batch, begin, panel, count);
  else
    normal_slopes(worker, panel, count);
}

// Log probabilities and entropies of a panel; leaves the logits' probabilities in the place of their slopes.
// For each part: p_k = exp(l_k - log_sum), log p = l_a - log_sum, H = -sum of p_k (l_k - log_sum).
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
    float *log_sums = worker.log_sum.data() + part * size, *entropies = worker.part_entropy.data() + part * size;
    for (std::size_t c = 0; c < count; ++c) {
      float top = logits[c], sum = 0.0f;
      for (std::size_t k = 1; k < choices; ++k) top = std::max(top, logits[k * size + c]);
      for (std::size_t k = 0; k < choices; ++k) {
        probabilities[k * size + c] = std::exp(logits[k * size + c] - top);
        sum += probabilities[k * size + c];
      }
      log_sums[c] = top + std::log(sum);
      const float scale = 1.0f / sum;
      float entropy = 0.0f;
      for (std::size_t k = 0; k < choices; ++k) {
        probabilities[k * size + c] *= scale;
        entropy -= probabilities[k * size + c] * (logits[k * size + c] - log_sums[c]);
      }
      entropies[c] = entropy;
      worker.entropy += static_cast<double>(entropy);
      const auto row = static_cast<std::size_t>(batch.rows[begin + c]);
      worker.log_prob[c] += logits[static_cast<std::size_t>(actions[row * parts + part]) * size + c] - log_sums[c];
    }
    logits += choices * size;
    probabilities += choices * size;
  }
}

// By a logit, log p has the derivative [k = a] - p_k, and H has -p_k (log p_k + H).
void PpoLearner::part_slopes(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                             std::size_t count) const {
  const std::size_t size = kernels_.panel, parts = networks_.distribution.size;
  const std::int64_t* actions = actions_of(batch.rollout);
  const float* logits = worker.policy.value(networks_.policy->output(), panel);
  float* slopes = worker.policy.gradient(networks_.policy->output(), panel);
  const float by_entropy = entropy_slope(batch);
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t choices = networks_.distribution.sizes[part];
    const float *log_sums = worker.log_sum.data() + part * size, *entropies = worker.part_entropy.data() + part * size;
    for (std::size_t k = 0; k < choices; ++k)
      for (std::size_t c = 0; c < count; ++c) {
        const float log_p = logits[k * size + c] - log_sums[c];
        slopes[k * size + c] *= -(worker.slope[c] + by_entropy * (log_p + entropies[c]));
      }
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

// Log probabilities and entropies of a panel; leaves the distances d_j = (a_j - mean_j) exp(-s_j) in the place of the
// slopes. log p = -sum of (d_j^2 / 2 + s_j + log(2 pi) / 2), H = sum of (s_j + 1/2 + log(2 pi) / 2).
void PpoLearner::evaluate_normal(PpoWorker& worker, const Minibatch& batch, std::size_t begin, std::size_t panel,
                                 std::size_t count) const {
  const ActionDistribution& distribution = networks_.distribution;
  const std::size_t size = kernels_.panel;
  const auto* actions = static_cast<const float*>(batch.rollout.actions);
  const float* means = worker.policy.value(networks_.policy->output(), panel);
  const float* log_std = weights_ + distribution.log_std;
  float* distances = worker.policy.gradient(networks_.policy->output(), panel);
  std::fill(worker.log_prob.begin(), worker.log_prob.end(), 0.0f);
  double entropy = 0.0;
  for (std::size_t j = 0; j < distribution.size; ++j) {
    for (std::size_t c = 0; c < count; ++c) {
      const auto row = static_cast<std::size_t>(batch.rows[begin + c]);
      const float distance =
          (actions[row * distribution.size + j] - means[j * size + c]) * worker.inverse_deviation[j];
      distances[j * size + c] = distance;
      worker.log_prob[c] -= 0.5f * distance * distance + log_std[j] + kHalfLog2Pi;
    }
    entropy += static_cast<double>(log_std[j] + 0.5f + kHalfLog2Pi);
  }
  worker.entropy += entropy * static_cast<double>(count);
  // The entropy's derivative by each log deviation is 1, in every row.
  for (double& slope : worker.log_std_slope)
    slope += static_cast<double>(entropy_slope(batch)) * static_cast<double>(count);
}

// By a mean, log p has the derivative d_j exp(-s_j); by a log deviation d_j^2 - 1.
void PpoLearner::normal_slopes(PpoWorker& worker, std::size_t panel, std::size_t count) const {
  const std::size_t size = kernels_.panel;
  float* slopes = worker.policy.gradient(networks_.policy->output(), panel);
  for (std::size_t j = 0; j < networks_.distribution.size; ++j)
    for (std::size_t c = 0; c < count; ++c) {
      const float distance = slopes[j * size + c];
      worker.log_std_slope[j] += static_cast<double>(worker.slope[c] * (distance * distance - 1.0f));
      slopes[j * size + c] = worker.slope[c] * distance * worker.inverse_deviation[j];
    }
}

}  // namespace pearl::learner
