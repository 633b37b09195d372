// The loops over PPO's rows, part of kernels_body.hpp. All of them go through a whole panel, (panel,) numbers at a
// time; the first `count` are rows. The others have no effect, even if NaN. NaN of a row stays NaN everywhere.

constexpr std::array<float, 2 * kPanel> kRowsFirst = [] {
  std::array<float, 2 * kPanel> rows{};
  for (std::size_t c = 0; c < kPanel; ++c) rows[c] = 1.0f;
  return rows;
}();

// 1 where the panel has a row, else 0.
PEARL_INLINE F rows_from(std::size_t column, std::size_t count) { return load(&kRowsFirst[kPanel - count + column]); }

// e^x for any x: 0 below -87, infinite above 88.
PEARL_INLINE F exp_of_any(F x) {
  const F low = spread(-87.0f), high = spread(88.0f);
  const F e = exp_of(clamp(x, low, high));
  return where_above(low, x, zero(), where_above(x, high, spread(std::numeric_limits<float>::infinity()), e));
}

PEARL_SIMD void normal_log_probs(const NormalRows& rows, float* distances, float* log_probs) {
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    F log_prob = zero();
    for (std::size_t j = 0; j < rows.size; ++j) {
      const std::size_t at = j * kPanel + c;
      const F distance = (load(rows.actions + at) - load(rows.means + at)) * spread(rows.inverse_deviations + j);
      store(distances + at, distance);
      log_prob -= spread(0.5f) * distance * distance + spread(rows.log_deviations[j] + kHalfLog2Pi);
    }
    store(log_probs + c, log_prob);
  }
}

PEARL_SIMD void normal_slopes(const NormalRows& rows, const float* slopes, std::size_t count, float* distances,
                              double* deviation_slopes) {
  for (std::size_t j = 0; j < rows.size; ++j) {
    F sum = zero();
    for (std::size_t c = 0; c < kPanel; c += kLanes) {
      const std::size_t at = j * kPanel + c;
      const F distance = load(distances + at), slope = load(slopes + c), is_row = rows_from(c, count);
      sum += where_positive(is_row, slope * (distance * distance - spread(1.0f)));
      store(distances + at, where_positive(is_row, slope * distance * spread(rows.inverse_deviations + j)));
    }
    deviation_slopes[j] += static_cast<double>(total(sum));
  }
}

PEARL_SIMD double softmax(const float* logits, std::size_t choices, std::size_t count, float* probabilities,
                          float* log_sums, float* entropies) {
  F entropy_sum = zero();
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    F top = load(logits + c), sum = zero();
    for (std::size_t k = 1; k < choices; ++k) top = max(load(logits + k * kPanel + c), top);
    for (std::size_t k = 0; k < choices; ++k) {
      const F e = exp_of_any(load(logits + k * kPanel + c) - top);
      store(probabilities + k * kPanel + c, e);
      sum += e;
    }
    float logs[kLanes];
    store(logs, sum);
    for (float& x : logs) x = std::log(x);
    const F log_sum = top + load(logs), scale = spread(1.0f) / sum;
    F entropy = zero();
    for (std::size_t k = 0; k < choices; ++k) {
      const F probability = load(probabilities + k * kPanel + c) * scale;
      store(probabilities + k * kPanel + c, probability);
      entropy -= probability * (load(logits + k * kPanel + c) - log_sum);
    }
    store(log_sums + c, log_sum);
    store(entropies + c, entropy);
    entropy_sum += where_positive(rows_from(c, count), entropy);
  }
  return static_cast<double>(total(entropy_sum));
}

PEARL_SIMD void softmax_slopes(const SoftmaxRows& rows, const float* slopes, float by_entropy, std::size_t count,
                               float* probabilities) {
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    const F is_row = rows_from(c, count), slope = load(slopes + c), by = spread(by_entropy);
    const F log_sum = load(rows.log_sums + c), entropy = load(rows.entropies + c);
    for (std::size_t k = 0; k < rows.choices; ++k) {
      const std::size_t at = k * kPanel + c;
      const F of_logit = slope + by * (load(rows.logits + at) - log_sum + entropy);
      store(probabilities + at, where_positive(is_row, zero() - load(probabilities + at) * of_logit));
    }
  }
}

PEARL_SIMD void policy_slopes(const PpoPolicyLoss& loss, const PpoPolicyRows& rows, std::size_t count, float* slopes,
                              PpoSums& sums) {
  const F one = spread(1.0f), low = spread(1.0f - loss.clip_range), high = spread(1.0f + loss.clip_range);
  F gain = zero(), divergence = zero(), clipped = zero();
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    const F is_row = rows_from(c, count), advantage = load(rows.advantages + c);
    const F log_ratio = load(rows.log_probs + c) - load(rows.old_log_probs + c), ratio = exp_of_any(log_ratio);
    // An advantage rewards the ratio up to a bound, and a negative one down to a bound: beyond it, there is no slope.
    const F nearest = where_above(advantage, zero(), where_above(ratio, high, high, ratio),
                                  where_above(zero(), advantage, where_above(low, ratio, low, ratio), ratio));
    const F rise = where_above(absolute(ratio - nearest), zero(), zero(), advantage);
    gain += where_positive(is_row, nearest * advantage);
    // An infinite ratio gives NaN even where it is clipped, as in torch: the step is refused.
    store(slopes + c, where_positive(is_row, (zero() - rise) * ratio * spread(loss.share)));
    divergence += where_positive(is_row, ratio - one - log_ratio);
    clipped += where_positive(is_row, where_above(absolute(ratio - one), spread(loss.clip_range), one, zero()));
  }
  sums.policy_loss -= static_cast<double>(total(gain));
  sums.divergence += static_cast<double>(total(divergence));
  sums.clipped += static_cast<double>(total(clipped));
}

PEARL_SIMD void value_slopes(const PpoValueLoss& loss, const PpoValueRows& rows, std::size_t count, float* slopes,
                             PpoSums& sums) {
  const F range = spread(loss.clip_range);
  F squares = zero();
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    const F is_row = rows_from(c, count), target = load(rows.returns + c), value = load(rows.values + c);
    const F error = value - target;
    F square = error * error, slope = spread(loss.factor) * error;
    if (loss.clip_range > 0.0f) {
      const F old = load(rows.old_values + c), moved = value - old;
      const F near = old + clamp(moved, zero() - range, range) - target, other = near * near;
      slope = where_above(other, square, where_above(absolute(moved), range, zero(), slope), slope);
      square = where_above(other, square, other, square);
    }
    squares += where_positive(is_row, square);
    store(slopes + c, where_positive(is_row, slope));
  }
  sums.value_loss += static_cast<double>(total(squares));
}

constexpr PpoKernels kPpoKernels = {normal_log_probs, normal_slopes, softmax,
                                    softmax_slopes,   policy_slopes, value_slopes};
