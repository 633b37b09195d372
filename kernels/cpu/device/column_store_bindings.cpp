#include "pearl/device/bindings.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pearl/device/column_store.hpp"
#include "pearl/column_store.hpp"
#include "pearl/device/queue.hpp"
#include "pearl/python_arrays.hpp"

namespace pearl::device {
namespace {

using namespace bindings;

// The dtype and shape of a column's rows.
struct Form {
  PyObject* dtype;                 // never released: the store may be destroyed on a thread without the GIL
  std::vector<py::ssize_t> shape;  // of one row
};

class Store final : public ColumnStore {
 public:
  Store(std::shared_ptr<DeviceQueue> queue, std::size_t capacity, std::vector<std::size_t> row_bytes,
        std::vector<Form> given, Placement placement)
      : ColumnStore(std::move(queue), capacity, std::move(row_bytes), placement), forms(std::move(given)) {}
  const std::vector<Form> forms;
};

// `rows` rows, in new memory or at `data`, which `owner` keeps alive.
py::array array_of(const Form& form, std::size_t rows, void* data = nullptr, const py::object& owner = {}) {
  std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(rows)};
  shape.insert(shape.end(), form.shape.begin(), form.shape.end());
  return py::array(py::reinterpret_borrow<py::dtype>(form.dtype), std::move(shape), data, owner);
}

// Pointers to `count` rows of every column. Throws ReplayError for arrays that do not fit.
std::vector<const void*> rows_of(const Store& store, const std::vector<py::array>& columns, std::size_t count) {
  if (columns.size() != store.forms.size())
    throw ReplayError("An insertion has " + std::to_string(store.forms.size()) + " columns; found " +
                      std::to_string(columns.size()) + ".");
  std::vector<const void*> rows;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const py::array& column = columns[i];
    const Form& form = store.forms[i];
    const bool fits = column.ndim() == static_cast<py::ssize_t>(form.shape.size()) + 1 &&
                      static_cast<std::size_t>(column.shape(0)) >= count &&
                      std::equal(form.shape.begin(), form.shape.end(), column.shape() + 1) &&
                      (column.flags() & py::array::c_style) != 0 &&
                      py::detail::npy_api::get().PyArray_EquivTypes_(column.dtype().ptr(), form.dtype);
    if (!fits)
      throw ReplayError("Column " + std::to_string(i) + " to insert must be contiguous, with the store's dtype and " +
                        "shape, and have at least " + std::to_string(count) + " rows.");
    rows.push_back(column.data());
  }
  return rows;
}

// The columns of a batch in the device's memory.
py::list views_of(const Store& store, const std::shared_ptr<RowBatch>& batch) {
  py::list columns;
  for (std::size_t i = 0; i < store.forms.size(); ++i) {
    const Form& form = store.forms[i];
    std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(batch->count())};
    shape.insert(shape.end(), form.shape.begin(), form.shape.end());
    auto type = py::reinterpret_borrow<py::dtype>(form.dtype).attr("str").cast<std::string>();
    columns.append(DeviceView{batch, batch->column(i), std::move(type), std::move(shape)});
  }
  return columns;
}

py::capsule owner_of(std::shared_ptr<RowBatch> batch) {
  return py::capsule(new std::shared_ptr<RowBatch>(std::move(batch)),
                     [](void* held) { delete static_cast<std::shared_ptr<RowBatch>*>(held); });
}

}  // namespace

void bind_column_store(py::module_& module) {
  py::class_<ColumnStore, std::shared_ptr<ColumnStore>> base(module, "Columns", py::module_local());
  py::class_<Store, ColumnStore, std::shared_ptr<Store>>(module, "ColumnStore", py::module_local(),
                                                         "The columns of a Data Storage on a queue's device.")
      .def(py::init([](const std::shared_ptr<DeviceQueue>& queue, std::size_t capacity,
                       const std::vector<std::pair<py::dtype, std::vector<py::ssize_t>>>& columns, bool pinned) {
             if (capacity < 1 || columns.empty())
               throw ReplayError("A Data Storage needs at least one slot and one column.");
             std::vector<std::size_t> row_bytes;
             std::vector<Form> forms;
             for (const auto& [dtype, shape] : columns) {
               if (dtype.attr("hasobject").cast<bool>()) throw ReplayError("Columns cannot hold Python objects.");
               std::size_t bytes = static_cast<std::size_t>(dtype.itemsize());
               for (const py::ssize_t size : shape) {
                 if (size < 0)
                   throw ReplayError("A column's dimensions must be at least 0; found " + std::to_string(size) + ".");
                 bytes = bytes_of(bytes, static_cast<std::size_t>(size));
               }
               row_bytes.push_back(bytes);
               forms.push_back({dtype.inc_ref().ptr(), shape});
             }
             const Released released;
             return std::make_shared<Store>(queue, capacity, std::move(row_bytes), std::move(forms),
                                            pinned ? Placement::pinned : Placement::device);
           }),
           py::arg("queue").none(false), py::arg("capacity"), py::arg("columns"), py::arg("pinned") = false)
      .def(
          "insert",
          [](Store& store, std::size_t start, std::size_t count, const std::vector<py::array>& columns) {
            if (start >= store.capacity() || count > store.capacity())
              throw ReplayError("An insertion must fit the columns' " + std::to_string(store.capacity()) + " rows.");
            const std::vector<const void*> rows = rows_of(store, columns, count);
            const Released released;
            store.insert(start, count, rows);
          },
          py::arg("start"), py::arg("count"), py::arg("columns"),
          "Copy the first `count` rows of contiguous arrays to the rows from `start` on, around the ring's end.")
      .def(
          "gather",
          [](Store& store, const Array<std::int64_t>& indices) {
            const std::size_t count = bindings::rows(indices, "indices");
            const std::int64_t* slots = indices.data();
            check_stored(slots, count, store.capacity());
            std::shared_ptr<RowBatch> batch;
            {
              const Released released;
              batch = store.gather(slots, count);
            }
            py::list columns;
            const py::capsule owner = owner_of(batch);
            for (std::size_t i = 0; i < store.forms.size(); ++i)
              columns.append(array_of(store.forms[i], count, batch->column(i), owner));
            return columns;
          },
          py::arg("indices").noconvert(), "The rows at the indices, in memory that host and device share.")
      .def(
          "gather_there",
          [](const std::shared_ptr<Store>& store, const Array<std::int64_t>& indices) {
            const std::size_t count = bindings::rows(indices, "indices");
            const std::int64_t* slots = indices.data();
            check_stored(slots, count, store->capacity());
            std::shared_ptr<RowBatch> batch;
            {
              const Released released;
              batch = store->gather(slots, count, Placement::device);
            }
            return views_of(*store, batch);
          },
          py::arg("indices").noconvert(), "The rows at the indices, in the device's memory.")
      .def(
          "batch_there",
          [](Store& store, std::size_t count) { return views_of(store, store.shared_device_batch(count)); },
          py::arg("count"), "Where SumTree.launch_draw gathers batches of `count` rows, in the device's memory.")
      .def(
          "read",
          [](const Store& store, std::size_t column, std::size_t count) {
            if (column >= store.forms.size() || count > store.capacity())
              throw ReplayError("There are " + std::to_string(store.forms.size()) + " columns of " +
                                std::to_string(store.capacity()) + " rows.");
            py::array rows = array_of(store.forms[column], count);
            void* data = rows.mutable_data();
            {
              const Released released;
              store.read(column, count, data);
            }
            return rows;
          },
          py::arg("column"), py::arg("count"), "A copy of the first `count` rows of a column.")
      .def(
          "read_batch",
          [](Store& store, std::size_t count) {
            const RowBatch& batch = store.device_batch(count);
            py::list columns;
            for (std::size_t i = 0; i < store.forms.size(); ++i) {
              py::array rows = array_of(store.forms[i], batch.room());
              store.queue()->copy(batch.column(i), rows.mutable_data(), batch.room() * store.row_bytes()[i]);
              columns.append(std::move(rows));
            }
            return columns;
          },
          py::arg("count"), "Copies of the batch last gathered on the device, padded to a multiple of 16 rows.")
      .def("close", &ColumnStore::close, py::call_guard<Released>());
}

}  // namespace pearl::device
