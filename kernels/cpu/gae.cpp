#include "pearl/gae.hpp"

#include "pearl/errors.hpp"

namespace pearl {
namespace {

void check_fraction(const char* name, double value) {
  if (!(value >= 0.0 && value <= 1.0))
    throw ConfigurationError(std::string(name) + " must lie in [0, 1]; found " + std::to_string(value) + ".");
}

}  // namespace

GaeFactors GaeFactors::of(double gamma, double gae_lambda) {
  check_fraction("gamma", gamma);
  check_fraction("gae_lambda", gae_lambda);
  return {static_cast<float>(gamma), static_cast<float>(gamma * gae_lambda)};
}

}  // namespace pearl
