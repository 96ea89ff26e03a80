// How attention is cut into blocks, and what shared memory they take. Host and device.
#pragma once

#include "kv_page.h"

namespace v100::cuda {

// Decode attention cuts a sequence at places that depend on nothing but the index: partitions of 256 tokens up to 16 K, which
// fill a card at short contexts, of 512 up to 64 K and of 1024 after, where they are many enough.
constexpr int32_t partition_begin(int32_t partition) {
  return partition <= 64    ? partition * 256
         : partition <= 160 ? 16384 + (partition - 64) * 512
                            : 65536 + (partition - 160) * 1024;
}
// Of the token at an index.
constexpr int32_t partition_of(int32_t index) {
  return index < 16384 ? index / 256 : index < 65536 ? 64 + (index - 16384) / 512 : 160 + (index - 65536) / 1024;
}

// Dynamic shared memory of an attention kernel whose blocks have `rows` rows.
constexpr int32_t attention_shared_bytes(int32_t head_dim, int32_t rows) {
  const int32_t blocks = kv_feature_blocks(head_dim), parts = kPageTiles / blocks;
  return rows * (64 * blocks + 600) + (parts - 1) * blocks * 1024 + 16;
}

}  // namespace v100::cuda
