// `gemma3` (text): norms before and after both halves of a block, GELU, queries and keys normalised per head; most layers
// see a sliding window and rotate with a base of their own.
//
// The file's norm weights contain the + 1. H hidden, D head size.
#include <cmath>
#include <limits>

#include "base/error.h"
#include "model/decoder.h"
#include "model/families.h"
#include "model/keys.h"
#include "model/parts.h"

namespace v100 {

namespace {

struct Block {
  bool is_windowed = false;
  VectorWeight attn_norm;  // [H]
  AttentionWeights attn;
  VectorWeight attn_q_norm, attn_k_norm;  // [D]
  VectorWeight post_attention_norm;       // [H]
  VectorWeight ffn_norm;                  // [H]
  FeedForwardWeights ffn;
  VectorWeight post_ffw_norm;  // [H]
};

// What gemma3 files say beyond the common hyperparameters.
struct GemmaHyperparameters {
  int32_t sliding_window = 0;        // tokens, 0: all layers see everything
  std::vector<int32_t> is_windowed;  // per layer
  double local_freq_base = 0;        // rotary base of windowed layers
  float logit_cap = 0;               // 0: none
};

GemmaHyperparameters read_gemma_hyperparameters(const Keys& keys, const Hyperparameters& hp) {
  constexpr int32_t kMany = std::numeric_limits<int32_t>::max();
  GemmaHyperparameters gemma;
  gemma.sliding_window = keys.optional("attention.sliding_window", 0, 0, kMany);
  gemma.is_windowed.assign(static_cast<size_t>(hp.layers), 0);
  if (gemma.sliding_window > 0) {
    // An array says it of each layer. A number is a period whose last layer sees everything.
    if (keys.is_array("attention.sliding_window_pattern")) {
      gemma.is_windowed = keys.per_layer("attention.sliding_window_pattern", hp.layers, {}, 0, 1);
    } else {
      const int32_t period = keys.optional("attention.sliding_window_pattern", 6, 1, kMany);
      for (int32_t layer = 0; layer < hp.layers; ++layer)
        gemma.is_windowed[static_cast<size_t>(layer)] = layer % period < period - 1;
    }
  }
  gemma.local_freq_base = keys.real("rope.freq_base_swa", 10000.0);
  if (gemma.local_freq_base <= 0) throw ModelError(keys.full("rope.freq_base_swa") + " is not positive");
  gemma.logit_cap = static_cast<float>(keys.real("final_logit_softcapping", 0.0));
  if (!(gemma.logit_cap >= 0)) throw ModelError(keys.full("final_logit_softcapping") + " is negative");
  for (const char* name : {"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"})
    if (keys.has(name))
      throw ModelError(keys.full(name) + ": windowed layers with heads of their own size are not supported");
  return gemma;
}

class Gemma3 final : public Decoder {
 public:
  Gemma3(Hyperparameters hyperparameters, GemmaHyperparameters gemma, const WeightLoader& weights);
  std::vector<RopeAngles> ropes(const RopeSettings& settings, int32_t n_ctx) const override;
  std::vector<KeyRotation> key_rotations() const override;
  int32_t sliding_window() const override { return gemma_.sliding_window; }

 protected:
  Tensor attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const override;
  void feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const override;

 private:
  GemmaHyperparameters gemma_;
  float attention_scale_ = 0;
  std::vector<Block> blocks_;
};

Gemma3::Gemma3(Hyperparameters hyperparameters, GemmaHyperparameters gemma, const WeightLoader& weights)
    : Decoder(std::move(hyperparameters), weights), gemma_(std::move(gemma)) {
  embedding_scale_ = std::sqrt(static_cast<float>(hp_.hidden));
  logit_cap_ = gemma_.logit_cap;
  for (int32_t layer = 0; layer < hp_.layers; ++layer) {
    const std::string prefix = block_prefix(layer);
    Block block;
    block.is_windowed = gemma_.is_windowed[static_cast<size_t>(layer)] != 0;
    block.attn_norm = weights.vector(prefix + "attn_norm.weight", hp_.hidden);
    block.attn = load_attention(weights, hp_, layer);
    block.attn.kv.is_windowed = block.is_windowed;
    kv_shapes_.push_back(block.attn.kv);
    block.attn_q_norm = weights.vector(prefix + "attn_q_norm.weight", hp_.head_dim_k);
    block.attn_k_norm = weights.vector(prefix + "attn_k_norm.weight", hp_.head_dim_k);
    block.post_attention_norm = weights.vector(prefix + "post_attention_norm.weight", hp_.hidden);
    block.ffn_norm = weights.vector(prefix + "ffn_norm.weight", hp_.hidden);
    block.ffn = load_feed_forward(weights, hp_, layer);
    block.post_ffw_norm = weights.vector(prefix + "post_ffw_norm.weight", hp_.hidden);
    blocks_.push_back(std::move(block));
  }
  // The 27B model, known by its depth, scales scores by the hidden size per head instead of the head size.
  constexpr int32_t k27bLayers = 62;
  const int32_t scaled_by = hp_.layers == k27bLayers ? hp_.hidden / hp_.heads[0] : hp_.head_dim_k;
  attention_scale_ = 1.0f / std::sqrt(static_cast<float>(scaled_by));
}

// Of the layers that see everything, then of the windowed ones, whose positions are never scaled.
std::vector<RopeAngles> Gemma3::ropes(const RopeSettings& settings, int32_t) const {
  RopeHyperparameters local;
  local.dimension = hp_.rope.dimension;
  local.freq_base = gemma_.local_freq_base;
  local.original_context = hp_.rope.original_context;
  return {rope_angles(hp_.rope, settings, {}), rope_angles(local, {}, {})};
}

std::vector<KeyRotation> Gemma3::key_rotations() const {
  std::vector<KeyRotation> rotations;
  for (const Block& block : blocks_) rotations.push_back({block.is_windowed ? 1 : 0, RopeLayout::halves});
  return rotations;
}

Tensor Gemma3::attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const RopeTable& rope = state.ropes[w.is_windowed ? 1 : 0];
  const Tensor n = ops.rms_norm(x, w.attn_norm, hp_.rms_epsilon);
  const QueryKeyValue qkv = project(ops, n, w.attn);
  const Rotation rotation{rope, RopeLayout::halves, &w.attn_q_norm, &w.attn_k_norm, hp_.rms_epsilon};
  const Rows& seen = w.is_windowed ? state.windowed : rows;
  const Tensor a = attend(ops, qkv, rotation, seen, state.kv[static_cast<size_t>(layer)], attention_scale_, w.attn);
  return ops.rms_norm(a, w.post_attention_norm, hp_.rms_epsilon);
}

void Gemma3::feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.add_rms_norm(x, a, w.ffn_norm, hp_.rms_epsilon);
  const Tensor f = gated_feed_forward(ops, n, w.ffn, Activation::gelu);
  ops.add(x, ops.rms_norm(f, w.post_ffw_norm, hp_.rms_epsilon));
}

}  // namespace

std::unique_ptr<TextModel> load_gemma3(const Metadata& metadata, const WeightLoader& weights) {
  Hyperparameters hp = read_hyperparameters(metadata);
  GemmaHyperparameters gemma = read_gemma_hyperparameters(Keys(metadata), hp);
  return std::make_unique<Gemma3>(std::move(hp), std::move(gemma), weights);
}

}  // namespace v100
