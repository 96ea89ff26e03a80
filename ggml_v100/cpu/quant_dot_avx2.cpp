// Integer dot products of quantised panels with AVX2.
//
// What      y[row][16] = panel [K, 16] . row of rounded activations, for R = 1..4 rows in one pass over the panel
// Layout    panel.h; a 64-byte turn is two registers: columns 0..7 and 8..15, taken one after the other within a block
// Tile      8 registers hold the codes of 32 values x 8 columns; 4 rows share the unpacking
// Numerics  vpmaddubsw saturates at 16 bits, so pairs are added in 16 bits only as long as they fit:
//             codes < 16: 8 turns (15 * 127 * 2 * 8 = 30480)   codes < 32: 4 turns (31496)   codes < 64: 2 turns (32004)
//             8-bit codes: |q| <= 128 unsigned times p with the sign of q, one turn (128 * 127 * 2 = 32512)
//           Biased codes: the integer sum starts at -bias * sum(p), which is exact.
// Bound     R = 1: reading the panel from L2 or beyond; else vpmaddubsw and the broadcasts, two or three instructions
//           a turn
#include "cpu/codes_avx2.h"
//
#include "cpu/expanded.h"

namespace v100::cpu {

namespace {

constexpr int kDotRows = 4;
constexpr int kTileRows = 4;

constexpr CodeTraits shared_traits(CodeTraits t) { return t; }

constexpr bool is_signed(CodeTraits t) { return t.largest == 255; }  // such codes are signed numbers plus 128
// Turns added in 16 bits.
constexpr int run_of(CodeTraits t) {
  const int run = is_signed(t) ? 1 : t.largest == 63 ? 2 : t.largest == 31 ? 4 : 8;
  return run < t.group / 4 ? run : t.group / 4;
}

// 16-bit sums of pairs: codes . 4 activations, broadcast to all columns.
template <CodeTraits traits>
[[gnu::always_inline]] inline __m256i pairs(__m256i codes, const int8_t* activations) {
  int32_t four;
  __builtin_memcpy(&four, activations, 4);
  const __m256i p = _mm256_set1_epi32(four);
  if constexpr (is_signed(traits))
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(p, codes));
  else
    return _mm256_maddubs_epi16(codes, p);
}

// Integer sums of part `part` of a block.
template <CodeTraits traits, int part>
[[gnu::always_inline]] inline __m256i sum_part(const PanelBlock& b, const ActivationBlock& row) {
  constexpr int kTurns = traits.group / 4, kRun = run_of(traits);
  __m256i sums = traits.biased && !is_signed(traits) ? _mm256_set1_epi32(row.bias_sum[part]) : _mm256_setzero_si256();
  unroll<kTurns / kRun>([&](auto run) V100_INLINE_LAMBDA {
    constexpr int kStart = part * kTurns + run * kRun;
    __m256i words = pairs<traits>(b.codes[kStart].v, row.p + 4 * kStart);
    unroll<kRun - 1>([&](auto i) V100_INLINE_LAMBDA {
      words = _mm256_add_epi16(words, pairs<traits>(b.codes[kStart + 1 + i].v, row.p + 4 * (kStart + 1 + i)));
    });
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
  });
  return sums;
}

template <class Codec, CodeTraits traits, int R>
void dot_tile(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, float* y, int64_t y_stride,
              bool accumulate) {
  __m256 sums[R][2];
  unroll<2 * R>([&](auto i) V100_INLINE_LAMBDA {
    sums[i / 2][i % 2] = accumulate ? _mm256_loadu_ps(y + i / 2 * y_stride + i % 2 * 8) : _mm256_setzero_ps();
  });
  Codec codec;
  for (int32_t block = 0; block < n_blocks; ++block, tile += R) {
    unroll<2>([&](auto half) V100_INLINE_LAMBDA {
      PanelBlock b;
      codec.read(panel, block, 8 * half, b);
      if constexpr (is_signed(traits))
        unroll<8>([&](auto g)
                      V100_INLINE_LAMBDA { b.codes[g].v = _mm256_xor_si256(b.codes[g].v, _mm256_set1_epi8(-128)); });
      unroll<R>([&](auto r) V100_INLINE_LAMBDA {
        const ActivationBlock& row = tile[r];
        const __m256 dx = _mm256_set1_ps(row.scale);
        __m256& y_row = sums[r][half];
        unroll<32 / traits.group>([&](auto part) V100_INLINE_LAMBDA {
          y_row = _mm256_fmadd_ps(_mm256_mul_ps(b.scale[part].v, dx),
                                  _mm256_cvtepi32_ps(sum_part<traits, part>(b, row)), y_row);
          if constexpr (traits.has_minimum)
            y_row = _mm256_fmadd_ps(b.minimum[part].v, _mm256_set1_ps(row.sum[part]), y_row);
        });
      });
    });
  }
  unroll<2 * R>([&](auto i)
                    V100_INLINE_LAMBDA { _mm256_storeu_ps(y + i / 2 * y_stride + i % 2 * 8, sums[i / 2][i % 2]); });
}

template <class Codec, CodeTraits traits, int kMostRows>
void dot(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, int32_t rows, float* y,
         int64_t y_stride, bool accumulate) {
  unroll<kMostRows>([&](auto r) V100_INLINE_LAMBDA {
    if (rows == r + 1) dot_tile<Codec, traits, r + 1>(panel, n_blocks, tile, y, y_stride, accumulate);
  });
}

}  // namespace

}  // namespace v100::cpu

#include "cpu/quant_kernels.h"

namespace v100::cpu {

constinit const QuantKernels kAvx2QuantKernels = quant_kernels();

}  // namespace v100::cpu
