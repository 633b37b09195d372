#include "bindings.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "autorun.hpp"
#include "fpga_program.hpp"
#include "fpga_replay.hpp"
#include "pearl/replay_python.hpp"

namespace pearl::device {
namespace {

using Seconds = std::chrono::duration<double>;

// A program whose bridges all take the same arguments: words in host memory, and their number.
class WordPipeline {
 public:
  WordPipeline(const std::shared_ptr<SyclQueue>& queue, AutorunProgram program, double timeout_s)
      : queue_(queue), program_(std::move(program)), autorun_(queue, program_, Seconds(timeout_s)) {}
  ~WordPipeline() {
    if (autorun_.stalled()) static_cast<void>(words_.release());
  }

  std::vector<std::uint64_t> run(const std::vector<std::uint64_t>& words) {
    if (autorun_.stalled()) autorun_.wait(0);
    words_ = std::make_unique<DeviceArray<std::uint64_t>>(*queue_, words.size(), Placement::pinned);
    std::copy(words.begin(), words.end(), words_->data());
    for (std::size_t bridge = 0; bridge < program_.bridges.size(); ++bridge)
      autorun_.launch(bridge, words_->data(), std::uint64_t{words.size()});
    autorun_.wait(words.size());
    return {words_->data(), words_->data() + words.size()};
  }
  void join() { autorun_.join(); }
  std::uint64_t stage_launches() const { return autorun_.stage_launches(); }
  std::uint64_t bridge_launches() const { return autorun_.bridge_launches(); }

 private:
  const std::shared_ptr<SyclQueue> queue_;
  const AutorunProgram program_;
  std::unique_ptr<DeviceArray<std::uint64_t>> words_;
  Autorun autorun_;
};

}  // namespace

void bind_fpga_replay(py::module_& module) {
  using namespace bindings;
  py::class_<WordPipeline>(module, "Autorun", "Autorun kernels joined by pipes; see kernels/sycl/autorun.hpp.")
      .def(py::init([](const std::shared_ptr<SyclQueue>& queue, const std::string& name, const std::string& text,
                       const std::vector<std::string>& stages, const std::vector<std::string>& bridges,
                       double timeout_s) {
             const Released released;
             return std::make_unique<WordPipeline>(queue, AutorunProgram{name, "", text, stages, bridges}, timeout_s);
           }),
           py::arg("queue").none(false), py::arg("name"), py::arg("text"), py::arg("stages"), py::arg("bridges"),
           py::arg("timeout_s"))
      .def("run", &WordPipeline::run, py::arg("words"), py::call_guard<Released>(),
           "Launch every bridge with the words and their count, wait, and return the words; DeviceError on a stall.")
      .def("join", &WordPipeline::join, py::call_guard<Released>(), "Wait until the stages, told to stop, have ended.")
      .def_property_readonly("stage_launches", &WordPipeline::stage_launches)
      .def_property_readonly("bridge_launches", &WordPipeline::bridge_launches);

  using Tree = FpgaReplay;
  py::class_<Tree, std::shared_ptr<Tree>> cls(module, "FpgaSumTree", "The Replay Manager as a pipeline on an FPGA.");
  cls.def(py::init([](const std::shared_ptr<SyclQueue>& queue, std::int64_t capacity, unsigned fanout, double alpha,
                      std::uint64_t seed, bool stratified, float initial_priority, float priority_epsilon,
                      double timeout_s) {
            const Released released;
            return std::make_shared<Tree>(queue, capacity, fanout, alpha, seed, stratified, initial_priority,
                                          priority_epsilon, Seconds(timeout_s));
          }),
          py::arg("queue").none(false), py::arg("capacity"), py::arg("fanout"), py::arg("alpha"), py::arg("seed"),
          py::arg("stratified"), py::arg("initial_priority"), py::arg("priority_epsilon"), py::arg("timeout_s"))
      .def(
          "last_batch",
          [](const Tree& tree) {
            const std::vector<std::uint32_t>& slots = tree.last_slots();
            Array<std::int64_t> indices(static_cast<py::ssize_t>(slots.size()));
            std::copy(slots.begin(), slots.end(), indices.mutable_data());
            const std::vector<float>& weights = tree.last_weights();
            return std::make_pair(indices, Array<float>(static_cast<py::ssize_t>(weights.size()), weights.data()));
          },
          "Slots and weights of the last sampled batch.")
      .def_property_readonly("stage_launches", &Tree::stage_launches, "Autorun kernels launched so far.")
      .def_property_readonly("bridge_launches", &Tree::bridge_launches, "Producers and consumers launched so far.")
      .def_property_readonly("level_bits", [](const Tree& tree) { return tree.shape().bits(); })
      .def_property_readonly("level_nodes", [](const Tree& tree) { return tree.shape().nodes(); });
  bind_update(cls);
  bind_replay_methods(cls);
  module.def(
      "fpga_replay_source",
      [](std::int64_t capacity, unsigned fanout, int pipe_items) {
        return replay_program(TreeShape::of(capacity, fanout), pipe_items).text;
      },
      py::arg("capacity"), py::arg("fanout"), py::arg("pipe_items") = kEmulatedPipeItems,
      "The program generated for a tree.");
}

}  // namespace pearl::device
