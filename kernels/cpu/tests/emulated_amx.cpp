// Emulates AMX, for tests on processors that have AVX-512 but no AMX. AMX's instructions are illegal there, and a handler
// of SIGILL does what they would do. A test gets this by linking with --wrap of amx::granted. Sanitizers check what an
// emulated tile loads and stores; what a real one does they do not see.
#include "../learner/amx.hpp"

#if defined(PEARL_AMX)

#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using pearl::learner::amx::TileShapes;

constexpr std::size_t kTiles = 8, kRows = 16, kRowBytes = 64;

// What touches tiles alone is not checked by sanitizers: it would take most of a test's time.
#define EMULATED_SIMD \
  __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"), no_sanitize("address", "undefined")))

// Of a thread: not set up where `palette` is 0.
struct Tiles {
  TileShapes shapes;
  alignas(64) std::uint8_t numbers[kTiles][kRows][kRowBytes];
};
thread_local Tiles tiles = [] {
  Tiles made{};
  made.shapes.palette = 0;
  return made;
}();

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "Emulated AMX: %s.\n", what);
  std::abort();
}

constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// An instruction with a VEX prefix of three bytes. Of memory: the first row, and how far rows are apart.
struct Instruction {
  std::uint8_t code, prefix;          // 0: none, 1: 66, 2: F3, 3: F2
  std::size_t reg, operand, further;  // registers: of ModRM's two fields, and of VEX
  bool of_memory;
  std::uint8_t* memory;
  std::ptrdiff_t stride;
  std::size_t size;
};

template <class Number>
std::ptrdiff_t number_at(const std::uint8_t* at) {
  Number found;
  std::memcpy(&found, at, sizeof found);
  return static_cast<std::ptrdiff_t>(found);
}

const std::uint8_t* next_of(const gregset_t& registers) {
  return reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]);
}
bool is_of_tiles(const std::uint8_t* at) {
  const bool has_prefix = at[0] == 0xC4 && (at[1] & 0x1F) == 2 && (at[2] & 0x84) == 0;
  return has_prefix && (at[3] == 0x49 || at[3] == 0x4B || at[3] == 0x5C);
}

Instruction decoded(const gregset_t& registers) {
  const std::uint8_t* const at = next_of(registers);
  if (!is_of_tiles(at)) fail("an illegal instruction of another kind");
  const auto high = [at](std::uint8_t bit) -> std::size_t { return (at[1] & bit) == 0 ? 8 : 0; };  // kept inverted
  const std::uint8_t mod = at[4] >> 6, rm = at[4] & 7;
  Instruction found{};
  found.code = at[3];
  found.prefix = at[2] & 3;
  found.reg = (at[4] >> 3 & 7) + high(0x80);
  found.operand = rm + high(0x20);
  found.further = ~at[2] >> 3 & 15;
  found.of_memory = mod != 3;
  found.size = 5;
  if (!found.of_memory) return found;
  const auto held = [&registers](std::size_t number) -> std::ptrdiff_t { return registers[kRegisters[number]]; };
  std::ptrdiff_t address = 0;
  bool has_base = true;
  std::size_t base = found.operand;
  if (rm == 4) {
    const std::uint8_t sib = at[found.size++];
    const std::size_t index = (sib >> 3 & 7) + high(0x40);
    if (index != 4) found.stride = held(index) * (std::ptrdiff_t{1} << (sib >> 6));
    base = (sib & 7) + high(0x20);
    has_base = mod != 0 || (sib & 7) != 5;
  } else {
    has_base = mod != 0 || rm != 5;
  }
  if (has_base) address = held(base);
  if (mod == 1) address += number_at<std::int8_t>(at + found.size);
  if (mod == 2 || !has_base) address += number_at<std::int32_t>(at + found.size);
  found.size += mod == 1 ? 1 : mod == 2 || !has_base ? 4 : 0;
  if (rm == 5 && mod == 0) address += reinterpret_cast<std::ptrdiff_t>(at + found.size);  // relative to what follows
  found.memory = reinterpret_cast<std::uint8_t*>(address);
  return found;
}

std::size_t bytes_of(std::size_t tile) { return tiles.shapes.bytes[tile]; }
std::size_t rows_of(std::size_t tile) { return tiles.shapes.rows[tile]; }

// Numbers too small for a normal float32 count as zeros.
EMULATED_SIMD __m512 normal(__m512 x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f), _CMP_NLT_UQ);
  return _mm512_maskz_mov_ps(is_normal, x);
}

// Of pairs of bfloat16 numbers, the lower and the upper ones.
EMULATED_SIMD void halves_of(__m512i pairs, __m512& lower, __m512& upper) {
  lower = normal(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
  upper = normal(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)))));
}

// Each sum gets one number: what the products of the pairs' lower numbers add up to, and those of their upper ones.
EMULATED_SIMD void multiply(std::size_t to, std::size_t left, std::size_t right) {
  const std::size_t rows = rows_of(to), steps = rows_of(right);
  if (rows_of(left) != rows || bytes_of(left) != steps * sizeof(float) || bytes_of(right) != bytes_of(to))
    fail("tiles whose shapes do not match");
  __m512 lower[kRows], upper[kRows];
  for (std::size_t k = 0; k < steps; ++k) halves_of(_mm512_load_si512(tiles.numbers[right][k]), lower[k], upper[k]);
  for (std::size_t m = 0; m < rows; ++m) {
    __m512 of_lower = _mm512_setzero_ps(), of_upper = _mm512_setzero_ps();
    for (std::size_t k = 0; k < steps; ++k) {
      int pair;
      std::memcpy(&pair, &tiles.numbers[left][m][k * sizeof pair], sizeof pair);
      __m512 first, second;
      halves_of(_mm512_set1_epi32(pair), first, second);
      of_lower = normal(_mm512_fmadd_ps(first, lower[k], of_lower));
      of_upper = normal(_mm512_fmadd_ps(second, upper[k], of_upper));
    }
    const __m512 sums = normal(_mm512_add_ps(of_lower, of_upper));
    _mm512_store_ps(tiles.numbers[to][m], normal(_mm512_add_ps(_mm512_load_ps(tiles.numbers[to][m]), sums)));
  }
}

void execute(const Instruction& instruction) {
  const bool of_shapes = instruction.code == 0x49 && instruction.prefix == 0;
  if (of_shapes && instruction.of_memory) {  // ldtilecfg
    std::memcpy(&tiles.shapes, instruction.memory, sizeof tiles.shapes);
    if (tiles.shapes.palette != 1) fail("a palette other than 1");
    std::memset(tiles.numbers, 0, sizeof tiles.numbers);
    return;
  }
  if (of_shapes) {  // tilerelease
    tiles.shapes.palette = 0;
    return;
  }
  if (tiles.shapes.palette != 1) fail("tiles are used that were not set up");
  std::uint8_t (*const numbers)[kRowBytes] = tiles.numbers[instruction.reg];
  if (instruction.code == 0x49 && instruction.prefix == 3 && !instruction.of_memory) {  // tilezero
    std::memset(numbers, 0, sizeof tiles.numbers[0]);
  } else if (instruction.code == 0x4B && instruction.prefix == 3) {  // tileloadd
    std::memset(numbers, 0, sizeof tiles.numbers[0]);
    for (std::size_t row = 0; row < rows_of(instruction.reg); ++row)
      std::memcpy(numbers[row], instruction.memory + static_cast<std::ptrdiff_t>(row) * instruction.stride,
                  bytes_of(instruction.reg));
  } else if (instruction.code == 0x4B && instruction.prefix == 2) {  // tilestored
    for (std::size_t row = 0; row < rows_of(instruction.reg); ++row)
      std::memcpy(instruction.memory + static_cast<std::ptrdiff_t>(row) * instruction.stride, numbers[row],
                  bytes_of(instruction.reg));
  } else if (instruction.code == 0x5C && instruction.prefix == 2 && !instruction.of_memory) {  // tdpbf16ps
    multiply(instruction.reg, instruction.operand, instruction.further);
  } else {
    fail("an instruction that is not emulated");
  }
}

// Also executes the tile instructions that follow at once: with a signal for each, tests take twice as long.
void handle(int, siginfo_t*, void* context) {
  gregset_t& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  do {
    const Instruction instruction = decoded(registers);
    execute(instruction);
    registers[REG_RIP] += static_cast<greg_t>(instruction.size);
  } while (is_of_tiles(next_of(registers)));
}

}  // namespace

extern "C" {

// amx::granted and what stands in for it, by the linker's --wrap.
bool __real__ZN5pearl7learner3amx7grantedEv();
bool __wrap__ZN5pearl7learner3amx7grantedEv() {
  if (__real__ZN5pearl7learner3amx7grantedEv()) return true;
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGILL, &action, nullptr) == 0;
}
}

#endif
