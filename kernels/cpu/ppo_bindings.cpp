// Python bindings of training on rollouts, and of policies that collect them.

#include <string>
#include <vector>

#include "learner_bindings.hpp"
#include "pearl/learner/ppo.hpp"
#include "pearl/learner/rollout_policy.hpp"
#include "pearl/shuffle.hpp"

using namespace bindings;
namespace learner = pearl::learner;

namespace {

using Rows = Array<std::int64_t>;
using HeldPpo = Held<learner::PpoLearner>;

Rows shuffled(std::size_t count, std::uint64_t seed, std::uint64_t call) {
  Rows order(static_cast<py::ssize_t>(count));
  std::int64_t* rows = order.mutable_data();
  const Released released;
  for (std::size_t i = 0; i < count; ++i) rows[i] = static_cast<std::int64_t>(i);
  pearl::shuffle(seed, call, rows, count);
  return order;
}

learner::PolicyAndValue networks_of(const learner::Network& policy, const learner::Network& value,
                                    const std::vector<std::size_t>& sizes, std::size_t size,
                                    std::optional<std::ptrdiff_t> log_std) {
  return {&policy, &value, {sizes, size, log_std.value_or(learner::kNone)}};
}

// Checks for actions of the distribution: `rows` rows of them.
void check_actions(const py::array& actions, const learner::ActionDistribution& distribution, std::size_t rows) {
  check_rows(actions, "action", rows, distribution.size);
  const bool fits = distribution.categorical() ? py::isinstance<Rows>(actions) : py::isinstance<Floats>(actions);
  if (!fits)
    throw pearl::LearnerError("action must be contiguous, of " +
                              std::string(distribution.categorical() ? "int64" : "float32") + "; found " +
                              std::string(py::str(actions.dtype())) + ".");
}

std::unique_ptr<HeldPpo> make_ppo(const learner::Network& policy, const learner::Network& value, Floats weights,
                                  const std::vector<std::size_t>& sizes, std::size_t size,
                                  std::optional<std::ptrdiff_t> log_std, std::size_t threads) {
  check_size(weights, "weights", policy.parameters());
  return std::make_unique<HeldPpo>(std::vector<py::object>{weights}, networks_of(policy, value, sizes, size, log_std),
                                   weights.mutable_data(), threads);
}

py::dict train_ppo(HeldPpo& ppo, const Floats& obs, const py::array& actions, const Floats& log_probs,
                   const Floats& advantages, const Floats& returns, const std::optional<Rows>& rows, std::size_t epochs,
                   std::size_t batch_size, std::uint64_t seed, HeldOptimizer& optimizer, Rows& steps,
                   const std::optional<Array<std::uint8_t>>& masks, const std::optional<Floats>& values) {
  const learner::Network& policy = *ppo.networks().policy;
  const std::size_t all = rows_of(log_probs), count = rows ? rows_of(*rows) : all;
  if (count < 1 || epochs < 1 || batch_size < 1)
    throw pearl::LearnerError("Training needs at least one row, one epoch and one row per minibatch; found " +
                              std::to_string(count) + ", " + std::to_string(epochs) + " and " +
                              std::to_string(batch_size) + ".");
  check_rows(obs, "obs", all, policy.input_width());
  check_actions(actions, ppo.networks().distribution, all);
  check_rows(log_probs, "log_prob", all, 1);
  check_rows(advantages, "advantage", all, 1);
  check_rows(returns, "ret", all, 1);
  if (rows) check_rows(*rows, "rows", count, 1);
  if (masks) check_rows(*masks, "action_mask", all, ppo.networks().distribution.outputs());
  if (values) check_rows(*values, "value", all, 1);
  check_parameters(optimizer, "network", policy.parameters());
  check_size(steps, "steps", 1);
  const learner::Rollout rollout = {all,
                                    obs.data(),
                                    actions.data(),
                                    log_probs.data(),
                                    advantages.data(),
                                    returns.data(),
                                    masks ? masks->data() : nullptr,
                                    values ? values->data() : nullptr};
  const learner::PpoSchedule schedule = {rows ? rows->data() : nullptr, count, epochs, batch_size, seed};
  std::int64_t* counter = steps.mutable_data();
  learner::PpoMetrics metrics;
  {
    const Released released;
    metrics = ppo.train(rollout, schedule, optimizer, counter);
  }
  py::dict found;
  found["policy_loss"] = metrics.policy_loss;
  found["value_loss"] = metrics.value_loss;
  found["entropy"] = metrics.entropy;
  found["approximate_kl"] = metrics.approximate_kl;
  found["clip_fraction"] = metrics.clip_fraction;
  found["gradient_norm"] = metrics.gradient_norm;
  found["minibatches"] = static_cast<double>(metrics.steps);
  found["epochs"] = static_cast<double>(metrics.epochs);
  return found;
}

learner::RolloutPolicy make_policy(const learner::Network& policy, const learner::Network& value,
                                   const std::vector<std::size_t>& sizes, std::size_t size,
                                   std::optional<std::ptrdiff_t> log_std,
                                   std::optional<std::pair<std::ptrdiff_t, std::ptrdiff_t>> normalization) {
  const auto [mean, scale] = normalization.value_or(std::pair{learner::kNone, learner::kNone});
  return {networks_of(policy, value, sizes, size, log_std), {mean, scale}};
}

// The rows of `obs`, which must fit the policy's networks, as must the weights.
std::size_t check_observations(const learner::RolloutPolicy& policy, const Floats& weights, const Floats& obs) {
  const learner::Network& network = *policy.networks().policy;
  check_size(weights, "weights", network.parameters());
  check_rows(obs, "obs", rows_of(obs), network.input_width());
  return rows_of(obs);
}

void explore(learner::RolloutPolicy& policy, const Floats& weights, const Floats& obs, const Floats& noise,
             py::array& actions, Floats& log_probs, Floats& values) {
  const std::size_t rows = check_observations(policy, weights, obs);
  check_rows(noise, "noise", rows, policy.networks().distribution.size);
  check_actions(actions, policy.networks().distribution, rows);
  check_size(log_probs, "log_probs", rows);
  check_size(values, "values", rows);
  policy.explore(weights.data(), obs.data(), noise.data(), rows, actions.mutable_data(), log_probs.mutable_data(),
                 values.mutable_data());
}

Floats values_of(learner::RolloutPolicy& policy, const Floats& weights, const Floats& obs) {
  const std::size_t rows = check_observations(policy, weights, obs);
  Floats values = new_vector<float>(static_cast<py::ssize_t>(rows));
  policy.values(weights.data(), obs.data(), rows, values.mutable_data());
  return values;
}

}  // namespace

void bind_ppo(py::module_& m) {
  m.def("shuffled", &shuffled, py::arg("count"), py::arg("seed"), py::arg("call"));

  py::class_<HeldPpo>(m, "PpoLearner")
      .def(py::init(&make_ppo), py::arg("policy"), py::arg("value"), py::arg("weights").noconvert(), py::arg("sizes"),
           py::arg("size"), py::arg("log_std"), py::arg("threads"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "set",
          [](HeldPpo& ppo, double clip_range, double value_clip_range, double value_coefficient,
             double entropy_coefficient, double max_grad_norm, double target_kl, double normalize_advantages) {
            ppo.set({clip_range, value_clip_range, value_coefficient, entropy_coefficient, max_grad_norm, target_kl,
                     normalize_advantages != 0.0});
          },
          py::kw_only(), py::arg("clip_range"), py::arg("value_clip_range"), py::arg("value_coefficient"),
          py::arg("entropy_coefficient"), py::arg("max_grad_norm"), py::arg("target_kl"),
          py::arg("normalize_advantages"))
      .def("train", &train_ppo, py::arg("obs").noconvert(), py::arg("actions"), py::arg("log_probs").noconvert(),
           py::arg("advantages").noconvert(), py::arg("returns").noconvert(), py::arg("rows").noconvert(),
           py::arg("epochs"), py::arg("batch_size"), py::arg("seed"), py::arg("optimizer"),
           py::arg("steps").noconvert(), py::arg("masks").noconvert() = py::none(),
           py::arg("values").noconvert() = py::none());

  py::class_<learner::RolloutPolicy>(m, "RolloutPolicy")
      .def(py::init(&make_policy), py::arg("policy"), py::arg("value"), py::arg("sizes"), py::arg("size"),
           py::arg("log_std"), py::arg("normalization"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("explore", &explore, py::arg("weights").noconvert(), py::arg("obs").noconvert(),
           py::arg("noise").noconvert(), py::arg("actions"), py::arg("log_probs").noconvert(),
           py::arg("values").noconvert())
      .def("values", &values_of, py::arg("weights").noconvert(), py::arg("obs").noconvert());
}
