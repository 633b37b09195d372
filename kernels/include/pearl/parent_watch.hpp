// Ends a process with the one that started it, also while Python's lock is held by an environment that hangs.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "pearl/threads.hpp"

namespace pearl {

// With the process go those that it started: they share its group, unless they left it.
inline void kill_own_group() {
  if (getpgrp() == getpid()) kill(0, SIGKILL);
  kill(getpid(), SIGKILL);
}

// Start a thread that kills the calling process and its group as soon as `parent` is no longer its parent. A thread
// and not PR_SET_PDEATHSIG: that one fires when the thread ends that forked, and reaches this process alone. Throws Error
// where the system has no thread left.
inline void end_with_parent(pid_t parent) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited: signals go to the process's other threads
  try {
    start_thread([parent] {
      constexpr timespec kInterval{0, 200'000'000};
      while (getppid() == parent) nanosleep(&kInterval, nullptr);
      kill_own_group();
    }).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace pearl
