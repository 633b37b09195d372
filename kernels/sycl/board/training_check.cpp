// Compares Replay Manager and Learner, joined on one FPGA, with a plain search and plain C++: iterations of setting 2,
// and whether their priorities arrive in the tree.
#include "program.hpp"  // generated

#include "learner_host.hpp"
#include "replay_host.hpp"

int main() {
  constexpr std::uint32_t kSlots = design::kCapacity, kRows = design::kRows;
  Board board(kStages);
  ReplayHost replay(board, std::max(kSlots, kRows));
  LearnerHost learner(board, kSlots);
  PlainReplay plain(kSlots);
  Verdict verdict;
  sycl::queue finishing = board.queue();
  LearnerContext* const context = learner.context;
  fill(replay, plain, kSlots, verdict);
  for (std::uint64_t call = 0; call < 2; ++call) {
    const std::vector<std::uint32_t> slots = plain.sample(call, kRows);
    const std::vector<double> weights = plain.weights(slots);
    learner.prepare(kRows);
    replay.request(Operation::sample, kRows, call, context);
    for (std::uint32_t row = 0; row < kRows; ++row) {
      verdict.require(replay.held[row].slot == slots[row], "a slot");
      verdict.require(std::abs(replay.weights[row] - weights[row]) < 1e-4, "a weight");
    }
    verdict.require(replay.request(Operation::update, kRows, call, context).applied == kRows, "updates");
    finishing.single_task<pearl_learner_finish_kernel>([=] { pearl_learner_finish(context); }).wait();
    verdict.require(context->unfit == 0, "whether priorities fit the scale");
    learner.compare(slots, weights, verdict);
    for (std::uint32_t row = 0; row < kRows; ++row) plain.set(slots[row], context->priorities[row]);
  }
  replay.request(Operation::stop, 1);
  board.join();
  return verdict.say();
}
