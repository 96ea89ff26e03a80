// Unpacking of weight blocks to integer codes, rounding of activations, encoding of KV rows: scalar, by the format's formulas.
#include "ops/reference_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/half.h"

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

// One block to codes, scales and minimums (unused by types without).
void unpack_block(QuantType type, const std::byte* b, int8_t* q, float* scale, float* minimum) {
  switch (type) {
    case QuantType::Q8_0:
      *scale = half_at(b, 0);
      for (int32_t i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(byte_at(b, 2 + i));
      return;
    case QuantType::Q4_0:
      *scale = half_at(b, 0);
      for (int32_t i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(nibble(b, 2, i) - 8);
      return;
    case QuantType::Q4_1:
      *scale = half_at(b, 0), *minimum = half_at(b, 2);
      for (int32_t i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(nibble(b, 4, i));
      return;
    case QuantType::Q5_0:
      *scale = half_at(b, 0);
      for (int32_t i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(nibble(b, 6, i) + 16 * high_bit(b, 2, i) - 16);
      return;
    case QuantType::Q5_1:
      *scale = half_at(b, 0), *minimum = half_at(b, 2);
      for (int32_t i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(nibble(b, 8, i) + 16 * high_bit(b, 4, i));
      return;
    case QuantType::Q4_K:
      for (int32_t j = 0; j < 8; ++j) {
        int32_t sc, mn;
        scale_and_minimum(b + 4, j, sc, mn);
        scale[j] = half_at(b, 0) * static_cast<float>(sc);
        minimum[j] = -(half_at(b, 2) * static_cast<float>(mn));
      }
      for (int32_t i = 0; i < 256; ++i)
        q[i] = static_cast<int8_t>(byte_at(b, 16 + 32 * (i / 64) + i % 32) >> (i / 32 % 2 * 4) & 15);
      return;
    case QuantType::Q6_K:
      for (int32_t j = 0; j < 16; ++j)
        scale[j] = half_at(b, 208) * static_cast<float>(static_cast<int8_t>(byte_at(b, 192 + j)));
      for (int32_t i = 0; i < 256; ++i) {
        const int32_t n = i / 128, r = i % 128;
        const int32_t low = byte_at(b, 64 * n + r % 64) >> (r / 64 * 4) & 15;
        const int32_t high = byte_at(b, 128 + 32 * n + r % 32) >> (r / 32 * 2) & 3;
        q[i] = static_cast<int8_t>((low | high << 4) - 32);
      }
      return;
    default:
      throw InvalidArgument("type " + std::string(traits(type).name) + " has no integer path");
  }
}

}  // namespace

bool has_integer_path(QuantType type) {
  switch (type) {
    case QuantType::Q8_0:
    case QuantType::Q4_0:
    case QuantType::Q4_1:
    case QuantType::Q5_0:
    case QuantType::Q5_1:
    case QuantType::Q4_K:
    case QuantType::Q6_K:
      return true;
    default:
      return false;
  }
}

IntegerRows unpack_integer_rows(QuantType type, const std::byte* rows, int32_t in_features, int32_t out_features) {
  const QuantTraits& t = traits(type);
  const bool has_minimum = type == QuantType::Q4_1 || type == QuantType::Q5_1 || type == QuantType::Q4_K;
  IntegerRows w;
  w.group = type == QuantType::Q6_K ? 16 : 32;
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

QuantizedRow quantize_row(const float* x, int32_t features) {
  QuantizedRow row;
  row.codes.resize(static_cast<size_t>(features));
  for (int32_t block = 0; block < features / 32; ++block) {
    const float* values = x + block * 32;
    float largest = 0;
    for (int32_t i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(values[i]));
    const float quotient = 127.0f / largest;
    const float inverse = std::isfinite(quotient) ? quotient : 0.0f;
    int32_t sum = 0;
    for (int32_t i = 0; i < 32; ++i) {
      const auto code = static_cast<int8_t>(std::nearbyint(values[i] * inverse));
      row.codes[static_cast<size_t>(block * 32 + i)] = code;
      sum += code;
    }
    const float scale = largest / 127.0f;
    row.scale.push_back(scale);
    row.sum.push_back(scale * static_cast<float>(sum));
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
      const QuantizedRow row = quantize_row(values, features);
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
      throw InvalidArgument("KV cache type " + std::string(traits(type).name) +
                            " is not one of f32, f16, bf16, q8_0, q4_0");
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
      throw InvalidArgument("KV cache type " + std::string(t.name) + " is not one of f32, f16, bf16, q8_0, q4_0");
  }
  if (head_dim < 1 || head_dim % t.block_values != 0)
    throw InvalidArgument("KV cache type " + std::string(t.name) + " needs heads of a multiple of " +
                          std::to_string(t.block_values) + " features, this model has " + std::to_string(head_dim));
  return static_cast<size_t>(row_bytes(t, head_dim));
}

}  // namespace

PageLayout::PageLayout(const KvShape& shape)
    : kv_heads_(shape.kv_heads),
      k_row_bytes_(kv_row_bytes(shape.type_k, shape.head_dim_k)),
      v_row_bytes_(kv_row_bytes(shape.type_v, shape.head_dim_v)) {}

size_t PageLayout::k_offset(int32_t kv_head, int32_t token) const {
  return (static_cast<size_t>(kv_head) * kPageTokens + static_cast<size_t>(token)) * k_row_bytes_;
}

size_t PageLayout::v_offset(int32_t kv_head, int32_t token) const {
  return static_cast<size_t>(kv_heads_) * kPageTokens * k_row_bytes_ +
         (static_cast<size_t>(kv_head) * kPageTokens + static_cast<size_t>(token)) * v_row_bytes_;
}

size_t PageLayout::bytes() const {
  return static_cast<size_t>(kv_heads_) * kPageTokens * (k_row_bytes_ + v_row_bytes_);  // 256 tokens: a multiple of 64
}

}  // namespace v100
