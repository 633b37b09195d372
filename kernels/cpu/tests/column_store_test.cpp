#include "pearl/column_store.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pearl/row_copy.hpp"

namespace {

using namespace pearl;

std::vector<char> noise(std::size_t bytes, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<char> out(bytes);
  for (char& byte : out) byte = static_cast<char>(random());
  return out;
}

void rows_of_every_size_are_copied_whole() {
  constexpr std::size_t kRows = 23;
  std::mt19937 random(1);
  for (const std::size_t bytes : {kWideRow, kWideRow + 1, kWideRow + 63, std::size_t{7056}, std::size_t{28224}}) {
    const std::vector<char> rows = noise(kRows * bytes + 5, 2);
    for (std::size_t count = 0; count < 11; ++count) {
      std::vector<const char*> sources(count);
      std::vector<char> expected;
      for (const char*& source : sources) {
        source = rows.data() + random() % 5 + random() % kRows * bytes;
        expected.insert(expected.end(), source, source + bytes);
      }
      for (const CopyRows copy : copy_rows_variants()) {
        std::vector<char> target(count * bytes + 3, 77);
        copy(sources.data(), count, bytes, target.data() + 1);
        CHECK(std::equal(expected.begin(), expected.end(), target.begin() + 1));
        CHECK(target[0] == 77 && target[count * bytes + 1] == 77);
      }
    }
  }
}

void items_of_every_size_are_gathered() {
  constexpr std::size_t kCapacity = 40;
  const std::vector<std::int64_t> indices = {0, 39, 7, 8, 9, 10, 7, 7, 38, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21, 39};
  for (const std::size_t bytes : {1, 2, 3, 4, 8, 16, 32, 33, 64, 300, 2047, 2048, 7056}) {
    std::vector<char> data = noise(kCapacity * bytes, 3);
    const ColumnStore store(kCapacity, {{data.data(), bytes}});
    std::vector<char> out(indices.size() * bytes);
    store.gather(indices.data(), indices.size(), kCapacity, {out.data()});
    for (std::size_t i = 0; i < indices.size(); ++i) {
      const char* expected = data.data() + static_cast<std::size_t>(indices[i]) * bytes;
      CHECK(std::memcmp(out.data() + i * bytes, expected, bytes) == 0);
    }
    // The same as steps, half of them valid: the others become zero.
    for (const bool at_end : {false, true}) {
      const std::int64_t found[] = {6, 5};
      const Steps steps{indices.data(), found, 2, 11, at_end};
      std::vector<char> taken(22 * bytes, 1);
      store.gather_steps(0, steps, taken.data());
      for (std::size_t i = 0; i < 22; ++i) {
        const std::size_t counted = static_cast<std::size_t>(found[i / 11]);
        const bool counts = at_end ? i % 11 >= 11 - counted : i % 11 < counted;
        for (std::size_t at = 0; at < bytes; ++at)
          CHECK(taken[i * bytes + at] == (counts ? out[i * bytes + at] : 0));
      }
    }
  }
}

void gathers_run_beside_an_insertion_into_other_slots() {
  constexpr std::size_t kCapacity = 128;
  constexpr std::size_t kHalf = kCapacity / 2;
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{100}, std::size_t{4096}}) {
    std::vector<char> data(kCapacity * bytes, 0);
    std::vector<char> other(kCapacity * bytes, 0);
    ColumnStore store(kCapacity, {{data.data(), bytes}, {other.data(), bytes}});
    std::atomic<std::size_t> written{0};  // halves of the ring; readers use the one before the newest
    std::atomic<std::size_t> read{0};
    constexpr std::size_t kTurns = 60;
    std::thread writer([&] {
      for (std::size_t turn = 0; turn < kTurns; ++turn) {
        while (turn > read.load() + 1) std::this_thread::yield();
        const std::vector<char> rows(kHalf * bytes, static_cast<char>(turn + 1));
        store.insert(turn % 2 * kHalf, kHalf, {rows.data(), rows.data()});
        written = turn + 1;
      }
    });
    std::vector<std::int64_t> indices(kHalf);
    std::vector<char> out(kHalf * bytes);
    std::vector<char> out_other(kHalf * bytes);
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
      while (written.load() < turn + 1) std::this_thread::yield();
      for (std::size_t i = 0; i < kHalf; ++i)
        indices[i] = static_cast<std::int64_t>(turn % 2 * kHalf + (i * 37) % kHalf);
      store.gather(indices.data(), kHalf, kCapacity, {out.data(), out_other.data()});
      const std::vector<char> expected(kHalf * bytes, static_cast<char>(turn + 1));
      CHECK(out == expected && out_other == expected);
      read = turn + 1;
    }
    writer.join();
  }
}

}  // namespace

int main() {
  rows_of_every_size_are_copied_whole();
  items_of_every_size_are_gathered();
  gathers_run_beside_an_insertion_into_other_slots();
}
