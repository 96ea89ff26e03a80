// `llama`: pre-norm attention with rotary positions on interleaved pairs, SwiGLU feed-forward, tied or separate output.
//
// The generic dense block the other families are described against. H hidden, Hq/Hkv heads, D head size, F ffn, V vocab.
#include "model/llama.h"

#include <array>
#include <cmath>
#include <string>

#include "base/error.h"

namespace v100 {

namespace {

struct Block {
  VectorWeight attn_norm;             // [H]
  Linear attn_q, attn_k, attn_v;      // [Hq D, H], [Hkv D, H], [Hkv Dv, H]
  Linear attn_output;                 // [H, Hq Dv]
  VectorWeight ffn_norm;              // [H]
  Linear ffn_gate, ffn_up, ffn_down;  // [F, H], [F, H], [H, F]
};

class Llama final : public TextModel {
 public:
  Llama(Hyperparameters hyperparameters, const WeightLoader& weights);

  const Hyperparameters& hyperparameters() const override { return hp_; }
  std::vector<KvShape> kv_shapes() const override;
  RopeAngles rope(const RopeSettings& settings, int32_t n_ctx) const override;
  Tensor forward(Ops& ops, const Rows& rows, const ForwardState& state,
                 std::span<const int32_t> outputs) const override;

 private:
  Tensor attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const;
  void feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const;

  Hyperparameters hp_;
  EmbeddingTable token_embd_;  // [V, H]
  std::vector<Block> blocks_;
  VectorWeight output_norm_;  // [H]
  Linear output_;             // [V, H]
  VectorWeight rope_freqs_;   // [D / 2] or empty
  VectorWeight rope_factors_long_, rope_factors_short_;
};

Llama::Llama(Hyperparameters hyperparameters, const WeightLoader& weights) : hp_(std::move(hyperparameters)) {
  if (hp_.experts > 0) throw ModelError("llama with " + std::to_string(hp_.experts) + " experts is not supported yet");
  if (hp_.rope.dimension != hp_.head_dim_k)
    throw ModelError("llama.rope.dimension_count is " + std::to_string(hp_.rope.dimension) + ", heads have " +
                     std::to_string(hp_.head_dim_k) + " features; llama rotates whole heads");
  token_embd_ = weights.embedding("token_embd", hp_.hidden, hp_.vocab);
  output_norm_ = weights.vector("output_norm.weight", hp_.hidden);
  output_ = weights.linear(weights.has("output.weight") ? "output" : "token_embd", hp_.hidden, hp_.vocab);
  const int32_t pairs = hp_.rope.dimension / 2;
  rope_freqs_ = weights.optional_vector("rope_freqs.weight", pairs);
  rope_factors_long_ = weights.optional_vector("rope_factors_long.weight", pairs);
  rope_factors_short_ = weights.optional_vector("rope_factors_short.weight", pairs);
  for (int32_t i = 0; i < hp_.layers; ++i) {
    const std::string prefix = "blk." + std::to_string(i) + ".";
    const auto layer = static_cast<size_t>(i);
    const int32_t heads = hp_.heads[layer], kv_heads = hp_.kv_heads[layer], ffn = hp_.ffn[layer];
    if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0 || ffn < 1)
      throw ModelError(prefix + "*: " + std::to_string(heads) + " heads over " + std::to_string(kv_heads) +
                       " kv heads and a feed-forward of " + std::to_string(ffn) + " do not make a llama block");
    const int32_t q_size = heads * hp_.head_dim_k, k_size = kv_heads * hp_.head_dim_k,
                  v_size = kv_heads * hp_.head_dim_v;
    Block block;
    block.attn_norm = weights.vector(prefix + "attn_norm.weight", hp_.hidden);
    if (weights.has(prefix + "attn_qkv.weight")) {
      const int32_t all = q_size + k_size + v_size;
      const auto part = [&](const char* name, int32_t first, int32_t size) {
        return weights.linear_rows(prefix + "attn_qkv", hp_.hidden, all, first, size, prefix + name);
      };
      block.attn_q = part("attn_q", 0, q_size);
      block.attn_k = part("attn_k", q_size, k_size);
      block.attn_v = part("attn_v", q_size + k_size, v_size);
    } else {
      block.attn_q = weights.linear(prefix + "attn_q", hp_.hidden, q_size);
      block.attn_k = weights.linear(prefix + "attn_k", hp_.hidden, k_size);
      block.attn_v = weights.linear(prefix + "attn_v", hp_.hidden, v_size);
    }
    block.attn_output = weights.linear(prefix + "attn_output", heads * hp_.head_dim_v, hp_.hidden);
    block.ffn_norm = weights.vector(prefix + "ffn_norm.weight", hp_.hidden);
    block.ffn_gate = weights.linear(prefix + "ffn_gate", hp_.hidden, ffn);
    block.ffn_up = weights.linear(prefix + "ffn_up", hp_.hidden, ffn);
    block.ffn_down = weights.linear(prefix + "ffn_down", ffn, hp_.hidden);
    blocks_.push_back(std::move(block));
  }
}

std::vector<KvShape> Llama::kv_shapes() const {
  std::vector<KvShape> shapes;
  for (const int32_t kv_heads : hp_.kv_heads)
    shapes.push_back({.kv_heads = kv_heads, .head_dim_k = hp_.head_dim_k, .head_dim_v = hp_.head_dim_v});
  return shapes;
}

RopeAngles Llama::rope(const RopeSettings& settings, int32_t n_ctx) const {
  const VectorWeight* divisors = &rope_freqs_;
  if (rope_factors_long_ && rope_factors_short_)
    divisors = n_ctx > settings.original_context.value_or(hp_.rope.original_context) ? &rope_factors_long_
                                                                                     : &rope_factors_short_;
  return rope_angles(hp_.rope, settings, {divisors->data.get(), static_cast<size_t>(divisors->size)});
}

// x [rows, H] -> output of the attention layer [rows, H], before its residual add.
Tensor Llama::attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const int32_t heads = hp_.heads[static_cast<size_t>(layer)], kv_heads = hp_.kv_heads[static_cast<size_t>(layer)];
  const KvLayer& kv = state.kv[static_cast<size_t>(layer)];
  const std::array<const Linear*, 3> weights{&w.attn_q, &w.attn_k, &w.attn_v};
  std::array<Tensor, 3> qkv;
  const Tensor n = ops.rms_norm(x, w.attn_norm, hp_.rms_epsilon);  // [rows, H]
  ops.multi_linear(n, weights, qkv);
  const auto& [q, k, v] = qkv;  // [rows, Hq D], [rows, Hkv D], [rows, Hkv Dv]
  ops.rope(q, heads, hp_.head_dim_k, state.rope, RopeLayout::interleaved);
  ops.rope(k, kv_heads, hp_.head_dim_k, state.rope, RopeLayout::interleaved);
  ops.kv_append(k, v, rows, kv);
  const float scale = 1.0f / std::sqrt(static_cast<float>(hp_.head_dim_k));
  const Tensor heads_out = ops.attention(q, rows, kv, heads, scale);  // [rows, Hq Dv]
  const Tensor a = ops.linear(heads_out, w.attn_output);              // [rows, H], partial
  ops.all_reduce(a);
  return a;
}

// x += a, then x += feed-forward of x, in place.
void Llama::feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.add_rms_norm(x, a, w.ffn_norm, hp_.rms_epsilon);          // [rows, H]
  const Tensor f = ops.gated_linear(n, w.ffn_gate, w.ffn_up, Activation::silu);  // [rows, F / ranks]
  const Tensor d = ops.linear(f, w.ffn_down);                                    // [rows, H], partial
  ops.all_reduce(d);
  ops.add(x, d);
  ops.tap("block_out", layer, x);
}

Tensor Llama::forward(Ops& ops, const Rows& rows, const ForwardState& state, std::span<const int32_t> outputs) const {
  Tensor x = ops.embed(rows.tokens, token_embd_);  // [rows, H], the residual stream
  const int32_t last = hp_.layers - 1;
  for (int32_t layer = 0; layer < last; ++layer) {
    const Ops::Scope scope(ops);
    feed_forward(ops, layer, x, attention(ops, layer, rows, state, x));
  }
  // Past the last layer's keys and values only the rows whose logits are wanted matter.
  Tensor a = attention(ops, last, rows, state, x);
  if (outputs.empty()) return {};
  x = ops.gather_rows(x, outputs);  // [outputs, H]
  a = ops.gather_rows(a, outputs);
  feed_forward(ops, last, x, a);
  const Tensor n = ops.rms_norm(x, output_norm_, hp_.rms_epsilon);
  return ops.linear(n, output_);  // [outputs, V]
}

}  // namespace

std::unique_ptr<TextModel> load_llama(Hyperparameters hp, const WeightLoader& weights) {
  return std::make_unique<Llama>(std::move(hp), weights);
}

}  // namespace v100
