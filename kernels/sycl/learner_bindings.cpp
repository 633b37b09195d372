// Python bindings of the Learner on a SYCL device.

#include <array>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/bindings.hpp"
#include "bindings.hpp"
#include "learner.hpp"
#include "training_loop.hpp"

namespace pearl::device {
namespace {

using bindings::Array;
using bindings::Released;
using Floats = Array<float>;
using OptionalFloats = std::optional<Floats>;
// kind, first input, second input, outputs, weight, bias, eps: learner::Op.
using OpTuple = std::tuple<std::string, std::ptrdiff_t, std::ptrdiff_t, std::size_t, std::ptrdiff_t, std::ptrdiff_t, float>;

NetworkSource network_of(const std::pair<std::size_t, std::vector<OpTuple>>& source) {
  NetworkSource made{source.first, {}};
  for (const auto& [kind, first, second, width, weight, bias, eps] : source.second)
    made.ops.push_back({learner::op_kind(kind), {first, second}, width, weight, bias, eps});
  return made;
}

// Memory that kernels see too.
float* shared_memory(DeviceQueue& queue, const OptionalFloats& array, const char* name) {
  if (!array) return nullptr;
  auto* data = const_cast<float*>(array->data());
  if (sycl::get_pointer_type(data, queue.sycl().get_context()) == sycl::usm::alloc::unknown)
    throw LearnerError(std::string(name) + " must lie in memory that the device shares: make it by Queue.shared_floats.");
  return data;
}

// The learner and the arrays that it works on.
struct HeldLearner {
  HeldLearner(std::shared_ptr<DeviceQueue> on, bool actor_critic,
              const std::vector<std::pair<std::size_t, std::vector<OpTuple>>>& networks,
              const std::array<OptionalFloats, 4>& parameters, const Floats& scales, std::size_t observation_size,
              std::size_t action_size, const OptionalFloats& log_alpha, int slices, int columns_per_tile)
      : queue(std::move(on)),
        arrays(parameters),
        alpha(log_alpha),
        learner(*queue, model_of(actor_critic, networks, scales, observation_size, action_size),
                {slices, columns_per_tile}) {}

  LearnerModel model_of(bool actor_critic, const std::vector<std::pair<std::size_t, std::vector<OpTuple>>>& networks,
                        const Floats& scales, std::size_t observation_size, std::size_t action_size) {
    LearnerModel model;
    model.actor_critic = actor_critic;
    for (const auto& network : networks) model.networks.push_back(network_of(network));
    for (std::size_t v = 0; v < 4; ++v) {
      model.parameters[v] = shared_memory(*queue, arrays[v], "Parameters");
      model.counts[v] = arrays[v] ? static_cast<std::size_t>(arrays[v]->size()) : 0;
    }
    model.scales.assign(scales.data(), scales.data() + scales.size());
    model.observation_size = observation_size;
    model.action_size = action_size;
    model.log_alpha = shared_memory(*queue, alpha, "log_alpha");
    return model;
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
    settings.first = shared_memory(*queue, first, "exp_avg");
    settings.second = shared_memory(*queue, second, "exp_avg_sq");
    settings.max_second = shared_memory(*queue, max_second, "max_exp_avg_sq");
    settings.steps = const_cast<float*>(steps.data());
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
    settings.first = shared_memory(*queue, buffer, "momentum_buffer");
    hold(which, settings, {buffer});
  }
  void hold(int which, const OptimizerSettings& settings, std::vector<OptionalFloats> held) {
    if (which < 0 || which > 2) throw LearnerError("Optimizers are 0, 1 and 2; found " + std::to_string(which) + ".");
    learner.set_optimizer(static_cast<DeviceLearner::Which>(which), settings);
    state[static_cast<std::size_t>(which)] = std::move(held);
  }

  std::shared_ptr<DeviceQueue> queue;
  std::array<OptionalFloats, 4> arrays;
  OptionalFloats alpha;
  std::array<std::vector<OptionalFloats>, 3> state;
  DeviceLearner learner;
};

py::dict as_dict(const LearnerMetrics& metrics) {
  py::dict out;
  out["loss"] = metrics.loss;
  out["td_error"] = metrics.td_error;
  out["gradient_norm"] = metrics.gradient_norm;
  out["actor_gradient_norm"] = metrics.actor_gradient_norm;
  return out;
}

// One step on columns of the host.
std::pair<Floats, py::dict> step(HeldLearner& self, const std::vector<py::array>& columns, const Floats& weights,
                                 std::int64_t number) {
  const auto rows = static_cast<std::size_t>(weights.size());
  const DeviceBatch batch = self.learner.own_batch(rows);
  const std::size_t observation = self.learner.observation_size() * sizeof(float);
  const std::size_t bytes[5] = {observation, self.learner.action_bytes(), sizeof(float), observation, sizeof(float)};
  static constexpr const char* names[5] = {"obs", "action", "reward", "next_obs", "discount"};
  if (columns.size() != 5) throw LearnerError("A batch has five columns; found " + std::to_string(columns.size()) + ".");
  for (std::size_t c = 0; c < 5; ++c) {
    const bool contiguous = (columns[c].flags() & py::array::c_style) != 0;
    if (!contiguous || static_cast<std::size_t>(columns[c].nbytes()) != rows * bytes[c])
      throw LearnerError(std::string("Column \"") + names[c] + "\" must hold " + std::to_string(rows) + " rows of " +
                         std::to_string(bytes[c]) + " bytes; found " + std::to_string(columns[c].nbytes()) + " in all.");
    std::memcpy(const_cast<void*>(batch.columns[c]), columns[c].data(), rows * bytes[c]);
  }
  std::memcpy(const_cast<float*>(batch.weights), weights.data(), rows * sizeof(float));
  Floats priorities(static_cast<py::ssize_t>(rows));
  float* out = priorities.mutable_data();
  LearnerMetrics metrics;
  {
    const Released released;
    self.learner.set_batch(rows, batch);
    self.learner.launch(number);
    metrics = self.learner.finish();
    std::memcpy(out, batch.priorities, rows * sizeof(float));
  }
  return {priorities, as_dict(metrics)};
}

// A loop on the caller's queues and policy.
struct HeldLoop {
  HeldLoop(HeldLearner& learner, std::shared_ptr<SumTreeReplay> replay, std::shared_ptr<ColumnStore> storage,
           std::size_t batch_size, bindings::OnBuffer<SlotQueue>& grants, bindings::OnBuffer<SlotQueue>& done,
           bindings::OnBuffer<Snapshot>& snapshot, std::vector<Floats> policy_held, std::size_t interval,
           Array<std::int64_t> steps_held)
      : policy(std::move(policy_held)),
        steps(std::move(steps_held)),
        loop(std::move(replay), std::move(storage), learner.learner, batch_size,
             {&grants, static_cast<const char*>(grants.view.ptr), &done, static_cast<char*>(done.view.ptr), &snapshot},
             weights_of(policy), interval, steps.mutable_data()) {}

  static std::vector<Weights> weights_of(const std::vector<Floats>& arrays) {
    std::vector<Weights> weights;
    for (const Floats& array : arrays) weights.push_back({array.data(), static_cast<std::size_t>(array.size())});
    return weights;
  }

  std::vector<Floats> policy;
  Array<std::int64_t> steps;
  DeviceLoop loop;
};

py::tuple last_batch(const HeldLoop& held) {
  py::list columns;
  for (std::size_t i = 0; i < held.loop.storage().row_bytes().size(); ++i) {
    Array<std::uint8_t> bytes(std::vector<std::size_t>{held.loop.batch_size(), held.loop.storage().row_bytes()[i]});
    held.loop.last_column(i, bytes.mutable_data());
    columns.append(bytes);
  }
  const std::vector<std::int64_t> indices = held.loop.last_indices();
  const std::vector<float> weights = held.loop.last_weights();
  return py::make_tuple(Array<std::int64_t>(static_cast<py::ssize_t>(indices.size()), indices.data()),
                        Floats(static_cast<py::ssize_t>(weights.size()), weights.data()), columns);
}

}  // namespace

void bind_learner(py::module_& module) {
  py::class_<HeldLearner>(module, "Learner", "Networks of linear layers and their update rule on a device.")
      .def(py::init<std::shared_ptr<DeviceQueue>, bool,
                    const std::vector<std::pair<std::size_t, std::vector<OpTuple>>>&,
                    const std::array<OptionalFloats, 4>&, const Floats&, std::size_t, std::size_t,
                    const OptionalFloats&, int, int>(),
           py::arg("queue"), py::arg("actor_critic"), py::arg("networks"), py::arg("parameters"), py::arg("scales"),
           py::arg("observation_size"), py::arg("action_size"), py::arg("log_alpha").noconvert(),
           py::kw_only(), py::arg("slices") = 0, py::arg("columns_per_tile") = 0)
      .def(
          "set",
          [](HeldLearner& self, bool double_q, bool stochastic, float saturation_penalty, float target_noise,
             float noise_clip, float log_std_low, float log_std_high, float target_entropy, float max_grad_norm,
             double tau, std::int64_t target_interval, std::int64_t policy_delay, std::uint64_t noise_seed) {
            self.learner.set({double_q, stochastic, saturation_penalty, target_noise, noise_clip, log_std_low,
                              log_std_high, target_entropy, max_grad_norm, tau, target_interval, policy_delay,
                              noise_seed});
          },
          py::kw_only(), py::arg("double_q") = false, py::arg("stochastic") = false,
          py::arg("saturation_penalty") = 0.0f, py::arg("target_noise") = 0.0f, py::arg("noise_clip") = 0.0f,
          py::arg("log_std_low") = -20.0f, py::arg("log_std_high") = 2.0f, py::arg("target_entropy") = 0.0f,
          py::arg("max_grad_norm") = 0.0f, py::arg("tau") = 1.0, py::arg("target_interval") = 1,
          py::arg("policy_delay") = 1, py::arg("noise_seed") = 0)
      .def("set_adam", &HeldLearner::set_adam, py::arg("which"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("decay"), py::arg("decoupled"), py::arg("first").noconvert(),
           py::arg("second").noconvert(), py::arg("max_second").noconvert(), py::arg("steps").noconvert())
      .def("set_sgd", &HeldLearner::set_sgd, py::arg("which"), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
           py::arg("decay"), py::arg("nesterov"), py::arg("buffer").noconvert(), py::arg("fresh"))
      .def("step", &step, py::arg("columns"), py::arg("weights").noconvert(), py::arg("number"));

  py::class_<HeldLoop>(module, "TrainingLoop", "Setting 2 on a device; as pearl._native.TrainingLoop.")
      .def(py::init<HeldLearner&, std::shared_ptr<SumTreeReplay>, std::shared_ptr<ColumnStore>, std::size_t,
                    bindings::OnBuffer<SlotQueue>&, bindings::OnBuffer<SlotQueue>&, bindings::OnBuffer<Snapshot>&,
                    std::vector<Floats>, std::size_t, Array<std::int64_t>>(),
           py::arg("learner"), py::arg("replay"), py::arg("storage"), py::arg("batch_size"), py::arg("grants"),
           py::arg("done"), py::arg("snapshot"), py::arg("policy"), py::arg("interval"), py::arg("steps").noconvert(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(), py::keep_alive<1, 8>())
      .def(
          "run_once",
          [](HeldLoop& held, double timeout_s) {
            const Released released;
            return held.loop.run_once(timeout_s);
          },
          py::arg("timeout_s"))
      .def("restart", [](HeldLoop& held) { held.loop.restart(); })
      .def(
          "open_window",
          [](HeldLoop& held) {
            const Released released;
            held.loop.window().open();
          })
      .def("close_window", [](HeldLoop& held) { held.loop.window().close(); })
      .def("last_batch", &last_batch, "Indices, weights, and the bytes of each column's rows.")
      .def(
          "time_parts", [](HeldLoop& held, bool wanted) { held.loop.time_parts(wanted); }, py::arg("wanted"))
      .def("seconds", [](const HeldLoop& held) { return bindings::seconds_dict(held.loop.seconds()); });
}

}  // namespace pearl::device
