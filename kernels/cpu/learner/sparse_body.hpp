// Products that leave out zeros, for kernels_body.hpp's vectors, of layers whose widths are multiples of 64.
//
// Behind a ReLU, half of the numbers are zeros, and more in many trained networks. So here vectors run over a layer's
// outputs: for each transition, only rows of the weights with a nonzero input are added up, in time proportional to the
// number of such inputs. The products are those of a dense product without the zeros, added in another order. An
// infinite weight of an input that is zero gives no NaN.
//
// Needs, besides what kernels_body.hpp does:
//
//   bits_above(a)      bit i: whether lane i is above zero
//   bits_nonzero(a)    bit i: whether it is no zero, as is a NaN
//   keep_bits(a, bits) zero where a bit is not set
//   spread_number(x)   spread(x), where loads of vectors are what is waited for
//   spread_short(x)    spread(x) of an int16 number
//   nonzero_shorts(x)  bit i: whether number i of 16 is no zero
//   lowest_bit(bits)   the number of the lowest bit that is set, 64 without any

constexpr std::size_t kSparse = 64;          // inputs and outputs of a part of a layer
constexpr std::size_t kWidestSparse = 4096;  // of all of them
constexpr std::size_t kWide = 1024;          // of all of them, beyond which memory is the bottleneck
constexpr std::size_t kSparseVectors = kSparse / kLanes;
constexpr std::size_t kTogether = kSparseVectors <= 4 ? 4 : 1;  // transitions that share a load of weights
constexpr std::size_t kLeastTransitions = 16;                   // from which on this gains (measured)
constexpr std::size_t kMostOf16 = 13;  // most nonzero numbers of 16: with more, a dense product is faster

using SparseRow = float[kSparse];

// The numbers of a row, 64 of them, as vectors.
template <std::size_t Vectors = kSparseVectors>
PEARL_INLINE void load_row(const float* from, F* row) {
#pragma GCC unroll 16
  for (std::size_t v = 0; v < Vectors; ++v) row[v] = load(from + v * kLanes);
}
template <std::size_t Vectors = kSparseVectors>
PEARL_INLINE void zero_row(F* row) {
#pragma GCC unroll 16
  for (std::size_t v = 0; v < Vectors; ++v) row[v] = zero();
}
PEARL_INLINE void scale_row(F* row, F factor) {
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kSparseVectors; ++v) row[v] *= factor;
}
template <std::size_t Vectors = kSparseVectors>
PEARL_INLINE void rectify_row(F* row) {
#pragma GCC unroll 16
  for (std::size_t v = 0; v < Vectors; ++v) row[v] = max(row[v], zero());
}
template <std::size_t Vectors = kSparseVectors>
PEARL_INLINE void store_row(float* to, const F* row) {
#pragma GCC unroll 16
  for (std::size_t v = 0; v < Vectors; ++v) store(to + v * kLanes, row[v]);
}
PEARL_INLINE void scale_numbers(float* numbers, F factor) {
  F row[kSparseVectors];
  load_row(numbers, row);
  scale_row(row, factor);
  store_row(numbers, row);
}
PEARL_INLINE std::uint64_t row_above(const F* row) {
  std::uint64_t bits = 0;
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kSparseVectors; ++v) bits |= std::uint64_t{bits_above(row[v])} << (v * kLanes);
  return bits;
}
PEARL_INLINE std::uint64_t row_nonzero(const F* row) {
  std::uint64_t bits = 0;
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kSparseVectors; ++v) bits |= std::uint64_t{bits_nonzero(row[v])} << (v * kLanes);
  return bits;
}
PEARL_INLINE void keep_in_row(F* row, std::uint64_t bits) {
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kSparseVectors; ++v)
    row[v] = keep_bits(row[v], static_cast<std::uint32_t>(bits >> (v * kLanes)) & ((std::uint32_t{1} << kLanes) - 1));
}

// Rows of `Row` numbers, one behind the other. Row 64 is zero.
template <std::size_t Row = kSparse>
struct NextRows {
  const float* rows;

  static std::size_t number(std::size_t i) { return i; }
  PEARL_INLINE const float* row(std::size_t i) const { return rows + i * Row; }
  PEARL_INLINE F vector(const float* row, std::size_t v) const { return load(row + v * kLanes); }
};
// The same, where number 64 may not be read.
template <std::size_t Row>
struct NextRowsOnly : NextRows<Row> {
  static std::size_t number(std::size_t i) { return i % kSparse; }
};
// Rows anywhere, whose second half lies `gap` floats behind the first. There is no row 64; its number is zero.
struct RunsAt {
  const float* const* runs;
  std::size_t from;
  std::ptrdiff_t gap;

  static std::size_t number(std::size_t i) { return i; }
  PEARL_INLINE const float* row(std::size_t i) const { return runs[i % kSparse] + from; }
  PEARL_INLINE F vector(const float* row, std::size_t v) const {
    constexpr std::size_t kFirst = kSparseVectors / 2;
    return v < kFirst ? load(row + v * kLanes) : load(row + gap + (v - kFirst) * kLanes);
  }
};

// Adds `numbers`[i] times row i for each bit i of `which`; `Alone`, the rows alone. If there is no second one of a pair,
// its row or its number is zero.
template <bool Alone, std::size_t Vectors = kSparseVectors, class Rows>
PEARL_INLINE void add_rows(std::uint64_t which, const float* numbers, const Rows& rows, F* sums) {
  constexpr std::size_t kChains = Vectors <= 4 ? 2 : 1;
  F chains[kChains][Vectors];
#pragma GCC unroll 16
  for (std::size_t v = 0; v < Vectors; ++v) chains[0][v] = sums[v];
  if (kChains > 1) zero_row<Vectors>(chains[kChains - 1]);
  while (which != 0) {
    const std::size_t one = lowest_bit(which);
    which &= which - 1;
    const std::size_t two = lowest_bit(which);
    which &= which - 1;
    const float *const first = rows.row(one), *const second = rows.row(two);
    if constexpr (!Alone) {
      const F left = spread_number(numbers + one), right = spread_number(numbers + Rows::number(two));
#pragma GCC unroll 16
      for (std::size_t v = 0; v < Vectors; ++v) chains[0][v] = multiply_add(left, rows.vector(first, v), chains[0][v]);
#pragma GCC unroll 16
      for (std::size_t v = 0; v < Vectors; ++v)
        chains[kChains - 1][v] = multiply_add(right, rows.vector(second, v), chains[kChains - 1][v]);
    } else {
#pragma GCC unroll 16
      for (std::size_t v = 0; v < Vectors; ++v) chains[0][v] += rows.vector(first, v);
#pragma GCC unroll 16
      for (std::size_t v = 0; v < Vectors; ++v) chains[kChains - 1][v] += rows.vector(second, v);
    }
  }
#pragma GCC unroll 16
  for (std::size_t v = 0; v < Vectors; ++v)
    sums[v] = kChains > 1 ? chains[0][v] + chains[kChains - 1][v] : chains[0][v];
}

// 64 features of a block of a panel's columns as rows, one for each transition, `row` floats apart; and back.
PEARL_SIMD void rows_of(const float* columns, float* rows, std::size_t row) {
  for (std::size_t f = 0; f < kSparse; f += kLanes) transpose_block(columns + f * kPanel, kPanel, rows + f, row);
}
PEARL_SIMD void columns_of(const float* rows, std::size_t row, float* columns) {
  for (std::size_t f = 0; f < kSparse; f += kLanes) transpose_block(rows + f, row, columns + f * kPanel, kPanel);
}

// 64 of a product's rows by up to 64 of its steps, with a row here for each step: times the step's factor, unless
// `factors` is null.
PEARL_SIMD void turn_weights(const Gemm& g, std::size_t from_row, std::size_t from_step, std::size_t steps,
                             SparseRow* rows, const float* factors = nullptr) {
  const std::ptrdiff_t step = g.a_step;
  const float* a =
      g.a + static_cast<std::ptrdiff_t>(from_row) * g.a_row + static_cast<std::ptrdiff_t>(from_step) * step;
  if (step == 1) return transpose(a, kSparse, steps, static_cast<std::size_t>(g.a_row), rows[0], kSparse);
  for (std::size_t k = 0; k < steps; ++k, a += step) {
    F row[kSparseVectors];
    load_row(a, row);
    if (factors != nullptr) scale_row(row, spread(factors + k));
    store_row(rows[k], row);
  }
}

// 64 results of a product of few terms, with a ReLU: of `count` transitions, and of as many more as are worked on
// together. Unless `bits` is null, a word for each transition says which results are no zeros; the words of one and the
// next lie `words` apart.
PEARL_SIMD void make_rectified(std::size_t terms, const float* bias, const float* x, const SparseRow* weights,
                               std::size_t count, float* rows, std::size_t row, std::uint64_t* bits = nullptr,
                               std::size_t words = 0) {
  for (std::size_t s = 0; s < count; s += kTogether) {
    F sums[kTogether][kSparseVectors];
#pragma GCC unroll 16
    for (std::size_t v = 0; v < kSparseVectors; ++v)
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kTogether; ++i) sums[i][v] = bias == nullptr ? zero() : load(bias + v * kLanes);
    for (std::size_t k = 0; k < terms; ++k) {
      F left[kTogether];
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kTogether; ++i) left[i] = spread(x + k * kPanel + s + i);
#pragma GCC unroll 16
      for (std::size_t v = 0; v < kSparseVectors; ++v) {
        const F right = load(weights[k] + v * kLanes);
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kTogether; ++i) sums[i][v] = multiply_add(left[i], right, sums[i][v]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kTogether; ++i) {
      rectify_row(sums[i]);
      store_row(rows + (s + i) * row, sums[i]);
      if (bits != nullptr) bits[(s + i) * words] = row_nonzero(sums[i]);
    }
  }
}

// One thread's memory for rows of transitions: grows to what the widest layers need.
inline float* sparse_memory(std::size_t floats) {
  thread_local AlignedArray<float> memory;
  if (memory.size() < floats) memory = AlignedArray<float>(floats);
  return memory.data();
}
// Rows are an odd number of cache lines long: with a power of two they would share few cache sets. A zero follows the
// numbers.
constexpr std::size_t sparse_row(std::size_t width) { return width + 16; }

// `Gated`: the products are those of a backward pass. `Single`: its first one has one term, which is the same for all
// numbers of a transition; so it multiplies their sum, and the weights are multiplied by the other factor at once.
//
// Weights of 64 by 64 stay in the L1 cache, for 16 transitions at a time if they are all, else for many: those go through
// each part of the weights in turn.
template <bool Gated, bool Single, bool Narrow>
class SparseChain {
 public:
  explicit SparseChain(const Chain& chain)
      : chain_(chain),
        first_(chain.first),
        g_(chain.second),
        third_(chain.third),
        keeps_(chain.keeps_second || third_.m == 0),
        stretch_(Narrow                             ? kLanes
                 : std::max(g_.m, g_.depth) > kWide ? kFewer
                                                    : kMany) {
    const std::size_t first_floats = Gated ? 0 : first_.depth * taken_width();
    const std::size_t sizes[] = {
        stretch() * taken_row(), stretch() * made_row(),        stretch() * third_.m * kLanes, first_floats,
        third_.m * made_width(), 2 * stretch() * taken_words(), 2 * stretch() * made_words()};
    std::size_t floats = 0;
    for (const std::size_t size : sizes) floats += round_up(size, kCacheLine / sizeof(float));
    float* at = sparse_memory(floats);
    const std::size_t* size = sizes;
    const auto take = [&] {
      float* const from = at;
      at += round_up(*size++, kCacheLine / sizeof(float));
      return from;
    };
    taken_ = take();
    made_ = take();
    ends_ = take();
    first_weights_ = take();
    third_weights_ = take();
    passes_ = reinterpret_cast<std::uint64_t*>(take());
    signs_ = reinterpret_cast<std::uint64_t*>(take());
  }

  // Returns false, and does nothing, if too few numbers are zeros.
  PEARL_SIMD bool run() {
    alignas(64) SparseRow weights[kSparse + 1];
    std::memset(weights[kSparse], 0, sizeof(SparseRow));
    prepare();
    if (Narrow) prepare(0, 0, weights);
    const std::size_t columns = g_.columns();
    for (std::size_t begin = 0; begin < columns; begin += stretch()) {
      const std::size_t end = columns - begin < stretch() ? columns : begin + stretch();
      std::size_t numbers = 0, counted = 0;
      for (std::size_t at = begin; at < end; at += kLanes) {
        const Block block{this, begin, at};
        take(block);
        counted += block.count;
        for (std::size_t i = 0; i < block.count * taken_words() && begin == 0; ++i)
          numbers += static_cast<std::size_t>(std::popcount(passes(block)[i]));
      }
      const bool asks = begin == 0 && !(Gated && chain_.first_signs != nullptr);
      if (asks && numbers * 16 > kMostOf16 * taken_width() * counted) return false;
      for (std::size_t to = 0; to < made_words(); ++to)
        for (std::size_t from = 0; from < taken_words(); ++from) {
          if (!Narrow) prepare(to, from, weights);
          if (!Narrow) ahead_ = from + 1 < taken_words() ? Ahead(g_, to, from + 1) : Ahead(g_, to + 1, 0);
          multiply(begin, counted, to, from, weights);
        }
      for (std::size_t at = begin; at < end; at += kLanes) finish({this, begin, at});
    }
    return true;
  }

 private:
  // Transitions that go through each part of the weights in turn: fewer of wide layers, whose numbers would leave the L2
  // cache.
  static constexpr std::size_t kMany = 256, kFewer = 64;
  std::size_t stretch() const { return Narrow ? kLanes : stretch_; }
  // Of what the second product takes, and of what it makes.
  std::size_t taken_width() const { return Narrow ? kSparse : g_.depth; }
  std::size_t made_width() const { return Narrow ? kSparse : g_.m; }
  std::size_t taken_words() const { return taken_width() / kSparse; }
  std::size_t made_words() const { return made_width() / kSparse; }
  std::size_t taken_row() const { return sparse_row(taken_width()); }
  std::size_t made_row() const { return sparse_row(made_width()); }

  // As many transitions as a vector has lanes: `place` in the stretch, `count` of which count.
  struct Block {
    Block(const SparseChain* chain, std::size_t begin, std::size_t at)
        : place(at - begin),
          number(at / kLanes),
          panel(static_cast<std::ptrdiff_t>(at / kPanel)),
          column(static_cast<std::ptrdiff_t>(at % kPanel)),
          count(at >= chain->chain_.transitions           ? 0
                : chain->chain_.transitions - at < kLanes ? chain->chain_.transitions - at
                                                          : kLanes) {}
    std::size_t place, number;
    std::ptrdiff_t panel, column;
    std::size_t count;

    std::ptrdiff_t in(std::ptrdiff_t panel_floats) const { return panel * panel_floats + column; }
  };

  std::uint64_t* passes(const Block& block) { return passes_ + block.place * taken_words(); }
  std::uint64_t* signs(const Block& block) { return signs_ + block.place * made_words(); }
  // Where the signs of a block's transitions lie between passes.
  std::uint16_t* left(std::uint16_t* signs, const Block& block) const {
    return signs + block.number * (made_width() + taken_width());
  }

  // The next block of weights to prefetch: its rows lie too far apart for the hardware prefetcher.
  struct Ahead {
    Ahead(const Gemm& g, std::size_t to, std::size_t from)
        : row(g.a_step == 1 ? g.a_row : g.a_step),
          next(g.a + static_cast<std::ptrdiff_t>(to * kSparse) * g.a_row +
               static_cast<std::ptrdiff_t>(from * kSparse) * g.a_step),
          left(to * kSparse < g.m ? kSparse : 0) {}
    Ahead() = default;
    // Two of its rows.
    PEARL_INLINE void fetch() {
      if (left == 0) return;
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kSparse; i += 16) {
        __builtin_prefetch(next + i, 0, 2);
        __builtin_prefetch(next + row + i, 0, 2);
      }
      next += 2 * row;
      left -= 2;
    }
    std::ptrdiff_t row = 0;
    const float* next = nullptr;
    std::size_t left = 0;
  };

  PEARL_SIMD void prepare() {
    for (std::size_t s = 0; s < stretch(); ++s) taken_[s * taken_row() + taken_width()] = 0.0f;
    for (std::size_t w = 0; w < taken_words() && !Gated && first_.m > 0; ++w)
      turn_weights(first_, w * kSparse, 0, first_.depth, first_weights(w));
    for (std::size_t o = 0; o < third_.m; ++o) {
      const float* a = third_.a + static_cast<std::ptrdiff_t>(o) * third_.a_row;
      float* const to = third_weights_ + o * made_width();
      for (std::size_t i = 0; i < made_width(); ++i, a += third_.a_step) to[i] = *a;
    }
  }
  SparseRow* first_weights(std::size_t word) {
    return reinterpret_cast<SparseRow*>(first_weights_ + word * first_.depth * kSparse);
  }
  PEARL_SIMD void prepare(std::size_t to, std::size_t from, SparseRow* weights) const {
    turn_weights(g_, to * kSparse, from * kSparse, kSparse, weights, Single ? first_.a + from * kSparse : nullptr);
  }

  // The inputs of the second product, and which of them are not zero.
  PEARL_SIMD void take(const Block& block) {
    float* const rows = taken_ + block.place * taken_row();
    std::uint64_t* const bits = passes(block);
    if (!Gated || first_.m == 0) {
      for (std::size_t w = 0; w < taken_words(); ++w) {
        const std::size_t f = w * kSparse;
        if (first_.m > 0) {
          make_rectified(first_.depth, first_.bias == nullptr ? nullptr : first_.bias + f,
                         first_.b + block.in(first_.b_panel), first_weights(w), block.count, rows + f, taken_row(),
                         bits + w, taken_words());
          continue;
        }
        rows_of(g_.b + block.in(g_.b_panel) + f * kPanel, rows + f, taken_row());
        for (std::size_t s = 0; s < block.count; ++s) {
          F row[kSparseVectors];
          load_row(rows + s * taken_row() + f, row);
          bits[s * taken_words() + w] = row_nonzero(row);
        }
      }
      if (chain_.first_signs != nullptr)
        std::memcpy(left(chain_.first_signs, block), bits, block.count * taken_words() * sizeof(*bits));
    } else {
      if (chain_.first_signs != nullptr)
        std::memcpy(bits, left(chain_.first_signs, block), block.count * taken_words() * sizeof(*bits));
      else
        above(first_.gate + block.in(first_.c_panel), taken_words(), block.count, bits);
      for (std::size_t s = 0; s < block.count && (!Single || chain_.keeps_first); ++s)
        for (std::size_t w = 0; w < taken_words(); ++w) {
          F row[kSparseVectors];
          zero_row(row);
          const float *x = first_.b + block.in(first_.b_panel) + s, *a = first_.a + w * kSparse;
          for (std::size_t k = 0; k < first_.depth; ++k, x += kPanel, a += first_.a_step)
#pragma GCC unroll 16
            for (std::size_t v = 0; v < kSparseVectors; ++v)
              row[v] = multiply_add(spread(x), load(a + v * kLanes), row[v]);
          if (chain_.keeps_first) keep_in_row(row, bits[s * taken_words() + w]);
          store_row(rows + s * taken_row() + w * kSparse, row);
        }
    }
    if (first_.m > 0 && chain_.keeps_first)
      put(rows, taken_row(), taken_words(), block.count, first_.c + block.in(first_.c_panel));
    if constexpr (Gated) {
      if (chain_.second_signs != nullptr)
        std::memcpy(signs(block), left(chain_.second_signs, block), block.count * made_words() * sizeof(*bits));
      else if (g_.gate != nullptr)
        above(g_.gate + block.in(g_.c_panel), made_words(), block.count, signs(block));
      else
        std::memset(signs(block), 0xFF, block.count * made_words() * sizeof(*bits));
    }
  }
  // Which gates of a panel's columns are above zero.
  PEARL_SIMD static void above(const float* gates, std::size_t words, std::size_t count, std::uint64_t* bits) {
    alignas(64) float rows[kLanes][sparse_row(kSparse)];
    for (std::size_t w = 0; w < words; ++w) {
      rows_of(gates + w * kSparse * kPanel, rows[0], sparse_row(kSparse));
      for (std::size_t s = 0; s < count; ++s) {
        F row[kSparseVectors];
        load_row(rows[s], row);
        bits[s * words + w] = row_above(row);
      }
    }
  }
  // A block's rows as columns: zeros, for transitions that do not count.
  PEARL_SIMD static void put(float* rows, std::size_t row, std::size_t words, std::size_t count, float* columns) {
    for (std::size_t s = count; s < kLanes; ++s) std::memset(rows + s * row, 0, words * sizeof(SparseRow));
    for (std::size_t f = 0; f < words * kSparse; f += kSparse) columns_of(rows + f, row, columns + f * kPanel);
  }

  // 64 steps of the second product for 64 numbers of each transition of a stretch.
  PEARL_SIMD void multiply(std::size_t begin, std::size_t count, std::size_t to, std::size_t from,
                           const SparseRow* weights) {
    const bool starts = from == 0, ends = from + 1 == taken_words(), keeps = keeps_;
    const std::size_t f = to * kSparse, third_rows = third_.m;
    // Local copies, so that the compiler knows that no store of a vector changes them.
    const std::uint64_t* passing = passes_ + from;
    std::uint64_t* signed_row = signs_ + to;
    const std::size_t passing_words = taken_words(), signed_words = made_words(), taken_step = taken_row(),
                      made_step = made_row(), third_row = made_width();
    const float* taken = taken_ + from * kSparse;
    float *row = made_ + f, *end_row = ends_;
    const float* const thirds = third_weights_ + f;
    const float* const bias = Gated || g_.bias == nullptr ? nullptr : g_.bias + f;
    const bool notes = !Gated && chain_.second_signs != nullptr;
    Ahead ahead = ahead_;
    for (std::size_t s = 0; s < count; ++s, passing += passing_words, signed_row += signed_words, taken += taken_step,
                     row += made_step, end_row += kLanes) {
      if constexpr (!Narrow) ahead.fetch();
      F sums[kSparseVectors];
      if (!starts)
        load_row(row, sums);
      else if (bias != nullptr)
        load_row(bias, sums);
      else
        zero_row(sums);
      add_rows<Single>(*passing, taken, NextRows<>{weights[0]}, sums);
      if (!ends) {
        store_row(row, sums);
        continue;
      }
      if constexpr (Single) {
        const std::size_t at = begin + s;
        const F factor = spread(first_.b + static_cast<std::ptrdiff_t>(at / kPanel) * first_.b_panel + at % kPanel);
        scale_row(sums, factor);
      }
      if constexpr (Gated) {
        keep_in_row(sums, *signed_row);
      } else {
        rectify_row(sums);
        if (notes) *signed_row = row_above(sums);
      }
      if (keeps) store_row(row, sums);
      for (std::size_t o = 0; o < third_rows; ++o) {
        const float* const third = thirds + o * third_row;
        float* const sum = end_row + o * stretch() * kLanes;
        F found = sums[0] * load(third);
#pragma GCC unroll 16
        for (std::size_t v = 1; v < kSparseVectors; ++v) found = multiply_add(sums[v], load(third + v * kLanes), found);
        store(sum, to == 0 ? found : load(sum) + found);
      }
    }
  }

  PEARL_SIMD void finish(const Block& block) {
    if (!Gated && chain_.second_signs != nullptr)
      std::memcpy(left(chain_.second_signs, block), signs(block), block.count * made_words() * sizeof(*signs_));
    if (keeps_)
      put(made_ + block.place * made_row(), made_row(), made_words(), block.count, g_.c + block.in(g_.c_panel));
    float* c = third_.c + block.in(third_.c_panel);
    for (std::size_t o = 0; o < third_.m; ++o, c += third_.c_row) {
      F sums[kLanes];
      for (std::size_t s = 0; s < kLanes; ++s)
        sums[s] = s < block.count ? load(ends_ + (o * stretch() + block.place + s) * kLanes) : zero();
      F end = totals(sums);
      if (third_.bias != nullptr) end += spread(third_.bias + o);
      store(c, end);
    }
  }

  const Chain& chain_;
  const Gemm &first_, &g_, &third_;
  const bool keeps_;
  const std::size_t stretch_;
  Ahead ahead_;
  float *taken_, *made_, *ends_, *first_weights_, *third_weights_;
  std::uint64_t *passes_, *signs_;
};

// Whether a chain is one for these kernels, whatever its numbers.
bool fits_sparse(const Chain& chain) {
  const Gemm &first = chain.first, &g = chain.second, &third = chain.third;
  const auto is_wide = [](std::size_t width) { return width > 0 && width % kSparse == 0 && width <= kWidestSparse; };
  const auto is_forward = [](const Gemm& gemm) { return gemm.is_rectified() && gemm.a_step == 1; };
  const auto is_backward = [](const Gemm& gemm) { return gemm.is_gated() && gemm.a_row == 1; };
  const bool backward = first.m > 0 ? is_backward(first) : is_backward(g);
  if (chain.transitions < kLeastTransitions || !is_wide(g.m) || !is_wide(g.depth) || !g.is_of_panels(kPanel) ||
      g.columns() % kLanes != 0 || (g.panels > 1 && g.n != kPanel))
    return false;
  // The last product of a backward pass may have no gate.
  if (!(backward ? is_backward(g) || (g.is_plain() && g.bias == nullptr && g.a_row == 1) : is_forward(g))) return false;
  if (third.m > 0 && (third.m > Chain::kMostRows || !third.is_plain() || !third.is_of_panels(kPanel))) return false;
  return first.m == 0 || (first.depth <= Chain::kMostTerms && first.is_of_panels(kPanel) &&
                          (backward ? is_backward(first) : is_forward(first)));
}

template <bool Gated, bool Single>
bool multiply_sparse(const Chain& chain) {
  if (chain.second.m == kSparse && chain.second.depth == kSparse) return SparseChain<Gated, Single, true>(chain).run();
  return SparseChain<Gated, Single, false>(chain).run();
}

bool sparse_chain(const Chain& chain) {
  const bool signs = chain.first_signs != nullptr || chain.second_signs != nullptr;
  if (fits_sparse(chain)) {
    const bool gated = !chain.second.relu, single = chain.first.m > 0 && chain.first.depth == 1;
    const auto multiply = !gated   ? multiply_sparse<false, false>
                          : single ? multiply_sparse<true, true>
                                   : multiply_sparse<true, false>;
    if (multiply(chain)) return signs;
  }
  chain.one_by_one(gemm);
  return false;
}

// As many transitions at a time as have a bit in a word; 64 inputs of those stay in the L1 cache, row by row.
constexpr std::size_t kPart = 64;

template <bool Single>
class SparseGradient {
 public:
  explicit SparseGradient(const LayerGradient& gradient)
      : g_(gradient),
        made_x_(gradient.made_x),
        made_(gradient.made_slopes),
        transitions_((gradient.panels - 1) * kPanel + gradient.last) {
    const std::size_t bits = 2 * g_.outputs, bias = g_.outputs * kLanes;
    float* at = sparse_memory(bits + bias + (made_x_.m > 0 ? made_x_.depth * g_.inputs : 0) +
                              (Single ? 0 : g_.outputs * kSlopes));
    of_bias_ = at;
    bits_ = reinterpret_cast<std::uint64_t*>(at += bias);
    turned_ = at += bits;
    slopes_ = at + (made_x_.m > 0 ? made_x_.depth * g_.inputs : 0);
  }

  PEARL_SIMD void run() {
    alignas(64) SparseRow x[kPart + 1];
    std::memset(x[kPart], 0, sizeof(SparseRow));
    std::memset(of_bias_, 0, g_.outputs * kLanes * sizeof(float));
    for (std::size_t w = 0; w < g_.inputs / kSparse && made_x_.m > 0; ++w)
      turn_weights(made_x_, w * kSparse, 0, made_x_.depth, turned(w));
    const std::size_t share = round_up(even_share(transitions_, kPart), kLanes);
    for (std::size_t begin = 0; begin < transitions_; begin += share) {
      const std::size_t count = transitions_ - begin < share ? transitions_ - begin : share;
      for (std::size_t o = 0; o < g_.outputs; ++o) load_slopes(begin, count, o);
      for (std::size_t w = 0; w < g_.inputs / kSparse; ++w) {
        load_x(begin, count, w, x);
        multiply(begin > 0, w, x);
      }
    }
    for (std::size_t o = 0; o < g_.outputs && g_.bias != nullptr; o += kLanes) {
      F sums[kLanes];
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kLanes; ++i) sums[i] = load(of_bias_ + (o + i) * kLanes);
      F sum = totals(sums);
      if constexpr (Single) sum *= load(made_.a + o);
      store(g_.bias + o, g_.accumulate ? load(g_.bias + o) + sum : sum);
    }
  }

 private:
  static constexpr std::size_t kSlopes = sparse_row(kPart);

  SparseRow* turned(std::size_t word) const {
    return reinterpret_cast<SparseRow*>(turned_ + word * made_x_.depth * kSparse);
  }

  // Which transitions of a part have a slope of output `o`, and which they are: `Single`, without its own factor.
  PEARL_SIMD void load_slopes(std::size_t begin, std::size_t count, std::size_t o) {
    const std::uint64_t counted = count < 64 ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0};
    const bool makes = made_.m > 0;
    const float* const gates = (makes ? made_.gate : g_.slopes) + o * kPanel;
    const std::ptrdiff_t gate_panel = makes ? made_.c_panel : static_cast<std::ptrdiff_t>(g_.outputs * kPanel);
    std::uint64_t which = 0;
    F bias = load(of_bias_ + o * kLanes);
    for (std::size_t s = 0; s < count; s += kLanes) {
      const auto panel = static_cast<std::ptrdiff_t>((begin + s) / kPanel);
      const std::size_t column = (begin + s) % kPanel;
      const F gate = load(gates + panel * gate_panel + column);
      const std::uint32_t bits =
          (makes ? bits_above(gate) : bits_nonzero(gate)) & static_cast<std::uint32_t>(counted >> s);
      which |= std::uint64_t{bits} << s;
      F slope = gate;
      if (makes) {
        const float *b = made_.b + panel * made_.b_panel + column, *a = made_.a + o;
        slope = load(b);
        if constexpr (!Single) {
          slope *= spread(a);
          for (std::size_t k = 1; k < made_.depth; ++k)
            slope =
                multiply_add(load(b + k * kPanel), spread(a + static_cast<std::ptrdiff_t>(k) * made_.a_step), slope);
        }
      }
      slope = keep_bits(slope, bits);
      bias += slope;
      if constexpr (!Single) store(slopes_ + o * kSlopes + s, slope);
    }
    if constexpr (!Single) slopes_[o * kSlopes + kPart] = 0.0f;
    store(of_bias_ + o * kLanes, bias);
    bits_[o] = which;
  }

  // 64 inputs of a part: `Single`, times the factor that a transition's slopes have in common.
  PEARL_SIMD void load_x(std::size_t begin, std::size_t count, std::size_t word, SparseRow* x) const {
    for (std::size_t s = 0; s < count; s += kLanes) {
      const auto panel = static_cast<std::ptrdiff_t>((begin + s) / kPanel);
      const std::size_t column = (begin + s) % kPanel, f = word * kSparse;
      const std::size_t rows = count - s < kLanes ? count - s : kLanes;
      if (made_x_.m > 0)
        make_rectified(made_x_.depth, made_x_.bias + f, made_x_.b + panel * made_x_.b_panel + column, turned(word),
                       rows, x[s], kSparse);
      else
        rows_of(g_.x + panel * static_cast<std::ptrdiff_t>(g_.inputs * kPanel) + f * kPanel + column, x[s], kSparse);
      if constexpr (Single) {
        const float* const factors = made_.b + panel * made_.b_panel + column;
        for (std::size_t i = 0; i < rows; ++i) scale_numbers(x[s + i], spread(factors + i));
      }
    }
  }

  PEARL_SIMD void multiply(bool adds, std::size_t word, const SparseRow* x) const {
    adds = adds || g_.accumulate;
    // Local copies, as above.
    const std::size_t outputs = g_.outputs, inputs = g_.inputs;
    const std::uint64_t* const bits = bits_;
    const float *const slopes = slopes_, *const factors = made_.a;
    float* weights = g_.weights + word * kSparse;
    const bool far = inputs > kWide;  // rows of weights are too far apart for the hardware prefetcher
    for (std::size_t o = 0; o < outputs; ++o, weights += inputs) {
      if (far) {
        const float* const next = o + 2 < outputs ? weights + 2 * inputs : weights;
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kSparse; i += 16) __builtin_prefetch(next + i, 1, 3);
      }
      F sums[kSparseVectors];
      zero_row(sums);
      add_rows<Single>(bits[o], slopes + o * kSlopes, NextRows<>{x[0]}, sums);
      if constexpr (Single) scale_row(sums, spread(factors + o));
#pragma GCC unroll 16
      for (std::size_t v = 0; v < kSparseVectors && adds; ++v) sums[v] += load(weights + v * kLanes);
      store_row(weights, sums);
    }
  }

  const LayerGradient& g_;
  const Gemm &made_x_, &made_;
  const std::size_t transitions_;
  float *of_bias_, *turned_, *slopes_;
  std::uint64_t* bits_;
};

void sparse_gradient(const LayerGradient& gradient) {
  if (gradient.made_slopes.m > 0 && gradient.made_slopes.depth == 1)
    SparseGradient<true>(gradient).run();
  else
    SparseGradient<false>(gradient).run();
}

#include "sparse_convolution_body.hpp"

constexpr LearnerKernels sparse_table_of(const char* name) {
  LearnerKernels table = table_of(name);
  table.sparse = true;
  table.of_sparse = &kSparseConvolutionKernels;
  table.chain = sparse_chain;
  table.unit = kSparse;
  table.widest = kWidestSparse;
  table.least_transitions = kLeastTransitions;
  table.remade = 8;
  table.layer_gradient = sparse_gradient;
  return table;
}

#undef PEARL_INLINE
