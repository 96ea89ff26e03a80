// The mixer of recurrent layers: a short causal convolution, the gated delta rule, a gated norm (Yang, Kautz, Hatamizadeh,
// "Gated Delta Networks", 2024).
#pragma once

#include <cstdint>
#include <vector>

#include "model/keys.h"
#include "model/loader.h"
#include "model/model.h"

namespace v100 {

// The `ssm.*` keys, and which blocks are recurrent.
struct DeltaNetHyperparameters {
  int32_t taps = 0;  // of the convolution, >= 2
  int32_t key_heads = 0;
  int32_t value_heads = 0;            // a multiple of the key heads
  int32_t head_dim = 0;               // of keys and values, a multiple of 16
  std::vector<int32_t> is_recurrent;  // per layer of the trunk
};

// Throws ModelError naming the key.
DeltaNetHyperparameters read_delta_net_hyperparameters(const Keys& keys, const Hyperparameters& hp);

// H hidden, K and V the sizes of all key and all value heads of this rank together, S the size of one.
struct GatedDeltaNetWeights {
  Linear qkv;          // [2 K + V, H]
  Linear gate;         // [V, H]
  Linear beta, alpha;  // [value heads, H]
  ConvWeight conv;     // [taps, 2 K + V]
  DeltaNet net;
  VectorWeight norm;        // [S]
  Linear output;            // [H, V]
  bool is_partial = false;  // its product is a summand, the other ranks have the rest
};

GatedDeltaNetWeights load_gated_delta_net(const WeightLoader& weights, const Hyperparameters& hp,
                                          const DeltaNetHyperparameters& delta, int32_t layer);

// What a sequence carries through such a layer, in this order among TextModel::state_shapes().
struct DeltaNetState {
  StateRecords history;  // [taps - 1, 2 K + V], inputs of the convolution
  StateRecords memory;   // [value heads, S, S]
  // Of the layer, and how many rows of its inputs go there.
  KeptInputs* kept = nullptr;
  int32_t kept_rows = 0;
};
// Of the layer whose records begin at `first`.
DeltaNetState delta_net_state(const ForwardState& state, size_t first);
std::vector<StateShape> delta_net_state_shapes(const GatedDeltaNetWeights& w);

// n [rows, H], normed -> [rows, H]. output_gate: what the projection `gate` goes through.
Tensor gated_delta_net(Ops& ops, Tensor n, const Rows& rows, const DeltaNetState& state, float eps,
                       GateFunction output_gate, const GatedDeltaNetWeights& w);
// The part of it that moves the state, on inputs that were kept: TextModel::replay.
void replay_gated_delta_net(Ops& ops, const Rows& rows, const DeltaNetState& state, float eps,
                            const GatedDeltaNetWeights& w);

}  // namespace v100
