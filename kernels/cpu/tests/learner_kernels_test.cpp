// The learner's kernels without Python: products, gradients of layers, samples and Adam's steps against sums in double,
// and whole networks against the plain kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "floats.hpp"
#include "pearl/errors.hpp"
#include "pearl/learner/network.hpp"

using namespace pearl::learner;

namespace {

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

struct Variant {
  std::string name, precision;
};

// With every other variant against the plain kernels: shapes that chains and gradients take, and others.
void check_network_of_units(const OfUnits& network, std::size_t rows, const std::vector<Variant>& variants) {
  const std::size_t last = network.inputs > 2 ? 2 : 1;
  select_learner_kernels("plain");
  const OfUnits::Result expected = network.run(rows, false, last);
  for (const Variant& variant : variants) {
    select_learner_kernels(variant.name);
    select_matmul_precision(variant.precision);
    const OfUnits::Result kept = network.run(rows, false, 0), judged = network.run(rows, true, last);
    const OfUnits::Result whole = network.run(rows, false, last);
    CHECK(kept.values == expected.values);
    CHECK(kept.gradients == expected.gradients);
    CHECK(judged.values == expected.values);
    CHECK(judged.of_inputs == expected.of_inputs);
    CHECK(whole.gradients == expected.gradients);
    CHECK(whole.of_inputs == expected.of_inputs);
  }
}

void test_networks_of_units() {
  std::vector<Variant> variants;
  for (const std::string& name : learner_kernel_variants())
    if (name != "plain") variants.push_back({name, "highest"});
  if (learner_kernel_variants().back() == "amx") variants.push_back({"amx", "high"});
  for (const std::size_t inputs : {3u, 6u, 16u})  // a single output, and last panels of all kinds
    for (const std::size_t rows : {65u, 68u, 69u, 80u, 81u, 127u, 160u})
      check_network_of_units({inputs, {64, 64}, 1, true}, rows, variants);
  for (const std::size_t inputs : {1u, 4u, 7u, 17u})
    for (const std::size_t outputs : {1u, 3u, 9u, 17u})
      for (const std::size_t rows : {32u, 40u, 64u, 100u, 121u})
        for (const bool biases : {true, false}) {
          for (const std::size_t hidden : {1u, 2u, 3u})
            check_network_of_units({inputs, std::vector<std::size_t>(hidden, 64), outputs, biases}, rows, variants);
          check_network_of_units({inputs, {128, 64}, outputs, biases}, rows, variants);
          check_network_of_units({inputs, {64, 192}, outputs, biases}, rows, variants);
        }
  for (const std::size_t hidden : {192u, 512u}) {
    check_network_of_units({4, {128, hidden}, 1, true}, 121, variants);
    // A second head on the first hidden layer, as in dueling networks: its slopes are added to.
    OfUnits network(4, {128, hidden}, 1, true);
    network.ops.push_back({OpKind::linear, {2, kNone}, 1, static_cast<std::ptrdiff_t>(network.parameters), kNone});
    network.parameters += 128;
    network.ops.push_back({OpKind::add, {5, 6}, 1});
    check_network_of_units(network, 121, variants);
  }
  for (const float shift : {8.0f, -8.0f})  // hardly any zeros, and hardly anything else
    for (const std::size_t width : {64u, 128u, 192u})
      for (const std::size_t outputs : {1u, 3u}) {
        OfUnits network(4, {width, width}, outputs, true);
        network.shift = shift;
        check_network_of_units(network, 100, variants);
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

// Samples and their slopes against the formulas in double, also far out and with NaN.
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
  // e^x and tanh to the last digits: a small sample is its action, and has no digits to lose but those of e^x. Without
  // fused multiplication and addition, large arguments lose some.
  const double most = std::string(kernels.name) == "plain" ? 1e-5 : 5e-7;
  for (std::size_t begin = 0; begin < 1024; begin += panel) {
    const Floats ones(panel, 1.0f), zeros(panel);
    Floats log_stds(panel);
    for (std::size_t c = 0; c < panel; ++c) log_stds[c] = -86.0f + 89.0f * static_cast<float>(begin + c) / 1024.0f;
    kernels.squash({-87.0f, 88.0f}, zeros.data(), log_stds.data(), ones.data(), panel, unit.data(), log_prob.data());
    for (std::size_t c = 0; c < panel; ++c) {
      const double expected = std::tanh(std::exp(static_cast<double>(log_stds[c])));
      CHECK(std::fabs(static_cast<double>(unit[c]) - expected) <= most * expected);
    }
  }
  mean[0] = log_std[1] = std::numeric_limits<float>::quiet_NaN();
  kernels.squash({-20.0f, 2.0f}, mean.data(), log_std.data(), noise.data(), panel, unit.data(), log_prob.data());
  for (std::size_t c = 0; c < 2; ++c) CHECK(std::isnan(unit[c]) && std::isnan(log_prob[c]));
}

// Quantiles of each transition, by the definition in double; exactly as large as needed.
void test_quantile_regression() {
  const std::size_t panel = learner_kernels().panel;
  for (const std::size_t count : {1u, 5u, 25u})
    for (const std::size_t atoms : {1u, 7u, 30u}) {
      const Floats quantiles = random_floats(count * panel, 1, 2.0f);
      Floats targets = random_floats(atoms * panel, 2, 2.0f), slopes(count * panel), losses(panel);
      targets[0] = quantiles[0];
      learner_kernels().quantile_regression(
          {count, atoms, quantiles.data(), targets.data(), losses.data(), slopes.data()});
      for (std::size_t c = 0; c < panel; ++c) {
        double sum = 0.0;
        for (std::size_t i = 0; i < count; ++i) {
          const double tau = (static_cast<double>(i) + 0.5) / static_cast<double>(count);
          double slope = 0.0;
          for (std::size_t j = 0; j < atoms; ++j) {
            const double u =
                static_cast<double>(targets[j * panel + c]) - static_cast<double>(quantiles[i * panel + c]);
            const double weight = std::fabs(tau - (u < 0.0 ? 1.0 : 0.0)) / static_cast<double>(atoms);
            sum += weight * (std::fabs(u) <= 1.0 ? u * u / 2.0 : std::fabs(u) - 0.5);
            slope -= weight * std::clamp(u, -1.0, 1.0);
          }
          CHECK(std::fabs(static_cast<double>(slopes[i * panel + c]) - slope) < 1e-5);
        }
        CHECK(std::fabs(static_cast<double>(losses[c]) - sum) < 1e-4);
      }
    }
}

void test_smallest_numbers() {
  const std::size_t panel = learner_kernels().panel;
  for (const std::size_t count : {1u, 2u, 9u, 125u})
    for (std::size_t kept = 1; kept <= count; kept += count > 9 ? 31 : 1) {
      const Floats before = random_floats(count * panel, static_cast<std::uint32_t>(count));
      Floats numbers = before;
      learner_kernels().keep_smallest(numbers.data(), count, kept);
      for (std::size_t c = 0; c < panel; ++c) {
        Floats found, expected;
        for (std::size_t j = 0; j < count; ++j) expected.push_back(before[j * panel + c]);
        for (std::size_t j = 0; j < kept; ++j) found.push_back(numbers[j * panel + c]);
        std::sort(found.begin(), found.end());
        std::sort(expected.begin(), expected.end());
        CHECK(std::equal(found.begin(), found.end(), expected.begin()));
      }
    }
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
}  // namespace

int main() {
  for (const std::string& name : learner_kernel_variants()) {
    select_learner_kernels(name);
    test_gemm();
    test_turned_gemm();
    test_chain();
    test_narrow_gradients();
    test_layer_gradient();
    test_squash();
    test_quantile_regression();
    test_smallest_numbers();
    test_adam();
  }
  select_matmul_precision("high");
  test_gemm();
  test_chain();
  test_layer_gradient();
  test_networks_of_units();
  select_matmul_precision("highest");
  CHECK(throws<pearl::ConfigurationError>([] { select_learner_kernels("sse9"); }));
  CHECK(throws<pearl::ConfigurationError>([] { select_matmul_precision("low"); }));
}
