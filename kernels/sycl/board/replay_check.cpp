// Compares the Replay Manager's pipeline on an FPGA with a plain search: fills it, draws, and compares every slot.
#include "program.hpp"  // generated

#include "replay_host.hpp"

int main() {
  constexpr std::uint32_t kSlots = design::kCapacity, kBatch = 256;
  Board board(kStages);
  ReplayHost replay(board, std::max(kSlots, kBatch));
  PlainReplay plain(kSlots);
  Verdict verdict;
  fill(replay, plain, kSlots, verdict);
  for (std::uint64_t call = 0; call < 4; ++call) {
    replay.request(Operation::sample, kBatch, call);
    const std::vector<std::uint32_t> slots = plain.sample(call, kBatch);
    for (std::uint32_t i = 0; i < kBatch; ++i) verdict.require(replay.held[i].slot == slots[i], "a slot");
  }
  replay.request(Operation::stop, 1);
  board.join();
  return verdict.say();
}
