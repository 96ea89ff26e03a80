// Low-rank adapters (Hu et al. 2021, "LoRA") on top of any Ops: W x becomes W x + scale * B (A x), where the scale is that
// of the row's sequence. What is multiplied by W is not touched, so that rows of different scales share one pass over W.
//
// Numerics: t = A x and d = B t are products of unquantised matrices, y = fma(factor, d, y) comes after the bias, adapter
// after adapter, with factor = scale * alpha / rank in f32. A row without an adapter (scale 0) takes no part: it has the
// bits of a model without adapters, whatever the other rows of the ubatch have.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "ops/ops.h"

namespace v100 {

// An adapter's matrices for one matrix of the model, this rank's part of them: the columns of A that go with the columns
// of W, the rows of B that go with its rows. R: the rank of the adaptation, I and O: features of W's input and output.
struct LowRank {
  // Of a matrix: A [R, I], B [O, R]. Of embeddings: A [vocab, R], whose rows are looked up, and B [features, R].
  Linear a, b;
  EmbeddingTable table;
  ExpertLinear experts_a, experts_b;  // of a stack: one of each per expert
  float alpha = 0;                    // 0: the scale is taken as it is
  int32_t rank = 0;
};

// By WeightOrigin of the matrix.
using LowRankParts = std::unordered_map<const WeightOrigin*, LowRank>;

// Ops that hand every call on to `inner` and add what the adapters make of it. adapters: outlive it, in the order of
// SequenceRows::adapters. Until enter() says which rows there are, none has an adapter.
std::unique_ptr<Ops> adapt(std::unique_ptr<Ops> inner, std::vector<const LowRankParts*> adapters);

}  // namespace v100
