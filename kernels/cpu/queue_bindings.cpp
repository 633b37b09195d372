// Python bindings of shared structures (doorbells, queues, snapshots) and of the machine's probes.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "pearl/doorbell.hpp"
#include "pearl/probes.hpp"
#include "pearl/slot_queue.hpp"
#include "pearl/snapshot.hpp"

namespace {

using namespace bindings;

template <class T, class... Args>
std::unique_ptr<OnBuffer<T>> on_buffer(const py::buffer& buffer, Args... args) {
  return std::make_unique<OnBuffer<T>>(whole_buffer(buffer, "The buffer", true), args...);
}

// A buffer of a Snapshot's payload.
py::buffer_info payload_of(const pearl::Snapshot& snapshot, const py::buffer& buffer, bool writable) {
  py::buffer_info info = whole_buffer(buffer, "A Snapshot's payload", writable);
  if (static_cast<std::size_t>(info.size * info.itemsize) != snapshot.payload_bytes())
    throw pearl::QueueError("A Snapshot's payload must have " + std::to_string(snapshot.payload_bytes()) +
                            " bytes; found " + std::to_string(info.size * info.itemsize) + ".");
  return info;
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

  m.def(
      "wait_for_all",
      [](const std::vector<Queue*>& queues, Bell& bell, double timeout_s) {
        const std::vector<const pearl::SlotQueue*> awaited(queues.begin(), queues.end());
        if (std::count(awaited.begin(), awaited.end(), nullptr) > 0)
          throw py::type_error("None is no queue to wait for.");
        return interruptible(
            timeout_s, [&](double slice) { return pearl::SlotQueue::wait_for_all(awaited, bell, slice); }, is_true);
      },
      py::arg("queues"), py::arg("bell"), py::arg("timeout_s"));

  using Shot = OnBuffer<pearl::Snapshot>;
  py::class_<Shot>(m, "Snapshot")
      .def(py::init([](const py::buffer& buffer, std::size_t payload_bytes, bool create) {
             return on_buffer<pearl::Snapshot>(buffer, payload_bytes, create);
           }),
           py::arg("buffer"), py::arg("payload_bytes"), py::arg("create"))
      .def_static("nbytes", &pearl::Snapshot::nbytes, py::arg("payload_bytes"))
      .def_property_readonly("version", &Shot::version)
      .def("offset", &Shot::offset, py::arg("version"))
      .def("holds", &Shot::holds, py::arg("version"))
      .def(
          "write",
          [](Shot& snapshot, const py::buffer& payload) {
            const py::buffer_info info = payload_of(snapshot, payload, false);
            const Released released;
            return snapshot.write(info.ptr);
          },
          py::arg("payload"))
      .def(
          "read",
          [](const Shot& snapshot, const py::buffer& out, std::uint64_t seen_version) {
            const py::buffer_info info = payload_of(snapshot, out, true);
            const Released released;
            return snapshot.read(info.ptr, seen_version);
          },
          py::arg("out"), py::arg("seen_version"));
}

void bind_probes(py::module_& m) {
  m.def(
      "copy_bandwidth",
      [](std::size_t nbytes, int repeats) {
        if (nbytes < 1 || repeats < 1) throw pearl::Error("nbytes and repeats must be at least 1.");
        return pearl::copy_bandwidth_gbps(nbytes, repeats);
      },
      py::arg("nbytes"), py::arg("repeats"), py::call_guard<Released>());
  m.def("random_access_ns", &pearl::random_access_ns, py::arg("nbytes"), py::arg("steps"),
        py::call_guard<Released>());
}

}  // namespace

void bind_queues(py::module_& m) {
  bind_shared(m);
  bind_probes(m);
}
