// Holds the Replay Manager's pipeline on an FPGA to a plain search: fills it, draws, and compares every slot.
#include "replay.hpp"  // generated

#include <cstdint>
#include <iostream>
#include <vector>

#ifdef PEARL_FPGA_HARDWARE
const auto selector = sycl::ext::intel::fpga_selector_v;
#else
const auto selector = sycl::ext::intel::fpga_emulator_selector_v;
#endif

int main() {
  constexpr std::uint32_t kSlots = PEARL_CAPACITY;
  constexpr std::uint32_t kBatch = 256;
  const sycl::device device(selector);
  const sycl::context context(device);
  const auto queue = [&] { return sycl::queue(context, device, sycl::property::queue::in_order{}); };
  std::vector<sycl::queue> stages;
  for (int i = 0; i < kStages; ++i) stages.push_back(queue());
  sycl::queue feeding = queue(), collecting = queue();
  constexpr std::uint32_t kMost = kSlots > kBatch ? kSlots : kBatch;
  auto* const command = sycl::malloc_host<Command>(1, feeding);
  auto* const items = sycl::malloc_host<Item>(kMost, feeding);
  auto* const held = sycl::malloc_host<Held>(kMost, feeding);
  auto* const weights = sycl::malloc_host<float>(kMost, feeding);
  auto* const summary = sycl::malloc_host<Summary>(1, feeding);
  launch_stages(stages);

  const auto request = [&](Operation operation, std::uint64_t count, std::uint64_t call) {
    *command = Command{};
    command->operation = operation;
    command->count = count;
    command->seed = 7;
    command->call = call;
    command->stratified = true;
    command->scale = pearl::kDefaultScale;
    command->alpha_q28 = pearl::exponent_q28(1.0);
    feeding.single_task<pearl_replay_feed_kernel>([=] { pearl_replay_feed(command, items, nullptr); });
    collecting
        .single_task<pearl_replay_collect_kernel>([=] { pearl_replay_collect(command, held, weights, summary, nullptr); })
        .wait();
  };

  std::vector<std::uint64_t> ends;  // inclusive prefix sums
  std::uint64_t total = 0;
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    const float priority = static_cast<float>(slot % 100) / 64.0f;
    items[slot] = Item{0, slot, std::bit_cast<std::uint32_t>(priority), slot + 1};
    total += pearl::quantise(priority, pearl::exponent_q28(1.0), pearl::kDefaultScale);
    ends.push_back(total);
  }
  request(Operation::insert, kSlots, 0);
  int wrong = summary->change != total || summary->added != kSlots;
  for (std::uint64_t call = 0; call < 4; ++call) {
    request(Operation::sample, kBatch, call);
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      const std::uint64_t target =
          pearl::mulhi64(pearl::uniform_at(7, call, i, pearl::stratum_width(kBatch)), total);
      std::uint32_t slot = 0;
      while (ends[slot] <= target) ++slot;
      wrong += held[i].slot != slot;
    }
  }
  request(Operation::stop, 1, 0);
  for (sycl::queue& stage : stages) stage.wait();
  std::cout << (wrong == 0 ? "all slots as expected\n" : "FAILED\n");
  return wrong != 0;
}
