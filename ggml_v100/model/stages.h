// Which layers this rank computes, and how activations go from rank to rank where whole layers are shared out.
#pragma once

#include <cstdint>
#include <vector>

#include "model/loader.h"
#include "ops/ops.h"

namespace v100 {

class Stages {
 public:
  Stages(const WeightLoader& weights, int32_t layers)
      : rank_(weights.shard().rank()),
        stages_(weights.shard().stages(layers)),
        rank_after_(weights.shard().rank_of(layers)) {}

  // Whether this rank takes part in a layer.
  bool has(int32_t layer) const {
    const Shard::Stage& stage = stage_of(layer);
    return stage.rank < 0 || stage.rank == rank_;
  }

  // Whether this rank takes part in the block that follows the layers.
  bool has_block_after() const { return rank_after_ < 0 || rank_after_ == rank_; }
  // x of the rank that computed that block on all ranks.
  void hand_out_after(Ops& ops, Tensor x) const {
    if (rank_after_ >= 0) ops.broadcast(x, rank_after_);
  }

  // Before a layer: x as it enters the layer, on the rank `to`, if the rank that has the layer is another and has not handed
  // it over just now.
  void show(Ops& ops, int32_t layer, Tensor x, int32_t to) const {
    const Shard::Stage& stage = stage_of(layer);
    if (stage.rank >= 0 && stage.rank != to && stage.layers.begin < layer) ops.broadcast(x, stage.rank);
  }

  // After a layer: where it is the last that a rank has, x of that rank on all ranks.
  void hand_over(Ops& ops, int32_t layer, Tensor x) const {
    const Shard::Stage& stage = stage_of(layer);
    if (stage.rank >= 0 && stage.layers.end == layer + 1) ops.broadcast(x, stage.rank);
  }

 private:
  const Shard::Stage& stage_of(int32_t layer) const {
    size_t i = 0;
    while (stages_[i].layers.end <= layer) ++i;
    return stages_[i];
  }

  int32_t rank_;
  std::vector<Shard::Stage> stages_;  // all layers, in order
  int32_t rank_after_;                // as Shard::Stage::rank
};

}  // namespace v100
