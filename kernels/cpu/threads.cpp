#include "pearl/threads.hpp"

#include <string>

#include "pearl/errors.hpp"

#if defined(__linux__)
#include <sys/resource.h>
#endif

namespace pearl {
namespace {

#if defined(__linux__)
std::string limit_of(int resource, std::size_t unit) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return "unlimited";
  return std::to_string(limit.rlim_cur / unit);
}
#endif

}  // namespace

void throw_no_thread(const std::system_error& error, std::size_t started, std::size_t wanted) {
  std::string message = "The system refused to start a thread (" + error.code().message() + "): " +
                        std::to_string(started) + " of " + std::to_string(wanted) + " were started.";
#if defined(__linux__)
  message += " Limits: " + limit_of(RLIMIT_NPROC, 1) + " processes and threads of this user (ulimit -u), " +
             limit_of(RLIMIT_AS, 1024) + " KiB of address space (ulimit -v), and pids.max of a container.";
#endif
  throw Error(message + " Raise the limit that is reached, or ask for fewer threads, workers or actors.");
}

void check_threads(const char* name, std::size_t count) {
  if (count < 1 || count > kMostThreads)
    throw Error(std::string(name) + " must lie in [1, " + std::to_string(kMostThreads) + "]; found " +
                std::to_string(count) + ".");
}

}  // namespace pearl
