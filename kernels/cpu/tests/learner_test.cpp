// The native learner without Python: gradients against finite differences of the same network in double, every variant
// of the kernels, teams of threads, and steps that must change nothing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "pearl/aligned.hpp"
#include "pearl/errors.hpp"
#include "pearl/learner/actor_critic.hpp"
#include "pearl/learner/byte_convolution.hpp"
#include "pearl/learner/dqn.hpp"
#include "pearl/learner/panel_convolution.hpp"
#include "pearl/learner/sparse_convolution.hpp"
#include "pearl/learner/team.hpp"
#include "pearl/normal.hpp"

using namespace pearl::learner;

namespace {

using Floats = std::vector<float>;

Floats random_floats(std::size_t count, std::uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Floats values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Several panels of n columns, the last of which has `last_n`.
void check_gemm(std::size_t m, std::size_t n, std::size_t depth, std::size_t segment, bool contiguous_rows,
                std::size_t panels = 1, std::size_t last_n = 0, bool accumulate = true) {
  // Exactly as large as needed: the sanitizer sees every access beyond.
  const std::size_t after = panels > 1 ? n - last_n : 0, b_panel = depth * n, c_panel = m * n;
  const Floats a = random_floats(m * depth, 1), b = random_floats(panels * b_panel - after, 2);
  const Floats gate = random_floats(panels * c_panel - after, 4), before = random_floats(panels * c_panel - after, 5);
  const Floats bias = random_floats(m, 3);
  const double tolerance = std::string(learner_kernels().name) == "amx, high" ? 1e-3 : 1e-4;
  Floats c = before;
  Gemm gemm{};
  gemm.a = a.data();
  gemm.a_row = contiguous_rows ? 1 : static_cast<std::ptrdiff_t>(depth);
  gemm.a_step = contiguous_rows ? static_cast<std::ptrdiff_t>(m) : 1;
  gemm.a_segment = gemm.a_step * static_cast<std::ptrdiff_t>(segment);
  gemm.b = b.data();
  gemm.b_step = gemm.c_row = static_cast<std::ptrdiff_t>(n);
  gemm.b_segment = gemm.b_step * static_cast<std::ptrdiff_t>(segment);
  gemm.c = c.data();
  gemm.m = m;
  gemm.n = n;
  gemm.depth = depth;
  gemm.segment = segment;
  gemm.bias = bias.data();
  gemm.accumulate = accumulate;
  gemm.gate = gate.data();
  gemm.panels = panels;
  gemm.b_panel = static_cast<std::ptrdiff_t>(b_panel);
  gemm.c_panel = static_cast<std::ptrdiff_t>(c_panel);
  gemm.last_n = last_n;
  learner_kernels().gemm(gemm);
  for (std::size_t p = 0; p < panels; ++p)
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t j = 0; j < (p > 0 && p + 1 == panels ? last_n : n); ++j) {
        const std::size_t at = p * c_panel + i * n + j;
        double sum = static_cast<double>(bias[i]) + (accumulate ? static_cast<double>(before[at]) : 0.0);
        for (std::size_t k = 0; k < depth; ++k)
          sum += static_cast<double>(contiguous_rows ? a[k * m + i] : a[i * depth + k]) *
                 static_cast<double>(b[p * b_panel + k * n + j]);
        const double expected = gate[at] > 0.0f ? sum : 0.0;
        CHECK(std::fabs(static_cast<double>(c[at]) - expected) < tolerance);
      }
}

void test_gemm() {
  for (const std::size_t m : {1u, 2u, 13u, 14u, 15u, 37u})
    for (const std::size_t n : {1u, 3u, 8u, 16u, 31u, 32u, 45u})
      for (const std::size_t depth : {1u, 5u, 32u, 70u})
        for (const bool contiguous : {false, true}) {
          check_gemm(m, n, depth, depth, contiguous);
          check_gemm(m, n, depth, (depth + 2) / 3, contiguous);
        }
  // Few terms of each number, in whole vectors and beside them; none at all leaves the bias.
  for (std::size_t depth = 0; depth <= 9; ++depth)
    for (const std::size_t n : {4u, 8u, 16u, 20u, 32u, 48u})
      for (const bool contiguous : {false, true}) {
        check_gemm(21, n, depth, std::max<std::size_t>(depth, 1), contiguous, 1, 0, false);
        check_gemm(21, 32, depth, std::max<std::size_t>(depth, 1), contiguous, 3, depth == 0 || n > 32 ? 32 : n, false);
      }
  // Large enough for AMX, around its blocks: of rows, of columns, of steps at once, of columns that are held at once.
  for (const std::size_t m : {64u, 97u})
    for (const std::size_t depth : {256u, 270u})
      for (const bool contiguous : {false, true}) {
        check_gemm(m, 32, depth, depth, contiguous, 4, 16);
        check_gemm(m, 33, depth, 32, contiguous, 4, 1);
      }
  check_gemm(97, 600, 64, 32, true);
  check_gemm(64, 32, 70, 70, false, 40, 31);
}

// The gradient of a layer's weights: slopes by inputs, over the transitions of panels.
void test_turned_gemm() {
  const LearnerKernels& kernels = learner_kernels();
  const std::size_t panel = kernels.panel;
  const auto stride = static_cast<std::ptrdiff_t>(panel);
  for (const std::size_t m : {5u, 64u, 97u})
    for (const std::size_t n : {13u, 64u, 70u})
      for (const std::size_t panels : {1u, 2u, 9u})
        for (const std::size_t last : {std::size_t{1}, panel / 2, panel - 1, panel})
          for (const bool accumulate : {false, true}) {
            const std::size_t depth = (panels - 1) * panel + last;
            const Floats slopes = random_floats(m * panel * panels, 1), x = random_floats(n * panel * panels, 2);
            const Floats before = random_floats(m * n, 3);
            Floats found = before, scratch(turned_floats(n, panel * panels));
            Gemm g{};
            g.a = slopes.data();
            g.a_row = g.b_step = stride;
            g.a_step = 1;
            g.a_segment = stride * static_cast<std::ptrdiff_t>(m);
            g.b = x.data();
            g.b_segment = stride * static_cast<std::ptrdiff_t>(n);
            g.c = found.data();
            g.c_row = static_cast<std::ptrdiff_t>(n);
            g.m = m;
            g.n = n;
            g.depth = depth;
            g.segment = panel;
            g.accumulate = accumulate;
            kernels.turned_gemm(g, scratch.data());
            const double tolerance = std::string(kernels.name) == "amx, high" ? 2e-3 : 1e-4;
            for (std::size_t i = 0; i < m; ++i)
              for (std::size_t j = 0; j < n; ++j) {
                double expected = accumulate ? static_cast<double>(before[i * n + j]) : 0.0;
                for (std::size_t k = 0; k < depth; ++k) {
                  const std::size_t p = k / panel, c = k % panel;
                  expected += static_cast<double>(slopes[(p * m + i) * panel + c]) *
                              static_cast<double>(x[(p * n + j) * panel + c]);
                }
                CHECK(std::fabs(static_cast<double>(found[i * n + j]) - expected) <
                      tolerance * (1.0 + std::fabs(expected)));
              }
          }
}

// A chain of products is what its products are one by one, whichever of them it lacks; what it does not keep is free.
void test_chain() {
  const LearnerKernels& kernels = learner_kernels();
  const std::size_t panel = kernels.panel, row = panel;
  constexpr std::size_t most = 5;
  const double tolerance = std::string(kernels.name) == "amx, high" ? 1e-3 : 1e-4;
  for (const std::size_t width : {63u, 64u, 128u})
    for (const std::size_t terms : {1u, 4u, 16u, 17u})
      for (const std::size_t ends : {0u, 1u, 8u, 9u})
        for (const std::size_t panels : {std::size_t{1}, std::size_t{2}, std::size_t{4}, most})
          for (const int kind : {0, 1, 2}) {
            const std::size_t last = panels % 2 == 0 ? panel / 2 : panel;
            const Floats x = random_floats(terms * panel * panels, 1), first = random_floats(width * terms, 2, 0.3f);
            const Floats second = random_floats(width * width, 3, 0.2f),
                         third = random_floats(ends * width + 1, 4, 0.2f);
            const Floats dense = random_floats(width * panel * most, 7), biases = random_floats(3 * width, 5),
                         gates = random_floats(2 * width * panel * most, 6);
            const auto product = [&](const Floats& a, std::size_t m, std::size_t depth, const float* b, float* c,
                                     std::size_t bias, bool last_of_all) {
              Gemm g{};
              g.a = a.data();
              g.a_row = kind == 1 ? 1 : static_cast<std::ptrdiff_t>(depth);
              g.a_step = kind == 1 ? static_cast<std::ptrdiff_t>(m) : 1;
              g.b = b;
              g.b_step = g.c_row = static_cast<std::ptrdiff_t>(row);
              g.c = c;
              g.m = m;
              g.depth = g.segment = depth;
              g.n = panels == 1 ? last : panel;
              g.panels = panels;
              g.last_n = last;
              g.b_panel = static_cast<std::ptrdiff_t>(depth * panel);
              g.c_panel = static_cast<std::ptrdiff_t>(m * panel);
              if (kind != 1) g.bias = biases.data() + bias * width;
              if (!last_of_all && kind != 1) g.relu = true;
              if (!last_of_all && kind == 1) g.gate = gates.data() + bias * width * panel * most;
              return g;
            };
            const auto run = [&](bool whole, bool keeps, Floats& hidden, Floats& result, Floats& end,
                                 std::uint16_t* first_signs = nullptr, std::uint16_t* second_signs = nullptr) {
              hidden.assign(width * panel * most, 0.5f);
              result.assign(width * panel * most, 0.5f);
              end.assign((ends + 1) * panel * most, 0.5f);
              Chain chain{};
              chain.keeps_first = chain.keeps_second = keeps;
              chain.transitions = (panels - 1) * panel + last;
              chain.first_signs = first_signs;
              chain.second_signs = second_signs;
              if (kind == 2)  // as behind a ReLU, and as not
                std::transform(dense.begin(), dense.end(), hidden.begin(),
                               [&](float number) { return terms == 4 ? std::max(number, 0.0f) : number; });
              else
                chain.first = product(first, width, terms, x.data(), hidden.data(), 0, false);
              chain.second = product(second, width, width, hidden.data(), result.data(), 1, false);
              if (ends > 0) chain.third = product(third, ends, width, result.data(), end.data(), 2, true);
              if (whole) return kernels.chain(chain);
              chain.one_by_one(kernels.gemm);
              return false;
            };
            Floats expected[3], found[3], free[3];
            run(false, true, expected[0], expected[1], expected[2]);
            run(true, true, found[0], found[1], found[2]);
            run(true, false, free[0], free[1], free[2]);
            for (std::size_t k = 0; k < 3; ++k)
              for (std::size_t i = 0; i < expected[k].size(); ++i) {
                CHECK(std::fabs(static_cast<double>(found[k][i] - expected[k][i])) < tolerance);
                if (k == (ends > 0 ? 2 : 1))
                  CHECK(std::fabs(static_cast<double>(free[k][i] - expected[k][i])) < tolerance);
              }
            if (kind == 2 || ends == 0) continue;
            // Signs instead of results, or of gates.
            std::vector<std::uint16_t> signs(4 * width * most);
            const auto half = gates.begin() + static_cast<std::ptrdiff_t>(width * panel * most);
            const Floats *above[] = {&expected[0], &expected[1]},
                         of_gates[] = {Floats(gates.begin(), half), Floats(half, gates.end())};
            if (kind == 1) above[0] = &of_gates[0], above[1] = &of_gates[1];
            const auto is_above = [&](std::size_t of, std::size_t p, std::size_t f, std::size_t c) {
              return (*above[of])[(p * width + f) * panel + c] > 0.0f;
            };
            // In AMX, a number holds those of a row; else bit by bit, transition after transition.
            const bool by_row = std::string(kernels.name).rfind("amx", 0) == 0;
            const std::size_t half_panel = panel / 2;
            const auto each_sign = [&](const auto& visit) {
              for (std::size_t p = 0; p < panels; ++p)
                for (std::size_t c = 0; c < (p + 1 == panels ? last : panel); ++c)
                  for (std::size_t of = 0; of < 2; ++of)
                    for (std::size_t f = 0; f < width; ++f)
                      visit(signs[(p * 2 + c / half_panel) * 2 * width + of * width +
                                  (by_row ? f : (c % half_panel * width + f) / 16)],
                            (by_row ? c : f) % 16, is_above(of, p, f, c));
            };
            if (width % 64 == 0 && kind == 1)
              each_sign([](std::uint16_t& sign, std::size_t bit, bool passes) {
                if (passes) sign = static_cast<std::uint16_t>(sign | 1u << bit);
              });
            const bool of_signs = run(true, false, free[0], free[1], free[2], signs.data(), signs.data() + width);
            for (std::size_t i = 0; i < expected[2].size(); ++i)
              CHECK(std::fabs(static_cast<double>(free[2][i] - expected[2][i])) < tolerance);
            if (of_signs && kind == 0) {
              std::size_t others = 0;  // numbers next to 0, which rounding may move to its other side
              each_sign(
                  [&](std::uint16_t sign, std::size_t bit, bool passes) { others += (sign >> bit & 1) != passes; });
              CHECK(others < 5);
            }
          }
}

// Against sums in double: with slopes in memory, and with slopes that a product would give.
void check_layer_gradient(std::size_t outputs, std::size_t inputs, std::size_t panels, std::size_t terms,
                          std::size_t last, bool accumulate) {
  const LearnerKernels& kernels = learner_kernels();
  const std::size_t panel = kernels.panel, columns = last > panel / 2 ? panel : panel / 2;
  const auto stride = static_cast<std::ptrdiff_t>(panel);
  const double tolerance = std::string(kernels.name) == "amx, high" ? 1e-3 : 1e-4;
  // Numbers in columns that do not count must not matter.
  const float none = std::numeric_limits<float>::quiet_NaN();
  const auto filled = [&](std::size_t rows, unsigned seed, float beyond_last, float beyond_columns) {
    Floats values = random_floats(rows * panel * panels, seed);
    for (std::size_t i = 0; i < rows; ++i) {
      float* const row = values.data() + ((panels - 1) * rows + i) * panel;
      std::fill(row + last, row + columns, beyond_last);
      std::fill(row + columns, row + panel, beyond_columns);
    }
    return values;
  };
  const Floats x = filled(inputs, 1, 1.0f, none), gate = filled(outputs, 2, 1.0f, 1.0f);
  const Floats dy = filled(std::max<std::size_t>(terms, 1), 3, 0.0f, none);
  const Floats a = random_floats((terms + 1) * outputs, 4, 0.3f), before = random_floats(outputs * (inputs + 1), 5);
  Floats slopes = filled(outputs, 6, 0.0f, 0.0f), weights = before;
  const auto of_panels = [&](Gemm& g, std::size_t m, std::size_t depth) {
    g.b_step = g.c_row = stride;
    g.m = m;
    g.depth = g.segment = depth;
    g.n = panel;
    g.panels = panels;
    g.last_n = columns;
    g.b_panel = static_cast<std::ptrdiff_t>(depth) * stride;
    g.c_panel = static_cast<std::ptrdiff_t>(m) * stride;
  };
  Gemm made{}, made_x{};
  if (terms > 0) {
    of_panels(made, outputs, terms);
    made.a = a.data();
    made.a_row = 1;
    made.a_step = static_cast<std::ptrdiff_t>(outputs);
    made.b = dy.data();
    made.c = slopes.data();
    made.gate = gate.data();
    kernels.gemm(made);
  }
  const Floats exact = slopes;
  if (terms > 0) slopes.assign(slopes.size(), none);
  const bool remakes = terms <= kernels.remade && std::max(outputs, inputs) <= kernels.widest;
  const std::size_t makers = remakes ? terms : 0;
  const Floats before_x = filled(std::max<std::size_t>(makers, 1), 7, 0.5f, none),
               b = random_floats(inputs * (makers + 1), 8, 0.3f);
  Floats remade = x;
  if (makers > 0) {
    of_panels(made_x, inputs, makers);
    made_x.a = b.data();
    made_x.a_row = static_cast<std::ptrdiff_t>(makers);
    made_x.a_step = 1;
    made_x.b = before_x.data();
    made_x.c = remade.data();
    made_x.bias = b.data() + makers * inputs;
    made_x.relu = true;
    kernels.gemm(made_x);
  }
  LayerGradient gradient{outputs, inputs, panels,         last,    slopes.data(), x.data(),
                         made,    made_x, weights.data(), nullptr, accumulate};
  gradient.bias = weights.data() + outputs * inputs;
  kernels.layer_gradient(gradient);
  for (std::size_t o = 0; o < outputs; ++o)
    for (std::size_t i = 0; i <= inputs; ++i) {
      double sum = 0.0;
      for (std::size_t p = 0; p < panels; ++p)
        for (std::size_t c = 0; c < (p + 1 == panels ? last : panel); ++c)
          sum += static_cast<double>(exact[(p * outputs + o) * panel + c]) *
                 (i < inputs ? static_cast<double>(remade[(p * inputs + i) * panel + c]) : 1.0);
      const std::size_t at = i < inputs ? o * inputs + i : outputs * inputs + o;
      if (accumulate) sum += static_cast<double>(before[at]);
      CHECK(std::fabs(sum - static_cast<double>(weights[at])) < tolerance);
    }
}

void test_layer_gradient() {
  const LearnerKernels& kernels = learner_kernels();
  if (kernels.widest == 0) return;
  for (const std::size_t panels : {2u, 3u, 4u, 5u})
    for (const std::size_t terms : {0u, 1u, 2u, 7u, 16u})
      for (const std::size_t last : {1u, 4u, 5u, 8u, 9u, 16u, 17u, 32u})
        for (const bool accumulate : {false, true}) {
          const std::size_t transitions = std::min<std::size_t>(last, kernels.panel);
          check_layer_gradient(64, 64, panels, terms, transitions, accumulate);
          if (kernels.widest_single > 0 && terms == 1) {
            check_layer_gradient(256, 192, panels, terms, transitions, accumulate);
            if (last % 8 == 1) check_layer_gradient(128, 640, 2 * panels - 1, terms, transitions, accumulate);
          }
          if (kernels.widest < 192 || panels > 3) continue;
          check_layer_gradient(128, 64, panels, terms, transitions, accumulate);
          check_layer_gradient(64, 192, panels, terms, transitions, accumulate);
        }
}

// Multiples of a power of two of which sums are exact: no kernel's rounding moves a number to the other side of 0.
Floats coarse_floats(std::size_t count, std::uint32_t seed, float step) {
  Floats values = random_floats(count, seed, 3.0f);
  for (float& value : values) value = step * std::clamp(std::round(value), -8.0f, 8.0f);
  return values;
}

// Networks whose hidden layers have widths for which there are kernels of their own.
struct OfUnits {
  std::vector<Op> ops;
  std::size_t inputs, outputs, parameters = 0;
  float shift = 0.0f;  // of hidden layers' biases: how many numbers are zeros

  OfUnits(std::size_t inputs, const std::vector<std::size_t>& hidden, std::size_t outputs, bool biases)
      : inputs(inputs), outputs(outputs) {
    std::size_t from = inputs;
    for (std::size_t layer = 0; layer <= hidden.size(); ++layer) {
      const std::size_t to = layer < hidden.size() ? hidden[layer] : outputs;
      const auto value = static_cast<std::ptrdiff_t>(ops.size()), weight = static_cast<std::ptrdiff_t>(parameters);
      parameters += to * from;
      ops.push_back(
          {OpKind::linear, {value, kNone}, to, weight, biases ? static_cast<std::ptrdiff_t>(parameters) : kNone});
      if (biases) parameters += to;
      if (layer < hidden.size()) ops.push_back({OpKind::relu, {value + 1, kNone}, to});
      from = to;
    }
  }

  struct Result {
    Floats values, gradients, of_inputs;  // all but the last `inputs` of which are 0
  };
  // A forward and a backward pass, with the selected kernels.
  Result run(std::size_t rows, bool judges, std::size_t inputs_wanted) const {
    const Network network(inputs, ops, parameters);
    const std::size_t panel = network.kernels().panel, panels = (rows + panel - 1) / panel;
    const std::size_t last_columns = network.last_columns(rows, rows);
    Floats weights = coarse_floats(parameters, 1, 0.0625f);
    for (const Op& op : ops)
      for (std::size_t f = 0; f < op.width && op.bias != kNone && &op != &ops.back(); ++f)
        weights[static_cast<std::size_t>(op.bias) + f] += shift;
    const Floats x = coarse_floats(rows * inputs, 2, 0.25f);
    const Floats slopes = coarse_floats(rows * outputs, 3, 0.25f);
    Workspace workspace(network, panels, true);
    for (std::size_t p = 0; p < panels; ++p) {
      const std::size_t count = std::min(panel, rows - p * panel);
      network.load(x.data() + p * panel * inputs, count, workspace, p);
      network.kernels().transpose(slopes.data() + p * panel * outputs, count, outputs, outputs,
                                  workspace.gradient(network.output(), p), panel);
    }
    Result result{Floats(rows * outputs), Floats(parameters), Floats(rows * inputs)};
    for (const bool accumulates : {false, true}) {  // the second time, gradients are doubled
      network.forward(weights.data(), workspace, panels, rows, last_columns, judges);
      network.backward(weights.data(), judges ? nullptr : result.gradients.data(), workspace, panels, rows,
                       last_columns, accumulates, inputs_wanted);
    }
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t f = 0; f < outputs; ++f)
        result.values[i * outputs + f] = workspace.value(network.output(), i / panel)[f * panel + i % panel];
      for (std::size_t f = inputs - inputs_wanted; f < inputs; ++f)
        result.of_inputs[i * inputs + f] = workspace.gradient(0, i / panel)[f * panel + i % panel];
    }
    return result;
  }
};

// Against the plain kernels: with shapes that chains and gradients take, and others.
void check_network_of_units(const OfUnits& network, std::size_t rows, const std::string& name) {
  const std::size_t last = network.inputs > 2 ? 2 : 1;
  const OfUnits::Result kept = network.run(rows, false, 0), judged = network.run(rows, true, last);
  const OfUnits::Result whole = network.run(rows, false, last);
  select_learner_kernels("plain");
  const OfUnits::Result expected = network.run(rows, false, last);
  select_learner_kernels(name);
  CHECK(kept.values == expected.values);
  CHECK(kept.gradients == expected.gradients);
  CHECK(judged.values == expected.values);
  CHECK(judged.of_inputs == expected.of_inputs);
  CHECK(whole.gradients == expected.gradients);
  CHECK(whole.of_inputs == expected.of_inputs);
}

void test_networks_of_units(const std::string& name) {
  for (const std::size_t inputs : {3u, 6u, 16u})  // a single output, and last panels of all kinds
    for (const std::size_t rows : {65u, 68u, 69u, 80u, 81u, 127u, 160u})
      check_network_of_units({inputs, {64, 64}, 1, true}, rows, name);
  for (const std::size_t inputs : {1u, 4u, 7u, 17u})
    for (const std::size_t outputs : {1u, 3u, 9u, 17u})
      for (const std::size_t rows : {32u, 40u, 64u, 100u, 121u})
        for (const bool biases : {true, false}) {
          for (const std::size_t hidden : {1u, 2u, 3u})
            check_network_of_units({inputs, std::vector<std::size_t>(hidden, 64), outputs, biases}, rows, name);
          check_network_of_units({inputs, {128, 64}, outputs, biases}, rows, name);
          check_network_of_units({inputs, {64, 192}, outputs, biases}, rows, name);
        }
  for (const std::size_t hidden : {192u, 512u}) {
    check_network_of_units({4, {128, hidden}, 1, true}, 121, name);
    // A second head on the first hidden layer, as in dueling networks: its slopes are added to.
    OfUnits network(4, {128, hidden}, 1, true);
    network.ops.push_back({OpKind::linear, {2, kNone}, 1, static_cast<std::ptrdiff_t>(network.parameters), kNone});
    network.parameters += 128;
    network.ops.push_back({OpKind::add, {5, 6}, 1});
    check_network_of_units(network, 121, name);
  }
  for (const float shift : {8.0f, -8.0f})  // hardly any zeros, and hardly anything else
    for (const std::size_t width : {64u, 128u, 192u})
      for (const std::size_t outputs : {1u, 3u}) {
        OfUnits network(4, {width, width}, outputs, true);
        network.shift = shift;
        check_network_of_units(network, 100, name);
      }
}

void test_narrow_gradients() {
  const LearnerKernels& kernels = learner_kernels();
  const std::size_t panel = kernels.panel;
  for (std::size_t inputs = 1; inputs <= kernels.narrow; ++inputs)
    for (const std::size_t outputs : {1u, 3u, 16u, 29u})
      for (const std::size_t panels : {1u, 3u})
        for (const bool accumulate : {false, true}) {
          const std::size_t last = panels == 1 ? panel / 2 : panel;
          const Floats dy = random_floats(outputs * panel * panels, 1), x = random_floats(inputs * panel * panels, 2);
          const Floats before = random_floats(outputs * (inputs + 1), 3);
          Floats weights(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(outputs * inputs));
          Floats bias(before.end() - static_cast<std::ptrdiff_t>(outputs), before.end());
          kernels.narrow_gradients(dy.data(), outputs, x.data(), inputs, panels, last, weights.data(), bias.data(),
                                   accumulate);
          for (std::size_t o = 0; o < outputs; ++o)
            for (std::size_t i = 0; i <= inputs; ++i) {
              double sum = 0.0;
              for (std::size_t p = 0; p < panels; ++p)
                for (std::size_t c = 0; c < (p + 1 == panels ? last : panel); ++c)
                  sum += static_cast<double>(dy[(p * outputs + o) * panel + c]) *
                         (i < inputs ? static_cast<double>(x[(p * inputs + i) * panel + c]) : 1.0);
              const std::size_t at = i < inputs ? o * inputs + i : outputs * inputs + o;
              if (accumulate) sum += static_cast<double>(before[at]);
              CHECK(std::fabs(sum - static_cast<double>(i < inputs ? weights[at] : bias[o])) < 1e-4);
            }
        }
}

// Samples and their slopes against the formulas in double, also far out and with numbers that are none.
void test_squash() {
  const LearnerKernels& kernels = learner_kernels();
  const std::size_t panel = kernels.panel;
  Floats mean = random_floats(panel, 1, 3.0f), log_std = random_floats(panel, 2, 2.0f), slope = random_floats(panel, 4);
  const Floats noise = random_floats(panel, 3);
  const float extremes[] = {0.0f, -0.0f, 1e-6f, 30.0f, -30.0f, 300.0f, -1e30f};
  std::copy(std::begin(extremes), std::end(extremes), mean.begin());
  log_std[0] = -100.0f;
  log_std[1] = 100.0f;
  log_std[2] = 2.0f;
  Floats unit(panel), log_prob(panel, 1.0f), of_mean(panel), of_log_std(panel);
  const auto close = [](float found, double expected) {
    return std::fabs(static_cast<double>(found) - expected) <= 2e-5 * std::max(1.0, std::fabs(expected));
  };
  kernels.squash({-20.0f, 2.0f}, mean.data(), log_std.data(), noise.data(), panel, unit.data(), log_prob.data());
  kernels.squash_backward({-20.0f, 2.0f, 0.2f, 0.01f}, slope.data(), unit.data(), log_std.data(), noise.data(), panel,
                          of_mean.data(), of_log_std.data());
  for (std::size_t c = 0; c < panel; ++c) {
    const double deviation = std::clamp(static_cast<double>(log_std[c]), -20.0, 2.0), n = static_cast<double>(noise[c]);
    const double x = static_cast<double>(mean[c]) + std::exp(deviation) * n, size = std::fabs(x);
    const double log_slope = 2.0 * (std::log(2.0) - size - std::log1p(std::exp(-2.0 * size)));
    CHECK(close(unit[c], std::tanh(x)));
    CHECK(close(log_prob[c], 1.0 - 0.5 * n * n - deviation - 0.5 * std::log(2.0 * std::acos(-1.0)) - log_slope));
    const double action = static_cast<double>(unit[c]);
    const double expected = static_cast<double>(slope[c]) * (1.0 - action * action) + 2.0 * 0.2 * 0.01 * action;
    CHECK(close(of_mean[c], expected));
    const bool inside = log_std[c] >= -20.0f && log_std[c] <= 2.0f;
    CHECK(close(of_log_std[c], inside ? expected * std::exp(deviation) * n - 0.2 * 0.01 : 0.0));
  }
  mean[0] = log_std[1] = std::numeric_limits<float>::quiet_NaN();
  kernels.squash({-20.0f, 2.0f}, mean.data(), log_std.data(), noise.data(), panel, unit.data(), log_prob.data());
  for (std::size_t c = 0; c < 2; ++c) CHECK(std::isnan(unit[c]) && std::isnan(log_prob[c]));
}

// Adam's steps against double, for moments of all sizes.
void test_adam() {
  const std::size_t count = 1003;
  Floats gradients = random_floats(count, 1), weights = random_floats(count, 2), first = random_floats(count, 3);
  Floats second = random_floats(count, 4);
  for (std::size_t i = 0; i < count; ++i) {
    const float scale = std::pow(10.0f, static_cast<float>(i % 36) - 18.0f);
    gradients[i] *= scale;
    first[i] *= scale;
    second[i] = i % 37 == 0 ? 0.0f : second[i] * second[i] * scale * scale;
    if (i % 37 == 0) gradients[i] = 0.0f;
  }
  const AdamStep step{0.999f, 1e-8f, 0.1f, 0.001f, 0.003f, 0.5f, 0.0f, false};
  const Floats before = weights, moments = first, squares = second;
  learner_kernels().adam(step, 1.0f, gradients.data(), weights.data(), first.data(), second.data(), nullptr, count);
  for (std::size_t i = 0; i < count; ++i) {
    const double g = static_cast<double>(gradients[i]);
    const double m = static_cast<double>(moments[i]) + 0.1 * (g - static_cast<double>(moments[i]));
    const double v = 0.001 * g * g + 0.999 * static_cast<double>(squares[i]);
    const double moved = 0.003 * m / (std::sqrt(v) / 0.5 + 1e-8);
    const double expected = static_cast<double>(before[i]) - moved;
    CHECK(std::fabs(static_cast<double>(weights[i]) - expected) <= 1e-6 * (std::fabs(expected) + std::fabs(moved)));
  }
  // What no square is: a weight becomes what division gives.
  const float inf = std::numeric_limits<float>::infinity();
  Floats g = {1e30f, 0.0f}, w = {1.0f, 1.0f}, m = {0.0f, 0.0f}, v = {inf, 0.0f};
  learner_kernels().adam(step, 1.0f, g.data(), w.data(), m.data(), v.data(), nullptr, 2);
  CHECK(w[0] == 1.0f && w[1] == 1.0f);
}

// relu(linear) -> tanh(linear) -> LayerNorm -> value + advantage - mean(advantage), two inputs wide.
struct Example {
  static constexpr std::size_t kInputs = 5, kHidden = 19, kActions = 3;
  std::size_t parameters = 0;
  std::vector<Op> ops;

  std::ptrdiff_t take(std::size_t count) {
    const std::size_t at = parameters;
    parameters += count;
    return static_cast<std::ptrdiff_t>(at);
  }
  Op linear(std::ptrdiff_t from, std::size_t in, std::size_t out) {
    Op op{OpKind::linear, {from, kNone}, out};
    op.weight = take(in * out);
    op.bias = take(out);
    return op;
  }
  Example() {
    ops.push_back(linear(0, kInputs, kHidden));
    ops.push_back({OpKind::relu, {1, kNone}, kHidden});
    ops.push_back(linear(2, kHidden, kHidden));
    ops.push_back({OpKind::tanh, {3, kNone}, kHidden});
    Op norm{OpKind::layer_norm, {4, kNone}, kHidden};
    norm.weight = take(kHidden);
    norm.bias = take(kHidden);
    norm.eps = 1e-5f;
    ops.push_back(norm);
    ops.push_back(linear(5, kHidden, 1));
    ops.push_back(linear(5, kHidden, kActions));
    ops.push_back({OpKind::add, {6, 7}, kActions});
    ops.push_back({OpKind::mean, {7, kNone}, 1});
    ops.push_back({OpKind::subtract, {8, 9}, kActions});
  }

  // Sum of slopes * outputs for one transition, in double.
  double value(const std::vector<double>& p, const float* x, const float* slopes) const {
    std::vector<std::vector<double>> values = {{x, x + kInputs}};
    for (const Op& op : ops) {
      const std::vector<double>& in = values[static_cast<std::size_t>(op.inputs[0])];
      std::vector<double> out(op.width, 0.0);
      double mean = 0.0, square = 0.0;
      for (const double v : in) mean += v / static_cast<double>(in.size());
      for (const double v : in) square += (v - mean) * (v - mean) / static_cast<double>(in.size());
      for (std::size_t f = 0; f < op.width; ++f) {
        const auto weight = static_cast<std::size_t>(op.weight), bias = static_cast<std::size_t>(op.bias);
        if (op.kind == OpKind::linear) {
          out[f] = p[bias + f];
          for (std::size_t k = 0; k < in.size(); ++k) out[f] += p[weight + f * in.size() + k] * in[k];
        } else if (op.kind == OpKind::relu) {
          out[f] = std::max(in[f], 0.0);
        } else if (op.kind == OpKind::tanh) {
          out[f] = std::tanh(in[f]);
        } else if (op.kind == OpKind::layer_norm) {
          out[f] = (in[f] - mean) / std::sqrt(square + static_cast<double>(op.eps)) * p[weight + f] + p[bias + f];
        } else if (op.kind == OpKind::mean) {
          out[f] = mean;
        } else {
          const std::vector<double>& other = values[static_cast<std::size_t>(op.inputs[1])];
          const double second = other[other.size() == 1 ? 0 : f], first = in[in.size() == 1 ? 0 : f];
          out[f] = op.kind == OpKind::add ? first + second : first - second;
        }
      }
      values.push_back(out);
    }
    double sum = 0.0;
    for (std::size_t f = 0; f < kActions; ++f) sum += static_cast<double>(slopes[f]) * values.back()[f];
    return sum;
  }
};

void test_gradients() {
  const Example example;
  const Network network(Example::kInputs, example.ops, example.parameters);
  const std::size_t panel = network.kernels().panel;
  for (const std::size_t rows : {std::size_t{1}, panel / 2, panel + 3}) {
    const Floats parameters = random_floats(example.parameters, 7, 0.5f);
    const Floats x = random_floats(rows * Example::kInputs, 8), slopes = random_floats(rows * Example::kActions, 9);
    const std::size_t panels = (rows + panel - 1) / panel, last_columns = network.last_columns(rows, rows);
    Workspace workspace(network, panels, true);
    Floats gradients(example.parameters);
    for (std::size_t p = 0; p < panels; ++p) {
      const std::size_t count = std::min(panel, rows - p * panel);
      network.load(x.data() + p * panel * Example::kInputs, count, workspace, p);
      network.kernels().transpose(slopes.data() + p * panel * Example::kActions, count, Example::kActions,
                                  Example::kActions, workspace.gradient(network.output(), p), panel);
    }
    network.forward(parameters.data(), workspace, panels, rows, last_columns);
    network.backward(parameters.data(), gradients.data(), workspace, panels, rows, last_columns, false,
                     Example::kInputs);

    std::vector<double> exact(parameters.begin(), parameters.end());
    const auto total = [&] {
      double sum = 0.0;
      for (std::size_t i = 0; i < rows; ++i)
        sum += example.value(exact, x.data() + i * Example::kInputs, slopes.data() + i * Example::kActions);
      return sum;
    };
    for (std::size_t i = 0; i < example.parameters; i += 7) {
      const double at = exact[i], step = 1e-6;
      exact[i] = at + step;
      const double above = total();
      exact[i] = at - step;
      const double below = total();
      exact[i] = at;
      const double expected = (above - below) / (2.0 * step);
      CHECK(std::fabs(static_cast<double>(gradients[i]) - expected) < 1e-3 * std::fmax(1.0, std::fabs(expected)));
    }
  }
}

// Convolution with ReLU -> pooling -> residual convolution -> flatten -> linear, of odd sizes.
struct ImageExample {
  static constexpr std::size_t kInputs = 3 * 9 * 7, kOutputs = 4, kMap = 5 * 3 * 5;
  std::size_t parameters = 0;
  std::vector<Op> ops;

  std::ptrdiff_t take(std::size_t count) {
    const std::size_t at = parameters;
    parameters += count;
    return static_cast<std::ptrdiff_t>(at);
  }
  void window(OpKind kind, std::ptrdiff_t from, std::size_t channels, const Window& window, std::size_t width) {
    Op op{kind, {from, kNone}, width};
    op.window = window;
    if (kind == OpKind::conv2d) {
      op.weight = take(channels * window.channels * window.kernel[0] * window.kernel[1]);
      op.bias = take(channels);
    }
    ops.push_back(op);
  }
  ImageExample() {
    window(OpKind::conv2d, 0, 5, {3, 9, 7, {3, 2}, {2, 1}, {1, 2}}, 5 * 5 * 10);
    ops.push_back({OpKind::relu, {1, kNone}, 5 * 5 * 10});
    window(OpKind::max_pool2d, 2, 0, {5, 5, 10, {3, 2}, {2, 2}, {1, 0}}, kMap);
    window(OpKind::conv2d, 3, 5, {5, 3, 5, {3, 3}, {1, 1}, {1, 1}}, kMap);
    ops.push_back({OpKind::subtract, {3, 4}, kMap});
    ops.push_back({OpKind::flatten, {5, kNone}, kMap});
    Op last{OpKind::linear, {6, kNone}, kOutputs};
    last.weight = take(kMap * kOutputs);
    last.bias = take(kOutputs);
    ops.push_back(last);
  }

  // Sum of slopes * outputs for one image, in double.
  double value(const std::vector<double>& p, const float* x, const float* slopes) const {
    std::vector<std::vector<double>> values = {{x, x + kInputs}};
    for (const Op& op : ops) {
      const std::vector<double>& in = values[static_cast<std::size_t>(op.inputs[0])];
      std::vector<double> out(op.width, 0.0);
      const Window& w = op.window;
      const auto weight = static_cast<std::size_t>(op.weight), bias = static_cast<std::size_t>(op.bias);
      if (op.kind == OpKind::conv2d || op.kind == OpKind::max_pool2d) {
        const std::size_t rows = (w.height + 2 * w.padding[0] - w.kernel[0]) / w.stride[0] + 1;
        const std::size_t columns = (w.width + 2 * w.padding[1] - w.kernel[1]) / w.stride[1] + 1;
        for (std::size_t i = 0; i < op.width; ++i) {
          const std::size_t channel = i / (rows * columns), row = i / columns % rows, column = i % columns;
          const bool pools = op.kind == OpKind::max_pool2d;
          out[i] = pools ? -1e300 : p[bias + channel];
          for (std::size_t c = pools ? channel : 0; c < (pools ? channel + 1 : w.channels); ++c)
            for (std::size_t k = 0; k < w.kernel[0] * w.kernel[1]; ++k) {
              const std::size_t y = row * w.stride[0] + k / w.kernel[1] - w.padding[0];  // wraps above the image
              const std::size_t at = column * w.stride[1] + k % w.kernel[1] - w.padding[1];
              if (y >= w.height || at >= w.width) continue;
              const double number = in[(c * w.height + y) * w.width + at];
              const std::size_t tap = (channel * w.channels + c) * w.kernel[0] * w.kernel[1] + k;
              out[i] = pools ? std::max(out[i], number) : out[i] + number * p[weight + tap];
            }
        }
      } else if (op.kind == OpKind::linear) {
        for (std::size_t f = 0; f < op.width; ++f) {
          out[f] = p[bias + f];
          for (std::size_t k = 0; k < in.size(); ++k) out[f] += p[weight + f * in.size() + k] * in[k];
        }
      } else {
        for (std::size_t f = 0; f < op.width; ++f)
          out[f] = op.kind == OpKind::relu      ? std::max(in[f], 0.0)
                   : op.kind == OpKind::flatten ? in[f]
                                                : in[f] - values[static_cast<std::size_t>(op.inputs[1])][f];
      }
      values.push_back(out);
    }
    double sum = 0.0;
    for (std::size_t f = 0; f < kOutputs; ++f) sum += static_cast<double>(slopes[f]) * values.back()[f];
    return sum;
  }
};

void test_gradients_of_images() {
  const ImageExample example;
  for (const bool of_bytes : {false, true}) {
    const Network network(ImageExample::kInputs, example.ops, example.parameters, of_bytes);
    const std::size_t panel = network.kernels().panel;
    CHECK(network.input_bytes() == ImageExample::kInputs * (of_bytes ? 1 : 4));
    for (const std::size_t rows : {std::size_t{1}, panel + 3}) {
      const Floats parameters = random_floats(example.parameters, 31, 0.5f);
      Floats x = random_floats(rows * ImageExample::kInputs, 32);
      std::vector<std::uint8_t> bytes(x.size());
      for (std::size_t i = 0; i < x.size() && of_bytes; ++i) {
        bytes[i] = static_cast<std::uint8_t>(i * 2654435761u >> 24);
        x[i] = static_cast<float>(bytes[i]) / 255.0f;
      }
      const Floats slopes = random_floats(rows * ImageExample::kOutputs, 33);
      const std::size_t panels = (rows + panel - 1) / panel, last_columns = network.last_columns(rows, rows);
      Workspace workspace(network, panels, true);
      Floats gradients(example.parameters);
      double found = 0.0;
      for (const bool accumulates : {false, true}) {  // the second time, gradients are doubled
        found = 0.0;
        for (std::size_t p = 0; p < panels; ++p) {
          const std::size_t at = p * panel * ImageExample::kInputs, count = std::min(panel, rows - p * panel);
          network.load(of_bytes ? static_cast<const void*>(bytes.data() + at) : x.data() + at, count, workspace, p);
        }
        network.forward(parameters.data(), workspace, panels, rows, last_columns);
        for (std::size_t p = 0; p < panels; ++p) {
          const std::size_t first = p * panel, count = std::min(panel, rows - first);
          network.kernels().transpose(slopes.data() + first * ImageExample::kOutputs, count, ImageExample::kOutputs,
                                      ImageExample::kOutputs, workspace.gradient(network.output(), p), panel);
          for (std::size_t c = 0; c < count; ++c)
            for (std::size_t f = 0; f < ImageExample::kOutputs; ++f)
              found += static_cast<double>(slopes[(first + c) * ImageExample::kOutputs + f]) *
                       static_cast<double>(workspace.value(network.output(), p)[f * panel + c]);
        }
        network.backward(parameters.data(), gradients.data(), workspace, panels, rows, last_columns, accumulates, 0);
      }
      std::vector<double> exact(parameters.begin(), parameters.end());
      const auto total = [&] {
        double sum = 0.0;
        for (std::size_t i = 0; i < rows; ++i)
          sum += example.value(exact, x.data() + i * ImageExample::kInputs, slopes.data() + i * ImageExample::kOutputs);
        return sum;
      };
      CHECK(std::fabs(found - total()) < 1e-3);
      for (std::size_t i = 0; i < example.parameters; i += 11) {
        const double at = exact[i], step = 1e-6;
        exact[i] = at + step;
        const double above = total();
        exact[i] = at - step;
        const double below = total();
        exact[i] = at;
        const double expected = (above - below) / step;  // twice the derivative
        CHECK(std::fabs(static_cast<double>(gradients[i]) - expected) < 1e-3 * std::fmax(1.0, std::fabs(expected)));
      }
    }
  }
}

// A convolution of bytes in AMX and in AVX-512: the same but for the order of the sums. Weights far apart in size need
// all of their digits.
void test_bytes_in_amx() {
  if (learner_kernels().of_bytes == nullptr) return;
  for (const std::size_t columns : {8u, 23u, 90u}) {
    const std::size_t inputs = 4 * 9 * columns, wide = (columns - 8) / 3 + 1, map = 48 * 2 * wide;
    Op conv{OpKind::conv2d, {0, kNone}, map, 0, 48 * 4 * 5 * 8};
    conv.window = {4, 9, columns, {5, 8}, {3, 3}, {0, 0}};
    const std::size_t weights = 48 * 4 * 5 * 8 + 48;
    Op last{OpKind::linear, {3, kNone}, 7, static_cast<std::ptrdiff_t>(weights), kNone};
    const std::vector<Op> ops = {
        conv, {OpKind::relu, {1, kNone}, map}, {OpKind::flatten, {2, kNone}, map}, last};
    Floats parameters = random_floats(weights + 7 * map, 41, 0.2f);
    for (std::size_t i = 0; i < weights; i += 3) parameters[i] *= 1e-3f;
    std::vector<std::uint8_t> bytes(2 * inputs);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 2654435761u >> 24);
    Floats found[2];
    for (const bool allowed : {false, true}) {
      select_learner_kernels(allowed ? "amx" : "avx512");
      const Network network(inputs, ops, parameters.size(), true);
      Workspace workspace(network, 1, false);
      network.load(bytes.data(), 2, workspace, 0);
      network.forward(parameters.data(), workspace, 1, 2, network.columns(2));
      const float* values = workspace.value(network.output(), 0);
      found[allowed].assign(values, values + 7 * network.kernels().panel);
    }
    for (std::size_t i = 0; i < found[0].size(); ++i)
      CHECK(std::fabs(found[0][i] - found[1][i]) < 2e-5f * std::fmax(1.0f, std::fabs(found[0][i])));
    CHECK(found[0] != found[1]);  // two ways
  }
}

// Outputs and gradients of a network of images, floats or bytes, with the kernels that are selected.
struct OfImages {
  template <class T>
  OfImages(std::size_t inputs, const std::vector<Op>& ops, const Floats& parameters, const std::vector<T>& images,
           const Floats& slopes)
      : gradients(parameters.size()) {
    const Network network(inputs, ops, parameters.size(), std::is_same_v<T, std::uint8_t>);
    const std::size_t rows = images.size() / inputs, outputs = network.output_width();
    const std::size_t panel = network.kernels().panel, panels = (rows + panel - 1) / panel;
    const std::size_t last_columns = network.last_columns(rows, rows);
    values.resize(rows * outputs);
    Workspace kept(network, panels, true), passing(network, panels, false);
    const auto forward = [&](Workspace& workspace, float* to) {
      for (std::size_t p = 0; p < panels; ++p)
        network.load(images.data() + p * panel * inputs, std::min(panel, rows - p * panel), workspace, p);
      network.forward(parameters.data(), workspace, panels, rows, last_columns);
      for (std::size_t p = 0; p < panels; ++p)
        network.kernels().transpose(workspace.value(network.output(), p), outputs, std::min(panel, rows - p * panel),
                                    panel, to + p * panel * outputs, outputs);
    };
    Floats without_gradients(values.size());
    forward(passing, without_gradients.data());
    forward(kept, values.data());
    CHECK(values == without_gradients);
    for (std::size_t p = 0; p < panels; ++p)
      network.kernels().transpose(slopes.data() + p * panel * outputs, std::min(panel, rows - p * panel), outputs,
                                  outputs, kept.gradient(network.output(), p), panel);
    network.backward(parameters.data(), gradients.data(), kept, panels, rows, last_columns, false, 0);
  }

  Floats values, gradients;
};

double distance(const Floats& found, const Floats& expected) {
  double squares = 0.0, whole = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double x = static_cast<double>(found[i]), y = static_cast<double>(expected[i]);
    squares += (x - y) * (x - y);
    whole += y * y;
  }
  return std::sqrt(squares / whole);
}

// Convolutions of a panel's images together in AMX: those of AVX-512 but for rounding, whatever the batch. With a
// stride, a padding and a kernel that differ by direction, and a map whose gradient has two parts.
void test_images_together_in_amx() {
  if (learner_kernels().of_panels == nullptr) return;
  constexpr std::size_t kInputs = 3 * 11 * 9, kOutputs = 7;
  std::vector<Op> ops;
  std::ptrdiff_t parameters = 0;
  const auto convolve = [&](std::ptrdiff_t from, std::size_t channels, std::size_t positions, const Window& window) {
    Op op{OpKind::conv2d, {from, kNone}, channels * positions, parameters};
    op.window = window;
    op.bias =
        parameters + static_cast<std::ptrdiff_t>(channels * window.channels * window.kernel[0] * window.kernel[1]);
    parameters = op.bias + static_cast<std::ptrdiff_t>(channels);
    ops.push_back(op);
  };
  convolve(0, 32, 11 * 9, {3, 11, 9, {3, 3}, {1, 1}, {1, 1}});
  ops.push_back({OpKind::relu, {1, kNone}, 32 * 11 * 9});
  convolve(2, 64, 5 * 4, {32, 11, 9, {4, 3}, {2, 3}, {1, 2}});
  ops.push_back({OpKind::relu, {3, kNone}, 64 * 5 * 4});
  convolve(4, 64, 5 * 4, {64, 5, 4, {3, 3}, {1, 1}, {1, 1}});
  ops.push_back({OpKind::add, {4, 5}, 64 * 5 * 4});
  convolve(6, 32, 3 * 2, {64, 5, 4, {3, 3}, {2, 2}, {1, 1}});
  ops.push_back({OpKind::flatten, {7, kNone}, 32 * 3 * 2});
  ops.push_back({OpKind::linear, {8, kNone}, kOutputs, parameters, kNone});
  const auto count = static_cast<std::size_t>(parameters) + kOutputs * 32 * 3 * 2;
  const Floats weights = random_floats(count, 51, 0.1f), images = random_floats(48 * kInputs, 52);
  const Floats slopes = random_floats(48 * kOutputs, 53);
  Floats first;
  for (const std::size_t rows : {48u, 32u, 17u, 12u, 11u}) {
    const Floats x(images.begin(), images.begin() + static_cast<std::ptrdiff_t>(rows * kInputs));
    select_learner_kernels("avx512");
    const OfImages expected(kInputs, ops, weights, x, slopes);
    select_learner_kernels("amx");
    const OfImages found(kInputs, ops, weights, x, slopes);
    CHECK(distance(found.values, expected.values) < 1e-6);
    CHECK(distance(found.gradients, expected.gradients) < 1e-6);
    if (rows < 12) continue;
    CHECK(found.values != expected.values);  // two ways
    if (first.empty()) first = Floats(found.values.begin(), found.values.begin() + 12 * kOutputs);
    CHECK(std::equal(first.begin(), first.end(), found.values.begin()));
    select_matmul_precision("high");
    const OfImages rough(kInputs, ops, weights, x, slopes);
    select_matmul_precision("highest");
    CHECK(distance(rough.values, expected.values) < 3e-5);
    CHECK(distance(rough.gradients, expected.gradients) < 1e-2);  // a ReLU may decide otherwise
    CHECK(rough.values != found.values);
  }
}

// Networks of images as convolutions take them that leave out zeros.
struct SparseImages {
  std::vector<Op> ops;
  std::size_t parameters = 0, inputs;

  explicit SparseImages(std::size_t pixels) : inputs(pixels) {}

  void convolve(std::size_t channels, const Window& window) {
    Op op{OpKind::conv2d, {last(), kNone}, 0, signed_of(parameters)};
    std::size_t size[2];
    const std::size_t of[2] = {window.height, window.width};
    for (int k = 0; k < 2; ++k) size[k] = (of[k] + 2 * window.padding[k] - window.kernel[k]) / window.stride[k] + 1;
    op.width = channels * size[0] * size[1];
    op.window = window;
    parameters += channels * window.channels * window.kernel[0] * window.kernel[1];
    op.bias = signed_of(parameters);
    parameters += channels;
    ops.push_back(op);
  }
  void follow(OpKind kind) { ops.push_back({kind, {last(), kNone}, ops.back().width}); }
  void linear(std::size_t width) {
    Op op{OpKind::linear, {last(), kNone}, width, signed_of(parameters)};
    parameters += width * ops.back().width;
    op.bias = signed_of(parameters);
    parameters += width;
    ops.push_back(op);
  }
  std::ptrdiff_t last() const { return signed_of(ops.size()); }
  static std::ptrdiff_t signed_of(std::size_t value) { return static_cast<std::ptrdiff_t>(value); }

  template <class T>
  void check(const std::string& name, const std::vector<T>& images, std::uint32_t seed) const {
    const Floats weights = random_floats(parameters, seed, 0.1f);
    for (const std::size_t rows : {images.size() / inputs, std::size_t{17}, std::size_t{1}}) {
      const std::vector<T> x(images.begin(), images.begin() + signed_of(rows * inputs));
      const Floats slopes = random_floats(rows * ops.back().width, seed + 1);
      select_learner_kernels("plain");
      const OfImages expected(inputs, ops, weights, x, slopes);
      select_learner_kernels(name);
      const OfImages found(inputs, ops, weights, x, slopes);
      CHECK(distance(found.values, expected.values) < 2e-6);
      CHECK(distance(found.gradients, expected.gradients) < 2e-6);
    }
  }
};

// Images of four frames in which a few pixels change from one to the next, of bytes that differ from image to image; or
// whatever bytes.
std::vector<std::uint8_t> frames(std::size_t images, std::size_t positions, bool alike) {
  std::vector<std::uint8_t> bytes(images * 4 * positions);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint32_t mixed = static_cast<std::uint32_t>(i) * 2654435761u >> 16, frame = i / positions % 4;
    const std::size_t image = i / (4 * positions);
    const bool moves = !alike || mixed % 16 == frame;
    bytes[i] = static_cast<std::uint8_t>(moves ? mixed >> 8 : 3 + 5 * image);
  }
  return bytes;
}

void test_sparse_images(const std::string& name) {
  select_learner_kernels(name);
  const SparseConvolutionKernels* const kernels = learner_kernels().of_sparse;
  if (kernels == nullptr) return;
  // The Nature CNN's first and second convolution are taken.
  const SparseConvolution second{4 * 32, 4, 0, 2 * 32, 9, 64, std::vector<std::vector<Meeting>>(9, {{0, 0}})};
  CHECK(kernels->frames.fits({84 * 4, 4 * 84 * 4, 4 * 4, 8 * 4, 8, 20, 20, 32, 20 * 32}));
  CHECK(kernels->fits(second) && kernels->fits_gradients(second));

  // As in Atari; the next to last convolution's slopes come from two operations.
  constexpr std::size_t kHeight = 36, kWidth = 44, kPixels = 4 * kHeight * kWidth;
  SparseImages nature(kPixels);
  nature.convolve(32, {4, kHeight, kWidth, {8, 8}, {4, 4}, {0, 0}});
  nature.follow(OpKind::relu);
  nature.convolve(64, {32, 8, 10, {4, 4}, {2, 2}, {0, 0}});
  nature.follow(OpKind::relu);
  nature.convolve(64, {64, 3, 4, {3, 3}, {1, 1}, {1, 1}});
  nature.follow(OpKind::relu);
  nature.ops.push_back({OpKind::add, {4, 6}, nature.ops.back().width});
  nature.convolve(64, {64, 3, 4, {3, 3}, {1, 1}, {0, 1}});
  nature.follow(OpKind::relu);
  nature.follow(OpKind::flatten);
  nature.linear(128);
  nature.follow(OpKind::relu);
  nature.linear(7);
  for (const bool alike : {true, false}) nature.check(name, frames(48, kHeight * kWidth, alike), 61);
  auto mixed = frames(48, kHeight * kWidth, true), random = frames(48, kHeight * kWidth, false);
  for (std::size_t i = 0; i < mixed.size(); ++i)
    if (i / kPixels % 3 == 1) mixed[i] = random[i];
  nature.check(name, mixed, 61);

  // Strides and kernels that differ by direction, paddings, twice 64 channels, a convolution without a ReLU, and more
  // than 1,024 features.
  SparseImages other(3 * 11 * 10);
  other.convolve(32, {3, 11, 10, {3, 3}, {1, 1}, {1, 1}});
  other.follow(OpKind::relu);
  other.convolve(32, {32, 11, 10, {3, 3}, {1, 1}, {1, 1}});
  other.follow(OpKind::relu);
  other.convolve(128, {32, 11, 10, {4, 3}, {2, 1}, {1, 1}});
  other.follow(OpKind::relu);
  other.convolve(64, {128, 5, 10, {2, 1}, {1, 1}, {0, 0}});
  other.convolve(64, {64, 4, 10, {3, 2}, {1, 2}, {1, 0}});
  other.follow(OpKind::relu);
  other.follow(OpKind::flatten);
  other.linear(128);
  other.follow(OpKind::relu);
  other.linear(7);
  other.check(name, random_floats(48 * other.inputs, 62), 63);

  // First convolutions of 16 and of 48 channels.
  for (const std::size_t channels : {16u, 48u}) {
    SparseImages small(2 * 12 * 24);
    small.convolve(channels, {2, 12, 24, {6, 16}, {3, 8}, {0, 0}});
    small.follow(OpKind::relu);
    small.follow(OpKind::flatten);
    small.linear(7);
    auto bytes = frames(24, 12 * 24, true);  // of four frames: twice as many images of two
    small.check(name, bytes, 66);
  }

  // Two convolutions of which the first's channel 5 is zero everywhere: an infinite weight of it gives no NaN.
  SparseImages dead(4 * 12 * 12);
  dead.convolve(32, {4, 12, 12, {8, 8}, {4, 4}, {0, 0}});
  dead.follow(OpKind::relu);
  dead.convolve(64, {32, 2, 2, {2, 2}, {2, 2}, {0, 0}});
  dead.follow(OpKind::relu);
  dead.follow(OpKind::flatten);
  dead.linear(3);
  Floats weights = random_floats(dead.parameters, 64, 0.1f);
  weights[static_cast<std::size_t>(dead.ops[0].bias) + 5] = -1e9f;
  weights[static_cast<std::size_t>(dead.ops[2].weight) + 5 * 4] = std::numeric_limits<float>::infinity();
  const OfImages found(dead.inputs, dead.ops, weights, frames(20, 12 * 12, true), random_floats(20 * 3, 65));
  CHECK(std::all_of(found.values.begin(), found.values.end(), [](float x) { return std::isfinite(x); }));
}

// Learners of vectors refuse networks of images.
void test_images_are_refused_where_they_are_unknown() {
  const ImageExample example;
  const Network network(ImageExample::kInputs, example.ops, example.parameters);
  CHECK(!network.takes_vectors());
  CHECK(throws<pearl::LearnerError>([&] { network.require_vectors("A policy"); }));
  const Network bytes(4, {{OpKind::relu, {0, kNone}, 4}}, 0, true);
  CHECK(!bytes.takes_vectors() && bytes.input_bytes() == 4);
}

struct Training {
  Example example;
  Network network{Example::kInputs, example.ops, example.parameters};
  Floats online = random_floats(example.parameters, 11, 0.3f), target = online;
  Floats first = Floats(example.parameters), second = Floats(example.parameters);
  float steps = 0.0f;
  Optimizer optimizer;
  DqnLearner learner;
  std::size_t rows;
  Floats obs, next_obs, rewards, discounts, weights, priorities;
  std::vector<std::int64_t> actions;
  std::vector<std::uint8_t> masks;  // empty: none

  Training(std::size_t threads, std::size_t batch)
      : learner(network, online.data(), target.data(), threads),
        rows(batch),
        obs(random_floats(rows * Example::kInputs, 12)),
        next_obs(random_floats(rows * Example::kInputs, 13)),
        rewards(random_floats(rows, 14)),
        discounts(rows, 0.9f),
        weights(rows, 0.5f),
        priorities(rows),
        actions(rows) {
    for (std::size_t i = 0; i < rows; ++i) actions[i] = static_cast<std::int64_t>(i % Example::kActions);
    learner.set({true, Loss::huber, 1.0, 1.0, 4});
    optimizer.set_adam({1e-3, 0.9, 0.999, 1e-8, 0.0, false}, first.data(), second.data(), nullptr, &steps);
  }

  StepMetrics step(std::uint64_t number, const PrioritiesKnown& known = {}) {
    const Batch batch = {rows,           obs.data(),      actions.data(), rewards.data(),
                         next_obs.data(), discounts.data(), weights.data(),
                         masks.empty() ? nullptr : masks.data()};
    return learner.step(batch, number, optimizer, priorities.data(), known);
  }
};

void test_training() {
  for (const std::size_t rows : {1u, 20u, 300u}) {
    Training alone(1, rows), again(1, rows);
    double before = 0.0, after = 0.0;
    for (std::uint64_t number = 1; number <= 40; ++number) {
      after = alone.step(number).loss;
      if (number == 1) before = after;
      again.step(number);
    }
    CHECK(after < before);
    CHECK(alone.online == again.online);
    CHECK(alone.target == alone.online);  // step 40 is one of the hard copies
    CHECK(alone.steps == 40.0f);
    for (const std::size_t threads : {2u, 3u}) {
      Training together(threads, rows), twin(threads, rows);
      for (std::uint64_t number = 1; number <= 40; ++number) {
        together.step(number);
        twin.step(number);
      }
      CHECK(together.online == twin.online);
      for (std::size_t i = 0; i < together.online.size(); ++i)
        CHECK(std::fabs(together.online[i] - alone.online[i]) < 1e-3f);
    }
  }
}

// The next action is the best allowed one: with a single one it is that, with all it is the same as without masks.
void test_masks() {
  constexpr std::size_t kActions = Example::kActions;
  for (const bool double_q : {true, false})
    for (const std::size_t rows : {1u, 20u, 300u}) {
      Training without(2, rows), all(2, rows), single(2, rows);
      all.masks.assign(rows * kActions, 1);
      single.masks.assign(rows * kActions, 0);
      const Floats other = random_floats(single.example.parameters, 17, 0.3f);
      std::copy(other.begin(), other.end(), single.target.begin());  // in place: the learner holds its memory
      for (Training* training : {&without, &all, &single})
        training->learner.set({double_q, Loss::huber, 1.0, 1.0, 1000});
      const auto values = [&](const Floats& parameters, const Floats& inputs, std::size_t row, std::size_t action) {
        Workspace workspace(single.network, 1, false);
        single.network.load(inputs.data() + row * Example::kInputs, 1, workspace, 0);
        single.network.forward(parameters.data(), workspace, 1, 1, single.network.columns(1));
        return workspace.value(single.network.output(), 0)[action * single.network.kernels().panel];
      };
      Floats expected(rows);
      for (std::size_t i = 0; i < rows; ++i) {
        const std::size_t allowed = (7 * i + 3) % kActions;
        single.masks[i * kActions + allowed] = 1;
        const float target = single.rewards[i] + 0.9f * values(single.target, single.next_obs, i, allowed);
        const auto taken = static_cast<std::size_t>(single.actions[i]);
        expected[i] = std::fabs(values(single.online, single.obs, i, taken) - target);
      }
      for (std::uint64_t number = 1; number <= 10; ++number) {
        const StepMetrics found = all.step(number), same = without.step(number);
        CHECK(found.loss == same.loss && found.gradient_norm == same.gradient_norm);
        CHECK(all.priorities == without.priorities);
      }
      CHECK(all.online == without.online);
      single.step(1);
      for (std::size_t i = 0; i < rows; ++i) CHECK(std::fabs(single.priorities[i] - expected[i]) < 1e-4f);
    }
}

void test_refused_steps_change_nothing() {
  for (const std::size_t threads : {1u, 2u}) {
    Training training(threads, 50);
    training.step(1);
    const Floats online = training.online, target = training.target, first = training.first;
    training.rewards[17] = std::numeric_limits<float>::quiet_NaN();
    CHECK(throws<pearl::LearnerError>([&] { training.step(2); }));
    training.rewards[17] = std::numeric_limits<float>::infinity();
    CHECK(throws<pearl::LearnerError>([&] { training.step(2); }));
    training.rewards[17] = 0.0f;
    training.actions[3] = Example::kActions;
    CHECK(throws<pearl::LearnerError>([&] { training.step(2); }));
    training.actions[3] = -1;
    CHECK(throws<pearl::LearnerError>([&] { training.step(2); }));
    CHECK(training.online == online && training.target == target && training.first == first);
    CHECK(training.steps == 1.0f);
    training.actions[3] = 0;
    training.step(2);
    CHECK(training.online != online);
  }
}

// TD3-like (a target actor, two critics), SAC-like (a stochastic actor) or DroQ-like (an ensemble with dropout), of odd
// sizes.
struct ActorCriticTraining {
  static constexpr std::size_t kObs = 5, kActions = 2, kHidden = 13;
  std::vector<Op> actor_ops, critic_ops[2];
  bool ensemble;
  std::size_t actor_size = 0, critic_size = 0;
  std::vector<std::unique_ptr<Network>> networks;
  Floats actor, target_actor, critic, target_critic;
  std::vector<Floats> moments;
  float steps[3] = {}, log_alpha = -1.0f;
  Optimizer optimizers[3];
  std::unique_ptr<ActorCriticLearner> learner;
  std::size_t rows;
  Floats obs, next_obs, actions, rewards, discounts, weights, next_noise, noise, priorities;
  bool stochastic;
  std::uint64_t steps_done = 0;

  static void layers(std::vector<Op>& ops, std::size_t& size, std::size_t in, std::size_t out, bool drops = false) {
    const auto take = [&size](std::size_t count) {
      size += count;
      return static_cast<std::ptrdiff_t>(size - count);
    };
    const std::ptrdiff_t first = take(in * kHidden), first_bias = take(kHidden);
    const std::ptrdiff_t second = take(kHidden * out), second_bias = take(out);
    ops = {{OpKind::linear, {0, kNone}, kHidden, first, first_bias},
           {OpKind::relu, {1, kNone}, kHidden},
           {OpKind::linear, {2, kNone}, out, second, second_bias}};
    if (!drops) return;
    ops.insert(ops.begin() + 1, {OpKind::dropout, {1, kNone}, kHidden, kNone, kNone, 0.2f});
    ops[2].inputs[0] = 2;
    ops[3].inputs[0] = 3;
  }

  ActorCriticTraining(bool is_stochastic, std::size_t threads, std::size_t batch, bool is_ensemble = false)
      : ensemble(is_ensemble),
        rows(batch),
        obs(random_floats(rows * kObs, 21)),
        next_obs(random_floats(rows * kObs, 22)),
        actions(random_floats(rows * kActions, 23)),
        rewards(random_floats(rows, 24)),
        discounts(rows, 0.9f),
        weights(rows, 0.5f),
        next_noise(random_floats(rows * kActions, 25)),
        noise(random_floats(rows * kActions, 26)),
        priorities(rows),
        stochastic(is_stochastic) {
    layers(actor_ops, actor_size, kObs, stochastic ? 2 * kActions : kActions);
    for (std::vector<Op>& ops : critic_ops) layers(ops, critic_size, kObs + kActions, 1, ensemble);
    networks.push_back(std::make_unique<Network>(kObs, actor_ops, actor_size));
    for (std::vector<Op>& ops : critic_ops)
      networks.push_back(std::make_unique<Network>(kObs + kActions, ops, critic_size));
    actor = target_actor = random_floats(actor_size, 27, 0.4f);
    critic = target_critic = random_floats(critic_size, 28, 0.4f);
    ActorCriticModel model{};
    model.actor = networks[0].get();
    model.critics = {networks[1].get(), networks[2].get()};
    model.actor_weights = actor.data();
    model.target_actor_weights = stochastic ? nullptr : target_actor.data();
    model.critic_weights = critic.data();
    model.target_critic_weights = target_critic.data();
    model.observations = {Floats(kObs, 0.1f), Floats(kObs, 2.0f)};
    model.actions = {Floats(kActions, -0.5f), Floats(kActions, 1.5f)};
    learner = std::make_unique<ActorCriticLearner>(model, threads);
    ActorCriticSettings settings;
    settings.stochastic = stochastic;
    settings.target_noise = 0.2;
    settings.noise_clip = 0.5;
    settings.target_entropy = -2.0;
    settings.max_grad_norm = 1.0;
    settings.target_critics = ensemble ? 1 : 0;
    learner->set(settings);
    const std::size_t sizes[3] = {critic_size, actor_size, 1};
    for (std::size_t i = 0; i < 3; ++i) {
      moments.emplace_back(sizes[i]);
      moments.emplace_back(sizes[i]);
    }
    for (std::size_t i = 0; i < 3; ++i)
      optimizers[i].set_adam({1e-3, 0.9, 0.999, 1e-8, 0.0, false}, moments[2 * i].data(), moments[2 * i + 1].data(),
                             nullptr, &steps[i]);
  }

  ActorCriticMetrics step(bool moves, const PrioritiesKnown& known = {}) {
    const Batch columns = {rows,           obs.data(),       actions.data(), rewards.data(),
                           next_obs.data(), discounts.data(), weights.data(), nullptr};
    const ActorCriticBatch batch = {columns, next_noise.data(), noise.data(), 5, steps_done++};
    return learner->step(batch, moves, moves || ensemble, optimizers[0], optimizers[1], stochastic ? &optimizers[2] : nullptr,
                         &log_alpha, priorities.data(), known);
  }
};

void test_actor_critics() {
  for (const int kind : {0, 1, 2})
    for (const std::size_t rows : {1u, 37u, 300u}) {
      const bool stochastic = kind > 0, ensemble = kind == 2;
      ActorCriticTraining alone(stochastic, 1, rows, ensemble), team(stochastic, 3, rows, ensemble),
          twin(stochastic, 3, rows, ensemble);
      const double before = alone.step(true).loss;
      team.step(true);
      twin.step(true);
      double after = 0.0;
      for (int i = 0; i < 60; ++i) {
        after = alone.step(i % 2 == 0).loss;
        team.step(i % 2 == 0);
        twin.step(i % 2 == 0);
      }
      CHECK(after < before);
      CHECK(team.actor == twin.actor && team.critic == twin.critic && team.log_alpha == twin.log_alpha);
      for (std::size_t i = 0; i < team.critic.size(); ++i)
        CHECK(std::fabs(team.critic[i] - alone.critic[i]) < 1e-3f);
      CHECK((alone.log_alpha != -1.0f) == stochastic);
      CHECK(alone.steps[0] == 61.0f && alone.steps[1] == 31.0f);

      const Floats actor = alone.actor, critic = alone.critic;
      alone.rewards[0] = std::numeric_limits<float>::quiet_NaN();
      CHECK(throws<pearl::LearnerError>([&] { alone.step(true); }));
      CHECK(alone.actor == actor && alone.critic == critic && alone.steps[0] == 61.0f);
    }
}

// The callback runs once per step, when all priorities are final and before the weights move.
template <class Step>
void check_known(Floats& priorities, const Floats& weights, Floats& rewards, Step step) {
  Floats seen;
  int told = 0;
  const Floats before = weights;
  const PrioritiesKnown known = [&] {
    ++told;
    seen = priorities;
    CHECK(weights == before);
  };
  std::fill(priorities.begin(), priorities.end(), -1.0f);
  step(known);
  CHECK(told == 1 && seen == priorities);
  CHECK(*std::min_element(seen.begin(), seen.end()) >= 0.0f);
  rewards.back() = std::numeric_limits<float>::quiet_NaN();
  CHECK(throws<pearl::LearnerError>([&] { step(known); }));
  CHECK(told == 1);
}

void test_known_priorities() {
  for (const std::size_t rows : {1u, 37u, 300u})
    for (const std::size_t threads : {1u, 2u, 3u}) {
      Training dqn(threads, rows);
      check_known(dqn.priorities, dqn.online, dqn.rewards, [&](const PrioritiesKnown& known) { dqn.step(1, known); });
      for (const bool stochastic : {false, true}) {
        ActorCriticTraining both(stochastic, threads, rows);
        check_known(both.priorities, both.critic, both.rewards,
                    [&](const PrioritiesKnown& known) { both.step(true, known); });
      }
    }
}

// The loop's Algorithm makes the same steps as its learner with the same noise and delay.
void test_actor_critic_algorithm() {
  constexpr std::int64_t kSeed = 77, kDelay = 3;
  for (const bool stochastic : {false, true})
    for (const std::size_t threads : {1u, 2u}) {
      ActorCriticTraining looped(stochastic, threads, 50), stepped(stochastic, threads, 50);
      std::int64_t steps = 5;
      ActorCriticAlgorithm algorithm({*looped.learner, looped.optimizers[0], looped.optimizers[1],
                                      stochastic ? &looped.optimizers[2] : nullptr, &looped.log_alpha, &kSeed, kDelay,
                                      &steps});
      const auto bytes = algorithm.item_bytes();
      CHECK(bytes[0] == 4 * ActorCriticTraining::kObs && bytes[1] == 4 * ActorCriticTraining::kActions);
      const Batch batch = {looped.rows,          looped.obs.data(),      looped.actions.data(),
                           looped.rewards.data(), looped.next_obs.data(), looped.discounts.data(),
                           looped.weights.data(), nullptr};
      for (std::uint64_t step = 5; step < 25; ++step) {
        const StepMetrics found = algorithm.step(batch, looped.priorities.data(), {});
        pearl::fill_normal(kSeed, step, 0, stepped.next_noise.size(), stepped.next_noise.data());
        pearl::fill_normal(kSeed, step, 1, stepped.noise.size(), stepped.noise.data());
        const ActorCriticMetrics expected = stepped.step((step + 1) % kDelay == 0);
        CHECK(found.loss == expected.loss && found.td_error == expected.td_error);
        CHECK(looped.priorities == stepped.priorities);
      }
      CHECK(steps == 25 && looped.steps[0] == 20.0f && looped.steps[1] == 7.0f);
      CHECK(looped.actor == stepped.actor && looped.critic == stepped.critic);
      CHECK(looped.target_actor == stepped.target_actor && looped.target_critic == stepped.target_critic);
      CHECK(looped.log_alpha == stepped.log_alpha && (looped.log_alpha != -1.0f) == stochastic);

      const Floats critic = looped.critic;
      looped.rewards[0] = std::numeric_limits<float>::quiet_NaN();
      CHECK(throws<pearl::LearnerError>([&] { algorithm.step(batch, looped.priorities.data(), {}); }));
      CHECK(steps == 25 && looped.critic == critic);
    }
}

void test_team() {
  for (const std::size_t size : {1u, 2u, 4u}) {
    Team team(size);
    std::vector<int> written(size), seen(size);
    auto work = [&](std::size_t worker) {
      written[worker] += 1;
      team.barrier();
      int sum = 0;
      for (const int each : written) sum += each;
      team.barrier();
      seen[worker] = sum;
    };
    for (int round = 1; round <= 200; ++round) {
      team.run(work);
      for (const int sum : seen) CHECK(sum == round * static_cast<int>(size));
    }
  }
}

void test_ill_formed_networks_are_refused() {
  const auto refused = [](std::size_t inputs, const std::vector<Op>& ops, std::size_t parameters) {
    return throws<pearl::LearnerError>([&] { const Network network(inputs, ops, parameters); });
  };
  CHECK(refused(4, {}, 0));
  CHECK(refused(0, {{OpKind::relu, {0, kNone}, 4}}, 0));
  CHECK(refused(4, {{OpKind::relu, {1, kNone}, 4}}, 0));
  CHECK(refused(4, {{OpKind::relu, {0, kNone}, 5}}, 0));
  CHECK(refused(4, {{OpKind::linear, {0, kNone}, 5}}, 100));
  CHECK(refused(4, {{OpKind::linear, {0, kNone}, 5, 0, kNone}}, 19));
  CHECK(refused(4, {{OpKind::relu, {0, kNone}, 4}, {OpKind::relu, {0, kNone}, 4}}, 0));
  CHECK(refused(4, {{OpKind::add, {0, kNone}, 4}}, 0));
  CHECK(!refused(4, {{OpKind::linear, {0, kNone}, 5, 0, kNone}}, 20));
}

}  // namespace

int main() {
  for (const std::string& name : learner_kernel_variants()) {
    select_learner_kernels(name);
    test_gemm();
    test_turned_gemm();
    test_chain();
    test_narrow_gradients();
    test_layer_gradient();
    test_networks_of_units(name);
    test_squash();
    test_adam();
    test_gradients();
    test_gradients_of_images();
    test_bytes_in_amx();
    test_images_together_in_amx();
    test_sparse_images(name);
    test_images_are_refused_where_they_are_unknown();
    test_training();
    test_masks();
    test_refused_steps_change_nothing();
    test_actor_critics();
    test_known_priorities();
    test_actor_critic_algorithm();
  }
  select_matmul_precision("high");
  test_gemm();
  test_chain();
  test_layer_gradient();
  test_networks_of_units(learner_kernel_variants().back());
  select_matmul_precision("highest");
  CHECK(throws<pearl::ConfigurationError>([] { select_learner_kernels("sse9"); }));
  CHECK(throws<pearl::ConfigurationError>([] { select_matmul_precision("low"); }));
  test_team();
  test_ill_formed_networks_are_refused();
}
