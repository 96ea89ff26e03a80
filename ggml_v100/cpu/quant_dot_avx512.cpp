// Integer dot products of quantised panels with AVX-512 VNNI.
//
// What      y[row][16] = panel [K, 16] . row of rounded activations, for R = 1..12 rows in one pass over the panel
// Layout    panel.h; one zmm register = 4 values of k of 16 columns, exactly the operand of vpdpbusd
// Tile      8 registers hold a block's codes (32 x 16), R hold the f32 sums; rows go in fours, so that four chains of 8
//           vpdpbusd overlap; activations are broadcast from memory by the instruction. Codes are unpacked once per R
//           rows.
// Numerics  codes carry a bias, taken back by starting the integer sum at -bias * sum(p): exact, costs nothing
// Bound     R = 1: reading the panel (11 instructions of the two fused pipes per 320 bytes of q4_1). R = 12: vpdpbusd,
//           8 of every 11 instructions in the pipes that execute it
// Note      vpdpbusd is written in assembly: gcc 12 copies the accumulator of the intrinsic back and forth
#include "cpu/lanes_avx512.h"  // first: it includes the intrinsics with gcc's false warnings off
//
#include "cpu/kernels.h"
#include "cpu/unroll.h"

namespace v100::cpu {

namespace {

constexpr int kTileRows = 12;

// sum += 4 unsigned codes . 4 signed activations per lane; the same 4 activations for all lanes.
[[gnu::always_inline]] inline void dot_4(__m512i& sum, __m512i codes, const int8_t* activations) {
  struct Four {
    int8_t values[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const Four*>(activations)));
}

inline __m512i load_512(const std::byte* p) { return _mm512_loadu_si512(p); }
inline __m512 load_halves(const std::byte* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m128i load_columns(const std::byte* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m512 to_f32(__m128i bytes_unsigned) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes_unsigned)); }

// A block of 32 values of 16 columns, unpacked.
struct PanelBlock {
  __m512i codes[8];
  __m512 scale, second_scale, minimum;  // second_scale: of the last 16 values, q6_K
};

inline void unpack_nibbles(const std::byte* p, __m512i* codes) {
  const __m512i mask = _mm512_set1_epi8(15);
  unroll<4>([&](auto v) V100_INLINE_LAMBDA {
    const __m512i packed = load_512(p + 64 * v);
    codes[v] = _mm512_and_si512(packed, mask);
    codes[v + 4] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
  });
}

// codes |= bit g of the plane's bytes << 4
inline void add_bit_plane(const std::byte* p, __m512i* codes) {
  const __m512i plane = load_512(p), mask = _mm512_set1_epi8(16);
  unroll<8>([&](auto g) V100_INLINE_LAMBDA {
    __m512i moved;
    if constexpr (g < 4)
      moved = _mm512_slli_epi16(plane, 4 - g);
    else
      moved = _mm512_srli_epi16(plane, g - 4);
    codes[g] = _mm512_ternarylogic_epi64(codes[g], moved, mask, 0xF8);  // a | (b & c)
  });
}

// codes |= two bits of the planes << 4
inline void add_crumbs(const std::byte* p, __m512i* codes) {
  const __m512i mask = _mm512_set1_epi8(0x30);
  unroll<2>([&](auto half) V100_INLINE_LAMBDA {
    const __m512i plane = load_512(p + 64 * half);
    const __m512i moved[4] = {_mm512_slli_epi16(plane, 4), _mm512_slli_epi16(plane, 2), plane,
                              _mm512_srli_epi16(plane, 2)};
    unroll<4>([&](auto g) V100_INLINE_LAMBDA {
      codes[4 * half + g] = _mm512_ternarylogic_epi64(codes[4 * half + g], moved[g], mask, 0xF8);
    });
  });
}

struct Q8_0 {
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false;
  void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 1) * 1088;
    b.scale = load_halves(cell + (block & 1) * 32);
    const std::byte* codes = cell + 64 + (block & 1) * 512;
    unroll<8>([&](auto g) V100_INLINE_LAMBDA { b.codes[g] = load_512(codes + 64 * g); });
  }
};

struct Q4_0 {
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false;
  void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 1) * 576;
    b.scale = load_halves(cell + (block & 1) * 32);
    unpack_nibbles(cell + 64 + (block & 1) * 256, b.codes);
  }
};

struct Q4_1 {
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false;
  void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block) * 320;
    b.scale = load_halves(cell);
    b.minimum = load_halves(cell + 32);
    unpack_nibbles(cell + 64, b.codes);
  }
};

struct Q5_0 {
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false;
  void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 1) * 704;
    b.scale = load_halves(cell + (block & 1) * 32);
    const std::byte* codes = cell + 64 + (block & 1) * 320;
    unpack_nibbles(codes + 64, b.codes);
    add_bit_plane(codes, b.codes);
  }
};

struct Q5_1 {
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false;
  void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block) * 384;
    b.scale = load_halves(cell);
    b.minimum = load_halves(cell + 32);
    unpack_nibbles(cell + 128, b.codes);
    add_bit_plane(cell + 64, b.codes);
  }
};

// Super-blocks of 256: their scales are worked out when their first block is read.
struct Q4_K {
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false;
  __m512 scales[8], minimums[8];
  void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 2304;
    const int32_t j = block & 7;
    if (j == 0) read_scales(cell);
    b.scale = scales[j];
    b.minimum = minimums[j];
    unpack_nibbles(cell + 256 + j * 256, b.codes);
  }
  void read_scales(const std::byte* cell) {
    const __m512 d = load_halves(cell);
    const __m512 negative_dmin = _mm512_xor_ps(load_halves(cell + 32), _mm512_set1_ps(-0.0f));
    const __m128i low_6 = _mm_set1_epi8(63), low_4 = _mm_set1_epi8(15), high_2 = _mm_set1_epi8(0x30);
    for (int j = 0; j < 4; ++j) {
      const __m128i a = load_columns(cell + 64 + 16 * j), b = load_columns(cell + 64 + 16 * (j + 4)),
                    c = load_columns(cell + 64 + 16 * (j + 8));
      scales[j] = _mm512_mul_ps(d, to_f32(_mm_and_si128(a, low_6)));
      minimums[j] = _mm512_mul_ps(negative_dmin, to_f32(_mm_and_si128(b, low_6)));
      scales[j + 4] =
          _mm512_mul_ps(d, to_f32(_mm_or_si128(_mm_and_si128(c, low_4), _mm_and_si128(_mm_srli_epi16(a, 2), high_2))));
      minimums[j + 4] = _mm512_mul_ps(negative_dmin, to_f32(_mm_or_si128(_mm_and_si128(_mm_srli_epi16(c, 4), low_4),
                                                                         _mm_and_si128(_mm_srli_epi16(b, 2), high_2))));
    }
  }
};

struct Q6_K {
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = true;
  void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 3392;
    const int32_t j = block & 7;
    const __m512 d = load_halves(cell);
    const std::byte* scales = cell + 64 + 32 * j;
    b.scale = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_columns(scales))));
    b.second_scale = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_columns(scales + 16))));
    const std::byte* codes = cell + 320 + j * 384;
    unpack_nibbles(codes + 128, b.codes);
    add_crumbs(codes, b.codes);
  }
};

// One block of rows [first, first + N) of the tile.
template <class Codec, int N>
[[gnu::always_inline]] inline void add_block(const PanelBlock& b, const ActivationBlock* rows, __m512* y) {
  __m512i sums[N], second[N];
  unroll<N>([&](auto r) V100_INLINE_LAMBDA {
    sums[r] = Codec::kBias ? _mm512_set1_epi32(rows[r].bias_sum) : _mm512_setzero_si512();
    if constexpr (Codec::kTwoScales) second[r] = _mm512_set1_epi32(rows[r].bias_sum_second);
  });
  unroll<8>([&](auto g) V100_INLINE_LAMBDA {
    unroll<N>([&](auto r) V100_INLINE_LAMBDA {
      if constexpr (Codec::kTwoScales && g >= 4)
        dot_4(second[r], b.codes[g], rows[r].p + 4 * g);
      else
        dot_4(sums[r], b.codes[g], rows[r].p + 4 * g);
    });
  });
  unroll<N>([&](auto r) V100_INLINE_LAMBDA {
    const __m512 dx = _mm512_set1_ps(rows[r].scale);
    y[r] = _mm512_fmadd_ps(_mm512_mul_ps(b.scale, dx), _mm512_cvtepi32_ps(sums[r]), y[r]);
    if constexpr (Codec::kTwoScales)
      y[r] = _mm512_fmadd_ps(_mm512_mul_ps(b.second_scale, dx), _mm512_cvtepi32_ps(second[r]), y[r]);
    if constexpr (Codec::kMinimum) y[r] = _mm512_fmadd_ps(b.minimum, _mm512_set1_ps(rows[r].sum), y[r]);
  });
}

template <class Codec, int R>
void dot_tile(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, float* y, int64_t y_stride) {
  __m512 sums[R];
  unroll<R>([&](auto r) V100_INLINE_LAMBDA { sums[r] = _mm512_setzero_ps(); });
  Codec codec;
  PanelBlock b;
  for (int32_t block = 0; block < n_blocks; ++block, tile += R) {
    codec.read(panel, block, b);
    unroll<R / 4>([&](auto i) V100_INLINE_LAMBDA { add_block<Codec, 4>(b, tile + 4 * i, sums + 4 * i); });
    if constexpr (R % 4 != 0) add_block<Codec, R % 4>(b, tile + R / 4 * 4, sums + R / 4 * 4);
  }
  unroll<R>([&](auto r) V100_INLINE_LAMBDA { _mm512_storeu_ps(y + r * y_stride, sums[r]); });
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
    case 4:
      return dot_tile<Codec, 4>(panel, n_blocks, tile, y, y_stride);
    case 5:
      return dot_tile<Codec, 5>(panel, n_blocks, tile, y, y_stride);
    case 6:
      return dot_tile<Codec, 6>(panel, n_blocks, tile, y, y_stride);
    case 7:
      return dot_tile<Codec, 7>(panel, n_blocks, tile, y, y_stride);
    case 8:
      return dot_tile<Codec, 8>(panel, n_blocks, tile, y, y_stride);
    case 9:
      return dot_tile<Codec, 9>(panel, n_blocks, tile, y, y_stride);
    case 10:
      return dot_tile<Codec, 10>(panel, n_blocks, tile, y, y_stride);
    case 11:
      return dot_tile<Codec, 11>(panel, n_blocks, tile, y, y_stride);
    default:
      return dot_tile<Codec, 12>(panel, n_blocks, tile, y, y_stride);
  }
}

}  // namespace

// In the order of PanelKind.
constinit const QuantKernels kAvx512QuantKernels{
    .tile_rows = kTileRows,
    .dot = {quant_dot<Q8_0>, quant_dot<Q4_0>, quant_dot<Q4_1>, quant_dot<Q5_0>, quant_dot<Q5_1>, quant_dot<Q4_K>,
            quant_dot<Q6_K>},
};

}  // namespace v100::cpu
