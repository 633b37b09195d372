// The scan of generalized advantage estimation, for every variant. Included where these are defined: PEARL_SIMD, the
// instruction set of functions; PEARL_OP, the same for functions to inline; kMostLanes, the floats of its widest vector;
// and `widened(Lanes, from)` for the widest vectors, where GCC would convert codes one by one.
//
// Vectors are those of the compiler (GCC's and Clang's vector extensions). Each holds neighbouring environments of one
// step. Environments left over are covered by a last vector that overlaps the one before it, not by a masked one: a
// masked load waits for the masked store of the step before, since their full widths overlap.

template <class T, int lanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(lanes * sizeof(T))));
};
template <class T>
struct VectorOf<T, 1> {
  using Type = T;
};
template <class T, int lanes>
using Vector = typename VectorOf<T, lanes>::Type;

template <int lanes>
using Floats = Vector<float, lanes>;
// Each lane has all bits set, or none.
template <int lanes>
using Mask = Vector<std::int32_t, lanes>;

template <int lanes, class T>
PEARL_OP Vector<T, lanes> load(const T* from) {
  Vector<T, lanes> vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Bytes or 16-bit codes as 32-bit integers.
template <int lanes, class Code>
PEARL_OP Mask<lanes> widened(std::integral_constant<int, lanes>, const Code* from) {
  std::int32_t wide[lanes];
  for (int i = 0; i < lanes; ++i) wide[i] = from[i];
  return load<lanes>(wide);
}

template <int lanes, class Code>
PEARL_OP Mask<lanes> integers(const Code* from) {
  return (Mask<lanes>)widened(std::integral_constant<int, lanes>{}, from);
}

template <int lanes, class Code>
PEARL_OP Floats<lanes> floats(const Code* from) {
  if constexpr (lanes == 1)
    return *from;
  else
    return __builtin_convertvector(integers<lanes>(from), Floats<lanes>);
}

template <class Wide>
PEARL_OP void store(float* to, Wide vector) {
  std::memcpy(to, &vector, sizeof vector);
}

template <int lanes>
PEARL_OP Floats<lanes> every(float value) {
  return value - Floats<lanes>{};  // subtracted, since 0 + -0 is not -0
}

template <int lanes>
PEARL_OP Floats<lanes> zero_unless(Mask<lanes> mask, Floats<lanes> vector) {
  if constexpr (lanes == 1)
    return mask ? vector : 0.0f;
  else
    return (Floats<lanes>)((Mask<lanes>)vector & mask);
}

// Rewards or values as the scan reads them.
struct Numbers {
  const float* numbers;

  template <int lanes>
  PEARL_OP Floats<lanes> at(std::size_t i) const {
    return load<lanes>(numbers + i);
  }
};

template <class Code>
struct Decoded {
  const Code* codes;
  float offset, scale;
  const float* bonus;

  template <int lanes>
  PEARL_OP Floats<lanes> at(std::size_t i) const {
    const Floats<lanes> number = every<lanes>(offset) + every<lanes>(scale) * floats<lanes>(codes + i);
    return bonus == nullptr ? number : number + load<lanes>(bonus + i);
  }
};

constexpr int kInRegisters = 4;  // vectors whose sums stay in registers
constexpr int kInMemory = 32;
constexpr std::size_t kAliased = 2048;

// Scans `count` vectors of environments: from `first` on one after the other, but the last one from `last` on. Up to
// kInRegisters `most` is the count.
template <int lanes, int most, class Source>
PEARL_SIMD void scan(const GaeFactors& factors, const GaeCall& call, const Source& rewards, const Source& values,
                     std::size_t first, std::size_t last, std::size_t given) {
  const int count = most <= kInRegisters ? most : static_cast<int>(given);
  const Floats<lanes> gamma = every<lanes>(factors.gamma), decay = every<lanes>(factors.decay);
  const std::uint8_t* const ends = call.ends;
  float* const advantages = call.advantages;
  float* const returns = call.returns;
  const std::size_t envs = call.envs;
  Floats<lanes> next_value[most], advantage[most];
  for (int i = 0; i < count; ++i) {
    next_value[i] = load<lanes>(call.last_values + (i + 1 < count ? first + i * lanes : last));
    advantage[i] = Floats<lanes>{};
  }
  for (std::size_t t = call.horizon; t-- > 0;) {
    const std::size_t row = t * envs;
    // Read before the vector that it overlaps is overwritten.
    const Floats<lanes> last_reward = rewards.template at<lanes>(row + last);
    const Floats<lanes> last_value = values.template at<lanes>(row + last);
    for (int i = 0; i < count; ++i) {
      const bool at_last = i + 1 == count;
      const std::size_t at = row + (at_last ? last : first + i * lanes);
      const Floats<lanes> reward = at_last ? last_reward : rewards.template at<lanes>(at);
      const Floats<lanes> value = at_last ? last_value : values.template at<lanes>(at);
      const Mask<lanes> goes_on = integers<lanes>(ends + at) == 0;
      const Floats<lanes> delta = reward + zero_unless<lanes>(goes_on, gamma * next_value[i]) - value;
      advantage[i] = delta + zero_unless<lanes>(goes_on, decay * advantage[i]);
      store(advantages + at, advantage[i]);
      store(returns + at, value + advantage[i]);
      next_value[i] = value;
    }
  }
}

// Scans all environments, a few vectors at a time; narrower vectors where there are fewer environments than lanes.
template <int lanes, class Source>
PEARL_SIMD void scan_all(const GaeFactors& factors, const GaeCall& call, const Source& rewards, const Source& values) {
  if constexpr (lanes > 1)
    if (call.envs < lanes) return scan_all<lanes / 2>(factors, call, rewards, values);
  // Where rows lie a multiple of 2 KB apart, the low address bits of a load agree with those of the last store to the
  // row after, and the CPU waits for that store. So more of a row is scanned before the next one.
  const bool aliased = lanes == kMostLanes && call.envs * sizeof(float) % kAliased == 0;
  const std::size_t most = aliased ? kInMemory : kInRegisters;
  std::size_t first = 0;
  for (std::size_t left = (call.envs + lanes - 1) / lanes; left > 0;) {
    // The last vector may overlap the one before it: both belong to one scan.
    const std::size_t count = left == most + 1 ? most - 1 : left < most ? left : most;
    const std::size_t end = first + count * lanes;
    const std::size_t last = (end < call.envs ? end : call.envs) - lanes;
    if (count == 1) scan<lanes, 1>(factors, call, rewards, values, first, last, count);
    if (count == 2) scan<lanes, 2>(factors, call, rewards, values, first, last, count);
    if constexpr (lanes == kMostLanes) {  // narrower vectors are at most two
      if (count == 3) scan<lanes, 3>(factors, call, rewards, values, first, last, count);
      if (count == 4) scan<lanes, 4>(factors, call, rewards, values, first, last, count);
      if (count > 4) scan<lanes, kInMemory>(factors, call, rewards, values, first, last, count);
    }
    first = end;
    left -= count;
  }
}

template <class Code>
PEARL_SIMD void scan_codes(const GaeFactors& factors, const GaeCall& call) {
  const Decoded<Code> rewards{static_cast<const Code*>(call.rewards.data), call.rewards.offset, call.rewards.scale,
                              call.bonus};
  const Decoded<Code> values{static_cast<const Code*>(call.values.data), call.values.offset, call.values.scale,
                             nullptr};
  scan_all<kMostLanes>(factors, call, rewards, values);
}

PEARL_SIMD void estimate(const GaeFactors& factors, const GaeCall& call) {
  if (call.envs == 0) return;
  if (call.number_bytes == sizeof(std::uint8_t)) return scan_codes<std::uint8_t>(factors, call);
  if (call.number_bytes == sizeof(std::uint16_t)) return scan_codes<std::uint16_t>(factors, call);
  scan_all<kMostLanes>(factors, call, Numbers{static_cast<const float*>(call.rewards.data)},
                       Numbers{static_cast<const float*>(call.values.data)});
}
