// The Replay Manager's hot loops, written once over vector types: integer arithmetic and exact conversions only. Each
// replay_kernels_<isa>.cpp includes this file inside its own namespace, after defining
//
//   PEARL_SIMD       the function attribute that turns the instruction set on (given function by function, so that no
//                    shared inline function is compiled with it)
//   Wide, Half       kLanes lanes of 64 and of 32 bits; Floats are kLanes floats
//   Small            Half or Wide: whichever clips small signed numbers faster
//   Mask             one truth value per lane of Half
//   kVectors         vectors processed together
//   kPartial         whether load_half(), store_half() and store_pairs() can mask lanes; if not, only whole vectors are
//                    processed here and the plain kernels do the rest
//   kSkipping        from this fanout on, a node's children are read only as far as needed
//   pick_of_few<K>(), leaves_passed<K>(), sum_of_sixteen(), smallest(), and the operations used below
//
// No include guard and no includes: the including file has them.

template <int N>
PEARL_SIMD inline void log2_of(const Wide (&fraction)[N], const Wide (&exponent)[N], Wide (&log2)[N]) {
  for (int n = 0; n < N; ++n) log2[n] = constant(kLog2Coefficients[9]);
  for (int i = 8; i >= 0; --i)
    for (int n = 0; n < N; ++n)
      log2[n] = add(constant(kLog2Coefficients[i]), shift_right_signed<27>(multiply_narrow(log2[n], fraction[n])));
  for (int n = 0; n < N; ++n)
    log2[n] = add(shift_left<32>(exponent[n]), shift_right_signed<30>(multiply_narrow(log2[n], fraction[n])));
}

// Of the lower halves of y.
template <int N>
PEARL_SIMD inline void exp2_of(const Wide (&y)[N], Wide (&value)[N]) {
  for (int n = 0; n < N; ++n) value[n] = constant(static_cast<std::int64_t>(kExp2Coefficients[5]));
  for (int i = 4; i >= 0; --i)
    for (int n = 0; n < N; ++n)
      value[n] = add(constant(static_cast<std::int64_t>(kExp2Coefficients[i])),
                     shift_right<32>(multiply_halves(value[n], y[n])));
  for (int n = 0; n < N; ++n)
    value[n] = add(constant(std::int64_t{1} << 31), shift_right<32>(multiply_halves(value[n], y[n])));
}

// The exponent is at most 2^30.
PEARL_SIMD inline Wide power_of(Wide log2, Wide exponent) {
  return shift_right_signed<20>(multiply_narrow(shift_right_signed<8>(log2), exponent));
}

inline std::size_t items_from(std::size_t first, std::size_t count) { return count > first ? count - first : 0; }

// The first `count` of N vectors.
template <int N>
PEARL_SIMD inline void quantise_some(const float* priorities, std::size_t count, Wide alpha, Small unscaled,
                                     std::uint32_t* leaves) {
  Half bits[N];
  Wide fraction[N], exponent[N], y[N], value[N];
  for (int n = 0; n < N; ++n) {
    bits[n] = load_half(priorities + n * kLanes, items_from(n * kLanes, count), 0);
    // A subnormal is its mantissa times 2^-149, and every mantissa is a normal float.
    const Mask subnormal = below(bits[n], 0x800000);
    const Small normal = half_to_small(where(subnormal, converted_to_float(bits[n]), bits[n]));
    fraction[n] = to_wide(shift_left<4>(bit_and(normal, small(0x7FFFFF))));
    const Small unbiased = subtract(shift_right<23>(normal), small(127));
    exponent[n] = to_wide(subtract_where(subnormal, unbiased, small(149)));
  }
  log2_of(fraction, exponent, y);
  for (int n = 0; n < N; ++n) y[n] = power_of(y[n], alpha);
  exp2_of(y, value);
  for (int n = 0; n < N; ++n) {
    // Outside these bounds the final clip decides, as in round_scaled() and quantise().
    const Wide shift = to_wide(clip(subtract(unscaled, upper_halves(y[n])), 3, 34));
    const Wide half = shift_left_by(constant(1), subtract(shift, constant(1)));
    const Small clipped = clip(to_small(shift_right_by(add(value[n], half), shift)), 1, static_cast<int>(kLeafMax));
    Half leaf = small_to_half(clipped);
    leaf = where(above(bits[n], 0x7F7FFFFF), every_half(static_cast<int>(kLeafMax)), leaf);
    store_half(leaves + n * kLanes, items_from(n * kLanes, count), zero_unless(above(bits[n], 0), leaf));
  }
}

PEARL_SIMD void quantise_all(const float* priorities, std::size_t count, std::int64_t alpha_q28, int scale,
                             std::uint32_t* leaves) {
  const Wide alpha = constant(alpha_q28);
  const Small unscaled = small(31 - scale);
  std::size_t i = 0;
  if constexpr (kPartial) {
    for (; i + kLanes < count; i += kVectors * kLanes)
      quantise_some<kVectors>(priorities + i, count - i, alpha, unscaled, leaves + i);
    if (i < count) quantise_some<1>(priorities + i, count - i, alpha, unscaled, leaves + i);
  } else {
    for (; i + kVectors * kLanes <= count; i += kVectors * kLanes)
      quantise_some<kVectors>(priorities + i, kVectors * kLanes, alpha, unscaled, leaves + i);
    for (; i < count; ++i) leaves[i] = quantise(priorities[i], alpha_q28, scale);
  }
}

// The first `count` of N vectors.
template <int N>
PEARL_SIMD inline void weigh_some(const std::uint32_t* leaves, std::size_t count, Wide log2_min, Wide beta,
                                  float* weights) {
  Wide fraction[N], exponent[N], y[N], value[N];
  for (int n = 0; n < N; ++n) {
    const Wide exact = bits_as_double(load_half(leaves + n * kLanes, items_from(n * kLanes, count), 1));
    fraction[n] = bit_and(shift_right<25>(exact), constant((1 << 27) - 1));
    exponent[n] = subtract(shift_right<52>(exact), constant(1023));
  }
  log2_of(fraction, exponent, y);
  for (int n = 0; n < N; ++n) y[n] = power_of(subtract(log2_min, y[n]), beta);
  exp2_of(y, value);
  for (int n = 0; n < N; ++n) {
    const Half power = shift_left<23>(add(small_to_half(upper_halves(y[n])), every_half(127)));
    const Floats weight = multiply(multiply(rounded_to_float(value[n]), every_float(0x1p-31f)), as_floats(power));
    store_half(weights + n * kLanes, items_from(n * kLanes, count), as_half(weight));
  }
}

PEARL_SIMD void weights_of(const std::uint32_t* leaves, std::size_t count, std::uint32_t smallest,
                           std::int64_t beta_q28, float* weights) {
  const std::int64_t least = log2_q32(smallest);
  const Wide log2_min = constant(least);
  const Wide beta = constant(beta_q28);
  std::size_t i = 0;
  if constexpr (kPartial) {
    for (; i + kLanes < count; i += kVectors * kLanes)
      weigh_some<kVectors>(leaves + i, count - i, log2_min, beta, weights + i);
    if (i < count) weigh_some<1>(leaves + i, count - i, log2_min, beta, weights + i);
  } else {
    for (; i + kVectors * kLanes <= count; i += kVectors * kLanes)
      weigh_some<kVectors>(leaves + i, kVectors * kLanes, log2_min, beta, weights + i);
    for (; i < count; ++i) weights[i] = importance_weight(least, log2_q32(leaves[i]), beta_q28);
  }
}

// mulhi64() per lane; b is given as two halves.
PEARL_SIMD inline Wide mulhi(Wide a, Wide b_low, Wide b_high) {
  const Wide mask = constant(0xFFFFFFFF);
  const Wide a_high = shift_right<32>(a);
  const Wide middle = add(multiply_halves(a_high, b_low), shift_right<32>(multiply_halves(a, b_low)));
  const Wide other = add(multiply_halves(a, b_high), bit_and(middle, mask));
  return add(add(multiply_halves(a_high, b_high), shift_right<32>(middle)), shift_right<32>(other));
}

struct RandomPair {
  Wide even, odd;
};
// The numbers of lanes 2 * pair and 2 * pair + 1, of a vector of pairs.
PEARL_SIMD inline RandomPair numbers_of_pairs(std::uint64_t seed, std::uint64_t call, Wide pair) {
  const Wide mask = constant(0xFFFFFFFF), multiplier0 = constant(0xD2511F53), multiplier1 = constant(0xCD9E8D57);
  // Words are the low halves of 64-bit lanes; the high halves are never read.
  Wide word0 = pair, word1 = shift_right<32>(pair);
  Wide word2 = constant(static_cast<std::int64_t>(call & 0xFFFFFFFFu));
  Wide word3 = constant(static_cast<std::int64_t>(call >> 32));
  std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Wide product0 = multiply_halves(word0, multiplier0), product1 = multiply_halves(word2, multiplier1);
    word0 = bit_xor(shift_right<32>(product1), word1, constant(key0));
    word2 = bit_xor(shift_right<32>(product0), word3, constant(key1));
    word1 = product1;
    word3 = product0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {bit_or(bit_and(word0, mask), shift_left<32>(word1)), bit_or(bit_and(word2, mask), shift_left<32>(word3))};
}

PEARL_SIMD void numbers_of(std::uint64_t seed, std::uint64_t call, std::uint64_t first, std::size_t count,
                           std::uint64_t* numbers) {
  constexpr std::size_t kBlock = 2 * kLanes;  // lanes of one vector of pairs
  const std::size_t here = kPartial ? count : count / kBlock * kBlock;
  const Wide pairs = multiples_of(1);
  for (std::size_t at = 0; at < here; at += kBlock) {
    const Wide pair = add(constant(static_cast<std::int64_t>((first + at) / 2)), pairs);
    const auto [even, odd] = numbers_of_pairs(seed, call, pair);
    store_pairs(numbers + at, count - at, even, odd);
  }
  if (here < count) plain_replay_kernels().numbers(seed, call, first + here, count - here, numbers + here);
}

PEARL_SIMD void targets_of(std::uint64_t seed, std::uint64_t call, std::uint64_t lanes, std::uint64_t first,
                           std::size_t count, std::uint64_t total, std::uint64_t* targets) {
  constexpr std::size_t kBlock = 2 * kLanes;  // lanes of one vector of pairs
  const std::size_t here = lanes == 1 ? 0 : kPartial ? count : count / kBlock * kBlock;
  const std::uint64_t width = here == 0 ? 0 : stratum_width(lanes);
  const Wide width_low = constant(static_cast<std::int64_t>(width & 0xFFFFFFFFu));
  const Wide width_high = constant(static_cast<std::int64_t>(width >> 32));
  const Wide total_low = constant(static_cast<std::int64_t>(total & 0xFFFFFFFFu));
  const Wide total_high = constant(static_cast<std::int64_t>(total >> 32));
  const Wide pairs = multiples_of(1);
  const Wide starts = multiples_of(2 * width);
  for (std::size_t at = 0; at < here; at += kBlock) {
    const std::uint64_t lane = first + at;
    const Wide pair = add(constant(static_cast<std::int64_t>(lane / 2)), pairs);
    const auto [random0, random1] = numbers_of_pairs(seed, call, pair);
    const Wide start = add(constant(static_cast<std::int64_t>(lane * width)), starts);
    const Wide x0 = add(start, mulhi(random0, width_low, width_high));
    const Wide x1 =
        add(add(start, constant(static_cast<std::int64_t>(width))), mulhi(random1, width_low, width_high));
    store_pairs(targets + at, count - at, mulhi(x0, total_low, total_high), mulhi(x1, total_low, total_high));
  }
  if (here < count)
    plain_replay_kernels().targets(seed, call, lanes, first + here, count - here, total, targets + here);
}

template <unsigned K>
PEARL_SIMD inline unsigned pick_node(const std::uint64_t* siblings, std::uint64_t& target) {
  if constexpr (K == 2) {
    return pick_among<2>(siblings, target);
  } else if constexpr (K <= 16) {
    return pick_of_few<K>(siblings, target);
  } else if constexpr (K >= kSkipping) {
    // On average half the children need not be read: worth a mispredicted branch.
    unsigned first = 0;
    for (; first + 16 < K; first += 16) {
      const std::uint64_t sum = sum_of_sixteen(siblings + first);
      if (target < sum) break;
      target -= sum;
    }
    return first + pick_of_few<16>(siblings + first, target);
  } else {
    // First the group of sixteen, then the child.
    std::uint64_t sixteens[K / 16];
    for (unsigned i = 0; i < K / 16; ++i) sixteens[i] = sum_of_sixteen(siblings + 16 * i);
    const unsigned first = 16 * pick_among<K / 16>(sixteens, target);
    return first + pick_of_few<16>(siblings + first, target);
  }
}

// Sixteen leaves of 28 bits sum to less than 2^32.
template <unsigned K>
PEARL_SIMD inline unsigned pick_leaf(const std::uint32_t* siblings, std::uint64_t& target) {
  if constexpr (K <= 4) {
    return pick_among<K>(siblings, target);
  } else if constexpr (K <= 16) {
    return static_cast<unsigned>(_mm_popcnt_u32(leaves_passed<K>(siblings, static_cast<int>(target))));
  } else {
    std::uint32_t sixteens[K / 16];
    for (unsigned i = 0; i < K / 16; ++i) sixteens[i] = sum_of_sixteen(siblings + 16 * i);
    const unsigned first = 16 * pick_among<K / 16>(sixteens, target);
    return first + pick_leaf<16>(siblings + first, target);
  }
}

PEARL_SIMD PriorityScan scan(const float* priorities, std::size_t count) { return scan_of(priorities, count); }

PEARL_SIMD bool all_below(const std::int64_t* indices, std::size_t count, std::size_t end) {
  return all_below_of(indices, count, end);
}

template <unsigned K>
PEARL_SIMD void find(const TreeLevels& tree, std::size_t level, std::uint64_t* rest, std::size_t count,
                     std::int64_t* places, std::uint32_t* values) {
  PEARL_DESCEND(K, pick_node, pick_leaf)
}

constexpr ReplayKernels table_of(const char* name) {
  return {name,
          quantise_all,
          smallest,
          weights_of,
          numbers_of,
          targets_of,
          scan,
          all_below,
          {nullptr, find<2>, find<4>, find<8>, find<16>, find<32>, find<64>, find<128>, find<256>}};
}
