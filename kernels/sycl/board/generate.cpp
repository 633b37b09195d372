// Writes the program of a design for a board, and the sizes that its host check needs:
//
//   generate design=training capacity=65536 fanout=16 network=4,64,64,2 algorithm=dqn batch=64 > program.hpp
#include <algorithm>
#include <bit>
#include <charconv>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "fpga_learner_program.hpp"
#include "fpga_program.hpp"
#include "pearl/errors.hpp"
#include "pearl/fpga_learner.hpp"

namespace {

using pearl::Error;
using pearl::device::LayerShape;
using pearl::device::LearnerShape;

constexpr int kMostWidth = 4096, kMostRows = 1 << 16, kMostCopies = 64, kMostUnroll = 1024;
const std::vector<std::string> kAlgorithms = {"dqn", "double_dqn", "ddpg", "td3"};
const std::vector<std::string> kOptimizers = {"adam", "amsgrad", "sgd", "momentum", "nesterov"};  // as tape::Rule

using Words = std::map<std::string, std::string>;

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

Words read_words(int count, char** words) {
  Words found = {{"design", "replay"},    {"capacity", "65536"}, {"fanout", "16"}, {"network", "4,64,64,2"},
                 {"algorithm", "dqn"},    {"batch", "64"},       {"copies", "1"},  {"unroll", "16"},
                 {"activation", "relu"},  {"optimizer", "adam"}, {"pipe_items", "64"}};
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const std::size_t equal = word.find('=');
    if (equal == std::string::npos || !found.contains(word.substr(0, equal))) {
      std::vector<std::string> names;
      for (const auto& [name, value] : found) names.push_back(name);
      throw Error("Expected NAME=VALUE, of the names " + joined(names) + "; found " + word + ".");
    }
    found[word.substr(0, equal)] = word.substr(equal + 1);
  }
  return found;
}

int number(const std::string& name, const std::string& text, int most) {
  int value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc{} || end != text.data() + text.size() || value < 1 || value > most)
    throw Error(name + " must be a whole number from 1 to " + std::to_string(most) + "; found " + text + ".");
  return value;
}

int capacity_of(const Words& words) { return number("capacity", words.at("capacity"), 1 << 20); }

int choice(const std::string& name, const std::string& text, const std::vector<std::string>& choices) {
  const auto found = std::find(choices.begin(), choices.end(), text);
  if (found == choices.end()) {
    throw Error(name + " must be one of " + joined(choices) + "; found " + text + ".");
  }
  return static_cast<int>(found - choices.begin());
}

std::vector<int> numbers(const std::string& name, const std::string& text, int most) {
  std::vector<int> found;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) found.push_back(number(name, part, most));
  return found;
}

// UF of each layer, the same in all networks.
std::vector<int> unroll_of(const std::string& text, std::size_t layers) {
  std::vector<int> factors = numbers("unroll", text, kMostUnroll);
  if (factors.size() == 1) factors.resize(layers, factors.front());
  if (factors.size() != layers)
    throw Error("unroll must be one number, or one for each of " + std::to_string(layers) + " layers; found " + text +
                ".");
  for (const int factor : factors)
    if (!std::has_single_bit(static_cast<unsigned>(factor)))
      throw Error("unroll must be a power of two; found " + std::to_string(factor) + ".");
  return factors;
}

// Linear layers between `widths`, each followed by an activation except the last. Weights start at `place`: each matrix
// and then its biases, at multiples of fpga::kBlock, as in the Learner's parameters (pearl/learner/flat.py).
std::vector<LayerShape> chain(const std::vector<int>& widths, const std::vector<int>& unroll,
                              pearl::tape::Activation activation, std::ptrdiff_t& place) {
  std::vector<LayerShape> layers;
  for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
    const std::ptrdiff_t bias = place + pearl::fpga::padded(widths[l] * widths[l + 1]);
    const bool last = l + 2 == widths.size();
    layers.push_back({widths[l], widths[l + 1], place, bias, last ? pearl::tape::Activation::none : activation,
                      unroll[l]});
    place = bias + pearl::fpga::padded(widths[l + 1]);
  }
  return layers;
}

LearnerShape learner_of(const Words& words) {
  LearnerShape shape;
  const std::vector<int> widths = numbers("A width of network", words.at("network"), kMostWidth);
  if (widths.size() < 2)
    throw Error("network must list at least two widths, inputs and outputs, as in 4,64,64,2; found " +
                words.at("network") + ".");
  const int which = choice("algorithm", words.at("algorithm"), kAlgorithms);
  const std::string& algorithm = kAlgorithms[static_cast<std::size_t>(which)];
  const auto activation =
      choice("activation", words.at("activation"), {"relu", "tanh"}) == 0 ? pearl::tape::Activation::relu
                                                                          : pearl::tape::Activation::tanh;
  shape.observations = widths.front();
  shape.actions = widths.back();
  shape.double_q = algorithm == "double_dqn";
  shape.actor_critic = algorithm == "ddpg" || algorithm == "td3";
  const std::vector<int> unroll = unroll_of(words.at("unroll"), widths.size() - 1);
  std::ptrdiff_t place = 0;
  shape.networks.push_back(chain(widths, unroll, activation, place));
  if (shape.actor_critic) {  // critics of the same hidden widths, consecutive in one vector
    std::vector<int> judging = widths;
    judging.front() += shape.actions;
    judging.back() = 1;
    place = 0;
    for (int critics = algorithm == "td3" ? 2 : 1; critics > 0; --critics)
      shape.networks.push_back(chain(judging, unroll, activation, place));
  }
  shape.rows = static_cast<std::uint32_t>(number("batch", words.at("batch"), kMostRows));
  shape.copies = number("copies", words.at("copies"), std::min(kMostCopies, static_cast<int>(shape.rows)));
  shape.rules[0] = shape.rules[1] = choice("optimizer", words.at("optimizer"), kOptimizers);
  return shape;
}

// For host checks: the sizes of the program.
std::string sizes_of(const Words& words, const LearnerShape* learner) {
  std::ostringstream text;
  text << "\n// What the host must know of the design.\nnamespace design {\n\n"
       << "inline constexpr std::uint32_t kCapacity = " << capacity_of(words) << ";\n";
  if (learner != nullptr) {
    text << "inline constexpr bool kActorCritic = " << (learner->actor_critic ? "true" : "false")
         << ", kDouble = " << (learner->double_q ? "true" : "false") << ";\n"
         << "inline constexpr int kCritics = " << learner->networks.size() - (learner->actor_critic ? 1 : 0) << ";\n"
         << "inline constexpr std::uint32_t kRows = " << learner->rows << ";\n"
         << "inline constexpr int kRule = " << learner->rules[0] << ";\n"
         << "inline constexpr bool kTanh = " << (words.at("activation") == "tanh" ? "true" : "false") << ";\n"
         << "inline constexpr int kWidths[] = {" << learner->observations;
    for (const LayerShape& layer : learner->networks.front()) text << ',' << layer.outputs;
    text << "};\n";
  }
  text << "\n}  // namespace design\n";
  return text.str();
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const Words words = read_words(count, arguments);
    const int design = choice("design", words.at("design"), {"replay", "learner", "training"});
    const int pipe_items = number("pipe_items", words.at("pipe_items"), 1 << 16);
    const auto tree = [&] {
      return pearl::device::TreeShape::of(capacity_of(words),
                                          static_cast<unsigned>(number("fanout", words.at("fanout"), 256)));
    };
    if (design == 0) {
      std::cout << ahead_of_time(pearl::device::replay_program(tree(), pipe_items)) << sizes_of(words, nullptr);
      return 0;
    }
    const LearnerShape learner = learner_of(words);
    const std::string sizes = sizes_of(words, &learner);
    std::cout << ahead_of_time(design == 1 ? pearl::device::learner_program(learner, pipe_items)
                                           : pearl::device::training_program(tree(), learner, pipe_items))
              << sizes;
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
