// Kernels that run without Python's lock, the GIL.
#pragma once

#include <pybind11/pybind11.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#include <unistd.h>
#endif

namespace bindings {

// Without the GIL while an object of this type lives, like py::gil_scoped_release. But where the interpreter ends
// meanwhile, Python ends the threads that want the GIL back, by unwinding their stack; out of a destructor, that would
// abort the process. Such a thread, always a daemon, sleeps here until the process has ended, as from Python 3.14 on.
class Released {
 public:
  Released() : thread_(PyEval_SaveThread()) {}
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;
  ~Released() {
#if defined(__GLIBCXX__)
    try {
      PyEval_RestoreThread(thread_);
    } catch (abi::__forced_unwind&) {
      for (;;) ::pause();
    }
#else
    PyEval_RestoreThread(thread_);
#endif
  }

 private:
  PyThreadState* thread_;
};

}  // namespace bindings
