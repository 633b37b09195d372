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

// Calls visit(name, field) for every field of a replay's state that a checkpoint restores.
template <class State, class Visit>
void for_each_field(State& state, Visit visit) {
  visit("alpha", state.alpha);
  visit("seed", state.seed);
  visit("call", state.call);
  visit("scale", state.scale);
  visit("max_priority", state.max_priority);
  visit("inserts", state.counters.inserts);
  visit("updates", state.counters.updates);
  visit("samples", state.counters.samples);
  visit("stale", state.counters.stale);
  visit("saturated", state.counters.saturated);
  visit("rescales", state.counters.rescales);
  visit("recoveries", state.counters.recoveries);
  visit("exhausted", state.counters.exhausted);
  visit("looked_at", state.looked_at);
}

inline py::dict state_dict(const pearl::ReplayState& state) {
  py::dict out;
  for_each_field(state, [&](const char* name, auto field) { out[name] = field; });
  out["filled"] = state.filled;
  out["total"] = state.total;
  return out;
}

inline pearl::ReplayState state_of(const py::dict& in) {
  pearl::ReplayState state;
  for_each_field(state, [&]<class Field>(const char* name, Field& field) { field = in[name].cast<Field>(); });
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

// Binds the methods that all Trees share with pearl::SumTreeReplay: all but the constructor and update().
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
            const Released released;
            tree.insert(indices.data(), values, count);
          },
          py::arg("indices").noconvert(), py::arg("priorities").noconvert())
      .def(
          "sample",
          [](Tree& tree, py::ssize_t count, double beta) {
            const std::size_t batch = batch_rows(count);
            auto indices = new_vector<std::int64_t>(count);
            auto weights = new_vector<float>(count);
            auto generations = new_vector<std::uint32_t>(count);
            {
              const Released released;
              tree.sample(batch, beta, indices.mutable_data(), weights.mutable_data(), generations.mutable_data());
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
            {
              const Released released;
              tree.retrieve(indices.data(), priorities.mutable_data(), count);
            }
            return priorities;
          },
          py::arg("indices").noconvert())
      .def("set_alpha", &Tree::set_alpha, py::arg("alpha"), py::call_guard<Released>())
      .def_property_readonly("filled", [state](const Tree& tree) { return state(tree).filled; })
      .def_property_readonly("total", [state](const Tree& tree) { return state(tree).total; })
      .def_property_readonly("scale", [state](const Tree& tree) { return state(tree).scale; })
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
               const Released released;
               state = tree.save(leaves ? priorities.mutable_data() : nullptr, generations.mutable_data(),
                                 leaves ? values.mutable_data() : nullptr, times.mutable_data(), &order);
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
            const auto column = [&]<class T>(const char* name, py::ssize_t expected, T) {
              const auto array = in[name].cast<Array<T>>();
              rows(array, name, expected);
              return array;
            };
            const auto priorities = column("priorities", leaves, float{});
            const auto generations = column("generations", capacity, std::uint32_t{});
            const auto values = column("leaves", leaves, std::uint32_t{});
            const auto times = column("times_sampled", capacity, std::uint16_t{});
            const auto order = column("order", -1, std::int64_t{});
            const pearl::ReplayState state = state_of(in);
            const Released released;
            tree.load(state, priorities.data(), generations.data(), values.data(), times.data(), order.data(),
                      static_cast<std::size_t>(order.size()));
          },
          py::arg("state"))
      .def("close", &Tree::close, py::call_guard<Released>());
}

}  // namespace bindings
