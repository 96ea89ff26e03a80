// Encoders of the K formats, IQ4_XS and the ternary formats: super-blocks of 256 values. Bytes of a block: decode_k.cpp.
//
// A K super-block is encoded in three steps: each sub-block's scale (and min) by a search, those rounded to a few bits
// under a super-block scale, then the levels once more under the scales as stored.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quants/block_bytes.h"
#include "quants/encode_blocks.h"
#include "quants/encode_search.h"
#include "quants/encode_weights.h"

namespace v100 {

namespace {

constexpr int kSuper = 256;            // values of a super-block
constexpr float kNegligible = 1e-15f;  // super-blocks whose scales are all smaller count as zero

// Searched at a time, so that vector lanes are full with eight sub-blocks each as well.
constexpr int kBatch = 4;

// What the search has found for one super-block, to be rounded further in place.
template <int sub_blocks>
struct Found {
  const float* x;
  float* scales;      // [sub_blocks]
  float* mins;        // [sub_blocks], asymmetric formats only
  const float* sums;  // [sub_blocks] of weights; nullptr without importance
  uint8_t* levels;    // [256]
};

float as_stored(float scale) { return f32_from_f16(f16_from_f32(scale)); }

// The scale of largest magnitude, with its sign; the first among equals.
float extreme(const float* scales, int n) {
  float found = 0;
  for (int j = 0; j < n; ++j)
    if (std::fabs(scales[j]) > std::fabs(found)) found = scales[j];
  return found;
}

// value = scale * level - min.
void round_levels(const float* x, int n, float scale, float min, int max_level, uint8_t* levels) {
  if (scale == 0) return;
  for (int i = 0; i < n; ++i)
    levels[i] = static_cast<uint8_t>(std::clamp(nearest_int((x[i] + min) / scale), 0, max_level));
}

// value = scale * (level - middle).
void round_signed_levels(const float* x, int n, float scale, int middle, uint8_t* levels) {
  if (scale == 0) return;
  for (int i = 0; i < n; ++i)
    levels[i] = static_cast<uint8_t>(std::clamp(nearest_int(x[i] / scale), -middle, middle - 1) + middle);
}

// Rounds scales >= 0 of sub-blocks to 0..max_level under one super-block scale, which is returned: by their largest, or by
// a search that weighs them with the sums of their values' weights.
float round_positive(int n, int max_level, const float* scales, const float* sums, uint8_t* rounded) {
  if (sums != nullptr) return search_positive(n, max_level, scales, sums, rounded);
  const float largest = std::max(0.0f, *std::max_element(scales, scales + n));
  if (largest == 0) {
    std::fill_n(rounded, n, uint8_t{0});
    return 0;
  }
  const float inverse = static_cast<float>(max_level) / largest;
  for (int j = 0; j < n; ++j) rounded[j] = static_cast<uint8_t>(std::min(max_level, nearest_int(inverse * scales[j])));
  return largest / static_cast<float>(max_level);
}

// Two bits of each level: byte r of 32 holds value r of four rows of 32 values.
void pack_two_bits(const uint8_t* levels, uint8_t* bytes) {
  for (int half = 0; half < 2; ++half, levels += 128)
    for (int r = 0; r < 32; ++r)
      *bytes++ = static_cast<uint8_t>((levels[r] & 3) | (levels[r + 32] & 3) << 2 | (levels[r + 64] & 3) << 4 |
                                      (levels[r + 96] & 3) << 6);
}

// Four bits of each level: byte r of a pair of rows holds value r of the first (low nibble) and of the second.
void pack_four_bits(const uint8_t* levels, int row, uint8_t* bytes) {
  for (int begin = 0; begin < kSuper; begin += 2 * row)
    for (int r = 0; r < row; ++r)
      *bytes++ = static_cast<uint8_t>((levels[begin + r] & 15) | (levels[begin + row + r] & 15) << 4);
}

// Scales and mins of Q4_K and Q5_K, 6 bits each, in 12 bytes.
void pack_six_bit_scales(const uint8_t* scale, const uint8_t* min, uint8_t* packed) {
  for (int j = 0; j < 4; ++j) {
    packed[j] = static_cast<uint8_t>(scale[j] | (scale[j + 4] >> 4) << 6);
    packed[j + 4] = static_cast<uint8_t>(min[j] | (min[j + 4] >> 4) << 6);
    packed[j + 8] = static_cast<uint8_t>((scale[j + 4] & 15) | (min[j + 4] & 15) << 4);
  }
}

// The sixteen 6-bit scales of Q3_K: low nibbles in 8 bytes, high bit pairs in 4 more.
void pack_q3_k_scales(const uint8_t* scales, uint8_t* packed) {
  std::memset(packed, 0, 12);
  for (int j = 0; j < 16; ++j) {
    packed[j % 8] |= static_cast<uint8_t>((scales[j] & 15) << (j < 8 ? 0 : 4));
    packed[8 + j % 4] |= static_cast<uint8_t>((scales[j] >> 4) << 2 * (j / 4));
  }
}

// Weights of one super-block from its values and, or nullptr, their importance.
using WeighSuperBlock = void(const float* x, const float* importance, float* weights);

// Super-blocks in batches: weights, search over all their sub-blocks, then put(found, block) for each.
template <int sub_blocks, class Search, class Put>
void encode_super_blocks(const float* x, int64_t n, const float* importance, int block_bytes, uint8_t* blocks,
                         WeighSuperBlock* weigh, Search search, Put put) {
  constexpr int kValues = kSuper / sub_blocks;
  float weights[kBatch * kSuper], scales[kBatch * sub_blocks], mins[kBatch * sub_blocks];
  uint8_t levels[kBatch * kSuper];
  while (n > 0) {
    const int count = static_cast<int>(std::min<int64_t>(kBatch, n / kSuper));
    for (int k = 0; k < count; ++k)
      weigh(x + k * kSuper, importance == nullptr ? nullptr : importance + k * kSuper, weights + k * kSuper);
    search(SubBlocks{x, weights, kValues, count * sub_blocks}, scales, mins, levels);
    for (int k = 0; k < count; ++k, blocks += block_bytes) {
      float sums[sub_blocks] = {};
      if (importance != nullptr)
        for (int j = 0; j < sub_blocks; ++j)
          for (int i = 0; i < kValues; ++i) sums[j] += weights[k * kSuper + j * kValues + i];
      put(Found<sub_blocks>{x + k * kSuper, scales + k * sub_blocks, mins + k * sub_blocks,
                            importance == nullptr ? nullptr : sums, levels + k * kSuper},
          blocks);
    }
    x += count * kSuper;
    n -= count * kSuper;
    if (importance != nullptr) importance += count * kSuper;
  }
}

// Weights by importance; variance is mean square times `factor`.
template <int factor>
void weigh_by_importance(const float* x, const float* importance, float* weights) {
  const float variance = static_cast<float>(factor) * sum_of_squares(x, kSuper) / kSuper;
  importance_weights(x, importance, kSuper, variance, weights);
}

// Q4_K and Q5_K without importance: root mean square of the sub-block plus magnitude.
void weigh_by_magnitude(const float* x, float* weights) {
  float squares[8] = {};
  for (int i = 0; i < 32; ++i)  // the eight sums side by side, each from left to right
    for (int j = 0; j < 8; ++j) squares[j] += x[32 * j + i] * x[32 * j + i];
  for (int j = 0; j < 8; ++j) {
    const float root = std::sqrt(squares[j] / 32);
    for (int i = 0; i < 32; ++i) weights[32 * j + i] = root + std::fabs(x[32 * j + i]);
  }
}

constexpr AsymmetricSteps kImportanceSteps{
    .first = -0.9f, .step = 0.05f, .last = 36, .absolute_error = false, .saturate = true};

// Q4_K and Q5_K differ in the bits of a level and in where those go.
template <int bits, class Pack>
void encode_six_bit_scales(const float* x, int64_t n, const float* importance, int block_bytes, uint8_t* blocks,
                           AsymmetricSteps steps, Pack pack) {
  constexpr int kMaxLevel = (1 << bits) - 1;
  if (importance != nullptr) steps = kImportanceSteps;
  encode_super_blocks<8>(
      x, n, importance, block_bytes, blocks,
      [](const float* values, const float* own_importance, float* weights) {
        if (own_importance == nullptr) {
          weigh_by_magnitude(values, weights);
        } else {
          weigh_by_importance<2>(values, own_importance, weights);
        }
      },
      [&](const SubBlocks& sub_blocks, float* scales, float* mins, uint8_t* levels) {
        encode_searches().asymmetric(sub_blocks, kMaxLevel, steps, scales, mins, levels);
      },
      [&](const Found<8>& found, uint8_t* b) {
        uint8_t scales[8], mins[8];
        const float d = round_positive(8, 63, found.scales, found.sums, scales);
        const float d_min = round_positive(8, 63, found.mins, found.sums, mins);
        for (int j = 0; j < 8; ++j)
          round_levels(found.x + 32 * j, 32, as_stored(d) * scales[j], as_stored(d_min) * mins[j], kMaxLevel,
                       found.levels + 32 * j);
        store_half(b, d);
        store_half(b + 2, d_min);
        pack_six_bit_scales(scales, mins, b + 4);
        pack(found.levels, b + 16);
      });
}

}  // namespace

void encode_q2_k(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  constexpr AsymmetricSteps kPlainSteps{
      .first = -0.5f, .step = 0.1f, .last = 15, .absolute_error = true, .saturate = false};
  encode_super_blocks<16>(
      x, n, importance, 84, blocks,
      [](const float* values, const float* own_importance, float* weights) {
        if (own_importance != nullptr) return weigh_by_importance<1>(values, own_importance, weights);
        for (int i = 0; i < kSuper; ++i) weights[i] = std::fabs(values[i]);
      },
      [&](const SubBlocks& sub_blocks, float* scales, float* mins, uint8_t* levels) {
        encode_searches().asymmetric(sub_blocks, 3, importance == nullptr ? kPlainSteps : kImportanceSteps, scales,
                                     mins, levels);
      },
      [](const Found<16>& found, uint8_t* b) {
        uint8_t scales[16], mins[16];
        const float d = round_positive(16, 15, found.scales, found.sums, scales);
        const float d_min = round_positive(16, 15, found.mins, found.sums, mins);
        for (int j = 0; j < 16; ++j) {
          round_levels(found.x + 16 * j, 16, as_stored(d) * scales[j], as_stored(d_min) * mins[j], 3,
                       found.levels + 16 * j);
          b[j] = static_cast<uint8_t>(scales[j] | mins[j] << 4);
        }
        pack_two_bits(found.levels, b + 16);
        store_half(b + 80, d);
        store_half(b + 82, d_min);
      });
}

void encode_q3_k(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_super_blocks<16>(
      x, n, importance, 110, blocks,
      [](const float* values, const float* own_importance, float* weights) {
        if (own_importance != nullptr) return weigh_by_importance<2>(values, own_importance, weights);
        square_weights(values, kSuper, weights);
      },
      [&](const SubBlocks& sub_blocks, float* scales, float*, uint8_t* levels) {
        if (importance == nullptr) {
          encode_searches().three_bit(sub_blocks, scales, levels);
        } else {
          encode_searches().symmetric(sub_blocks, 4, scales, levels);
        }
      },
      [](const Found<16>& found, uint8_t* b) {
        uint8_t scales[16] = {};  // + 32
        float d = 0;
        if (found.sums != nullptr) {
          encode_searches().symmetric({found.scales, found.sums, 16, 1}, 32, &d, scales);
        } else if (const float largest = extreme(found.scales, 16); largest != 0) {
          const float inverse = -32.0f / largest;
          for (int j = 0; j < 16; ++j)
            scales[j] = static_cast<uint8_t>(std::clamp(nearest_int(inverse * found.scales[j]), -32, 31) + 32);
          d = 1.0f / inverse;
        }
        for (int j = 0; j < 16; ++j)
          round_signed_levels(found.x + 16 * j, 16, as_stored(d) * static_cast<float>(scales[j] - 32), 4,
                              found.levels + 16 * j);
        std::memset(b, 0, 32);
        for (int i = 0; i < kSuper; ++i) b[i % 32] |= static_cast<uint8_t>((found.levels[i] >> 2) << i / 32);
        pack_two_bits(found.levels, b + 32);
        pack_q3_k_scales(scales, b + 96);
        store_half(b + 108, d);
      });
}

void encode_q4_k(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_six_bit_scales<4>(x, n, importance, 144, blocks,
                           {.first = -1.0f, .step = 0.1f, .last = 20, .absolute_error = false, .saturate = false},
                           [](const uint8_t* levels, uint8_t* b) { pack_four_bits(levels, 32, b); });
}

void encode_q5_k(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_six_bit_scales<5>(x, n, importance, 176, blocks,
                           {.first = -0.5f, .step = 0.1f, .last = 15, .absolute_error = false, .saturate = false},
                           [](const uint8_t* levels, uint8_t* b) {
                             std::memset(b, 0, 32);
                             for (int i = 0; i < kSuper; ++i)
                               b[i % 32] |= static_cast<uint8_t>((levels[i] >> 4) << i / 32);
                             pack_four_bits(levels, 32, b + 32);
                           });
}

void encode_q6_k(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_super_blocks<16>(
      x, n, importance, 210, blocks,
      [](const float* values, const float* own_importance, float* weights) {
        if (own_importance != nullptr) {
          std::copy_n(own_importance, kSuper, weights);
        } else {
          square_weights(values, kSuper, weights);
        }
      },
      [](const SubBlocks& sub_blocks, float* scales, float*, uint8_t* levels) {
        encode_searches().symmetric(sub_blocks, 32, scales, levels);
      },
      [](const Found<16>& found, uint8_t* b) {
        const float largest = extreme(found.scales, 16);
        if (std::fabs(largest) < kNegligible) {
          std::memset(b, 0, 210);
          return;
        }
        const float inverse = -128.0f / largest;
        const float d = 1.0f / inverse;
        for (int j = 0; j < 16; ++j) {
          const int scale = std::min(127, nearest_int(inverse * found.scales[j]));
          round_signed_levels(found.x + 16 * j, 16, as_stored(d) * static_cast<float>(scale), 32,
                              found.levels + 16 * j);
          b[192 + j] = static_cast<uint8_t>(scale);
        }
        pack_four_bits(found.levels, 64, b);
        uint8_t high[kSuper];
        for (int i = 0; i < kSuper; ++i) high[i] = static_cast<uint8_t>(found.levels[i] >> 4);
        pack_two_bits(high, b + 128);
        store_half(b + 208, d);
      });
}

void encode_iq4_xs(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_super_blocks<8>(
      x, n, importance, 136, blocks,
      [](const float* values, const float* own_importance, float* weights) {
        if (own_importance == nullptr) return square_weights(values, kSuper, weights);
        importance_weights(values, own_importance, kSuper, sum_of_squares(values, kSuper) * (2.0f / kSuper), weights);
      },
      [](const SubBlocks& sub_blocks, float* scales, float*, uint8_t*) {
        encode_searches().non_linear(sub_blocks, scales);
      },
      [](const Found<8>& found, uint8_t* b) {
        const float d = -extreme(found.scales, 8) / 32;
        const float inverse = d != 0 ? 1.0f / d : 0.0f;
        store_half(b, d);
        uint32_t high_bits = 0;
        std::memset(b + 4, 0, 4);
        for (int j = 0; j < 8; ++j) {
          const int scale = std::clamp(nearest_int(inverse * found.scales[j]), -32, 31);
          const float sub_scale = d * static_cast<float>(scale);
          const float levels_per_unit = sub_scale != 0 ? 1.0f / sub_scale : 0.0f;
          nearest_non_linear(found.x + 32 * j, 32, levels_per_unit, found.levels + 32 * j);
          const auto stored = static_cast<uint32_t>(scale + 32);
          b[4 + j / 2] |= static_cast<uint8_t>((stored & 15) << 4 * (j % 2));
          high_bits |= (stored >> 4) << 2 * j;
        }
        store(b + 2, static_cast<uint16_t>(high_bits));
        pack_four_bits(found.levels, 16, b + 8);
      });
}

namespace {

// Nearest of -1, 0 and 1 times d, plus 1; halves away from zero.
void round_trits(const float* x, float d, uint8_t* trits) {
  const float inverse = d != 0 ? 1.0f / d : 0.0f;
  for (int i = 0; i < kSuper; ++i) {
    const float quotient = x[i] * inverse;
    trits[i] = static_cast<uint8_t>(1 + (quotient >= 0.5f) - (quotient <= -0.5f));
  }
}

}  // namespace

// A byte holds up to five base-3 digits as a fraction of 243 scaled to 256 and rounded up (decode_tq1_0).
void encode_tq1_0(const float* x, int64_t n, const float*, uint8_t* blocks) {
  const auto pack = [](const uint8_t* trits, int n_bytes, int n_digits, uint8_t* bytes) {
    for (int r = 0; r < n_bytes; ++r) {
      int number = 0;
      for (int digit = 0; digit < 5; ++digit) number = 3 * number + (digit < n_digits ? trits[digit * n_bytes + r] : 0);
      bytes[r] = static_cast<uint8_t>((number * 256 + 242) / 243);
    }
  };
  for (uint8_t* b = blocks; n > 0; n -= kSuper, x += kSuper, b += 54) {
    const float d = std::fabs(extreme(x, kSuper));
    uint8_t trits[kSuper];
    round_trits(x, d, trits);
    pack(trits, 32, 5, b);
    pack(trits + 160, 16, 5, b + 32);
    pack(trits + 240, 4, 4, b + 48);
    store_half(b + 52, d);
  }
}

void encode_tq2_0(const float* x, int64_t n, const float*, uint8_t* blocks) {
  for (uint8_t* b = blocks; n > 0; n -= kSuper, x += kSuper, b += 66) {
    const float d = std::fabs(extreme(x, kSuper));
    uint8_t trits[kSuper];
    round_trits(x, d, trits);
    pack_two_bits(trits, b);
    store_half(b + 64, d);
  }
}

}  // namespace v100
