// Decoders of the formats with 32, 64 or 128 values per block.
// In the 4- and 5-bit formats byte j of a block's 16 quant bytes holds value j (low nibble) and value j + 16 (high
// nibble).
#include "quants/block_bytes.h"
#include "quants/decode_blocks.h"
#include "quants/fp4.h"

namespace v100 {

void decode_q4_0(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 18, values += 32) {
    const float d = load_half(b);
    for (int j = 0; j < 16; ++j) {
      values[j] = static_cast<float>((b[2 + j] & 15) - 8) * d;
      values[j + 16] = static_cast<float>((b[2 + j] >> 4) - 8) * d;
    }
  }
}

void decode_q4_1(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 20, values += 32) {
    const float d = load_half(b), m = load_half(b + 2);
    for (int j = 0; j < 16; ++j) {
      values[j] = static_cast<float>(b[4 + j] & 15) * d + m;
      values[j + 16] = static_cast<float>(b[4 + j] >> 4) * d + m;
    }
  }
}

void decode_q5_0(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 22, values += 32) {
    const float d = load_half(b);
    const auto high = load<uint32_t>(b + 2);
    for (int j = 0; j < 16; ++j) {
      const int low_q = (b[6 + j] & 15) | static_cast<int>((high >> j & 1u) << 4);
      const int high_q = (b[6 + j] >> 4) | static_cast<int>((high >> (j + 16) & 1u) << 4);
      values[j] = static_cast<float>(low_q - 16) * d;
      values[j + 16] = static_cast<float>(high_q - 16) * d;
    }
  }
}

void decode_q5_1(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 24, values += 32) {
    const float d = load_half(b), m = load_half(b + 2);
    const auto high = load<uint32_t>(b + 4);
    for (int j = 0; j < 16; ++j) {
      const int low_q = (b[8 + j] & 15) | static_cast<int>((high >> j & 1u) << 4);
      const int high_q = (b[8 + j] >> 4) | static_cast<int>((high >> (j + 16) & 1u) << 4);
      values[j] = static_cast<float>(low_q) * d + m;
      values[j + 16] = static_cast<float>(high_q) * d + m;
    }
  }
}

void decode_q8_0(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 34, values += 32) {
    const float d = load_half(b);
    for (int j = 0; j < 32; ++j) values[j] = static_cast<float>(static_cast<int8_t>(b[2 + j])) * d;
  }
}

// The block's second half float, d * sum of quants, serves dot products only.
void decode_q8_1(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 36, values += 32) {
    const float d = load_half(b);
    for (int j = 0; j < 32; ++j) values[j] = static_cast<float>(static_cast<int8_t>(b[4 + j])) * d;
  }
}

void decode_iq4_nl(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 18, values += 32) {
    const float d = load_half(b);
    for (int j = 0; j < 16; ++j) {
      values[j] = d * static_cast<float>(kNonLinearLevels[b[2 + j] & 15]);
      values[j + 16] = d * static_cast<float>(kNonLinearLevels[b[2 + j] >> 4]);
    }
  }
}

void decode_mxfp4(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 17, values += 32) {
    const float d = half_e8m0(b[0]);
    for (int j = 0; j < 16; ++j) {
      values[j] = static_cast<float>(kDoubledFp4[b[1 + j] & 15]) * d;
      values[j + 16] = static_cast<float>(kDoubledFp4[b[1 + j] >> 4]) * d;
    }
  }
}

// Four sub-blocks of 16 values, each with its own scale; nibbles pair value j with value j + 8 of the sub-block.
void decode_nvfp4(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 36) {
    for (int k = 0; k < 4; ++k, values += 16) {
      const float d = half_ue4m3(b[k]);
      const uint8_t* quants = b + 4 + 8 * k;
      for (int j = 0; j < 8; ++j) {
        values[j] = static_cast<float>(kDoubledFp4[quants[j] & 15]) * d;
        values[j + 8] = static_cast<float>(kDoubledFp4[quants[j] >> 4]) * d;
      }
    }
  }
}

void decode_q1_0(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 18, values += 128) {
    const float d = load_half(b);
    for (int i = 0; i < 128; ++i) values[i] = (b[2 + i / 8] >> (i % 8) & 1) != 0 ? d : -d;
  }
}

void decode_q2_0(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 18, values += 64) {
    const float d = load_half(b);
    for (int i = 0; i < 64; ++i) values[i] = static_cast<float>((b[2 + i / 4] >> 2 * (i % 4) & 3) - 1) * d;
  }
}

}  // namespace v100
