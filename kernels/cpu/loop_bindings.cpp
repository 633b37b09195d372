// Python bindings of the training loop of setting 2.

#include <limits>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "pearl/learner/algorithm.hpp"
#include "pearl/training_loop.hpp"

namespace {

using namespace bindings;

// A loop on the caller's arrays and queues.
struct HeldLoop {
  HeldLoop(pearl::SumTreeReplay& replay, std::vector<py::array> columns_held, pearl::learner::Algorithm& algorithm,
           std::size_t batch_size, OnBuffer<pearl::SlotQueue>& grants, OnBuffer<pearl::SlotQueue>& done,
           OnBuffer<pearl::Snapshot>& snapshot, std::vector<py::array> policy_held, std::size_t interval,
           bool prefetch)
      : columns(std::move(columns_held)),
        policy(std::move(policy_held)),
        storage(store_of(columns)),
        loop(replay, storage, algorithm, batch_size,
             loop_queues(grants, done, snapshot), loop_weights(policy), interval, prefetch) {}

  static pearl::ColumnStore store_of(const std::vector<py::array>& columns) {
    std::vector<pearl::ColumnStore::Column> raw;
    for (const py::array& column : columns) {
      const bool contiguous = (column.flags() & py::array::c_style) != 0;
      if (column.ndim() < 1 || column.shape(0) < 1 || column.shape(0) != columns.front().shape(0) || !contiguous)
        throw pearl::ReplayError("Columns must be contiguous and of one length of at least 1.");
      // The loop only reads them, and Python's views of them may be read-only.
      auto* data = static_cast<char*>(const_cast<void*>(column.data()));
      raw.push_back({data, static_cast<std::size_t>(column.nbytes() / column.shape(0))});
    }
    return {columns.empty() ? 0 : static_cast<std::size_t>(columns.front().shape(0)), std::move(raw)};
  }

  std::vector<py::array> columns;
  std::vector<py::array> policy;
  pearl::ColumnStore storage;
  pearl::TrainingLoop loop;
};

}  // namespace

void bind_loop(py::module_& m) {
  py::class_<HeldLoop> loop(m, "TrainingLoop");
  bind_loop_methods(loop)
      .def(py::init<pearl::SumTreeReplay&, std::vector<py::array>, pearl::learner::Algorithm&, std::size_t,
                    OnBuffer<pearl::SlotQueue>&, OnBuffer<pearl::SlotQueue>&, OnBuffer<pearl::Snapshot>&,
                    std::vector<py::array>, std::size_t, bool>(),
           py::arg("replay"), py::arg("columns"), py::arg("algorithm"), py::arg("batch_size"), py::arg("grants"),
           py::arg("done"), py::arg("snapshot"), py::arg("policy"), py::arg("interval"), py::arg("prefetch") = false,
           py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(),
           py::keep_alive<1, 8>())
      .def("run",
           [](HeldLoop& held) {
             const Released released;
             for (;;) held.loop.run_once(std::numeric_limits<double>::infinity());
           })
      .def(
          "set_banks",
          [](HeldLoop& held, const Array<double>& others) {
            if (others.ndim() != 2 || others.shape(1) != 2)
              throw pearl::ReplayError("Each of the other banks has two numbers, its mass and its least.");
            std::vector<pearl::SampledMass> banks;
            for (py::ssize_t i = 0; i < others.shape(0); ++i) banks.push_back({others.at(i, 0), others.at(i, 1)});
            held.loop.set_banks(std::move(banks));
          },
          py::arg("others"))
      .def("take_least", [](HeldLoop& held) { return held.loop.take_least(); })
      .def("last_batch",
           [](const HeldLoop& held) {
             const pearl::learner::Batch& batch = held.loop.batch();
             const auto rows = static_cast<py::ssize_t>(batch.rows);
             const void* data[] = {batch.obs,      batch.actions,   batch.rewards,
                                   batch.next_obs, batch.discounts, batch.next_masks};
             py::list columns;
             for (std::size_t i = 0; i < held.columns.size(); ++i) {
               const py::array& column = held.columns[i];
               std::vector<py::ssize_t> shape(column.shape(), column.shape() + column.ndim());
               shape[0] = rows;
               columns.append(py::array(column.dtype(), shape, data[i]));
             }
             const Array<std::int64_t> indices(rows, held.loop.indices().data());
             return py::make_tuple(indices, Array<float>(rows, batch.weights), columns);
           });
}
