// The Python module of the CPU kernels, and the errors it raises. The bindings convert and release Python's lock; they
// hold no logic.

#include <exception>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "bindings.hpp"

void bind_kernels(py::module_& m);  // kernel_bindings.cpp
void bind_learner(py::module_& m);  // learner_bindings.cpp
void bind_loop(py::module_& m);     // loop_bindings.cpp
void bind_queues(py::module_& m);   // queue_bindings.cpp
void bind_replay(py::module_& m);   // replay_bindings.cpp
void bind_storage(py::module_& m);  // storage_bindings.cpp

namespace {

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
  } catch (const pearl::LearnerError& error) {
    raise("TrainerError", error);
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

// A training step allocates and frees the same large tensors each time. By default glibc gives them back to the system,
// and gets them again page by page; what it keeps for each thread, it gives back whatever it is told. For all threads
// that start later.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of PEARL.";
  py::register_exception_translator(&translate);
  m.def("keep_freed_memory", &keep_freed_memory);
  bind_kernels(m);
  bind_learner(m);
  bind_queues(m);
  bind_replay(m);
  bind_storage(m);
  bind_loop(m);
}
