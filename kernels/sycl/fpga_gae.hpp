// Generalized advantage estimation on an FPGA: an autorun pipeline with a processing element in each row
// (pearl/fpga_gae.hpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "autorun.hpp"
#include "pearl/device/gae.hpp"
#include "pearl/fpga_gae.hpp"

namespace pearl::device {

// `lookahead` is 1, 2 or 3 steps. Throws ConfigurationError for another, and for rows outside [1, 8].
AutorunProgram gae_program(int lookahead, int rows, int pipe_items);

// Every call throws DeviceError after a timeout.
class FpgaGae final : public GaeOnDevice {
 public:
  FpgaGae(const std::shared_ptr<SyclQueue>& queue, double gamma, double gae_lambda, int lookahead, int rows,
          std::chrono::duration<double> patience);
  ~FpgaGae() override;

  // Stops the elements. May be repeated. Throws DeviceError where they do not stop.
  void close();

  // Kernels launched: elements once, what brings them work for each call.
  std::uint64_t stage_launches() const { return autorun_.stage_launches(); }
  std::uint64_t bridge_launches() const { return autorun_.bridge_launches(); }

 private:
  void scan(const GaeCall& call) override;
  // Sends every element one item.
  void send(fpga::GaeKind kind);

  const int rows_;
  std::unique_ptr<DeviceArray<fpga::GaeCommand>> command_;
  Autorun autorun_;
  bool closed_ = false;
};

}  // namespace pearl::device
