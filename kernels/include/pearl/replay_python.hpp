// Python bindings that the Replay Managers of all devices share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pearl/errors.hpp"
#include "pearl/python_arrays.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace bindings {

inline py::dict state_dict(const pearl::ReplayState& state) {
  py::dict out;
  out["alpha"] = state.alpha;
  out["seed"] = state.seed;
  out["call"] = state.call;
  out["scale"] = state.scale;
  out["max_priority"] = static_cast<double>(state.max_priority);
  out["inserts"] = state.counters.inserts;
  out["updates"] = state.counters.updates;
  out["samples"] = state.counters.samples;
  out["stale"] = state.counters.stale;
  out["saturated"] = state.counters.saturated;
  out["rescales"] = state.counters.rescales;
  out["recoveries"] = state.counters.recoveries;
  out["exhausted"] = state.counters.exhausted;
  out["looked_at"] = state.looked_at;
  out["filled"] = state.filled;
  out["total"] = state.total;
  return out;
}

inline pearl::ReplayState state_of(const py::dict& in) {
  pearl::ReplayState state;
  state.alpha = in["alpha"].cast<double>();
  state.seed = in["seed"].cast<std::uint64_t>();
  state.call = in["call"].cast<std::uint64_t>();
  state.scale = in["scale"].cast<std::int64_t>();
  state.max_priority = in["max_priority"].cast<float>();
  state.counters.inserts = in["inserts"].cast<std::uint64_t>();
  state.counters.updates = in["updates"].cast<std::uint64_t>();
  state.counters.samples = in["samples"].cast<std::uint64_t>();
  state.counters.stale = in["stale"].cast<std::uint64_t>();
  state.counters.saturated = in["saturated"].cast<std::uint64_t>();
  state.counters.rescales = in["rescales"].cast<std::uint64_t>();
  state.counters.recoveries = in["recoveries"].cast<std::uint64_t>();
  state.looked_at = in["looked_at"].cast<std::uint64_t>();
  state.counters.exhausted = in["exhausted"].cast<std::uint64_t>();
  return state;
}

// Named as the fields of pearl.replay.ReplayStatistics.
inline py::dict statistics_dict(const pearl::ReplayStatistics& statistics, bool has_priorities) {
  py::dict out = state_dict(statistics.state);
  for (const char* name : {"alpha", "seed", "call", "looked_at"}) out.attr("pop")(name);
  out["histogram"] = has_priorities ? py::tuple(py::cast(statistics.histogram)) : py::tuple();
  out["samples_per_item"] = statistics.samples_per_item;
  out["age_mean"] = statistics.age_mean;
  out["age_max"] = statistics.age_max;
  out["effective_sample_size"] = statistics.effective_sample_size;
  return out;
}

inline pearl::Selection selection_of(const std::string& mode) {
  using pearl::Selection;
  if (mode == "prioritized") return Selection::kPrioritized;
  if (mode == "uniform") return Selection::kUniform;
  if (mode == "fifo") return Selection::kFifo;
  if (mode == "lifo") return Selection::kLifo;
  if (mode == "top_k") return Selection::kTopK;
  throw pearl::ReplayError("Unknown replay mode '" + mode + "'.");
}

// The methods of a Tree that has those of pearl::SumTreeReplay; the constructor and update() are the device's own.
template <class Tree, class... Options>
void bind_replay_methods(py::class_<Tree, Options...>& cls) {
  const auto state = [](const Tree& tree) {
    const Released released;
    return tree.state();
  };
  cls
      .def(
          "insert",
          [](Tree& tree, const Array<std::int64_t>& indices, const std::optional<Array<float>>& priorities) {
            const std::size_t count = rows(indices, "indices");
            const float* values = data_or_null(priorities, "priorities", count);
            const std::int64_t* slots = indices.data();
            const Released released;
            tree.insert(slots, values, count);
          },
          py::arg("indices").noconvert(), py::arg("priorities").noconvert())
      .def(
          "sample",
          [](Tree& tree, py::ssize_t count, double beta) {
            const std::size_t batch = batch_rows(count);
            auto indices = new_vector<std::int64_t>(count);
            auto weights = new_vector<float>(count);
            auto generations = new_vector<std::uint32_t>(count);
            std::int64_t* slots = indices.mutable_data();
            float* values = weights.mutable_data();
            std::uint32_t* versions = generations.mutable_data();
            {
              const Released released;
              tree.sample(batch, beta, slots, values, versions);
            }
            return py::make_tuple(std::move(indices), std::move(weights), std::move(generations));
          },
          py::arg("batch_size"), py::arg("beta"))
      .def(
          "sample_into",
          [](Tree& tree, double beta, Array<std::int64_t>& indices, Array<float>& weights,
             Array<std::uint32_t>& generations) {
            const std::size_t batch = batch_rows(static_cast<py::ssize_t>(rows(indices, "indices")));
            rows(weights, "weights", indices.size());
            rows(generations, "generations", indices.size());
            std::int64_t* slots = indices.mutable_data();
            float* values = weights.mutable_data();
            std::uint32_t* versions = generations.mutable_data();
            const Released released;
            tree.sample(batch, beta, slots, values, versions);
          },
          py::arg("beta"), py::arg("indices").noconvert(), py::arg("weights").noconvert(),
          py::arg("generations").noconvert())
      .def(
          "retrieve",
          [](Tree& tree, const Array<std::int64_t>& indices) {
            const std::size_t count = rows(indices, "indices");
            auto priorities = new_vector<float>(indices.size());
            float* values = priorities.mutable_data();
            const std::int64_t* slots = indices.data();
            {
              const Released released;
              tree.retrieve(slots, values, count);
            }
            return priorities;
          },
          py::arg("indices").noconvert())
      .def("set_alpha", &Tree::set_alpha, py::arg("alpha"), py::call_guard<Released>())
      .def_property_readonly("filled", [state](const Tree& tree) { return state(tree).filled; })
      .def_property_readonly("total", [state](const Tree& tree) { return state(tree).total; })
      .def_property_readonly("alpha", [state](const Tree& tree) { return state(tree).alpha; })
      .def_property_readonly("max_priority", [state](const Tree& tree) { return state(tree).max_priority; })
      .def("statistics",
           [](const Tree& tree) {
             pearl::ReplayStatistics statistics;
             {
               const Released released;
               statistics = tree.statistics();
             }
             return statistics_dict(statistics, tree.prioritized());
           })
      .def("save",
           [](const Tree& tree) {
             const auto capacity = static_cast<py::ssize_t>(tree.capacity());
             const py::ssize_t leaves = tree.prioritized() ? capacity : 0;
             auto priorities = new_vector<float>(leaves);
             auto generations = new_vector<std::uint32_t>(capacity);
             auto values = new_vector<std::uint32_t>(leaves);
             auto times = new_vector<std::uint16_t>(capacity);
             std::vector<std::int64_t> order;
             pearl::ReplayState state;
             {
               float* raw = leaves ? priorities.mutable_data() : nullptr;
               std::uint32_t* versions = generations.mutable_data();
               std::uint32_t* quantised = leaves ? values.mutable_data() : nullptr;
               std::uint16_t* samples = times.mutable_data();
               const Released released;
               state = tree.save(raw, versions, quantised, samples, &order);
             }
             py::dict out = state_dict(state);
             out["priorities"] = std::move(priorities);
             out["generations"] = std::move(generations);
             out["leaves"] = std::move(values);
             out["times_sampled"] = std::move(times);
             out["order"] = Array<std::int64_t>(static_cast<py::ssize_t>(order.size()), order.data());
             return out;
           })
      .def(
          "load",
          [](Tree& tree, const py::dict& in) {
            const auto capacity = static_cast<py::ssize_t>(tree.capacity());
            const py::ssize_t leaves = tree.prioritized() ? capacity : 0;
            const auto priorities = in["priorities"].cast<Array<float>>();
            const auto generations = in["generations"].cast<Array<std::uint32_t>>();
            const auto values = in["leaves"].cast<Array<std::uint32_t>>();
            rows(priorities, "priorities", leaves);
            rows(generations, "generations", capacity);
            rows(values, "leaves", leaves);
            const auto times = in["times_sampled"].cast<Array<std::uint16_t>>();
            const auto order = in["order"].cast<Array<std::int64_t>>();
            rows(times, "times_sampled", capacity);
            const std::size_t order_count = rows(order, "order");
            const std::uint16_t* samples = times.data();
            const std::int64_t* oldest_first = order.data();
            const pearl::ReplayState state = state_of(in);
            const float* raw = priorities.data();
            const std::uint32_t* versions = generations.data();
            const std::uint32_t* quantised = values.data();
            const Released released;
            tree.load(state, raw, versions, quantised, samples, oldest_first, order_count);
          },
          py::arg("state"))
      .def("close", &Tree::close, py::call_guard<Released>());
}

}  // namespace bindings
