// The head of DSpark drafters: a block's rows know nothing of each other's tokens, so each row's logits are corrected by
// the token that was chosen for the row before, in a product of low rank; and how sure the drafter is of a row.
//
// V tokens of the target, V_d rows of the output matrix in use, R rank, E hidden.
#pragma once

#include <cstdint>
#include <span>

#include "gguf/metadata.h"
#include "model/loader.h"
#include "ops/ops.h"

namespace v100 {

class MarkovHead {
 public:
  // width: V_d. Throws ModelError for a file whose head does not fit together.
  MarkovHead(const Metadata& metadata, const WeightLoader& weights, int32_t hidden, int32_t vocab, int32_t width);

  // [tokens, R], of the rows' predecessors.
  Tensor embed(Ops& ops, std::span<const int32_t> predecessors) const { return ops.embed(predecessors, before_); }
  // [rows, V_d], to be added to the logits of the rows.
  Tensor corrections(Ops& ops, Tensor embedded) const { return ops.linear(embedded, after_); }
  bool has_confidence() const { return confidence_.weight != nullptr; }
  // [rows, 1] of the rows' states [rows, E]: its sigmoid is how likely a row's token stands.
  Tensor confidences(Ops& ops, Tensor states, Tensor embedded) const {
    return ops.linear(ops.concatenate(states, embedded), confidence_);
  }

 private:
  EmbeddingTable before_;  // [V, R]
  Linear after_;           // [V_d, R]
  Linear confidence_;      // [1, E + R], or none
};

}  // namespace v100
