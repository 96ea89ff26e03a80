// Encoders of the formats with 32, 64 or 128 values per block. Byte order of the quants: decode_small.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quants/block_bytes.h"
#include "quants/encode_blocks.h"
#include "quants/encode_search.h"
#include "quants/encode_weights.h"
#include "quants/fp4.h"

namespace v100 {

namespace {

float largest_magnitude(const float* x, int n) {
  int32_t bits = 0;  // of non-negative floats, which order as integers do
  for (int i = 0; i < n; ++i) bits = std::max(bits, std::bit_cast<int32_t>(x[i]) & 0x7FFFFFFF);
  return std::bit_cast<float>(bits);
}

// The value of largest magnitude, with its sign; the first among equals.
float extreme(const float* x, int n) {
  const float magnitude = largest_magnitude(x, n);
  for (int i = 0; i < n; ++i)
    if (std::fabs(x[i]) == magnitude && magnitude > 0) return x[i];
  return magnitude;
}

float inverse_of(float d) { return d != 0 ? 1.0f / d : 0.0f; }

// Towards zero. A quotient that overflowed (its divisor was subnormal and is stored as zero) counts as 0.
int32_t truncate(float a) { return static_cast<int32_t>(std::fabs(a) < 0x1p31f ? a : 0.0f); }

// Half away from zero; the addend is the float below 0.5, so that 0.49999997 does not reach 1.
int32_t round_half_away(float a) { return truncate(a + std::copysign(0.49999997f, a)); }

// Levels of 32 values.
void truncated_levels(const float* x, float min, float inverse, float offset, int32_t max_level, uint8_t* levels) {
  int32_t wide[32];
  for (int i = 0; i < 32; ++i) wide[i] = std::min(max_level, truncate((x[i] - min) * inverse + offset));
  for (int i = 0; i < 32; ++i) levels[i] = static_cast<uint8_t>(wide[i]);
}

// Value j goes to the low nibble of byte j, value j + n / 2 to the high one.
void pack_nibbles(const uint8_t* levels, int n, uint8_t* bytes) {
  for (int j = 0; j < n / 2; ++j) bytes[j] = static_cast<uint8_t>((levels[j] & 15) | levels[j + n / 2] << 4);
}

// The fifth bits of 32 levels.
uint32_t fifth_bits(const uint8_t* levels) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (levels[i] >> 4 & 1u) << i;
  return bits;
}

constexpr int kBatch = 16;  // blocks that are searched at a time, one vector lane each

// Calls encode_batch(values, weights, count, blocks) for batches of a row's blocks of 32 values, with weights from
// importance and the variance of the whole row.
template <class EncodeBatch>
void for_weighted_batches(const float* x, int64_t n, const float* importance, int block_bytes, uint8_t* blocks,
                          EncodeBatch encode_batch) {
  const float variance = sum_of_squares(x, n) / static_cast<float>(n);
  float weights[32 * kBatch];
  for (int64_t begin = 0; begin < n; begin += 32 * kBatch, blocks += block_bytes * kBatch) {
    const int64_t size = std::min<int64_t>(32 * kBatch, n - begin);
    importance_weights(x + begin, importance + begin, size, variance, weights);
    encode_batch(x + begin, weights, static_cast<int>(size / 32), blocks);
  }
}

// Q4_0 and Q5_0: `bits` of level, value = d (level - 2^(bits - 1)). put writes a block from its scale and levels.
template <int bits, class Put>
void encode_symmetric(const float* x, int64_t n, const float* importance, int block_bytes, uint8_t* blocks, Put put) {
  constexpr int kMiddle = 1 << (bits - 1);
  uint8_t levels[32 * kBatch];
  if (importance != nullptr) {
    for_weighted_batches(x, n, importance, block_bytes, blocks,
                         [&](const float* values, const float* weights, int count, uint8_t* b) {
                           float scales[kBatch];
                           encode_searches().symmetric({values, weights, 32, count}, kMiddle, scales, levels);
                           for (int k = 0; k < count; ++k, b += block_bytes) put(scales[k], levels + 32 * k, b);
                         });
    return;
  }
  for (uint8_t* b = blocks; n > 0; n -= 32, x += 32, b += block_bytes) {
    const float d = extreme(x, 32) / static_cast<float>(-kMiddle);
    const float inverse = inverse_of(d);
    truncated_levels(x, 0, inverse, static_cast<float>(kMiddle) + 0.5f, 2 * kMiddle - 1, levels);
    put(d, levels, b);
  }
}

// Q4_1 and Q5_1: value = d level + m.
template <int bits, class Put>
void encode_asymmetric(const float* x, int64_t n, const float* importance, int block_bytes, uint8_t* blocks, Put put) {
  constexpr int kMaxLevel = (1 << bits) - 1;
  uint8_t levels[32 * kBatch];
  if (importance != nullptr) {
    constexpr AsymmetricSteps kSteps{
        .first = -0.9f, .step = 0.05f, .last = 36, .absolute_error = false, .saturate = true};
    for_weighted_batches(
        x, n, importance, block_bytes, blocks, [&](const float* values, const float* weights, int count, uint8_t* b) {
          float scales[kBatch], mins[kBatch];
          encode_searches().asymmetric({values, weights, 32, count}, kMaxLevel, kSteps, scales, mins, levels);
          for (int k = 0; k < count; ++k, b += block_bytes) put(scales[k], -mins[k], levels + 32 * k, b);
        });
    return;
  }
  for (uint8_t* b = blocks; n > 0; n -= 32, x += 32, b += block_bytes) {
    float min = x[0], max = x[0];
    for (int i = 1; i < 32; ++i) {
      min = x[i] < min ? x[i] : min;
      max = x[i] > max ? x[i] : max;
    }
    const float d = (max - min) / static_cast<float>(kMaxLevel);
    const float inverse = inverse_of(d);
    truncated_levels(x, min, inverse, 0.5f, kMaxLevel, levels);
    put(d, min, levels, b);
  }
}

// Levels of FP4 whose values times d are nearest to x, the first of two equally near ones.
template <int n>
void nearest_fp4(const float* x, float d, uint8_t* levels) {
  float magnitude[n], least[n];
  int32_t nearest[n] = {};  // index of the level's magnitude; masks instead of branches, for the sake of vectors
  for (int i = 0; i < n; ++i) magnitude[i] = least[i] = std::fabs(x[i]);
  for (int q = 1; q < 8; ++q) {
    const float value = static_cast<float>(kDoubledFp4[q]) * d;
    for (int i = 0; i < n; ++i) {
      const float error = std::fabs(value - magnitude[i]);
      const int32_t closer = -static_cast<int32_t>(error < least[i]);
      nearest[i] = (nearest[i] & ~closer) | (q & closer);
      least[i] =
          std::bit_cast<float>((std::bit_cast<int32_t>(least[i]) & ~closer) | (std::bit_cast<int32_t>(error) & closer));
    }
  }
  for (int i = 0; i < n; ++i) levels[i] = static_cast<uint8_t>(nearest[i] + (x[i] < 0 && nearest[i] > 0 ? 8 : 0));
}

}  // namespace

void encode_q4_0(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_symmetric<4>(x, n, importance, 18, blocks, [](float d, const uint8_t* levels, uint8_t* b) {
    store_half(b, d);
    pack_nibbles(levels, 32, b + 2);
  });
}

void encode_q4_1(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_asymmetric<4>(x, n, importance, 20, blocks, [](float d, float m, const uint8_t* levels, uint8_t* b) {
    store_half(b, d);
    store_half(b + 2, m);
    pack_nibbles(levels, 32, b + 4);
  });
}

void encode_q5_0(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_symmetric<5>(x, n, importance, 22, blocks, [](float d, const uint8_t* levels, uint8_t* b) {
    store_half(b, d);
    store(b + 2, fifth_bits(levels));
    pack_nibbles(levels, 32, b + 6);
  });
}

void encode_q5_1(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  encode_asymmetric<5>(x, n, importance, 24, blocks, [](float d, float m, const uint8_t* levels, uint8_t* b) {
    store_half(b, d);
    store_half(b + 2, m);
    store(b + 4, fifth_bits(levels));
    pack_nibbles(levels, 32, b + 8);
  });
}

void encode_q8_0(const float* x, int64_t n, const float*, uint8_t* blocks) {
  for (uint8_t* b = blocks; n > 0; n -= 32, x += 32, b += 34) {
    const float d = largest_magnitude(x, 32) / 127.0f;
    const float inverse = inverse_of(d);
    store_half(b, d);
    for (int i = 0; i < 32; ++i) b[2 + i] = static_cast<uint8_t>(round_half_away(x[i] * inverse));
  }
}

void encode_iq4_nl(const float* x, int64_t n, const float* importance, uint8_t* blocks) {
  float weights[32 * kBatch], scales[kBatch];
  while (n > 0) {
    const int count = static_cast<int>(std::min<int64_t>(kBatch, n / 32));
    if (importance == nullptr) {
      square_weights(x, 32 * count, weights);
    } else {
      for (int k = 0; k < count; ++k, importance += 32) {
        const float variance = sum_of_squares(x + 32 * k, 32) * (2.0f / 32);
        importance_weights(x + 32 * k, importance, 32, variance, weights + 32 * k);
      }
    }
    encode_searches().non_linear({x, weights, 32, count}, scales);
    for (int k = 0; k < count; ++k, x += 32, n -= 32, blocks += 18) {
      uint8_t levels[32];
      nearest_non_linear(x, 32, inverse_of(scales[k]), levels);
      store_half(blocks, scales[k]);
      pack_nibbles(levels, 32, blocks + 2);
    }
  }
}

void encode_mxfp4(const float* x, int64_t n, const float*, uint8_t* blocks) {
  for (uint8_t* b = blocks; n > 0; n -= 32, x += 32, b += 17) {
    const float largest = largest_magnitude(x, 32);
    // 4 = 2^2 is the largest power of two in FP4.
    b[0] = largest > 0 ? static_cast<uint8_t>(std::clamp(std::floor(std::log2(largest)) - 2 + 127, 0.0f, 254.0f)) : 0;
    uint8_t levels[32];
    nearest_fp4<32>(x, half_e8m0(b[0]), levels);
    pack_nibbles(levels, 32, b + 1);
  }
}

void encode_nvfp4(const float* x, int64_t n, const float*, uint8_t* blocks) {
  for (uint8_t* b = blocks; n > 0; n -= 64, b += 36) {
    for (int k = 0; k < 4; ++k, x += 16) {
      b[k] = ue4m3_from_f32(largest_magnitude(x, 16) / 6.0f);
      uint8_t levels[16];
      nearest_fp4<16>(x, half_ue4m3(b[k]), levels);
      pack_nibbles(levels, 16, b + 4 + 8 * k);
    }
  }
}

void encode_q1_0(const float* x, int64_t n, const float*, uint8_t* blocks) {
  for (uint8_t* b = blocks; n > 0; n -= 128, x += 128, b += 18) {
    float sum = 0;
    for (int i = 0; i < 128; ++i) sum += std::fabs(x[i]);
    store_half(b, sum / 128.0f);
    std::memset(b + 2, 0, 16);
    for (int i = 0; i < 128; ++i) b[2 + i / 8] |= static_cast<uint8_t>((x[i] >= 0) << i % 8);
  }
}

void encode_q2_0(const float* x, int64_t n, const float*, uint8_t* blocks) {
  for (uint8_t* b = blocks; n > 0; n -= 64, x += 64, b += 18) {
    const float d = largest_magnitude(x, 64), inverse = inverse_of(d);
    store_half(b, d);
    std::memset(b + 2, 0, 16);
    for (int i = 0; i < 64; ++i) {
      const int q = std::clamp(round_half_away(x[i] * inverse) + 1, 0, 3);
      b[2 + i / 4] |= static_cast<uint8_t>(q << 2 * (i % 4));
    }
  }
}

}  // namespace v100
