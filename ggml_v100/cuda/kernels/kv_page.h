// The layout of a KV page on the device: 256 tokens of all kv heads. Host and device.
//
// A page is the key parts of all kv heads, then their value parts. Attention reads keys and values as the weight kernels read
// weights: straight from memory into the fragments of the tensor instruction, 512 adjacent bytes per warp and request.
// So a part is made of strips: 32 packed values of each of 32 lanes.
//   keys    strip [token / 32][feature / 32]: lane `lane_of_column(token % 32)` holds 32 features of its token
//   values  strip [feature / 32][token / 32]: lane `lane_of_column(feature % 32)` holds 32 tokens of its feature
// Feature counts are filled up to a multiple of 32 with zeros. A strip is [loads][32 lanes][16 bytes]:
//   f16    4 loads of 8 values
//   q8_0   2 loads of 16 codes i8
//   q4_0   1 load of 32 codes; those of values 8 j..8 j + 7 are word j, in the places of codecs.cuh
//   q4_1   the same;  q5_0, q5_1   the same, then [32 lanes] words of fifth bits, in the places of codecs.cuh
// After all strips of a part come, for the quantised types, their scales: [strip][32 tokens] f16. The scale of a key stands
// at the place of its lane, that of a value at its token; either belongs to 32 features of one token, as in ops.h. After them,
// for q4_1 and q5_1, as many minimums.
// Keys and values have the same number of features: no model of ours differs there, so the host refuses what does.
//
// The cache of a sparse-attention indexer is a page of one head whose key part is shorter: one key for each block of tokens.
#pragma once

#include "params.h"

namespace v100::cuda {

constexpr int32_t kPageTokens = 256;
constexpr int32_t kStripValues = 32;
constexpr int32_t kPageTiles = kPageTokens / kStripValues;
enum KvType : int32_t { kKvF16 = 0, kKvQ8_0 = 1, kKvQ4_0 = 2, kKvQ4_1 = 3, kKvQ5_0 = 4, kKvQ5_1 = 5 };

constexpr bool kv_has_fifth_bit(int32_t type) { return type >= kKvQ5_0; }
constexpr bool kv_has_minimum(int32_t type) { return type == kKvQ4_1 || type == kKvQ5_1; }
constexpr int32_t kv_strip_loads(int32_t type) { return type == kKvF16 ? 4 : type == kKvQ8_0 ? 2 : 1; }
constexpr int32_t kv_strip_bytes(int32_t type) {
  return kv_strip_loads(type) * 512 + (kv_has_fifth_bit(type) ? 128 : 0);
}
constexpr int32_t kv_feature_blocks(int32_t head_dim) { return (head_dim + kStripValues - 1) / kStripValues; }

// Of one head's keys, or of its values. tiles: 32 tokens each.
constexpr int32_t kv_code_bytes(int32_t type, int32_t head_dim, int32_t tiles = kPageTiles) {
  return tiles * kv_feature_blocks(head_dim) * kv_strip_bytes(type);
}
constexpr int32_t kv_scale_bytes(int32_t head_dim, int32_t tiles = kPageTiles) {
  return tiles * kv_feature_blocks(head_dim) * kStripValues * 2;
}
constexpr int32_t kv_part_bytes(int32_t type, int32_t head_dim, int32_t tiles = kPageTiles) {
  const int32_t scales = type == kKvF16 ? 0 : kv_scale_bytes(head_dim, tiles);
  return kv_code_bytes(type, head_dim, tiles) + scales * (kv_has_minimum(type) ? 2 : 1);
}
// Tiles of a page's keys.
constexpr int32_t kv_key_tiles(int32_t block) {
  return block == 0 ? kPageTiles : (kPageTokens / block + kStripValues - 1) / kStripValues;
}
constexpr int32_t kv_key_bytes(const KvCache& cache) {
  return kv_part_bytes(cache.type_k, cache.head_dim, kv_key_tiles(cache.block));
}
constexpr int64_t kv_page_bytes(const KvCache& cache) {
  return static_cast<int64_t>(cache.kv_heads) * (kv_key_bytes(cache) + kv_part_bytes(cache.type_v, cache.head_dim));
}
// From a scale to its minimum.
constexpr int32_t kv_minimums_after(const KvCache& cache, bool is_value) {
  return kv_scale_bytes(cache.head_dim, is_value ? kPageTiles : kv_key_tiles(cache.block));
}
// Where the scales of a part begin.
constexpr int32_t kv_scales_at(const KvCache& cache, bool is_value) {
  return is_value ? kv_code_bytes(cache.type_v, cache.head_dim)
                  : kv_code_bytes(cache.type_k, cache.head_dim, kv_key_tiles(cache.block));
}

}  // namespace v100::cuda
