// Integer dot products of quantised panels with AVX-512 VNNI.
//
// What      y[row][16] = panel [K, 16] . row of rounded activations, for R rows in one pass over the panel
// Layout    panel.h; one zmm register = 4 values of k of 16 columns, exactly the operand of vpdpbusd
// Tile      8 registers hold a block's codes (32 x 16), R hold the f32 sums; rows go in fours, so that four chains of 8
//           vpdpbusd overlap; activations are broadcast from memory by the instruction. R = 1..4 rows unpack codes
//           as they go; R = 1..12 rows of an expanded panel only load them, which leaves registers for the sums
// Numerics  codes carry a bias, taken back by starting the integer sum at -bias * sum(p): exact, costs nothing
// Bound     R = 1: reading the panel (11 instructions of the two fused pipes per 320 bytes of q4_1). R = 12: vpdpbusd,
//           8 of every 10 to 12 instructions in the pipes that execute it
// Note      vpdpbusd is written in assembly: gcc 12 copies the accumulator of the intrinsic back and forth
#include "cpu/codes_avx512.h"  // first: it includes the intrinsics with gcc's false warnings off
//
#include "cpu/expanded.h"

namespace v100::cpu {

namespace {

constexpr int kDotRows = 4;
constexpr int kTileRows = 12;

// The size of codes does not matter here.
constexpr CodeTraits shared_traits(CodeTraits t) { return {t.group, 255, t.biased, t.has_minimum}; }

// sum += 4 unsigned codes . 4 signed activations per lane; the same 4 activations for all lanes.
[[gnu::always_inline]] inline void dot_4(__m512i& sum, Codes codes, const int8_t* activations) {
  struct Four {
    int8_t values[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes.v), "m"(*reinterpret_cast<const Four*>(activations)));
}

// One block of N rows.
template <CodeTraits traits, int N>
[[gnu::always_inline]] inline void add_block(const PanelBlock& b, const ActivationBlock* rows, __m512* y) {
  constexpr int kParts = 32 / traits.group;
  __m512i sums[N][kParts];
  unroll<N * kParts>([&](auto i) V100_INLINE_LAMBDA {
    constexpr int r = i / kParts, part = i % kParts;
    sums[r][part] = traits.biased ? _mm512_set1_epi32(rows[r].bias_sum[part]) : _mm512_setzero_si512();
  });
  unroll<8>([&](auto g) V100_INLINE_LAMBDA {
    unroll<N>([&](auto r) V100_INLINE_LAMBDA { dot_4(sums[r][g * kParts / 8], b.codes[g], rows[r].p + 4 * g); });
  });
  unroll<N>([&](auto r) V100_INLINE_LAMBDA {
    const __m512 dx = _mm512_set1_ps(rows[r].scale);
    unroll<kParts>([&](auto part) V100_INLINE_LAMBDA {
      y[r] = _mm512_fmadd_ps(_mm512_mul_ps(b.scale[part].v, dx), _mm512_cvtepi32_ps(sums[r][part]), y[r]);
      if constexpr (traits.has_minimum)
        y[r] = _mm512_fmadd_ps(b.minimum[part].v, _mm512_set1_ps(rows[r].sum[part]), y[r]);
    });
  });
}

template <class Codec, CodeTraits traits, int R>
void dot_tile(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, float* y, int64_t y_stride,
              bool accumulate) {
  __m512 sums[R];
  unroll<R>([&](auto r)
                V100_INLINE_LAMBDA { sums[r] = accumulate ? _mm512_loadu_ps(y + r * y_stride) : _mm512_setzero_ps(); });
  Codec codec;
  for (int32_t block = 0; block < n_blocks; ++block, tile += R) {
    PanelBlock b;
    codec.read(panel, block, 0, b);
    unroll<R / 4>([&](auto i) V100_INLINE_LAMBDA { add_block<traits, 4>(b, tile + 4 * i, sums + 4 * i); });
    if constexpr (R % 4 != 0) add_block<traits, R % 4>(b, tile + R / 4 * 4, sums + R / 4 * 4);
  }
  unroll<R>([&](auto r) V100_INLINE_LAMBDA { _mm512_storeu_ps(y + r * y_stride, sums[r]); });
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

constinit const QuantKernels kAvx512QuantKernels = quant_kernels();

}  // namespace v100::cpu
