#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pearl/aligned.hpp"
#include "pearl/doorbell.hpp"
#include "pearl/errors.hpp"
#include "pearl/slot_queue.hpp"
#include "pearl/snapshot.hpp"

namespace {

using namespace pearl;

void messages_arrive_in_order_and_whole() {
  constexpr std::size_t kSlots = 3;
  constexpr std::size_t kBytes = 200;
  constexpr std::uint64_t kMessages = 20000;
  AlignedArray<char> memory(SlotQueue::nbytes(kSlots, kBytes));
  AlignedArray<char> bell_memory(Doorbell::nbytes());
  Doorbell bell(bell_memory.data(), bell_memory.size());
  SlotQueue producer(memory.data(), memory.size(), kSlots, kBytes, true);
  SlotQueue consumer(memory.data(), memory.size(), kSlots, kBytes, false);
  producer.attach_bell(&bell);
  std::thread writer([&] {
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      const std::int64_t slot = producer.reserve(10.0);
      CHECK(slot >= 0);
      std::memset(memory.data() + producer.offset(static_cast<std::size_t>(slot)), static_cast<int>(i & 0xFF), kBytes);
      producer.publish(i);
    }
    producer.close();
  });
  std::uint64_t received = 0;
  bool closed = false;
  while (!closed) {
    const std::uint32_t seen = bell.value();
    std::int64_t slot = -1;
    try {
      while ((slot = consumer.peek(0.0)) >= 0) {
        const auto at = static_cast<std::size_t>(slot);
        CHECK(consumer.count(at) == received);
        for (std::size_t i = 0; i < kBytes; ++i)
          CHECK(memory[consumer.offset(at) + i] == static_cast<char>(received & 0xFF));
        consumer.release();
        ++received;
      }
      CHECK(bell.wait(seen, 10.0));
    } catch (const QueueClosedError&) {
      closed = true;
    }
  }
  writer.join();
  CHECK(received == kMessages);
  CHECK(throws<QueueClosedError>([&] { producer.reserve(0.0); }));
}

void all_messages_are_awaited() {
  AlignedArray<char> bell_memory(Doorbell::nbytes());
  Doorbell bell(bell_memory.data(), bell_memory.size());
  AlignedArray<char> memory(SlotQueue::nbytes(1, 8)), other_memory(SlotQueue::nbytes(1, 8));
  SlotQueue first(memory.data(), memory.size(), 1, 8, true);
  SlotQueue second(other_memory.data(), other_memory.size(), 1, 8, true);
  first.attach_bell(&bell);
  second.attach_bell(&bell);
  const std::vector<const SlotQueue*> both = {&first, &second};
  CHECK(SlotQueue::wait_for_all({}, bell, 0.0) && !SlotQueue::wait_for_all(both, bell, 0.01));
  for (int round = 0; round < 200; ++round) {
    std::thread one([&] { first.publish(0); }), other([&] { second.publish(0); });
    CHECK(SlotQueue::wait_for_all(both, bell, 60.0) && first.size() == 1 && second.size() == 1);
    one.join();
    other.join();
    first.release();
    CHECK(!SlotQueue::wait_for_all(both, bell, 0.0));
    second.release();
  }
  first.publish(0);
  std::thread closing([&] { second.close(); });
  CHECK(SlotQueue::wait_for_all(both, bell, 60.0));
  closing.join();
}

void closing_wakes_both_sides() {
  AlignedArray<char> memory(SlotQueue::nbytes(1, 8));
  SlotQueue queue(memory.data(), memory.size(), 1, 8, true);
  std::thread waiting([&] { CHECK(throws<QueueClosedError>([&] { queue.peek(60.0); })); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  queue.close();
  waiting.join();
}

void an_unpublished_slot_is_reserved_again() {
  AlignedArray<char> memory(SlotQueue::nbytes(2, 8));
  SlotQueue first(memory.data(), memory.size(), 2, 8, true);
  CHECK(throws<QueueError>([&] { first.release(); }));  // of a slot that was never published
  CHECK(first.reserve(0.0) == 0);
  SlotQueue successor(memory.data(), memory.size(), 2, 8, false);
  CHECK(successor.reserve(0.0) == 0);
  successor.publish(1);
  CHECK(successor.reserve(0.0) == 1);
  successor.publish(2);
  CHECK(successor.reserve(0.0) == -1 && successor.size() == 2);
  CHECK(throws<QueueError>([&] { successor.publish(3); }));
}

void other_layouts_are_refused() {
  AlignedArray<char> memory(SlotQueue::nbytes(2, 64));
  CHECK(throws<QueueError>([&] { SlotQueue(memory.data(), memory.size(), 2, 64, false); }));
  SlotQueue queue(memory.data(), memory.size(), 2, 64, true);
  CHECK(throws<QueueError>([&] { SlotQueue(memory.data(), memory.size(), 2, 32, false); }));
  CHECK(throws<QueueError>([&] { SlotQueue(memory.data(), memory.size() - 1, 2, 64, true); }));
  CHECK(throws<QueueError>([&] { Snapshot(memory.data(), memory.size(), 16, false); }));
  CHECK(throws<QueueError>([&] { Doorbell(memory.data(), memory.size()); }));
}

void readers_never_see_a_torn_payload() {
  constexpr std::size_t kBytes = 1003;
  constexpr std::uint64_t kVersions = 20000;
  AlignedArray<char> memory(Snapshot::nbytes(kBytes));
  Snapshot writer(memory.data(), memory.size(), kBytes, true);
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      Snapshot reader(memory.data(), memory.size(), kBytes, false);
      std::vector<unsigned char> payload(kBytes);
      std::uint64_t seen = 0;
      while (seen < kVersions) {
        const std::uint64_t version = reader.read(payload.data(), seen);
        if (version == seen) {
          std::this_thread::yield();
          continue;
        }
        CHECK(version > seen);
        seen = version;
        for (const unsigned char byte : payload) CHECK(byte == (version & 0xFF));
      }
    });
  }
  std::vector<unsigned char> payload(kBytes);
  for (std::uint64_t version = 1; version <= kVersions; ++version) {
    std::memset(payload.data(), static_cast<int>(version & 0xFF), kBytes);
    CHECK(writer.write(payload.data()) == version);
  }
  for (auto& reader : readers) reader.join();
}

void a_payload_in_place_is_whole_until_the_version_after_the_next() {
  const char* payloads[] = {"first...", "second..", "third..."};
  AlignedArray<char> memory(Snapshot::nbytes(8));
  Snapshot writer(memory.data(), memory.size(), 8, true);
  const std::uint64_t version = writer.write(payloads[0]);
  const char* place = memory.data() + writer.offset(version);
  CHECK(std::memcmp(place, payloads[0], 8) == 0 && writer.holds(version));
  writer.write(payloads[1]);
  CHECK(std::memcmp(place, payloads[0], 8) == 0 && writer.holds(version));
  writer.begin_write();
  CHECK(!writer.holds(version) && writer.holds(version + 1));
  CHECK(writer.write(payloads[2]) == version + 2);
  CHECK(std::memcmp(place, payloads[2], 8) == 0 && !writer.holds(version) && writer.holds(version + 2));
}

}  // namespace

int main() {
  messages_arrive_in_order_and_whole();
  all_messages_are_awaited();
  closing_wakes_both_sides();
  an_unpublished_slot_is_reserved_again();
  other_layouts_are_refused();
  readers_never_see_a_torn_payload();
  a_payload_in_place_is_whole_until_the_version_after_the_next();
}
