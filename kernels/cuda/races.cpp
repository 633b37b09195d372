#include "races.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <string_view>
#include <unordered_map>

namespace pearl::emulator::races {

thread_local const Runner* running = nullptr;

namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::size_t kWord = 4;  // bytes that are looked at together
constexpr std::size_t kPageWords = 64;

// Of some bytes of a word.
struct Access {
  std::int32_t code = 0;  // from kOrigin
  std::uint32_t block = 0;
  std::uint16_t thread = 0;  // of the block
  std::uint8_t bytes = 0;    // a bit for each
  Kind kind = Kind::read;
  std::uint16_t warp_waits = 0, block_waits = 0, cluster_waits = 0;
};
const char* const kOrigin = reinterpret_cast<const char*>(&note);
constexpr std::uint8_t kAllBytes = (1u << kWord) - 1;

// Two accesses are enough where more do not matter to each other, if they are as far apart as possible: what comes after
// both without a race is behind a barrier of all threads between them.
using Pair = std::array<Access, 2>;

// The last write of each byte of a word, and what has come after.
struct Word {
  std::array<Access, kWord> writes;
  bool whole = false;  // they are one
  Pair reads, atomic_reads, atomic_writes;
};

struct Page {
  std::uint64_t launch = 0;
  std::array<Word, kPageWords> words;
};

struct Found {
  std::unordered_map<std::uintptr_t, Page> pages;
  struct {
    std::uintptr_t number;
    Page* page;
  } recent[256] = {};
  std::uint64_t launch = 1;
  std::string race;
};
thread_local Found state;

Page& page_of(std::uintptr_t number) {
  auto& [recent, page] = state.recent[number % std::size(state.recent)];
  if (page == nullptr || recent != number) {
    recent = number;
    page = &state.pages[number];
  }
  if (page->launch != state.launch) *page = {state.launch, {}};
  return *page;
}

bool same_thread(const Access& a, const Access& b) { return a.block == b.block && a.thread == b.thread; }

// 0: the same thread; 1: of a warp; 2: of a block; 3: of a cluster; 4: of the launch.
int distance(const Access& a, const Access& b) {
  if (a.block == b.block) return a.thread == b.thread ? 0 : a.thread / kWarp == b.thread / kWarp ? 1 : 2;
  return a.block / running->cluster == b.block / running->cluster ? 3 : 4;
}

// Whether what `before` did is done when `now` begins.
bool ordered(const Access& before, const Access& now) {
  if (before.kind == Kind::copy) return now.kind == Kind::copied && same_thread(before, now);
  switch (distance(before, now)) {
    case 0: return true;
    case 1:
      if (before.warp_waits < now.warp_waits) return true;
      [[fallthrough]];
    case 2:
      if (before.block_waits < now.block_waits) return true;
      [[fallthrough]];
    case 3: return before.cluster_waits < now.cluster_waits;
    default: return false;
  }
}

constexpr std::string_view kNames[] = {"read",      "written",  "read atomically", "written atomically",
                                       "copied to", "copied to"};

// `module`: the file of the code, which this adds.
std::string described(const Access& access, std::string& module) {
  Dl_info place{};
  std::size_t at = 0;  // in the module, before where the call returns to
  if (dladdr(kOrigin, &place) != 0 && place.dli_fname != nullptr) {
    module = place.dli_fname;
    at = static_cast<std::size_t>(kOrigin + access.code - static_cast<const char*>(place.dli_fbase)) - 1;
  }
  char text[160];
  std::snprintf(text, sizeof text, "%s by thread %u of block %u (0x%zx)", kNames[static_cast<int>(access.kind)].data(),
                access.thread, access.block, at);
  return text;
}

void check(const Access& before, const Access& now, const void* memory) {
  if ((before.bytes & now.bytes) == 0 || ordered(before, now) || !state.race.empty()) return;
  std::string module;
  const std::string first = described(before, module), second = described(now, module);
  char at[32];
  std::snprintf(at, sizeof at, "%p", memory);
  state.race = std::string("A race: memory at ") + at + " is " + first + " and " + second +
               " with no barrier between them. Where: addr2line -Cfipe " + module + " ADDRESS";
}

void keep(Pair& pair, const Access& access) {
  const auto replaces = [&](const Access& held) {
    return held.bytes == 0 || ((held.bytes & ~access.bytes) == 0 && ordered(held, access));
  };
  auto& [a, b] = pair;
  if (replaces(a)) {
    a = access;
    if (b.bytes != 0 && replaces(b)) b = {};
  } else if (replaces(b) || distance(a, access) > distance(a, b)) {
    b = access;
  }
}

void note_word(Word& word, const Access& now, const void* memory) {
  const bool atomic = now.kind == Kind::atomic_read || now.kind == Kind::atomic_write;
  const bool writes = now.kind != Kind::read && now.kind != Kind::atomic_read;
  for (std::size_t byte = 0; byte < (word.whole ? 1 : kWord); ++byte) check(word.writes[byte], now, memory);
  const auto check_all = [&](const Pair& pair) {
    for (const Access& before : pair) check(before, now, memory);
  };
  if (writes) check_all(word.reads);
  if (writes && !atomic) check_all(word.atomic_reads);
  if (!atomic) check_all(word.atomic_writes);
  switch (now.kind) {
    case Kind::read: return keep(word.reads, now);
    case Kind::atomic_read: return keep(word.atomic_reads, now);
    case Kind::atomic_write: return keep(word.atomic_writes, now);
    default: break;
  }
  for (std::size_t byte = 0; byte < kWord; ++byte)
    if ((now.bytes >> byte & 1u) != 0) word.writes[byte] = now;
  word.whole = now.bytes == kAllBytes;
  for (Pair* const pair : {&word.reads, &word.atomic_reads, &word.atomic_writes})
    for (Access& before : *pair)
      if ((before.bytes & ~now.bytes) == 0) before = {};
}

}  // namespace

void begin_launch() {
  ++state.launch;
  state.race.clear();
  constexpr std::size_t kMostPages = 1 << 13;
  if (state.pages.size() > kMostPages) {
    state.pages.clear();
    for (auto& recent : state.recent) recent = {};
  }
}

void forget(const void* memory, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory) / kWord;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(memory) + bytes + kWord - 1) / kWord;
  for (std::uintptr_t word = begin; word < end;) {
    const std::uintptr_t number = word / kPageWords, next = std::min(end, (number + 1) * kPageWords);
    const auto page = state.pages.find(number);
    for (; word < next; ++word)
      if (page != state.pages.end()) page->second.words[word % kPageWords] = {};
  }
}

void note(Kind kind, const void* memory, std::size_t bytes, const void* code) {
  const Runner* const runner = running;
  if (runner == nullptr || bytes == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
  const auto stack = reinterpret_cast<std::uintptr_t>(runner->stack);
  if (begin >= stack && begin < stack + runner->stack_bytes) return;
  const auto place = static_cast<std::int32_t>(static_cast<const char*>(code) - kOrigin);
  for (std::uintptr_t word = begin / kWord; word * kWord < end; ++word) {
    const std::uintptr_t first = std::max(begin, word * kWord) % kWord,
                         last = std::min(end, (word + 1) * kWord) - word * kWord;
    const auto mask = static_cast<std::uint8_t>((1u << last) - (1u << first));
    note_word(page_of(word / kPageWords).words[word % kPageWords],
              {place, runner->block, runner->thread, mask, kind, runner->warp_waits, runner->block_waits,
               runner->cluster_waits},
              memory);
  }
}

const std::string& found() { return state.race; }

}  // namespace pearl::emulator::races

// What GCC calls for each access where it compiles with -fsanitize=thread.
#ifdef PEARL_RACES

namespace {

using pearl::emulator::races::Kind;
using pearl::emulator::races::note;

}  // namespace

#define PEARL_HOOKS(bytes)                                                                                        \
  void __tsan_read##bytes(void* at) { note(Kind::read, at, bytes, __builtin_return_address(0)); }                 \
  void __tsan_write##bytes(void* at) { note(Kind::write, at, bytes, __builtin_return_address(0)); }               \
  void __tsan_unaligned_read##bytes(void* at) { note(Kind::read, at, bytes, __builtin_return_address(0)); }       \
  void __tsan_unaligned_write##bytes(void* at) { note(Kind::write, at, bytes, __builtin_return_address(0)); }     \
  void __tsan_volatile_read##bytes(void* at) { note(Kind::atomic_read, at, bytes, __builtin_return_address(0)); } \
  void __tsan_volatile_write##bytes(void* at) { note(Kind::atomic_write, at, bytes, __builtin_return_address(0)); }

extern "C" {

PEARL_HOOKS(1)
PEARL_HOOKS(2)
PEARL_HOOKS(4)
PEARL_HOOKS(8)
PEARL_HOOKS(16)
void __tsan_read_range(void* at, unsigned long bytes) { note(Kind::read, at, bytes, __builtin_return_address(0)); }
void __tsan_write_range(void* at, unsigned long bytes) { note(Kind::write, at, bytes, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void**, void*) {}

}  // extern "C"

#endif
