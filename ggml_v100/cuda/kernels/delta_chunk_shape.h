// The workspace of the chunked delta net, which one kernel fills and the next one reads. Host and device.
#pragma once

#include "params.h"

namespace v100::cuda {

constexpr int32_t kDeltaChunk = 64;  // tokens

// Values f16 of a chunk and key head: panels of keys, queries and keys across.
constexpr int64_t delta_key_panel_values(int32_t head_dim) { return int64_t{3} * kDeltaChunk * head_dim; }
// Values f16 of a chunk and value head: two matrices of tokens by tokens.
constexpr int64_t kDeltaValuePanelValues = int64_t{2} * kDeltaChunk * kDeltaChunk;
// Values f32 of a chunk and value head: four for each token.
constexpr int64_t kDeltaFactorValues = int64_t{4} * kDeltaChunk;

// Chunks of a sequence with `rows` rows, the first of which is at `position` of the sequence.
constexpr int32_t delta_chunks(int32_t position, int32_t rows) {
  return rows == 0 ? 0 : (position % kDeltaChunk + rows + kDeltaChunk - 1) / kDeltaChunk;
}

// Dynamic shared memory of delta_net_chunks_N: two panels or two matrices, and the gates.
constexpr int32_t delta_chunks_shared_bytes(int32_t head_dim) {
  const int32_t panels = 2 * head_dim / 8 * (kDeltaChunk + 1) * 16, matrices = 2 * kDeltaChunk * (kDeltaChunk + 4) * 4;
  return (panels > matrices ? panels : matrices) + 4 * kDeltaChunk * 20;
}

}  // namespace v100::cuda
