// Convolutions that leave out zeros (pearl/learner/sparse_convolution.hpp), part of sparse_body.hpp.

constexpr std::size_t kHalf = kSparse / 2;
constexpr std::size_t kAtOnce = 512;        // positions for which weights stay in the L1 cache, about
constexpr std::size_t kLeastPositions = 8;  // of a map, for which gradients are worth it

bool fits_sparse_convolution(const SparseConvolution& c) {
  if (c.run % kHalf != 0 || c.step % kHalf != 0 || c.out % kHalf != 0) return false;
  return std::all_of(c.rows.begin(), c.rows.end(), [](const auto& row) { return !row.empty(); });
}

// With runs of 32 numbers, 64 are those of two runs. They must lie as far apart at all positions, so none may be outside.
bool fits_sparse_convolution_gradients(const SparseConvolution& c) {
  const bool inside = std::all_of(c.rows.begin(), c.rows.end(), [&](const auto& row) { return row.size() == c.runs; });
  if (c.out % kLanes != 0 || c.run * c.runs % kSparse != 0 || c.run > kWidestSparse ||
      c.rows.size() * c.width < kLeastPositions)
    return false;
  return c.run % kSparse == 0 || (inside && c.run == kHalf);
}

// `Out` numbers of a result's column at a time.
template <std::size_t Out>
class SparseConvolver {
 public:
  SparseConvolver(const SparseConvolution& convolution, PanelMaps<const float> input, const float* weights,
                  const float* bias, bool relu, const float* gate, PanelMaps<float> result)
      : c_(convolution),
        in_(input),
        weights_(weights),
        bias_(bias),
        relu_(relu),
        gate_(gate),
        result_(result),
        span_((c_.width - 1) * c_.step + c_.run),
        row_bits_(span_ / kHalf + 1) {
    for (const std::vector<Meeting>& row : c_.rows)
      for (const Meeting& met : row) height_ = std::max(height_, static_cast<std::size_t>(met.place) + 1);
  }

  PEARL_SIMD bool run(std::size_t images) {
    const std::size_t shares = std::max<std::size_t>(1, images * c_.rows.size() * c_.width / kAtOnce);
    const std::size_t group = (images + shares - 1) / shares;
    bits_ = reinterpret_cast<std::uint32_t*>(sparse_memory(group * height_ * row_bits_));
    alignas(64) float weights[(kSparse + 1) * Out];
    std::memset(weights + kSparse * Out, 0, Out * sizeof(float));
    for (first_ = 0; first_ < images; first_ = last_) {
      last_ = std::min(images, first_ + group);
      const std::size_t numbers = find_bits();
      if (first_ == 0 && numbers * 16 > kMostOf16 * last_ * height_ * span_) return false;
      for (std::size_t to = 0; to < c_.out; to += Out)
        for (std::size_t tap = 0; tap < c_.runs; ++tap)
          for (std::size_t from = 0; from < c_.run; from += kSparse) {
            const std::size_t count = std::min(kSparse, c_.run - from);
            for (std::size_t k = 0; k < count; ++k)
              std::memcpy(weights + k * Out, weights_ + ((tap * c_.run + from + k) * c_.out + to), Out * sizeof(float));
            multiply(to, tap, from, count, weights);
          }
    }
    return true;
  }

 private:
  static constexpr std::size_t kVectors = Out / kLanes;

  const float* input(std::size_t image, std::size_t row) const {
    return in_.first + static_cast<std::ptrdiff_t>(image * in_.image + row * in_.row) + c_.start;
  }

  // Which numbers are no zeros: returns how many.
  PEARL_SIMD std::size_t find_bits() {
    std::size_t numbers = 0;
    std::uint32_t* to = bits_;
    for (std::size_t image = first_; image < last_; ++image)
      for (std::size_t row = 0; row < height_; ++row, to += row_bits_) {
        const float* from = input(image, row);
        for (std::size_t i = 0; i < span_; i += kHalf) {
          std::uint32_t bits = 0;
#pragma GCC unroll 4
          for (std::size_t v = 0; v < kHalf; v += kLanes) bits |= bits_nonzero(load(from + i + v)) << v;
          to[i / kHalf] = bits;
          numbers += static_cast<std::size_t>(std::popcount(bits));
        }
        to[span_ / kHalf] = 0;
      }
    return numbers;
  }

  // Up to 64 numbers of each run, for some of the result.
  PEARL_SIMD void multiply(std::size_t to, std::size_t tap, std::size_t from, std::size_t count,
                           const float* weights) const {
    const std::uint64_t all = count < kSparse ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0};
    const std::size_t width = c_.width, step = c_.step, out = c_.out, rows = c_.rows.size();
    const float* const bias = bias_ == nullptr ? nullptr : bias_ + to;
    for (std::size_t y = 0; y < rows; ++y) {
      const std::vector<Meeting>& met = c_.rows[y];
      const auto found = std::find_if(met.begin(), met.end(), [&](const Meeting& m) { return m.tap == tap; });
      if (found == met.end()) continue;
      const auto place = static_cast<std::size_t>(found->place);
      const bool starts = found == met.begin() && from == 0;
      const bool ends = found + 1 == met.end() && from + count == c_.run;
      const bool relu = ends && relu_;
      for (std::size_t image = first_; image < last_; ++image) {
        const float* numbers = input(image, place) + from;
        const std::uint32_t* bits = bits_ + ((image - first_) * height_ + place) * row_bits_ + from / kHalf;
        const std::size_t at = image * result_.image + y * result_.row + to;
        float* result = result_.first + at;
        const float* gate = ends && gate_ != nullptr ? gate_ + at : nullptr;
        for (std::size_t x = 0; x < width; ++x, numbers += step, bits += step / kHalf, result += out) {
          std::uint64_t which;
          std::memcpy(&which, bits, sizeof(which));
          F sums[kVectors];
          if (!starts)
            load_row<kVectors>(result, sums);
          else if (bias != nullptr)
            load_row<kVectors>(bias, sums);
          else
            zero_row<kVectors>(sums);
          add_rows<false, kVectors>(which & all, numbers, NextRowsOnly<Out>{{weights}}, sums);
          if (relu) rectify_row<kVectors>(sums);
          if (gate != nullptr) {
#pragma GCC unroll 16
            for (std::size_t v = 0; v < kVectors; ++v)
              sums[v] = where_positive(load(gate + x * out + v * kLanes), sums[v]);
          }
          store_row<kVectors>(result, sums);
        }
      }
    }
  }

  const SparseConvolution& c_;
  const PanelMaps<const float> in_;
  const float *const weights_, *const bias_;
  const bool relu_;
  const float* const gate_;
  const PanelMaps<float> result_;
  const std::size_t span_, row_bits_;
  std::size_t height_ = 0, first_ = 0, last_ = 0;
  std::uint32_t* bits_ = nullptr;
};

bool sparse_convolve(const SparseConvolution& convolution, std::size_t images, PanelMaps<const float> input,
                     const float* weights, const float* bias, bool relu, const float* gate, PanelMaps<float> result) {
  if (convolution.out % kSparse == 0)
    return SparseConvolver<kSparse>(convolution, input, weights, bias, relu, gate, result).run(images);
  return SparseConvolver<kHalf>(convolution, input, weights, bias, relu, gate, result).run(images);
}

// Of each of the result's numbers, the runs of numbers at the positions where it has a slope are added up: 64 positions
// at a time, and 64 numbers of their runs, which stay in the L1 cache.
class SparseConvolutionGradient {
 public:
  SparseConvolutionGradient(const SparseConvolution& convolution, PanelMaps<const float> input,
                            PanelMaps<const float> slopes)
      : c_(convolution), in_(input), slopes_(slopes), blocks_(c_.run * c_.runs / kSparse) {
    const std::size_t sums = blocks_ * c_.out * kSparse, numbers = c_.out * kRow, bits = 2 * c_.out;
    float* at = sparse_memory(sums + numbers + bits + kLanes * sparse_row(c_.out) + 2 * kPositions * c_.runs);
    sums_ = at;
    numbers_ = at += sums;
    bits_ = reinterpret_cast<std::uint64_t*>(at += numbers);
    rows_ = at += bits;
    runs_ = reinterpret_cast<const float**>(at + kLanes * sparse_row(c_.out));
    std::memset(sums_, 0, sums * sizeof(float));
  }

  PEARL_SIMD void run(std::size_t images, float* gradients) {
    const std::size_t positions = images * c_.rows.size() * c_.width;
    const std::size_t share = round_up(even_share(positions, kPositions), kLanes);
    for (std::size_t begin = 0; begin < positions; begin += share) {
      load_part(std::min(share, positions - begin));
      for (std::size_t block = 0; block < blocks_; ++block) multiply(block);
    }
    alignas(64) float turned[kLanes * kLanes];
    for (std::size_t block = 0; block < blocks_; ++block)
      for (std::size_t i = 0; i < kSparse; i += kLanes)
        for (std::size_t o = 0; o < c_.out; o += kLanes) {
          transpose_block(sums_ + (block * c_.out + o) * kSparse + i, kSparse, turned, kLanes);
          float* to = gradients + (block * kSparse + i) * c_.out + o;
          for (std::size_t k = 0; k < kLanes; ++k, to += c_.out) store(to, load(to) + load(turned + k * kLanes));
        }
  }

 private:
  static constexpr std::size_t kPositions = 64, kRow = sparse_row(kPositions);

  // Slopes of the next positions, turned, and where their runs are.
  PEARL_SIMD void load_part(std::size_t count) {
    const std::size_t row = sparse_row(c_.out);
    for (std::size_t o = 0; o < c_.out; ++o) {
      bits_[o] = 0;
      numbers_[o * kRow + kPositions] = 0.0f;
    }
    for (std::size_t from = 0; from < count; from += kLanes) {
      for (std::size_t s = 0; s < kLanes; ++s) {
        if (from + s >= count) {
          std::memset(rows_ + s * row, 0, c_.out * sizeof(float));
          continue;
        }
        std::memcpy(rows_ + s * row, slopes_.first + image_ * slopes_.image + y_ * slopes_.row + x_ * c_.out,
                    c_.out * sizeof(float));
        const std::ptrdiff_t column = static_cast<std::ptrdiff_t>(image_ * in_.image + x_ * c_.step) + c_.start;
        for (std::size_t tap = 0; tap < c_.runs; ++tap) runs_[tap * kPositions + from + s] = kZeros;
        for (const Meeting& met : c_.rows[y_])
          runs_[met.tap * kPositions + from + s] =
              in_.first + met.place * static_cast<std::ptrdiff_t>(in_.row) + column;
        if (++x_ < c_.width) continue;
        x_ = 0;
        if (++y_ < c_.rows.size()) continue;
        y_ = 0;
        ++image_;
      }
      for (std::size_t o = 0; o < c_.out; o += kLanes)
        transpose_block(rows_ + o, row, numbers_ + o * kRow + from, kRow);
      for (std::size_t o = 0; o < c_.out; ++o)
        bits_[o] |= std::uint64_t{bits_nonzero(load(numbers_ + o * kRow + from))} << from;
    }
  }

  PEARL_SIMD void multiply(std::size_t block) const {
    const std::size_t number = block * kSparse, tap = number / c_.run, within = number % c_.run, out = c_.out;
    // The second half of a block is that of a run, or the next run.
    const auto gap = c_.run % kSparse == 0 ? static_cast<std::ptrdiff_t>(kHalf)
                                           : runs_[(tap + 1) * kPositions] - runs_[tap * kPositions];
    const RunsAt runs{runs_ + tap * kPositions, within, gap};
    const float* numbers = numbers_;
    float* sums = sums_ + block * out * kSparse;
    for (std::size_t o = 0; o < out; ++o, numbers += kRow, sums += kSparse) {
      F row[kSparseVectors];
      load_row(sums, row);
      add_rows<false>(bits_[o], numbers, runs, row);
      store_row(sums, row);
    }
  }

  static constexpr float kZeros[kWidestSparse] = {};

  const SparseConvolution& c_;
  const PanelMaps<const float> in_, slopes_;
  const std::size_t blocks_;
  std::size_t image_ = 0, y_ = 0, x_ = 0;  // the next position
  float *sums_, *numbers_, *rows_;
  std::uint64_t* bits_;
  const float** runs_;  // (row of the kernel, position)
};

void add_sparse_gradients(const SparseConvolution& convolution, std::size_t images, PanelMaps<const float> input,
                          PanelMaps<const float> slopes, float* gradients) {
  SparseConvolutionGradient(convolution, input, slopes).run(images, gradients);
}

constexpr std::size_t kWord = FrameDifferences::kWord, kMostOut = 32, kLeastOut = 16;  // channels at a time

bool fits_frames(const ByteConvolution& c) {
  return c.run % kWord == 0 && c.run <= 64 && c.step % kWord == 0 && c.image_row % kWord == 0 &&
         c.row_step % kWord == 0 && c.channels % kLeastOut == 0;
}

PEARL_SIMD std::size_t differ(const std::uint8_t* image, std::size_t frames, std::size_t positions, std::int16_t base,
                              std::int16_t* planes, std::int16_t* numbers, std::uint16_t* bits) {
  for (std::size_t i = 0; i < positions; ++i) planes[i] = static_cast<std::int16_t>(image[i] - base);
  for (std::size_t i = positions; i < frames * positions; ++i)
    planes[i] = static_cast<std::int16_t>(image[i] - image[i - positions]);
  interleave(planes, frames, positions, numbers);
  const std::size_t words = frames * positions / kWord;
  std::size_t count = 0;
  for (std::size_t i = 0; i < words; ++i) {
    bits[i] = nonzero_shorts(numbers + i * kWord);
    count += static_cast<std::size_t>(std::popcount(bits[i]));
  }
  for (std::size_t i = 0; i < 4; ++i) bits[words + i] = 0;
  return count;
}

// Which of a run's numbers are no zeros.
PEARL_INLINE std::uint64_t run_bits(const std::uint16_t* bits, std::size_t at, std::uint64_t all) {
  std::uint64_t found;
  std::memcpy(&found, bits + at / kWord, sizeof(found));
  return found & all;
}

// `Out` channels of the result, from `from` on.
template <std::size_t Out>
PEARL_SIMD void convolve_frames(const ByteConvolution& c, const FrameDifferences& differences, const float* weights,
                                const float* bias, bool relu, float* result, std::size_t from) {
  constexpr std::size_t kVectors = Out / kLanes;
  const std::uint64_t all = c.run < 64 ? (std::uint64_t{1} << c.run) - 1 : ~std::uint64_t{0};
  const std::size_t runs = c.runs, run = c.run, out = c.channels, row = c.image_row;
  for (std::size_t y = 0; y < c.height; ++y)
    for (std::size_t x = 0; x < c.width; ++x) {
      F sums[kVectors];
#pragma GCC unroll 16
      for (std::size_t v = 0; v < kVectors; ++v) sums[v] = load(bias + from + v * kLanes);
      std::size_t at = y * c.row_step + x * c.step;
      const float* of_run = weights + from;
      for (std::size_t k = 0; k < runs; ++k, at += row, of_run += run * out)
        for (std::uint64_t which = run_bits(differences.bits, at, all); which != 0; which &= which - 1) {
          const std::size_t i = lowest_bit(which);
          const F number = spread_short(differences.numbers[at + i]);
#pragma GCC unroll 16
          for (std::size_t v = 0; v < kVectors; ++v)
            sums[v] = multiply_add(number, load(of_run + i * out + v * kLanes), sums[v]);
        }
      float* const to = result + y * c.result_row + x * out + from;
#pragma GCC unroll 16
      for (std::size_t v = 0; v < kVectors; ++v) store(to + v * kLanes, relu ? max(sums[v], zero()) : sums[v]);
    }
}

void convolve_all_frames(const ByteConvolution& c, const FrameDifferences& differences, const float* weights,
                         const float* bias, bool relu, float* result) {
  std::size_t from = 0;
  for (; from + kMostOut <= c.channels; from += kMostOut)
    convolve_frames<kMostOut>(c, differences, weights, bias, relu, result, from);
  if (from < c.channels) convolve_frames<kLeastOut>(c, differences, weights, bias, relu, result, from);
}

template <std::size_t Out>
PEARL_SIMD void add_frame_gradients(const ByteConvolution& c, const FrameDifferences& differences, std::size_t frames,
                                    const float* slopes, float* gradients, std::size_t from) {
  constexpr std::size_t kVectors = Out / kLanes;
  const std::uint64_t all = c.run < 64 ? (std::uint64_t{1} << c.run) - 1 : ~std::uint64_t{0};
  const std::size_t runs = c.runs, run = c.run, out = c.channels, row = c.image_row;
  F totals[kVectors];
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kVectors; ++v) totals[v] = zero();
  for (std::size_t y = 0; y < c.height; ++y)
    for (std::size_t x = 0; x < c.width; ++x) {
      F slope[kVectors];
#pragma GCC unroll 16
      for (std::size_t v = 0; v < kVectors; ++v) {
        slope[v] = load(slopes + y * c.result_row + x * out + from + v * kLanes);
        totals[v] += slope[v];
      }
      std::size_t at = y * c.row_step + x * c.step;
      float* of_run = gradients + from;
      for (std::size_t k = 0; k < runs; ++k, at += row, of_run += run * out)
        for (std::uint64_t which = run_bits(differences.bits, at, all); which != 0; which &= which - 1) {
          const std::size_t i = lowest_bit(which);
          const F number = spread_short(differences.numbers[at + i]);
          float* const to = of_run + i * out;
#pragma GCC unroll 16
          for (std::size_t v = 0; v < kVectors; ++v)
            store(to + v * kLanes, multiply_add(number, slope[v], load(to + v * kLanes)));
        }
    }
  const F base = spread(static_cast<float>(differences.base));
  for (std::size_t number = 0; number < runs * run; number += frames)
#pragma GCC unroll 16
    for (std::size_t v = 0; v < kVectors; ++v) {
      float* const to = gradients + number * out + from + v * kLanes;
      store(to, multiply_add(base, totals[v], load(to)));
    }
}

void add_all_frame_gradients(const ByteConvolution& c, const FrameDifferences& differences, std::size_t frames,
                             const float* slopes, float* gradients) {
  std::size_t from = 0;
  for (; from + kMostOut <= c.channels; from += kMostOut)
    add_frame_gradients<kMostOut>(c, differences, frames, slopes, gradients, from);
  if (from < c.channels) add_frame_gradients<kLeastOut>(c, differences, frames, slopes, gradients, from);
}

constexpr SparseConvolutionKernels kSparseConvolutionKernels = {
    fits_sparse_convolution,
    fits_sparse_convolution_gradients,
    sparse_convolve,
    add_sparse_gradients,
    {fits_frames, differ, convolve_all_frames, add_all_frame_gradients}};
