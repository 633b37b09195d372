#include "pearl/learner/action_distribution.hpp"

#include <algorithm>
#include <string>

#include "pearl/errors.hpp"

namespace pearl::learner {

void PolicyAndValue::check() const {
  const auto pair = [](std::size_t first, std::size_t second) {
    return std::to_string(first) + " and " + std::to_string(second) + ".";
  };
  if (&policy->kernels() != &value->kernels())
    throw LearnerError("Policy and value network must use the same variant of the kernels; found " +
                       std::string(policy->kernels().name) + " and " + value->kernels().name + ".");
  if (policy->parameters() != value->parameters())
    throw LearnerError("Policy and value network must have their parameters in one vector; found vectors of " +
                       pair(policy->parameters(), value->parameters()));
  policy->require_vectors("A policy network");
  value->require_vectors("A value network");
  if (policy->input_width() != value->input_width())
    throw LearnerError("Policy and value network must take the same observations; found inputs of " +
                       pair(policy->input_width(), value->input_width()));
  if (value->output_width() != 1)
    throw LearnerError("A value network has one output; found " + std::to_string(value->output_width()) + ".");
  const ActionDistribution& d = distribution;
  if (d.size < 1 || (d.categorical() && d.sizes.size() != d.size) ||
      std::find(d.sizes.begin(), d.sizes.end(), std::size_t{0}) != d.sizes.end())
    throw LearnerError("An action needs at least one number, and each part at least one logit; found " +
                       pair(d.size, d.sizes.size()));
  if (policy->output_width() != d.outputs())
    throw LearnerError("The policy network must have as many outputs as the distribution takes; found " +
                       pair(policy->output_width(), d.outputs()));
  const bool fits = d.log_std >= 0 && d.size <= policy->parameters() &&
                    static_cast<std::size_t>(d.log_std) <= policy->parameters() - d.size;
  if (d.categorical() ? d.log_std != kNone : !fits)
    throw LearnerError("Log deviations belong to a normal distribution, and lie in the vector of parameters; found " +
                       std::string("offset ") + std::to_string(d.log_std) + " of " +
                       std::to_string(policy->parameters()) + " parameters.");
}

}  // namespace pearl::learner
