// The Python module of the CPU kernels, and the errors it raises. The bindings convert and release Python's lock; they
// hold no logic.

#include <exception>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "bindings.hpp"
#include "pearl/parent_watch.hpp"
#include "pearl/python_errors.hpp"

void bind_kernels(py::module_& m);  // kernel_bindings.cpp
void bind_learner(py::module_& m);  // learner_bindings.cpp
void bind_loop(py::module_& m);     // loop_bindings.cpp
void bind_queues(py::module_& m);   // queue_bindings.cpp
void bind_replay(py::module_& m);   // replay_bindings.cpp
void bind_storage(py::module_& m);  // storage_bindings.cpp

namespace {

// A training step allocates and frees the same large tensors each time. By default glibc gives them back to the system,
// and gets them again page by page; of the arenas of other threads than the first, it gives back each empty heap of 64 MB
// whatever it is told. Hence one arena, for all threads that start later.
//
// That does not contend on many cores: the threads that allocate while a step runs are the Learner's, the host's and
// autograd's, however many cores there are. torch's and PEARL's workers run loops over memory that is there, Actors are
// processes of their own, and blocks of up to 1 KB come from each thread's own cache without the arena's lock.
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
  py::register_exception_translator(&pearl::translate_exception);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("end_with_parent", &pearl::end_with_parent, py::arg("parent"));
  bind_kernels(m);
  bind_learner(m);
  bind_queues(m);
  bind_replay(m);
  bind_storage(m);
  bind_loop(m);
}
