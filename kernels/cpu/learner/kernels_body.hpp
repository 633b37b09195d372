// The learner's loops, written once over a vector type. Each kernels_<isa>.cpp includes this file inside its own
// namespace, after defining
//
//   PEARL_SIMD    the function attribute that turns the instruction set on (given function by function, so that no
//                 shared inline function is compiled with it)
//   F             a vector of kLanes floats, with the functions used below
//   kRows         rows of the register tile of two vectors
//   fast_root(a), minus_fast_quotient(from, a, b): from - a / b for b above 2^-126; roots and quotients to two units in the
//   last place, where that is faster
//   totals(rows)  a vector whose lane i is the sum of rows[i]
//   transpose_block(source, source_row, destination, destination_row): kLanes x kLanes
//
// No include guard and no includes: the including file has them.

#define PEARL_INLINE PEARL_SIMD inline __attribute__((always_inline))
#define PEARL_INLINED PEARL_SIMD __attribute__((always_inline))  // of a lambda

constexpr std::size_t kPanel = 2 * kLanes;
constexpr std::size_t kLargeResult = std::size_t{1} << 18;  // floats: a result that does not stay in the L2 cache

// One register tile: Rows x (Vectors * kLanes) of c. ContiguousRows: whether rows or steps of a are contiguous.
template <int Rows, int Vectors, bool ContiguousRows, bool Partial>
PEARL_SIMD void tile(const Gemm& g, const float* a, const float* b, float* c, const float* bias, const float* gate,
                     std::size_t last) {
  // A few rows have too few chains of additions to keep the units busy: each row has several chains, added up at the
  // end.
  constexpr int kChains = Rows * Vectors <= 2 ? 4 : Rows * Vectors <= 6 ? 2 : 1;
  F sums[kChains][Rows][Vectors];
#pragma GCC unroll 4
  for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sums[chain][i][j] = zero();

  const std::ptrdiff_t row = g.a_row;
  for (std::size_t done = 0; done < g.depth; done += g.segment, a += g.a_segment, b += g.b_segment) {
    const std::size_t steps = g.depth - done < g.segment ? g.depth - done : g.segment;
    // Every third row has a pointer; scaled addressing reaches the two between.
    const float* rows[(Rows + 2) / 3];
    for (int i = 0; i < (Rows + 2) / 3; ++i) rows[i] = a + 3 * i * row;
    const float* from = b;
    const auto multiply = [&](const float* b_step, std::ptrdiff_t k, auto number) PEARL_INLINED {
      auto& sum = sums[number % kChains];
      F right[Vectors];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j)
        right[j] = Partial && j == Vectors - 1 ? load_first(b_step + j * kLanes, last) : load(b_step + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const F left = ContiguousRows ? spread(a + i) : spread(rows[i / 3] + (i % 3) * row + k);
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) sum[i][j] = multiply_add(left, right[j], sum[i][j]);
      }
    };
    const std::integral_constant<int, 0> zeroth{};
    const std::integral_constant<int, 1> first{};
    const std::integral_constant<int, 2> second{};
    const std::integral_constant<int, 3> third{};
    std::size_t k = 0;
    if constexpr (!ContiguousRows)
      for (; k + 4 <= steps; k += 4, from += 4 * g.b_step) {
        const auto at = static_cast<std::ptrdiff_t>(k);
        multiply(from, at, zeroth);
        multiply(from + g.b_step, at + 1, first);
        multiply(from + 2 * g.b_step, at + 2, second);
        multiply(from + 3 * g.b_step, at + 3, third);
      }
    if constexpr (ContiguousRows && kChains > 1)
      for (; k + 2 <= steps; k += 2, from += 2 * g.b_step) {
        multiply(from, 0, zeroth);
        a += g.a_step;
        multiply(from + g.b_step, 0, first);
        a += g.a_step;
      }
    for (; k < steps; ++k, from += g.b_step) {
      multiply(from, static_cast<std::ptrdiff_t>(k), zeroth);
      if constexpr (ContiguousRows) {
        // The next tile's rows: steps far apart are too many streams for the hardware's prefetching.
        __builtin_prefetch(a + 2 * Rows, 0, 2);
        a += g.a_step;
      }
    }
    if constexpr (ContiguousRows) a -= static_cast<std::ptrdiff_t>(steps) * g.a_step;
  }

  auto& sum = sums[0];
#pragma GCC unroll 4
  for (int chain = 1; chain < kChains; ++chain)
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[i][j] += sums[chain][i][j];

  // One pass over the sums for each way to finish them, so that each condition is tested once.
  const auto each = [&](const auto& visit) PEARL_INLINED {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) visit(sum[i][j], i, j, i * g.c_row + j * static_cast<std::ptrdiff_t>(kLanes));
  };
  const auto load_at = [&](const float* from, int j) PEARL_INLINED {
    return Partial && j == Vectors - 1 ? load_first(from, last) : load(from);
  };
  if (bias != nullptr && g.bias_of_columns)
    each([&](F& value, int, int j, std::ptrdiff_t) PEARL_INLINED { value += load_at(bias + j * kLanes, j); });
  else if (bias != nullptr)
    each([&](F& value, int i, int, std::ptrdiff_t) PEARL_INLINED { value += spread(bias + i); });
  if (g.accumulate)
    each([&](F& value, int, int j, std::ptrdiff_t at) PEARL_INLINED { value = value + load_at(c + at, j); });
  if (g.relu) each([&](F& value, int, int, std::ptrdiff_t) PEARL_INLINED { value = max(value, zero()); });
  if (gate != nullptr)
    each([&](F& value, int, int j, std::ptrdiff_t at) PEARL_INLINED {
      value = where_positive(load_at(gate + at, j), value);
    });
  each([&](const F& value, int, int j, std::ptrdiff_t at) PEARL_INLINED {
    if (Partial && j == Vectors - 1)
      store_first(c + at, value, last);
    else
      store(c + at, value);
  });
}

using Tile = void (*)(const Gemm&, const float*, const float*, float*, const float*, const float*, std::size_t);

template <int Vectors, bool ContiguousRows, bool Partial, int... Rows>
constexpr std::array<Tile, sizeof...(Rows)> tiles_of(std::integer_sequence<int, Rows...>) {
  return {tile<Rows + 1, Vectors, ContiguousRows, Partial>...};
}

template <int Vectors, bool ContiguousRows, bool Partial>
constexpr std::array<Tile, kRows> kTiles =
    tiles_of<Vectors, ContiguousRows, Partial>(std::make_integer_sequence<int, kRows>());

template <bool ContiguousRows>
void gemm_of(const Gemm& g) {
  // Tiles get even shares of the rows: a short last tile has too few independent chains of additions. The first
  // `longer` ones have one row more.
  const std::size_t blocks = (g.m + kRows - 1) / kRows, share = g.m / blocks, longer = g.m % blocks;
  const auto multiply = [&](std::size_t block, std::size_t j) {
    const std::size_t columns = g.n - j < kPanel ? g.n - j : kPanel;
    const std::size_t last = columns % kLanes;
    const bool two = columns > kLanes;
    const Tile* tiles = last == 0 ? (two ? kTiles<2, ContiguousRows, false> : kTiles<1, ContiguousRows, false>).data()
                                  : (two ? kTiles<2, ContiguousRows, true> : kTiles<1, ContiguousRows, true>).data();
    const std::size_t i = block * share + (block < longer ? block : longer), rows = share + (block < longer);
    const auto at = static_cast<std::ptrdiff_t>(i), column = static_cast<std::ptrdiff_t>(j);
    tiles[rows - 1](g, g.a + at * g.a_row, g.b + j, g.c + at * g.c_row + column,
                    g.bias == nullptr ? nullptr : g.bias + (g.bias_of_columns ? column : at),
                    g.gate == nullptr ? nullptr : g.gate + at * g.c_row + column, last);
  };
  if (g.m * g.n > kLargeResult) {
    // Of a result beyond the cache, whole rows are written at a time.
    for (std::size_t block = 0; block < blocks; ++block)
      for (std::size_t j = 0; j < g.n; j += kPanel) multiply(block, j);
  } else {
    for (std::size_t j = 0; j < g.n; j += kPanel)
      for (std::size_t block = 0; block < blocks; ++block) multiply(block, j);
  }
}

// A product of few terms takes as long as storing its sums: each sum is finished before it is stored.
constexpr std::size_t kFewTerms = 8;

template <int Terms, int Vectors>
PEARL_SIMD void product_of_few(const Gemm& g, std::size_t first) {
  F right[Terms][Vectors];
#pragma GCC unroll 8
  for (int k = 0; k < Terms; ++k)
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j)
      right[k][j] = load(g.b + k * g.b_step + first + static_cast<std::size_t>(j) * kLanes);
  const float *a = g.a, *gate = g.gate == nullptr ? nullptr : g.gate + first;
  float* c = g.c + first;
  for (std::size_t i = 0; i < g.m; ++i, a += g.a_row, c += g.c_row) {
    F sum[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) sum[j] = g.bias == nullptr ? zero() : spread(g.bias + i);
#pragma GCC unroll 8
    for (int k = 0; k < Terms; ++k) {
      const F left = spread(a + k * g.a_step);
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) sum[j] = multiply_add(left, right[k][j], sum[j]);
    }
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) {
      if (g.relu) sum[j] = max(sum[j], zero());
      if (gate != nullptr) sum[j] = where_positive(load(gate + static_cast<std::size_t>(j) * kLanes), sum[j]);
      store(c + static_cast<std::size_t>(j) * kLanes, sum[j]);
    }
    if (gate != nullptr) gate += g.c_row;
  }
}

using ProductOfFew = void (*)(const Gemm&, std::size_t);

template <int Vectors, int... Terms>
constexpr std::array<ProductOfFew, sizeof...(Terms)> products_of_few(std::integer_sequence<int, Terms...>) {
  return {product_of_few<Terms + 1, Vectors>...};
}

void gemm_of_few(const Gemm& g) {
  static constexpr auto kTerms = std::make_integer_sequence<int, kFewTerms>();
  static constexpr std::array<ProductOfFew, kFewTerms> kOne = products_of_few<1>(kTerms),
                                                       kTwo = products_of_few<2>(kTerms);
  std::size_t j = 0;
  for (; j + kPanel <= g.n; j += kPanel) kTwo[g.depth - 1](g, j);
  if (j < g.n) kOne[g.depth - 1](g, j);
}

void gemm(const Gemm& whole) {
  Gemm g = whole;
  const bool few = g.depth > 0 && g.depth <= kFewTerms && g.depth <= g.segment && g.n % kLanes == 0 &&
                   (g.panels == 1 || g.last_n % kLanes == 0) && !g.accumulate && !g.bias_of_columns;
  for (std::size_t panel = 0; panel < whole.panels; ++panel) {
    if (panel > 0 && panel + 1 == whole.panels) g.n = whole.last_n;
    if (few)
      gemm_of_few(g);
    else if (g.a_row == 1)
      gemm_of<true>(g);
    else
      gemm_of<false>(g);
    g.b += g.b_panel;
    g.c += g.c_panel;
    if (g.gate != nullptr) g.gate += g.c_panel;
  }
}

bool chain(const Chain& chain) {
  chain.one_by_one(gemm);
  return false;
}

void transpose(const float* source, std::size_t rows, std::size_t columns, std::size_t source_row, float* destination,
               std::size_t destination_row) {
  const std::size_t whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  for (std::size_t i = 0; i < whole_rows; i += kLanes)
    for (std::size_t j = 0; j < whole_columns; j += kLanes)
      transpose_block(source + i * source_row + j, source_row, destination + j * destination_row + i, destination_row);
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j)
      destination[j * destination_row + i] = source[i * source_row + j];
}

void turned_gemm(const Gemm& whole, float* scratch) {
  Gemm g = whole;
  const std::size_t row = turned_row(g.n);
  for (std::size_t k = 0; k < g.depth; k += g.segment, g.b += whole.b_segment)
    transpose(g.b, g.n, g.depth - k < g.segment ? g.depth - k : g.segment, static_cast<std::size_t>(whole.b_step),
              scratch + k * row, row);
  g.b = scratch;
  g.b_step = static_cast<std::ptrdiff_t>(row);
  g.b_segment = static_cast<std::ptrdiff_t>(g.segment * row);
  gemm(g);
}

// Elementwise

PEARL_SIMD void relu(const float* x, float* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) store(y + i, max(load(x + i), zero()));
}

// Least relative error: 2e-9 of 2^f on [-1/2, 1/2], and 2e-10 of tanh(x) = x + x^3 p(x^2) on [0, 0.625].
constexpr float kExp2[] = {1.0f,           6.931472029e-01f, 2.402264791e-01f, 5.550332467e-02f,
                           9.618437363e-03f, 1.339887607e-03f, 1.535336407e-04f};
constexpr float kTanh[] = {-3.333333076e-01f, 1.333320415e-01f,  -5.394651855e-02f,
                           2.169931253e-02f,  -8.173841645e-03f, 2.139604747e-03f};

// 2^x for x in [-126, 127], to about one unit in the last place: 2^n by the exponent's bits, the rest by a polynomial.
PEARL_INLINE F exp2_of(F x) {
  const F whole = round(x);
  const F f = x - whole;
  F p = spread(kExp2[6]);
  for (int i = 5; i >= 0; --i) p = multiply_add(p, f, spread(kExp2[i]));
  return times_power_of_two(p, whole);
}

// Near 0 an odd polynomial, where 1 - 2 / (exp(2x) + 1) would cancel; beyond 9, 1 to float precision.
PEARL_INLINE F tanh_of(F x) {
  const F size = absolute(x);
  const F square = x * x;
  F p = spread(kTanh[5]);
  for (int i = 4; i >= 0; --i) p = multiply_add(p, square, spread(kTanh[i]));
  const F near = multiply_add(p * square, x, x);
  const F e = exp2_of(min(size, spread(9.011f)) * spread(2.885390081777927f));
  const F far = with_sign_of(spread(1.0f) - spread(2.0f) / (e + spread(1.0f)), x);
  // Every comparison with a NaN is false: it takes the polynomial, which keeps it.
  return where_above(size, spread(0.625f), far, near);
}

// e^x for x in [-87, 88]; the argument's fraction is exact to twice the digits where multiply_add() rounds once.
PEARL_INLINE F exp_of(F x) {
  const F whole = round(x * spread(1.44269504f));
  F f = multiply_add(x, spread(1.44269504f), zero() - whole);
  f = multiply_add(x, spread(1.92596300e-8f), f);
  F p = spread(kExp2[6]);
  for (int i = 5; i >= 0; --i) p = multiply_add(p, f, spread(kExp2[i]));
  return times_power_of_two(p, whole);
}

// log(1 + x) for x in [0, 1]: 2 artanh(x / (2 + x)).
PEARL_INLINE F log1p_of(F x) {
  const F s = x / (spread(2.0f) + x), square = s * s;
  F p = spread(1.0f / 15.0f);
  for (int i = 13; i >= 1; i -= 2) p = multiply_add(p, square, spread(1.0f / static_cast<float>(i)));
  return (s + s) * p;
}

PEARL_SIMD void tanh(const float* x, float* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) store(y + i, tanh_of(load(x + i)));
}

PEARL_SIMD void relu_backward(const float* dy, const float* y, float* dx, std::size_t count, bool accumulate) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const F value = where_positive(load(y + i), load(dy + i));
    store(dx + i, accumulate ? load(dx + i) + value : value);
  }
}

PEARL_SIMD void tanh_backward(const float* dy, const float* y, float* dx, std::size_t count, bool accumulate) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const F out = load(y + i);
    const F slope = spread(1.0f) - out * out;
    const F value = load(dy + i) * slope;
    store(dx + i, accumulate ? load(dx + i) + value : value);
  }
}

PEARL_SIMD void scale(const float* x, float factor, float* y, std::size_t count, bool accumulate) {
  const F by = spread(factor);
  for (std::size_t i = 0; i < count; i += kLanes)
    store(y + i, accumulate ? multiply_add(by, load(x + i), load(y + i)) : by * load(x + i));
}

PEARL_SIMD void scale_bytes(const std::uint8_t* x, float factor, float* y, std::size_t count) {
  const F by = spread(factor);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, by * load_bytes(x + i));
  for (; i < count; ++i) y[i] = factor * static_cast<float>(x[i]);
}

// Over the positions of a feature map

PEARL_SIMD void max_pool(const PoolWindow& window, const float* x, float* y) {
  for (std::size_t c = 0; c < window.channels; c += kLanes) {
    const std::size_t left = window.channels - c;
    F most = left < kLanes ? load_first(x + c, left) : load(x + c);
    for (std::size_t i = 0; i < window.rows; ++i)
      for (std::size_t j = 0; j < window.columns; ++j) {
        const float* at = x + i * window.row + j * window.channels + c;
        most = max(left < kLanes ? load_first(at, left) : load(at), most);
      }
    left < kLanes ? store_first(y + c, most, left) : store(y + c, most);
  }
}

PEARL_SIMD void max_pool_backward(const PoolWindow& window, const float* x, const float* y, const float* dy, float* dx) {
  for (std::size_t c = 0; c < window.channels; c += kLanes) {
    const std::size_t left = window.channels - c;
    const bool partial = left < kLanes;
    const F most = partial ? load_first(y + c, left) : load(y + c);
    F slope = partial ? load_first(dy + c, left) : load(dy + c);  // 0 once a position has taken it
    for (std::size_t i = 0; i < window.rows; ++i)
      for (std::size_t j = 0; j < window.columns; ++j) {
        const std::size_t at = i * window.row + j * window.channels + c;
        const F value = partial ? load_first(x + at, left) : load(x + at);
        const F before = partial ? load_first(dx + at, left) : load(dx + at);
        const F after = before + where_above(most, value, zero(), slope);
        slope = where_above(most, value, slope, zero());
        partial ? store_first(dx + at, after, left) : store(dx + at, after);
      }
  }
}

// Over the features of a panel

PEARL_SIMD void sum_features(const float* x, std::size_t width, float* sums) {
  for (std::size_t j = 0; j < kPanel; j += kLanes) {
    F sum = zero();
    for (std::size_t f = 0; f < width; ++f) sum += load(x + f * kPanel + j);
    store(sums + j, sum);
  }
}

PEARL_SIMD void add_row(const float* x0, const float* x1, float factor, float* y, std::size_t width) {
  const F by = spread(factor);
  for (std::size_t j = 0; j < kPanel; j += kLanes) {
    const F row = by * load(x1 + j);
    for (std::size_t f = 0; f < width; ++f) store(y + f * kPanel + j, load(x0 + f * kPanel + j) + row);
  }
}

PEARL_SIMD void to_unit(const float* x, const float* center, const float* half_range, float* y, std::size_t width) {
  for (std::size_t f = 0; f < width; ++f)
    for (std::size_t j = 0; j < kPanel; j += kLanes)
      store(y + f * kPanel + j, (load(x + f * kPanel + j) - spread(center[f])) / spread(half_range[f]));
}

// Of `Rows` features, at most the number of lanes.
template <int Rows>
PEARL_SIMD F sums_of(const float* x, std::size_t width, std::size_t panels) {
  F sums[kLanes];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kLanes; ++i) sums[i] = zero();
  for (std::size_t p = 0; p < panels; ++p, x += width * kPanel)
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const float* at = x + static_cast<std::size_t>(i) * kPanel;
      sums[i] += load(at) + load(at + kLanes);
    }
  return totals(sums);
}

PEARL_SIMD void sum_transitions(const float* x, std::size_t width, std::size_t panels, float* sums, bool accumulate) {
  std::size_t f = 0;
  for (; f + kLanes <= width; f += kLanes) {
    const F found = sums_of<static_cast<int>(kLanes)>(x + f * kPanel, width, panels);
    store(sums + f, accumulate ? load(sums + f) + found : found);
  }
  for (; f < width; ++f) {
    const F found = sums_of<1>(x + f * kPanel, width, panels);
    store_first(sums + f, accumulate ? load_first(sums + f, 1) + found : found, 1);
  }
}

constexpr std::size_t kNarrow = kLanes / 2;

template <int Inputs, bool Bias>
PEARL_SIMD void narrow_gradients_of(const float* dy, std::size_t outputs, const float* x, std::size_t panels,
                                    std::size_t last_columns, float* weights, float* bias, bool accumulate) {
  // As many outputs at a time as fit one vector with their sums and that of the bias.
  constexpr int kSums = Inputs + (Bias ? 1 : 0), kOutputs = static_cast<int>(kLanes) / kSums;
  for (std::size_t o = 0; o < outputs; o += kOutputs) {
    const std::size_t count = outputs - o < kOutputs ? outputs - o : kOutputs;
    F sums[kLanes];
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kLanes; ++i) sums[i] = zero();
    for (std::size_t p = 0; p < panels; ++p) {
      const float* slopes = dy + (p * outputs + o) * kPanel;
      const float* inputs = x + p * Inputs * kPanel;
      const std::size_t columns = p + 1 == panels ? last_columns : kPanel;
      for (std::size_t c = 0; c < columns; c += kLanes) {
        F values[Inputs];
#pragma GCC unroll 8
        for (int i = 0; i < Inputs; ++i) values[i] = load(inputs + i * static_cast<std::ptrdiff_t>(kPanel) + c);
#pragma GCC unroll 16
        for (int k = 0; k < kOutputs; ++k) {
          // Beyond the last output, the first one is repeated; its further sums are not stored.
          const std::size_t at = static_cast<std::size_t>(k) < count ? static_cast<std::size_t>(k) : 0;
          const F slope = load(slopes + at * kPanel + c);
#pragma GCC unroll 8
          for (int i = 0; i < Inputs; ++i) sums[k * kSums + i] = multiply_add(slope, values[i], sums[k * kSums + i]);
          if constexpr (Bias) sums[k * kSums + Inputs] += slope;
        }
      }
    }
    float found[kLanes];
    store(found, totals(sums));
    for (std::size_t k = 0; k < count; ++k) {
      const float* of = found + k * kSums;
      float* to = weights + (o + k) * Inputs;
      for (int i = 0; i < Inputs; ++i) to[i] = (accumulate ? to[i] : 0.0f) + of[i];
      if constexpr (Bias) bias[o + k] = (accumulate ? bias[o + k] : 0.0f) + of[Inputs];
    }
  }
}

using NarrowGradients = void (*)(const float*, std::size_t, const float*, std::size_t, std::size_t, float*, float*,
                                 bool);

template <bool Bias, int... Inputs>
constexpr std::array<NarrowGradients, sizeof...(Inputs)> narrow_gradients_for(std::integer_sequence<int, Inputs...>) {
  return {narrow_gradients_of<Inputs + 1, Bias>...};
}

void narrow_gradients(const float* dy, std::size_t outputs, const float* x, std::size_t inputs, std::size_t panels,
                      std::size_t last_columns, float* weights, float* bias, bool accumulate) {
  static constexpr auto kInputs = std::make_integer_sequence<int, kNarrow>();
  static constexpr auto kWith = narrow_gradients_for<true>(kInputs), kWithout = narrow_gradients_for<false>(kInputs);
  const auto& table = bias == nullptr ? kWithout : kWith;
  table[inputs - 1](dy, outputs, x, panels, last_columns, weights, bias, accumulate);
}

// Over one action of a panel. NaN stays NaN everywhere: where_above() is false for it.

PEARL_INLINE F clamp(F x, F low, F high) { return where_above(low, x, low, where_above(x, high, high, x)); }

constexpr float kHalfLog2Pi = 0.9189385332046727f;

PEARL_SIMD void squash(const Squash& squash, const float* mean, const float* log_std, const float* noise,
                       std::size_t columns, float* unit, float* log_prob) {
  constexpr float kLog2 = 0.6931471805599453f;
  for (std::size_t c = 0; c < columns; c += kLanes) {
    const F deviation = clamp(load(log_std + c), spread(squash.low), spread(squash.high)), n = load(noise + c);
    const F x = multiply_add(exp_of(clamp(deviation, spread(-87.0f), spread(88.0f))), n, load(mean + c));
    // log(1 - tanh(x)^2), the same for -x.
    const F size = absolute(x);
    const F power = spread(-2.0f) * where_above(size, spread(43.0f), spread(43.0f), size);
    const F log_slope = spread(2.0f) * (spread(kLog2) - size - log1p_of(exp_of(power)));
    const F log_density = spread(-0.5f) * n * n - deviation - spread(kHalfLog2Pi);
    store(log_prob + c, load(log_prob + c) + log_density - log_slope);
    store(unit + c, tanh_of(x));
  }
}

PEARL_SIMD void squash_backward(const SquashSlopes& settings, const float* slope, const float* unit,
                                const float* log_std, const float* noise, std::size_t columns, float* of_mean,
                                float* of_log_std) {
  // The log density falls by log(1 - tanh^2), whose slope is -2 tanh, and by log_std.
  const F of_density = spread(settings.temperature * settings.share);
  const F low = spread(settings.low), high = spread(settings.high);
  for (std::size_t c = 0; c < columns; c += kLanes) {
    const F action = load(unit + c), deviation = load(log_std + c);
    const F found = multiply_add(load(slope + c), spread(1.0f) - action * action, spread(2.0f) * of_density * action);
    store(of_mean + c, found);
    const F scale = exp_of(clamp(deviation, spread(-87.0f), spread(88.0f)));
    const F inside = found * scale * load(noise + c) - of_density;
    store(of_log_std + c, where_above(low, deviation, zero(), where_above(deviation, high, zero(), inside)));
  }
}

PEARL_SIMD void layer_norm(const float* x, const float* gain, const float* shift, float eps, std::size_t width,
                           float* y, float* statistics) {
  const F share = spread(1.0f / static_cast<float>(width));
  for (std::size_t j = 0; j < kPanel; j += kLanes) {
    F sum = zero(), squares = zero();
    for (std::size_t f = 0; f < width; ++f) sum += load(x + f * kPanel + j);
    const F mean = sum * share;
    for (std::size_t f = 0; f < width; ++f) {
      const F centered = load(x + f * kPanel + j) - mean;
      squares = multiply_add(centered, centered, squares);
    }
    const F inverse = spread(1.0f) / square_root(multiply_add(squares, share, spread(eps)));
    store(statistics + j, mean);
    store(statistics + kPanel + j, inverse);
    for (std::size_t f = 0; f < width; ++f) {
      F value = (load(x + f * kPanel + j) - mean) * inverse;
      if (gain != nullptr) value *= spread(gain[f]);
      if (shift != nullptr) value += spread(shift[f]);
      store(y + f * kPanel + j, value);
    }
  }
}

PEARL_SIMD void layer_norm_backward(const float* dy, const float* x, const float* gain, const float* statistics,
                                    std::size_t width, float* dx, bool accumulate,
                                    const LayerNormGradients& gradients) {
  const F share = spread(1.0f / static_cast<float>(width));
  for (std::size_t f = 0; f < width && (gradients.gain != nullptr || gradients.shift != nullptr); ++f) {
    F gains = zero(), shifts = zero();
    for (std::size_t j = 0; j < kPanel; j += kLanes) {
      const F slope = load(dy + f * kPanel + j);
      const F unit = (load(x + f * kPanel + j) - load(statistics + j)) * load(statistics + kPanel + j);
      gains = multiply_add(slope, unit, gains);
      shifts += slope;
    }
    if (gradients.gain != nullptr) gradients.gain[f] = (gradients.accumulate ? gradients.gain[f] : 0.0f) + total(gains);
    if (gradients.shift != nullptr)
      gradients.shift[f] = (gradients.accumulate ? gradients.shift[f] : 0.0f) + total(shifts);
  }
  if (dx == nullptr) return;
  for (std::size_t j = 0; j < kPanel; j += kLanes) {
    const F mean = load(statistics + j), inverse = load(statistics + kPanel + j);
    F slopes = zero(), products = zero();
    for (std::size_t f = 0; f < width; ++f) {
      F slope = load(dy + f * kPanel + j);
      if (gain != nullptr) slope *= spread(gain[f]);
      slopes += slope;
      products = multiply_add(slope, (load(x + f * kPanel + j) - mean) * inverse, products);
    }
    slopes *= share;
    products *= share;
    for (std::size_t f = 0; f < width; ++f) {
      F slope = load(dy + f * kPanel + j);
      if (gain != nullptr) slope *= spread(gain[f]);
      const F unit = (load(x + f * kPanel + j) - mean) * inverse;
      const F value = inverse * (slope - slopes - unit * products);
      float* to = dx + f * kPanel + j;
      store(to, accumulate ? load(to) + value : value);
    }
  }
}

// Quantiles

PEARL_SIMD void quantile_regression(const QuantileRegression& regression) {
  const std::size_t count = regression.count, atoms = regression.atoms;
  const F one = spread(1.0f), half = spread(0.5f), share = spread(1.0f / static_cast<float>(atoms));
  F losses[2] = {zero(), zero()};
  for (std::size_t i = 0; i < count; ++i) {
    const F tau = spread((static_cast<float>(i) + 0.5f) / static_cast<float>(count)), rest = one - tau;
    F quantile[2], slope[2] = {zero(), zero()}, loss[2] = {zero(), zero()};
    for (std::size_t v = 0; v < 2; ++v) quantile[v] = load(regression.quantiles + i * kPanel + v * kLanes);
    for (std::size_t j = 0; j < atoms; ++j) {
#pragma GCC unroll 2
      for (std::size_t v = 0; v < 2; ++v) {
        const F distance = load(regression.targets + j * kPanel + v * kLanes) - quantile[v];
        const F clipped = max(min(distance, one), zero() - one);
        const F weighted = where_above(distance, zero(), tau, rest) * clipped;
        slope[v] -= weighted;
        // Huber's loss: clipped * (distance - clipped / 2).
        loss[v] = multiply_add(weighted, distance - half * clipped, loss[v]);
      }
    }
    for (std::size_t v = 0; v < 2; ++v) {
      store(regression.slopes + i * kPanel + v * kLanes, share * slope[v]);
      losses[v] += loss[v];
    }
  }
  for (std::size_t v = 0; v < 2; ++v) store(regression.losses + v * kLanes, share * losses[v]);
}

// Each pass carries the largest number that is left to the end.
PEARL_SIMD void keep_smallest(float* numbers, std::size_t count, std::size_t kept) {
  for (std::size_t left = count; left > kept; --left)
    for (std::size_t v = 0; v < 2; ++v) {
      float* const at = numbers + v * kLanes;
      F largest = load(at);
      for (std::size_t j = 1; j < left; ++j) {
        const F next = load(at + j * kPanel);
        store(at + (j - 1) * kPanel, min(next, largest));
        largest = max(next, largest);
      }
      store(at + (left - 1) * kPanel, largest);
    }
}

// Over parameters

PEARL_SIMD double sum_of_squares(const float* x, std::size_t count) {
  // Blocks are summed in float, their sums in double, so that a million squares lose no digits.
  constexpr std::size_t kBlock = 1024;
  double sum = 0.0;
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t end = count - start < kBlock ? count : start + kBlock;
    F even = zero(), odd = zero();
    std::size_t i = start;
    for (; i + kPanel <= end; i += kPanel) {
      const F a = load(x + i), b = load(x + i + kLanes);
      even = multiply_add(a, a, even);
      odd = multiply_add(b, b, odd);
    }
    float rest = 0.0f;
    for (; i < end; ++i) rest += x[i] * x[i];
    sum += static_cast<double>(total(even + odd)) + static_cast<double>(rest);
  }
  return sum;
}

PEARL_SIMD void add(const float* x, float* y, std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, load(y + i) + load(x + i));
  for (; i < count; ++i) y[i] += x[i];
}

constexpr float kLeastEps = 1e-30f;  // of denominators for fast quotients

// `Plain`: the gradients count as they are, and no weight decays.
template <bool Partial, bool Amsgrad, bool Plain>
PEARL_INLINE void adam_at(const AdamStep& step, float factor, const float* gradients, float* weights, float* first,
                          float* second, float* max_second, std::size_t i, std::size_t last) {
  const F beta2 = spread(step.beta2);
  F gradient = Partial ? load_first(gradients + i, last) : load(gradients + i);
  F weight = Partial ? load_first(weights + i, last) : load(weights + i);
  if constexpr (!Plain) {
    gradient = spread(factor) * gradient;
    if (step.decoupled)
      weight = spread(step.decay) * weight;
    else
      gradient = multiply_add(spread(step.decay), weight, gradient);
  }
  F m = Partial ? load_first(first + i, last) : load(first + i);
  F v = Partial ? load_first(second + i, last) : load(second + i);
  m = multiply_add(spread(step.rise1), gradient - m, m);
  v = multiply_add(spread(step.rise2) * gradient, gradient, beta2 * v);
  F top = v;
  if constexpr (Amsgrad) {
    top = max(v, Partial ? load_first(max_second + i, last) : load(max_second + i));
    Partial ? store_first(max_second + i, top, last) : store(max_second + i, top);
  }
  const F below = multiply_add(fast_root(top), spread(1.0f / step.denominator), spread(step.eps));
  const F above = spread(step.step_size) * m;
  weight = step.eps >= kLeastEps ? minus_fast_quotient(weight, above, below) : weight - above / below;
  Partial ? store_first(first + i, m, last) : store(first + i, m);
  Partial ? store_first(second + i, v, last) : store(second + i, v);
  Partial ? store_first(weights + i, weight, last) : store(weights + i, weight);
}

template <bool Amsgrad, bool Plain>
PEARL_SIMD void adam_of(const AdamStep& settings, float factor, const float* gradients, float* weights, float* first,
                        float* second, float* max_second, std::size_t count) {
  const AdamStep step = settings;  // which no store can change
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    adam_at<false, Amsgrad, Plain>(step, factor, gradients, weights, first, second, max_second, i, 0);
  if (i < count)
    adam_at<true, Amsgrad, Plain>(step, factor, gradients, weights, first, second, max_second, i, count - i);
}

void adam(const AdamStep& step, float factor, const float* gradients, float* weights, float* first, float* second,
          float* max_second, std::size_t count) {
  const bool plain = factor == 1.0f && step.decay == 0.0f && !step.decoupled;
  const auto of = max_second != nullptr ? adam_of<true, false> : plain ? adam_of<false, true> : adam_of<false, false>;
  of(step, factor, gradients, weights, first, second, max_second, count);
}

template <bool Partial>
PEARL_INLINE void sgd_at(const SgdStep& step, float factor, const float* gradients, float* weights, float* momentum,
                         std::size_t i, std::size_t last) {
  F gradient = spread(factor) * (Partial ? load_first(gradients + i, last) : load(gradients + i));
  const F weight = Partial ? load_first(weights + i, last) : load(weights + i);
  gradient = multiply_add(spread(step.decay), weight, gradient);
  if (momentum != nullptr) {
    F buffer = gradient;
    if (!step.first) {
      buffer = Partial ? load_first(momentum + i, last) : load(momentum + i);
      buffer = multiply_add(spread(step.rise), gradient, spread(step.momentum) * buffer);
    }
    Partial ? store_first(momentum + i, buffer, last) : store(momentum + i, buffer);
    gradient = step.nesterov ? multiply_add(spread(step.momentum), buffer, gradient) : buffer;
  }
  const F moved = weight - spread(step.lr) * gradient;
  Partial ? store_first(weights + i, moved, last) : store(weights + i, moved);
}

PEARL_SIMD void sgd(const SgdStep& step, float factor, const float* gradients, float* weights, float* momentum,
                    std::size_t count) {
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sgd_at<false>(step, factor, gradients, weights, momentum, i, 0);
  if (i < count) sgd_at<true>(step, factor, gradients, weights, momentum, i, count - i);
}

PEARL_SIMD void move_toward(const float* online, float tau, float* target, std::size_t count) {
  // torch.lerp counts from the nearer end.
  const F by = spread(tau < 0.5f ? tau : 1.0f - tau);
  std::size_t i = 0;
  for (; i < count; i += kLanes) {
    const std::size_t left = count - i;
    const F from = left < kLanes ? load_first(target + i, left) : load(target + i);
    const F to = left < kLanes ? load_first(online + i, left) : load(online + i);
    const F distance = by * (to - from);
    const F moved = tau < 0.5f ? from + distance : to - distance;
    left < kLanes ? store_first(target + i, moved, left) : store(target + i, moved);
  }
}

#include "ppo_body.hpp"

constexpr LearnerKernels table_of(const char* name) {
  return {name,
          kPanel,
          false,
          kNarrow,
          1,
          0,
          0,
          0,
          0,
          0,
          nullptr,
          nullptr,
          nullptr,
          kPpoKernels,
          gemm,
          turned_gemm,
          chain,
          transpose,
          relu,
          tanh,
          relu_backward,
          tanh_backward,
          scale,
          scale_bytes,
          max_pool,
          max_pool_backward,
          sum_features,
          add_row,
          to_unit,
          sum_transitions,
          narrow_gradients,
          nullptr,
          nullptr,
          squash,
          squash_backward,
          layer_norm,
          layer_norm_backward,
          quantile_regression,
          keep_smallest,
          sum_of_squares,
          add,
          adam,
          sgd,
          move_toward};
}
