#include "fpga_learner_program.hpp"

#include <sstream>
#include <utility>

#include "pearl/errors.hpp"
#include "pearl/fpga_learner.hpp"

namespace pearl::device {
namespace {

// A piece of the program: a name, or a number.
struct Name : std::string {
  using std::string::string;
  Name(std::string text) : std::string(std::move(text)) {}
  Name(int number) : std::string(std::to_string(number)) {}
};
using Names = std::vector<Name>;

// "name<part, part>"
std::string list(const std::string& name, const Names& parts) {
  std::string text = name + "<";
  for (std::size_t i = 0; i < parts.size(); ++i) text += (i == 0 ? "" : ", ") + parts[i];
  return text + ">";
}

const char* activation_name(tape::Activation activation) {
  return activation == tape::Activation::relu   ? "Activation::relu"
         : activation == tape::Activation::tanh ? "Activation::tanh"
                                                : "Activation::none";
}

// Writes the stages of one Learner, and the pipes between them.
class Pipelines {
 public:
  Pipelines(const LearnerShape& shape, int pipe_items) : shape_(shape), pipe_items_(pipe_items) {
    for (std::size_t network = 0; network < shape.networks.size(); ++network) {
      const auto& layers = shape.networks[network];
      online_.emplace_back(layers.size());
      targets_.emplace_back(layers.size());
      gradients_.emplace_back(layers.size());
      for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        const LayerShape& l = layers[layer];
        declarations_ << "using " << layer_name(network, layer) << " = Layer<" << l.inputs << ", " << l.outputs << ", "
                      << l.weight << ", " << l.bias << ", " << activation_name(l.activation) << ">;\n";
      }
    }
    Names copies, results;
    for (int copy = 0; copy < shape.copies; ++copy) {
      copy_ = copy;
      const auto [items, result] = shape.actor_critic ? actor_critic() : dqn();
      declarations_ << "using Copy" << copy << " = " << items << ";\n";
      copies.push_back("Copy" + std::to_string(copy));
      results.push_back(result);
    }
    const auto networks = static_cast<int>(shape.networks.size());
    const int first = shape.actor_critic ? 1 : 0;
    const std::string critic_done = weights(first, networks, fpga::kCritic);
    const std::string policy_done = shape.actor_critic ? weights(0, 1, fpga::kPolicy) : "None";
    copies.insert(copies.begin(), list("WeightOrders", weight_orders_));
    declarations_ << "using AllCopies = " << list("Learners", copies) << ";\n"
                  << "using AllResults = " << list("Results", results) << ";\n";
    finish_ = "finish<" + critic_done + ", " + policy_done + ">(context);";
  }

  std::string text() const { return declarations_.str() + "\n" + tasks_.str(); }
  const std::string& finish() const { return finish_; }
  const std::vector<std::string>& stages() const { return stages_; }

 private:
  // The wires of one network's backward pass: slopes to each layer's BP and GA, and inputs and results from FP.
  struct Backward {
    Names to_bp, to_ga, inputs, results;
  };

  static std::string layer_name(std::size_t network, std::size_t layer) {
    return "Network" + std::to_string(network) + "Layer" + std::to_string(layer + 1);
  }
  const std::vector<LayerShape>& layers(std::size_t network) const { return shape_.networks[network]; }

  std::string wire(int width) {
    const std::string name = "Wire" + std::to_string(++wires_);
    declarations_ << "using " << name << " = Wire<Learner, " << wires_ << ", " << width << ", " << shape_.items()
                  << ">;\n";
    return name;
  }
  std::string pipe(const char* item, int items) {
    const std::string name = "Pipe" + std::to_string(++pipes_);
    declarations_ << "using " << name << " = Pipe<LearnerPipes, " << pipes_ << ", " << item << ", " << items << ">;\n";
    return name;
  }
  void stage(const std::string& name, const char* body, const Names& arguments) {
    stages_.push_back("pearl_learner_" + name);
    tasks_ << "PEARL_TASK " << stages_.back() << "() { " << list(body, arguments) << "(); }\n";
  }
  std::string named(const std::string& what, std::size_t layer) const {
    return what + std::to_string(layer + 1) + "_" + std::to_string(copy_);
  }
  std::string weights_for(std::vector<Names>& readers, std::size_t layer) {
    readers[layer].push_back(pipe("Block", pipe_items_));
    return readers[layer].back();
  }

  // Declares the wires of a backward pass. `first`: the lowest layer with BP; `trained`: with GA.
  Backward prepare(std::size_t network, std::size_t first, bool trained, const std::string& input) {
    Backward made;
    const auto& chain = layers(network);
    for (std::size_t l = 0; l < chain.size(); ++l) {
      made.to_bp.push_back(l >= first ? wire(chain[l].outputs) : "");
      made.to_ga.push_back(trained ? wire(chain[l].outputs) : "");
      made.inputs.push_back(!trained ? "" : l == 0 ? input : wire(chain[l].inputs));
      const bool activated = l > 0 && l >= first && chain[l - 1].activation != tape::Activation::none;
      made.results.push_back(activated ? wire(chain[l].inputs) : "None");
    }
    return made;
  }
  static Names existing(const Names& names) {
    Names found;
    for (const std::string& name : names)
      if (!name.empty() && name != "None") found.push_back(name);
    return found;
  }

  void forward(const std::string& name, std::size_t network, bool target, std::string in, const Names& leads,
               const Names& sides, const Backward* backward) {
    auto& readers = target ? targets_[network] : online_[network];
    const auto& chain = layers(network);
    for (std::size_t l = 0; l < chain.size(); ++l) {
      const bool last = l + 1 == chain.size();
      Names to = leads, extra = sides;
      if (!last) {
        to = {wire(chain[l].outputs)};
        extra = backward == nullptr ? Names{} : existing({backward->inputs[l + 1], backward->results[l + 1]});
      }
      stage(named("fp_" + name, l), "forward_stage",
            {layer_name(network, l), chain[l].unroll, in, weights_for(readers, l), list("Leads", to),
             list("Sides", extra)});
      if (!last) in = to.front();
    }
  }

  // `below`: the leads for the slopes of the network's input, if any.
  void backward(const std::string& name, std::size_t network, const Backward& wires, const std::string& below) {
    const auto& chain = layers(network);
    for (std::size_t l = chain.size(); l-- > 0;) {
      const int unroll = chain[l].unroll;
      if (!wires.to_ga[l].empty()) {
        gradients_[network][l].push_back(pipe("Block", pipe_items_));
        stage(named("ga_" + name, l), "gradient_stage",
              {layer_name(network, l), unroll, wires.to_ga[l], wires.inputs[l], gradients_[network][l].back()});
      }
      if (wires.to_bp[l].empty()) continue;
      const std::string leads = l > 0 ? list("Leads", existing({wires.to_bp[l - 1], wires.to_ga[l - 1]})) : below;
      const bool activated = wires.results[l] != "None";
      stage(named("bp_" + name, l), "backward_stage",
            {layer_name(network, l), activation_name(activated ? chain[l - 1].activation : tape::Activation::none),
             unroll, wires.to_bp[l], wires.results[l], weights_for(online_[network], l), leads});
    }
  }
  static Names top(const Backward& wires) { return existing({wires.to_bp.back(), wires.to_ga.back()}); }

  // A copy's item type, and the pipe of its results.
  std::pair<std::string, std::string> dqn() {
    const int actions = layers(0).back().outputs;
    const std::string seen = wire(shape_.observations), seen_ga = wire(shape_.observations);
    const std::string next = wire(shape_.observations), values = wire(actions), target = wire(actions);
    const std::string details = pipe("Detail", shape_.items()), importance = pipe("float", shape_.items());
    const std::string results = pipe("Result", shape_.items());
    const Backward wires = prepare(0, 1, true, seen_ga);
    Names nexts = {next};
    std::string chooser = "None";
    forward("target", 0, true, next, {}, {target}, nullptr);
    if (shape_.double_q) {
      nexts.push_back(wire(shape_.observations));
      chooser = wire(actions);
      forward("next", 0, false, nexts.back(), {}, {chooser}, nullptr);
    }
    forward("q", 0, false, seen, {values}, {}, &wires);
    stage("loss_" + std::to_string(copy_), "dqn_loss_stage",
          {actions, values, target, chooser, details, importance, list("Leads", top(wires)), results});
    backward("q", 0, wires, "");
    return {list("DqnItems", {shape_.observations, list("Leads", {seen}), list("Sides", {seen_ga}),
                              list("Leads", nexts), details, importance}),
            results};
  }

  std::pair<std::string, std::string> actor_critic() {
    const int observations = shape_.observations, actions = shape_.actions, inputs = observations + actions;
    const int says = layers(0).back().outputs;
    const std::size_t critics = shape_.networks.size() - 1, judges = shape_.stochastic ? critics : 1;
    const std::string details = pipe("Detail", shape_.items()), importance = pipe("float", shape_.items());
    const std::string results = pipe("Result", shape_.items()), copy = std::to_string(copy_);
    // How the policy acts, with noise of number `draw`.
    const auto sampled = [&](int draw) { return list("Sampled", {actions, draw, copy_, shape_.copies}); };
    // The targets: the value of the next action.
    const std::string next = wire(observations), next_seen = wire(observations), said_next = wire(says);
    const std::string next_density = shape_.stochastic ? pipe("float", shape_.items()) : "None";
    forward(shape_.stochastic ? "next_actor" : "target_actor", 0, !shape_.stochastic, next, {said_next}, {}, nullptr);
    Names next_inputs, next_values, values, seen, seen_ga, slopes;
    std::vector<Backward> wires;
    for (std::size_t k = 0; k < critics; ++k) {
      next_inputs.push_back(wire(inputs));
      next_values.push_back(wire(1));
      values.push_back(wire(1));
      seen.push_back(wire(inputs));
      seen_ga.push_back(wire(inputs));
    }
    stage("act_next_" + copy, "act_stage",
          {observations, actions,
           shape_.stochastic ? sampled(0) : list("Disturbed", {actions, copy_, shape_.copies}), said_next, next_seen,
           list("Leads", next_inputs), next_density});
    for (std::size_t k = 0; k < critics; ++k) {
      const std::string number = std::to_string(k + 1) + "_";
      forward("target_critic" + number, k + 1, true, next_inputs[k], {}, {next_values[k]}, nullptr);
      wires.push_back(prepare(k + 1, 1, true, seen_ga[k]));
      judge("critic" + number, k, seen[k], values[k], wires.back());
      slopes.push_back(list("Leads", top(wires.back())));
    }
    stage("loss_critic_" + copy, "critic_loss_stage",
          {list("Scalars", values), list("Scalars", next_values), next_density, details, importance,
           list("ScalarLeads", slopes), results});
    for (std::size_t k = 0; k < critics; ++k) backward("critic" + std::to_string(k + 1) + "_", k + 1, wires[k], "");
    // The policy, judged by the critics' weights before the step: by one critic, or by both for SAC.
    const std::string policy = wire(observations), policy_ga = wire(observations), policy_seen = wire(observations);
    const std::string said = wire(says), said_loss = wire(says);
    const std::string choice = shape_.stochastic ? sampled(1) : list("Greedy", {actions});
    if (shape_.learns_temperature) densities_.push_back(pipe("float", shape_.items()));
    const Backward policy_wires = prepare(0, 1, true, policy_ga);
    forward("actor", 0, false, policy, {said}, {said_loss}, &policy_wires);
    Names judged, judged_values, judged_slopes, input_slopes;
    std::vector<Backward> lagged;
    for (std::size_t k = 0; k < judges; ++k) {
      judged.push_back(wire(inputs));
      judged_values.push_back(wire(1));
      input_slopes.push_back(wire(inputs));
      lagged.push_back(prepare(k + 1, 0, false, ""));
      judged_slopes.push_back(list("Leads", top(lagged.back())));
    }
    stage("act_" + copy, "act_stage",
          {observations, actions, choice, said, policy_seen, list("Leads", judged),
           shape_.learns_temperature ? densities_.back() : "None"});
    for (std::size_t k = 0; k < judges; ++k)
      judge("lagged" + std::to_string(k + 1) + "_", k, judged[k], judged_values[k], lagged[k]);
    stage("loss_value_" + copy, "value_loss_stage",
          {list("Scalars", judged_values), list("ScalarLeads", judged_slopes)});
    for (std::size_t k = 0; k < judges; ++k)
      backward("lagged" + std::to_string(k + 1) + "_", k + 1, lagged[k],
               list(k == 0 ? "Leads" : "Sides", {input_slopes[k]}));
    stage("loss_actor_" + copy, "policy_loss_stage",
          {observations, actions, choice, list("Sum", input_slopes), said_loss, list("Leads", top(policy_wires))});
    backward("actor", 0, policy_wires, "");
    return {list("ActorCriticItems",
                 {observations, actions, list("Leads", seen), list("Sides", seen_ga), list("Leads", {policy}),
                  list("Sides", {policy_ga, policy_seen}), list("Leads", {next}), list("Sides", {next_seen}), details,
                  importance}),
            results};
  }

  // FP of a critic. The first one also passes on the orders.
  void judge(const std::string& name, std::size_t critic, const std::string& in, const std::string& value,
             const Backward& wires) {
    const bool first = critic == 0;
    forward(name, critic + 1, false, in, first ? Names{value} : Names{}, first ? Names{} : Names{value}, &wires);
  }

  // WU of the layers of networks [begin, end), which share a vector; the policy's includes the temperature. Returns the
  // pipes that report that weights have moved.
  std::string weights(int begin, int end, int which) {
    struct Unit {
      std::size_t network, layer;
    };
    std::vector<Unit> units;
    for (int n = begin; n < end; ++n)
      for (std::size_t l = 0; l < layers(static_cast<std::size_t>(n)).size(); ++l)
        units.push_back({static_cast<std::size_t>(n), l});
    Names told, done;
    const bool tempers = which == fpga::kPolicy && shape_.learns_temperature;
    for (std::size_t i = 0; i + (tempers ? 0 : 1) < units.size(); ++i) told.push_back(pipe("float", 4));
    std::string before = "None";
    for (std::size_t i = 0; i < units.size(); ++i) {
      const auto [network, layer] = units[i];
      const bool last = i + 1 == units.size();
      const std::string after = last ? "None" : pipe("float", 4);
      weight_orders_.push_back(pipe("Order", 4));
      done.push_back(pipe("float", 4));
      const Names& targets = targets_[network][layer];
      stage("wu_" + std::to_string(network) + "_" + std::to_string(layer + 1), "weight_stage",
            {layer_name(network, layer), which, shape_.rules[which], weight_orders_.back(),
             list("Blocks", online_[network][layer]), targets.empty() ? "None" : list("Blocks", targets),
             list("Blocks", gradients_[network][layer]), before, after, last ? "None" : told[i],
             last ? list("Everyone", told) : "None", done.back()});
      before = after;
    }
    if (tempers) {
      weight_orders_.push_back(pipe("Order", 4));
      done.push_back(pipe("float", 4));
      stage("wu_temperature", "temperature_stage",
            {shape_.rules[fpga::kTemperature], weight_orders_.back(), list("Results", densities_), told.back(),
             done.back()});
    }
    return list("Layers", done);
  }

  const LearnerShape& shape_;
  const int pipe_items_;
  int wires_ = 0, pipes_ = 0, copy_ = 0;
  std::vector<std::vector<Names>> online_, targets_, gradients_;  // pipes of each network and layer
  Names densities_;  // of the policy's actions, for each copy
  Names weight_orders_;
  std::vector<std::string> stages_;
  std::ostringstream declarations_, tasks_;
  std::string finish_;
};

std::string described(const LearnerShape& shape) {
  std::ostringstream text;
  text << "// "
       << (shape.stochastic     ? "SAC's actor, then its critics:"
           : shape.actor_critic ? "Actor, then critics:"
           : shape.double_q     ? "Double DQN:"
                                : "DQN:");
  for (const auto& layers : shape.networks) {
    text << ' ' << layers.front().inputs;
    for (const LayerShape& layer : layers) text << '-' << layer.outputs;
  }
  text << "; batches of up to " << shape.rows << ", DP " << shape.copies << ", UF";
  for (const auto& layers : shape.networks)
    for (std::size_t l = 0; l < layers.size(); ++l) text << (l == 0 ? " " : "-") << layers[l].unroll;
  text << ".\n"
       << "struct Learner;\nstruct LearnerPipes;\nusing pearl::tape::Activation;\n";
  return text.str();
}

}  // namespace

std::vector<LayerShape> chain_of(const NetworkSource& network) {
  using learner::OpKind;
  std::vector<LayerShape> chain;
  auto width = static_cast<int>(network.inputs);
  bool open = false;  // whether an activation may follow
  for (std::size_t i = 0; i < network.ops.size(); ++i) {
    const learner::Op& op = network.ops[i];
    const bool follows = op.inputs[0] == static_cast<std::ptrdiff_t>(i) && op.inputs[1] == learner::kNone;
    if (follows && op.kind == OpKind::linear) {
      chain.push_back({width, static_cast<int>(op.width), op.weight, op.bias, tape::Activation::none});
      width = static_cast<int>(op.width);
      open = true;
    } else if (follows && open && (op.kind == OpKind::relu || op.kind == OpKind::tanh)) {
      chain.back().activation = op.kind == OpKind::relu ? tape::Activation::relu : tape::Activation::tanh;
      open = false;
    } else {
      throw LearnerError("Operation " + std::to_string(i) +
                         " does not continue a chain of linear layers, each with at most one ReLU or tanh after it.");
    }
  }
  if (chain.empty()) throw LearnerError("A network of an FPGA's Learner needs at least one linear layer.");
  return chain;
}

AutorunProgram learner_program(const LearnerShape& shape, int pipe_items) {
  const Pipelines pipelines(shape, pipe_items);
  const std::string prefix = "pearl_learner_";
  AutorunProgram program{"Learner", prefix, {}, pipelines.stages(), {prefix + "submit", prefix + "resolve"}};
  program.text = std::string(kAutorunPreamble) +
                 "#include \"pearl/fpga_learner.hpp\"\n\nusing namespace pearl::fpga;\n\n" +
                 described(shape) + pipelines.text() + "\nPEARL_TASK " + program.bridges[kSubmit] +
                 "(const LearnerContext* context) { submit<AllCopies>(context); }\nPEARL_TASK " +
                 program.bridges[kResolve] + "(LearnerContext* context) {\n  resolve<AllResults>(context);\n  " +
                 pipelines.finish() + "\n}\n";
  return program;
}

AutorunProgram training_program(const TreeShape& tree, const LearnerShape& shape, int pipe_items) {
  const Pipelines pipelines(shape, pipe_items);
  AutorunProgram program =
      replay_program(tree, pipe_items,
                     {"#include \"pearl/fpga_training.hpp\"\n",
                      described(shape) + pipelines.text() + "using Training = TrainingLearner<" +
                          std::to_string(shape.rows) + ", AllCopies, AllResults>;\n\n",
                      "Training"});
  program.name = "Replay Manager and Learner";
  program.prefix = "pearl_";
  program.stages.insert(program.stages.end(), pipelines.stages().begin(), pipelines.stages().end());
  program.bridges.push_back("pearl_learner_finish");
  program.text += "PEARL_TASK " + program.bridges[kFinish] + "(LearnerContext* context) { " + pipelines.finish() +
                  " }\n";
  return program;
}

}  // namespace pearl::device
