// The layout of a KV page of the CPU backend, and writing to it.
//
// Keys of one kv head: 4 tiles of 64 tokens, each [feature][64 tokens], so that one vector lane is one token; values:
// [token][features], so that one lane is one feature. Both are what a dense product reads in place (kernels.h).
//   f32, f16, bf16   elements; value rows are padded with zeros to a multiple of 16 features
//   q8_0             key tile: codes i8 [feature][64], then scales f16 [feature / 32][64]
//                    values: codes i8 [token][features], then scales f16 [token][features / 32]
//   q4_0             as q8_0 with nibbles: byte row (value: byte) 16 b + i of block b holds features 32 b + i (low) and
//                    32 b + 16 + i (high)
// A cache with one key for each block of tokens (KvShape::block) has as many key tiles as these keys need.
// A page is the key parts of all kv heads, then the value parts. Every part is a multiple of 64 bytes.
#pragma once

#include <cstddef>

#include "cpu/kernels.h"
#include "ops/ops.h"

namespace v100::cpu {

inline constexpr int32_t kKeyTileTokens = 64;

class KvPage {
 public:
  explicit KvPage(const KvShape& shape);  // throws InvalidArgument for an unsupported type or head size

  size_t bytes() const { return static_cast<size_t>(shape_.kv_heads) * (key_head_bytes_ + value_head_bytes_); }
  int32_t padded_dim_v() const { return padded_dim_v_; }

  // Offsets into the page.
  size_t key_tile(int32_t kv_head, int32_t tile) const {
    return static_cast<size_t>(kv_head) * key_head_bytes_ + static_cast<size_t>(tile) * key_tile_bytes_;
  }
  size_t key_tile_scales() const { return key_tile_codes_; }  // within a tile
  size_t values(int32_t kv_head) const {
    return static_cast<size_t>(shape_.kv_heads) * key_head_bytes_ + static_cast<size_t>(kv_head) * value_head_bytes_;
  }
  size_t value_scales() const { return value_codes_; }  // within a head's values
  // What a dense product reads in place.
  ElementType key_element() const;
  ElementType value_element() const;
  // Bytes from one key of a tile to the next, in the first of its rows.
  size_t key_column_bytes() const;
  size_t value_row_bytes() const { return value_row_bytes_; }

  // Writes head kv_head of one token; the key of a token or, in a cache with blocks, of a block.
  void put_key(std::byte* page, int32_t kv_head, int32_t index, const float* key, const Kernels& kernels) const;
  void put_value(std::byte* page, int32_t kv_head, int32_t token, const float* value, const Kernels& kernels) const;

  // Reads back what put_key and put_value wrote.
  void get_key(const std::byte* page, int32_t kv_head, int32_t token, float* key) const;
  void get_value(const std::byte* page, int32_t kv_head, int32_t token, float* value, const Kernels& kernels) const;

 private:
  KvShape shape_;
  int32_t padded_dim_v_;
  size_t key_tile_codes_, key_tile_bytes_, key_head_bytes_;
  size_t value_row_bytes_, value_codes_, value_head_bytes_;
};

// Writes k and v of all rows to their pages.
void append_kv(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer, const Kernels& kernels, ThreadPool& pool);

// The opposite: rows of `read` from the tokens at `indices` of the sequence with these pages.
void read_kv(const KeysValues& read, RowRange indices, std::span<const PageId> pages, const KvLayer& layer,
             const Kernels& kernels, ThreadPool& pool);

}  // namespace v100::cpu
