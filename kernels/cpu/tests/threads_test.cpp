// If the system has no thread left, an Error is thrown and the process continues.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "pearl/errors.hpp"
#include "pearl/learner/team.hpp"
#include "pearl/replay_autorun.hpp"
#include "pearl/sum_tree_replay.hpp"
#include "pearl/worker_pool.hpp"

namespace {

using namespace pearl;

constexpr unsigned kWanted = 64;

// Calls `check` in a child limited to 12 threads; root must become nobody first, since the limit ignores root.
template <class Check>
void with_few_threads(Check check) {
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    const rlimit few{12, 12};
    bool ready = ::setrlimit(RLIMIT_NPROC, &few) == 0;
    if (::getuid() == 0) ready = ready && ::setgid(65534) == 0 && ::setuid(65534) == 0;
    if (ready) check();
    ::_exit(ready ? 0 : 77);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return;  // not allowed here
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

template <class Call>
void refuses(Call call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(std::strstr(error.what(), "ulimit -u") != nullptr);
    return;
  }
  CHECK(false);
}

void teams_are_refused() {
  refuses([] { const learner::Team team(kWanted); });
  learner::Team small(2);  // the threads started for the large team have ended
  int called[2] = {};
  auto work = [&](std::size_t worker) { called[worker] = 1; };
  small.run(work);
  CHECK(called[0] == 1 && called[1] == 1);
}

void pools_are_refused() {
  WorkerPool pool(kWanted);
  refuses([&] { pool.run(1000, [](std::size_t) {}); });
  refuses([&] { pool.start(); });
}

void autoruns_are_refused() {
  SumTreeReplay replay(64, 16, 0.6, 0);
  std::vector<std::unique_ptr<ReplayAutorun>> autoruns;
  refuses([&] {
    for (unsigned i = 0; i < kWanted; ++i) autoruns.push_back(std::make_unique<ReplayAutorun>(replay, 8, 2));
  });
  CHECK(!autoruns.empty());
  const std::int64_t index = 3;
  CHECK(autoruns[0]->write_insert(&index, nullptr, 1, 1.0) && autoruns[0]->drain(10.0));
}

void absurd_numbers_are_refused() {
  CHECK(throws<Error>([] { const learner::Team team(0); }));
  CHECK(throws<Error>([] { const learner::Team team(std::size_t{1} << 40); }));
  CHECK(throws<Error>([] { const WorkerPool pool(4'000'000'000u); }));
}

}  // namespace

int main() {
  with_few_threads(teams_are_refused);
  with_few_threads(pools_are_refused);
  with_few_threads(autoruns_are_refused);
  absurd_numbers_are_refused();
}
