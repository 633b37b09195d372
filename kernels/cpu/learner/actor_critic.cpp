#include "pearl/learner/actor_critic.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "pearl/errors.hpp"
#include "pearl/normal.hpp"

namespace pearl::learner {
namespace {

constexpr float kLinearRange = 2.0f;  // tanh(2) = 0.96

// In several chains of additions, which do not wait for each other.
template <class At>
double sum_of(std::size_t count, const At& at) {
  double sums[4] = {};
  std::size_t c = 0;
  for (; c + 4 <= count; c += 4)
    for (std::size_t i = 0; i < 4; ++i) sums[i] += static_cast<double>(at(c + i));
  for (; c < count; ++c) sums[0] += static_cast<double>(at(c));
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

ActorCriticWorker::ActorCriticWorker(const ActorCriticModel& model, std::size_t panels)
    : actor(*model.actor, panels, true),
      next_actor(*model.actor, panels, false),
      log_prob(model.actor->kernels().panel * panels),
      noise(model.actor->kernels().panel * panels * model.actions.center.size()),
      judgements(model.actor->kernels().panel),
      slopes(model.critics.size()),
      values(model.critics.size()),
      judged(model.critics.size()) {
  for (const Network* critic : model.critics) {
    critics.emplace_back(*critic, panels, true);
    next_critics.emplace_back(*critic, panels, false);
  }
  const std::size_t panel = model.actor->kernels().panel, quantiles = model.critics[0]->output_width();
  if (quantiles == 1) return;
  atoms = AlignedArray<float>(model.critics.size() * quantiles * panel);
  sums = AlignedArray<float>(2 * panel);
}

ActorCriticLearner::ActorCriticLearner(const ActorCriticModel& model, std::size_t threads)
    : TeamLearner(model.actor->kernels(), threads),
      model_(model),
      critic_gradients_(threads, model.critics.at(0)->parameters()),
      actor_gradients_(threads, model.actor->parameters()) {
  model_.actor->require_vectors("An actor");
  for (const Network* critic : model_.critics) critic->require_vectors("A critic");
  for (const Network* critic : model_.critics)
    if (critic->input_width() != observation_size() + action_size() || critic->output_width() != quantiles())
      throw LearnerError("A critic must take " + std::to_string(observation_size() + action_size()) +
                         " numbers and give " + std::to_string(quantiles()) + "; found " +
                         std::to_string(critic->input_width()) + " and " + std::to_string(critic->output_width()) +
                         ".");
  const std::size_t outputs = model_.actor->output_width();
  if (outputs != action_size() && outputs != 2 * action_size())
    throw LearnerError("An actor must give one or two numbers for each of the " + std::to_string(action_size()) +
                       " actions; found " + std::to_string(outputs) + ".");
  for (std::size_t worker = 0; worker < threads; ++worker)
    workers_.push_back(std::make_unique<ActorCriticWorker>(model_, kGroup / panel()));
}

void ActorCriticLearner::set(const ActorCriticSettings& settings) {
  const std::size_t critics = model_.critics.size(), judges = settings.target_critics;
  if (judges > critics || (judges == 0 && critics > 2))
    throw LearnerError("Of " + std::to_string(critics) + " critics, 1 to " + std::to_string(critics) +
                       " may judge the targets" + (critics > 2 ? "" : ", or 0 for no ensemble") + "; found " +
                       std::to_string(judges) + ".");
  if (quantiles() > 1 && (judges == 0 || settings.dropped_quantiles >= quantiles()))
    throw LearnerError("Critics of " + std::to_string(quantiles()) +
                       " quantiles need target_critics and must keep one or more of them; found " +
                       std::to_string(judges) + " and " + std::to_string(settings.dropped_quantiles) + " dropped.");
  settings_ = settings;
  judges_.resize(judges == 0 ? critics : judges);
  for (std::size_t k = 0; k < judges_.size(); ++k) judges_[k] = static_cast<std::uint32_t>(k);
}

ActorCriticMetrics ActorCriticLearner::step(const ActorCriticBatch& batch, bool moves_policy, bool moves_targets,
                                            Optimizer& critic, Optimizer& actor, Optimizer* temperature,
                                            float* log_alpha, float* priorities, const PrioritiesKnown& known) {
  if (resizes(batch.rows)) {
    for (const auto& worker : workers_) {
      worker->actor.clear();
      worker->next_actor.clear();
      for (Workspace& workspace : worker->critics) workspace.clear();
      for (Workspace& workspace : worker->next_critics) workspace.clear();
    }
  }
  const Shares shares(batch.rows, team_.size(), panel() / 2);
  const float alpha = settings_.stochastic ? std::exp(*log_alpha) : 0.0f;
  const double max_norm = settings_.max_grad_norm;
  Outcome outcome, actor_outcome;
  if (ensemble() && judges_.size() < model_.critics.size())
    choose_critics(batch.seed, batch.step, model_.critics.size(), judges_.size(), judges_.data());
  writing_.store(team_.size(), std::memory_order_relaxed);
  auto work = [&](std::size_t index) {
    ActorCriticWorker& worker = *workers_[index];
    worker.loss = worker.td_error = worker.actor_loss = worker.entropy_gap = 0.0;
    for_groups(shares.begin(index), shares.end(index), [&](const Group& group) {
      critic_gradients(worker, batch, group, alpha, critic_gradients_.of(index), priorities, known);
    });
    if (index >= shares.used) priorities_written(known);
    if (!apply(index, critic_gradients_, shares.used, &ActorCriticWorker::loss, critic, max_norm,
               model_.critic_weights, outcome))
      return;
    if (moves_policy) {
      team_.barrier();
      for_groups(shares.begin(index), shares.end(index), [&](const Group& group) {
        actor_gradients(worker, batch, group, alpha, actor_gradients_.of(index));
      });
      if (!apply(index, actor_gradients_, shares.used, &ActorCriticWorker::actor_loss, actor, max_norm,
                 model_.actor_weights, actor_outcome))
        return;
    }
    if (!moves_targets) return;
    const auto follow = [&](const TeamGradients& gradients, const float* weights, float* target) {
      const std::size_t begin = gradients.begin(index), count = gradients.end(index) - begin;
      kernels_.move_toward(weights + begin, static_cast<float>(settings_.tau), target + begin, count);
    };
    follow(critic_gradients_, model_.critic_weights, model_.target_critic_weights);
    if (model_.target_actor_weights != nullptr)
      follow(actor_gradients_, model_.actor_weights, model_.target_actor_weights);
  };
  team_.run(work);

  if (!outcome.finite()) diverged("critics' ", outcome, "The weights were left as they were.");
  critic.commit();
  if (!actor_outcome.finite()) diverged("actor's ", actor_outcome, "Only the critics had moved.");
  if (moves_policy) {
    actor.commit();
    if (temperature != nullptr) {
      const double gap = sum(&ActorCriticWorker::entropy_gap);
      const auto gradient = static_cast<float>(-gap / static_cast<double>(batch.rows));
      temperature->apply(kernels_, 1.0f, &gradient, log_alpha, 0, 1);
      temperature->commit();
    }
  }
  return {metrics(outcome, batch.rows), actor_outcome.norm};
}

template <class Visit>
void ActorCriticLearner::for_groups(std::size_t begin, std::size_t end, Visit visit) const {
  const std::size_t last_columns = model_.actor->last_columns(end - begin, kGroup);
  for (std::size_t first = begin; first < end; first += kGroup) {
    const std::size_t last = std::min(end, first + kGroup);
    visit(Group{first, last, (last - first + panel() - 1) / panel(), last_columns, first != begin, last == end});
  }
}

// visit(p, first, count): panel p holds `count` transitions of the batch, from `first` on.
template <class Visit>
void ActorCriticLearner::for_panels(const Group& group, Visit visit) const {
  for (std::size_t p = 0; p < group.panels; ++p) {
    const std::size_t first = group.first + p * panel();
    visit(p, first, std::min(panel(), group.last - first));
  }
}

// The outputs of the first `critics` critics in panel p, and their slopes, which begin as zeros.
void ActorCriticLearner::of_critics(ActorCriticWorker& worker, std::size_t critics, std::size_t p) const {
  for (std::size_t k = 0; k < critics; ++k) {
    const std::size_t output = model_.critics[k]->output();
    worker.values[k] = worker.critics[k].value(output, p);
    worker.slopes[k] = worker.critics[k].gradient(output, p);
    std::fill_n(worker.slopes[k], quantiles() * panel(), 0.0f);
  }
}

void ActorCriticLearner::load_observations(const float* rows, std::size_t count, float* panel) const {
  load_panel(kernels_, rows, observation_size(), count, panel);
  const UnitScale& scale = model_.observations;
  kernels_.to_unit(panel, scale.center.data(), scale.half_range.data(), panel, observation_size());
}

void ActorCriticLearner::act(ActorCriticWorker& worker, std::size_t p, const float* outputs, const float* noise,
                             std::size_t count, float* unit) const {
  const std::size_t size = panel(), actions = action_size();
  if (!settings_.stochastic) {
    kernels_.tanh(outputs, unit, actions * size);
    if (noise == nullptr) return;
    const auto scale = static_cast<float>(settings_.target_noise), bound = static_cast<float>(settings_.noise_clip);
    for (std::size_t a = 0; a < actions; ++a)
      for (std::size_t c = 0; c < count; ++c) {
        const float disturbance = std::clamp(scale * noise[c * actions + a], -bound, bound);
        unit[a * size + c] = std::clamp(unit[a * size + c] + disturbance, -1.0f, 1.0f);
      }
    return;
  }
  const Squash squash{static_cast<float>(settings_.log_std_low), static_cast<float>(settings_.log_std_high)};
  float *log_prob = worker.log_prob.data() + p * size, *panels = worker.noise.data() + p * size * actions;
  load_panel(kernels_, noise, actions, count, panels);
  std::fill_n(log_prob, size, 0.0f);
  std::fill_n(unit, actions * size, 0.0f);
  for (std::size_t a = 0; a < actions; ++a)
    kernels_.squash(squash, outputs + a * size, outputs + (actions + a) * size, panels + a * size,
                    model_.actor->columns(count), unit + a * size, log_prob);
}

void ActorCriticLearner::critic_gradients(ActorCriticWorker& worker, const ActorCriticBatch& batch,
                                          const Group& group, float temperature, float* gradients, float* priorities,
                                          const PrioritiesKnown& known) {
  const std::size_t size = panel(), obs = observation_size(), actions = action_size(), critics = model_.critics.size();
  const float* chooser =
      model_.target_actor_weights != nullptr ? model_.target_actor_weights : model_.actor_weights;
  const auto forward = [&](const Network& network, const float* weights, Workspace& workspace) {
    network.forward(weights, workspace, group.panels, group.last - group.first, group.last_columns);
  };
  for_panels(group, [&](std::size_t p, std::size_t first, std::size_t count) {
    load_observations(static_cast<const float*>(batch.next_obs) + first * obs, count, worker.next_actor.value(0, p));
  });
  forward(*model_.actor, chooser, worker.next_actor);
  for_panels(group, [&](std::size_t p, std::size_t first, std::size_t count) {
    float* next = worker.next_critics[0].value(0, p);
    std::memcpy(next, worker.next_actor.value(0, p), obs * size * sizeof(float));
    act(worker, p, worker.next_actor.value(model_.actor->output(), p),
        batch.next_noise == nullptr ? nullptr : batch.next_noise + first * actions, count, next + obs * size);

    float* inputs = worker.critics[0].value(0, p);
    load_observations(static_cast<const float*>(batch.obs) + first * obs, count, inputs);
    load_panel(kernels_, static_cast<const float*>(batch.actions) + first * actions, actions, count,
               inputs + obs * size);
    kernels_.to_unit(inputs + obs * size, model_.actions.center.data(), model_.actions.half_range.data(),
                     inputs + obs * size, actions);
  });
  const std::size_t input_floats = (obs + actions) * size * group.panels;
  for (const std::size_t k : judges_) {
    Workspace& workspace = worker.next_critics[k];
    if (k > 0) std::copy_n(worker.next_critics[0].value(0, 0), input_floats, workspace.value(0, 0));
    workspace.dropout = pass(batch, 0, k, group.first);
    forward(*model_.critics[k], model_.target_critic_weights, workspace);
  }
  for (std::size_t k = 0; k < critics; ++k) {
    Workspace& workspace = worker.critics[k];
    if (k > 0) std::copy_n(worker.critics[0].value(0, 0), input_floats, workspace.value(0, 0));
    workspace.dropout = pass(batch, 1, k, group.first);
    forward(*model_.critics[k], model_.critic_weights, workspace);
  }
  for_panels(group, [&](std::size_t p, std::size_t first, std::size_t count) {
    for (std::size_t j = 0; j < judges_.size(); ++j)
      worker.judged[j] = worker.next_critics[judges_[j]].value(model_.critics[judges_[j]]->output(), p);
    of_critics(worker, critics, p);
    if (quantiles() > 1)
      differentiate_quantiles(worker, batch, p, first, count, temperature, priorities);
    else
      differentiate(worker, batch, p, first, count, temperature, priorities);
  });
  if (group.last_of_worker) priorities_written(known);
  for (std::size_t k = 0; k < critics; ++k)
    model_.critics[k]->backward(model_.critic_weights, gradients, worker.critics[k], group.panels,
                                group.last - group.first, group.last_columns, group.accumulate, 0);
}

void ActorCriticLearner::differentiate(ActorCriticWorker& worker, const ActorCriticBatch& batch, std::size_t p,
                                       std::size_t first, std::size_t count, float temperature, float* priorities) {
  const std::size_t critics = model_.critics.size();
  const auto rows = static_cast<float>(batch.rows);
  const auto &judged = worker.judged, &values = worker.values;
  const auto& slopes = worker.slopes;
  const float* log_prob = worker.log_prob.data() + p * panel();
  // In loops without branches: the processor would guess half of them wrong.
  float* const targets = worker.judgements.data();
  std::copy_n(judged[0], count, targets);
  for (std::size_t j = 1; j < judges_.size(); ++j)
    for (std::size_t c = 0; c < count; ++c) {
      const float next = judged[j][c];
      targets[c] = (next < targets[c]) | (next != next) ? next : targets[c];  // keeps a NaN of any
    }
  if (settings_.stochastic)
    for (std::size_t c = 0; c < count; ++c) targets[c] -= temperature * log_prob[c];
  const float *rewards = batch.rewards + first, *discounts = batch.discounts + first, *weights = batch.weights + first;
  for (std::size_t c = 0; c < count; ++c) targets[c] = rewards[c] + discounts[c] * targets[c];
  float* const largest = priorities + first;
  std::fill_n(largest, count, 0.0f);
  for (std::size_t k = 0; k < critics; ++k) {
    float* const slope = slopes[k];
    for (std::size_t c = 0; c < count; ++c) {
      const float error = values[k][c] - targets[c];
      slope[c] = 2.0f * error * (weights[c] / rows);
      largest[c] = std::max(largest[c], std::fabs(error));
    }
    worker.loss += sum_of(count, [&](std::size_t c) {
      const float error = values[k][c] - targets[c];
      return weights[c] * error * error;
    });
  }
  worker.td_error += sum_of(count, [&](std::size_t c) { return largest[c]; });
}

// The targets of all critics are the same atoms: the smallest of all quantiles by the critics that judge (Kuznetsov et
// al. 2020).
void ActorCriticLearner::differentiate_quantiles(ActorCriticWorker& worker, const ActorCriticBatch& batch,
                                                 std::size_t p, std::size_t first, std::size_t count, float temperature,
                                                 float* priorities) {
  const std::size_t size = panel(), of_each = quantiles(), critics = model_.critics.size();
  const std::size_t all = judges_.size() * of_each, kept = all - judges_.size() * settings_.dropped_quantiles;
  float* const atoms = worker.atoms.data();
  for (std::size_t j = 0; j < judges_.size(); ++j)
    std::copy_n(worker.judged[j], of_each * size, atoms + j * of_each * size);
  kernels_.keep_smallest(atoms, all, kept);
  const float* const log_prob = worker.log_prob.data() + p * size;
  const float *rewards = batch.rewards + first, *discounts = batch.discounts + first, *weights = batch.weights + first;
  for (std::size_t j = 0; j < kept; ++j)
    for (std::size_t c = 0; c < count; ++c) {
      float& atom = atoms[j * size + c];
      atom = rewards[c] + discounts[c] * (settings_.stochastic ? atom - temperature * log_prob[c] : atom);
    }
  float *const losses = worker.sums.data(), *const means = losses + size, *const largest = priorities + first;
  float* const targets = worker.judgements.data();
  kernels_.sum_features(atoms, kept, means);
  for (std::size_t c = 0; c < count; ++c) targets[c] = means[c] / static_cast<float>(kept);
  std::fill_n(largest, count, 0.0f);
  // The mean over all quantiles of all critics.
  const auto numbers = static_cast<float>(of_each * critics), rows = static_cast<float>(batch.rows);
  for (std::size_t k = 0; k < critics; ++k) {
    kernels_.quantile_regression({of_each, kept, worker.values[k], atoms, losses, worker.slopes[k]});
    kernels_.sum_features(worker.values[k], of_each, means);
    for (std::size_t c = 0; c < count; ++c)
      largest[c] = std::max(largest[c], std::fabs(means[c] / static_cast<float>(of_each) - targets[c]));
    for (std::size_t q = 0; q < of_each; ++q) {
      float* const slopes = worker.slopes[k] + q * size;
      for (std::size_t c = 0; c < count; ++c) slopes[c] *= weights[c] / (rows * numbers);
      std::fill_n(slopes + count, size - count, 0.0f);
    }
    worker.loss += sum_of(count, [&](std::size_t c) { return weights[c] * losses[c] / numbers; });
  }
  worker.td_error += sum_of(count, [&](std::size_t c) { return largest[c]; });
}

void ActorCriticLearner::actor_gradients(ActorCriticWorker& worker, const ActorCriticBatch& batch, const Group& group,
                                         float temperature, float* gradients) {
  const std::size_t size = panel(), obs = observation_size(), actions = action_size();
  // Without entropy, only the first critic judges the policy.
  const std::size_t critics = settings_.stochastic ? model_.critics.size() : 1;
  const bool smaller_judges = critics == 2 && !ensemble();
  const std::size_t numbers = quantiles();
  const float of_each = 1.0f / static_cast<float>(critics * numbers);  // the share of an output in the mean of all
  const float share = 1.0f / static_cast<float>(batch.rows);
  const auto output = model_.actor->output();
  for_panels(group, [&](std::size_t p, std::size_t first, std::size_t count) {
    load_observations(static_cast<const float*>(batch.obs) + first * obs, count, worker.actor.value(0, p));
  });
  model_.actor->forward(model_.actor_weights, worker.actor, group.panels, group.last - group.first, group.last_columns);
  for_panels(group, [&](std::size_t p, std::size_t first, std::size_t count) {
    float* inputs = worker.critics[0].value(0, p);
    std::memcpy(inputs, worker.actor.value(0, p), obs * size * sizeof(float));
    const float* noise = settings_.stochastic ? batch.noise + first * actions : nullptr;
    act(worker, p, worker.actor.value(output, p), noise, count, inputs + obs * size);
  });
  for (std::size_t k = 0; k < critics; ++k) {
    Workspace& workspace = worker.critics[k];
    if (k > 0)
      std::copy_n(worker.critics[0].value(0, 0), (obs + actions) * size * group.panels, workspace.value(0, 0));
    workspace.dropout = pass(batch, 2, k, group.first);
    model_.critics[k]->forward(model_.critic_weights, workspace, group.panels, group.last - group.first,
                               group.last_columns, true);
  }
  for_panels(group, [&](std::size_t p, std::size_t, std::size_t count) {
    const auto& slopes = worker.slopes;
    const auto& values = worker.values;
    of_critics(worker, critics, p);
    float* const judgement = worker.judgements.data();
    if (smaller_judges) {
      // The smaller critic's gradient counts; equal ones share, as in torch.minimum.
      for (std::size_t c = 0; c < count; ++c) {
        const float one = values[0][c], other = values[1][c];
        const float first_share = 0.5f * (static_cast<float>(one < other) + static_cast<float>(one <= other));
        slopes[0][c] = -share * first_share;
        slopes[1][c] = -share * (1.0f - first_share);
        judgement[c] = first_share > 0.0f ? one : other;
      }
    } else {
      std::fill_n(judgement, count, 0.0f);
      for (std::size_t k = 0; k < critics; ++k)
        for (std::size_t q = 0; q < numbers * size; q += size) {
          std::fill_n(slopes[k] + q, count, -share * of_each);
          for (std::size_t c = 0; c < count; ++c) judgement[c] += values[k][q + c];
        }
      for (std::size_t c = 0; c < count; ++c) judgement[c] *= of_each;
    }
    if (settings_.stochastic) {
      const float* const log_prob = worker.log_prob.data() + p * size;
      worker.entropy_gap += sum_of(count, [&](std::size_t c) { return log_prob[c]; });
      worker.entropy_gap += static_cast<double>(count) * settings_.target_entropy;
      worker.actor_loss += sum_of(count, [&](std::size_t c) { return temperature * log_prob[c] - judgement[c]; });
    } else {
      worker.actor_loss -= sum_of(count, [&](std::size_t c) { return judgement[c]; });
    }
  });
  for (std::size_t k = 0; k < critics; ++k)
    model_.critics[k]->backward(model_.critic_weights, nullptr, worker.critics[k], group.panels,
                                group.last - group.first, group.last_columns, false, actions);
  const SquashSlopes squash{static_cast<float>(settings_.log_std_low), static_cast<float>(settings_.log_std_high),
                            temperature, share};
  const auto penalty = static_cast<float>(settings_.saturation_penalty);
  for_panels(group, [&](std::size_t p, std::size_t, std::size_t count) {
    const float* outputs = worker.actor.value(output, p);
    const float *unit = worker.critics[0].value(0, p) + obs * size, *noise = worker.noise.data() + p * size * actions;
    float* of_unit = worker.critics[0].gradient(0, p) + obs * size;
    for (std::size_t k = 1; k < critics; ++k)
      kernels_.scale(worker.critics[k].gradient(0, p) + obs * size, 1.0f, of_unit, actions * size, true);
    float* slopes = worker.actor.gradient(output, p);
    if (!settings_.stochastic) {
      kernels_.tanh_backward(of_unit, unit, slopes, actions * size, false);
      for (std::size_t i = 0; i < actions * size; ++i) {
        const float excess = std::fabs(outputs[i]) - kLinearRange;
        if (excess > 0.0f) slopes[i] += std::copysign(2.0f * penalty * excess * share, outputs[i]);
      }
    } else {
      for (std::size_t a = 0; a < actions; ++a)
        kernels_.squash_backward(squash, of_unit + a * size, unit + a * size, outputs + (actions + a) * size,
                                 noise + a * size, model_.actor->columns(count), slopes + a * size,
                                 slopes + (actions + a) * size);
    }
    // Sums over a panel take every transition of it.
    for (std::size_t f = 0; f < model_.actor->output_width(); ++f)
      std::fill(slopes + f * size + count, slopes + (f + 1) * size, 0.0f);
  });
  model_.actor->backward(model_.actor_weights, gradients, worker.actor, group.panels, group.last - group.first,
                         group.last_columns, group.accumulate, 0);
}

std::vector<std::size_t> ActorCriticAlgorithm::item_bytes() const {
  const ActorCriticLearner& learner = parts_.learner;
  const std::size_t obs = learner.observation_size() * sizeof(float), action = learner.action_size() * sizeof(float);
  return {obs, action, sizeof(float), obs, sizeof(float)};
}

const float* ActorCriticAlgorithm::draw(std::uint32_t number, std::size_t rows, std::vector<float>& noise) const {
  noise.resize(rows * parts_.learner.action_size());
  fill_normal(static_cast<std::uint64_t>(*parts_.noise_seed), static_cast<std::uint64_t>(*parts_.steps), number,
              noise.size(), noise.data());
  return noise.data();
}

StepMetrics ActorCriticAlgorithm::step(const Batch& batch, float* priorities, const PrioritiesKnown& known) {
  const bool moves = (*parts_.steps + 1) % parts_.policy_delay == 0;
  const bool noisy = parts_.noise_seed != nullptr, judged_by_noise = noisy && parts_.learner.stochastic();
  const ActorCriticBatch noised = {batch,
                                   noisy ? draw(0, batch.rows, next_noise_) : nullptr,
                                   judged_by_noise ? draw(1, batch.rows, noise_) : nullptr,
                                   noisy ? static_cast<std::uint64_t>(*parts_.noise_seed) : 0,
                                   static_cast<std::uint64_t>(*parts_.steps)};
  const bool moves_targets = moves || parts_.learner.ensemble();
  const ActorCriticMetrics found = parts_.learner.step(noised, moves, moves_targets, parts_.critic, parts_.actor,
                                                       parts_.temperature, parts_.log_alpha, priorities, known);
  ++*parts_.steps;
  return found;
}

}  // namespace pearl::learner
