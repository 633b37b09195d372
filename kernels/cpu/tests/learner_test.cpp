// The native learner without Python: gradients against finite differences of the same network in double, every variant
// of the kernels, teams of threads, and steps that must change nothing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "floats.hpp"
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

  Training(std::size_t threads, std::size_t batch, std::size_t quantiles = 0)
      : learner(network, online.data(), target.data(), threads, quantiles),
        rows(batch),
        obs(random_floats(rows * Example::kInputs, 12)),
        next_obs(random_floats(rows * Example::kInputs, 13)),
        rewards(random_floats(rows, 14)),
        discounts(rows, 0.9f),
        weights(rows, 0.5f),
        priorities(rows),
        actions(rows) {
    for (std::size_t i = 0; i < rows; ++i) actions[i] = static_cast<std::int64_t>(i % learner.actions());
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

// Of values, and of three quantiles of one action.
void test_training(std::size_t quantiles) {
  for (const std::size_t rows : {1u, 20u, 300u}) {
    Training alone(1, rows, quantiles), again(1, rows, quantiles);
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
      Training together(threads, rows, quantiles), twin(threads, rows, quantiles);
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

// TD3-like (a target actor, two critics), SAC-like (a stochastic actor), DroQ-like (an ensemble with dropout) or TQC-like
// (an ensemble of quantiles), of odd sizes.
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

  ActorCriticTraining(bool is_stochastic, std::size_t threads, std::size_t batch, bool is_ensemble = false,
                      std::size_t quantiles = 1)
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
    for (std::vector<Op>& ops : critic_ops)
      layers(ops, critic_size, kObs + kActions, quantiles, ensemble && quantiles == 1);
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
    settings.target_critics = quantiles > 1 ? 2 : ensemble ? 1 : 0;
    settings.dropped_quantiles = quantiles / 3;
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
  for (const int kind : {0, 1, 2, 3})
    for (const std::size_t rows : {1u, 37u, 300u}) {
      const bool stochastic = kind > 0, ensemble = kind >= 2;
      const std::size_t quantiles = kind == 3 ? 7 : 1;
      ActorCriticTraining alone(stochastic, 1, rows, ensemble, quantiles),
          team(stochastic, 3, rows, ensemble, quantiles), twin(stochastic, 3, rows, ensemble, quantiles);
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
    test_gradients();
    test_gradients_of_images();
    test_bytes_in_amx();
    test_images_together_in_amx();
    test_sparse_images(name);
    test_images_are_refused_where_they_are_unknown();
    for (const std::size_t quantiles : {0u, 3u}) test_training(quantiles);
    CHECK(throws<pearl::LearnerError>([] { Training(1, 4, 2); }));
    test_masks();
    test_refused_steps_change_nothing();
    test_actor_critics();
    test_known_priorities();
    test_actor_critic_algorithm();
  }
  test_team();
  test_ill_formed_networks_are_refused();
}
