// Softmax attention with queries and keys normalised per head, partial rotary positions, and a gate on its output.
#pragma once

#include "model/parts.h"

namespace v100 {

// H hidden, Hq heads, D head size.
struct GatedAttentionWeights {
  AttentionWeights attn;
  Linear gate;                  // [Hq D, H]
  VectorWeight q_norm, k_norm;  // [D]
};

// attn_q holds queries and gates, head after head D rows of one and D rows of the other.
GatedAttentionWeights load_gated_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer);

struct GatedQueries {
  Tensor q, gate;  // [rows, Hq D] each
};
// n [rows, H], normed. Keys and values are appended to the KV pages; queries come normalised and rotated.
GatedQueries project_gated(Ops& ops, Tensor n, const Rows& rows, const KvLayer& kv, const RopeTable& rope, float eps,
                           const GatedAttentionWeights& w);

// Only the part that appends n [rows, H], normed, to the KV pages.
void append_gated(Ops& ops, Tensor n, const Rows& rows, const KvLayer& kv, const RopeTable& rope, float eps,
                  const GatedAttentionWeights& w);

// n [rows, H], normed -> [rows, H]. Appends to the KV pages.
Tensor gated_attention(Ops& ops, Tensor n, const Rows& rows, const KvLayer& kv, const RopeTable& rope, float eps,
                       const GatedAttentionWeights& w);

}  // namespace v100
