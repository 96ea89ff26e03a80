// `llama`: Llama 2/3, SmolLM, TinyLlama, Mistral; with experts, Mixtral. Pre-norm attention with rotary positions on
// interleaved pairs, SwiGLU feed-forward.
//
// The generic block the other families are described against. H hidden, D head size.
#include <cmath>

#include "base/error.h"
#include "model/decoder.h"
#include "model/families.h"
#include "model/parts.h"

namespace v100 {

namespace {

struct Block {
  VectorWeight attn_norm;  // [H]
  AttentionWeights attn;
  VectorWeight ffn_norm;  // [H]
  FeedForwardWeights ffn;
};

class Llama final : public Decoder {
 public:
  Llama(Hyperparameters hyperparameters, const WeightLoader& weights);
  std::vector<RopeAngles> ropes(const RopeSettings& settings, int32_t n_ctx) const override;
  std::vector<KeyRotation> key_rotations() const override {
    return std::vector<KeyRotation>(static_cast<size_t>(hp_.layers), {0, RopeLayout::interleaved});
  }

 protected:
  Tensor attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const override;
  void feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const override;

 private:
  std::vector<Block> blocks_;
  std::vector<float> rope_freqs_, rope_factors_long_, rope_factors_short_;  // [D / 2] or empty
};

Llama::Llama(Hyperparameters hyperparameters, const WeightLoader& weights)
    : Decoder(std::move(hyperparameters), weights) {
  if (hp_.rope.dimension != hp_.head_dim_k)
    throw ModelError("llama.rope.dimension_count is " + std::to_string(hp_.rope.dimension) + ", heads have " +
                     std::to_string(hp_.head_dim_k) + " features; llama rotates whole heads");
  const int32_t pairs = hp_.rope.dimension / 2;
  rope_freqs_ = weights.optional_values("rope_freqs.weight", pairs);
  rope_factors_long_ = weights.optional_values("rope_factors_long.weight", pairs);
  rope_factors_short_ = weights.optional_values("rope_factors_short.weight", pairs);
  for (int32_t layer = 0; layer < hp_.layers; ++layer) {
    const std::string prefix = block_prefix(layer);
    Block block;
    block.attn_norm = weights.vector(prefix + "attn_norm.weight", hp_.hidden);
    block.attn = load_attention(weights, hp_, layer);
    kv_shapes_.push_back(block.attn.kv);
    block.ffn_norm = weights.vector(prefix + "ffn_norm.weight", hp_.hidden);
    block.ffn = load_feed_forward(weights, hp_, layer);
    blocks_.push_back(std::move(block));
  }
}

std::vector<RopeAngles> Llama::ropes(const RopeSettings& settings, int32_t n_ctx) const {
  const std::vector<float>* divisors = &rope_freqs_;
  if (!rope_factors_long_.empty() && !rope_factors_short_.empty())
    divisors = n_ctx > settings.original_context.value_or(hp_.rope.original_context) ? &rope_factors_long_
                                                                                     : &rope_factors_short_;
  return {rope_angles(hp_.rope, settings, *divisors)};
}

Tensor Llama::attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.rms_norm(x, w.attn_norm, hp_.rms_epsilon);
  const QueryKeyValue qkv = project(ops, n, w.attn);
  const float scale = 1.0f / std::sqrt(static_cast<float>(hp_.head_dim_k));
  const Rotation rotation{.table = state.ropes[0], .layout = RopeLayout::interleaved};
  return attend(ops, qkv, rotation, rows, state.kv[static_cast<size_t>(layer)], scale, w.attn);
}

void Llama::feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.add_rms_norm(x, a, w.ffn_norm, hp_.rms_epsilon);
  add_feed_forward(ops, x, n, w.ffn, Activation::silu);
}

}  // namespace

std::unique_ptr<TextModel> load_llama(const Metadata& metadata, const WeightLoader& weights) {
  return std::make_unique<Llama>(read_hyperparameters(metadata), weights);
}

}  // namespace v100
