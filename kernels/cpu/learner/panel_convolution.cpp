#include "pearl/learner/panel_convolution.hpp"

#include "amx_blocks.hpp"
#include "avx512_turn.hpp"

#if defined(PEARL_AMX)

#include <algorithm>
#include <cstring>

namespace pearl::learner {
namespace {

using namespace amx;

constexpr std::size_t kImages = 2 * kLanes;  // of a panel

// Numbers from block to block: of 16 rows or columns and 32 steps, in parts.
template <std::size_t Parts>
constexpr std::size_t kSize = Parts * kTileNumbers;

PEARL_AMX_SIMD void configure(std::size_t left_rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.bytes[tile] = 64;
    shapes.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? left_rows : kLanes);
  }
  set_up_tiles(shapes);
}

// Rows of an input. A few are held in the form of the products' factors: those that consecutive rows of the result
// share.
class HeldRows {
 public:
  explicit HeldRows(const std::vector<std::vector<Meeting>>& rows) : until_(rows.size() + 1, 0) {
    std::vector<std::size_t> from(rows.size());
    for (std::size_t y = 0; y < rows.size(); ++y) {
      until_[y] = y == 0 ? 0 : until_[y - 1];
      for (const Meeting& met : rows[y]) until_[y] = std::max(until_[y], static_cast<std::size_t>(met.place) + 1);
    }
    until_.back() = rows.empty() ? 0 : until_[rows.size() - 1];
    for (std::size_t y = rows.size(), first = until_.back(); y-- > 0; from[y] = first)
      for (const Meeting& met : rows[y]) first = std::min(first, static_cast<std::size_t>(met.place));
    for (std::size_t y = 0; y < rows.size(); ++y) count_ = std::max(count_, until_[y + 1] - from[y]);
  }

  std::size_t count() const { return count_; }
  // The rows that row `y` of the result and those before it need.
  std::size_t until(std::size_t y) const { return until_[y]; }
  std::size_t slot(std::size_t row) const { return row % count_; }

 private:
  std::vector<std::size_t> until_;
  std::size_t count_ = 1;
};

template <std::size_t Parts>
PEARL_AMX_SIMD void pack(const PanelConvolution& c, const float* weights, std::uint16_t* parts) {
  const std::size_t taps = c.kernel[0] * c.kernel[1], row = c.out;
  for (std::size_t tap = 0; tap < taps; ++tap)
    for (std::size_t k = 0; k < c.in; k += kDepth)
      for (std::size_t n = 0; n < c.out; n += kLanes, parts += kSize<Parts>)
        for (std::size_t i = 0; i < kLanes; ++i) {
          const float* even = weights + (tap * c.in + k + i) * row + n;
          split<Parts>(_mm512_loadu_ps(even), _mm512_loadu_ps(even + kLanes * row), parts + i * kDepth);
        }
}

// The rows of a tile are images; positions of the result come one after the other. While the tiles' unit multiplies,
// the vector units split the rows that the next row of the result needs, and finish sums.
template <std::size_t Parts>
class Convolution {
 public:
  Convolution(const PanelConvolution& convolution, std::size_t images, PanelMaps<const float> input,
              const std::uint16_t* parts, const Gemm& of_result)
      : c(convolution),
        g(of_result),
        in_(input),
        parts_(parts),
        images_(images),
        tiles_((images + kLanes - 1) / kLanes),
        rows_((images + tiles_ - 1) / tiles_),
        chunks_(c.in / kDepth),
        held_(c.rows),
        in_row_(c.width * chunks_ * tiles_ * kSize<Parts>) {}

  PEARL_AMX_SIMD void run(std::size_t result_row) {
    ring_ = memory(held_.count() * in_row_ + kSize<Parts>);
    zeros_ = ring_ + held_.count() * in_row_;
    std::fill_n(zeros_, kSize<Parts>, std::uint16_t{0});
    // Positions with the same columns of the kernel, two of which are multiplied together if one tile holds the images.
    std::vector<std::size_t> order;
    for (std::size_t phase = 0; phase < c.step; ++phase)
      for (std::size_t x = phase; x < c.columns.size(); x += c.step) order.push_back(x);
    configure(rows_);
    const std::size_t blocks = c.out / kLanes;
    for (std::size_t y = 0; y < c.rows.size(); ++y) {
      end_ = held_.until(y);
      split_all();
      end_ = held_.until(y + 1);
      for (std::size_t n = 0; n < blocks; n += 2)
        for (std::size_t i = 0; i < order.size();) {
          const std::size_t x = order[i];
          const bool pair = tiles_ == 1 && i + 1 < order.size() && order[i + 1] == x + c.step;
          const std::size_t positions[2] = {x, pair ? order[i + 1] : x};
          const std::size_t rows = pair || tiles_ == 2 ? 2 : 1;
          multiply_positions(y, positions, n, rows);
          store_sums([&](int tile) { return sums_[tile]; });
          for (std::size_t tile = 0; tile < rows; ++tile)
            for (std::size_t j = 0; j < 2; ++j) {
              const std::size_t first = tiles_ == 2 ? tile * rows_ : 0, channel = (n + j) * kLanes;
              const std::size_t at = first * static_cast<std::size_t>(g.c_row) + y * result_row +
                                     positions[tile] * c.out + channel;
              finishes_[waiting_++] = {sums_[2 * tile + j],
                                       std::min(rows_, images_ - first),
                                       0xFFFF,
                                       g.c + at,
                                       g.bias == nullptr ? nullptr : g.bias + channel,
                                       g.gate == nullptr ? nullptr : g.gate + at};
            }
          i += pair ? 2 : 1;
        }
    }
    finish_all();
    give_up_tiles();
  }

 private:
  // Two tiles of images, of one position or of two, and the channels from 16 `n` on, if there are two `rows`.
  PEARL_AMX_SIMD void multiply_positions(std::size_t y, const std::size_t* positions, std::size_t n, std::size_t rows) {
    const std::size_t blocks = c.out / kLanes, second = tiles_ == 2 ? kSize<Parts> : 0;
    const auto meanwhile = [&] PEARL_AMX_SIMD __attribute__((always_inline)) { work(); };
    zero_sums();
    for (const Meeting& row : c.rows[y]) {
      const std::uint16_t* const from = ring_ + held_.slot(static_cast<std::size_t>(row.place)) * in_row_;
      for (std::size_t t = 0; t < c.columns[positions[0]].size(); ++t) {
        const Meeting column[2] = {c.columns[positions[0]][t], c.columns[positions[1]][t]};
        if (column[0].place < 0 && column[1].place < 0) continue;
        const std::uint16_t* weights =
            parts_ + ((row.tap * c.kernel[1] + column[0].tap) * chunks_ * blocks + n) * kSize<Parts>;
        for (std::size_t chunk = 0; chunk < chunks_; ++chunk, weights += blocks * kSize<Parts>) {
          const auto at = [&](const Meeting& met) {
            return met.place < 0
                       ? zeros_
                       : from + (static_cast<std::size_t>(met.place) * chunks_ + chunk) * tiles_ * kSize<Parts>;
          };
          const std::uint16_t* const left[2] = {at(column[0]), at(column[1]) + second};
          const std::uint16_t* const right[2] = {weights, weights + kSize<Parts>};
          if (rows == 2)
            multiply<Parts, Parts, 2, 2>(left, right, meanwhile);
          else
            multiply<Parts, Parts, 1, 2>(left, right, meanwhile);
        }
      }
    }
    finish_all();
  }

  PEARL_AMX_SIMD __attribute__((noinline)) void work() {
    if (waiting_ > 0)
      finish_rows();
    else
      split_rows();
  }
  PEARL_AMX_INLINE void finish_rows() {
    const Finish& finish = finishes_[waiting_ - 1];
    finish.do_rows(g, g.accumulate, g.relu, finish_row_);
    finish_row_ += kFinishRows;
    if (finish_row_ < finish.rows) return;
    finish_row_ = 0;
    --waiting_;
  }
  PEARL_AMX_SIMD void finish_all() {
    while (waiting_ > 0) finish_rows();
  }
  PEARL_AMX_INLINE bool split_rows() {
    if (split_row_ >= rows_ && !begin_split()) return false;
    split_.template do_rows<Parts>(split_row_);
    split_row_ += kSplitRows;
    return true;
  }
  PEARL_AMX_SIMD void split_all() {
    while (split_rows()) {
    }
  }
  // The next position, channels and images.
  bool begin_split() {
    if (next_ == end_) return false;
    const std::size_t first = tile_ * rows_, k = chunk_ * kDepth, count = std::min(rows_, images_ - first);
    const float* from = in_.first + first * in_.image + next_ * in_.row + x_ * c.in + k;
    split_ = {from, from + kLanes, static_cast<std::ptrdiff_t>(in_.image), 0xFFFF, 0xFFFF, count, count,
              ring_ + held_.slot(next_) * in_row_ + ((x_ * chunks_ + chunk_) * tiles_ + tile_) * kSize<Parts>};
    split_row_ = 0;
    if (++tile_ < tiles_) return true;
    tile_ = 0;
    if (++chunk_ < chunks_) return true;
    chunk_ = 0;
    if (++x_ < c.width) return true;
    x_ = 0;
    ++next_;
    return true;
  }

  const PanelConvolution& c;
  const Gemm& g;  // what is done with the sums: c, c_row from image to image
  const PanelMaps<const float> in_;
  const std::uint16_t* const parts_;
  const std::size_t images_, tiles_, rows_, chunks_;  // tiles of `rows_` images, chunks of 32 channels
  const HeldRows held_;
  const std::size_t in_row_;
  std::uint16_t *ring_ = nullptr, *zeros_ = nullptr;
  std::size_t next_ = 0, end_ = 0, x_ = 0, chunk_ = 0, tile_ = 0, split_row_ = kLanes;  // of what is split
  std::size_t waiting_ = 0, finish_row_ = 0;
  Split split_ = {};
  Finish finishes_[4];
  alignas(64) float sums_[4][kLanes * kLanes];
};

template <std::size_t Parts>
void convolve(const PanelConvolution& c, std::size_t images, PanelMaps<const float> input, const std::uint16_t* parts,
              const float* bias, bool relu, bool accumulate, const float* gate, PanelMaps<float> result) {
  Gemm g{};
  g.c = result.first;
  g.c_row = static_cast<std::ptrdiff_t>(result.image);
  g.bias = bias;
  g.bias_of_columns = true;
  g.accumulate = accumulate;
  g.relu = relu;
  g.gate = gate;
  Convolution<Parts>(c, images, input, parts, g).run(result.row);
}

// Rows of an input of floats as tiles of 16 channels and 32 images, in pairs of images.
template <std::size_t Parts>
class FloatRows {
 public:
  static constexpr std::size_t kParts = Parts;

  FloatRows(const PanelConvolution& c, std::size_t images, PanelMaps<const float> input)
      : in_(input),
        blocks_(c.in / kLanes),
        width_(c.width),
        even_(first_lanes((images + 1) / 2)),
        odd_(first_lanes(images / 2)) {}

  std::size_t size() const { return width_ * blocks_ * kSize<Parts>; }  // of a row
  // Where the 16 numbers from `number` on of a row of the kernel are, if it begins at position `place`.
  std::size_t offset(std::size_t place, std::size_t number) const {
    return (place * blocks_ + number / kLanes) * kSize<Parts>;
  }
  // Does a part of row `y` and says whether there is more.
  PEARL_AMX_INLINE bool do_part(std::size_t y, std::uint16_t* to) {
    constexpr std::size_t kAtOnce = 4;  // channels
    const float* from = in_.first + y * in_.row + at_;
    __m512 even[kAtOnce], odd[kAtOnce];
    turn_columns(from, 2 * in_.image, even);
    turn_columns(from + in_.image, 2 * in_.image, odd);
    std::uint16_t* target = to + at_ / kLanes * kSize<Parts> + at_ % kLanes * kDepth;
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kAtOnce; ++i)
      split<Parts>(_mm512_maskz_mov_ps(even_, even[i]), _mm512_maskz_mov_ps(odd_, odd[i]), target + i * kDepth);
    at_ += kAtOnce;
    if (at_ < width_ * blocks_ * kLanes) return true;
    at_ = 0;
    return false;
  }

 private:
  const PanelMaps<const float> in_;
  const std::size_t blocks_, width_;
  const __mmask16 even_, odd_;
  std::size_t at_ = 0;
};

// Sixteen whole numbers in bfloat16: the upper half of a float, here without a remainder.
PEARL_AMX_INLINE __m256i widened(__m128i bytes) {
  const __m512i number = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(number, 16));
}

// Rows of an input of bytes, whose numbers are bfloat16: each of 32 images.
class ByteRows {
 public:
  static constexpr std::size_t kParts = 1;

  ByteRows(const std::uint8_t* bytes, std::size_t images, std::size_t channels, std::size_t height, std::size_t width,
           std::size_t step)
      : bytes_(bytes), images_(images), channels_(channels), height_(height), width_(width), step_(step) {}

  std::size_t size() const { return width_ * channels_ * kImages; }
  std::size_t offset(std::size_t place, std::size_t number) const { return (place * step_ + number) * kImages; }
  PEARL_AMX_INLINE bool do_part(std::size_t y, std::uint16_t* to) {
    const std::size_t count = std::min(kLanes, width_ - x_), image = channels_ * height_ * width_;
    const auto lanes = first_lanes(count);
    const std::uint8_t* from = bytes_ + (channel_ * height_ + y) * width_ + x_;
    // Sixteen bytes of 32 images; four rounds of interleaving turn them.
    __m256i rows[kLanes], mixed[kLanes];
    const auto load = [&](std::size_t i) PEARL_AMX_SIMD __attribute__((always_inline)) {
      return i < images_ ? _mm_maskz_loadu_epi8(lanes, from + i * image) : _mm_setzero_si128();
    };
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kLanes; ++i)
      rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + kLanes), 1);
    const auto interleave = [](const __m256i* x, __m256i* y) PEARL_AMX_SIMD __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kLanes / 2; ++i) {
        y[2 * i] = _mm256_unpacklo_epi8(x[i], x[i + kLanes / 2]);
        y[2 * i + 1] = _mm256_unpackhi_epi8(x[i], x[i + kLanes / 2]);
      }
    };
    interleave(rows, mixed);
    interleave(mixed, rows);
    interleave(rows, mixed);
    interleave(mixed, rows);
    std::uint16_t* target = to + (x_ * channels_ + channel_) * kImages;
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kLanes; ++i) {
      if (i == count) break;
      auto* at = reinterpret_cast<__m256i*>(target + i * channels_ * kImages);
      _mm256_store_si256(at, widened(_mm256_castsi256_si128(rows[i])));
      _mm256_store_si256(at + 1, widened(_mm256_extracti128_si256(rows[i], 1)));
    }
    x_ += kLanes;
    if (x_ < width_) return true;
    x_ = 0;
    if (++channel_ < channels_) return true;
    channel_ = 0;
    return false;
  }

 private:
  const std::uint8_t* const bytes_;
  const std::size_t images_, channels_, height_, width_, step_;
  std::size_t x_ = 0, channel_ = 0;
};

// The weights' gradient: a tile's rows are numbers under a row of the kernel, its steps the images. Row by row of the
// result, so that the rows of the input that it needs stay in the cache, the sums are read and written.
template <class Rows, std::size_t Parts>
class Gradients {
 public:
  // `run` numbers under a row of the kernel; places: of each column of the result, where it meets those.
  Gradients(Rows& rows, const std::vector<std::vector<Meeting>>& meetings, std::size_t run, std::size_t out,
            std::size_t images, PanelMaps<const float> slopes, float scale)
      : source_(rows),
        meetings_(meetings),
        run_(run),
        out_(out),
        images_(images),
        slopes_(slopes),
        scale_(scale),
        held_(meetings) {}

  // offsets: of each column of the result, for each 16 numbers of a run, those in a row of the source, or kOutside.
  PEARL_AMX_SIMD void run(const std::vector<std::size_t>& offsets, std::size_t columns, float* gradients) {
    const std::size_t blocks = run_ / kLanes, out_blocks = out_ / kLanes, row = source_.size();
    const std::size_t slopes_row = columns * out_blocks * kSize<Parts>;
    columns_ = columns;
    ring_ = memory(held_.count() * row + 2 * slopes_row);
    split_slopes_[0] = ring_ + held_.count() * row;
    split_slopes_[1] = split_slopes_[0] + slopes_row;
    configure(kLanes);
    const auto stride = static_cast<long>(out_ * sizeof(float));
    const auto meanwhile = [&] PEARL_AMX_SIMD __attribute__((always_inline)) { work(); };
    for (std::size_t y = 0; y < meetings_.size(); ++y) {
      end_ = held_.until(y);
      slopes_end_ = y + 1;
      while (work()) {
      }
      end_ = held_.until(y + 1);
      slopes_end_ = std::min(meetings_.size(), y + 2);
      for (const Meeting& met : meetings_[y]) {
        const std::uint16_t* const from = ring_ + held_.slot(static_cast<std::size_t>(met.place)) * row;
        for (std::size_t block = 0; block < blocks; block += 2)
          for (std::size_t n = 0; n < out_blocks; n += 2) {
            float* const c = gradients + (met.tap * run_ + block * kLanes) * out_ + n * kLanes;
            float* const below = c + kLanes * out_;
            _tile_loadd(0, c, stride);
            _tile_loadd(1, c + kLanes, stride);
            _tile_loadd(2, below, stride);
            _tile_loadd(3, below + kLanes, stride);
            for (std::size_t x = 0; x < columns; ++x) {
              const std::size_t* const at = offsets.data() + x * blocks + block;
              if (at[0] == kOutside) continue;
              const std::uint16_t* const left[2] = {from + at[0], from + at[1]};
              const std::uint16_t* const slopes = split_slopes_[y % 2] + (x * out_blocks + n) * kSize<Parts>;
              const std::uint16_t* const right[2] = {slopes, slopes + kSize<Parts>};
              multiply<Rows::kParts, Parts, 2, 2>(left, right, meanwhile);
            }
            _tile_stored(0, c, stride);
            _tile_stored(1, c + kLanes, stride);
            _tile_stored(2, below, stride);
            _tile_stored(3, below + kLanes, stride);
          }
      }
    }
    give_up_tiles();
  }

  static constexpr std::size_t kOutside = ~std::size_t{0};

 private:
  // A part of what is to be split: of the slopes, then of the input.
  PEARL_AMX_SIMD __attribute__((noinline)) bool work() {
    if (next_slopes_ < slopes_end_) {
      split_some_slopes();
      return true;
    }
    if (next_ == end_) return false;
    if (!source_.do_part(next_, ring_ + held_.slot(next_) * source_.size())) ++next_;
    return true;
  }
  PEARL_AMX_INLINE void split_some_slopes() {
    const float* from = slopes_.first + next_slopes_ * slopes_.row + number_;
    const std::size_t block = number_ / kLanes;
    std::uint16_t* to = split_slopes_[next_slopes_ % 2] + block * kSize<Parts>;
    const __m512 by = _mm512_set1_ps(scale_);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kSplitRows; ++i) {
      const std::size_t image = 2 * (pair_ + i);
      const float* even = from + image * slopes_.image;
      const auto has = [&](std::size_t k) { return static_cast<__mmask16>(k < images_ ? 0xFFFF : 0); };
      split<Parts>(_mm512_mul_ps(by, _mm512_maskz_loadu_ps(has(image), even)),
                   _mm512_mul_ps(by, _mm512_maskz_loadu_ps(has(image + 1), even + slopes_.image)),
                   to + (pair_ + i) * kDepth);
    }
    pair_ += kSplitRows;
    if (pair_ < kLanes) return;
    pair_ = 0;
    number_ += kLanes;
    if (number_ < columns_ * out_) return;
    number_ = 0;
    ++next_slopes_;
  }

  Rows& source_;
  const std::vector<std::vector<Meeting>>& meetings_;
  const std::size_t run_, out_, images_;
  const PanelMaps<const float> slopes_;
  const float scale_;
  const HeldRows held_;
  std::size_t columns_ = 0;
  std::uint16_t *ring_ = nullptr, *split_slopes_[2] = {};
  std::size_t next_ = 0, end_ = 0, next_slopes_ = 0, slopes_end_ = 0, number_ = 0, pair_ = 0;
};

template <std::size_t Parts>
void add_gradients(const PanelConvolution& c, std::size_t images, PanelMaps<const float> input,
                   PanelMaps<const float> slopes, float* gradients) {
  using Work = Gradients<FloatRows<Parts>, Parts>;
  FloatRows<Parts> rows(c, images, input);
  const std::size_t run = c.kernel[1] * c.in;
  std::vector<std::size_t> offsets;
  for (const std::vector<Meeting>& column : c.columns)
    for (const Meeting& met : column)
      for (std::size_t channel = 0; channel < c.in; channel += kLanes)
        offsets.push_back(met.place < 0 ? Work::kOutside : rows.offset(static_cast<std::size_t>(met.place), channel));
  Work(rows, c.rows, run, c.out, images, slopes, 1.0f).run(offsets, c.columns.size(), gradients);
}

bool fits_bytes(const ByteConvolution& c) { return c.run % kDepth == 0 && c.channels % kDepth == 0; }

template <std::size_t Parts>
void add_byte_gradients(const ByteConvolution& c, std::size_t images, const std::uint8_t* bytes, std::size_t channels,
                        std::size_t height, std::size_t width, float scale, PanelMaps<const float> slopes,
                        float* gradients) {
  ByteRows rows(bytes, images, channels, height, width, c.step);
  std::vector<std::vector<Meeting>> meetings(c.height);
  for (std::size_t y = 0; y < c.height; ++y)
    for (std::size_t tap = 0; tap < c.runs; ++tap)
      meetings[y].push_back({static_cast<std::ptrdiff_t>(y * (c.row_step / c.image_row) + tap), tap});
  std::vector<std::size_t> offsets;
  for (std::size_t x = 0; x < c.width; ++x)
    for (std::size_t number = 0; number < c.run; number += kLanes) offsets.push_back(rows.offset(x, number));
  Gradients<ByteRows, Parts>(rows, meetings, c.run, c.channels, images, slopes, scale).run(offsets, c.width, gradients);
}

template <std::size_t Parts>
constexpr PanelConvolutionKernels kKernels = {pack<Parts>, convolve<Parts>, add_gradients<Parts>, fits_bytes,
                                              add_byte_gradients<Parts>};

}  // namespace

const PanelConvolutionKernels& panel_convolution_kernels(bool reduced) {
  return reduced ? kKernels<2> : kKernels<3>;
}

}  // namespace pearl::learner

#endif
