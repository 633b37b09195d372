#include "pearl/learner/image_trunk.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "interleave.hpp"
#include "pearl/errors.hpp"

namespace pearl::learner {
namespace {

constexpr std::size_t kLargest = std::size_t{1} << 15;      // of a window's numbers: their products do not overflow
constexpr std::size_t kMostNumbers = std::size_t{1} << 28;  // of one map

bool has_window(OpKind kind) { return kind == OpKind::conv2d || kind == OpKind::max_pool2d; }

// Rows (or columns) of a kernel that meet an input position with this remainder of the division by the stride.
std::size_t taps(std::size_t kernel, std::size_t stride, std::size_t remainder) {
  return remainder < kernel ? (kernel - remainder + stride - 1) / stride : 0;
}

// The same of all smaller remainders.
std::size_t taps_before(std::size_t kernel, std::size_t stride, std::size_t remainder) {
  std::size_t sum = 0;
  for (std::size_t r = 0; r < remainder; ++r) sum += taps(kernel, stride, r);
  return sum;
}

std::ptrdiff_t signed_of(std::size_t value) { return static_cast<std::ptrdiff_t>(value); }

float sign_of(const Op& op, std::size_t input) { return op.kind == OpKind::subtract && input == 1 ? -1.0f : 1.0f; }

// Numbers of the input under a convolution's kernel.
std::size_t depth_of(const Window& w) { return w.channels * w.kernel[0] * w.kernel[1]; }

// The part of a window that lies on the image: rows (or columns) `first` to `end` of the kernel.
struct Span {
  Span(std::size_t start, std::size_t kernel, std::size_t padding, std::size_t size)
      : first(padding > start ? padding - start : 0),
        end(std::max(first, std::min(kernel, size + padding > start ? size + padding - start : 0))),
        begin(start + first - padding) {}

  std::size_t count() const { return end - first; }
  std::size_t first, end, begin;  // begin: where it begins on the image
};

// Where rows (k = 0) or columns (1) of a convolution's result meet those of its input; those outside if `all`.
std::vector<std::vector<Meeting>> meetings_of(const Window& w, int k, std::size_t out, std::size_t in, bool all) {
  std::vector<std::vector<Meeting>> meetings(out);
  for (std::size_t i = 0; i < out; ++i)
    for (std::size_t tap = 0; tap < w.kernel[k]; ++tap) {
      const std::size_t at = i * w.stride[k] + tap;
      const bool inside = at >= w.padding[k] && at - w.padding[k] < in;
      if (inside || all) meetings[i].push_back({inside ? signed_of(at - w.padding[k]) : -1, tap});
    }
  return meetings;
}

// The same of the gradient of its input, whose input is the gradient of the result.
std::vector<std::vector<Meeting>> back_meetings_of(const Window& w, int k, std::size_t out, std::size_t in, bool all) {
  std::vector<std::vector<Meeting>> meetings(in);
  for (std::size_t i = 0; i < in; ++i)
    for (std::size_t tap = (i + w.padding[k]) % w.stride[k]; tap < w.kernel[k]; tap += w.stride[k]) {
      const std::size_t at = i + w.padding[k];
      const bool inside = at >= tap && (at - tap) / w.stride[k] < out;
      if (inside || all) meetings[i].push_back({inside ? signed_of((at - tap) / w.stride[k]) : -1, tap});
    }
  return meetings;
}

PanelConvolution forward_of(const Window& w, const MapShape& in, const MapShape& out) {
  return {in.channels,
          out.channels,
          in.width,
          {w.kernel[0], w.kernel[1]},
          1,
          meetings_of(w, 0, out.height, in.height, false),
          meetings_of(w, 1, out.width, in.width, true)};
}

PanelConvolution backward_of(const Window& w, const MapShape& in, const MapShape& out) {
  return {out.channels,
          in.channels,
          out.width,
          {w.kernel[0], w.kernel[1]},
          w.stride[1],
          back_meetings_of(w, 0, out.height, in.height, false),
          back_meetings_of(w, 1, out.width, in.width, true)};
}

SparseConvolution sparse_forward_of(const Window& w, const MapShape& in, const MapShape& out) {
  return {w.kernel[1] * in.channels,
          w.kernel[0],
          -signed_of(w.padding[1] * in.channels),
          w.stride[1] * in.channels,
          out.width,
          out.channels,
          meetings_of(w, 0, out.height, in.height, false)};
}

// Only of kernels, paddings and inputs whose widths are multiples of the stride.
SparseConvolution sparse_backward_of(const Window& w, const MapShape& in, const MapShape& out) {
  const std::size_t stride = w.stride[1], columns = w.kernel[1] / stride;
  return {columns * out.channels,
          w.kernel[0],
          (signed_of(w.padding[1] / stride + 1) - signed_of(columns)) * signed_of(out.channels),
          out.channels,
          in.width / stride,
          stride * in.channels,
          back_meetings_of(w, 0, out.height, in.height, false)};
}

}  // namespace

ImageWorkspace::ImageWorkspace(const ImageTrunk& trunk, std::size_t panels, bool gradients)
    : keeps_maps_(gradients), loaded_(panels) {
  const std::size_t panel = trunk.kernels_.panel, slots = panels * panel;
  const std::size_t last = ImageTrunk::floats(trunk.shapes_.back());
  input_ = AlignedArray<float>(ImageTrunk::floats(trunk.shapes_.front()));
  mixed_ = AlignedArray<std::uint8_t>(trunk.shapes_.front().numbers() * (trunk.of_bytes_ ? 1 : sizeof(float)));
  if (trunk.amx_ != nullptr) {
    whole_ = AlignedArray<std::uint16_t>(trunk.shapes_.front().numbers());
    parts_ = AlignedArray<std::uint16_t>(trunk.first_.parts());
  }
  if (trunk.frames_) frames_ = FrameConvolution::Workspace(*trunk.frames_, gradients);
  panel_parts_ = AlignedArray<std::uint16_t>(trunk.panel_parts_);
  const std::size_t together = trunk.sparse_ ? kSparseImages : trunk.panels_ != nullptr ? kForwardImages : 1;
  maps_ = AlignedArray<float>(trunk.map_floats_ * (gradients ? slots : together));
  last_maps_ = AlignedArray<float>(last * slots);
  weights_ = AlignedArray<float>(trunk.weights_);
  scratch_ = AlignedArray<float>(2 * trunk.largest_weights_);
  if (!gradients) return;
  back_parts_ = AlignedArray<std::uint16_t>(trunk.back_parts_);
  slopes_ = AlignedArray<float>(trunk.map_floats_ * (trunk.panels_ != nullptr ? panel : together));
  last_slopes_ = AlignedArray<float>(last * panel);
  back_weights_ = AlignedArray<float>(trunk.back_weights_);
  sparse_back_weights_ = AlignedArray<float>(trunk.sparse_back_weights_);
  weight_gradients_ = AlignedArray<float>(trunk.weights_);
}

ImageTrunk::ImageTrunk(const LearnerKernels& kernels, std::size_t input_width, bool of_bytes,
                       const std::vector<Op>& ops, std::size_t parameters)
    : kernels_(kernels), of_bytes_(of_bytes) {
  std::vector<MapShape> shapes(1);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    shapes.push_back(result_of(ops[i], i, shapes));
    const Op& op = ops[i];
    if (op.kind != OpKind::conv2d) continue;
    if (op.weight == kNone) refuse(op, i, "needs weights");
    const std::size_t channels = shapes.back().channels;
    require_parameters(op, i, op.weight, channels * depth_of(op.window), parameters);
    require_parameters(op, i, op.bias, channels, parameters);
    for (std::size_t j = 0; j < i; ++j)
      if (ops[j].weight == op.weight || (op.bias != kNone && ops[j].bias == op.bias))
        refuse(op, i, "must have parameters of its own");
  }
  if (shapes.front().numbers() != input_width)
    throw LearnerError("The first operation on images takes (" + std::to_string(shapes[0].channels) + ", " +
                       std::to_string(shapes[0].height) + ", " + std::to_string(shapes[0].width) +
                       "); the network has " + std::to_string(input_width) + " inputs.");
  plan(ops, shapes);
  if (plans_first()) {
    if (kernels_.of_bytes != nullptr && kernels_.of_bytes->fits(first_)) amx_ = kernels_.of_bytes;
    if (kernels_.of_sparse != nullptr && kernels_.of_sparse->frames.fits(first_))
      frames_.emplace(kernels_.of_sparse->frames, first_, shapes_.front().channels, shapes_.front().positions(),
                      kByteScale);
  }
  use_panels();
  use_sparse();
  // An odd number of cache lines, so that images processed together share few cache sets.
  if (panels_ != nullptr || sparse_) map_floats_ = (map_floats_ / 16 | 1) * 16;
}

// Whether the first step is a convolution of bytes, the only one that takes the input.
bool ImageTrunk::plans_first() {
  const Step& step = steps_.front();
  const Window& w = step.op.window;
  for (const Step& other : steps_)
    for (std::size_t k = 0; k < other.op.input_count(); ++k)
      if (&other != &step && other.in[k] == 0) return false;
  if (!of_bytes_ || step.op.kind != OpKind::conv2d || w.padding[0] != 0 || w.padding[1] != 0) return false;
  const MapShape& out = shapes_[step.out];
  first_ = {w.width * w.channels, w.stride[0] * w.width * w.channels, w.stride[1] * w.channels,
            w.kernel[1] * w.channels, w.kernel[0], out.height, out.width, out.channels, out.row()};
  return true;
}

// The convolutions that can process a panel's images together, and whose kernels are large enough to gain from that.
void ImageTrunk::use_panels() {
  const PanelConvolutionKernels* kernels = kernels_.of_panels;
  if (kernels == nullptr) return;
  for (Step& step : steps_) {
    const MapShape &in = shapes_[step.in[0]], &out = shapes_[step.out];
    const Window& w = step.op.window;
    if (step.op.kind != OpKind::conv2d || step.in[0] == 0 || in.channels % 32 != 0 || out.channels % 32 != 0 ||
        w.kernel[0] * w.kernel[1] < 4)
      continue;
    step.of_panels = true;
    step.forward = forward_of(w, in, out);
    step.backward = backward_of(w, in, out);
    step.panel_parts = panel_parts_;
    panel_parts_ += step.forward.parts();
    step.back_parts = back_parts_;
    back_parts_ += step.backward.parts();
    panels_ = kernels;
  }
  bytes_of_panels_ = panels_ != nullptr && amx_ != nullptr && kernels->fits_bytes(first_);
}

// The convolutions whose inputs, or slopes, have been through a ReLU.
void ImageTrunk::use_sparse() {
  const SparseConvolutionKernels* kernels = kernels_.of_sparse;
  if (kernels == nullptr) return;
  const auto rectified = [&](std::size_t map) {
    return std::any_of(steps_.begin(), steps_.end(), [&](const Step& step) {
      return step.out == map && (step.relu || step.op.kind == OpKind::relu);
    });
  };
  for (Step& step : steps_) {
    if (step.op.kind != OpKind::conv2d) continue;
    const MapShape &in = shapes_[step.in[0]], &out = shapes_[step.out];
    const Window& w = step.op.window;
    const std::size_t stride = w.stride[1];
    const SparseConvolution forward = sparse_forward_of(w, in, out);
    if (rectified(step.in[0]) && kernels->fits(forward)) step.sparse_forward = forward;
    if (step.relu && kernels->fits_gradients(forward)) step.sparse_gradients = forward;
    if (step.in[0] != 0 && step.relu && !step.adds[0] && w.kernel[1] % stride == 0 && w.padding[1] % stride == 0 &&
        in.width % stride == 0) {
      const SparseConvolution backward = sparse_backward_of(w, in, out);
      if (kernels->fits(backward)) {
        step.sparse_backward = backward;
        step.sparse_back_weights = sparse_back_weights_;
        sparse_back_weights_ += backward.runs * backward.run * backward.out;
      }
    }
    sparse_ = sparse_ || step.sparse_forward || step.sparse_gradients || step.sparse_backward;
  }
}

std::size_t ImageTrunk::floats(const MapShape& shape) { return round_up(shape.height * shape.row(), 16); }

// Checks an operation and returns the shape of its result; the first window over the input says what the input is.
MapShape ImageTrunk::result_of(const Op& op, std::size_t index, std::vector<MapShape>& shapes) const {
  for (std::size_t k = 0; k < op.input_count(); ++k)
    if (op.inputs[k] < 0 || op.inputs[k] >= static_cast<std::ptrdiff_t>(shapes.size()))
      refuse(op, index, "must take values computed before it; found value " + std::to_string(op.inputs[k]));
  MapShape& in = shapes[static_cast<std::size_t>(op.inputs[0])];
  if (!has_window(op.kind)) {
    if (op.kind != OpKind::relu && op.kind != OpKind::add && op.kind != OpKind::subtract)
      refuse(op, index, "cannot come before the operation flatten: it does not work on images");
    const MapShape& other = shapes[static_cast<std::size_t>(op.inputs[op.input_count() - 1])];
    if (in.channels == 0 || other.channels == 0) refuse(op, index, "takes the results of convolutions and poolings");
    if (in.channels != other.channels || in.height != other.height || in.width != other.width ||
        op.width != in.numbers())
      refuse(op, index, "joins images of one shape and keeps it; found " + std::to_string(in.numbers()) + ", " +
                            std::to_string(other.numbers()) + " and " + std::to_string(op.width) + " numbers");
    return in;
  }
  const Window& w = op.window;
  for (const std::size_t number : {w.channels, w.height, w.width, w.kernel[0], w.kernel[1], w.stride[0], w.stride[1]})
    if (number < 1 || number > kLargest)
      refuse(op, index, "needs sizes from 1 to " + std::to_string(kLargest) + "; found " + std::to_string(number));
  const MapShape given = {w.channels, w.height, w.width};
  if (in.channels == 0 && given.numbers() <= kMostNumbers) in = given;
  if (in.channels != w.channels || in.height != w.height || in.width != w.width)
    refuse(op, index, "takes " + std::to_string(given.numbers()) + " numbers; its input has " +
                          std::to_string(in.numbers()));
  std::size_t size[2];
  for (int k = 0; k < 2; ++k) {
    const std::size_t padded = (k == 0 ? w.height : w.width) + 2 * w.padding[k];
    if (w.padding[k] > kLargest || padded < w.kernel[k])
      refuse(op, index, "needs a kernel that fits its input and padding; found kernel " + std::to_string(w.kernel[k]) +
                            " and padding " + std::to_string(w.padding[k]));
    if (op.kind == OpKind::max_pool2d && 2 * w.padding[k] > w.kernel[k])
      refuse(op, index, "needs a padding of at most half its kernel; found " + std::to_string(w.padding[k]));
    size[k] = (padded - w.kernel[k]) / w.stride[k] + 1;
  }
  const std::size_t positions = size[0] * size[1];
  if (op.width < 1 || op.width > kMostNumbers || op.width % positions != 0 ||
      (op.kind == OpKind::max_pool2d && op.width != w.channels * positions))
    refuse(op, index, "has " + std::to_string(positions) + " positions for each channel; found " +
                          std::to_string(op.width) + " numbers");
  return {op.width / positions, size[0], size[1]};
}

void ImageTrunk::plan(const std::vector<Op>& ops, const std::vector<MapShape>& shapes) {
  std::vector<std::size_t> users(ops.size() + 1, 0);
  for (const Op& op : ops)
    for (std::size_t k = 0; k < op.input_count(); ++k) ++users[static_cast<std::size_t>(op.inputs[k])];
  for (std::size_t value = 1; value < ops.size(); ++value)
    if (users[value] == 0) refuse(ops[value - 1], value - 1, "has a result that nothing uses");

  // Steps: a convolution absorbs the ReLU that is its only user.
  std::vector<std::size_t> kept = {0}, uses = {users[0]}, maker = {ops.size()};
  shapes_ = {shapes[0]};
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    const std::size_t from = kept[static_cast<std::size_t>(op.inputs[0])];
    if (op.kind == OpKind::relu && uses[from] == 1 && maker[from] < steps_.size()) {
      Step& before = steps_[maker[from]];
      if (before.op.kind == OpKind::conv2d) {
        before.relu = true;
        kept.push_back(from);
        uses[from] = users[i + 1];
        continue;
      }
    }
    Step step{};
    step.op = op;
    step.in[0] = from;
    step.in[1] = op.input_count() == 2 ? kept[static_cast<std::size_t>(op.inputs[1])] : 0;
    step.out = shapes_.size();
    kept.push_back(step.out);
    shapes_.push_back(shapes[i + 1]);
    uses.push_back(users[i + 1]);
    maker.push_back(steps_.size());
    steps_.push_back(step);
  }

  std::vector<bool> written(shapes_.size(), false);
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step)
    for (std::size_t k = 0; k < step->op.input_count(); ++k) {
      step->adds[k] = written[step->in[k]];
      written[step->in[k]] = true;
    }
  for (Step& step : steps_) {
    if (step.op.kind != OpKind::conv2d) continue;
    const std::size_t channels = shapes_[step.out].channels, count = channels * depth_of(step.op.window);
    step.weights = weights_;
    weights_ += round_up(count + channels, 16);  // biases follow, of gradients alone
    largest_weights_ = std::max(largest_weights_, round_up(count, 16));
    if (step.in[0] == 0) continue;
    step.back_weights = back_weights_;
    back_weights_ += round_up(count, 16);
    if (uses[step.in[0]] == 1 && steps_[maker[step.in[0]]].relu)
      step.gates_input = steps_[maker[step.in[0]]].gated = true;
  }
  widen_margins();
  places_.assign(shapes_.size(), 0);
  for (std::size_t map = 1; !is_last(map); ++map) {
    places_[map] = map_floats_;
    map_floats_ += floats(shapes_[map]);
  }
}

// As many zeros as the kernels of convolutions reach beyond a row, and those of their input's gradients. Operations on
// single numbers need maps of one layout.
void ImageTrunk::widen_margins() {
  for (const Step& step : steps_) {
    if (step.op.kind != OpKind::conv2d) continue;
    const Window& w = step.op.window;
    const std::size_t kernel = w.kernel[1], stride = w.stride[1], padding = w.padding[1];
    MapShape &in = shapes_[step.in[0]], &out = shapes_[step.out];
    const std::size_t reach = (out.width - 1) * stride + kernel;
    in.left = std::max(in.left, padding);
    in.right = std::max(in.right, reach > in.width + padding ? reach - in.width - padding : 0);
    if (step.in[0] == 0) continue;
    for (std::size_t x = 0; x < in.width; ++x) {
      const std::size_t at = (x + padding) / stride, run = taps(kernel, stride, (x + padding) % stride);
      out.left = std::max(out.left, run > at + 1 ? run - at - 1 : 0);
      out.right = std::max(out.right, at + 1 > out.width ? at + 1 - out.width : 0);
    }
  }
  for (bool widened = true; widened;) {
    widened = false;
    for (const Step& step : steps_)
      for (std::size_t k = 0; k < step.op.input_count() && !has_window(step.op.kind); ++k) {
        MapShape &in = shapes_[step.in[k]], &out = shapes_[step.out];
        widened = widened || in.left != out.left || in.right != out.right;
        in.left = out.left = std::max(in.left, out.left);
        in.right = out.right = std::max(in.right, out.right);
      }
  }
}

float* ImageTrunk::map(ImageWorkspace& workspace, std::size_t map, std::size_t slot) const {
  if (map == 0) return workspace.input_.data();
  if (is_last(map)) return workspace.last_maps_.data() + slot * floats(shapes_.back());
  return workspace.maps_.data() + (slot - (workspace.keeps_maps_ ? 0 : workspace.first_)) * map_floats_ + places_[map];
}

float* ImageTrunk::slope(ImageWorkspace& workspace, std::size_t map, std::size_t slot) const {
  if (is_last(map)) return workspace.last_slopes_.data() + slot % kernels_.panel * floats(shapes_.back());
  return workspace.slopes_.data() + (slot - workspace.first_) * map_floats_ + places_[map];
}

// A map, or its gradient, of the images from `slot` on.
PanelMaps<float> ImageTrunk::maps_of(ImageWorkspace& workspace, std::size_t map, std::size_t slot, bool slopes) const {
  const MapShape& shape = shapes_[map];
  float* first = slopes ? slope(workspace, map, slot) : this->map(workspace, map, slot);
  return {first + shape.inside(), is_last(map) ? floats(shape) : map_floats_, shape.row()};
}

PanelMaps<const float> ImageTrunk::read_maps_of(ImageWorkspace& workspace, std::size_t map, std::size_t slot,
                                                bool slopes) const {
  const PanelMaps<float> maps = maps_of(workspace, map, slot, slopes);
  return {maps.first, maps.image, maps.row};
}

void ImageTrunk::load(const void* images, std::size_t count, ImageWorkspace& workspace, std::size_t panel) const {
  workspace.loaded_[panel] = {images, count};
}

const void* ImageTrunk::image(const ImageWorkspace& workspace, std::size_t slot) const {
  const std::size_t panel = slot / kernels_.panel, bytes = shapes_.front().numbers() * (of_bytes_ ? 1 : sizeof(float));
  return static_cast<const char*>(workspace.loaded_[panel].rows) + slot % kernels_.panel * bytes;
}

// The input as floats, or with `whole` as AMX reads it, unless it is there.
void ImageTrunk::read_image(const void* image, ImageWorkspace& workspace, bool whole) const {
  if (workspace.read_ == image) return;
  workspace.read_ = image;
  const MapShape& shape = shapes_.front();
  const std::size_t row = shape.width * shape.channels;
  float* to = workspace.input_.data() + shape.inside();
  if (of_bytes_) {
    const std::uint8_t* bytes = workspace.mixed_.data();
    interleave(static_cast<const std::uint8_t*>(image), shape.channels, shape.positions(), workspace.mixed_.data());
    if (whole) return amx_->widen(bytes, shape.numbers(), workspace.whole_.data());
    for (std::size_t y = 0; y < shape.height; ++y)
      kernels_.scale_bytes(bytes + y * row, kByteScale, to + y * shape.row(), row);
  } else {
    auto* numbers = reinterpret_cast<float*>(workspace.mixed_.data());
    interleave(static_cast<const float*>(image), shape.channels, shape.positions(), numbers);
    for (std::size_t y = 0; y < shape.height; ++y) std::copy_n(numbers + y * row, row, to + y * shape.row());
  }
}

// Weights (out, in, row, column) to (row, column, in, out).
void ImageTrunk::pack(const float* parameters, ImageWorkspace& workspace) const {
  for (const Step& step : steps_) {
    if (step.op.kind != OpKind::conv2d) continue;
    const Window& w = step.op.window;
    const std::size_t out = shapes_[step.out].channels, depth = depth_of(w), area = w.kernel[0] * w.kernel[1];
    float *turned = workspace.scratch_.data(), *packed = workspace.weights_.data() + step.weights;
    kernels_.transpose(parameters + step.op.weight, out, depth, depth, turned, out);
    for (std::size_t tap = 0; tap < area; ++tap)
      for (std::size_t c = 0; c < w.channels; ++c)
        std::copy_n(turned + (c * area + tap) * out, out, packed + (tap * w.channels + c) * out);
  }
}

// Packed weights for each pair of remainders: (row, column, out, in), rows and columns backward.
void ImageTrunk::pack_for_inputs(const Step& step, ImageWorkspace& workspace) const {
  const Window& w = step.op.window;
  const std::size_t out = shapes_[step.out].channels, in = w.channels;
  const float* packed = workspace.weights_.data() + step.weights;
  float* to = workspace.back_weights_.data() + step.back_weights;
  for (std::size_t ry = 0; ry < w.stride[0]; ++ry)
    for (std::size_t rx = 0; rx < w.stride[1]; ++rx)
      for (std::size_t t = taps(w.kernel[0], w.stride[0], ry); t-- > 0;)
        for (std::size_t u = taps(w.kernel[1], w.stride[1], rx); u-- > 0; to += out * in) {
          const std::size_t tap = (ry + t * w.stride[0]) * w.kernel[1] + rx + u * w.stride[1];
          kernels_.transpose(packed + tap * in * out, in, out, out, to, in);
        }
}

// Packed weights as (row, column of the result, out, column within a stride, in), columns of the result backward.
void ImageTrunk::pack_sparse_backward(const Step& step, ImageWorkspace& workspace) const {
  const Window& w = step.op.window;
  const std::size_t out = shapes_[step.out].channels, in = w.channels, stride = w.stride[1];
  const float* packed = workspace.weights_.data() + step.weights;
  float* to = workspace.sparse_back_weights_.data() + step.sparse_back_weights;
  for (std::size_t row = 0; row < w.kernel[0]; ++row)
    for (std::size_t t = w.kernel[1] / stride; t-- > 0; to += out * stride * in)
      for (std::size_t k = 0; k < stride; ++k)
        kernels_.transpose(packed + (row * w.kernel[1] + t * stride + k) * in * out, in, out, out, to + k * in,
                           stride * in);
}

void ImageTrunk::forward(const float* parameters, ImageWorkspace& workspace, std::size_t panel,
                         float* features) const {
  const std::size_t size = kernels_.panel, count = workspace.loaded_[panel].count;
  const bool at_once = together(count);
  pack(parameters, workspace);
  if (frames_) frames_->pack(workspace.weights_.data() + steps_.front().weights, workspace.frames_);
  if (amx_ != nullptr) amx_->pack(first_, workspace.weights_.data() + steps_.front().weights, workspace.parts_.data());
  for (const Step& step : steps_)
    if (at_once && step.of_panels)
      panels_->pack(step.forward, workspace.weights_.data() + step.weights,
                    workspace.panel_parts_.data() + step.panel_parts);
  workspace.read_ = nullptr;
  workspace.frames_.forget();
  const std::size_t block = at_once ? even_share(count, sparse_ ? kSparseImages : kForwardImages) : 1;
  for (std::size_t i = 0; i < count; i += block) {
    const std::size_t slot = panel * size + i, images = std::min(block, count - i);
    workspace.first_ = slot;
    for (const Step& step : steps_) {
      const float* bias = step.op.bias == kNone ? nullptr : parameters + step.op.bias;
      if (at_once && step.of_panels)
        forward_together(step, bias, workspace, slot, images);
      else if (!step.sparse_forward || !forward_sparse(step, bias, workspace, slot, images))
        for (std::size_t k = 0; k < images; ++k) forward_step(step, bias, workspace, slot + k);
    }
  }
  const MapShape& last = shapes_.back();
  const std::size_t positions = last.positions(), one = floats(last);
  const float* from = workspace.last_maps_.data() + panel * size * one + last.inside();
  for (std::size_t y = 0; y < last.height; ++y)
    for (std::size_t x = 0; x < last.width; ++x)
      kernels_.transpose(from + y * last.row() + x * last.channels, count, last.channels, one,
                         features + (y * last.width + x) * size, positions * size);
  for (std::size_t f = 0; f < last.numbers(); ++f) std::fill(features + f * size + count, features + (f + 1) * size, 0.0f);
}

// Of one image.
void ImageTrunk::forward_step(const Step& step, const float* bias, ImageWorkspace& workspace, std::size_t slot) const {
  if (frames_ && step.in[0] == 0 && frames_->reads(image(workspace, slot), workspace.frames_))
    return frames_->convolve(bias, step.relu, workspace.frames_, maps_of(workspace, step.out, slot, false).first);
  for (std::size_t k = 0; k < step.op.input_count(); ++k)
    if (step.in[k] == 0) read_image(image(workspace, slot), workspace, amx_ != nullptr);
  const float* x = map(workspace, step.in[0], slot);
  float* y = map(workspace, step.out, slot);
  const std::size_t whole = floats(shapes_[step.out]);
  switch (step.op.kind) {
    case OpKind::conv2d:
      if (amx_ != nullptr && step.in[0] == 0)
        amx_->convolve(first_, workspace.whole_.data(), workspace.parts_.data(), kByteScale, bias, step.relu,
                       y + shapes_[step.out].inside());
      else
        convolve(step, x, workspace.weights_.data() + step.weights, bias, y);
      break;
    case OpKind::max_pool2d:
      pool(step, x, y);
      break;
    case OpKind::relu:
      kernels_.relu(x, y, whole);
      break;
    default:
      std::copy_n(x, whole, y);
      kernels_.scale(map(workspace, step.in[1], slot), sign_of(step.op, 1), y, whole, true);
  }
}

void ImageTrunk::forward_together(const Step& step, const float* bias, ImageWorkspace& workspace, std::size_t slot,
                                  std::size_t images) const {
  const PanelMaps<float> in = maps_of(workspace, step.in[0], slot, false);
  panels_->convolve(step.forward, images, {in.first, in.image, in.row},
                    workspace.panel_parts_.data() + step.panel_parts, bias, step.relu, false, nullptr,
                    maps_of(workspace, step.out, slot, false));
}

bool ImageTrunk::forward_sparse(const Step& step, const float* bias, ImageWorkspace& workspace, std::size_t slot,
                                std::size_t images) const {
  return kernels_.of_sparse->convolve(*step.sparse_forward, images, read_maps_of(workspace, step.in[0], slot, false),
                                      workspace.weights_.data() + step.weights, bias, step.relu, nullptr,
                                      maps_of(workspace, step.out, slot, false));
}

void ImageTrunk::convolve(const Step& step, const float* x, const float* weights, const float* bias, float* y) const {
  const Window& w = step.op.window;
  const MapShape &in = shapes_[step.in[0]], &out = shapes_[step.out];
  const std::size_t run = w.kernel[1] * w.channels;
  Gemm gemm{};
  gemm.a_row = signed_of(w.stride[1] * w.channels);
  gemm.a_step = 1;
  gemm.a_segment = signed_of(in.row());
  gemm.b_step = gemm.c_row = signed_of(out.channels);
  gemm.b_segment = signed_of(run * out.channels);
  gemm.m = out.width;
  gemm.n = out.channels;
  gemm.segment = run;
  gemm.bias = bias;
  gemm.bias_of_columns = true;
  gemm.relu = step.relu;
  for (std::size_t row = 0; row < out.height; ++row) {
    const Span rows(row * w.stride[0], w.kernel[0], w.padding[0], w.height);
    gemm.a = x + rows.begin * in.row() + (in.left - w.padding[1]) * w.channels;
    gemm.b = weights + rows.first * run * out.channels;
    gemm.c = y + row * out.row() + out.inside();
    gemm.depth = rows.count() * run;
    kernels_.gemm(gemm);
  }
}

void ImageTrunk::pool(const Step& step, const float* x, float* y) const {
  const MapShape& out = shapes_[step.out];
  for_windows(step, [&](const PoolWindow& window, std::size_t in_at, std::size_t row, std::size_t column) {
    kernels_.max_pool(window, x + in_at, y + row * out.row() + out.inside() + column * out.channels);
  });
}

void ImageTrunk::pool_backward(const Step& step, const float* x, const float* y, const float* dy, float* dx) const {
  const MapShape& out = shapes_[step.out];
  if (!step.adds[0]) std::fill_n(dx, floats(shapes_[step.in[0]]), 0.0f);
  for_windows(step, [&](const PoolWindow& window, std::size_t in_at, std::size_t row, std::size_t column) {
    const std::size_t at = row * out.row() + out.inside() + column * out.channels;
    kernels_.max_pool_backward(window, x + in_at, y + at, dy + at, dx + in_at);
  });
}

// Calls visit(window, where it begins in the input, row and column of the result) for each position of a pooling.
template <class Visit>
void ImageTrunk::for_windows(const Step& step, const Visit& visit) const {
  const Window& w = step.op.window;
  const MapShape &in = shapes_[step.in[0]], &out = shapes_[step.out];
  for (std::size_t row = 0; row < out.height; ++row) {
    const Span rows(row * w.stride[0], w.kernel[0], w.padding[0], w.height);
    for (std::size_t column = 0; column < out.width; ++column) {
      const Span columns(column * w.stride[1], w.kernel[1], w.padding[1], w.width);
      visit(PoolWindow{rows.count(), columns.count(), in.row(), in.channels},
            rows.begin * in.row() + in.inside() + columns.begin * in.channels, row, column);
    }
  }
}

void ImageTrunk::begin_backward(const float* parameters, ImageWorkspace& workspace, std::size_t panels) const {
  pack(parameters, workspace);
  bool any_alone = false, any_together = false;
  for (std::size_t p = 0; p < panels; ++p) (together(workspace.loaded_[p].count) ? any_together : any_alone) = true;
  for (const Step& step : steps_) {
    if (step.op.kind != OpKind::conv2d || step.in[0] == 0) continue;
    if (any_alone || !step.of_panels) pack_for_inputs(step, workspace);
    if (step.sparse_backward) pack_sparse_backward(step, workspace);
    if (!any_together || !step.of_panels) continue;
    const std::size_t taps = step.backward.kernel[0] * step.backward.kernel[1];
    const std::size_t out = step.backward.in, in = step.backward.out;
    const float* packed = workspace.weights_.data() + step.weights;
    for (std::size_t tap = 0; tap < taps; ++tap)
      kernels_.transpose(packed + tap * in * out, in, out, out, workspace.scratch_.data() + tap * in * out, in);
    panels_->pack(step.backward, workspace.scratch_.data(), workspace.back_parts_.data() + step.back_parts);
  }
  std::fill_n(workspace.weight_gradients_.data(), weights_, 0.0f);
  if (frames_) frames_->begin_gradients(workspace.frames_);
}

void ImageTrunk::backward_panel(ImageWorkspace& workspace, std::size_t panel, const float* slopes) const {
  const MapShape& last = shapes_.back();
  const std::size_t size = kernels_.panel, count = workspace.loaded_[panel].count, positions = last.positions();
  for (std::size_t y = 0; y < last.height; ++y)
    for (std::size_t x = 0; x < last.width; ++x)
      kernels_.transpose(slopes + (y * last.width + x) * size, last.channels, count, positions * size,
                         workspace.last_slopes_.data() + y * last.row() + last.inside() + x * last.channels,
                         floats(last));
  const bool at_once = together(count);
  const std::size_t block = sparse_ ? even_share(count, kSparseImages) : at_once ? count : 1;
  workspace.read_ = nullptr;
  workspace.frames_.forget();
  for (std::size_t i = 0; i < count; i += block) {
    const std::size_t images = std::min(block, count - i);
    workspace.first_ = panel * size + i;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      const bool of_bytes = bytes_of_panels_ && step->in[0] == 0;
      if (at_once && (step->of_panels || of_bytes))
        backward_together(*step, workspace, workspace.first_, images);
      else if (step->sparse_gradients || step->sparse_backward)
        backward_sparse(*step, workspace, workspace.first_, images);
      else
        for (std::size_t k = 0; k < images; ++k) backward_step(*step, workspace, workspace.first_ + k);
    }
  }
}

// A convolution's slopes of one image, behind its ReLU, and the gradients of its bias.
void ImageTrunk::begin_backward_step(const Step& step, ImageWorkspace& workspace, std::size_t slot) const {
  float* dy = slope(workspace, step.out, slot);
  if (step.relu && !step.gated)
    kernels_.relu_backward(dy, map(workspace, step.out, slot), dy, floats(shapes_[step.out]), false);
  add_bias_gradients(step, dy, workspace.weight_gradients_.data() + step.weights);
}

// Of one image.
void ImageTrunk::backward_step(const Step& step, ImageWorkspace& workspace, std::size_t slot) const {
  const Op& op = step.op;
  const std::size_t whole = floats(shapes_[step.out]);
  const float *x = map(workspace, step.in[0], slot), *y = map(workspace, step.out, slot);
  float* dy = slope(workspace, step.out, slot);
  if (op.kind == OpKind::conv2d) {
    begin_backward_step(step, workspace, slot);
    if (step.in[0] == 0)
      add_first_gradients(step, workspace, slot, dy);
    else
      add_weight_gradients(step, x, dy, workspace.weight_gradients_.data() + step.weights);
  }
  for (std::size_t k = 0; k < op.input_count(); ++k) {
    if (step.in[k] == 0) continue;
    float* dx = slope(workspace, step.in[k], slot);
    switch (op.kind) {
      case OpKind::conv2d:
        input_gradients(step, dy, workspace.back_weights_.data() + step.back_weights, step.gates_input ? x : nullptr,
                        dx);
        break;
      case OpKind::max_pool2d:
        pool_backward(step, x, y, dy, dx);
        break;
      case OpKind::relu:
        kernels_.relu_backward(dy, y, dx, whole, step.adds[0]);
        break;
      default:
        kernels_.scale(dy, sign_of(op, k), dx, whole, step.adds[k]);
    }
  }
}

void ImageTrunk::backward_together(const Step& step, ImageWorkspace& workspace, std::size_t slot,
                                   std::size_t images) const {
  float* gradients = workspace.weight_gradients_.data() + step.weights;
  for (std::size_t k = 0; k < images; ++k) begin_backward_step(step, workspace, slot + k);
  const PanelMaps<const float> slopes = read_maps_of(workspace, step.out, slot, true);
  if (!step.of_panels) {
    const Window& w = step.op.window;
    return panels_->add_byte_gradients(first_, images, static_cast<const std::uint8_t*>(image(workspace, slot)),
                                       w.channels, w.height, w.width, kByteScale, slopes, gradients);
  }
  const PanelMaps<float> in = maps_of(workspace, step.in[0], slot, false);
  panels_->add_gradients(step.forward, images, {in.first, in.image, in.row}, slopes, gradients);
  panels_->convolve(step.backward, images, slopes, workspace.back_parts_.data() + step.back_parts, nullptr, false,
                    step.adds[0], step.gates_input ? in.first : nullptr, maps_of(workspace, step.in[0], slot, true));
}

// A convolution with a ReLU.
void ImageTrunk::backward_sparse(const Step& step, ImageWorkspace& workspace, std::size_t slot,
                                 std::size_t images) const {
  const bool of_input = step.in[0] == 0;
  float* gradients = workspace.weight_gradients_.data() + step.weights;
  const auto slopes = [&](std::size_t k) { return read_maps_of(workspace, step.out, slot + k, true); };
  const auto input = [&](std::size_t k) { return read_maps_of(workspace, step.in[0], slot + k, false); };
  for (std::size_t k = 0; k < images; ++k) {
    const float* dy = slope(workspace, step.out, slot + k);
    begin_backward_step(step, workspace, slot + k);
    if (of_input)
      add_first_gradients(step, workspace, slot + k, dy);
    else if (!step.sparse_gradients)
      add_weight_gradients(step, map(workspace, step.in[0], slot + k), dy, gradients);
  }
  if (of_input) return;
  if (step.sparse_gradients)
    kernels_.of_sparse->add_gradients(*step.sparse_gradients, images, input(0), slopes(0), gradients);
  if (step.sparse_backward &&
      kernels_.of_sparse->convolve(
          *step.sparse_backward, images, slopes(0), workspace.sparse_back_weights_.data() + step.sparse_back_weights,
          nullptr, false, step.gates_input ? input(0).first : nullptr, maps_of(workspace, step.in[0], slot, true)))
    return;
  for (std::size_t k = 0; k < images; ++k)
    input_gradients(step, slope(workspace, step.out, slot + k), workspace.back_weights_.data() + step.back_weights,
                    step.gates_input ? map(workspace, step.in[0], slot + k) : nullptr,
                    slope(workspace, step.in[0], slot + k));
}

// Of a convolution of the image.
void ImageTrunk::add_first_gradients(const Step& step, ImageWorkspace& workspace, std::size_t slot,
                                     const float* dy) const {
  const void* from = image(workspace, slot);
  float* gradients = workspace.weight_gradients_.data() + step.weights;
  if (frames_ && frames_->reads(from, workspace.frames_))
    return frames_->add_gradients(dy + shapes_[step.out].inside(), workspace.frames_);
  read_image(from, workspace, false);
  if (step.sparse_gradients)
    kernels_.of_sparse->add_gradients(*step.sparse_gradients, 1, read_maps_of(workspace, 0, slot, false),
                                      read_maps_of(workspace, step.out, slot, true), gradients);
  else
    add_weight_gradients(step, workspace.input_.data(), dy, gradients);
}

// Adds to gradients (row, column, in, out).
void ImageTrunk::add_weight_gradients(const Step& step, const float* x, const float* dy, float* gradients) const {
  const Window& w = step.op.window;
  const MapShape &in = shapes_[step.in[0]], &out = shapes_[step.out];
  const std::size_t run = w.kernel[1] * w.channels;
  Gemm gemm{};
  gemm.a_row = 1;
  gemm.a_step = signed_of(w.stride[1] * w.channels);
  gemm.a_segment = signed_of(w.stride[0] * in.row());
  gemm.b_step = gemm.c_row = signed_of(out.channels);
  gemm.b_segment = signed_of(out.row());
  gemm.m = run;
  gemm.n = out.channels;
  gemm.segment = out.width;
  gemm.accumulate = true;
  for (std::size_t k = 0; k < w.kernel[0]; ++k) {
    // Rows of the result whose kernel's row k lies on the image.
    const std::size_t first = w.padding[0] > k ? (w.padding[0] - k + w.stride[0] - 1) / w.stride[0] : 0;
    const std::size_t below = w.height + w.padding[0];
    const std::size_t end = below > k ? std::min(out.height, (below - k - 1) / w.stride[0] + 1) : 0;
    if (end <= first) continue;
    gemm.a = x + (first * w.stride[0] + k - w.padding[0]) * in.row() + (in.left - w.padding[1]) * w.channels;
    gemm.b = dy + first * out.row() + out.inside();
    gemm.c = gradients + k * run * out.channels;
    gemm.depth = (end - first) * out.width;
    kernels_.gemm(gemm);
  }
}

// Adds to gradients (out,) of the bias, behind those of the weights.
void ImageTrunk::add_bias_gradients(const Step& step, const float* dy, float* gradients) const {
  if (step.op.bias == kNone) return;
  const MapShape& out = shapes_[step.out];
  const float one = 1.0f;
  Gemm gemm{};
  gemm.a = &one;
  gemm.a_row = 1;
  gemm.b = dy + out.inside();
  gemm.b_step = gemm.c_row = signed_of(out.channels);
  gemm.b_segment = signed_of(out.row());
  gemm.c = gradients + depth_of(step.op.window) * out.channels;
  gemm.m = 1;
  gemm.n = out.channels;
  gemm.depth = out.positions();
  gemm.segment = out.width;
  gemm.accumulate = true;
  kernels_.gemm(gemm);
}

void ImageTrunk::input_gradients(const Step& step, const float* dy, const float* weights, const float* gate,
                                 float* dx) const {
  const Window& w = step.op.window;
  const MapShape &in = shapes_[step.in[0]], &out = shapes_[step.out];
  const std::size_t block = out.channels * w.channels;
  Gemm gemm{};
  gemm.a_row = signed_of(out.channels);
  gemm.a_step = 1;
  gemm.a_segment = signed_of(out.row());
  gemm.b_step = signed_of(w.channels);
  gemm.c_row = signed_of(w.stride[1] * w.channels);
  gemm.n = w.channels;
  gemm.accumulate = step.adds[0];
  for (std::size_t y = 0; y < in.height; ++y) {
    // Rows of the result that this row takes part in: those of kernel rows `ry`, `ry` + stride, ... upward from `at`.
    const std::size_t ry = (y + w.padding[0]) % w.stride[0], at = (y + w.padding[0]) / w.stride[0];
    const std::size_t tall = taps(w.kernel[0], w.stride[0], ry), first = at + 1 > tall ? at + 1 - tall : 0;
    const std::size_t end = std::min(out.height, at + 1), rows = end > first ? end - first : 0;
    for (std::size_t x = 0; x < std::min(w.stride[1], in.width); ++x) {
      const std::size_t rx = (x + w.padding[1]) % w.stride[1], column = (x + w.padding[1]) / w.stride[1];
      const std::size_t wide = taps(w.kernel[1], w.stride[1], rx);
      const float* own = weights + block * (w.kernel[1] * taps_before(w.kernel[0], w.stride[0], ry) +
                                            tall * taps_before(w.kernel[1], w.stride[1], rx));
      gemm.m = (in.width - x + w.stride[1] - 1) / w.stride[1];
      gemm.segment = wide * out.channels;
      gemm.depth = rows * gemm.segment;
      gemm.a = gemm.depth == 0 ? dy : dy + first * out.row() + (out.left + column + 1 - wide) * out.channels;
      gemm.b = gemm.depth == 0 ? own : own + (tall - 1 - (at - first)) * wide * block;
      gemm.b_segment = signed_of(wide * block);
      const std::size_t to = y * in.row() + in.inside() + x * w.channels;
      gemm.c = dx + to;
      gemm.gate = gate == nullptr ? nullptr : gate + to;
      kernels_.gemm(gemm);
    }
  }
}

void ImageTrunk::end_backward(float* gradients, ImageWorkspace& workspace, bool accumulate) const {
  const auto give = [&](const float* from, std::size_t count, float* to) {
    if (accumulate)
      kernels_.add(from, to, count);
    else
      std::copy_n(from, count, to);
  };
  if (frames_) frames_->end_gradients(workspace.frames_, workspace.weight_gradients_.data() + steps_.front().weights);
  for (const Step& step : steps_) {
    if (step.op.kind != OpKind::conv2d) continue;
    const Window& w = step.op.window;
    const std::size_t out = shapes_[step.out].channels, depth = depth_of(w), area = w.kernel[0] * w.kernel[1];
    const float* packed = workspace.weight_gradients_.data() + step.weights;
    float *ordered = workspace.scratch_.data(), *turned = ordered + largest_weights_;
    for (std::size_t tap = 0; tap < area; ++tap)
      for (std::size_t c = 0; c < w.channels; ++c)
        std::copy_n(packed + (tap * w.channels + c) * out, out, ordered + (c * area + tap) * out);
    kernels_.transpose(ordered, depth, out, out, turned, depth);
    give(turned, depth * out, gradients + step.op.weight);
    if (step.op.bias != kNone) give(packed + depth * out, out, gradients + step.op.bias);
  }
}

}  // namespace pearl::learner
