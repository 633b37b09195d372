#include "pearl/learner/network.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl::learner {
namespace {

constexpr std::size_t kMostMapFloats = std::size_t{1} << 23;  // 32 MiB of feature maps at once
constexpr std::size_t kWidest = std::size_t{1} << 31;  // a product of two widths does not overflow

}  // namespace

void load_panel(const LearnerKernels& kernels, const float* rows, std::size_t width, std::size_t count, float* panel) {
  if (width == 1)
    std::copy_n(rows, count, panel);
  else
    kernels.transpose(rows, count, width, width, panel, kernels.panel);
  if (count < kernels.panel)
    for (std::size_t f = 0; f < width; ++f)
      std::fill(panel + f * kernels.panel + count, panel + (f + 1) * kernels.panel, 0.0f);
}

Workspace::Workspace(const Network& network, std::size_t panels, bool gradients, const Workspace* lender)
    : panels_(panels), offsets_{0} {
  const std::size_t panel = network.kernels_.panel;
  for (const std::size_t width : network.widths_) offsets_.push_back(offsets_.back() + width * panel);
  if (network.trunk_) images_.emplace(*network.trunk_, panels, gradients);
  // One array, so that a large one is one of huge pages, whose parts lie apart in the caches.
  std::vector<std::pair<float**, std::size_t>> parts;
  const auto add = [&](float*& part, std::size_t floats) {
    parts.emplace_back(&part, floats_);
    floats_ += round_up(floats, kCacheLine / sizeof(float));
  };
  add(values_, offsets_.back() * panels);
  add(gradients_, gradients ? offsets_.back() * panels : 0);
  add(rows_, gradients ? turned_floats(network.widest_input_, panel * panels) : 0);
  const std::size_t lendable = floats_;  // what other operations hold is not lent
  add(statistics_, 2 * panel * network.statistics_ * panels);
  cleared_ = floats_;
  add(masks_, network.mask_width_ * panel * panels);
  add(converted_, network.of_bytes_ && !network.trunk_ ? panel * network.input_width_ : 0);
  if (lender != nullptr && floats_ == lendable && lender->lends_to(*this)) {
    values_ = lender->values_;
    gradients_ = lender->gradients_;
    rows_ = lender->rows_;
    cleared_ = lender->cleared_;
  } else {
    own_ = AlignedArray<float>(floats_);
    for (const auto& [part, offset] : parts) *part = own_.data() + offset;
  }
  if (gradients) signs_.resize(2 * panels * network.signs());
}

bool Workspace::lends_to(const Workspace& other) const {
  return other.panels_ == panels_ && other.floats_ <= floats_ && other.offsets_.size() == offsets_.size() &&
         std::equal(offsets_.begin(), offsets_.end() - 1, other.offsets_.begin()) &&
         other.offsets_.back() <= offsets_.back();
}

void Workspace::clear() { std::memset(values_, 0, cleared_ * sizeof(float)); }

Network::Network(std::size_t input_width, const std::vector<Op>& ops, std::size_t parameters, bool of_bytes)
    : kernels_(learner_kernels()), input_width_(input_width), parameters_(parameters), of_bytes_(of_bytes) {
  if (input_width < 1 || input_width > kWidest || ops.empty())
    throw LearnerError("A network needs 1 to " + std::to_string(kWidest) + " inputs and at least one operation; found " +
                       std::to_string(input_width) + " inputs and " + std::to_string(ops.size()) + " operations.");
  const std::vector<Op> on_panels = split(ops);
  const std::size_t width = trunk_ ? trunk_->features() : input_width;
  std::vector<std::size_t> widths = {width};
  for (std::size_t i = 0; i < on_panels.size(); ++i) {
    check(on_panels[i], first_ + i, widths);
    widths.push_back(on_panels[i].width);
  }
  widths_ = {width};
  plan(on_panels);
}

// Makes the trunk of the operations before a flatten, and returns those behind it, whose value 0 is its result.
std::vector<Op> Network::split(const std::vector<Op>& ops) {
  const auto flatten = std::find_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::flatten; });
  if (flatten == ops.end()) return ops;
  first_ = static_cast<std::size_t>(flatten - ops.begin()) + 1;
  trunk_.emplace(kernels_, input_width_, of_bytes_, std::vector<Op>(ops.begin(), flatten), parameters_);
  const auto last = static_cast<std::ptrdiff_t>(first_) - 1;
  if (last == 0 || flatten->inputs[0] != last || flatten->width != trunk_->features())
    refuse(*flatten, first_ - 1, "must follow the operation on images whose numbers it takes");
  std::vector<Op> rest(flatten + 1, ops.end());
  if (rest.empty()) refuse(*flatten, first_ - 1, "must be followed by another operation");
  for (std::size_t i = 0; i < rest.size(); ++i)
    for (std::size_t k = 0; k < rest[i].input_count(); ++k) {
      if (rest[i].inputs[k] <= last) refuse(rest[i], first_ + i, "takes an image that is not flattened");
      rest[i].inputs[k] -= last + 1;
    }
  return rest;
}

void Network::require_vectors(const char* whose) const {
  if (!takes_vectors())
    throw LearnerError(std::string(whose) + " must take vectors of floating point, not images or bytes.");
}

std::size_t Network::group_panels() const {
  const std::size_t most = kGroup / kernels_.panel;
  if (!trunk_) return most;
  return std::clamp<std::size_t>(kMostMapFloats / (trunk_->sample_floats() * kernels_.panel), 1, most);
}

void Network::check(const Op& op, std::size_t index, const std::vector<std::size_t>& widths) const {
  const auto fail = [&](const std::string& what) { refuse(op, index, what); };
  if (op.kind == OpKind::conv2d || op.kind == OpKind::max_pool2d || op.kind == OpKind::flatten)
    fail("must come before the one operation flatten, by which images become vectors");
  const bool binary = op.input_count() == 2;
  for (int k = 0; k < (binary ? 2 : 1); ++k)
    if (op.inputs[k] < 0 || op.inputs[k] >= static_cast<std::ptrdiff_t>(widths.size()))
      fail("must take values computed before it; found value " + std::to_string(op.inputs[k]));
  const std::size_t in = widths[static_cast<std::size_t>(op.inputs[0])];
  const auto fits = [&](std::ptrdiff_t offset, std::size_t count) {
    require_parameters(op, index, offset, count, parameters_);
  };
  if (op.width < 1) fail("must have at least one output");
  if (op.width > kWidest) fail("has at most " + std::to_string(kWidest) + " outputs; found " + std::to_string(op.width));
  if (op.kind == OpKind::linear) {
    if (op.weight == kNone) fail("needs weights");
    fits(op.weight, op.width * in);
    fits(op.bias, op.width);
  } else if (op.kind == OpKind::mean) {
    if (op.width != 1) fail("has one output; found " + std::to_string(op.width));
  } else if (binary) {
    const std::size_t other = widths[static_cast<std::size_t>(op.inputs[1])];
    if (op.width != std::max(in, other) || (in != other && in != 1 && other != 1))
      fail("joins values of equal width, or of width 1; found " + std::to_string(in) + " and " +
           std::to_string(other));
  } else if (op.width != in) {
    fail("keeps the width; found " + std::to_string(in) + " and " + std::to_string(op.width));
  }
  if (op.kind == OpKind::layer_norm) {
    fits(op.weight, op.width);
    fits(op.bias, op.width);
    if (!(op.eps > 0.0f)) fail("needs eps above 0; found " + std::to_string(op.eps));
  }
  if (op.kind == OpKind::dropout && !(op.eps >= 0.0f && op.eps < 1.0f))
    fail("drops a share from 0 to below 1; found " + std::to_string(op.eps));
}

void Network::plan(const std::vector<Op>& ops) {
  std::vector<std::vector<std::size_t>> users(ops.size() + 1);
  for (std::size_t i = 0; i < ops.size(); ++i)
    for (std::size_t k = 0; k < ops[i].input_count(); ++k) users[static_cast<std::size_t>(ops[i].inputs[k])].push_back(i);
  for (std::size_t value = 1; value < ops.size(); ++value)
    if (users[value].empty())
      throw LearnerError("Operation " + std::to_string(value - 1) + " has a result that nothing uses.");

  // Steps: a linear operation absorbs the activation that is its only user.
  std::vector<std::size_t> kept(ops.size() + 1, 0);  // of each value: the stored value
  std::vector<std::size_t> uses = {users[0].size()};
  std::vector<std::size_t> maker = {ops.size()};  // of each stored value: the step that makes it
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    const std::size_t from = kept[static_cast<std::size_t>(op.inputs[0])];
    const bool activates = op.kind == OpKind::relu || op.kind == OpKind::tanh;
    if (activates && uses[from] == 1 && maker[from] < steps_.size()) {
      Step& before = steps_[maker[from]];
      if (before.op.kind == OpKind::linear && before.activation == Activation::none) {
        before.activation = op.kind == OpKind::relu ? Activation::relu : Activation::tanh;
        kept[i + 1] = from;
        uses[from] = users[i + 1].size();
        continue;
      }
    }
    Step step{};
    step.op = op;
    step.in[0] = from;
    step.in[1] = op.input_count() == 2 ? kept[static_cast<std::size_t>(op.inputs[1])] : 0;
    step.out = widths_.size();
    if (op.kind == OpKind::layer_norm) step.statistics = statistics_++;
    if (op.kind == OpKind::dropout) {
      step.layer = dropouts_++;
      step.mask = mask_width_;
      mask_width_ += op.width;
    }
    if (op.kind == OpKind::linear) widest_input_ = std::max(widest_input_, widths_[from]);
    kept[i + 1] = step.out;
    widths_.push_back(op.width);
    uses.push_back(users[i + 1].size());
    maker.push_back(steps_.size());
    steps_.push_back(step);
  }

  // Backward runs from the last step: decides which step writes a gradient first and which ones add.
  std::vector<bool> written(widths_.size(), false);
  std::vector<const Op*> seen;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    for (std::size_t k = 0; k < step->op.input_count(); ++k) {
      step->adds[k] = written[step->in[k]];
      written[step->in[k]] = true;
    }
    for (const Op* other : seen) {
      const bool weight = step->op.weight != kNone && step->op.weight == other->weight;
      const bool bias = step->op.bias != kNone && step->op.bias == other->bias;
      if (!weight && !bias) continue;
      if (step->op.weight != other->weight || step->op.bias != other->bias)
        throw LearnerError("Operations must share all of their parameters or none.");
      step->adds_weights = true;
    }
    seen.push_back(&step->op);
  }
  for (Step& step : steps_) {
    if (step.op.kind != OpKind::linear || step.in[0] == 0 || uses[step.in[0]] != 1) continue;
    Step& before = steps_[maker[step.in[0]]];
    if (before.activation == Activation::relu) step.gates_input = before.gated = true;
    step.follows = step.gates_input && before.op.kind == OpKind::linear && &before + 1 == &step;
  }
}

bool Network::shares_parameters(const Network& other) const {
  for (const Step& mine : steps_)
    for (const Step& theirs : other.steps_)
      if ((mine.op.weight != kNone && mine.op.weight == theirs.op.weight) ||
          (mine.op.bias != kNone && mine.op.bias == theirs.op.bias))
        return true;
  return false;
}

void Network::load(const void* rows, std::size_t count, Workspace& workspace, std::size_t panel) const {
  if (trunk_) return trunk_->load(rows, count, *workspace.images_, panel);
  const auto* floats = static_cast<const float*>(rows);
  if (of_bytes_) {
    kernels_.scale_bytes(static_cast<const std::uint8_t*>(rows), kByteScale, workspace.converted_,
                         count * input_width_);
    floats = workspace.converted_;
  }
  load_panel(kernels_, floats, input_width_, count, workspace.value(0, panel));
}

void Network::forward(const float* parameters, Workspace& workspace, std::size_t panels, std::size_t count,
                      std::size_t last_columns, bool judges) const {
  workspace.has_first_signs_ = workspace.has_second_signs_ = workspace.lacks_second_ = workspace.of_single_output_ =
      false;
  for (std::size_t p = 0; p < panels && trunk_; ++p)
    trunk_->forward(parameters, *workspace.images_, p, workspace.value(0, p));
  for (std::size_t i = 0; i < steps_.size();) {
    if (steps_[i].op.kind == OpKind::linear) {
      i += multiply(i, parameters, workspace, panels, count, last_columns, judges);
      continue;
    }
    for (std::size_t p = 0; p < panels; ++p)
      compute(steps_[i], parameters, workspace, p, columns_of(p, panels, last_columns));
    ++i;
  }
}

std::size_t Network::multiply(std::size_t at, const float* parameters, Workspace& workspace, std::size_t panels,
                              std::size_t count, std::size_t last_columns, bool judges) const {
  const auto follows = [&](std::size_t i) { return i < steps_.size() && steps_[i].follows; };
  const auto of = [&](std::size_t i) { return product(steps_[i], parameters, workspace, panels, last_columns); };
  std::size_t last = at;
  if (!follows(at + 1)) {
    kernels_.gemm(of(at));
  } else {
    Chain chain{};
    bool single = false;
    if (widths_[steps_[at].in[0]] <= Chain::kMostTerms) chain.first = of(last++);
    chain.second = of(last);
    if (follows(last + 1) && steps_[last + 1].op.width <= Chain::kMostRows &&
        steps_[last + 1].activation != Activation::relu)
      chain.third = of(++last);
    chain.transitions = count;
    chain.keeps_first = chain.keeps_second = !workspace.signs_.empty();
    if (chain.keeps_first && at == 0 && last + 1 == steps_.size() && chain.first.m > 0 && chain.third.m > 0) {
      single = !judges && is_of_single_output(count);
      chain.keeps_first = !judges && !makes_input(1, count);
      chain.keeps_second = !judges && !single;
      if (!chain.keeps_first || single || kernels_.sparse) chain.first_signs = workspace.signs_.data();
      if (!chain.keeps_second || kernels_.sparse) chain.second_signs = workspace.signs_.data() + widths_[1];
    }
    const bool signs = kernels_.chain(chain);
    workspace.has_first_signs_ = signs && chain.first_signs != nullptr;
    workspace.has_second_signs_ = signs && chain.second_signs != nullptr;
    workspace.lacks_second_ = signs && !chain.keeps_second;
    workspace.of_single_output_ = signs && single;
  }
  const Step& step = steps_[last];
  for (std::size_t p = 0; p < panels && step.activation == Activation::tanh; ++p) {
    float* y = workspace.value(step.out, p);
    tanh_of(y, y, step.op.width, columns_of(p, panels, last_columns));
  }
  return last + 1 - at;
}

Gemm Network::product(const Step& step, const float* parameters, Workspace& workspace, std::size_t panels,
                      std::size_t last_columns) const {
  const Op& op = step.op;
  const std::size_t in = widths_[step.in[0]], size = kernels_.panel;
  Gemm gemm{};
  gemm.a = parameters + op.weight;
  gemm.a_row = static_cast<std::ptrdiff_t>(in);
  gemm.a_step = 1;
  gemm.b = workspace.value(step.in[0], 0);
  gemm.b_step = gemm.c_row = static_cast<std::ptrdiff_t>(size);
  gemm.c = workspace.value(step.out, 0);
  gemm.m = op.width;
  gemm.depth = gemm.segment = in;
  gemm.bias = op.bias == kNone ? nullptr : parameters + op.bias;
  gemm.relu = step.activation == Activation::relu;
  set_panels(gemm, step.in[0], step.out, panels, last_columns);
  return gemm;
}

// The panels of values `from` and `to` as those of a product's b and c.
void Network::set_panels(Gemm& gemm, std::size_t from, std::size_t to, std::size_t panels,
                         std::size_t last_columns) const {
  gemm.n = panels == 1 ? last_columns : kernels_.panel;
  gemm.panels = panels;
  gemm.b_panel = static_cast<std::ptrdiff_t>(widths_[from] * kernels_.panel);
  gemm.c_panel = static_cast<std::ptrdiff_t>(widths_[to] * kernels_.panel);
  gemm.last_n = last_columns;
}

// Only of the computed columns: with few transitions, tanh takes as long as the products.
void Network::tanh_of(const float* x, float* y, std::size_t width, std::size_t columns) const {
  const std::size_t size = kernels_.panel;
  if (columns == size) return kernels_.tanh(x, y, width * size);
  for (std::size_t f = 0; f < width; ++f) kernels_.tanh(x + f * size, y + f * size, columns);
}

// A step that is no linear operation, of one panel.
void Network::compute(const Step& step, const float* parameters, Workspace& workspace, std::size_t panel,
                      std::size_t columns) const {
  const Op& op = step.op;
  const std::size_t in = widths_[step.in[0]], size = kernels_.panel;
  const float* x = workspace.value(step.in[0], panel);
  float* y = workspace.value(step.out, panel);
  switch (op.kind) {
    case OpKind::relu:
      kernels_.relu(x, y, op.width * size);
      break;
    case OpKind::tanh:
      tanh_of(x, y, op.width, columns);
      break;
    case OpKind::layer_norm:
      kernels_.layer_norm(x, op.weight == kNone ? nullptr : parameters + op.weight,
                          op.bias == kNone ? nullptr : parameters + op.bias, op.eps, op.width, y,
                          workspace.statistics_ + 2 * size * (panel * statistics_ + step.statistics));
      break;
    case OpKind::add:
    case OpKind::subtract: {
      const float sign = op.kind == OpKind::add ? 1.0f : -1.0f;
      const float* other = workspace.value(step.in[1], panel);
      if (widths_[step.in[1]] == op.width) {
        if (in == op.width)
          std::memcpy(y, x, op.width * size * sizeof(float));
        else
          for (std::size_t f = 0; f < op.width; ++f) std::memcpy(y + f * size, x, size * sizeof(float));
        kernels_.scale(other, sign, y, op.width * size, true);
      } else {
        kernels_.add_row(x, other, sign, y, op.width);
      }
      break;
    }
    case OpKind::mean:
      kernels_.sum_features(x, in, y);
      kernels_.scale(y, 1.0f / static_cast<float>(in), y, size, false);
      break;
    case OpKind::dropout: {
      if (!workspace.dropout.active) {
        std::memcpy(y, x, op.width * size * sizeof(float));
        break;
      }
      DropoutPass pass = workspace.dropout;
      pass.first_row += panel * size;
      float* mask = workspace.masks_ + size * (panel * mask_width_ + step.mask);
      fill_dropout(pass, step.layer, static_cast<double>(op.eps), columns, op.width, mask, 1, size);
      for (std::size_t i = 0; i < op.width * size; ++i) y[i] = x[i] * mask[i];
      break;
    }
    case OpKind::linear:
      break;  // of all panels together
    case OpKind::conv2d:
    case OpKind::max_pool2d:
    case OpKind::flatten:
      break;  // of the trunk
  }
}

bool Network::is_before_few(std::size_t at, std::size_t most) const {
  if (at + 1 == steps_.size()) return false;
  const Step& next = steps_[at + 1];
  return next.follows && next.op.width <= most;
}

bool Network::has_layer_gradient(std::size_t at, std::size_t count) const {
  const Step& step = steps_[at];
  const std::size_t outputs = step.op.width, inputs = widths_[step.in[0]];
  const auto fits = [&](std::size_t widest) {
    return outputs % kernels_.unit == 0 && inputs % kernels_.unit == 0 && std::max(outputs, inputs) <= widest;
  };
  if (count < kernels_.least_transitions || (step.activation != Activation::relu && kernels_.sparse)) return false;
  return fits(kernels_.widest) ||
         (fits(kernels_.widest_single) && is_before_few(at, 1) && outputs * inputs * count >= kernels_.least_single);
}

bool Network::makes_slopes(std::size_t at, std::size_t count) const {
  return has_layer_gradient(at, count) && is_before_few(at, Chain::kMostTerms);
}

bool Network::makes_input(std::size_t at, std::size_t count) const {
  if (at == 0 || !makes_slopes(at, count) || !steps_[at].follows) return false;
  const Step& before = steps_[at - 1];
  return before.op.bias != kNone && widths_[before.in[0]] <= kernels_.remade &&
         std::max(steps_[at].op.width, before.op.width) <= kernels_.widest;
}

bool Network::is_of_single_output(std::size_t count) const {
  if (kernels_.single_output == nullptr || trunk_ || steps_.size() != 3 || !makes_slopes(1, count)) return false;
  for (const Step& step : steps_)
    if (step.op.kind != OpKind::linear || step.op.bias == kNone || step.adds_weights) return false;
  return steps_[1].follows && widths_[0] <= Chain::kMostTerms && widths_[1] == kernels_.widest &&
         widths_[2] == kernels_.widest && widths_[3] == 1 && steps_[2].activation != Activation::relu;
}

void Network::single_output_gradients(const float* parameters, float* gradients, Workspace& workspace,
                                      std::size_t panels, std::size_t count, bool accumulate) const {
  SingleOutput single{};
  single.inputs = widths_[0];
  single.panels = panels;
  single.last = count - (panels - 1) * kernels_.panel;
  single.x = workspace.value(0, 0);
  single.slopes = workspace.gradient(3, 0);
  single.hidden = makes_input(1, count) ? nullptr : workspace.value(1, 0);
  single.first_signs = workspace.signs_.data();
  single.second_signs = workspace.signs_.data() + widths_[1];
  for (std::size_t i = 0; i < 3; ++i) {
    const Op& op = steps_[i].op;
    single.layers[i] = {parameters + op.weight, parameters + op.bias, gradients + op.weight, gradients + op.bias};
  }
  single.accumulate = accumulate;
  kernels_.single_output(single);
}

void Network::weights_gradient(std::size_t at, const float* parameters, float* gradients, Workspace& workspace,
                               std::size_t panels, std::size_t count, std::size_t last_columns, bool accumulate) const {
  const Step& step = steps_[at];
  const Op& op = step.op;
  const std::size_t size = kernels_.panel, in = widths_[step.in[0]];
  float* const bias = op.bias == kNone ? nullptr : gradients + op.bias;
  if (in <= kernels_.narrow) {
    kernels_.narrow_gradients(workspace.gradient(step.out, 0), op.width, workspace.value(step.in[0], 0), in, panels,
                              last_columns, gradients + op.weight, bias, accumulate);
    return;
  }
  float* const weights = gradients + op.weight;
  if (has_layer_gradient(at, count)) {
    LayerGradient layer{};
    layer.outputs = op.width;
    layer.inputs = in;
    layer.panels = panels;
    layer.last = count - (panels - 1) * size;
    layer.slopes = workspace.gradient(step.out, 0);
    layer.x = workspace.value(step.in[0], 0);
    if (makes_slopes(at, count))
      layer.made_slopes = input_gradient(steps_[at + 1], parameters, workspace, panels, last_columns, 0);
    if (makes_input(at, count)) layer.made_x = product(steps_[at - 1], parameters, workspace, panels, last_columns);
    layer.weights = weights;
    layer.bias = bias;
    layer.accumulate = accumulate;
    kernels_.layer_gradient(layer);
    return;
  }
  if (bias != nullptr) kernels_.sum_transitions(workspace.gradient(step.out, 0), op.width, panels, bias, accumulate);
  if (op.width <= kernels_.narrow) {
    // Few outputs: the same with inputs and slopes exchanged.
    float* const found = workspace.rows_;
    kernels_.narrow_gradients(workspace.value(step.in[0], 0), in, workspace.gradient(step.out, 0), op.width, panels,
                              last_columns, found, nullptr, false);
    for (std::size_t o = 0; o < op.width; ++o)
      for (std::size_t i = 0; i < in; ++i)
        weights[o * in + i] = (accumulate ? weights[o * in + i] : 0.0f) + found[i * op.width + o];
    return;
  }
  const auto stride = static_cast<std::ptrdiff_t>(size);
  Gemm gemm{};
  gemm.a = workspace.gradient(step.out, 0);
  gemm.a_row = stride;
  gemm.a_step = 1;
  gemm.a_segment = stride * static_cast<std::ptrdiff_t>(op.width);
  gemm.b = workspace.value(step.in[0], 0);
  gemm.b_step = stride;
  gemm.b_segment = stride * static_cast<std::ptrdiff_t>(in);
  gemm.c = weights;
  gemm.c_row = static_cast<std::ptrdiff_t>(in);
  gemm.m = op.width;
  gemm.n = in;
  gemm.depth = count;
  gemm.segment = size;
  gemm.accumulate = accumulate;
  kernels_.turned_gemm(gemm, workspace.rows_);
}

std::size_t Network::inputs_gradients(std::size_t at, const float* parameters, Workspace& workspace, std::size_t panels,
                                      std::size_t count, std::size_t last_columns, bool keeps,
                                      std::size_t inputs) const {
  const auto wanted = [&](std::size_t i) { return steps_[i].in[0] != 0 || inputs > 0; };
  const auto of = [&](std::size_t i) {
    return input_gradient(steps_[i], parameters, workspace, panels, last_columns, inputs);
  };
  if (!wanted(at)) return 1;
  std::size_t last = at;
  if (!steps_[at].follows || !wanted(at - 1)) {
    kernels_.gemm(of(at));
    return 1;
  }
  Chain chain{};
  if (steps_[at].op.width <= Chain::kMostTerms) chain.first = of(last--);
  chain.second = of(last);
  // A result that other operations add to is not a plain sum.
  if (steps_[last].follows && wanted(last - 1) && !steps_[last - 1].gates_input &&
      !steps_[last - 1].adds[0]) {
    const Gemm third = of(last - 1);
    if (third.m <= Chain::kMostRows) {
      chain.third = third;
      --last;
    }
  }
  chain.transitions = count;
  chain.keeps_first = keeps && !makes_slopes(at - 1, count);
  chain.keeps_second = keeps;
  // The gates are those of the forward pass's second and first result.
  if (workspace.has_second_signs_) chain.first_signs = workspace.signs_.data() + widths_[1];
  if (workspace.has_first_signs_) chain.second_signs = workspace.signs_.data();
  const bool needs_signs = workspace.has_first_signs_ || workspace.has_second_signs_;
  if (kernels_.chain(chain) != needs_signs || (keeps && workspace.lacks_second_))
    throw LearnerError("A backward pass needs values of which its forward pass has left the signs alone.");
  return at + 1 - last;
}

Gemm Network::input_gradient(const Step& step, const float* parameters, Workspace& workspace, std::size_t panels,
                             std::size_t last_columns, std::size_t inputs) const {
  const std::size_t in = widths_[step.in[0]], first = step.in[0] == 0 ? in - inputs : 0;
  Gemm gemm{};
  gemm.a = parameters + step.op.weight + first;
  gemm.a_row = 1;
  gemm.a_step = static_cast<std::ptrdiff_t>(in);
  gemm.b = workspace.gradient(step.out, 0);
  gemm.b_step = gemm.c_row = static_cast<std::ptrdiff_t>(kernels_.panel);
  gemm.c = workspace.gradient(step.in[0], 0) + first * kernels_.panel;
  gemm.m = in - first;
  gemm.depth = gemm.segment = step.op.width;
  gemm.accumulate = step.adds[0];
  gemm.gate = step.gates_input ? workspace.value(step.in[0], 0) : nullptr;
  set_panels(gemm, step.out, step.in[0], panels, last_columns);
  return gemm;
}

void Network::backward(const float* parameters, float* gradients, Workspace& workspace, std::size_t panels,
                       std::size_t count, std::size_t last_columns, bool accumulate, std::size_t inputs) const {
  const std::size_t size = kernels_.panel;
  const bool of_trunk = trunk_ && gradients != nullptr;
  if (of_trunk) inputs = widths_[0];
  const bool of_input = inputs > 0;
  std::size_t passed = steps_.size();  // from here on, the inputs' gradients of linear operations are there
  for (std::size_t i = steps_.size(); i-- > 0;) {
    const Step* const step = &steps_[i];
    const Op& op = step->op;
    const std::size_t floats = op.width * size;
    const bool adds_weights = accumulate || step->adds_weights;
    for (std::size_t p = 0; p < panels; ++p) {
      float* dy = workspace.gradient(step->out, p);
      const float* y = workspace.value(step->out, p);
      if (step->activation == Activation::relu && !step->gated) kernels_.relu_backward(dy, y, dy, floats, false);
      if (step->activation == Activation::tanh) kernels_.tanh_backward(dy, y, dy, floats, false);
      float* dx = step->in[0] != 0 || of_input ? workspace.gradient(step->in[0], p) : nullptr;
      switch (op.kind) {
        case OpKind::linear:
          break;
        case OpKind::relu:
          if (dx != nullptr) kernels_.relu_backward(dy, y, dx, floats, step->adds[0]);
          break;
        case OpKind::tanh:
          if (dx != nullptr) kernels_.tanh_backward(dy, y, dx, floats, step->adds[0]);
          break;
        case OpKind::layer_norm: {
          const auto at = [&](std::ptrdiff_t offset) {
            return offset == kNone || gradients == nullptr ? nullptr : gradients + offset;
          };
          const LayerNormGradients to{at(op.weight), at(op.bias), adds_weights || p > 0};
          kernels_.layer_norm_backward(
              dy, workspace.value(step->in[0], p), op.weight == kNone ? nullptr : parameters + op.weight,
              workspace.statistics_ + 2 * size * (p * statistics_ + step->statistics), op.width, dx, step->adds[0], to);
          break;
        }
        case OpKind::add:
        case OpKind::subtract:
          for (int k = 0; k < 2; ++k) {
            if (step->in[k] == 0 && !of_input) continue;
            const float sign = op.kind == OpKind::subtract && k == 1 ? -1.0f : 1.0f;
            float* to = workspace.gradient(step->in[k], p);
            if (widths_[step->in[k]] == op.width) {
              kernels_.scale(dy, sign, to, floats, step->adds[k]);
              continue;
            }
            if (!step->adds[k]) std::memset(to, 0, size * sizeof(float));
            for (std::size_t f = 0; f < op.width; ++f) kernels_.scale(dy + f * size, sign, to, size, true);
          }
          break;
        case OpKind::dropout: {
          if (dx == nullptr) break;
          if (!workspace.dropout.active) {
            kernels_.scale(dy, 1.0f, dx, floats, step->adds[0]);
            break;
          }
          const float* mask = workspace.masks_ + size * (p * mask_width_ + step->mask);
          for (std::size_t k = 0; k < floats; ++k) dx[k] = (step->adds[0] ? dx[k] : 0.0f) + dy[k] * mask[k];
          break;
        }
        case OpKind::mean:
          if (dx == nullptr) break;
          for (std::size_t f = 0; f < widths_[step->in[0]]; ++f)
            kernels_.scale(dy, 1.0f / static_cast<float>(widths_[step->in[0]]), dx + f * size, size, step->adds[0]);
          break;
        case OpKind::conv2d:
        case OpKind::max_pool2d:
        case OpKind::flatten:
          break;  // of the trunk
      }
    }
    if (op.kind != OpKind::linear) continue;
    if (gradients != nullptr && workspace.of_single_output_) {
      single_output_gradients(parameters, gradients, workspace, panels, count, accumulate);
      if (!of_input) return;
      gradients = nullptr;
    }
    if (i < passed)
      passed =
          i + 1 - inputs_gradients(i, parameters, workspace, panels, count, last_columns, gradients != nullptr, inputs);
    if (gradients != nullptr)
      weights_gradient(i, parameters, gradients, workspace, panels, count, last_columns, adds_weights);
  }
  if (of_trunk)
    trunk_->backward(parameters, gradients, *workspace.images_, panels, accumulate,
                     [&](std::size_t p) { return workspace.gradient(0, p); });
}

}  // namespace pearl::learner
