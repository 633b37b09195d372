// Starts threads; turns the exception at the system's limit into an Error.
#pragma once

#include <cstddef>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace pearl {

// More threads than any machine can use: a larger number is a mistake.
inline constexpr std::size_t kMostThreads = 4096;

// Throws Error naming the limits of this process; `started` of the `wanted` threads had started.
[[noreturn]] void throw_no_thread(const std::system_error& error, std::size_t started, std::size_t wanted);
// Throws Error unless 1 <= count <= kMostThreads.
void check_threads(const char* name, std::size_t count);

// A thread that runs `work`; throws Error if the system has none left.
template <class Work>
std::thread start_thread(Work work) {
  try {
    return std::thread(std::move(work));
  } catch (const std::system_error& error) {
    throw_no_thread(error, 0, 1);
  }
}

// Adds threads until there are `wanted`, each running work(its index). Throws Error if the system has none left; the
// caller must stop and join those already started, which are in `threads`.
template <class Work>
void start_threads(std::vector<std::thread>& threads, std::size_t wanted, Work work) {
  threads.reserve(wanted);
  while (threads.size() < wanted) {
    try {
      threads.emplace_back(work, threads.size());
    } catch (const std::system_error& error) {
      throw_no_thread(error, threads.size(), wanted);
    }
  }
}

}  // namespace pearl
