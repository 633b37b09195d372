// The Python module of the CPU kernels. The bindings only convert arguments and release the GIL.

#include <exception>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "bindings.hpp"
#include "pearl/parent_watch.hpp"
#include "pearl/python_errors.hpp"

void bind_averaging(py::module_& m);  // averaging_bindings.cpp
void bind_gae(py::module_& m);        // gae_bindings.cpp
void bind_learner(py::module_& m);    // learner_bindings.cpp
void bind_loop(py::module_& m);       // loop_bindings.cpp
void bind_ppo(py::module_& m);        // ppo_bindings.cpp
void bind_queues(py::module_& m);     // queue_bindings.cpp
void bind_replay(py::module_& m);     // replay_bindings.cpp
void bind_storage(py::module_& m);    // storage_bindings.cpp

namespace {

// A training step allocates and frees the same large tensors each time. By default glibc returns them to the system and
// gets them back page by page. Arenas other than the first return each empty heap of 64 MB whatever the settings; hence
// one arena for all threads that start later.
//
// One arena does not contend on many cores: during a step only the Learner's, the host's and autograd's threads
// allocate. torch's and PEARL's workers loop over existing memory, Actors are separate processes, and blocks of up to
// 1 KB come from each thread's own cache without the arena's lock.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value allowed
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of PEARL.";
  py::register_exception_translator(&pearl::translate_exception);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("end_with_parent", &pearl::end_with_parent, py::arg("parent"));
  bind_gae(m);
  bind_learner(m);
  bind_ppo(m);
  bind_queues(m);
  bind_averaging(m);  // which takes a Snapshot
  bind_replay(m);
  bind_storage(m);
  bind_loop(m);
}
