#include "pearl/learner/op.hpp"

#include <array>
#include <utility>

#include "pearl/errors.hpp"

namespace pearl::learner {
namespace {

constexpr std::array<std::pair<const char*, OpKind>, 11> kKinds = {{{"linear", OpKind::linear},
                                                                    {"relu", OpKind::relu},
                                                                    {"tanh", OpKind::tanh},
                                                                    {"layernorm", OpKind::layer_norm},
                                                                    {"add", OpKind::add},
                                                                    {"sub", OpKind::subtract},
                                                                    {"mean", OpKind::mean},
                                                                    {"dropout", OpKind::dropout},
                                                                    {"conv2d", OpKind::conv2d},
                                                                    {"maxpool2d", OpKind::max_pool2d},
                                                                    {"flatten", OpKind::flatten}}};

}  // namespace

OpKind op_kind(const std::string& name) {
  std::string known;
  for (const auto& [kind_name, kind] : kKinds) {
    if (name == kind_name) return kind;
    known += std::string(known.empty() ? "" : ", ") + kind_name;
  }
  throw LearnerError("Operations are " + known + "; found \"" + name + "\".");
}

const char* op_name(OpKind kind) { return kKinds[static_cast<std::size_t>(kind)].first; }

void refuse(const Op& op, std::size_t index, const std::string& what) {
  throw LearnerError("Operation " + std::to_string(index) + " (" + op_name(op.kind) + ") " + what + ".");
}

void require_parameters(const Op& op, std::size_t index, std::ptrdiff_t offset, std::size_t count,
                        std::size_t parameters) {
  if (offset != kNone && (offset < 0 || count > parameters || static_cast<std::size_t>(offset) > parameters - count))
    refuse(op, index, "needs parameters beyond the vector's " + std::to_string(parameters));
}

}  // namespace pearl::learner
