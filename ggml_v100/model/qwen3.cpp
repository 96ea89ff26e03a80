// `qwen3` and `qwen3moe`: the block of `llama` with queries and keys normalised per head, one weight for all heads, and
// rotary positions on halves of a head; `qwen3moe` with a mixture of experts in every block.
//
// H hidden, D head size, which need not be H / heads.
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
  VectorWeight attn_q_norm, attn_k_norm;  // [D]
  VectorWeight ffn_norm;                  // [H]
  FeedForwardWeights ffn;
};

class Qwen3 final : public Decoder {
 public:
  Qwen3(Hyperparameters hyperparameters, const WeightLoader& weights);
  std::vector<KeyRotation> key_rotations() const override {
    return std::vector<KeyRotation>(static_cast<size_t>(hp_.layers), {0, RopeLayout::halves});
  }

 protected:
  Tensor attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const override;
  void feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const override;

 private:
  std::vector<Block> blocks_;
};

Qwen3::Qwen3(Hyperparameters hyperparameters, const WeightLoader& weights)
    : Decoder(std::move(hyperparameters), weights) {
  for (int32_t layer = 0; layer < hp_.layers; ++layer) {
    const std::string prefix = block_prefix(layer);
    Block block;
    block.attn_norm = weights.vector(prefix + "attn_norm.weight", hp_.hidden);
    block.attn = load_attention(weights, hp_, layer);
    kv_shapes_.push_back(block.attn.kv);
    block.attn_q_norm = weights.vector(prefix + "attn_q_norm.weight", hp_.head_dim_k);
    block.attn_k_norm = weights.vector(prefix + "attn_k_norm.weight", hp_.head_dim_k);
    block.ffn_norm = weights.vector(prefix + "ffn_norm.weight", hp_.hidden);
    block.ffn = load_feed_forward(weights, hp_, layer);
    blocks_.push_back(std::move(block));
  }
}

Tensor Qwen3::attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.rms_norm(x, w.attn_norm, hp_.rms_epsilon);
  const QueryKeyValue qkv = project(ops, n, w.attn);
  const float scale = 1.0f / std::sqrt(static_cast<float>(hp_.head_dim_k));
  const Rotation rotation{state.ropes[0], RopeLayout::halves, &w.attn_q_norm, &w.attn_k_norm, hp_.rms_epsilon};
  return attend(ops, qkv, rotation, rows, state.kv[static_cast<size_t>(layer)], scale, w.attn);
}

void Qwen3::feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.add_rms_norm(x, a, w.ffn_norm, hp_.rms_epsilon);
  add_feed_forward(ops, x, n, w.ffn, Activation::silu);
}

}  // namespace

std::unique_ptr<TextModel> load_qwen3(const Metadata& metadata, const WeightLoader& weights) {
  return std::make_unique<Qwen3>(read_hyperparameters(metadata), weights);
}

std::unique_ptr<TextModel> load_qwen3moe(const Metadata& metadata, const WeightLoader& weights) {
  Hyperparameters hp = read_hyperparameters(metadata);
  if (hp.experts == 0) throw ModelError("qwen3moe.expert_count is 0 or missing, expected at least 1");
  // Old files give the width of all experts of a token together.
  for (size_t layer = 0; layer < hp.expert_ffn.size(); ++layer)
    if (hp.expert_ffn[layer] == 0) hp.expert_ffn[layer] = hp.ffn[layer] / hp.experts_used;
  return std::make_unique<Qwen3>(std::move(hp), weights);
}

}  // namespace v100
