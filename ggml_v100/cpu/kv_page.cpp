// Writing of keys (scattered over a tile's feature rows) and values (contiguous) in the page's element types.
#include "cpu/kv_page.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/half.h"
#include "base/thread_pool.h"
#include "ops/reference_blocks.h"

namespace v100::cpu {

namespace {

constexpr int64_t kParallelValues = 16 << 10;
constexpr int32_t kMostDim = 1024;  // features of a head

size_t up_to_64(size_t bytes) { return (bytes + 63) / 64 * 64; }

bool is_float(QuantType type) { return !traits(type).is_quantized; }

size_t code_bytes(QuantType type, int32_t features) {
  switch (type) {
    case QuantType::F32:
      return static_cast<size_t>(features) * 4;
    case QuantType::Q8_0:
      return static_cast<size_t>(features);
    case QuantType::Q4_0:
      return static_cast<size_t>(features) / 2;
    default:
      return static_cast<size_t>(features) * 2;
  }
}

float element(QuantType type, const std::byte* elements, size_t index) {
  if (type == QuantType::F32) {
    float value;
    std::memcpy(&value, elements + index * sizeof value, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, elements + index * sizeof bits, sizeof bits);
  return type == QuantType::F16 ? f32_from_f16(bits) : f32_from_bf16(bits);
}

// A head's features as elements or as the blocks of the GGUF format.
struct Encoded {
  alignas(64) std::byte bytes[kMostDim * 4];
};

void encode(QuantType type, const float* x, int32_t features, Encoded& out, const Kernels& kernels) {
  switch (type) {
    case QuantType::F16:
      kernels.to_f16(x, reinterpret_cast<uint16_t*>(out.bytes), features);
      return;
    case QuantType::Q8_0:
      for (int32_t block = 0; block < features / 32; ++block) {
        ActivationBlock rounded;
        kernels.quantize(x + block * 32, 1, PanelKind::q4_1, &rounded, 1);
        const uint16_t scale = f16_from_f32(rounded.scale);
        std::memcpy(out.bytes + block * 34, &scale, 2);
        std::memcpy(out.bytes + block * 34 + 2, rounded.p, 32);
      }
      return;
    default:
      encode_kv(type, x, out.bytes, features);
      return;
  }
}

}  // namespace

KvPage::KvPage(const KvShape& shape) : shape_(shape) {
  (void)PageLayout(shape);  // refuses types and head sizes that the KV formats do not allow
  for (const int32_t dim : {shape.head_dim_k, shape.head_dim_v})
    if (dim > kMostDim)
      throw InvalidArgument("heads have " + std::to_string(dim) + " features; the CPU backend supports at most " +
                            std::to_string(kMostDim));
  padded_dim_v_ = (shape.head_dim_v + 15) / 16 * 16;
  key_tile_codes_ = code_bytes(shape.type_k, shape.head_dim_k) * kKeyTileTokens;
  key_tile_bytes_ = key_tile_codes_;
  if (!is_float(shape.type_k)) key_tile_bytes_ += static_cast<size_t>(shape.head_dim_k / 32) * kKeyTileTokens * 2;
  key_head_bytes_ = key_tile_bytes_ * static_cast<size_t>((shape.keys() + kKeyTileTokens - 1) / kKeyTileTokens);
  value_row_bytes_ = code_bytes(shape.type_v, padded_dim_v_);
  value_codes_ = value_row_bytes_ * kPageTokens;
  value_head_bytes_ = value_codes_;
  if (!is_float(shape.type_v))
    value_head_bytes_ += up_to_64(static_cast<size_t>(shape.head_dim_v / 32) * kPageTokens * 2);
}

ElementType KvPage::key_element() const {
  switch (shape_.type_k) {
    case QuantType::F16:
      return ElementType::f16;
    case QuantType::BF16:
      return ElementType::bf16;
    case QuantType::Q8_0:
      return ElementType::q8_0_keys;
    case QuantType::Q4_0:
      return ElementType::q4_0_keys;
    default:
      return ElementType::f32;
  }
}

ElementType KvPage::value_element() const {
  switch (shape_.type_v) {
    case QuantType::F16:
      return ElementType::f16;
    case QuantType::BF16:
      return ElementType::bf16;
    case QuantType::Q8_0:
      return ElementType::q8_0_values;
    case QuantType::Q4_0:
      return ElementType::q4_0_values;
    default:
      return ElementType::f32;
  }
}

size_t KvPage::key_column_bytes() const { return is_float(shape_.type_k) ? code_bytes(shape_.type_k, 1) : 1; }

void KvPage::put_key(std::byte* page, int32_t kv_head, int32_t index, const float* key, const Kernels& kernels) const {
  std::byte* tile = page + key_tile(kv_head, index / kKeyTileTokens);
  const auto column = static_cast<size_t>(index % kKeyTileTokens);
  const auto features = static_cast<size_t>(shape_.head_dim_k);
  if (shape_.type_k == QuantType::F32) {
    auto* elements = reinterpret_cast<float*>(tile);
    for (size_t d = 0; d < features; ++d) elements[d * kKeyTileTokens + column] = key[d];
    return;
  }
  Encoded encoded;
  encode(shape_.type_k, key, shape_.head_dim_k, encoded, kernels);
  if (is_float(shape_.type_k)) {
    const auto* source = reinterpret_cast<const uint16_t*>(encoded.bytes);
    auto* elements = reinterpret_cast<uint16_t*>(tile);
    for (size_t d = 0; d < features; ++d) elements[d * kKeyTileTokens + column] = source[d];
    return;
  }
  const size_t codes = shape_.type_k == QuantType::Q8_0 ? 32 : 16;  // bytes of a block's codes
  for (size_t block = 0; block < features / 32; ++block) {
    const std::byte* source = encoded.bytes + block * (codes + 2);
    std::memcpy(tile + key_tile_codes_ + (block * kKeyTileTokens + column) * 2, source, 2);
    for (size_t i = 0; i < codes; ++i) tile[(block * codes + i) * kKeyTileTokens + column] = source[2 + i];
  }
}

void KvPage::put_value(std::byte* page, int32_t kv_head, int32_t token, const float* value,
                       const Kernels& kernels) const {
  std::byte* head = page + values(kv_head);
  std::byte* row = head + static_cast<size_t>(token) * value_row_bytes_;
  const auto features = static_cast<size_t>(shape_.head_dim_v);
  if (shape_.type_v == QuantType::F32) {
    std::memcpy(row, value, features * sizeof(float));
    return;
  }
  Encoded encoded;
  encode(shape_.type_v, value, shape_.head_dim_v, encoded, kernels);
  if (is_float(shape_.type_v)) {
    std::memcpy(row, encoded.bytes, features * 2);
    return;
  }
  const size_t codes = shape_.type_v == QuantType::Q8_0 ? 32 : 16;
  std::byte* scales = head + value_codes_ + static_cast<size_t>(token) * (features / 32) * 2;
  for (size_t block = 0; block < features / 32; ++block) {
    const std::byte* source = encoded.bytes + block * (codes + 2);
    std::memcpy(scales + block * 2, source, 2);
    std::memcpy(row + block * codes, source + 2, codes);
  }
}

void KvPage::get_key(const std::byte* page, int32_t kv_head, int32_t token, float* key) const {
  const std::byte* tile = page + key_tile(kv_head, token / kKeyTileTokens);
  const auto column = static_cast<size_t>(token % kKeyTileTokens);
  const auto features = static_cast<size_t>(shape_.head_dim_k);
  if (is_float(shape_.type_k)) {
    for (size_t d = 0; d < features; ++d) key[d] = element(shape_.type_k, tile, d * kKeyTileTokens + column);
    return;
  }
  const auto* codes = reinterpret_cast<const uint8_t*>(tile);
  for (size_t block = 0; block < features / 32; ++block) {
    uint16_t bits;
    std::memcpy(&bits, tile + key_tile_codes_ + (block * kKeyTileTokens + column) * 2, 2);
    const float scale = f32_from_f16(bits);
    float* values = key + block * 32;
    if (shape_.type_k == QuantType::Q8_0) {
      for (size_t i = 0; i < 32; ++i)
        values[i] = scale * static_cast<float>(static_cast<int8_t>(codes[(block * 32 + i) * kKeyTileTokens + column]));
    } else {
      for (size_t i = 0; i < 16; ++i) {
        const int32_t pair = codes[(block * 16 + i) * kKeyTileTokens + column];
        values[i] = scale * static_cast<float>((pair & 15) - 8);
        values[16 + i] = scale * static_cast<float>((pair >> 4) - 8);
      }
    }
  }
}

void KvPage::get_value(const std::byte* page, int32_t kv_head, int32_t token, float* value,
                       const Kernels& kernels) const {
  const std::byte* head = page + values(kv_head);
  const std::byte* row = head + static_cast<size_t>(token) * value_row_bytes_;
  const auto features = static_cast<size_t>(shape_.head_dim_v);
  if (is_float(shape_.type_v)) {
    for (size_t d = 0; d < features; ++d) value[d] = element(shape_.type_v, row, d);
    return;
  }
  const auto* scales =
      reinterpret_cast<const uint16_t*>(head + value_codes_ + static_cast<size_t>(token) * (features / 32) * 2);
  if (shape_.type_v == QuantType::Q8_0)
    kernels.decode_values_q8(reinterpret_cast<const int8_t*>(row), scales, shape_.head_dim_v, value);
  else
    kernels.decode_values_q4(reinterpret_cast<const uint8_t*>(row), scales, shape_.head_dim_v, value);
}

void read_kv(const KeysValues& read, RowRange indices, std::span<const PageId> pages, const KvLayer& layer,
             const Kernels& kernels, ThreadPool& pool) {
  const KvPage page(layer.shape);
  const auto range = [&](int64_t begin, int64_t end) {
    for (auto r = static_cast<int32_t>(begin); r < end; ++r) {
      const int32_t index = indices.begin + r, token = index % kPageTokens;
      const PageId id = pages[static_cast<size_t>(index / kPageTokens)];
      const std::byte* base = layer.pages + static_cast<size_t>(id) * layer.page_stride_bytes;
      for (int32_t h = 0; h < layer.shape.kv_heads; ++h) {
        page.get_key(base, h, token, read.k.row(r) + h * layer.shape.head_dim_k);
        page.get_value(base, h, token, read.v.row(r) + h * layer.shape.head_dim_v, kernels);
      }
    }
  };
  const int64_t count = indices.end - indices.begin;
  if (count * (read.k.features + read.v.features) < kParallelValues)
    range(0, count);
  else
    pool.parallel_for(count, 16, range);
}

void append_kv(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer, const Kernels& kernels, ThreadPool& pool) {
  const KvPage page(layer.shape);
  for (const SequenceRows& sequence : rows.sequences) {
    const auto append = [&](int64_t begin, int64_t end) {
      for (auto r = sequence.rows.begin + static_cast<int32_t>(begin); r < sequence.rows.begin + end; ++r) {
        const int32_t index = rows.kv_index[static_cast<size_t>(r)];
        const PageId id = sequence.pages[static_cast<size_t>(index / kPageTokens)];
        std::byte* base = layer.pages + static_cast<size_t>(id) * layer.page_stride_bytes;
        for (int32_t h = 0; h < layer.shape.kv_heads; ++h) {
          page.put_key(base, h, index % kPageTokens, k.row(r) + h * layer.shape.head_dim_k, kernels);
          page.put_value(base, h, index % kPageTokens, v.row(r) + h * layer.shape.head_dim_v, kernels);
        }
      }
    };
    const int64_t count = sequence.rows.end - sequence.rows.begin;
    if (count * (k.features + v.features) < kParallelValues)
      append(0, count);
    else
      pool.parallel_for(count, 16, append);
  }
}

}  // namespace v100::cpu
