// A generated Learner's host memory, filled at random, and the plain Learner as its reference.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "host.hpp"
#include "plain_learner.hpp"

class LearnerHost {
 public:
  // `transitions`: the rows of the columns, of a batch or of the Data Storage.
  LearnerHost(Board& board, std::uint32_t transitions)
      : plain({std::begin(design::kWidths), std::end(design::kWidths)}, design::kActorCritic, design::kCritics,
              design::kDouble, design::kTanh),
        context(board.memory<LearnerContext>(1)),
        importance(board.memory<float>(design::kRows)),
        obs_(board.memory<float>(transitions * kObs)),
        next_obs_(board.memory<float>(transitions * kObs)),
        actions_(board.memory<float>(transitions * kActions)),
        chosen_(board.memory<std::int64_t>(transitions)),
        reward_(board.memory<float>(transitions)),
        discount_(board.memory<float>(transitions)),
        scales_(board.memory<float>(2 * (kObs + kActions))) {
    for (std::size_t i = 0; i < transitions * kObs; ++i) {
      obs_[i] = uniform();
      next_obs_[i] = uniform();
    }
    for (std::size_t i = 0; i < transitions * kActions; ++i) actions_[i] = uniform();
    for (std::size_t i = 0; i < transitions; ++i) {
      chosen_[i] = static_cast<std::int64_t>(random_() % kActions);
      reward_[i] = 2.0f * uniform();
      discount_[i] = i % 5 == 0 ? 0.0f : 0.99f;
    }
    for (std::size_t k = 0; k < kObs + kActions; ++k) {  // centers and half ranges: of observations, then of actions
      const bool acts = k >= kObs;
      const std::size_t width = acts ? kActions : kObs, from = acts ? kObs + k : k;
      scales_[from] = 0.1f * uniform();
      scales_[from + width] = 1.0f + 0.5f * uniform();
    }
    plain.fill([&] { return 0.4f * uniform(); });
    const Values* vectors[] = {&plain.online, &plain.target, &plain.actor, &plain.target_actor};
    for (int which = 0; which < 4; ++which) {
      const std::size_t count = vectors[which]->size();
      if (count == 0) continue;
      vectors_[which] = board.memory<float>(count);
      for (std::size_t i = 0; i < count; ++i) vectors_[which][i] = static_cast<float>((*vectors[which])[i]);
      context->vectors[which] = vectors_[which];
      for (float*& moments : moments_[which]) moments = board.memory<float>(count);
    }
    for (std::uint32_t row = 0; row < design::kRows; ++row) importance[row] = 0.6f + 0.4f * uniform();
    context->columns[0] = obs_;
    context->columns[1] = design::kActorCritic ? static_cast<const void*>(actions_) : chosen_;
    context->columns[2] = reward_;
    context->columns[3] = next_obs_;
    context->columns[4] = discount_;
    context->importance = importance;
    context->priorities = board.memory<float>(design::kRows);
    context->scales = scales_;
  }

  // Prepares a step of `rows` rows with fresh optimizers.
  void prepare(std::uint32_t rows) {
    context->batch = rows;
    context->moves_policy = design::kActorCritic;
    context->max_grad_norm = static_cast<float>(kSettings.max_grad_norm);
    context->saturation_penalty = static_cast<float>(kSettings.saturation_penalty);
    for (int which = 0; which < 2; ++which) {
      const int vector = which == 0 ? pearl::tape::kOnline : pearl::tape::kActor;
      const std::size_t count = which == 0 ? plain.online.size() : plain.actor.size();
      for (float* moments : moments_[vector]) std::fill_n(moments, count, 0.0f);
      const double rise1 = 0.1, rise2 = 0.001;
      pearl::tape::Optimizer& optimizer = context->optimizers[which];
      optimizer = {};
      optimizer.shrink = 1.0f;
      optimizer.beta2 = static_cast<float>(1.0 - rise2);
      optimizer.eps = static_cast<float>(kSettings.eps);
      optimizer.rise1 = static_cast<float>(rise1);
      optimizer.rise2 = static_cast<float>(rise2);
      optimizer.lr = static_cast<float>(kSettings.lr);
      optimizer.momentum = static_cast<float>(kSettings.momentum);
      optimizer.rise = 1.0f;
      optimizer.first = moments_[vector][0];
      optimizer.second = moments_[vector][1];
      optimizer.max_second = moments_[vector][2];
      context->steps[which] = {static_cast<float>(kSettings.lr / rise1), static_cast<float>(std::sqrt(rise2)), 1.0f,
                               static_cast<float>(kSettings.target)};
    }
  }

  // Does the same step in plain C++, for these rows with these weights, and compares the results.
  void compare(const std::vector<std::uint32_t>& rows, const std::vector<double>& weights, Verdict& verdict) {
    std::vector<PlainRow> batch;
    for (std::size_t i = 0; i < rows.size(); ++i) batch.push_back(row(rows[i], weights[i]));
    const Values before[] = {plain.online, plain.target, plain.actor, plain.target_actor};
    const Values priorities = plain.step(batch, kSettings);
    double td_error = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      verdict.require(close(context->priorities[i], priorities[i], 1.0), "a priority");
      td_error += priorities[i];
    }
    verdict.require(close(context->td_error, td_error, td_error), "the sum of TD errors");
    verdict.require(close(context->loss, plain.loss, plain.loss), "the loss");
    for (int which = 0; which < (design::kActorCritic ? 2 : 1); ++which)
      verdict.require(close(context->norms[which], plain.norms[which], plain.norms[which]), "a gradient's norm");
    Values* vectors[] = {&plain.online, &plain.target, &plain.actor, &plain.target_actor};
    for (int which = 0; which < 4; ++which) {
      double error = 0.0, moved = 0.0;
      for (std::size_t i = 0; i < vectors[which]->size(); ++i) {
        double& expected = (*vectors[which])[i];
        error += std::pow(vectors_[which][i] - expected, 2);
        moved += std::pow(expected - before[which][i], 2);
        expected = vectors_[which][i];  // the next step starts from the same bits
      }
      verdict.require(std::sqrt(error) <= kRelative * std::sqrt(moved), "how the weights moved");
    }
  }

  PlainLearner plain;
  LearnerContext* context;
  float* importance;

 private:
  static constexpr double kRelative = 1e-4;
  static constexpr std::size_t kObs = design::kWidths[0], kActions = design::kWidths[std::size(design::kWidths) - 1];
  static constexpr PlainSettings kSettings{0.1, 0.01, 0.9, 0.25, 0.25, 0.1, design::kRule};

  static bool close(double found, double expected, double size) {
    return std::abs(found - expected) <= kRelative * std::max(std::abs(size), std::abs(expected));
  }
  float uniform() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_); }

  // `width` values at `from`, at unit scale for actor and critics.
  Values values(const float* from, std::size_t width, const float* scale) const {
    Values found(from, from + width);
    for (std::size_t k = 0; design::kActorCritic && k < width; ++k)
      found[k] = (found[k] - scale[k]) / scale[width + k];
    return found;
  }
  PlainRow row(std::uint32_t at, double weight) const {
    return {values(obs_ + at * kObs, kObs, scales_),
            design::kActorCritic ? values(actions_ + at * kActions, kActions, scales_ + 2 * kObs)
                                 : Values{static_cast<double>(chosen_[at])},
            values(next_obs_ + at * kObs, kObs, scales_),
            reward_[at],
            discount_[at],
            weight};
  }

  std::mt19937 random_{1};
  float *obs_, *next_obs_, *actions_;
  std::int64_t* chosen_;
  float *reward_, *discount_, *scales_;
  float* vectors_[4] = {};
  float* moments_[4][3] = {};
};
