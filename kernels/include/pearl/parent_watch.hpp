// Ends a process when its parent ends, even while a hanging environment holds the GIL.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "pearl/threads.hpp"

namespace pearl {

// Kills the process and those that it started: they share its group unless they left it.
inline void kill_own_group() {
  if (getpgrp() == getpid()) kill(0, SIGKILL);
  kill(getpid(), SIGKILL);
}

// Starts a thread that kills the calling process and its group when `parent` is no longer its parent. Not
// PR_SET_PDEATHSIG, which fires when the forking thread ends and reaches only this process. Throws Error if the system
// has no thread left.
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
