// Decoders of the K formats and the ternary formats: super-blocks of 256 values.
#include "quants/block_bytes.h"
#include "quants/decode_blocks.h"

namespace v100 {

namespace {

// Scales and mins of the eight sub-blocks of Q4_K and Q5_K, 6 bits each, packed in 12 bytes.
struct SixBitScales {
  uint8_t scale[8], min[8];

  explicit SixBitScales(const uint8_t* packed) {
    for (int j = 0; j < 4; ++j) {
      scale[j] = packed[j] & 63;
      min[j] = packed[j + 4] & 63;
      scale[j + 4] = static_cast<uint8_t>((packed[j + 8] & 15) | (packed[j] >> 6) << 4);
      min[j + 4] = static_cast<uint8_t>((packed[j + 8] >> 4) | (packed[j + 4] >> 6) << 4);
    }
  }
};

// The sixteen 6-bit scales of Q3_K (to be read minus 32): low nibbles in 8 bytes, high bit pairs in 4 more.
void unpack_q3_k_scales(const uint8_t* packed, uint8_t* scales) {
  for (int j = 0; j < 16; ++j) {
    const int low = (j < 8 ? packed[j] : packed[j - 8] >> 4) & 15;
    const int high = packed[8 + j % 4] >> 2 * (j / 4) & 3;
    scales[j] = static_cast<uint8_t>(low | high << 4);
  }
}

}  // namespace

void decode_q2_k(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 84, values += 256) {
    const float d = load_half(b + 80), d_min = load_half(b + 82);
    for (int j = 0; j < 16; ++j) {  // 16 values share a scale
      const float scale = d * static_cast<float>(b[j] & 15);
      const float min = d_min * static_cast<float>(b[j] >> 4);
      const uint8_t* quants = b + 16 + 32 * (j / 8) + 16 * (j % 2);
      const int shift = 2 * (j / 2 % 4);
      for (int r = 0; r < 16; ++r) values[16 * j + r] = scale * static_cast<float>(quants[r] >> shift & 3) - min;
    }
  }
}

void decode_q3_k(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 110, values += 256) {
    const float d = load_half(b + 108);
    uint8_t scales[16];
    unpack_q3_k_scales(b + 96, scales);
    for (int j = 0; j < 16; ++j) {
      const float scale = d * static_cast<float>(scales[j] - 32);
      const uint8_t* high = b + 16 * (j % 2);
      const uint8_t* low = b + 32 + 32 * (j / 8) + 16 * (j % 2);
      const int shift = 2 * (j / 2 % 4), high_bit = j / 2;
      for (int r = 0; r < 16; ++r) {
        const int q = (low[r] >> shift & 3) + 4 * (high[r] >> high_bit & 1) - 4;
        values[16 * j + r] = scale * static_cast<float>(q);
      }
    }
  }
}

void decode_q4_k(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 144, values += 256) {
    const float d = load_half(b), d_min = load_half(b + 2);
    const SixBitScales s(b + 4);
    for (int j = 0; j < 8; ++j) {  // 32 values share a scale; two sub-blocks share 32 bytes
      const float scale = d * static_cast<float>(s.scale[j]);
      const float min = d_min * static_cast<float>(s.min[j]);
      const uint8_t* quants = b + 16 + 32 * (j / 2);
      const int shift = 4 * (j % 2);
      for (int r = 0; r < 32; ++r) values[32 * j + r] = scale * static_cast<float>(quants[r] >> shift & 15) - min;
    }
  }
}

void decode_q5_k(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 176, values += 256) {
    const float d = load_half(b), d_min = load_half(b + 2);
    const SixBitScales s(b + 4);
    const uint8_t* high = b + 16;
    for (int j = 0; j < 8; ++j) {
      const float scale = d * static_cast<float>(s.scale[j]);
      const float min = d_min * static_cast<float>(s.min[j]);
      const uint8_t* quants = b + 48 + 32 * (j / 2);
      const int shift = 4 * (j % 2);
      for (int r = 0; r < 32; ++r) {
        const int q = (quants[r] >> shift & 15) | (high[r] >> j & 1) << 4;
        values[32 * j + r] = scale * static_cast<float>(q) - min;
      }
    }
  }
}

void decode_q6_k(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 210, values += 256) {
    const float d = load_half(b + 208);
    for (int j = 0; j < 16; ++j) {
      const float scale = d * static_cast<float>(static_cast<int8_t>(b[192 + j]));
      const int half = j / 8, start = 16 * (j % 8);  // start: first value within the half of 128
      const uint8_t* low = b + 64 * half + start % 64;
      const uint8_t* high = b + 128 + 32 * half + start % 32;
      const int low_shift = 4 * (start / 64), high_shift = 2 * (start / 32);
      for (int r = 0; r < 16; ++r) {
        const int q = (low[r] >> low_shift & 15) | (high[r] >> high_shift & 3) << 4;
        values[16 * j + r] = scale * static_cast<float>(q - 32);
      }
    }
  }
}

void decode_q8_k(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 292, values += 256) {
    const float d = load<float>(b);
    for (int i = 0; i < 256; ++i) values[i] = d * static_cast<float>(static_cast<int8_t>(b[4 + i]));
  }
}

// A byte is a fraction of 243 scaled to 256: multiplied by 3^n modulo 256, its top trit is digit n.
void decode_tq1_0(const uint8_t* blocks, float* values, int64_t n_blocks) {
  static constexpr uint8_t kPowersOf3[5] = {1, 3, 9, 27, 81};
  const auto trits = [](const uint8_t* bytes, int n_bytes, int n_digits, float d, float* out) {
    for (int n = 0; n < n_digits; ++n)
      for (int r = 0; r < n_bytes; ++r) {
        const int digit = (bytes[r] * kPowersOf3[n] & 255) * 3 >> 8;
        *out++ = static_cast<float>(digit - 1) * d;
      }
  };
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 54, values += 256) {
    const float d = load_half(b + 52);
    trits(b, 32, 5, d, values);
    trits(b + 32, 16, 5, d, values + 160);
    trits(b + 48, 4, 4, d, values + 240);
  }
}

void decode_tq2_0(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += 66, values += 256) {
    const float d = load_half(b + 64);
    for (int j = 0; j < 8; ++j) {
      const uint8_t* quants = b + 32 * (j / 4);
      const int shift = 2 * (j % 4);
      for (int r = 0; r < 32; ++r) values[32 * j + r] = static_cast<float>((quants[r] >> shift & 3) - 1) * d;
    }
  }
}

}  // namespace v100
