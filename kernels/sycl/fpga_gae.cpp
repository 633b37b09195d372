#include "fpga_gae.hpp"

#include <limits>
#include <sstream>
#include <string>

#include "bindings.hpp"
#include "fpga_program.hpp"
#include "pearl/errors.hpp"
#include "pearl/gae_python.hpp"

namespace pearl::device {
namespace {

constexpr int kMostLookahead = 3;
constexpr int kMostRows = 8;  // three kernels each, which all run at once

void check_range(const char* name, int value, int most) {
  if (value < 1 || value > most)
    throw ConfigurationError(std::string(name) + " must lie in [1, " + std::to_string(most) + "]; found " +
                             std::to_string(value) + ".");
}

}  // namespace

AutorunProgram gae_program(int lookahead, int rows, int pipe_items) {
  check_range("lookahead", lookahead, kMostLookahead);
  check_range("rows", rows, kMostRows);
  const std::string prefix = "pearl_gae_";
  AutorunProgram program{"gae", prefix, {}, {}, {}};
  std::ostringstream text;
  text << kAutorunPreamble
       << "// Every rounding is that of the CPU's kernels, but for the order of a sum with lookahead.\n"
       << "#pragma clang fp contract(off)\n"
       << "#include \"pearl/fpga_gae.hpp\"\n\nusing namespace pearl::fpga;\n\n"
       << "constexpr int kLookahead = " << lookahead << ";\n"
       << "constexpr unsigned kRows = " << rows << ";\n"
       << "constexpr int kItems = " << pipe_items << ";  // that fit between two kernels\n"
       << "struct Gae;\n"
       << "template <int row>\nusing Steps = Pipe<Gae, row, GaeStep, kItems>;\n"
       << "template <int row>\nusing Results = Pipe<Gae, static_cast<int>(kRows) + row, GaeResult, kItems>;\n\n";
  for (int row = 0; row < rows; ++row) {
    const std::string number = std::to_string(row);
    program.stages.push_back(prefix + "element" + number);
    text << "PEARL_TASK " << program.stages.back() << "() { processing_element<kLookahead, Steps<" << number
         << ">, Results<" << number << ">>(); }\n";
    program.bridges.push_back(prefix + "load" + number);
    text << "PEARL_TASK " << program.bridges.back()
         << "(const GaeCommand* command, const std::uint8_t* rewards, const std::uint8_t* values, const float* bonus,\n"
         << "                const float* last_values, const std::uint8_t* ends) {\n"
         << "  load_steps<" << number << ", kRows, Steps<" << number
         << ">>(*command, rewards, values, bonus, last_values, ends);\n}\n";
    program.bridges.push_back(prefix + "store" + number);
    text << "PEARL_TASK " << program.bridges.back()
         << "(const GaeCommand* command, float* advantages, float* returns) {\n"
         << "  store_results<" << number << ", kRows, Results<" << number << ">>(*command, advantages, returns);\n}\n";
  }
  program.text = text.str();
  return program;
}

FpgaGae::FpgaGae(const std::shared_ptr<SyclQueue>& queue, double gamma, double gae_lambda, int lookahead, int rows,
                 std::chrono::duration<double> patience)
    : GaeOnDevice(queue, GaeFactors::of(gamma, gae_lambda), false),
      rows_(rows),
      command_(std::make_unique<DeviceArray<fpga::GaeCommand>>(*queue, 1, Placement::pinned)),
      autorun_(queue, gae_program(lookahead, rows, kEmulatedPipeItems), patience) {
  try {
    send(fpga::GaeKind::factors);
  } catch (...) {
    static_cast<void>(command_.release());  // kernels that hang still use it
    throw;
  }
}

FpgaGae::~FpgaGae() {
  try {
    close();
  } catch (const Error&) {  // a stall, which an earlier call has reported
  }
  if (!autorun_.stalled()) return;
  abandon_memory();
  static_cast<void>(command_.release());
}

void FpgaGae::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  if (autorun_.stalled()) return;
  send(fpga::GaeKind::stop);
  autorun_.join();
}

void FpgaGae::send(fpga::GaeKind kind) {
  fpga::GaeCommand& command = (*command_)[0];
  command = {};
  command.kind = kind;
  command.gamma = factors_.gamma;
  command.decay = factors_.decay;
  const std::uint8_t* const none = nullptr;
  const float* const nothing = nullptr;
  for (int row = 0; row < rows_; ++row)
    autorun_.launch(static_cast<std::size_t>(2 * row), static_cast<const fpga::GaeCommand*>(command_->data()), none,
                    none, nothing, nothing, none);
  autorun_.wait(1);
}

void FpgaGae::scan(const GaeCall& call) {
  if (closed_) throw ConfigurationError("The pipeline of advantages is closed. Create it again.");
  autorun_.require_sound();
  constexpr std::size_t kMost = std::numeric_limits<std::uint32_t>::max();
  if (call.horizon > kMost || call.envs > kMost)
    throw ConfigurationError("A rollout on an FPGA has fewer than 2**32 steps and environments.");
  (*command_)[0] = {fpga::GaeKind::step,
                    static_cast<std::uint8_t>(call.number_bytes),
                    static_cast<std::uint32_t>(call.horizon),
                    static_cast<std::uint32_t>(call.envs),
                    factors_.gamma,
                    factors_.decay,
                    call.rewards.offset,
                    call.rewards.scale,
                    call.values.offset,
                    call.values.scale};
  const auto* const command = static_cast<const fpga::GaeCommand*>(command_->data());
  for (int row = 0; row < rows_; ++row) {
    const auto load = static_cast<std::size_t>(2 * row);
    autorun_.launch(load + 1, command, call.advantages, call.returns);
    autorun_.launch(load, command, static_cast<const std::uint8_t*>(call.rewards.data),
                    static_cast<const std::uint8_t*>(call.values.data), call.bonus, call.last_values, call.ends);
  }
  autorun_.wait(call.count());
}

void bind_fpga_gae(py::module_& module) {
  using namespace bindings;
  py::class_<FpgaGae, std::shared_ptr<FpgaGae>> cls(module, "FpgaGae",
                                                    "Generalized advantage estimation as a pipeline on an FPGA.");
  cls.def(py::init([](const std::shared_ptr<SyclQueue>& queue, double gamma, double gae_lambda, int lookahead, int rows,
                      double timeout_s) {
            const Released released;
            return std::make_shared<FpgaGae>(queue, gamma, gae_lambda, lookahead, rows,
                                             std::chrono::duration<double>(timeout_s));
          }),
          py::arg("queue").none(false), py::arg("gamma"), py::arg("gae_lambda"), py::arg("lookahead"), py::arg("rows"),
          py::arg("timeout_s"))
      .def("close", &FpgaGae::close, py::call_guard<Released>())
      .def_property_readonly("stage_launches", &FpgaGae::stage_launches, "Processing elements launched so far.")
      .def_property_readonly("bridge_launches", &FpgaGae::bridge_launches, "Loads and stores launched so far.");
  bind_gae_methods<FpgaGae, 0>(cls);
  module.def(
      "fpga_gae_source",
      [](int lookahead, int rows, int pipe_items) { return gae_program(lookahead, rows, pipe_items).text; },
      py::arg("lookahead"), py::arg("rows"), py::arg("pipe_items") = kEmulatedPipeItems, "The program of a pipeline.");
}

}  // namespace pearl::device
