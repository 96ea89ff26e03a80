// How attention finds keys and values: pages of 256 tokens, addressed through per-sequence page lists.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/range.h"
#include "quants/types.h"

namespace v100 {

inline constexpr int32_t kPageTokens = 256;

using PageId = int32_t;

// Shape of one layer's cache. A page of a layer holds K and V of kPageTokens tokens for all kv heads.
struct KvShape {
  QuantType type_k = QuantType::F16;  // F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1; a backend refuses what it has not
  QuantType type_v = QuantType::F16;
  int32_t kv_heads = 0;
  int32_t head_dim_k = 0;  // multiples of 32 for the quantised types
  int32_t head_dim_v = 0;
  bool is_windowed = false;  // read within a sliding window only
  // Query head h reads kv head (h + skew) / group. group 0: heads / kv_heads, with all kv heads read by equally many.
  int32_t group = 0;
  int32_t skew = 0;

  int32_t group_of(int32_t heads) const { return group > 0 ? group : heads / kv_heads; }
  // Of `heads` query heads those that read a kv head.
  RowRange readers(int32_t kv_head, int32_t heads) const {
    const int32_t first = kv_head * group_of(heads) - skew;
    return {std::max(0, first), std::min(heads, first + group_of(heads))};
  }

  // K and V of a token are the halves of a hidden state: the engine does not round them to less than f16.
  bool holds_states = false;

  // Tokens of a block: the cache of a sparse-attention indexer, one head. V holds the tokens' index keys, K one key for
  // each whole block of them. 0: K holds one key for each token. A divisor of kPageTokens.
  int32_t block = 0;

  int32_t keys() const { return block > 0 ? kPageTokens / block : kPageTokens; }  // of K in a page
};

// One layer's pages: page p starts at pages + p * page_stride_bytes. The layout inside a page belongs to the backend; a
// zeroed page is valid, and a page may be copied bytewise.
struct KvLayer {
  std::byte* pages = nullptr;
  size_t page_stride_bytes = 0;
  KvShape shape;
};

// The consecutive rows of a ubatch that belong to one sequence, and where that sequence's tokens and state lie.
struct SequenceRows {
  RowRange rows;
  std::span<const PageId> pages;      // token i of the sequence lies in pages[i / kPageTokens] at i % kPageTokens
  std::span<const int32_t> tokens;    // ids of the whole sequence up to and including the rows
  int32_t state_from = -1;            // slot of the recurrent state before the rows; -1: the sequence begins, all zeros
  int32_t state_to = -1;              // slot that takes the state after them; may be state_from
  std::span<const float> adapters{};  // scale of each of the engine's adapters; empty: none is applied
};

// A ubatch: rows of all sequences concatenated, never padded. All spans have one entry per row unless said otherwise.
struct Rows {
  std::span<const int32_t> tokens;     // token ids
  std::span<const int32_t> positions;  // rotary positions
  std::span<const int32_t> kv_index;   // index of the row's own token within its sequence: where K and V are written
  std::span<const RowRange> visible;   // kv indices the row attends to; causal: [0, kv_index + 1)
  std::span<const SequenceRows> sequences;  // one entry per sequence, rows ascending, covering all rows

  int32_t count() const { return static_cast<int32_t>(tokens.size()); }
};

}  // namespace v100
