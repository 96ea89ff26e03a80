// `qwen2`: Qwen2, Qwen2.5. The block of `llama` with rotary positions on halves of a head; biases on queries, keys and
// values come with their matrices.
//
// H hidden.
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

class Qwen2 final : public Decoder {
 public:
  Qwen2(Hyperparameters hyperparameters, const WeightLoader& weights);
  std::vector<KeyRotation> key_rotations() const override {
    return std::vector<KeyRotation>(static_cast<size_t>(hp_.layers), {0, RopeLayout::halves});
  }

 protected:
  Tensor attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const override;
  void feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const override;

 private:
  std::vector<Block> blocks_;
};

Qwen2::Qwen2(Hyperparameters hyperparameters, const WeightLoader& weights)
    : Decoder(std::move(hyperparameters), weights) {
  for (const int32_t heads : hp_.heads)
    if (heads * hp_.head_dim_k != hp_.hidden)
      throw ModelError("qwen2.attention.head_count is " + std::to_string(heads) + " with heads of " +
                       std::to_string(hp_.head_dim_k) + " features; together they must make the " +
                       std::to_string(hp_.hidden) + " of qwen2.embedding_length");
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

Tensor Qwen2::attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.rms_norm(x, w.attn_norm, hp_.rms_epsilon);
  const QueryKeyValue qkv = project(ops, n, w.attn);
  const float scale = 1.0f / std::sqrt(static_cast<float>(hp_.head_dim_k));
  const Rotation rotation{.table = state.ropes[0], .layout = RopeLayout::halves};
  return attend(ops, qkv, rotation, rows, state.kv[static_cast<size_t>(layer)], scale, w.attn);
}

void Qwen2::feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.add_rms_norm(x, a, w.ffn_norm, hp_.rms_epsilon);
  add_feed_forward(ops, x, n, w.ffn, Activation::silu);
}

}  // namespace

std::unique_ptr<TextModel> load_qwen2(const Metadata& metadata, const WeightLoader& weights) {
  return std::make_unique<Qwen2>(read_hyperparameters(metadata), weights);
}

}  // namespace v100
