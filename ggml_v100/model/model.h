// What the engine knows of a model: its hyperparameters, its memory needs and one forward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/hyperparameters.h"
#include "model/rope.h"
#include "ops/ops.h"

namespace v100 {

// What a forward pass reads besides its rows: built by the engine for each ubatch.
struct ForwardState {
  std::span<const KvLayer> kv;       // per layer
  std::span<const RopeTable> ropes;  // one for each of TextModel::ropes()
  Rows windowed;                     // the rows as layers with a sliding window see them; else the rows as they are
};

class TextModel {
 public:
  virtual ~TextModel() = default;
  virtual const Hyperparameters& hyperparameters() const = 0;
  // Cache of each layer, types left to the engine.
  virtual std::vector<KvShape> kv_shapes() const = 0;
  // Angles for sequences of at most n_ctx tokens (longrope chooses its factors by that length), one for each kind of
  // layer that rotates by its own.
  virtual std::vector<RopeAngles> ropes(const RopeSettings& settings, int32_t n_ctx) const = 0;
  // Tokens that a layer with a sliding window sees, the row's own included; 0: no such layers.
  virtual int32_t sliding_window() const { return 0; }
  // Runs the rows through all layers, appending to the KV pages. Returns logits [outputs, vocab] of the given rows; a
  // tensor without rows when outputs is empty. The caller holds an Ops::Scope.
  virtual Tensor forward(Ops& ops, const Rows& rows, const ForwardState& state,
                         std::span<const int32_t> outputs) const = 0;
};

}  // namespace v100
