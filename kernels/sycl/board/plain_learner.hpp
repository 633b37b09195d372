// One training step in plain C++ and float64, the reference of the Learner's pipeline, for DQN, DDPG and TD3.
//
// An optimizer's first step has a closed form without moments, so each checked step starts with a fresh optimizer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

using Values = std::vector<double>;

// Layers of `widths`. Their weights are consecutive: each matrix (out, in) and then its biases, both padded as the
// pipeline's.
class PlainNetwork {
 public:
  PlainNetwork(std::vector<int> widths, bool tanh) : widths_(std::move(widths)), tanh_(tanh) {}

  std::size_t parameters() const {
    std::size_t count = 0;
    for (std::size_t l = 0; l < layers(); ++l) count += biases(l) + padded(width(l + 1));
    return count;
  }
  // Sets each weight to the next number; padding stays.
  template <class Numbers>
  void fill(double* parameters, Numbers next) const {
    for (std::size_t l = 0; l < layers(); ++l) {
      for (std::size_t i = 0; i < width(l) * width(l + 1); ++i) parameters[i] = next();
      for (std::size_t i = 0; i < width(l + 1); ++i) parameters[biases(l) + i] = next();
      parameters += biases(l) + padded(width(l + 1));
    }
  }

  // The input, and the output of each layer.
  std::vector<Values> forward(const double* parameters, const Values& input) const {
    std::vector<Values> values = {input};
    for (std::size_t l = 0; l < layers(); ++l) {
      Values out(width(l + 1));
      for (std::size_t row = 0; row < out.size(); ++row) {
        out[row] = parameters[biases(l) + row];
        for (std::size_t k = 0; k < values[l].size(); ++k)
          out[row] += parameters[row * values[l].size() + k] * values[l][k];
        if (l + 1 < layers()) out[row] = tanh_ ? std::tanh(out[row]) : std::max(out[row], 0.0);
      }
      parameters += biases(l) + padded(out.size());
      values.push_back(out);
    }
    return values;
  }

  // Adds the gradient for the output's `slopes` to `gradient`, unless null; returns the input's slopes.
  Values backward(const double* parameters, const std::vector<Values>& values, Values slopes, double* gradient) const {
    std::size_t place = this->parameters();
    for (std::size_t l = layers(); l-- > 0;) {
      const Values& in = values[l];
      place -= biases(l) + padded(slopes.size());
      Values below(in.size(), 0.0);
      for (std::size_t row = 0; row < slopes.size(); ++row) {
        for (std::size_t k = 0; k < in.size(); ++k) {
          below[k] += slopes[row] * parameters[place + row * in.size() + k];
          if (gradient != nullptr) gradient[place + row * in.size() + k] += slopes[row] * in[k];
        }
        if (gradient != nullptr) gradient[place + biases(l) + row] += slopes[row];
      }
      for (std::size_t k = 0; l > 0 && k < in.size(); ++k) below[k] *= tanh_ ? 1.0 - in[k] * in[k] : in[k] > 0.0;
      slopes = below;
    }
    return slopes;
  }

 private:
  static std::size_t padded(std::size_t count) {
    return static_cast<std::size_t>(pearl::fpga::padded(static_cast<int>(count)));
  }
  std::size_t layers() const { return widths_.size() - 1; }
  std::size_t width(std::size_t l) const { return static_cast<std::size_t>(widths_[l]); }
  std::size_t biases(std::size_t l) const { return padded(width(l) * width(l + 1)); }  // after the layer's matrix

  std::vector<int> widths_;
  bool tanh_;
};

// One row of a batch, with the weight of its loss.
struct PlainRow {
  Values obs, action, next_obs;  // DQN's action: one number
  double reward, discount, weight;
};

// Scalars of a step; see LearnerContext.
struct PlainSettings {
  double lr, eps, momentum, max_grad_norm, target, saturation_penalty;
  int rule;  // pearl::tape::Rule
};

// The networks of a Learner: DQN's, or an actor and critics that share a vector.
class PlainLearner {
 public:
  PlainLearner(std::vector<int> widths, bool actor_critic, int critics, bool double_q, bool tanh)
      : actor_critic_(actor_critic),
        double_q_(double_q),
        critics_(static_cast<std::size_t>(critics)),
        actions_(static_cast<std::size_t>(widths.back())),
        acting_(widths, tanh),
        judging_(judges(widths, actor_critic), tanh) {}

  Values online, target, actor, target_actor;  // parameters

  template <class Numbers>
  void fill(Numbers next) {
    for (Values* vector : {&online, &target}) {
      vector->assign(critics_ * judging_.parameters(), 0.0);
      for (std::size_t k = 0; k < critics_; ++k) judging_.fill(vector->data() + k * judging_.parameters(), next);
    }
    if (!actor_critic_) return;
    for (Values* vector : {&actor, &target_actor}) {
      vector->assign(acting_.parameters(), 0.0);
      acting_.fill(vector->data(), next);
    }
  }

  // Trains on a batch of rows; returns priorities. `norms` are those of the gradients, critics' or DQN's first.
  Values step(const std::vector<PlainRow>& batch, const PlainSettings& settings) {
    Values gradient(online.size(), 0.0), actor_gradient(actor.size(), 0.0), priorities;
    loss = 0.0;
    for (const PlainRow& row : batch)
      priorities.push_back(actor_critic_ ? judge(row, batch.size(), gradient) : value(row, batch.size(), gradient));
    if (actor_critic_)
      for (const PlainRow& row : batch) act(row, batch.size(), settings, actor_gradient);
    norms[0] = move(online, target, gradient, settings);
    norms[1] = move(actor, target_actor, actor_gradient, settings);
    return priorities;
  }

  double loss = 0.0, norms[2] = {};

 private:
  static std::vector<int> judges(std::vector<int> widths, bool actor_critic) {
    if (!actor_critic) return widths;
    widths.front() += widths.back();
    widths.back() = 1;
    return widths;
  }
  static std::size_t best_of(const Values& values) {
    return static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin());
  }

  // DQN.
  double value(const PlainRow& row, std::size_t rows, Values& gradient) {
    const auto values = judging_.forward(online.data(), row.obs);
    const Values next = judging_.forward(target.data(), row.next_obs).back();
    const std::size_t best = best_of(double_q_ ? judging_.forward(online.data(), row.next_obs).back() : next);
    const auto action = static_cast<std::size_t>(row.action[0]);
    const double error = values.back()[action] - (row.reward + row.discount * next[best]), distance = std::abs(error);
    loss += row.weight * (distance < 1.0 ? 0.5 * error * error : distance - 0.5);
    Values slopes(actions_, 0.0);
    slopes[action] = std::clamp(error, -1.0, 1.0) * row.weight / static_cast<double>(rows);
    judging_.backward(online.data(), values, slopes, gradient.data());
    return distance;
  }

  Values with_action(Values obs, const Values& said) const {
    for (const double number : said) obs.push_back(std::tanh(number));
    return obs;
  }

  // Critics.
  double judge(const PlainRow& row, std::size_t rows, Values& gradient) {
    const Values next = with_action(row.next_obs, acting_.forward(target_actor.data(), row.next_obs).back());
    double next_value = INFINITY, priority = 0.0;
    for (std::size_t k = 0; k < critics_; ++k)
      next_value = std::min(next_value, judging_.forward(target.data() + k * judging_.parameters(), next).back()[0]);
    Values given = row.obs;
    given.insert(given.end(), row.action.begin(), row.action.end());
    for (std::size_t k = 0; k < critics_; ++k) {
      const double* parameters = online.data() + k * judging_.parameters();
      const auto values = judging_.forward(parameters, given);
      const double error = values.back()[0] - (row.reward + row.discount * next_value);
      judging_.backward(parameters, values, {2.0 * error * row.weight / static_cast<double>(rows)},
                        gradient.data() + k * judging_.parameters());
      loss += row.weight * error * error;
      priority = std::max(priority, std::abs(error));
    }
    return priority;
  }

  // The actor, judged by the first critic before the step.
  void act(const PlainRow& row, std::size_t rows, const PlainSettings& settings, Values& gradient) const {
    const auto said = acting_.forward(actor.data(), row.obs);
    const auto judged = judging_.forward(online.data(), with_action(row.obs, said.back()));
    const Values down = judging_.backward(online.data(), judged, {-1.0 / static_cast<double>(rows)}, nullptr);
    Values slopes(actions_);
    for (std::size_t k = 0; k < actions_; ++k) {
      const double number = said.back()[k], unit = std::tanh(number);
      const double above = std::max(std::abs(number) - 2.0, 0.0);
      slopes[k] = down[row.obs.size() + k] * (1.0 - unit * unit) +
                  2.0 * settings.saturation_penalty / static_cast<double>(rows) * (number > 0.0 ? above : -above);
    }
    acting_.backward(actor.data(), said, slopes, gradient.data());
  }

  static double move(Values& weights, Values& targets, const Values& gradient, const PlainSettings& settings) {
    double squares = 0.0;
    for (const double entry : gradient) squares += entry * entry;
    const double norm = std::sqrt(squares);
    const double factor = norm > settings.max_grad_norm ? settings.max_grad_norm / norm : 1.0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double slope = factor * gradient[i];
      const double first = settings.rule <= 1   ? slope / (std::abs(slope) + settings.eps)  // Adam's
                           : settings.rule == 4 ? slope * (1.0 + settings.momentum)
                                                : slope;
      weights[i] -= settings.lr * first;
      targets[i] += settings.target * (weights[i] - targets[i]);
    }
    return norm;
  }

  bool actor_critic_, double_q_;
  std::size_t critics_, actions_;
  PlainNetwork acting_, judging_;
};
