// Decoders of the codebook formats (IQ1, IQ2, IQ3) and of IQ4_XS: super-blocks of 256 values.
#include "quants/block_bytes.h"
#include "quants/codebooks.h"
#include "quants/decode_blocks.h"

namespace v100 {

namespace {

// Eight sign bits from seven: the number of minus signs is even.
uint32_t even_signs(uint32_t seven_bits) {
  return seven_bits | (static_cast<uint32_t>(std::popcount(seven_bits)) & 1u) << 7;
}

// values[j] = scale * row[j], negated where bit j of signs is set.
template <size_t n>
void store_signed(const std::array<int8_t, n>& row, uint32_t signs, float scale, float* values) {
  for (size_t j = 0; j < n; ++j) {
    const float value = scale * static_cast<float>(row[j]);
    values[j] = (signs >> j & 1u) != 0 ? -value : value;
  }
}

void store_shifted(const std::array<int8_t, 8>& row, float delta, float scale, float* values) {
  for (size_t j = 0; j < 8; ++j) values[j] = scale * (static_cast<float>(row[j]) + delta);
}

constexpr float kIq1Delta = 0.125f;

float four_bit_scale(const uint8_t* scales, int index) {
  return 0.5f + static_cast<float>(scales[index / 2] >> 4 * (index % 2) & 15);
}

}  // namespace

void decode_iq2_xxs(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 66) {
    const float d = load_half(b);
    for (int sub = 0; sub < 8; ++sub) {
      const uint8_t* rows = b + 2 + 8 * sub;
      const auto signs_and_scale = load<uint32_t>(rows + 4);
      const float scale = d * (0.5f + static_cast<float>(signs_and_scale >> 28)) * 0.25f;
      for (int l = 0; l < 4; ++l, values += 8)
        store_signed(kIq2XxsCodebook[rows[l]], even_signs(signs_and_scale >> 7 * l & 127), scale, values);
    }
  }
}

void decode_iq2_xs(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 74) {
    const float d = load_half(b);
    for (int k = 0; k < 32; ++k, values += 8) {  // 16 values share a scale
      const uint32_t word = load<uint16_t>(b + 2 + 2 * k);
      const float scale = d * four_bit_scale(b + 66, k / 2) * 0.25f;
      store_signed(kIq2XsCodebook[word & 511], even_signs(word >> 9), scale, values);
    }
  }
}

void decode_iq2_s(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 82) {
    const float d = load_half(b);
    for (int k = 0; k < 32; ++k, values += 8) {
      const int row = b[2 + k] | (b[66 + k / 4] >> 2 * (k % 4) & 3) << 8;
      const float scale = d * four_bit_scale(b + 74, k / 2) * 0.25f;
      store_signed(kIq2SCodebook[static_cast<size_t>(row)], b[34 + k], scale, values);
    }
  }
}

void decode_iq3_xxs(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 98) {
    const float d = load_half(b);
    for (int sub = 0; sub < 8; ++sub) {
      const uint8_t* rows = b + 2 + 8 * sub;
      const auto signs_and_scale = load<uint32_t>(b + 66 + 4 * sub);
      const float scale = d * (0.5f + static_cast<float>(signs_and_scale >> 28)) * 0.5f;
      for (int l = 0; l < 4; ++l, values += 8) {
        const uint32_t signs = even_signs(signs_and_scale >> 7 * l & 127);
        store_signed(kIq3XxsCodebook[rows[2 * l]], signs, scale, values);
        store_signed(kIq3XxsCodebook[rows[2 * l + 1]], signs >> 4, scale, values + 4);
      }
    }
  }
}

void decode_iq3_s(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 110) {
    const float d = load_half(b);
    for (int k = 0; k < 64; ++k, values += 4) {  // 32 values share a scale
      const int row = b[2 + k] | (b[66 + k / 8] >> (k % 8) & 1) << 8;
      const int scale = b[106 + k / 16] >> 4 * (k / 8 % 2) & 15;
      const auto signs = static_cast<uint32_t>(b[74 + k / 2] >> 4 * (k % 2));
      store_signed(kIq3SCodebook[static_cast<size_t>(row)], signs, d * static_cast<float>(1 + 2 * scale), values);
    }
  }
}

void decode_iq1_s(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 50) {
    const float d = load_half(b);
    for (int k = 0; k < 32; ++k, values += 8) {  // 32 values share a scale and a shift
      const int high = load<uint16_t>(b + 34 + 2 * (k / 4));
      const int row = b[2 + k] | (high >> 3 * (k % 4) & 7) << 8;
      const float scale = d * static_cast<float>(2 * (high >> 12 & 7) + 1);
      store_shifted(kIq1Codebook[static_cast<size_t>(row)], (high & 0x8000) != 0 ? -kIq1Delta : kIq1Delta, scale,
                    values);
    }
  }
}

void decode_iq1_m(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 56) {
    const float d = f32_from_f16(iq1_m_scale_bits(b + 48));
    for (int k = 0; k < 32; ++k, values += 8) {  // 16 values share a scale, 8 a shift
      const int high = b[32 + k / 2] >> 4 * (k % 2) & 15;
      const int row = b[k] | (high & 7) << 8;
      const int scale = load<uint16_t>(b + 48 + 2 * (k / 8)) >> 3 * (k / 2 % 4) & 7;
      store_shifted(kIq1Codebook[static_cast<size_t>(row)], (high & 8) != 0 ? -kIq1Delta : kIq1Delta,
                    d * static_cast<float>(2 * scale + 1), values);
    }
  }
}

void decode_iq4_xs(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 136) {
    const float d = load_half(b);
    const int high_scales = load<uint16_t>(b + 2);
    for (int sub = 0; sub < 8; ++sub, values += 32) {
      const int scale = (b[4 + sub / 2] >> 4 * (sub % 2) & 15) | (high_scales >> 2 * sub & 3) << 4;
      const float sub_scale = d * static_cast<float>(scale - 32);
      const uint8_t* quants = b + 8 + 16 * sub;
      for (int j = 0; j < 16; ++j) {
        values[j] = sub_scale * static_cast<float>(kNonLinearLevels[quants[j] & 15]);
        values[j + 16] = sub_scale * static_cast<float>(kNonLinearLevels[quants[j] >> 4]);
      }
    }
  }
}

}  // namespace v100
