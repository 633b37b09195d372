// Python bindings of the CPU kernels: conversion and the release of Python's lock, no logic.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pearl/column_store.hpp"
#include "pearl/doorbell.hpp"
#include "pearl/episode_links.hpp"
#include "pearl/errors.hpp"
#include "pearl/probes.hpp"
#include "pearl/replay_autorun.hpp"
#include "pearl/slot_queue.hpp"
#include "pearl/snapshot.hpp"
#include "pearl/sum_tree_replay.hpp"

namespace py = pybind11;

void bind_kernels(py::module_& m);  // kernel_bindings.cpp

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Released = py::gil_scoped_release;

void raise(const char* name, const std::exception& error) {
  py::object type = py::module_::import("pearl.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const pearl::PriorityError& error) {
    raise("PriorityError", error);
  } catch (const pearl::ReplayError& error) {
    raise("ReplayError", error);
  } catch (const pearl::CheckpointError& error) {
    raise("CheckpointError", error);
  } catch (const pearl::QueueClosedError& error) {
    raise("QueueClosedError", error);
  } catch (const pearl::QueueTimeoutError& error) {
    raise("QueueTimeoutError", error);
  } catch (const pearl::QueueError& error) {
    raise("QueueError", error);
  } catch (const pearl::Error& error) {
    raise("PearlError", error);
  }
}

std::size_t rows(const py::array& array, const char* name, py::ssize_t expected = -1) {
  if (array.ndim() != 1 || (expected >= 0 && array.size() != expected))
    throw pearl::ReplayError(std::string(name) + " must be a vector" +
                             (expected >= 0 ? " of " + std::to_string(expected) + " items" : std::string()) +
                             "; found " + std::to_string(array.size()) + " items in " +
                             std::to_string(array.ndim()) + " dimensions.");
  return static_cast<std::size_t>(array.size());
}

std::size_t batch_rows(py::ssize_t count) {
  if (count < 1) throw pearl::ReplayError("batch_size must be at least 1; found " + std::to_string(count) + ".");
  return static_cast<std::size_t>(count);
}

// The data of an optional array of `count` items; null for None.
template <class T>
const T* data_or_null(const std::optional<Array<T>>& array, const char* name, std::size_t count) {
  if (!array) return nullptr;
  rows(*array, name, static_cast<py::ssize_t>(count));
  return array->data();
}

// A structure on a caller's buffer, which stays exported (an mmap refuses to close) while the structure lives.
template <class T>
struct OnBuffer : T {
  template <class... Args>
  explicit OnBuffer(py::buffer_info held, Args... args)
      : T(held.ptr, static_cast<std::size_t>(held.size * held.itemsize), args...), view(std::move(held)) {}
  py::buffer_info view;
};

template <class T, class... Args>
std::unique_ptr<OnBuffer<T>> on_buffer(const py::buffer& buffer, Args... args) {
  return std::make_unique<OnBuffer<T>>(buffer.request(true), args...);
}

// Runs `wait(timeout_s)` without Python's lock in slices, so that Ctrl-C is seen; `done` tells its success.
template <class Wait, class Done>
auto interruptible(double timeout_s, Wait wait, Done done) {
  constexpr double kSlice = 0.1;
  if (!(timeout_s > 0.0)) return wait(0.0);
  const pearl::Deadline deadline(timeout_s);
  for (;;) {
    const double left = deadline.left();
    auto result = [&] {
      const Released released;
      return wait(std::clamp(left, 0.0, kSlice));
    }();
    if (done(result) || left <= 0.0) return result;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

const auto is_true = [](bool result) { return result; };
const auto is_slot = [](std::int64_t result) { return result >= 0; };

py::dict state_dict(const pearl::ReplayState& state) {
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
  out["exhausted"] = state.counters.exhausted;
  out["filled"] = state.filled;
  out["total"] = state.total;
  return out;
}

pearl::ReplayState state_of(const py::dict& in) {
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
  state.counters.exhausted = in["exhausted"].cast<std::uint64_t>();
  return state;
}

// Named as the fields of pearl.replay.ReplayStatistics.
py::dict statistics_dict(const pearl::ReplayStatistics& statistics, bool has_priorities) {
  py::dict out = state_dict(statistics.state);
  for (const char* name : {"alpha", "seed", "call"}) out.attr("pop")(name);
  out["histogram"] = has_priorities ? py::tuple(py::cast(statistics.histogram)) : py::tuple();
  out["samples_per_item"] = statistics.samples_per_item;
  out["age_mean"] = statistics.age_mean;
  out["age_max"] = statistics.age_max;
  out["effective_sample_size"] = statistics.effective_sample_size;
  return out;
}

pearl::Selection selection_of(const std::string& mode) {
  using pearl::Selection;
  if (mode == "prioritized") return Selection::kPrioritized;
  if (mode == "uniform") return Selection::kUniform;
  if (mode == "fifo") return Selection::kFifo;
  if (mode == "lifo") return Selection::kLifo;
  if (mode == "top_k") return Selection::kTopK;
  throw pearl::ReplayError("Unknown replay mode '" + mode + "'.");
}

void bind_sum_tree(py::module_& m) {
  using Tree = pearl::SumTreeReplay;
  py::class_<Tree> cls(m, "SumTree");
  cls.attr("INITIAL_MAX") = pearl::kInitialMax;
  cls.attr("INITIAL_MEAN") = pearl::kInitialMean;
  cls
      .def(py::init([](std::int64_t capacity, unsigned fanout, const std::string& mode, double alpha,
                       std::uint64_t seed, bool stratified, bool replacement, std::uint32_t max_times_sampled,
                       float initial_priority) {
             return std::make_unique<Tree>(capacity, fanout, alpha, seed,
                                           pearl::ReplayOptions{selection_of(mode), stratified, replacement,
                                                                max_times_sampled, initial_priority});
           }),
           py::arg("capacity"), py::arg("fanout"), py::arg("mode"), py::arg("alpha"), py::arg("seed"),
           py::arg("stratified") = true, py::arg("replacement") = true, py::arg("max_times_sampled") = 0,
           py::arg("initial_priority") = pearl::kInitialMax)
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
            Array<std::int64_t> indices(count);
            Array<float> weights(count);
            Array<std::uint32_t> generations(count);
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
          "sample_indices",
          [](Tree& tree, py::ssize_t count) {
            const std::size_t batch = batch_rows(count);
            Array<std::int64_t> indices(count);
            std::int64_t* slots = indices.mutable_data();
            {
              const Released released;
              tree.sample(batch, 0.0, slots, nullptr, nullptr);
            }
            return indices;
          },
          py::arg("batch_size"))
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
          "update",
          [](Tree& tree, const Array<std::int64_t>& indices, const Array<float>& priorities,
             const std::optional<Array<std::uint32_t>>& generations) {
            const std::size_t count = rows(indices, "indices");
            rows(priorities, "priorities", indices.size());
            const std::uint32_t* versions = data_or_null(generations, "generations", count);
            const std::int64_t* slots = indices.data();
            const float* values = priorities.data();
            const Released released;
            return tree.update(slots, values, versions, count);
          },
          py::arg("indices").noconvert(), py::arg("priorities").noconvert(), py::arg("generations").noconvert())
      .def(
          "retrieve",
          [](const Tree& tree, const Array<std::int64_t>& indices) {
            const std::size_t count = rows(indices, "indices");
            Array<float> priorities(indices.size());
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
      .def_property_readonly("filled", [](const Tree& tree) { return tree.state().filled; })
      .def_property_readonly("total", [](const Tree& tree) { return tree.state().total; })
      .def_property_readonly("alpha", [](const Tree& tree) { return tree.state().alpha; })
      .def_property_readonly("max_priority", [](const Tree& tree) { return tree.state().max_priority; })
      .def("statistics", [](const Tree& tree) { return statistics_dict(tree.statistics(), tree.prioritized()); })
      .def(
          "find",
          [](Tree& tree, const Array<std::uint64_t>& targets) {
            const std::size_t count = rows(targets, "targets");
            Array<std::int64_t> indices(targets.size());
            std::int64_t* slots = indices.mutable_data();
            const std::uint64_t* at = targets.data();
            {
              const Released released;
              tree.find(at, slots, count);
            }
            return indices;
          },
          py::arg("targets").noconvert())
      .def("save",
           [](const Tree& tree) {
             const auto capacity = static_cast<py::ssize_t>(tree.capacity());
             const py::ssize_t leaves = tree.prioritized() ? capacity : 0;
             Array<float> priorities(leaves);
             Array<std::uint32_t> generations(capacity);
             Array<std::uint32_t> values(leaves);
             Array<std::uint32_t> born(capacity);
             Array<std::uint32_t> times(capacity);
             std::vector<std::int64_t> order;
             pearl::ReplayState state;
             {
               float* raw = leaves ? priorities.mutable_data() : nullptr;
               std::uint32_t* versions = generations.mutable_data();
               std::uint32_t* quantised = leaves ? values.mutable_data() : nullptr;
               std::uint32_t* births = born.mutable_data();
               std::uint32_t* samples = times.mutable_data();
               const Released released;
               state = tree.save(raw, versions, quantised, births, samples, &order);
             }
             py::dict out = state_dict(state);
             out["priorities"] = std::move(priorities);
             out["generations"] = std::move(generations);
             out["leaves"] = std::move(values);
             out["born"] = std::move(born);
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
            const auto born = in["born"].cast<Array<std::uint32_t>>();
            const auto times = in["times_sampled"].cast<Array<std::uint32_t>>();
            const auto order = in["order"].cast<Array<std::int64_t>>();
            rows(born, "born", capacity);
            rows(times, "times_sampled", capacity);
            const std::size_t order_count = rows(order, "order");
            const std::uint32_t* births = born.data();
            const std::uint32_t* samples = times.data();
            const std::int64_t* oldest_first = order.data();
            const pearl::ReplayState state = state_of(in);
            const float* raw = priorities.data();
            const std::uint32_t* versions = generations.data();
            const std::uint32_t* quantised = values.data();
            const Released released;
            tree.load(state, raw, versions, quantised, births, samples, oldest_first, order_count);
          },
          py::arg("state"))
      .def("close", &Tree::close, py::call_guard<Released>());
}

void bind_autorun(py::module_& m) {
  using Autorun = pearl::ReplayAutorun;
  py::class_<Autorun>(m, "ReplayAutorun")
      .def(py::init<pearl::SumTreeReplay&, std::size_t, std::size_t>(), py::arg("sum_tree"), py::arg("max_batch"),
           py::arg("depth") = 8, py::keep_alive<1, 2>())
      .def(
          "write_sample",
          [](Autorun& autorun, py::ssize_t count, double beta, double timeout_s) {
            const std::size_t batch = batch_rows(count);
            return interruptible(timeout_s, [&](double slice) { return autorun.write_sample(batch, beta, slice); },
                                 is_true);
          },
          py::arg("batch_size"), py::arg("beta"), py::arg("timeout_s") = 0.0)
      .def(
          "write_update",
          [](Autorun& autorun, const Array<std::int64_t>& indices, const Array<float>& priorities,
             const std::optional<Array<std::uint32_t>>& generations, double timeout_s) {
            const std::size_t count = rows(indices, "indices");
            rows(priorities, "priorities", indices.size());
            const std::uint32_t* versions = data_or_null(generations, "generations", count);
            const std::int64_t* slots = indices.data();
            const float* values = priorities.data();
            return interruptible(
                timeout_s,
                [&](double slice) { return autorun.write_update(slots, values, versions, count, slice); }, is_true);
          },
          py::arg("indices").noconvert(), py::arg("priorities").noconvert(), py::arg("generations").noconvert(),
          py::arg("timeout_s") = 0.0)
      .def(
          "write_insert",
          [](Autorun& autorun, const Array<std::int64_t>& indices, const std::optional<Array<float>>& priorities,
             double timeout_s) {
            const std::size_t count = rows(indices, "indices");
            const float* values = data_or_null(priorities, "priorities", count);
            const std::int64_t* slots = indices.data();
            return interruptible(
                timeout_s, [&](double slice) { return autorun.write_insert(slots, values, count, slice); }, is_true);
          },
          py::arg("indices").noconvert(), py::arg("priorities").noconvert(), py::arg("timeout_s") = 0.0)
      .def("poll",
           [](Autorun& autorun) -> std::optional<py::tuple> {
             const auto count = static_cast<py::ssize_t>(autorun.response_size());
             if (count == 0) return std::nullopt;
             Array<std::int64_t> indices(count);
             Array<float> weights(count);
             Array<std::uint32_t> generations(count);
             autorun.take_response(indices.mutable_data(), weights.mutable_data(), generations.mutable_data());
             return py::make_tuple(std::move(indices), std::move(weights), std::move(generations));
           })
      .def("pending", &Autorun::pending)
      .def(
          "drain",
          [](Autorun& autorun, double timeout_s) {
            return interruptible(timeout_s, [&](double slice) { return autorun.drain(slice); }, is_true);
          },
          py::arg("timeout_s"))
      .def("stop", &Autorun::stop, py::call_guard<Released>())
      .def(
          "attach_bell", [](Autorun& autorun, OnBuffer<pearl::Doorbell>& bell) { autorun.attach_bell(&bell); },
          py::arg("bell"), py::keep_alive<1, 2>());
}

void bind_column_store(py::module_& m) {
  using Store = pearl::ColumnStore;
  const auto of_column = [](const py::array& array, const Store::Column& column, py::ssize_t count) {
    return array.ndim() > 0 && array.shape(0) >= count && (array.flags() & py::array::c_style) != 0 &&
           array.nbytes() == array.shape(0) * static_cast<py::ssize_t>(column.item_bytes);
  };
  py::class_<Store>(m, "ColumnStore")
      .def(py::init([](std::vector<py::array> columns) {
             std::vector<Store::Column> raw;
             const py::ssize_t capacity = columns.empty() ? 0 : columns.front().shape(0);
             for (py::array& column : columns) {
               if (column.shape(0) != capacity || capacity < 1 || !(column.flags() & py::array::c_style))
                 throw pearl::ReplayError("Columns must be contiguous and of one length of at least 1.");
               raw.push_back({static_cast<char*>(column.mutable_data()),
                              static_cast<std::size_t>(column.nbytes() / capacity)});
             }
             return std::make_unique<Store>(static_cast<std::size_t>(capacity), std::move(raw));
           }),
           py::arg("columns"), py::keep_alive<1, 2>())
      .def(
          "insert",
          [of_column](Store& store, py::ssize_t start, py::ssize_t count, const std::vector<py::array>& sources) {
            const auto capacity = static_cast<py::ssize_t>(store.capacity());
            if (start < 0 || start >= capacity || count < 0 || count > capacity ||
                sources.size() != store.columns().size())
              throw pearl::ReplayError("An insertion must fit the columns.");
            std::vector<const void*> raw;
            raw.reserve(sources.size());
            for (std::size_t i = 0; i < sources.size(); ++i) {
              if (!of_column(sources[i], store.columns()[i], count))
                throw pearl::ReplayError("Rows to insert must be contiguous and of the column's shape.");
              raw.push_back(sources[i].data());
            }
            const Released released;
            store.insert(static_cast<std::size_t>(start), static_cast<std::size_t>(count), raw);
          },
          py::arg("start"), py::arg("count"), py::arg("sources"))
      .def(
          "gather",
          [of_column](const Store& store, const Array<std::int64_t>& indices, py::ssize_t size,
                      std::vector<py::array> targets) {
            const std::size_t count = rows(indices, "indices");
            if (size < 0 || size > static_cast<py::ssize_t>(store.capacity()) ||
                targets.size() != store.columns().size())
              throw pearl::ReplayError("A gather must fit the columns.");
            std::vector<void*> raw;
            raw.reserve(targets.size());
            for (std::size_t i = 0; i < targets.size(); ++i) {
              if (!of_column(targets[i], store.columns()[i], indices.size()))
                throw pearl::ReplayError("Arrays to gather into must be contiguous and of the column's shape.");
              raw.push_back(targets[i].mutable_data());
            }
            const std::int64_t* slots = indices.data();
            const Released released;
            store.gather(slots, count, static_cast<std::size_t>(size), raw);
          },
          py::arg("indices").noconvert(), py::arg("size"), py::arg("targets"));
}

void bind_episode_links(py::module_& m) {
  using Links = pearl::EpisodeLinks;
  using Slots = Array<std::int64_t>;
  struct Held {
    py::dict arrays;
    std::unique_ptr<Links> links;
  };
  const auto checked = [](const Held& held, const Slots& indices, py::ssize_t size) {
    const std::size_t count = rows(indices, "indices");
    if (size < 0 || size > static_cast<py::ssize_t>(held.links->capacity()))
      throw pearl::ReplayError("size must fit the slots.");
    pearl::check_stored(indices.data(), count, static_cast<std::size_t>(size));
    return count;
  };
  py::class_<Held>(m, "EpisodeLinks")
      .def(py::init([](const py::dict& arrays, std::size_t slice, const std::optional<py::array>& obs,
                       const std::optional<py::array>& next_obs, const std::optional<py::array>& kept_obs) {
             const auto capacity = arrays["next"].cast<py::array>().size();
             const auto streams = arrays["open"].cast<py::array>().size();
             const auto raw = [&](const char* name, py::ssize_t size, auto type) {
               using T = decltype(type);
               auto array = arrays[name].cast<py::array>();
               if (!py::isinstance<Array<T>>(array) || array.size() != size)
                 throw pearl::ReplayError(std::string("The links' ") + name + " must be contiguous and have " +
                                          std::to_string(size) + " items.");
               return static_cast<T*>(array.mutable_data());
             };
             const auto whole = [&](const char* name) { return raw(name, capacity, std::int64_t{}); };
             const Links::Arrays a{whole("next"), whole("prev"), whole("episode"), whole("position"),
                                   raw("ending", capacity, std::uint8_t{}),
                                   kept_obs ? whole("kept") : nullptr, whole("last"), whole("stream"),
                                   whole("tail"), whole("free_episodes"), kept_obs ? whole("free_kept") : nullptr,
                                   slice ? whole("starts") : nullptr, slice ? whole("start_place") : nullptr,
                                   raw("open", streams, std::int64_t{}),
                                   raw("counters", Links::kCounters, std::int64_t{})};
             py::ssize_t bytes = 0;
             for (const auto* column : {&obs, &next_obs, &kept_obs}) {
               if (!*column) continue;
               if ((*column)->ndim() < 1 || (*column)->shape(0) != capacity || (bytes && bytes != (*column)->nbytes()))
                 throw pearl::ReplayError("The observations must be columns of one shape.");
               bytes = (*column)->nbytes();
             }
             const auto data = [](const std::optional<py::array>& array) {
               return array ? static_cast<const char*>(array->data()) : nullptr;
             };
             py::dict held(arrays);
             held["observations"] = py::make_tuple(obs, next_obs, kept_obs);
             return std::make_unique<Held>(Held{
                 held, std::make_unique<Links>(a, static_cast<std::size_t>(capacity), static_cast<std::size_t>(streams),
                                               slice, static_cast<std::size_t>(bytes / capacity), data(obs),
                                               data(next_obs), const_cast<char*>(data(kept_obs)))});
           }),
           py::arg("arrays"), py::arg("slice"), py::arg("obs"), py::arg("next_obs"), py::arg("kept_obs"))
      .def(
          "insert",
          [](Held& held, std::size_t start, std::size_t filled, const Slots& streams,
             const Array<std::uint8_t>& endings, const std::optional<Slots>& positions,
             const std::optional<py::array>& obs, const std::optional<py::array>& next_obs) {
            const std::size_t count = rows(streams, "streams");
            rows(endings, "endings", streams.size());
            if (start >= held.links->capacity() || count > held.links->capacity())
              throw pearl::ReplayError("An insertion must fit the slots.");
            const auto data = [&](const std::optional<py::array>& array) {
              if (array && (!(array->flags() & py::array::c_style) ||
                            static_cast<std::size_t>(array->nbytes()) != count * held.links->obs_bytes()))
                throw pearl::ReplayError("Observations to insert must be contiguous and of the column's shape.");
              return array ? static_cast<const char*>(array->data()) : nullptr;
            };
            const Links::Rows from{streams.data(), endings.data(), data_or_null(positions, "positions", count),
                                   data(obs), data(next_obs)};
            const Released released;
            held.links->insert(start, count, filled, from);
          },
          py::arg("start"), py::arg("filled"), py::arg("streams").noconvert(), py::arg("endings").noconvert(),
          py::arg("positions").noconvert(), py::arg("obs"), py::arg("next_obs"))
      .def(
          "remaining",
          [checked](const Held& held, const Slots& indices, py::ssize_t size) {
            const std::size_t count = checked(held, indices, size);
            Slots out(indices.size());
            held.links->remaining(indices.data(), count, out.mutable_data());
            return out;
          },
          py::arg("indices").noconvert(), py::arg("size"))
      .def(
          "walk",
          [checked](const Held& held, const Slots& indices, py::ssize_t size, py::ssize_t length, bool back) {
            const std::size_t count = checked(held, indices, size);
            if (length < 1) throw pearl::ReplayError("length must be at least 1.");
            Slots slots(std::vector<py::ssize_t>{indices.size(), length});
            Slots found(indices.size());
            const std::int64_t* from = indices.data();
            std::int64_t* to = slots.mutable_data();
            std::int64_t* counts = found.mutable_data();
            {
              const Released released;
              if (back)
                held.links->backward(from, count, static_cast<std::size_t>(length), to, counts);
              else
                held.links->forward(from, count, static_cast<std::size_t>(length), to, counts);
            }
            return py::make_tuple(std::move(slots), std::move(found));
          },
          py::arg("indices").noconvert(), py::arg("size"), py::arg("length"), py::arg("back"))
      .def(
          "endings",
          [checked](const Held& held, const Slots& indices, py::ssize_t size) {
            const std::size_t count = checked(held, indices, size);
            Array<std::uint8_t> out(indices.size());
            held.links->endings(indices.data(), count, out.mutable_data());
            return out;
          },
          py::arg("indices").noconvert(), py::arg("size"))
      .def(
          "draw",
          [](const Held& held, const Array<std::uint64_t>& random) {
            const std::size_t count = rows(random, "random");
            Slots out(random.size());
            held.links->draw(random.data(), count, out.mutable_data());
            return out;
          },
          py::arg("random").noconvert())
      .def(
          "gather_next",
          [checked](const Held& held, const Slots& indices, py::ssize_t size, py::array& target) {
            const std::size_t count = checked(held, indices, size);
            if (!held.links->keeps_apart() || !(target.flags() & py::array::c_style) ||
                static_cast<std::size_t>(target.nbytes()) != count * held.links->obs_bytes())
              throw pearl::ReplayError("Arrays to gather into must be contiguous and of the column's shape.");
            const std::int64_t* slots = indices.data();
            char* raw = static_cast<char*>(target.mutable_data());
            const Released released;
            held.links->gather_next(slots, count, raw);
          },
          py::arg("indices").noconvert(), py::arg("size"), py::arg("target"));
}

void bind_shared(py::module_& m) {
  using Bell = OnBuffer<pearl::Doorbell>;
  py::class_<Bell>(m, "Doorbell")
      .def(py::init([](const py::buffer& buffer) { return on_buffer<pearl::Doorbell>(buffer); }), py::arg("buffer"))
      .def_property_readonly_static("nbytes", [](const py::object&) { return pearl::Doorbell::nbytes(); })
      .def("value", &Bell::value)
      .def("ring", &Bell::ring)
      .def(
          "wait",
          [](Bell& bell, std::uint32_t seen, double timeout_s) {
            return interruptible(timeout_s, [&](double slice) { return bell.wait(seen, slice); }, is_true);
          },
          py::arg("seen"), py::arg("timeout_s"));

  using Queue = OnBuffer<pearl::SlotQueue>;
  py::class_<Queue>(m, "SlotQueue")
      .def(py::init([](const py::buffer& buffer, std::size_t slots, std::size_t slot_bytes, bool create) {
             return on_buffer<pearl::SlotQueue>(buffer, slots, slot_bytes, create);
           }),
           py::arg("buffer"), py::arg("slots"), py::arg("slot_bytes"), py::arg("create"))
      .def_static("nbytes", &pearl::SlotQueue::nbytes, py::arg("slots"), py::arg("slot_bytes"))
      .def("offset", &Queue::offset, py::arg("slot"))
      .def(
          "reserve",
          [](Queue& queue, double timeout_s) {
            return interruptible(timeout_s, [&](double slice) { return queue.reserve(slice); }, is_slot);
          },
          py::arg("timeout_s") = 0.0)
      .def("publish", &Queue::publish, py::arg("count"))
      .def(
          "peek",
          [](Queue& queue, double timeout_s) {
            return interruptible(timeout_s, [&](double slice) { return queue.peek(slice); }, is_slot);
          },
          py::arg("timeout_s") = 0.0)
      .def("count", &Queue::count, py::arg("slot"))
      .def("release", &Queue::release)
      .def("close", &Queue::close)
      .def_property_readonly("closed", &Queue::closed)
      .def_property_readonly("slots", &Queue::slots)
      .def("size", &Queue::size)
      .def(
          "attach_bell", [](Queue& queue, Bell& bell) { queue.attach_bell(&bell); }, py::arg("bell"),
          py::keep_alive<1, 2>());

  using Shot = OnBuffer<pearl::Snapshot>;
  py::class_<Shot>(m, "Snapshot")
      .def(py::init([](const py::buffer& buffer, std::size_t payload_bytes, bool create) {
             return on_buffer<pearl::Snapshot>(buffer, payload_bytes, create);
           }),
           py::arg("buffer"), py::arg("payload_bytes"), py::arg("create"))
      .def_static("nbytes", &pearl::Snapshot::nbytes, py::arg("payload_bytes"))
      .def_property_readonly("version", &Shot::version)
      .def(
          "write",
          [](Shot& snapshot, const py::buffer& payload) {
            const py::buffer_info info = payload.request();
            if (static_cast<std::size_t>(info.size * info.itemsize) != snapshot.payload_bytes())
              throw pearl::QueueError("A Snapshot's payload must have " + std::to_string(snapshot.payload_bytes()) +
                                      " bytes; found " + std::to_string(info.size * info.itemsize) + ".");
            const Released released;
            return snapshot.write(info.ptr);
          },
          py::arg("payload"))
      .def(
          "read",
          [](const Shot& snapshot, const py::buffer& out, std::uint64_t seen_version) {
            const py::buffer_info info = out.request(true);
            if (static_cast<std::size_t>(info.size * info.itemsize) != snapshot.payload_bytes())
              throw pearl::QueueError("A Snapshot's payload must have " + std::to_string(snapshot.payload_bytes()) +
                                      " bytes; found " + std::to_string(info.size * info.itemsize) + ".");
            const Released released;
            return snapshot.read(info.ptr, seen_version);
          },
          py::arg("out"), py::arg("seen_version"));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of PEARL.";
  py::register_exception_translator(&translate);
  bind_sum_tree(m);
  bind_kernels(m);
  bind_shared(m);
  bind_autorun(m);
  bind_column_store(m);
  bind_episode_links(m);
  m.def("copy_bandwidth", &pearl::copy_bandwidth_gbps, py::arg("nbytes"), py::arg("repeats"),
        py::call_guard<Released>());
  m.def("random_access_ns", &pearl::random_access_ns, py::arg("nbytes"), py::arg("steps"),
        py::call_guard<Released>());
  m.def("cpu_features", &pearl::cpu_features);
}
