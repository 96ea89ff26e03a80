// How attention is cut into blocks, and what shared memory they take. Host and device.
#pragma once

#include "kv_page.h"

namespace v100::cuda {

// Decode attention cuts a sequence at places that depend on nothing but the index: partitions of 256 tokens up to 16 K, which
// fill a card at short contexts, of 512 up to 64 K and of 2048 after, where they are many enough: a block's first and last page
// keep half of its warps waiting.
constexpr int32_t partition_begin(int32_t partition) {
  return partition <= 64    ? partition * 256
         : partition <= 160 ? 16384 + (partition - 64) * 512
                            : 65536 + (partition - 160) * 2048;
}
// Of the token at an index.
constexpr int32_t partition_of(int32_t index) {
  return index < 16384 ? index / 256 : index < 65536 ? 64 + (index - 16384) / 512 : 160 + (index - 65536) / 2048;
}

// Dynamic shared memory of an attention kernel whose blocks have `rows` rows.
constexpr int32_t attention_shared_bytes(int32_t head_dim, int32_t rows) {
  const int32_t blocks = kv_feature_blocks(head_dim), pairs = (blocks + 1) / 2, parts = 4 / pairs;
  return rows * (64 * blocks + 576) + (parts - 1) * pairs * 2048 + 16;
}

// Blocks of attention_combine for a head of a row: the sums of a long sequence are more than one block can ask for at once.
constexpr int32_t combine_slices(int32_t head_dim) { return (head_dim + 127) / 128; }

}  // namespace v100::cuda
