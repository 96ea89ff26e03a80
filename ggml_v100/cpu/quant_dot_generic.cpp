// Integer dot products of quantised panels in plain C++.
//
// What      y[row][16] = panel [K, 16] . row of rounded activations, for R = 1..4 rows in one pass over the panel
// Layout    panel.h; a block's codes are widened to 16 bits, [8 turns][16 columns x 4 values]
// Numerics  as the vector versions. Codes below 64 are summed in 16 bits over at most half a block of 6-bit codes
//           (63 * 127 * 4 = 32004) or a block of 5-bit codes (31 * 127 * 8 = 31496); 8-bit codes in 32 bits
// Bound     multiplies of 16-bit lanes that the compiler finds (SSE2, NEON, VSX)
#include <type_traits>

#include "cpu/codes_generic.h"
//
#include "cpu/expanded.h"

namespace v100::cpu {

namespace {

constexpr int kDotRows = 4;
constexpr int kTileRows = 4;

constexpr CodeTraits shared_traits(CodeTraits t) {
  return {t.group, t.largest == 255 ? 255 : 63, t.biased, t.has_minimum};
}

// totals[column] += codes . activations of turns [first, first + count); pattern: a turn's 4 activations twice.
template <class Sum>
inline void add_turns(const int16_t (*codes)[64], const int16_t (*pattern)[8], int first, int count, int32_t* totals) {
  Sum sums[64] = {};
  for (int g = first; g < first + count; ++g)
    for (int i = 0; i < 64; i += 8)
      for (int j = 0; j < 8; ++j)
        sums[i + j] = static_cast<Sum>(sums[i + j] + static_cast<int16_t>(codes[g][i + j] * pattern[g][j]));
  for (int c = 0; c < 16; ++c)
    for (int t = 0; t < 4; ++t) totals[c] += sums[4 * c + t];
}

template <class Codec, CodeTraits traits, int kMostRows>
void dot(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, int32_t rows, float* y,
         int64_t y_stride, bool accumulate) {
  using Sum = std::conditional_t<traits.largest == 255, int32_t, int16_t>;
  constexpr int kParts = 32 / traits.group;
  float sums[kMostRows][16] = {};
  if (accumulate)
    for (int32_t r = 0; r < rows; ++r) std::memcpy(sums[r], y + r * y_stride, sizeof sums[r]);
  Codec codec;
  for (int32_t block = 0; block < n_blocks; ++block, tile += rows) {
    PanelBlock b;
    codec.read(panel, block, 0, b);
    int16_t codes[8][64];
    for (int g = 0; g < 8; ++g)
      for (int i = 0; i < 64; ++i) codes[g][i] = b.codes[g].v[i];
    for (int32_t r = 0; r < rows; ++r) {
      const ActivationBlock& row = tile[r];
      int16_t pattern[8][8];
      for (int g = 0; g < 8; ++g)
        for (int j = 0; j < 8; ++j) pattern[g][j] = row.p[4 * g + j % 4];
      for (int part = 0; part < kParts; ++part) {
        int32_t totals[16];
        for (int c = 0; c < 16; ++c) totals[c] = traits.biased ? row.bias_sum[part] : 0;
        add_turns<Sum>(codes, pattern, part * traits.group / 4, traits.group / 4, totals);
        float values[16];
        for (int c = 0; c < 16; ++c) values[c] = static_cast<float>(totals[c]);
        fuse_16((b.scale[part] * row.scale).v, values, sums[r]);
        if constexpr (traits.has_minimum) fuse_16(b.minimum[part].v, splat(row.sum[part]).v, sums[r]);
      }
    }
  }
  for (int32_t r = 0; r < rows; ++r) std::memcpy(y + r * y_stride, sums[r], sizeof sums[r]);
}

}  // namespace

}  // namespace v100::cpu

#include "cpu/quant_kernels.h"

namespace v100::cpu {

constinit const QuantKernels kGenericQuantKernels = quant_kernels();

}  // namespace v100::cpu
