// Python bindings of the Data Storage: its columns, and the links between the steps of an episode.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "pearl/column_store.hpp"
#include "pearl/episode_links.hpp"

namespace {

using namespace bindings;

// Columns with their names in Python, so that one call handles a dictionary of arrays.
struct NamedColumns {
  explicit NamedColumns(const py::dict& columns) : store(0, {}) {
    std::vector<pearl::ColumnStore::Column> raw;
    py::ssize_t capacity = 0;
    for (const auto& [key, value] : columns) {
      const auto array = value.cast<py::array>();
      if (array.ndim() < 1 || array.shape(0) < 1 || (capacity && array.shape(0) != capacity) || !contiguous(array))
        throw pearl::ReplayError("Columns must be contiguous and of one length of at least 1.");
      if (holds_objects(array)) throw pearl::ReplayError("Columns cannot hold Python objects.");
      capacity = array.shape(0);
      fields.push_back({py::str(key), array});
      raw.push_back({static_cast<char*>(fields.back().column.mutable_data()),
                     static_cast<std::size_t>(array.nbytes() / capacity)});
    }
    if (raw.empty()) throw pearl::ReplayError("A Data Storage needs a column.");
    store = pearl::ColumnStore(static_cast<std::size_t>(capacity), std::move(raw));
  }

  struct Field {
    py::str name;
    py::array column;
  };

  static bool contiguous(const py::array& array) { return (array.flags() & py::array::c_style) != 0; }

  static bool same_type(const py::array& a, const py::array& b) {
    PyObject* const type = py::detail::array_proxy(a.ptr())->descr;
    PyObject* const other = py::detail::array_proxy(b.ptr())->descr;
    return type == other || py::detail::npy_api::get().PyArray_EquivTypes_(type, other);
  }

  std::size_t index(const py::handle& name) const {
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (fields[i].name.equal(name)) return i;
    throw pearl::ReplayError("There is no column " + py::repr(name).cast<std::string>() + ".");
  }

  // `count` items of column `i`, not initialised.
  py::array empty(std::size_t i, py::ssize_t count) const {
    const py::array& column = fields[i].column;
    py::ssize_t shape[64];  // NumPy's own limit
    std::copy(column.shape(), column.shape() + column.ndim(), shape);
    shape[0] = count;
    return new_array(column.dtype(), static_cast<int>(column.ndim()), shape);
  }

  // The array of column `i` in `arrays`; null unless it is contiguous and its items have the column's shape and type.
  PyObject* matching(std::size_t i, const py::dict& arrays) const {
    PyObject* found = PyDict_GetItemWithError(arrays.ptr(), fields[i].name.ptr());
    if (found == nullptr || !py::isinstance<py::array>(found)) return nullptr;
    const auto array = py::reinterpret_borrow<py::array>(found);
    const py::array& column = fields[i].column;
    const bool fits = array.ndim() == column.ndim() && contiguous(array) &&
                      std::equal(column.shape() + 1, column.shape() + column.ndim(), array.shape() + 1) &&
                      same_type(array, column);
    return fits ? found : nullptr;
  }

  // Whether an array has memory of the columns, as views of them do: an insertion would overwrite it before reading it.
  bool in_columns(const py::array& array) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(array.data());
    return std::any_of(fields.begin(), fields.end(), [&](const Field& field) {
      const auto from = reinterpret_cast<std::uintptr_t>(field.column.data());
      return begin < from + static_cast<std::size_t>(field.column.nbytes()) &&
             from < begin + static_cast<std::size_t>(array.nbytes());
    });
  }

  // Rows to insert. Holds the arrays: without the GIL, another thread may remove them from the caller's dictionary.
  struct Sources {
    std::vector<py::array> held;
    std::vector<const void*> raw;
  };

  // The first `count` rows to insert into each column, from `sources`; nothing unless all fit.
  std::optional<Sources> rows_of(const py::dict& sources, py::ssize_t count) const {
    if (sources.size() != fields.size()) return std::nullopt;
    Sources found;
    found.held.reserve(fields.size());
    found.raw.reserve(fields.size());
    for (std::size_t i = 0; i < fields.size(); ++i) {
      PyObject* source = matching(i, sources);
      if (source == nullptr) return std::nullopt;
      found.held.push_back(py::reinterpret_borrow<py::array>(source));
      if (found.held.back().shape(0) < count) return std::nullopt;
      if (in_columns(found.held.back())) found.held.back() = found.held.back().attr("copy")();
      found.raw.push_back(found.held.back().data());
    }
    return found;
  }

  pearl::ColumnStore store;
  std::vector<Field> fields;
};

using Slots = Array<std::int64_t>;

// The memory of an array to gather `nbytes` into.
char* gather_target(py::array& target, std::size_t nbytes) {
  if (!NamedColumns::contiguous(target) || holds_objects(target) || static_cast<std::size_t>(target.nbytes()) != nbytes)
    throw pearl::ReplayError("Arrays to gather into must be contiguous and of the column's shape.");
  return static_cast<char*>(target.mutable_data());
}

void bind_column_store(py::module_& m) {
  py::class_<NamedColumns>(m, "ColumnStore")
      .def(py::init<const py::dict&>(), py::arg("columns"))
      .def(
          "insert",
          [](NamedColumns& columns, py::ssize_t start, py::ssize_t count, const py::dict& sources) -> py::object {
            const auto capacity = static_cast<py::ssize_t>(columns.store.capacity());
            if (start < 0 || start >= capacity) throw pearl::ReplayError("An insertion must fit the columns.");
            const auto rows = columns.rows_of(sources, count);
            if (count < 0 || count > capacity || !rows) return py::none();
            auto slots = new_vector<std::int64_t>(count);
            std::int64_t* taken = slots.mutable_data();
            {
              const Released released;
              columns.store.insert(static_cast<std::size_t>(start), static_cast<std::size_t>(count), rows->raw);
              const py::ssize_t before_end = std::min(count, capacity - start);
              std::iota(taken, taken + before_end, start);
              std::iota(taken + before_end, taken + count, 0);
            }
            return slots;
          },
          py::arg("start"), py::arg("count"), py::arg("sources"))
      .def(
          "gather",
          [](const NamedColumns& columns, const Slots& indices, py::ssize_t size,
             const std::optional<py::dict>& out) -> py::object {
            const std::size_t count = rows(indices, "indices");
            if (size < 0 || size > static_cast<py::ssize_t>(columns.store.capacity()))
              throw pearl::ReplayError("A gather must fit the columns.");
            if (out && out->size() != columns.fields.size()) return py::none();
            py::dict targets;
            std::vector<void*> raw(columns.fields.size());
            for (std::size_t i = 0; i < raw.size(); ++i) {
              py::array target;
              if (out) {
                PyObject* given = columns.matching(i, *out);
                if (given == nullptr) return py::none();
                target = py::reinterpret_borrow<py::array>(given);
                if (target.shape(0) != indices.size() || !target.writeable()) return py::none();
              } else {
                target = columns.empty(i, indices.size());
              }
              raw[i] = target.mutable_data();
              targets[columns.fields[i].name] = std::move(target);
            }
            {
              const Released released;
              columns.store.gather(indices.data(), count, static_cast<std::size_t>(size), raw);
            }
            return targets;
          },
          py::arg("indices").noconvert(), py::arg("size"), py::arg("out"));
}

void bind_episode_links(py::module_& m) {
  using Links = pearl::EpisodeLinks;
  struct Held {
    std::vector<py::array> arrays;  // the caller's dictionary may change
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
             if (capacity < 1 || streams < 1) throw pearl::ReplayError("Links need at least one slot and one stream.");
             if (static_cast<bool>(kept_obs) ? !obs : static_cast<bool>(obs) != static_cast<bool>(next_obs))
               throw pearl::ReplayError("Give obs together with either next_obs or kept_obs.");
             std::vector<py::array> held;
             const auto raw = [&](const char* name, py::ssize_t size, auto type) {
               using T = decltype(type);
               auto array = arrays[name].cast<py::array>();
               if (!py::isinstance<Array<T>>(array) || array.size() != size)
                 throw pearl::ReplayError(std::string("The links' ") + name + " must be contiguous and have " +
                                          std::to_string(size) + " items.");
               held.push_back(array);
               return static_cast<T*>(array.mutable_data());
             };
             const auto whole = [&](const char* name) { return raw(name, capacity, std::int64_t{}); };
             const Links::Arrays a{whole("next"), whole("prev"), whole("episode"), whole("position"),
                                   raw("ending", capacity, std::uint8_t{}),
                                   kept_obs ? whole("kept") : nullptr, whole("last"), whole("stream"),
                                   whole("tail"), whole("free_episodes"), kept_obs ? whole("free_kept") : nullptr,
                                   slice ? whole("starts") : nullptr, slice ? whole("start_place") : nullptr,
                                   raw("open", streams, std::int64_t{}), raw("resumed", streams, std::int64_t{}),
                                   raw("awaited", streams, std::int64_t{}),
                                   raw("counters", Links::kCounters, std::int64_t{})};
             py::ssize_t bytes = 0;
             for (const auto* column : {&obs, &next_obs, &kept_obs}) {
               if (!*column) continue;
               if ((*column)->ndim() < 1 || (*column)->shape(0) != capacity || (bytes && bytes != (*column)->nbytes()) ||
                   !NamedColumns::contiguous(**column) || holds_objects(**column))
                 throw pearl::ReplayError("The observations must be contiguous columns of one shape.");
               bytes = (*column)->nbytes();
               held.push_back(**column);
             }
             const auto data = [](const std::optional<py::array>& array) {
               return array ? static_cast<const char*>(array->data()) : nullptr;
             };
             char* kept = kept_obs ? static_cast<char*>(py::array(*kept_obs).mutable_data()) : nullptr;
             auto links = std::make_unique<Links>(a, static_cast<std::size_t>(capacity),
                                                  static_cast<std::size_t>(streams), slice,
                                                  static_cast<std::size_t>(bytes / capacity), data(obs),
                                                  data(next_obs), kept);
             return std::make_unique<Held>(Held{std::move(held), std::move(links)});
           }),
           py::arg("arrays"), py::arg("slice"), py::arg("obs"), py::arg("next_obs"), py::arg("kept_obs"))
      .def(
          "insert",
          [](Held& held, std::size_t start, std::size_t filled, const Slots& streams,
             const Array<std::uint8_t>& endings, const std::optional<Slots>& positions,
             const std::optional<py::array>& obs, const std::optional<py::array>& next_obs, NamedColumns* columns,
             const std::optional<py::dict>& sources) {
            const std::size_t count = rows(streams, "streams");
            rows(endings, "endings", streams.size());
            if (start >= held.links->capacity() || count > held.links->capacity() || filled > held.links->capacity())
              throw pearl::ReplayError("An insertion must fit the slots.");
            if (held.links->compares() && !(obs && next_obs))
              throw pearl::ReplayError("An insertion needs obs and next_obs.");
            const auto data = [&](const std::optional<py::array>& array) {
              if (array && (!NamedColumns::contiguous(*array) ||
                            static_cast<std::size_t>(array->nbytes()) != count * held.links->obs_bytes()))
                throw pearl::ReplayError("Observations to insert must be contiguous and of the column's shape.");
              return array ? static_cast<const char*>(array->data()) : nullptr;
            };
            const Links::Rows from{streams.data(), endings.data(), data_or_null(positions, "positions", count),
                                   data(obs), data(next_obs)};
            NamedColumns::Sources from_sources;
            if (columns) {
              auto found = sources ? columns->rows_of(*sources, static_cast<py::ssize_t>(count)) : std::nullopt;
              if (!found || columns->store.capacity() != held.links->capacity())
                throw pearl::ReplayError("Rows to insert must be contiguous and of the column's shape.");
              from_sources = std::move(*found);
            }
            const Released released;
            held.links->insert(start, count, filled, from, [&] {
              if (columns) columns->store.insert(start, count, from_sources.raw);
            });
          },
          py::arg("start"), py::arg("filled"), py::arg("streams").noconvert(), py::arg("endings").noconvert(),
          py::arg("positions").noconvert(), py::arg("obs"), py::arg("next_obs"), py::arg("columns"),
          py::arg("sources"))
      .def(
          "damage",
          [](const Held& held, std::size_t size, std::size_t cursor) {
            if (size > held.links->capacity() || cursor >= held.links->capacity())
              throw pearl::ReplayError("size and cursor must fit the slots.");
            const Released released;
            return pearl::damage_of(*held.links, size, cursor);
          },
          py::arg("size"), py::arg("cursor"), "What is wrong with links that come from a file; \"\" if nothing is.")
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
            {
              const Released released;
              held.links->walk(indices.data(), count, static_cast<std::size_t>(length), back, slots.mutable_data(),
                               found.mutable_data(), [] {});
            }
            return py::make_tuple(std::move(slots), std::move(found));
          },
          py::arg("indices").noconvert(), py::arg("size"), py::arg("length"), py::arg("back"))
      .def(
          "gather_steps",
          [checked](const Held& held, const NamedColumns& columns, const Slots& indices, py::ssize_t size, bool back,
                    bool repeat, Slots& slots, Array<bool>& mask, const py::dict& targets,
                    const std::optional<py::array>& next_target) {
            const std::size_t count = checked(held, indices, size);
            if (slots.ndim() != 2 || slots.shape(0) != indices.size() || slots.shape(1) < 1 ||
                mask.ndim() != 2 || mask.shape(0) != slots.shape(0) || mask.shape(1) != slots.shape(1) ||
                columns.store.capacity() != held.links->capacity())
              throw pearl::ReplayError("Slots and mask of steps must have the shape (items, length).");
            std::vector<py::array> kept_alive;  // as in NamedColumns::Sources
            const auto raw = [&](py::array target, std::size_t item_bytes) {
              kept_alive.push_back(target);
              return gather_target(target, static_cast<std::size_t>(slots.size()) * item_bytes);
            };
            std::vector<std::pair<std::size_t, char*>> into;
            for (const auto& [name, target] : targets) {
              const std::size_t i = columns.index(name);
              into.emplace_back(i, raw(target.cast<py::array>(), columns.store.columns()[i].item_bytes));
            }
            if (next_target && !held.links->keeps_apart())
              throw pearl::ReplayError("Next observations are not kept apart.");
            char* next = next_target ? raw(*next_target, held.links->obs_bytes()) : nullptr;
            Slots found(indices.size());
            const auto length = static_cast<std::size_t>(slots.shape(1));
            std::int64_t* to = slots.mutable_data();
            bool* counted = mask.mutable_data();
            const pearl::Steps steps{to, found.data(), count, length, back};
            const std::vector<std::int64_t> whole(repeat ? count : 0, slots.shape(1));
            const pearl::Steps copied{to, repeat ? whole.data() : found.data(), count, length, back};
            const auto copy = [&] {
              for (const auto& [i, target] : into) columns.store.gather_steps(i, copied, target);
              if (next == nullptr) return;
              held.links->copy_next(to, count * length, next);
              pearl::clear_steps(copied, held.links->obs_bytes(), next);
            };
            {
              const Released released;
              held.links->walk(indices.data(), count, length, back, to, found.mutable_data(), copy);
              pearl::mask_steps(steps, counted);
            }
            return found;
          },
          py::arg("columns"), py::arg("indices").noconvert(), py::arg("size"), py::arg("back"),
          py::arg("repeat"), py::arg("slots").noconvert(), py::arg("mask").noconvert(), py::arg("targets"),
          py::arg("next_target"))
      .def(
          "endings",
          [checked](const Held& held, const Slots& indices, py::ssize_t size) {
            const std::size_t count = checked(held, indices, size);
            auto out = new_vector<std::uint8_t>(indices.size());
            held.links->endings(indices.data(), count, out.mutable_data());
            return out;
          },
          py::arg("indices").noconvert(), py::arg("size"))
      .def(
          "n_step",
          [checked](const Held& held, const Slots& indices, py::ssize_t size, const py::array& reward,
                    const Array<double>& discounts) {
            const std::size_t count = checked(held, indices, size);
            const bool single = py::isinstance<Array<float>>(reward);
            if (reward.ndim() != 1 || reward.shape(0) != static_cast<py::ssize_t>(held.links->capacity()) ||
                !(single || py::isinstance<Array<double>>(reward)))
              throw pearl::ReplayError("Rewards to sum must be float32 or float64, one for each item.");
            if (discounts.size() < 2) throw pearl::ReplayError("n must be at least 1.");
            const std::size_t n = rows(discounts, "discounts") - 1;
            auto sum = new_vector<float>(indices.size());
            Slots last(indices.size());
            Slots steps(indices.size());
            auto discount = new_vector<float>(indices.size());
            const auto run = [&](const auto* rewards) {
              const Released released;
              held.links->n_step(indices.data(), count, n, rewards, discounts.data(), sum.mutable_data(),
                                 last.mutable_data(), steps.mutable_data(), discount.mutable_data());
            };
            if (single)
              run(static_cast<const float*>(reward.data()));
            else
              run(static_cast<const double*>(reward.data()));
            return py::make_tuple(std::move(sum), std::move(last), std::move(steps), std::move(discount));
          },
          py::arg("indices").noconvert(), py::arg("size"), py::arg("reward"), py::arg("discounts").noconvert())
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
            if (!held.links->keeps_apart()) throw pearl::ReplayError("Next observations are not kept apart.");
            char* raw = gather_target(target, count * held.links->obs_bytes());
            const Released released;
            held.links->gather_next(indices.data(), count, raw);
          },
          py::arg("indices").noconvert(), py::arg("size"), py::arg("target"));
}

}  // namespace

void bind_storage(py::module_& m) {
  bind_column_store(m);
  bind_episode_links(m);
}
