// Python bindings of the native learner: networks, optimizers and algorithms on torch's own memory.

#include <array>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "learner_bindings.hpp"
#include "pearl/ensemble.hpp"
#include "pearl/learner/actor_critic.hpp"
#include "pearl/learner/dqn.hpp"
#include "pearl/learner/kernels.hpp"
#include "pearl/learner/network.hpp"
#include "pearl/normal.hpp"

using namespace bindings;
namespace learner = pearl::learner;

namespace {

// kind, first input, second input, outputs, weight, bias, eps: learner::Op.
using OpTuple = std::tuple<std::string, std::ptrdiff_t, std::ptrdiff_t, std::size_t, std::ptrdiff_t, std::ptrdiff_t, float>;
// channels, height and width of the input; kernel, stride and padding of rows and columns: learner::Window.
using WindowArray = std::array<std::size_t, 9>;
// Convolutions and poolings: kind, input, outputs, weight, bias, window.
using WindowTuple = std::tuple<std::string, std::ptrdiff_t, std::size_t, std::ptrdiff_t, std::ptrdiff_t, WindowArray>;

learner::Op op_of(const OpTuple& op) {
  const auto& [kind, first, second, width, weight, bias, eps] = op;
  return {learner::op_kind(kind), {first, second}, width, weight, bias, eps};
}

learner::Op op_of(const WindowTuple& op) {
  const auto& [kind, input, width, weight, bias, w] = op;
  return {learner::op_kind(kind), {input, learner::kNone}, width, weight, bias, 0.0f,
          {w[0], w[1], w[2], {w[3], w[4]}, {w[5], w[6]}, {w[7], w[8]}}};
}

learner::Network make_network(std::size_t inputs, const std::vector<std::variant<OpTuple, WindowTuple>>& ops,
                              std::size_t parameters, bool of_bytes) {
  std::vector<learner::Op> made;
  for (const auto& op : ops) made.push_back(std::visit([](const auto& tuple) { return op_of(tuple); }, op));
  return {inputs, made, parameters, of_bytes};
}

// Checks `rows` rows of a network's inputs, float32 or bytes.
void check_inputs(const learner::Network& network, const char* name, const py::array& inputs, std::size_t rows) {
  const bool fits = network.takes_bytes() ? py::isinstance<Array<std::uint8_t>>(inputs)
                                          : py::isinstance<Array<float>>(inputs);
  if (!fits)
    throw pearl::LearnerError(std::string(name) + " must be contiguous " +
                              (network.takes_bytes() ? "uint8" : "float32") + "; found dtype " +
                              std::string(py::str(inputs.dtype())) + ". Convert it first.");
  check_rows(inputs, name, rows, network.input_width());
}

// What a network computes, again and again in the same memory. Used from one thread at a time.
struct Evaluator {
  explicit Evaluator(const learner::Network& evaluated) : network(evaluated), workspace(evaluated, 1, false) {}

  Floats forward(const Floats& parameters, const py::array& inputs) {
    const std::size_t rows = rows_of(inputs), panel = network.kernels().panel, width = network.output_width();
    check_size(parameters, "parameters", network.parameters());
    check_inputs(network, "inputs", inputs, rows);
    Floats out(std::vector<std::size_t>{rows, width});
    const auto* x = static_cast<const char*>(inputs.data());
    const float* weights = parameters.data();
    float* y = out.mutable_data();
    const Released released;
    for (std::size_t first = 0; first < rows; first += panel) {
      const std::size_t count = std::min(panel, rows - first);
      network.load(x + first * network.input_bytes(), count, workspace, 0);
      network.forward(weights, workspace, 1, count, network.columns(count));
      network.kernels().transpose(workspace.value(network.output(), 0), width, count, panel, y + first * width, width);
    }
    return out;
  }

  const learner::Network& network;
  learner::Workspace workspace;
};

// Gradients of sum(slopes * network(inputs)) with respect to the parameters and, of vectors, to the inputs.
py::tuple gradients(const learner::Network& network, const Floats& parameters, const py::array& inputs,
                    const Floats& slopes) {
  const std::size_t rows = rows_of(inputs), panel = network.kernels().panel, width = network.output_width();
  check_size(parameters, "parameters", network.parameters());
  check_inputs(network, "inputs", inputs, rows);
  check_rows(slopes, "slopes", rows, width);
  Floats of_parameters(static_cast<py::ssize_t>(network.parameters()));
  std::fill_n(of_parameters.mutable_data(), network.parameters(), 0.0f);
  const std::size_t panels = std::max<std::size_t>(1, (rows + panel - 1) / panel), columns = network.columns(rows);
  learner::Workspace workspace(network, panels, true);
  const auto* x = static_cast<const char*>(inputs.data());
  for (std::size_t p = 0; p < panels; ++p) {
    const std::size_t count = std::min(panel, rows - p * panel);
    network.load(x + p * panel * network.input_bytes(), count, workspace, p);
    network.kernels().transpose(slopes.data() + p * panel * width, count, width, width,
                                workspace.gradient(network.output(), p), panel);
  }
  network.forward(parameters.data(), workspace, panels, rows, columns);
  network.backward(parameters.data(), of_parameters.mutable_data(), workspace, panels, rows, columns, false,
                   network.takes_vectors() ? network.input_width() : 0);
  if (!network.takes_vectors()) return py::make_tuple(std::move(of_parameters), py::none());
  Floats of_inputs(std::vector<std::size_t>{rows, network.input_width()});
  for (std::size_t p = 0; p < panels; ++p)
    network.kernels().transpose(workspace.gradient(0, p), network.input_width(), std::min(panel, rows - p * panel),
                                panel, of_inputs.mutable_data() + p * panel * network.input_width(),
                                network.input_width());
  return py::make_tuple(std::move(of_parameters), std::move(of_inputs));
}

// c (m, n) by the learner's kernels; a (m, k) in row or column order, b (k, n) and c in row order.
void gemm(const py::array_t<float>& a, const Floats& b, Floats& c, const OptionalFloats& bias,
          const OptionalFloats& gate, bool relu, bool accumulate) {
  constexpr auto kFloat = static_cast<py::ssize_t>(sizeof(float));
  const bool shapes = a.ndim() == 2 && b.ndim() == 2 && c.ndim() == 2 && a.shape(1) == b.shape(0) &&
                      c.shape(0) == a.shape(0) && c.shape(1) == b.shape(1);
  if (!shapes || (a.strides(0) != kFloat && a.strides(1) != kFloat) || a.strides(0) % kFloat != 0 ||
      a.strides(1) % kFloat != 0)
    throw pearl::LearnerError("gemm needs matrices (m, k), (k, n) and (m, n), each row or column of the first " +
                              std::string("contiguous; found ") + shape_of(a) + ", " + shape_of(b) + " and " +
                              shape_of(c) + ".");
  if (bias) check_size(*bias, "bias", static_cast<std::size_t>(c.shape(0)));
  if (gate) check_size(*gate, "gate", static_cast<std::size_t>(c.size()));
  learner::Gemm g{};
  g.a = a.data();
  g.a_row = a.strides(0) / kFloat;
  g.a_step = a.strides(1) / kFloat;
  g.b = b.data();
  g.b_step = g.c_row = b.shape(1);
  g.c = c.mutable_data();
  g.m = static_cast<std::size_t>(a.shape(0));
  g.n = static_cast<std::size_t>(b.shape(1));
  g.depth = g.segment = static_cast<std::size_t>(a.shape(1));
  g.bias = bias ? bias->data() : nullptr;
  g.gate = gate ? gate->data() : nullptr;
  g.relu = relu;
  g.accumulate = accumulate;
  learner::learner_kernels().gemm(g);
}

using HeldDqn = Held<learner::DqnLearner>;
using HeldActorCritic = Held<learner::ActorCriticLearner>;

std::unique_ptr<HeldDqn> make_dqn(const learner::Network& network, Floats online, Floats target, std::size_t threads,
                                  std::size_t quantiles) {
  check_size(online, "online", network.parameters());
  check_size(target, "target", network.parameters());
  if (threads < 1) throw pearl::LearnerError("threads must be at least 1; found 0.");
  return std::make_unique<HeldDqn>(std::vector<py::object>{online, target}, network, online.mutable_data(),
                                   target.mutable_data(), threads, quantiles);
}

void set_dqn(HeldDqn& dqn, bool double_q, const std::string& loss, double max_grad_norm, double tau,
             std::uint64_t target_update_interval) {
  if (loss != "huber" && loss != "mse")
    throw pearl::LearnerError("loss must be \"huber\" or \"mse\"; found \"" + loss + "\".");
  if (target_update_interval < 1) throw pearl::LearnerError("target_update_interval must be at least 1; found 0.");
  dqn.set({double_q, loss == "mse" ? learner::Loss::mse : learner::Loss::huber, max_grad_norm, tau,
           target_update_interval});
}

// Checks the columns of a batch, but for its observations, whose actions have `action_size` numbers each.
learner::Batch batch_of(const py::array& obs, const py::array& actions, std::size_t action_size, const Floats& rewards,
                        const py::array& next_obs, const Floats& discounts, const Floats& weights) {
  const std::size_t rows = rows_of(rewards);
  if (rows < 1) throw pearl::LearnerError("A batch needs at least one transition; found none.");
  check_rows(actions, "action", rows, action_size);
  check_rows(rewards, "reward", rows, 1);
  check_rows(discounts, "discount", rows, 1);
  check_rows(weights, "weights", rows, 1);
  return {rows,           obs.data(),       actions.data(), rewards.data(),
          next_obs.data(), discounts.data(), weights.data(), nullptr};
}

py::tuple step_dqn(HeldDqn& dqn, const py::array& obs, const Array<std::int64_t>& actions, const Floats& rewards,
                   const py::array& next_obs, const Floats& discounts, const Floats& weights, std::uint64_t number,
                   HeldOptimizer& optimizer, const std::optional<Array<std::uint8_t>>& next_masks) {
  learner::Batch batch = batch_of(obs, actions, 1, rewards, next_obs, discounts, weights);
  if (next_masks) {
    check_rows(*next_masks, "next_action_mask", batch.rows, dqn.actions());
    batch.next_masks = next_masks->data();
  }
  check_inputs(dqn.network(), "obs", obs, batch.rows);
  check_inputs(dqn.network(), "next_obs", next_obs, batch.rows);
  check_parameters(optimizer, "network", dqn.network().parameters());
  Floats priorities(static_cast<py::ssize_t>(batch.rows));
  learner::StepMetrics metrics{};
  {
    const Released released;
    metrics = dqn.step(batch, number, optimizer, priorities.mutable_data());
  }
  return py::make_tuple(std::move(priorities), metrics.loss, metrics.td_error, metrics.gradient_norm);
}

std::vector<float> copied(const Floats& values) { return {values.data(), values.data() + values.size()}; }

std::unique_ptr<HeldActorCritic> make_actor_critic(
    const learner::Network& actor, const std::vector<py::object>& critic_objects, Floats actor_weights,
    OptionalFloats target_actor_weights, Floats critic_weights, Floats target_critic_weights, const Floats& obs_center,
    const Floats& obs_half_range, const Floats& action_center, const Floats& action_half_range, std::size_t threads) {
  std::vector<const learner::Network*> critics;
  for (const py::object& critic : critic_objects) critics.push_back(&critic.cast<const learner::Network&>());
  if (critics.empty() || critics.size() > 255)
    throw pearl::LearnerError("There must be 1 to 255 critics; found " + std::to_string(critics.size()) + ".");
  if (threads < 1) throw pearl::LearnerError("threads must be at least 1; found 0.");
  check_size(actor_weights, "actor_weights", actor.parameters());
  if (target_actor_weights) check_size(*target_actor_weights, "target_actor_weights", actor.parameters());
  for (const learner::Network* critic : critics) {
    check_size(critic_weights, "critic_weights", critic->parameters());
    check_size(target_critic_weights, "target_critic_weights", critic->parameters());
  }
  check_size(obs_center, "obs_center", actor.input_width());
  check_size(obs_half_range, "obs_half_range", actor.input_width());
  check_size(action_half_range, "action_half_range", static_cast<std::size_t>(action_center.size()));
  learner::ActorCriticModel model{};
  model.actor = &actor;
  model.critics = critics;
  model.actor_weights = actor_weights.mutable_data();
  model.target_actor_weights = target_actor_weights ? target_actor_weights->mutable_data() : nullptr;
  model.critic_weights = critic_weights.mutable_data();
  model.target_critic_weights = target_critic_weights.mutable_data();
  model.observations = {copied(obs_center), copied(obs_half_range)};
  model.actions = {copied(action_center), copied(action_half_range)};
  // The critics, not the list: the caller may change it.
  std::vector<py::object> held = critic_objects;
  for (const Floats& array : {actor_weights, critic_weights, target_critic_weights}) held.push_back(array);
  if (target_actor_weights) held.push_back(*target_actor_weights);
  return std::make_unique<HeldActorCritic>(std::move(held), model, threads);
}

py::tuple step_actor_critic(HeldActorCritic& self, const Floats& obs, const Floats& actions, const Floats& rewards,
                            const Floats& next_obs, const Floats& discounts, const Floats& weights,
                            const OptionalFloats& next_noise, const OptionalFloats& noise, bool moves_policy,
                            bool moves_targets, HeldOptimizer& critic, HeldOptimizer& actor,
                            HeldOptimizer* temperature, std::optional<Floats> log_alpha, std::uint64_t seed,
                            std::uint64_t number) {
  const learner::Batch columns = batch_of(obs, actions, self.action_size(), rewards, next_obs, discounts, weights);
  check_rows(obs, "obs", columns.rows, self.observation_size());
  check_rows(next_obs, "next_obs", columns.rows, self.observation_size());
  if (next_noise) check_rows(*next_noise, "next_noise", columns.rows, self.action_size());
  if (noise) check_rows(*noise, "noise", columns.rows, self.action_size());
  if (self.stochastic() && (!next_noise || (moves_policy && !noise) || !log_alpha))
    throw pearl::LearnerError("A stochastic policy needs next_noise, noise and log_alpha.");
  if (log_alpha) check_size(*log_alpha, "log_alpha", 1);
  check_parameters(critic, "critic", self.model().critics[0]->parameters());
  if (moves_policy) check_parameters(actor, "actor", self.model().actor->parameters());
  if (temperature != nullptr) check_parameters(*temperature, "temperature", 1);
  const learner::ActorCriticBatch batch = {columns, next_noise ? next_noise->data() : nullptr,
                                           noise ? noise->data() : nullptr, seed, number};
  Floats priorities(static_cast<py::ssize_t>(batch.rows));
  float* alpha = log_alpha ? log_alpha->mutable_data() : nullptr;
  learner::ActorCriticMetrics metrics{};
  {
    const Released released;
    metrics = self.step(batch, moves_policy, moves_targets, critic, actor, temperature, alpha,
                        priorities.mutable_data());
  }
  return py::make_tuple(std::move(priorities), metrics.loss, metrics.td_error, metrics.gradient_norm,
                        metrics.actor_gradient_norm);
}

using Steps = Array<std::int64_t>;

std::unique_ptr<learner::Algorithm> dqn_algorithm(HeldDqn& dqn, HeldOptimizer& optimizer, Steps steps, bool masked) {
  check_parameters(optimizer, "network", dqn.network().parameters());
  check_size(steps, "steps", 1);
  return std::make_unique<Held<learner::DqnAlgorithm>>(std::vector<py::object>{steps}, dqn, optimizer,
                                                       steps.mutable_data(), masked);
}

std::unique_ptr<learner::Algorithm> actor_critic_algorithm(HeldActorCritic& self, HeldOptimizer& critic,
                                                           HeldOptimizer& actor, HeldOptimizer* temperature,
                                                           OptionalFloats log_alpha, std::optional<Steps> noise_seed,
                                                           std::int64_t policy_delay, Steps steps) {
  if (self.stochastic() && (!noise_seed || !log_alpha))
    throw pearl::LearnerError("A stochastic policy needs noise_seed and log_alpha.");
  if (temperature != nullptr && !log_alpha) throw pearl::LearnerError("A temperature's optimizer needs log_alpha.");
  if (policy_delay < 1)
    throw pearl::LearnerError("policy_delay must be at least 1; found " + std::to_string(policy_delay) + ".");
  check_parameters(critic, "critic", self.model().critics[0]->parameters());
  check_parameters(actor, "actor", self.model().actor->parameters());
  if (temperature != nullptr) check_parameters(*temperature, "temperature", 1);
  check_size(steps, "steps", 1);
  std::vector<py::object> held = {steps};
  learner::ActorCriticParts parts = {self,    critic,  actor,        temperature,
                                     nullptr, nullptr, policy_delay, steps.mutable_data()};
  if (log_alpha) {
    check_size(*log_alpha, "log_alpha", 1);
    parts.log_alpha = log_alpha->mutable_data();
    held.push_back(*log_alpha);
  }
  if (noise_seed) {
    check_size(*noise_seed, "noise_seed", 1);
    parts.noise_seed = noise_seed->data();
    held.push_back(*noise_seed);
  }
  return std::make_unique<Held<learner::ActorCriticAlgorithm>>(std::move(held), parts);
}

Array<std::uint32_t> chosen_critics(std::uint64_t seed, std::uint64_t step, std::size_t critics, std::size_t chosen) {
  if (chosen < 1 || chosen > critics)
    throw pearl::LearnerError("1 to " + std::to_string(critics) + " critics can be chosen; found " +
                              std::to_string(chosen) + ".");
  Array<std::uint32_t> found(static_cast<py::ssize_t>(chosen));
  pearl::choose_critics(seed, step, critics, chosen, found.mutable_data());
  return found;
}

Floats dropout_mask(std::uint64_t seed, std::uint64_t step, std::uint32_t draw, std::size_t first, std::size_t rows,
                    std::size_t width, double rate) {
  if (!(rate >= 0.0 && rate < 1.0))
    throw pearl::LearnerError("Dropout drops a share from 0 to below 1; found " + std::to_string(rate) + ".");
  Floats mask(std::vector<std::size_t>{rows, width});
  pearl::fill_dropout({true, seed, step, draw, first}, 0, rate, rows, width, mask.mutable_data(), width, 1);
  return mask;
}

Floats normal_noise(std::uint64_t seed, std::uint64_t step, std::uint32_t draw, std::size_t rows, std::size_t size) {
  Floats noise(std::vector<std::size_t>{rows, size});
  pearl::fill_normal(seed, step, draw, rows * size, noise.mutable_data());
  return noise;
}

}  // namespace

void bind_learner(py::module_& m) {
  m.def("learner_kernel_variants", &learner::learner_kernel_variants);
  m.def("selected_learner_kernels", [] { return std::string(learner::learner_kernels().name); });
  m.def("select_learner_kernels", &learner::select_learner_kernels, py::arg("name"));
  m.def("select_matmul_precision", &learner::select_matmul_precision, py::arg("name"));
  m.def("gemm", &gemm, py::arg("a").noconvert(), py::arg("b").noconvert(), py::arg("c").noconvert(),
        py::arg("bias").noconvert() = py::none(), py::arg("gate").noconvert() = py::none(), py::arg("relu") = false,
        py::arg("accumulate") = false);
  m.def("normal_noise", &normal_noise, py::arg("seed"), py::arg("step"), py::arg("draw"), py::arg("rows"),
        py::arg("size"));

  m.def("chosen_critics", &chosen_critics, py::arg("seed"), py::arg("step"), py::arg("critics"), py::arg("chosen"));
  m.def("dropout_mask", &dropout_mask, py::arg("seed"), py::arg("step"), py::arg("draw"), py::arg("first"),
        py::arg("rows"), py::arg("width"), py::arg("rate"));

  py::class_<learner::Algorithm>(m, "Algorithm");
  py::class_<learner::Network>(m, "Network")
      .def(py::init(&make_network), py::arg("inputs"), py::arg("ops"), py::arg("parameters"),
           py::arg("of_bytes") = false)
      .def_property_readonly("inputs", &learner::Network::input_width)
      .def_property_readonly("outputs", &learner::Network::output_width)
      .def_property_readonly("parameters", &learner::Network::parameters)
      .def_property_readonly("takes_bytes", &learner::Network::takes_bytes)
      .def(
          "forward",
          [](const learner::Network& network, const Floats& parameters, const py::array& inputs) {
            return Evaluator(network).forward(parameters, inputs);
          },
          py::arg("parameters").noconvert(), py::arg("inputs").noconvert())
      .def("gradients", &gradients, py::arg("parameters").noconvert(), py::arg("inputs").noconvert(),
           py::arg("slopes").noconvert());
  py::class_<Evaluator>(m, "Evaluator")
      .def(py::init<const learner::Network&>(), py::arg("network"), py::keep_alive<1, 2>())
      .def("forward", &Evaluator::forward, py::arg("parameters").noconvert(), py::arg("inputs").noconvert());

  py::class_<HeldOptimizer>(m, "Optimizer")
      .def(py::init<>())
      .def(
          "set_adam",
          [](HeldOptimizer& optimizer, double lr, double beta1, double beta2, double eps, double weight_decay,
             bool decoupled, const Floats& first, const Floats& second, const OptionalFloats& max_second,
             const Floats& steps) {
            const auto size = static_cast<std::size_t>(first.size());
            float* moments = optimizer.hold(0, "first", first, size);
            float* squares = optimizer.hold(1, "second", second, size);
            float* largest = optimizer.hold(2, "max_second", max_second, size);
            float* count = optimizer.hold(3, "steps", steps, 1);
            optimizer.parameters = size;
            optimizer.set_adam({lr, beta1, beta2, eps, weight_decay, decoupled}, moments, squares, largest, count);
          },
          py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
          py::arg("decoupled"), py::arg("first").noconvert(), py::arg("second").noconvert(),
          py::arg("max_second").noconvert(), py::arg("steps").noconvert())
      .def(
          "set_sgd",
          [](HeldOptimizer& optimizer, std::size_t parameters, double lr, double momentum, double dampening,
             double weight_decay, bool nesterov, const OptionalFloats& buffer, bool first) {
            float* held = optimizer.hold(0, "buffer", buffer, parameters);
            optimizer.parameters = parameters;
            optimizer.set_sgd({lr, momentum, dampening, weight_decay, nesterov}, held, first);
          },
          py::arg("parameters"), py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
          py::arg("nesterov"), py::arg("buffer").noconvert(), py::arg("first"));

  py::class_<HeldDqn>(m, "DqnLearner")
      .def(py::init(&make_dqn), py::arg("network"), py::arg("online").noconvert(), py::arg("target").noconvert(),
           py::arg("threads"), py::arg("quantiles") = 0, py::keep_alive<1, 2>())
      .def("set", &set_dqn, py::arg("double_q"), py::arg("loss"), py::arg("max_grad_norm"), py::arg("tau"),
           py::arg("target_update_interval"))
      .def("algorithm", &dqn_algorithm, py::arg("optimizer"), py::arg("steps").noconvert(), py::arg("masked") = false,
           py::keep_alive<0, 1>(), py::keep_alive<0, 2>())
      .def("step", &step_dqn, py::arg("obs").noconvert(), py::arg("actions").noconvert(),
           py::arg("rewards").noconvert(), py::arg("next_obs").noconvert(), py::arg("discounts").noconvert(),
           py::arg("weights").noconvert(), py::arg("number"), py::arg("optimizer"),
           py::arg("next_masks").noconvert() = py::none());

  py::class_<HeldActorCritic>(m, "ActorCriticLearner")
      .def(py::init(&make_actor_critic), py::arg("actor"), py::arg("critics"), py::arg("actor_weights").noconvert(),
           py::arg("target_actor_weights").noconvert(), py::arg("critic_weights").noconvert(),
           py::arg("target_critic_weights").noconvert(), py::arg("obs_center").noconvert(),
           py::arg("obs_half_range").noconvert(), py::arg("action_center").noconvert(),
           py::arg("action_half_range").noconvert(), py::arg("threads"), py::keep_alive<1, 2>())
      .def(
          "set",
          [](HeldActorCritic& self, bool stochastic, double saturation_penalty, double target_noise, double noise_clip,
             double log_std_low, double log_std_high, double target_entropy, double tau, double max_grad_norm,
             std::size_t target_critics, std::size_t dropped_quantiles) {
            self.set({stochastic, saturation_penalty, target_noise, noise_clip, log_std_low, log_std_high,
                      target_entropy, tau, max_grad_norm, target_critics, dropped_quantiles});
          },
          py::arg("stochastic"), py::arg("saturation_penalty"), py::arg("target_noise"), py::arg("noise_clip"),
          py::arg("log_std_low"), py::arg("log_std_high"), py::arg("target_entropy"), py::arg("tau"),
          py::arg("max_grad_norm"), py::arg("target_critics") = 0, py::arg("dropped_quantiles") = 0)
      .def("algorithm", &actor_critic_algorithm, py::arg("critic"), py::arg("actor"), py::arg("temperature"),
           py::arg("log_alpha").noconvert(), py::arg("noise_seed").noconvert(), py::arg("policy_delay"),
           py::arg("steps").noconvert(), py::keep_alive<0, 1>(), py::keep_alive<0, 2>(), py::keep_alive<0, 3>(),
           py::keep_alive<0, 4>())
      .def("step", &step_actor_critic, py::arg("obs").noconvert(), py::arg("actions").noconvert(),
           py::arg("rewards").noconvert(), py::arg("next_obs").noconvert(), py::arg("discounts").noconvert(),
           py::arg("weights").noconvert(), py::arg("next_noise").noconvert(), py::arg("noise").noconvert(),
           py::arg("moves_policy"), py::arg("moves_targets"), py::arg("critic"), py::arg("actor"),
           py::arg("temperature"), py::arg("log_alpha").noconvert(), py::arg("seed") = 0, py::arg("number") = 0);
}
