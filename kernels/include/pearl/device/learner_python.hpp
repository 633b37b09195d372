// The part that the Python bindings of the Learners on parallel devices share.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "pearl/device/learner.hpp"
#include "pearl/tape.hpp"

namespace pearl::device {

using bindings::Array;
using bindings::Released;
using Floats = Array<float>;
using OptionalFloats = std::optional<Floats>;
// kind, first input, second input, outputs, weight, bias, eps: learner::Op.
using OpTuple =
    std::tuple<std::string, std::ptrdiff_t, std::ptrdiff_t, std::size_t, std::ptrdiff_t, std::ptrdiff_t, float>;

inline NetworkSource network_of(const std::pair<std::size_t, std::vector<OpTuple>>& source) {
  NetworkSource made{source.first, {}};
  for (const auto& [kind, first, second, width, weight, bias, eps] : source.second)
    made.ops.push_back({learner::op_kind(kind), {first, second}, width, weight, bias, eps});
  return made;
}

inline void check_size(const Floats& array, const char* name, std::size_t size) {
  if (static_cast<std::size_t>(array.size()) != size)
    throw LearnerError(std::string(name) + " must hold " + std::to_string(size) + " numbers; found " +
                       std::to_string(array.size()) + ".");
}

// The memory of an array of `size` numbers that kernels read and write; null for None.
inline float* shared_memory(DeviceQueue& queue, const OptionalFloats& array, const char* name, std::size_t size) {
  if (!array) return nullptr;
  check_size(*array, name, size);
  float* data = Floats(*array).mutable_data();  // ValueError for read-only memory
  if (!queue.reaches(data))
    throw LearnerError(std::string(name) +
                       " must lie in memory that the device shares: use Queue.shared_floats.");
  return data;
}

using Networks = std::vector<std::pair<std::size_t, std::vector<OpTuple>>>;

// A learner (DeviceLearner or FpgaLearner) and the arrays that it works on.
template <class Kernel>
struct HeldLearner {
  using Queue = typename Kernel::Queue;
  HeldLearner(std::shared_ptr<Queue> on, bool actor_critic, const Networks& networks,
              const std::array<OptionalFloats, 4>& parameters, const Floats& scales, std::size_t observation_size,
              std::size_t action_size, const OptionalFloats& log_alpha, const typename Kernel::Cut& cut)
      : queue(std::move(on)), arrays(parameters), alpha(log_alpha) {
    LearnerModel model = model_of(actor_critic, networks, scales, observation_size, action_size);
    learner = std::make_unique<Kernel>(queue, std::move(model), cut);
  }

  LearnerModel model_of(bool actor_critic, const Networks& networks, const Floats& scales,
                        std::size_t observation_size, std::size_t action_size) {
    LearnerModel model;
    model.actor_critic = actor_critic;
    for (const auto& network : networks) model.networks.push_back(network_of(network));
    for (std::size_t v = 0; v < 4; ++v) {
      model.counts[v] = arrays[v] ? static_cast<std::size_t>(arrays[v]->size()) : 0;
      model.parameters[v] = shared_memory(*queue, arrays[v], "Parameters", model.counts[v]);
    }
    check_model(model, observation_size, action_size, static_cast<std::size_t>(scales.size()));
    model.scales.assign(scales.data(), scales.data() + scales.size());
    model.observation_size = observation_size;
    model.action_size = action_size;
    twofold = actor_critic && model.networks[0].ops.back().width == 2 * action_size;
    model.log_alpha = shared_memory(*queue, alpha, "log_alpha", 1);
    counts = {model.counts[tape::kOnline], actor_critic ? model.counts[tape::kActor] : 0, alpha ? std::size_t{1} : 0};
    return model;
  }

  // Throws LearnerError for networks that do not fit the parameters and transitions: kernels check nothing.
  static void check_model(const LearnerModel& model, std::size_t observations, std::size_t actions,
                          std::size_t scales) {
    const auto check = [&](std::size_t network, std::size_t vector, std::size_t inputs, bool wanted) {
      if (model.parameters[vector] == nullptr && !wanted) return;
      const NetworkSource& source = model.networks[network];
      static_cast<void>(learner::Network(source.inputs, source.ops, model.counts[vector]));
      if (source.inputs != inputs)
        throw LearnerError("Network " + std::to_string(network) + " takes " + std::to_string(source.inputs) +
                           " inputs; its transitions have " + std::to_string(inputs) + ".");
    };
    const std::size_t networks = model.networks.size();
    if (model.actor_critic ? networks < 2 || networks > 3 : networks != 1)
      throw LearnerError("A learner takes one network, or an actor and one or two critics; found " +
                         std::to_string(networks) + ".");
    if (!model.actor_critic) {
      for (const std::size_t vector : {tape::kOnline, tape::kTarget}) check(0, vector, observations, true);
      return;
    }
    check(0, tape::kActor, observations, true);
    check(0, tape::kTargetActor, observations, false);
    for (std::size_t critic = 1; critic < networks; ++critic)
      for (const std::size_t vector : {tape::kOnline, tape::kTarget})
        check(critic, vector, observations + actions, true);
    const std::size_t outputs = model.networks[0].ops.back().width;
    if (outputs != actions && outputs != 2 * actions)
      throw LearnerError("An actor needs " + std::to_string(actions) + " outputs or twice as many; found " +
                         std::to_string(outputs) + ".");
    if (scales != 2 * (observations + actions))
      throw LearnerError("Scales are centers and half ranges of observations and actions, " +
                         std::to_string(2 * (observations + actions)) + " numbers; found " + std::to_string(scales) +
                         ".");
  }

  void set_adam(int which, double lr, double beta1, double beta2, double eps, double decay, bool decoupled,
                const Floats& first, const Floats& second, const OptionalFloats& max_second, const Floats& steps) {
    OptimizerSettings settings;
    settings.lr = lr;
    settings.beta1 = beta1;
    settings.beta2 = beta2;
    settings.eps = eps;
    settings.decay = decay;
    settings.decoupled = decoupled;
    const std::size_t size = size_of(which);
    settings.first = shared_memory(*queue, first, "exp_avg", size);
    settings.second = shared_memory(*queue, second, "exp_avg_sq", size);
    settings.max_second = shared_memory(*queue, max_second, "max_exp_avg_sq", size);
    check_size(steps, "steps", 1);
    settings.steps = Floats(steps).mutable_data();
    hold(which, settings, {first, second, max_second, steps});
  }
  void set_sgd(int which, double lr, double momentum, double dampening, double decay, bool nesterov,
               const OptionalFloats& buffer, bool fresh) {
    OptimizerSettings settings;
    settings.adam = false;
    settings.lr = lr;
    settings.momentum = momentum;
    settings.dampening = dampening;
    settings.decay = decay;
    settings.nesterov = nesterov;
    settings.fresh = fresh;
    settings.first = shared_memory(*queue, buffer, "momentum_buffer", size_of(which));
    hold(which, settings, {buffer});
  }
  void check_settings(bool stochastic, std::int64_t target_interval, std::int64_t policy_delay) const {
    if (target_interval < 1 || policy_delay < 1)
      throw LearnerError("target_interval and policy_delay must be at least 1; found " +
                         std::to_string(target_interval) + " and " + std::to_string(policy_delay) + ".");
    if (stochastic && !twofold) throw LearnerError("A stochastic actor needs two outputs for each action: a mean and a deviation.");
  }
  // The number of an optimizer's parameters.
  std::size_t size_of(int which) const {
    if (which < 0 || which > 2) throw LearnerError("Optimizers are 0, 1 and 2; found " + std::to_string(which) + ".");
    if (counts[static_cast<std::size_t>(which)] == 0)
      throw LearnerError("This Learner has no parameters for optimizer " + std::to_string(which) + ".");
    return counts[static_cast<std::size_t>(which)];
  }
  void hold(int which, const OptimizerSettings& settings, std::vector<OptionalFloats> held) {
    learner->set_optimizer(static_cast<LearnerWhich>(which), settings);
    state[static_cast<std::size_t>(which)] = std::move(held);
  }

  std::shared_ptr<Queue> queue;
  std::array<OptionalFloats, 4> arrays;
  OptionalFloats alpha;
  std::array<std::size_t, 3> counts{};
  bool twofold = false;  // the actor has two outputs for each action
  std::array<std::vector<OptionalFloats>, 3> state;
  std::unique_ptr<Kernel> learner;
};

inline py::dict as_dict(const LearnerMetrics& metrics) {
  py::dict out;
  out["loss"] = metrics.loss;
  out["td_error"] = metrics.td_error;
  out["gradient_norm"] = metrics.gradient_norm;
  out["actor_gradient_norm"] = metrics.actor_gradient_norm;
  return out;
}

// Binds a method of a learner, called without the GIL.
template <class Kernel, class Result, class... Arguments>
auto on_learner(Result (Kernel::*method)(Arguments...)) {
  return [method](HeldLearner<Kernel>& self, Arguments... arguments) {
    const Released released;
    return (self.learner.get()->*method)(arguments...);
  };
}

// One step on columns in host memory.
template <class Kernel>
std::pair<Floats, py::dict> step(HeldLearner<Kernel>& self, const std::vector<py::array>& columns,
                                 const Floats& weights, std::int64_t number) {
  const auto rows = static_cast<std::size_t>(weights.size());
  if (rows < 1) throw LearnerError("A batch needs at least one transition; found none.");
  const DeviceBatch batch = self.learner->own_batch(rows);
  const RowBytes bytes = self.learner->row_bytes();
  static constexpr const char* names[5] = {"obs", "action", "reward", "next_obs", "discount"};
  if (columns.size() != 5)
    throw LearnerError("A batch has five columns; found " + std::to_string(columns.size()) + ".");
  for (std::size_t c = 0; c < 5; ++c) {
    const bool contiguous = (columns[c].flags() & py::array::c_style) != 0;
    if (!contiguous || static_cast<std::size_t>(columns[c].nbytes()) != rows * bytes[c])
      throw LearnerError(std::string("Column \"") + names[c] + "\" must hold " + std::to_string(rows) + " rows of " +
                         std::to_string(bytes[c]) + " bytes; found " + std::to_string(columns[c].nbytes()) +
                         " bytes in total.");
    std::memcpy(const_cast<void*>(batch.columns[c]), columns[c].data(), rows * bytes[c]);
  }
  std::memcpy(const_cast<float*>(batch.weights), weights.data(), rows * sizeof(float));
  Floats priorities(static_cast<py::ssize_t>(rows));
  float* out = priorities.mutable_data();
  LearnerMetrics metrics;
  {
    const Released released;
    self.learner->set_batch(rows, batch);
    self.learner->launch_step(number);
    metrics = self.learner->finish();
    std::memcpy(out, batch.priorities, rows * sizeof(float));
  }
  return {priorities, as_dict(metrics)};
}

// Binds the constructor, which takes the `Fields` of the learner's cut as keywords named by `options`; settings,
// optimizers and steps.
template <class Kernel, class... Fields, class... Options>
void bind_learner_methods(py::class_<HeldLearner<Kernel>>& cls, const Options&... options) {
  using Held = HeldLearner<Kernel>;
  cls.def(py::init([](std::shared_ptr<typename Kernel::Queue> queue, bool actor_critic, const Networks& networks,
                      const std::array<OptionalFloats, 4>& parameters, const Floats& scales,
                      std::size_t observation_size, std::size_t action_size, const OptionalFloats& log_alpha,
                      Fields... fields) {
            return std::make_unique<Held>(std::move(queue), actor_critic, networks, parameters, scales,
                                          observation_size, action_size, log_alpha,
                                          typename Kernel::Cut{std::move(fields)...});
          }),
          py::arg("queue").none(false), py::arg("actor_critic"), py::arg("networks"), py::arg("parameters"),
          py::arg("scales"), py::arg("observation_size"), py::arg("action_size"), py::arg("log_alpha").noconvert(),
          py::kw_only(), options...)
      .def(
          "set",
          [](Held& self, bool double_q, bool stochastic, float saturation_penalty, float target_noise,
             float noise_clip, float log_std_low, float log_std_high, float target_entropy, float max_grad_norm,
             double tau, std::int64_t target_interval, std::int64_t policy_delay, std::uint64_t noise_seed) {
            self.check_settings(stochastic, target_interval, policy_delay);
            self.learner->set({double_q, stochastic, saturation_penalty, target_noise, noise_clip, log_std_low,
                              log_std_high, target_entropy, max_grad_norm, tau, target_interval, policy_delay,
                              noise_seed});
          },
          py::kw_only(), py::arg("double_q") = false, py::arg("stochastic") = false,
          py::arg("saturation_penalty") = 0.0f, py::arg("target_noise") = 0.0f, py::arg("noise_clip") = 0.0f,
          py::arg("log_std_low") = -20.0f, py::arg("log_std_high") = 2.0f, py::arg("target_entropy") = 0.0f,
          py::arg("max_grad_norm") = 0.0f, py::arg("tau") = 1.0, py::arg("target_interval") = 1,
          py::arg("policy_delay") = 1, py::arg("noise_seed") = 0)
      .def("set_adam", &Held::set_adam, py::arg("which"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("decay"), py::arg("decoupled"), py::arg("first").noconvert(),
           py::arg("second").noconvert(), py::arg("max_second").noconvert(), py::arg("steps").noconvert())
      .def("set_sgd", &Held::set_sgd, py::arg("which"), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
           py::arg("decay"), py::arg("nesterov"), py::arg("buffer").noconvert(), py::arg("fresh"))
      .def("step", &step<Kernel>, py::arg("columns"), py::arg("weights").noconvert(), py::arg("number"));
}

}  // namespace pearl::device
