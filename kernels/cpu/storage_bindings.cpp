// Python bindings of the Data Storage: its columns, and the links between the steps of an episode.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "pearl/column_store.hpp"
#include "pearl/episode_links.hpp"

namespace {

using namespace bindings;

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

}  // namespace

void bind_storage(py::module_& m) {
  bind_column_store(m);
  bind_episode_links(m);
}
