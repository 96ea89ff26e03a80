// Unpacking of weight blocks to integer codes, rounding of activations, encoding of KV rows: scalar, by the format's formulas.
#include "ops/reference_blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/half.h"
#include "quants/codebooks.h"

namespace v100 {

namespace {

uint8_t byte_at(const std::byte* block, int32_t offset) { return std::to_integer<uint8_t>(block[offset]); }

uint16_t u16_at(const std::byte* block, int32_t offset) {
  return static_cast<uint16_t>(byte_at(block, offset) | byte_at(block, offset + 1) << 8);
}

float half_at(const std::byte* block, int32_t offset) { return f32_from_f16(u16_at(block, offset)); }

int32_t nibble(const std::byte* block, int32_t offset, int32_t i) {  // 32 values: low nibbles first
  return byte_at(block, offset + i % 16) >> (i / 16 * 4) & 15;
}

int32_t high_bit(const std::byte* block, int32_t offset, int32_t i) {
  return byte_at(block, offset + i / 8) >> (i % 8) & 1;
}

// The 6-bit scale and minimum j of the 12 packed bytes of Q4_K.
void scale_and_minimum(const std::byte* packed, int32_t j, int32_t& scale, int32_t& minimum) {
  if (j < 4) {
    scale = byte_at(packed, j) & 63;
    minimum = byte_at(packed, j + 4) & 63;
  } else {
    scale = (byte_at(packed, j + 4) & 15) | (byte_at(packed, j - 4) >> 6) << 4;
    minimum = (byte_at(packed, j + 4) >> 4) | (byte_at(packed, j) >> 6) << 4;
  }
}

constexpr int8_t kLevels4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

uint32_t u32_at(const std::byte* block, int32_t offset) {
  return u16_at(block, offset) | static_cast<uint32_t>(u16_at(block, offset + 2)) << 16;
}

// Two bits of value i of a super-block: 4 turns of 32 per 128 values.
int32_t two_bits(const std::byte* block, int32_t offset, int32_t i) {
  return byte_at(block, offset + 32 * (i / 128) + i % 32) >> (i / 32 % 4 * 2) & 3;
}

// Eight sign bits from seven: the number of minus signs is even.
uint32_t even_signs(uint32_t seven_bits) { return seven_bits | (std::popcount(seven_bits) & 1u) << 7; }

// n values of a codebook row, negated where a bit of signs is set.
template <size_t n>
void put_row(const std::array<int8_t, n>& row, uint32_t signs, int8_t* q) {
  for (size_t i = 0; i < n; ++i) q[i] = static_cast<int8_t>((signs >> i & 1) != 0 ? -row[i] : row[i]);
}

// Eight times the values of a row shifted by an eighth.
void put_shifted_row(int32_t index, bool down, int8_t* q) {
  for (size_t i = 0; i < 8; ++i)
    q[i] = static_cast<int8_t>(8 * kIq1Codebook[static_cast<size_t>(index)][i] + (down ? -1 : 1));
}

float odd_scale(float d, int32_t s) { return d * static_cast<float>(2 * s + 1); }

// Codebook formats: a super-block of 256 values.
void unpack_codebook(QuantType type, const std::byte* b, int8_t* q, float* scale) {
  const float d = half_at(b, 0);
  const auto row = [](const auto& codebook, int32_t index) -> const auto& {
    return codebook[static_cast<size_t>(index)];
  };
  for (int32_t k = 0; k < 32; ++k, q += 8) {  // 8 values at a time; j: block of 32 values
    const int32_t j = k / 4, l = k % 4;
    switch (type) {
      case QuantType::IQ2_XXS: {
        const uint32_t word = u32_at(b, 6 + 8 * j);
        scale[j] = odd_scale(d, static_cast<int32_t>(word >> 28)) * 0.125f;
        put_row(row(kIq2XxsCodebook, byte_at(b, 2 + 8 * j + l)), even_signs(word >> 7 * l & 127), q);
        break;
      }
      case QuantType::IQ2_XS: {
        const uint32_t word = u16_at(b, 2 + 2 * k);
        scale[k / 2] = odd_scale(d, byte_at(b, 66 + j) >> (4 * (l / 2)) & 15) * 0.125f;
        put_row(row(kIq2XsCodebook, word & 511), even_signs(word >> 9), q);
        break;
      }
      case QuantType::IQ2_S: {
        const int32_t index = byte_at(b, 2 + k) | (byte_at(b, 66 + j) >> (2 * l) & 3) << 8;
        scale[k / 2] = odd_scale(d, byte_at(b, 74 + j) >> (4 * (l / 2)) & 15) * 0.125f;
        put_row(row(kIq2SCodebook, index), byte_at(b, 34 + k), q);
        break;
      }
      case QuantType::IQ3_XXS: {
        const uint32_t word = u32_at(b, 66 + 4 * j), signs = even_signs(word >> 7 * l & 127);
        scale[j] = odd_scale(d, static_cast<int32_t>(word >> 28)) * 0.25f;
        put_row(row(kIq3XxsCodebook, byte_at(b, 2 + 2 * k)), signs, q);
        put_row(row(kIq3XxsCodebook, byte_at(b, 3 + 2 * k)), signs >> 4, q + 4);
        break;
      }
      case QuantType::IQ3_S: {
        const int32_t high = byte_at(b, 66 + j) >> (2 * l);
        scale[j] = odd_scale(d, byte_at(b, 106 + j / 2) >> (4 * (j % 2)) & 15);
        const uint32_t signs = byte_at(b, 74 + k);
        put_row(row(kIq3SCodebook, byte_at(b, 2 + 2 * k) | (high & 1) << 8), signs, q);
        put_row(row(kIq3SCodebook, byte_at(b, 3 + 2 * k) | (high >> 1 & 1) << 8), signs >> 4, q + 4);
        break;
      }
      case QuantType::IQ1_S: {
        const int32_t high = u16_at(b, 34 + 2 * j);
        scale[j] = odd_scale(d, high >> 12 & 7) * 0.125f;
        put_shifted_row(byte_at(b, 2 + k) | (high >> (3 * l) & 7) << 8, (high & 0x8000) != 0, q);
        break;
      }
      default: {  // IQ1_M
        uint32_t bits = 0;
        for (int32_t i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(u16_at(b, 48 + 2 * i) >> 12) << (4 * i);
        const float d_m = f32_from_f16(static_cast<uint16_t>(bits));
        scale[k / 2] = odd_scale(d_m, u16_at(b, 48 + 2 * (k / 8)) >> (3 * (k / 2 % 4)) & 7) * 0.125f;
        const int32_t high = byte_at(b, 32 + k / 2) >> (4 * (k % 2)) & 15;
        put_shifted_row(byte_at(b, k) | (high & 7) << 8, (high & 8) != 0, q);
        break;
      }
    }
  }
}

// Value i of TQ1_0, 0..2.
int32_t trit(const std::byte* b, int32_t i) {
  const int32_t byte = i < 160 ? i % 32 : i < 240 ? 32 + i % 16 : 48 + i % 4;
  const int32_t digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
  constexpr int32_t kPowersOf3[5] = {1, 3, 9, 27, 81};
  return (byte_at(b, byte) * kPowersOf3[digit] & 255) * 3 >> 8;
}

// One block to codes, scales and minimums (unused by types without).
void unpack_block(QuantType type, const std::byte* b, int8_t* q, float* scale, float* minimum) {
  const auto fill = [&](int32_t n, auto&& code) {
    for (int32_t i = 0; i < n; ++i) q[i] = static_cast<int8_t>(code(i));
  };
  switch (type) {
    case QuantType::Q8_0:
      *scale = half_at(b, 0);
      return fill(32, [&](int32_t i) { return byte_at(b, 2 + i); });
    case QuantType::Q4_0:
      *scale = half_at(b, 0);
      return fill(32, [&](int32_t i) { return nibble(b, 2, i) - 8; });
    case QuantType::Q4_1:
      *scale = half_at(b, 0), *minimum = half_at(b, 2);
      return fill(32, [&](int32_t i) { return nibble(b, 4, i); });
    case QuantType::Q5_0:
      *scale = half_at(b, 0);
      return fill(32, [&](int32_t i) { return nibble(b, 6, i) + 16 * high_bit(b, 2, i) - 16; });
    case QuantType::Q5_1:
      *scale = half_at(b, 0), *minimum = half_at(b, 2);
      return fill(32, [&](int32_t i) { return nibble(b, 8, i) + 16 * high_bit(b, 4, i); });
    case QuantType::Q1_0:
      std::fill_n(scale, 4, half_at(b, 0));
      return fill(128, [&](int32_t i) { return 2 * high_bit(b, 2, i) - 1; });
    case QuantType::Q2_0:
      std::fill_n(scale, 2, half_at(b, 0));
      return fill(64, [&](int32_t i) { return (byte_at(b, 2 + i / 4) >> (2 * (i % 4)) & 3) - 1; });
    case QuantType::IQ4_NL:
      *scale = half_at(b, 0);
      return fill(32, [&](int32_t i) { return kLevels4[nibble(b, 2, i)]; });
    case QuantType::MXFP4:
      *scale = std::ldexp(1.0f, byte_at(b, 0) - 128);
      return fill(32, [&](int32_t i) { return kDoubledE2m1[nibble(b, 1, i)]; });
    case QuantType::NVFP4:
      for (int32_t k = 0; k < 4; ++k) {
        const int32_t s = byte_at(b, k), exponent = s >> 3 & 15, mantissa = s & 7;
        scale[k] = s == 127       ? 0.0f
                   : exponent > 0 ? std::ldexp(static_cast<float>(8 + mantissa), exponent - 11)
                                  : std::ldexp(static_cast<float>(mantissa), -10);
      }
      return fill(
          64, [&](int32_t i) { return kDoubledE2m1[byte_at(b, 4 + 8 * (i / 16) + i % 8) >> (i / 8 % 2 * 4) & 15]; });
    case QuantType::Q2_K:
      for (int32_t j = 0; j < 16; ++j) {
        scale[j] = half_at(b, 80) * static_cast<float>(byte_at(b, j) & 15);
        minimum[j] = -(half_at(b, 82) * static_cast<float>(byte_at(b, j) >> 4));
      }
      return fill(256, [&](int32_t i) { return two_bits(b, 16, i); });
    case QuantType::Q3_K:
      for (int32_t j = 0; j < 16; ++j) {
        const int32_t low = byte_at(b, 96 + j % 8) >> (j / 8 * 4) & 15;
        const int32_t high = byte_at(b, 104 + j % 4) >> (2 * (j / 4)) & 3;
        scale[j] = half_at(b, 108) * static_cast<float>((low | high << 4) - 32);
      }
      return fill(256, [&](int32_t i) { return two_bits(b, 32, i) + 4 * (byte_at(b, i % 32) >> (i / 32) & 1) - 4; });
    case QuantType::Q4_K:
    case QuantType::Q5_K: {
      for (int32_t j = 0; j < 8; ++j) {
        int32_t sc, mn;
        scale_and_minimum(b + 4, j, sc, mn);
        scale[j] = half_at(b, 0) * static_cast<float>(sc);
        minimum[j] = -(half_at(b, 2) * static_cast<float>(mn));
      }
      const bool five = type == QuantType::Q5_K;
      return fill(256, [&](int32_t i) {
        const int32_t low = byte_at(b, (five ? 48 : 16) + 32 * (i / 64) + i % 32) >> (i / 32 % 2 * 4) & 15;
        return five ? low | (byte_at(b, 16 + i % 32) >> (i / 32) & 1) << 4 : low;
      });
    }
    case QuantType::Q6_K:
      for (int32_t j = 0; j < 16; ++j)
        scale[j] = half_at(b, 208) * static_cast<float>(static_cast<int8_t>(byte_at(b, 192 + j)));
      return fill(256, [&](int32_t i) {
        const int32_t n = i / 128, r = i % 128;
        const int32_t low = byte_at(b, 64 * n + r % 64) >> (r / 64 * 4) & 15;
        const int32_t high = byte_at(b, 128 + 32 * n + r % 32) >> (r / 32 * 2) & 3;
        return (low | high << 4) - 32;
      });
    case QuantType::IQ4_XS:
      for (int32_t j = 0; j < 8; ++j) {
        const int32_t low = byte_at(b, 4 + j / 2) >> (4 * (j % 2)) & 15, high = u16_at(b, 2) >> (2 * j) & 3;
        scale[j] = half_at(b, 0) * static_cast<float>((low | high << 4) - 32);
      }
      return fill(256, [&](int32_t i) { return kLevels4[nibble(b, 8 + 16 * (i / 32), i % 32)]; });
    case QuantType::TQ1_0:
      std::fill_n(scale, 8, half_at(b, 52));
      return fill(256, [&](int32_t i) { return trit(b, i) - 1; });
    case QuantType::TQ2_0:
      std::fill_n(scale, 8, half_at(b, 64));
      return fill(256, [&](int32_t i) { return two_bits(b, 0, i) - 1; });
    default:
      return unpack_codebook(type, b, q, scale);
  }
}

}  // namespace

bool has_integer_path(QuantType type) {
  return traits(type).is_quantized && type != QuantType::Q8_1 && type != QuantType::Q8_K;
}

IntegerRows unpack_integer_rows(QuantType type, const std::byte* rows, int32_t in_features, int32_t out_features) {
  const QuantTraits& t = traits(type);
  IntegerRows w;
  switch (type) {
    case QuantType::Q2_K:
    case QuantType::Q3_K:
    case QuantType::Q6_K:
    case QuantType::NVFP4:
    case QuantType::IQ1_M:
    case QuantType::IQ2_XS:
    case QuantType::IQ2_S:
      w.group = 16;
      break;
    default:
      break;
  }
  const bool has_minimum = type == QuantType::Q4_1 || type == QuantType::Q5_1 || type == QuantType::Q2_K ||
                           type == QuantType::Q4_K || type == QuantType::Q5_K;
  const size_t values = static_cast<size_t>(in_features) * static_cast<size_t>(out_features);
  const size_t groups_per_block = static_cast<size_t>(t.block_values / w.group);
  w.codes.resize(values);
  w.scales.resize(values / static_cast<size_t>(w.group));
  if (has_minimum) w.minimums.resize(w.scales.size());
  for (size_t block = 0; block < values / static_cast<size_t>(t.block_values); ++block) {
    float minimum[16];
    unpack_block(type, rows + block * static_cast<size_t>(t.block_bytes),
                 &w.codes[block * static_cast<size_t>(t.block_values)], &w.scales[block * groups_per_block], minimum);
    if (has_minimum) std::copy_n(minimum, groups_per_block, &w.minimums[block * groups_per_block]);
  }
  return w;
}

QuantizedRow quantize_row(const float* x, int32_t features, int32_t group) {
  QuantizedRow row;
  row.codes.resize(static_cast<size_t>(features));
  for (int32_t block = 0; block < features / 32; ++block) {
    const float* values = x + block * 32;
    float largest = 0;
    for (int32_t i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(values[i]));
    const float quotient = 127.0f / largest;
    const float inverse = std::isfinite(quotient) ? quotient : 0.0f;
    const float scale = largest / 127.0f;
    row.scale.push_back(scale);
    for (int32_t first = 0; first < 32; first += group) {
      int32_t sum = 0;
      for (int32_t i = first; i < first + group; ++i) {
        const auto code = static_cast<int8_t>(std::nearbyint(values[i] * inverse));
        row.codes[static_cast<size_t>(block * 32 + i)] = code;
        sum += code;
      }
      row.sum.push_back(scale * static_cast<float>(sum));
    }
  }
  return row;
}

namespace {

void store_u16(std::byte* at, uint16_t bits) {
  at[0] = static_cast<std::byte>(bits & 255);
  at[1] = static_cast<std::byte>(bits >> 8);
}

void encode_q4_0(const float* values, std::byte* block) {
  float extreme = 0;
  for (int32_t i = 0; i < 32; ++i)
    if (std::fabs(values[i]) > std::fabs(extreme)) extreme = values[i];
  const float scale = extreme / -8.0f;
  const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  store_u16(block, f16_from_f32(scale));
  const auto code = [&](int32_t i) { return std::min(15, static_cast<int32_t>(std::fma(values[i], inverse, 8.5f))); };
  for (int32_t i = 0; i < 16; ++i) block[2 + i] = static_cast<std::byte>(code(i) | code(i + 16) << 4);
}

}  // namespace

void encode_kv(QuantType type, const float* values, std::byte* encoded, int32_t features) {
  switch (type) {
    case QuantType::F32:
      std::memcpy(encoded, values, static_cast<size_t>(features) * sizeof(float));
      return;
    case QuantType::F16:
      for (int32_t i = 0; i < features; ++i) store_u16(encoded + 2 * i, f16_from_f32(values[i]));
      return;
    case QuantType::BF16:
      for (int32_t i = 0; i < features; ++i) store_u16(encoded + 2 * i, bf16_from_f32(values[i]));
      return;
    case QuantType::Q8_0: {
      const QuantizedRow row = quantize_row(values, features, 32);
      for (int32_t block = 0; block < features / 32; ++block) {
        store_u16(encoded + block * 34, f16_from_f32(row.scale[static_cast<size_t>(block)]));
        std::memcpy(encoded + block * 34 + 2, &row.codes[static_cast<size_t>(block * 32)], 32);
      }
      return;
    }
    case QuantType::Q4_0:
      for (int32_t block = 0; block < features / 32; ++block) encode_q4_0(values + block * 32, encoded + block * 18);
      return;
    default:
      throw InvalidArgument("a KV cache of type " + std::string(traits(type).name) +
                            " cannot be on a CPU; expected f32, f16, bf16, q8_0, q4_0");
  }
}

namespace {

size_t kv_row_bytes(QuantType type, int32_t head_dim) {
  const QuantTraits& t = traits(type);
  switch (type) {
    case QuantType::F32:
    case QuantType::F16:
    case QuantType::BF16:
    case QuantType::Q8_0:
    case QuantType::Q4_0:
      break;
    default:
      throw InvalidArgument("a KV cache of type " + std::string(t.name) +
                            " cannot be on a CPU; expected f32, f16, bf16, q8_0, q4_0");
  }
  if (head_dim < 1 || head_dim % t.block_values != 0)
    throw InvalidArgument("KV cache type " + std::string(t.name) + " needs heads of a multiple of " +
                          std::to_string(t.block_values) + " features, this model has " + std::to_string(head_dim));
  return static_cast<size_t>(row_bytes(t, head_dim));
}

}  // namespace

PageLayout::PageLayout(const KvShape& shape)
    : kv_heads_(shape.kv_heads),
      keys_(shape.keys()),
      k_row_bytes_(kv_row_bytes(shape.type_k, shape.head_dim_k)),
      v_row_bytes_(kv_row_bytes(shape.type_v, shape.head_dim_v)) {}

size_t PageLayout::k_offset(int32_t kv_head, int32_t key) const {
  return static_cast<size_t>(kv_head * keys_ + key) * k_row_bytes_;
}

size_t PageLayout::v_offset(int32_t kv_head, int32_t token) const {
  return static_cast<size_t>(kv_heads_ * keys_) * k_row_bytes_ +
         (static_cast<size_t>(kv_head) * kPageTokens + static_cast<size_t>(token)) * v_row_bytes_;
}

size_t PageLayout::bytes() const { return (v_offset(kv_heads_, 0) + 63) / 64 * 64; }

}  // namespace v100
