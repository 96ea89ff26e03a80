// Integer dot products of quantised panels with AVX2.
//
// What      y[row][16] = panel [K, 16] . row of rounded activations, for R = 1..4 rows in one pass over the panel
// Layout    panel.h; a 64-byte group is two registers: columns 0..7 and 8..15, taken one after the other within a block
// Tile      8 registers hold the codes of 32 values x 8 columns; 4 rows share the unpacking
// Numerics  vpmaddubsw saturates at 16 bits, so pairs are added in 16 bits only as long as they fit:
//             codes < 16: 8 groups (15 * 127 * 2 * 8 = 30480)   codes < 32: 4 groups (31496)   codes < 64: 2 groups
//                                                               (32004)
//             8-bit codes: |q| <= 128 unsigned times p with the sign of q, one group (128 * 127 * 2 = 32512)
//           Biased codes: the integer sum starts at -bias * sum(p), which is exact.
// Bound     R = 1: reading the panel from L2 or beyond; else vpmaddubsw and the broadcasts, two or three instructions
//           a group
#include "cpu/lanes_avx2.h"  // first: it includes the intrinsics with gcc's false warnings off
//
#include "cpu/kernels.h"
#include "cpu/unroll.h"

namespace v100::cpu {

namespace {

constexpr int kTileRows = 4;

inline __m256i load_256(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256 load_halves(const std::byte* p) { return _mm256_cvtph_ps(load_128(p)); }
inline __m256 unsigned_to_f32(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }
inline __m256 signed_to_f32(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

// A block of 32 values of 8 columns, unpacked.
struct PanelBlock {
  __m256i codes[8];
  __m256 scale, second_scale, minimum;  // second_scale: of the last 16 values, q6_K
};

// p: first nibble byte of the columns in hand; groups are 64 bytes apart.
inline void unpack_nibbles(const std::byte* p, __m256i* codes) {
  const __m256i mask = _mm256_set1_epi8(15);
  unroll<4>([&](auto v) V100_INLINE_LAMBDA {
    const __m256i packed = load_256(p + 64 * v);
    codes[v] = _mm256_and_si256(packed, mask);
    codes[v + 4] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
  });
}

inline void add_bit_plane(const std::byte* p, __m256i* codes) {
  const __m256i plane = load_256(p), mask = _mm256_set1_epi8(16);
  unroll<8>([&](auto g) V100_INLINE_LAMBDA {
    __m256i moved;
    if constexpr (g < 4)
      moved = _mm256_slli_epi16(plane, 4 - g);
    else
      moved = _mm256_srli_epi16(plane, g - 4);
    codes[g] = _mm256_or_si256(codes[g], _mm256_and_si256(moved, mask));
  });
}

inline void add_crumbs(const std::byte* p, __m256i* codes) {
  const __m256i mask = _mm256_set1_epi8(0x30);
  unroll<2>([&](auto half) V100_INLINE_LAMBDA {
    const __m256i plane = load_256(p + 64 * half);
    const __m256i moved[4] = {_mm256_slli_epi16(plane, 4), _mm256_slli_epi16(plane, 2), plane,
                              _mm256_srli_epi16(plane, 2)};
    unroll<4>([&](auto g) V100_INLINE_LAMBDA {
      codes[4 * half + g] = _mm256_or_si256(codes[4 * half + g], _mm256_and_si256(moved[g], mask));
    });
  });
}

// Codecs: read(panel, block, half) unpacks columns 8 * half .. 8 * half + 7. kRun: groups added in 16 bits.
struct Q8_0 {
  static constexpr bool kBias = false, kMinimum = false, kTwoScales = false, kSigned = true;
  static constexpr int kRun = 1;
  void read(const std::byte* panel, int32_t block, int half, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 1) * 1088;
    b.scale = load_halves(cell + (block & 1) * 32 + 16 * half);
    const std::byte* codes = cell + 64 + (block & 1) * 512 + 32 * half;
    const __m256i bias = _mm256_set1_epi8(-128);
    unroll<8>([&](auto g) V100_INLINE_LAMBDA { b.codes[g] = _mm256_xor_si256(load_256(codes + 64 * g), bias); });
  }
};

struct Q4_0 {
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false, kSigned = false;
  static constexpr int kRun = 8;
  void read(const std::byte* panel, int32_t block, int half, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 1) * 576;
    b.scale = load_halves(cell + (block & 1) * 32 + 16 * half);
    unpack_nibbles(cell + 64 + (block & 1) * 256 + 32 * half, b.codes);
  }
};

struct Q4_1 {
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false, kSigned = false;
  static constexpr int kRun = 8;
  void read(const std::byte* panel, int32_t block, int half, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block) * 320;
    b.scale = load_halves(cell + 16 * half);
    b.minimum = load_halves(cell + 32 + 16 * half);
    unpack_nibbles(cell + 64 + 32 * half, b.codes);
  }
};

struct Q5_0 {
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false, kSigned = false;
  static constexpr int kRun = 4;
  void read(const std::byte* panel, int32_t block, int half, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 1) * 704;
    b.scale = load_halves(cell + (block & 1) * 32 + 16 * half);
    const std::byte* codes = cell + 64 + (block & 1) * 320 + 32 * half;
    unpack_nibbles(codes + 64, b.codes);
    add_bit_plane(codes, b.codes);
  }
};

struct Q5_1 {
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false, kSigned = false;
  static constexpr int kRun = 4;
  void read(const std::byte* panel, int32_t block, int half, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block) * 384;
    b.scale = load_halves(cell + 16 * half);
    b.minimum = load_halves(cell + 32 + 16 * half);
    unpack_nibbles(cell + 128 + 32 * half, b.codes);
    add_bit_plane(cell + 64 + 32 * half, b.codes);
  }
};

// Super-blocks of 256: their scales are worked out when their first block is read.
struct Q4_K {
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false, kSigned = false;
  static constexpr int kRun = 8;
  __m256 scales[2][8], minimums[2][8];
  void read(const std::byte* panel, int32_t block, int half, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 2304;
    const int32_t j = block & 7;
    if (j == 0) read_scales(cell, half);
    b.scale = scales[half][j];
    b.minimum = minimums[half][j];
    unpack_nibbles(cell + 256 + j * 256 + 32 * half, b.codes);
  }
  void read_scales(const std::byte* cell, int half) {
    const __m256 d = load_halves(cell + 16 * half);
    const __m256 negative_dmin = _mm256_xor_ps(load_halves(cell + 32 + 16 * half), _mm256_set1_ps(-0.0f));
    const __m128i low_6 = _mm_set1_epi8(63), low_4 = _mm_set1_epi8(15), high_2 = _mm_set1_epi8(0x30);
    const std::byte* packed = cell + 64 + 8 * half;
    for (int j = 0; j < 4; ++j) {
      const __m128i a = load_64(packed + 16 * j), b = load_64(packed + 16 * (j + 4)),
                    c = load_64(packed + 16 * (j + 8));
      scales[half][j] = _mm256_mul_ps(d, unsigned_to_f32(_mm_and_si128(a, low_6)));
      minimums[half][j] = _mm256_mul_ps(negative_dmin, unsigned_to_f32(_mm_and_si128(b, low_6)));
      scales[half][j + 4] = _mm256_mul_ps(
          d, unsigned_to_f32(_mm_or_si128(_mm_and_si128(c, low_4), _mm_and_si128(_mm_srli_epi16(a, 2), high_2))));
      minimums[half][j + 4] =
          _mm256_mul_ps(negative_dmin, unsigned_to_f32(_mm_or_si128(_mm_and_si128(_mm_srli_epi16(c, 4), low_4),
                                                                    _mm_and_si128(_mm_srli_epi16(b, 2), high_2))));
    }
  }
};

struct Q6_K {
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = true, kSigned = false;
  static constexpr int kRun = 2;
  void read(const std::byte* panel, int32_t block, int half, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 3392;
    const int32_t j = block & 7;
    const __m256 d = load_halves(cell + 16 * half);
    const std::byte* scales = cell + 64 + 32 * j + 8 * half;
    b.scale = _mm256_mul_ps(d, signed_to_f32(load_64(scales)));
    b.second_scale = _mm256_mul_ps(d, signed_to_f32(load_64(scales + 16)));
    const std::byte* codes = cell + 320 + j * 384 + 32 * half;
    unpack_nibbles(codes + 128, b.codes);
    add_crumbs(codes, b.codes);
  }
};

// 16-bit sums of pairs: codes . 4 activations, broadcast to all columns.
template <class Codec>
[[gnu::always_inline]] inline __m256i pairs(__m256i codes, const int8_t* activations) {
  int32_t four;
  __builtin_memcpy(&four, activations, 4);
  const __m256i p = _mm256_set1_epi32(four);
  if constexpr (Codec::kSigned)
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(p, codes));
  else
    return _mm256_maddubs_epi16(codes, p);
}

// Adds groups [kFirst, kFirst + kCount) of a block to a row's integer sums.
template <class Codec, int kFirst, int kCount>
[[gnu::always_inline]] inline __m256i add_groups(__m256i sums, const PanelBlock& b, const ActivationBlock& row) {
  unroll<kCount / Codec::kRun>([&](auto run) V100_INLINE_LAMBDA {
    constexpr int kStart = kFirst + run * Codec::kRun;
    __m256i words = pairs<Codec>(b.codes[kStart], row.p + 4 * kStart);
    unroll<Codec::kRun - 1>([&](auto i) V100_INLINE_LAMBDA {
      words = _mm256_add_epi16(words, pairs<Codec>(b.codes[kStart + 1 + i], row.p + 4 * (kStart + 1 + i)));
    });
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
  });
  return sums;
}

template <class Codec, int R>
void dot_tile(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, float* y, int64_t y_stride) {
  __m256 sums[R][2];
  unroll<R>([&](auto r) V100_INLINE_LAMBDA { sums[r][0] = sums[r][1] = _mm256_setzero_ps(); });
  Codec codec;
  PanelBlock b;
  for (int32_t block = 0; block < n_blocks; ++block, tile += R) {
    unroll<2>([&](auto half) V100_INLINE_LAMBDA {
      codec.read(panel, block, half, b);
      unroll<R>([&](auto r) V100_INLINE_LAMBDA {
        const ActivationBlock& row = tile[r];
        const __m256 dx = _mm256_set1_ps(row.scale);
        __m256& y_row = sums[r][half];
        const __m256i start = Codec::kBias ? _mm256_set1_epi32(row.bias_sum) : _mm256_setzero_si256();
        const __m256i first = add_groups<Codec, 0, Codec::kTwoScales ? 4 : 8>(start, b, row);
        y_row = _mm256_fmadd_ps(_mm256_mul_ps(b.scale, dx), _mm256_cvtepi32_ps(first), y_row);
        if constexpr (Codec::kTwoScales) {
          const __m256i second = add_groups<Codec, 4, 4>(_mm256_set1_epi32(row.bias_sum_second), b, row);
          y_row = _mm256_fmadd_ps(_mm256_mul_ps(b.second_scale, dx), _mm256_cvtepi32_ps(second), y_row);
        }
        if constexpr (Codec::kMinimum) y_row = _mm256_fmadd_ps(b.minimum, _mm256_set1_ps(row.sum), y_row);
      });
    });
  }
  unroll<R>([&](auto r) V100_INLINE_LAMBDA {
    _mm256_storeu_ps(y + r * y_stride, sums[r][0]);
    _mm256_storeu_ps(y + r * y_stride + 8, sums[r][1]);
  });
}

template <class Codec>
void quant_dot(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, int32_t rows, float* y,
               int64_t y_stride) {
  switch (rows) {
    case 1:
      return dot_tile<Codec, 1>(panel, n_blocks, tile, y, y_stride);
    case 2:
      return dot_tile<Codec, 2>(panel, n_blocks, tile, y, y_stride);
    case 3:
      return dot_tile<Codec, 3>(panel, n_blocks, tile, y, y_stride);
    default:
      return dot_tile<Codec, 4>(panel, n_blocks, tile, y, y_stride);
  }
}

}  // namespace

// In the order of PanelKind.
constinit const QuantKernels kAvx2QuantKernels{
    .tile_rows = kTileRows,
    .dot = {quant_dot<Q8_0>, quant_dot<Q4_0>, quant_dot<Q4_1>, quant_dot<Q5_0>, quant_dot<Q5_1>, quant_dot<Q4_K>,
            quant_dot<Q6_K>},
};

}  // namespace v100::cpu
