// Training on rollouts without Python: gradients against finite differences in double, teams of threads, shared layers,
// the end by divergence, steps that must change nothing; and policies that draw for vectors of any size.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "check.hpp"
#include "floats.hpp"
#include "pearl/errors.hpp"
#include "pearl/learner/ppo.hpp"
#include "pearl/learner/rollout_policy.hpp"
#include "pearl/philox.hpp"
#include "pearl/shuffle.hpp"

using namespace pearl::learner;

namespace {

void test_shuffle() {
  for (const std::size_t count : {0u, 1u, 2u, 3u, 64u, 65u, 256u, 257u, 1000u}) {
    std::vector<std::int64_t> order(count), expected(count);
    for (std::size_t i = 0; i < count; ++i) order[i] = expected[i] = static_cast<std::int64_t>(i);
    pearl::shuffle(7, 11, order.data(), count);
    for (std::size_t i = count; i-- > 1;)
      std::swap(expected[i], expected[pearl::mulhi64(pearl::uniform_at(7, 11, i, 0), i + 1)]);
    CHECK(order == expected);
    CHECK(std::set<std::int64_t>(order.begin(), order.end()).size() == count);
  }
}

constexpr std::size_t kInputs = 5, kHidden = 13;

// tanh networks of one hidden layer, which they may share, and a rollout of random numbers.
struct Example {
  std::size_t parameters = 0;
  std::vector<Op> policy_ops, value_ops;
  std::unique_ptr<Network> policy, value;
  ActionDistribution distribution;
  std::size_t rows;
  Floats obs, actions, log_probs, advantages, returns;
  std::vector<std::int64_t> choices;
  std::vector<std::uint8_t> masks;  // empty: none

  std::ptrdiff_t take(std::size_t count) {
    parameters += count;
    return static_cast<std::ptrdiff_t>(parameters - count);
  }
  Op linear(std::ptrdiff_t from, std::size_t in, std::size_t out) {
    Op op{OpKind::linear, {from, kNone}, out};
    op.weight = take(in * out);
    op.bias = take(out);
    return op;
  }

  Example(bool categorical, bool shared, std::size_t count)
      : rows(count),
        obs(random_floats(rows * kInputs, 1)),
        actions(random_floats(rows * 2, 2)),
        log_probs(random_floats(rows, 3, 0.3f)),
        advantages(random_floats(rows, 4)),
        returns(random_floats(rows, 5)),
        choices(rows * 2) {
    for (std::size_t i = 0; i < rows; ++i) {
      choices[2 * i] = static_cast<std::int64_t>(i % 3);
      choices[2 * i + 1] = static_cast<std::int64_t>(i % 4);
      log_probs[i] -= 2.5f;
    }
    if (categorical)
      distribution.sizes = {3, 4};
    else
      distribution.log_std = take(2);
    distribution.size = 2;
    const Op hidden = linear(0, kInputs, kHidden);
    policy_ops = {hidden, {OpKind::tanh, {1, kNone}, kHidden}, linear(2, kHidden, distribution.outputs())};
    value_ops = {shared ? hidden : linear(0, kInputs, kHidden), {OpKind::tanh, {1, kNone}, kHidden},
                 linear(2, kHidden, 1)};
    policy = std::make_unique<Network>(kInputs, policy_ops, parameters);
    value = std::make_unique<Network>(kInputs, value_ops, parameters);
  }

  PolicyAndValue networks() const { return {policy.get(), value.get(), distribution}; }
  Rollout rollout() const {
    const void* drawn = distribution.categorical() ? static_cast<const void*>(choices.data()) : actions.data();
    return {rows,           obs.data(),     drawn, log_probs.data(), advantages.data(),
            returns.data(), masks.empty() ? nullptr : masks.data()};
  }

  // Masks that allow each row's actions, and every other choice in about half of the rows.
  void forbid_some() {
    const std::size_t outputs = distribution.outputs();
    masks.resize(rows * outputs);
    for (std::size_t i = 0; i < masks.size(); ++i) masks[i] = static_cast<std::uint32_t>(i) * 2654435761u >> 31;
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t part = 0, at = 0; part < 2; at += distribution.sizes[part++])
        masks[i * outputs + at + static_cast<std::size_t>(choices[2 * i + part])] = 1;
  }
  bool allows(std::size_t row, std::size_t output) const {
    return masks.empty() || masks[row * distribution.outputs() + output] != 0;
  }

  // What the network computes for one row, in double.
  static std::vector<double> outputs(const std::vector<Op>& ops, const std::vector<double>& p, const float* x) {
    std::vector<double> in(x, x + kInputs);
    for (const Op& op : ops) {
      std::vector<double> out(op.width);
      for (std::size_t f = 0; f < op.width; ++f) {
        if (op.kind == OpKind::tanh) {
          out[f] = std::tanh(in[f]);
          continue;
        }
        out[f] = p[static_cast<std::size_t>(op.bias) + f];
        for (std::size_t k = 0; k < in.size(); ++k)
          out[f] += p[static_cast<std::size_t>(op.weight) + f * in.size() + k] * in[k];
      }
      in = out;
    }
    return in;
  }

  // The loss over all rows, with raw advantages.
  double loss(const std::vector<double>& p, const PpoSettings& settings) const {
    double total = 0.0;
    for (std::size_t i = 0; i < rows; ++i) {
      const std::vector<double> out = outputs(policy_ops, p, obs.data() + i * kInputs);
      double log_prob = 0.0, entropy = 0.0;
      for (std::size_t part = 0, at = 0; part < distribution.sizes.size(); at += distribution.sizes[part++]) {
        double sum = 0.0;
        for (std::size_t k = 0; k < distribution.sizes[part]; ++k)
          if (allows(i, at + k)) sum += std::exp(out[at + k]);
        for (std::size_t k = 0; k < distribution.sizes[part]; ++k)
          if (allows(i, at + k)) entropy -= std::exp(out[at + k]) / sum * (out[at + k] - std::log(sum));
        log_prob += out[at + static_cast<std::size_t>(choices[2 * i + part])] - std::log(sum);
      }
      for (std::size_t j = 0; !distribution.categorical() && j < 2; ++j) {
        const double s = p[static_cast<std::size_t>(distribution.log_std) + j];
        const double d = (static_cast<double>(actions[2 * i + j]) - out[j]) / std::exp(s);
        log_prob -= 0.5 * d * d + s + 0.9189385332046727;
        entropy += s + 0.5 + 0.9189385332046727;
      }
      const double advantage = static_cast<double>(advantages[i]), target = static_cast<double>(returns[i]);
      const double ratio = std::exp(log_prob - static_cast<double>(log_probs[i])), range = settings.clip_range;
      const double surrogate =
          std::min(ratio * advantage, std::clamp(ratio, 1.0 - range, 1.0 + range) * advantage);
      const double value = outputs(value_ops, p, obs.data() + i * kInputs)[0], old = target - advantage;
      const double near =
          old + std::clamp(value - old, -settings.value_clip_range, settings.value_clip_range) - target;
      const double squared = std::max((value - target) * (value - target), near * near);
      total += -surrogate + settings.value_coefficient * squared - settings.entropy_coefficient * entropy;
    }
    return total / static_cast<double>(rows);
  }
};

struct Training {
  Example example;
  Floats weights = random_floats(example.parameters, 6, 0.4f);
  Floats first = Floats(example.parameters), second = Floats(example.parameters);
  float adam_steps = 0.0f;
  std::int64_t steps = 0;
  Optimizer optimizer;
  PpoLearner learner;

  Training(bool categorical, bool shared, std::size_t rows, std::size_t threads)
      : example(categorical, shared, rows), learner(example.networks(), weights.data(), threads) {
    optimizer.set_adam({1e-3, 0.9, 0.999, 1e-5, 0.0, false}, first.data(), second.data(), nullptr, &adam_steps);
    PpoSettings settings;
    settings.entropy_coefficient = 0.01;
    settings.max_grad_norm = 0.5;
    learner.set(settings);
  }

  PpoMetrics train(std::size_t epochs, std::size_t batch_size, const std::vector<std::int64_t>& rows = {}) {
    const PpoSchedule schedule = {rows.empty() ? nullptr : rows.data(), rows.empty() ? example.rows : rows.size(),
                                  epochs, batch_size, 3};
    return learner.train(example.rollout(), schedule, optimizer, &steps);
  }
};

void test_gradients(bool masked) {
  for (const bool categorical : {false, true})
    for (const bool shared : {false, true})
      for (const std::size_t threads : {1u, 2u}) {
        if (masked && !categorical) continue;
        Training training(categorical, shared, 37, threads);
        if (masked) training.example.forbid_some();
        PpoSettings settings;
        settings.value_clip_range = 0.3;
        settings.entropy_coefficient = 0.1;
        settings.normalize_advantages = false;
        training.learner.set(settings);
        const std::size_t parameters = training.example.parameters;
        Floats momentum(parameters);  // after one step, the gradient
        training.optimizer.set_sgd({1e-6, 0.9, 0.0, 0.0, false}, momentum.data(), true);
        std::vector<double> exact(training.weights.begin(), training.weights.end());
        training.train(1, 37);
        for (std::size_t i = 0; i < parameters; ++i) {
          const double at = exact[i], step = 1e-6;
          exact[i] = at + step;
          const double above = training.example.loss(exact, settings);
          exact[i] = at - step;
          const double below = training.example.loss(exact, settings);
          exact[i] = at;
          const double expected = (above - below) / (2.0 * step);
          CHECK(std::fabs(static_cast<double>(momentum[i]) - expected) < 1e-4 * std::fmax(1.0, std::fabs(expected)));
        }
      }
}

void test_training() {
  for (const bool categorical : {false, true})
    for (const bool shared : {false, true})
      for (const std::size_t rows : {1u, 37u, 300u}) {
        Training alone(categorical, shared, rows, 1);
        const PpoMetrics before = alone.train(1, 64);
        PpoMetrics after = before;
        for (int i = 0; i < 60; ++i) after = alone.train(1, 64);
        CHECK(after.value_loss < before.value_loss);
        const std::size_t each = (rows + 63) / 64;
        CHECK(after.steps == each && after.epochs == 1);
        CHECK(alone.steps == static_cast<std::int64_t>(61 * each) && alone.adam_steps == static_cast<float>(61 * each));
        for (const std::size_t threads : {2u, 3u}) {
          Training team(categorical, shared, rows, threads), twin(categorical, shared, rows, threads);
          for (int i = 0; i < 61; ++i) {
            team.train(1, 64);
            twin.train(1, 64);
          }
          CHECK(team.weights == twin.weights);
          for (std::size_t i = 0; i < team.weights.size(); ++i)
            CHECK(std::fabs(team.weights[i] - alone.weights[i]) < 2e-3f);
        }
      }
}

// Masks that allow everything change nothing. With single choices, there is nothing to learn for the policy.
void test_masks() {
  for (const bool shared : {false, true})
    for (const std::size_t rows : {1u, 37u, 300u}) {
      Training without(true, shared, rows, 2), all(true, shared, rows, 2), single(true, shared, rows, 2);
      all.example.masks.assign(rows * 7, 1);
      for (int i = 0; i < 5; ++i) {
        const PpoMetrics found = all.train(2, 64), same = without.train(2, 64);
        CHECK(found.policy_loss == same.policy_loss && found.entropy == same.entropy);
        CHECK(found.gradient_norm == same.gradient_norm);
      }
      CHECK(all.weights == without.weights);

      Example& example = single.example;
      example.masks.assign(rows * 7, 0);
      for (std::size_t i = 0; i < rows; ++i) {
        example.masks[7 * i + static_cast<std::size_t>(example.choices[2 * i])] = 1;
        example.masks[7 * i + 3 + static_cast<std::size_t>(example.choices[2 * i + 1])] = 1;
        example.log_probs[i] = 0.0f;
      }
      const Floats before = single.weights;
      const PpoMetrics metrics = single.train(2, 64);
      CHECK(metrics.entropy == 0.0 && metrics.approximate_kl == 0.0 && metrics.clip_fraction == 0.0);
      const Op& last = example.policy_ops.back();
      for (std::size_t i = 0; i < 7 * kHidden; ++i) {
        const std::size_t at = static_cast<std::size_t>(last.weight) + i;
        CHECK(single.weights[at] == before[at]);
      }
      CHECK(single.weights != before);  // the values
    }
}

void test_rows_and_divergence() {
  for (const std::size_t threads : {1u, 2u}) {
    Training some(true, false, 100, threads);
    some.example.returns[0] = some.example.advantages[99] = std::numeric_limits<float>::quiet_NaN();
    std::vector<std::int64_t> rows;
    for (std::int64_t row = 1; row < 99; row += 3) rows.push_back(row);
    CHECK(some.train(2, 8, rows).steps == 10);

    Training ends(true, false, 100, threads);
    PpoSettings settings;
    settings.target_kl = 1e-9;
    ends.learner.set(settings);
    const Floats weights = ends.weights;
    const PpoMetrics metrics = ends.train(5, 16);
    CHECK(metrics.steps == 0 && metrics.epochs == 1 && ends.steps == 0 && ends.adam_steps == 0.0f);
    CHECK(metrics.approximate_kl > 1.5e-9 && ends.weights == weights);
  }
}

void test_refused_steps_change_nothing() {
  for (const std::size_t threads : {1u, 2u}) {
    Training training(true, true, 50, threads);
    training.train(1, 50);
    const Floats weights = training.weights, first = training.first;
    const auto refuses = [&](const std::vector<std::int64_t>& rows = {}) {
      CHECK(throws<pearl::LearnerError>([&] { training.train(1, 50, rows); }));
      CHECK(training.weights == weights && training.first == first && training.steps == 1);
      CHECK(training.adam_steps == 1.0f);
    };
    Example& example = training.example;
    for (Floats* column : {&example.obs, &example.log_probs, &example.advantages, &example.returns}) {
      const float kept = (*column)[7];
      (*column)[7] = std::numeric_limits<float>::quiet_NaN();
      refuses();
      (*column)[7] = kept;
    }
    // An infinite ratio, even where it is clipped.
    const float kept = example.log_probs[7];
    example.log_probs[7] = -200.0f;
    refuses();
    example.log_probs[7] = kept;
    example.choices[9] = 4;
    refuses();
    example.choices[9] = -1;
    refuses();
    example.choices[9] = 0;
    refuses({0, 50});
    refuses({-1});
    training.train(1, 50);
    CHECK(training.weights != weights);
  }
}

void test_policies_draw() {
  for (const bool categorical : {false, true}) {
    Example example(categorical, true, 75);
    const Floats plain = random_floats(example.parameters, 6, 0.4f);
    // Mean and scale of observations follow the parameters.
    Floats weights = plain;
    for (std::size_t f = 0; f < kInputs; ++f) weights.push_back(0.5f);
    for (std::size_t f = 0; f < kInputs; ++f) weights.push_back(2.0f);
    const Network policy(kInputs, example.policy_ops, weights.size()), value(kInputs, example.value_ops, weights.size());
    const auto end = static_cast<std::ptrdiff_t>(example.parameters);
    const PolicyAndValue networks = {&policy, &value, example.distribution};
    RolloutPolicy normalising(networks, {end, end + static_cast<std::ptrdiff_t>(kInputs)});
    RolloutPolicy other(example.networks(), {});
    for (const std::size_t envs : {1u, 2u, 16u, 33u, 75u}) {
      Floats noise = random_floats(envs * 2, 8), shifted(example.obs.begin(), example.obs.begin() + envs * kInputs);
      if (categorical)
        for (float& uniform : noise) uniform = std::fabs(uniform) - std::floor(std::fabs(uniform));
      for (float& x : shifted) x = std::clamp((x - 0.5f) * 2.0f, -10.0f, 10.0f);
      // Exactly as large as needed: the sanitizer sees every access beyond.
      std::vector<std::int64_t> choices(envs * 2), same_choices(envs * 2);
      Floats actions(envs * 2), same_actions(envs * 2), log_probs(envs), same_log_probs(envs), values(envs), same(envs);
      void* drawn = categorical ? static_cast<void*>(choices.data()) : actions.data();
      void* drawn_again = categorical ? static_cast<void*>(same_choices.data()) : same_actions.data();
      normalising.explore(weights.data(), example.obs.data(), noise.data(), envs, drawn, log_probs.data(),
                          values.data());
      other.explore(plain.data(), shifted.data(), noise.data(), envs, drawn_again, same_log_probs.data(), same.data());
      CHECK(choices == same_choices && actions == same_actions && log_probs == same_log_probs && values == same);
      normalising.values(weights.data(), example.obs.data(), envs, same.data());
      CHECK(values == same);
      const std::vector<double> exact(plain.begin(), plain.end());
      for (std::size_t i = 0; i < envs; ++i) {
        const double expected = Example::outputs(example.value_ops, exact, shifted.data() + i * kInputs)[0];
        CHECK(std::fabs(static_cast<double>(values[i]) - expected) < 1e-5);
        if (categorical) CHECK(choices[2 * i] >= 0 && choices[2 * i] < 3 && choices[2 * i + 1] >= 0 && choices[2 * i + 1] < 4);
      }
    }
    PolicyAndValue wrong = example.networks();
    wrong.distribution.size = 3;
    CHECK(throws<pearl::LearnerError>([&] { RolloutPolicy(wrong, {}); }));
    CHECK(throws<pearl::LearnerError>([&] { RolloutPolicy(networks, {end, end + 1000}); }));
    wrong = example.networks();
    wrong.value = wrong.policy;
    CHECK(throws<pearl::LearnerError>([&] { RolloutPolicy(wrong, {}); }));
  }
}

}  // namespace

int main() {
  for (const std::string& variant : learner_kernel_variants()) {
    select_learner_kernels(variant);
    for (const bool masked : {false, true}) test_gradients(masked);
    test_training();
    test_masks();
    test_rows_and_divergence();
    test_refused_steps_change_nothing();
    test_policies_draw();
  }
  test_shuffle();
  return 0;
}
