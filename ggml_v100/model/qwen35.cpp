// `qwen35` and `qwen35moe`: Qwen3.5, 3.6, 3.8. Most layers are gated delta nets, whose state is of constant size; every
// fourth, as a rule, is gated attention. SwiGLU feed-forward, in `qwen35moe` a mixture of experts beside a shared one.
//
// The file's norm weights contain the + 1. H hidden.
#include <array>
#include <optional>
#include <utility>

#include "base/error.h"
#include "model/decoder.h"
#include "model/families.h"
#include "model/gated_attention.h"
#include "model/gated_delta_net.h"
#include "model/keys.h"
#include "model/parts.h"

namespace v100 {

namespace {

struct Block {
  VectorWeight attn_norm;  // [H]
  // One of the two, and which of the model's caches or pairs of states is its own.
  std::optional<GatedAttentionWeights> attention;
  std::optional<GatedDeltaNetWeights> delta_net;
  size_t memory = 0;
  VectorWeight post_attention_norm;  // [H], of the feed-forward's input
  FeedForwardWeights ffn;
};

// Predicts the token after the next from the hidden state of a position and the token that followed it.
struct MtpBlock {
  VectorWeight embedding_norm, hidden_norm;  // [H]
  Linear projection;                         // [H, 2 H], of the embedding and the hidden state
  Block block;                               // attends
  std::optional<EmbeddingTable> embeddings;  // else the trunk's, and so below
  VectorWeight output_norm;                  // [H]
  std::optional<Linear> output;              // [vocab, H], this rank's rows
  size_t hidden_record = 0;                  // the last token's hidden state, among the model's records
};

class Qwen35 final : public Decoder {
 public:
  Qwen35(Hyperparameters hyperparameters, DeltaNetHyperparameters delta, const WeightLoader& weights);
  std::vector<StateShape> state_shapes() const override;
  int32_t loaded_mtp_blocks() const override { return static_cast<int32_t>(mtp_.size()); }
  void replay(Ops& ops, const Rows& rows, const ForwardState& state) const override;
  bool can_predict() const override { return !mtp_.empty(); }
  Tensor predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const override;
  Tensor predicted_head(Ops& ops, Tensor hidden) const override;

 protected:
  Tensor attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const override;
  void feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const override;
  bool follows_hidden() const override { return !mtp_.empty(); }
  void follow_hidden(Ops& ops, const Rows& rows, const ForwardState& state, Tensor hidden) const override;

 private:
  Block load_block(const WeightLoader& weights, int32_t layer, bool is_recurrent) const;
  MtpBlock load_mtp_block(const WeightLoader& weights, int32_t layer) const;
  // x += a, then x += feed-forward of x, in place.
  void feed_forward(Ops& ops, const Block& w, Tensor x, Tensor a) const;
  // What a block of multi-token prediction begins with: x [rows, H] and its norm, from the hidden states of the tokens before.
  std::pair<Tensor, Tensor> join(Ops& ops, const MtpBlock& w, std::span<const int32_t> tokens, Tensor before) const;

  DeltaNetHyperparameters delta_;
  std::vector<Block> blocks_;
  std::vector<MtpBlock> mtp_;  // empty unless asked for
  std::vector<StateShape> state_shapes_;
};

Qwen35::Qwen35(Hyperparameters hyperparameters, DeltaNetHyperparameters delta, const WeightLoader& weights)
    : Decoder(std::move(hyperparameters), weights), delta_(std::move(delta)) {
  for (int32_t layer = 0; layer < hp_.layers; ++layer) {
    const auto l = static_cast<size_t>(layer);
    Block block = load_block(weights, layer, delta_.is_recurrent[l] != 0);
    if (block.attention) {
      block.memory = kv_shapes_.size();
      kv_shapes_.push_back(block.attention->attn.kv);
    } else {
      block.memory = state_shapes_.size();
      for (const StateShape& shape : delta_net_state_shapes(*block.delta_net)) state_shapes_.push_back(shape);
    }
    blocks_.push_back(std::move(block));
  }
  if (weights.load_mtp())
    for (int32_t i = 0; i < hp_.mtp_blocks; ++i) mtp_.push_back(load_mtp_block(weights, hp_.layers + i));
  for (MtpBlock& mtp : mtp_) {
    mtp.block.memory = kv_shapes_.size();
    kv_shapes_.push_back(mtp.block.attention->attn.kv);
    mtp.hidden_record = state_shapes_.size();
    state_shapes_.push_back({hp_.hidden});
  }
}

Block Qwen35::load_block(const WeightLoader& weights, int32_t layer, bool is_recurrent) const {
  const std::string prefix = block_prefix(layer);
  Block block;
  block.attn_norm = weights.vector(prefix + "attn_norm.weight", hp_.hidden);
  if (is_recurrent)
    block.delta_net = load_gated_delta_net(weights, hp_, delta_, layer);
  else
    block.attention = load_gated_attention(weights, hp_, layer);
  block.post_attention_norm = weights.vector(prefix + "post_attention_norm.weight", hp_.hidden);
  block.ffn = load_feed_forward(weights, hp_, layer);
  return block;
}

MtpBlock Qwen35::load_mtp_block(const WeightLoader& weights, int32_t layer) const {
  const std::string prefix = block_prefix(layer) + "nextn.";
  MtpBlock mtp;
  mtp.embedding_norm = weights.vector(prefix + "enorm.weight", hp_.hidden);
  mtp.hidden_norm = weights.vector(prefix + "hnorm.weight", hp_.hidden);
  mtp.projection = weights.linear(prefix + "eh_proj", 2 * hp_.hidden, hp_.hidden);
  mtp.block = load_block(weights, layer, false);
  if (weights.has(prefix + "embed_tokens.weight"))
    mtp.embeddings = weights.embedding(prefix + "embed_tokens", hp_.hidden, hp_.vocab);
  mtp.output_norm = weights.optional_vector(prefix + "shared_head_norm.weight", hp_.hidden);
  if (weights.has(prefix + "shared_head_head.weight"))
    mtp.output = weights.linear_rows(prefix + "shared_head_head", hp_.hidden, hp_.vocab, std::array{vocabulary()});
  return mtp;
}

std::vector<StateShape> Qwen35::state_shapes() const { return state_shapes_; }

Tensor Qwen35::attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const {
  const Block& w = blocks_[static_cast<size_t>(layer)];
  const Tensor n = ops.rms_norm(x, w.attn_norm, hp_.rms_epsilon);
  if (w.attention)
    return gated_attention(ops, n, rows, state.kv[w.memory], state.ropes[0], hp_.rms_epsilon, *w.attention);
  return gated_delta_net(ops, n, rows, delta_net_state(state, w.memory), hp_.rms_epsilon, GateFunction::silu,
                         *w.delta_net);
}

void Qwen35::replay(Ops& ops, const Rows& rows, const ForwardState& state) const {
  for (int32_t layer = 0; layer < hp_.layers; ++layer) {
    const Block& w = blocks_[static_cast<size_t>(layer)];
    if (!w.delta_net || !has_layer(layer)) continue;
    const Ops::Scope scope(ops);
    replay_gated_delta_net(ops, rows, delta_net_state(state, w.memory), hp_.rms_epsilon, *w.delta_net);
  }
  const Ops::Scope scope(ops);
  if (!mtp_.empty() && stages().has_block_after())
    ops.previous_rows(state.kept[mtp_[0].hidden_record][0], rows, state.states[mtp_[0].hidden_record]);
}

std::pair<Tensor, Tensor> Qwen35::join(Ops& ops, const MtpBlock& w, std::span<const int32_t> tokens,
                                       Tensor before) const {
  const Tensor e = ops.rms_norm(ops.embed(tokens, w.embeddings ? *w.embeddings : token_embeddings()), w.embedding_norm,
                                hp_.rms_epsilon);
  const Tensor h = ops.rms_norm(before, w.hidden_norm, hp_.rms_epsilon);
  const Tensor x = ops.linear(ops.concatenate(e, h), w.projection);  // [rows, H]
  return {x, ops.rms_norm(x, w.block.attn_norm, hp_.rms_epsilon)};
}

// A row pairs its token with the hidden state of the token before it. Of the block only keys and values are kept.
void Qwen35::follow_hidden(Ops& ops, const Rows& rows, const ForwardState& state, Tensor hidden) const {
  if (!stages().has_block_after()) return;
  const Ops::Scope scope(ops);
  const MtpBlock& w = mtp_[0];
  if (state.kept_rows > 0) state.kept[w.hidden_record].keep(ops, {hidden}, state.kept_rows);
  const Tensor before = ops.previous_rows(hidden, rows, state.states[w.hidden_record]);
  const auto [x, n] = join(ops, w, rows.tokens, before);
  append_gated(ops, n, rows, state.kv[w.block.memory], state.ropes[0], hp_.rms_epsilon, *w.block.attention);
}

Tensor Qwen35::predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const {
  const MtpBlock& w = mtp_[0];
  Tensor h = ops.create(rows.count(), hp_.hidden);
  if (stages().has_block_after()) {
    if (before.rows == 0) {  // of each row's sequence, as forward() left it
      h = ops.previous_rows(h, rows, state.states[w.hidden_record]);
      before = h;
    }
    const auto [x, n] = join(ops, w, rows.tokens, before);
    feed_forward(
        ops, w.block, x,
        gated_attention(ops, n, rows, state.kv[w.block.memory], state.ropes[0], hp_.rms_epsilon, *w.block.attention));
    h = ops.rms_norm(x, w.output_norm.size > 0 ? w.output_norm : output_norm(), hp_.rms_epsilon);
  }
  stages().hand_out_after(ops, h);
  return h;
}

Tensor Qwen35::predicted_head(Ops& ops, Tensor hidden) const {
  return mtp_[0].output ? ops.linear(hidden, *mtp_[0].output) : head(ops, hidden);
}

void Qwen35::feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const {
  feed_forward(ops, blocks_[static_cast<size_t>(layer)], x, a);
}

void Qwen35::feed_forward(Ops& ops, const Block& w, Tensor x, Tensor a) const {
  const Tensor n = ops.add_rms_norm(x, a, w.post_attention_norm, hp_.rms_epsilon);
  add_feed_forward(ops, x, n, w.ffn, Activation::silu);
}

std::unique_ptr<TextModel> load(Hyperparameters hp, const Keys& keys, const WeightLoader& weights) {
  hp.rope.sections = read_rope_sections(keys);
  DeltaNetHyperparameters delta = read_delta_net_hyperparameters(keys, hp);
  require_trunk(weights, hp, "attn_norm.weight");
  return std::make_unique<Qwen35>(std::move(hp), std::move(delta), weights);
}

}  // namespace

std::unique_ptr<TextModel> load_qwen35(const Metadata& metadata, const WeightLoader& weights) {
  return load(read_hyperparameters(metadata), Keys(metadata), weights);
}

std::unique_ptr<TextModel> load_qwen35moe(const Metadata& metadata, const WeightLoader& weights) {
  Hyperparameters hp = read_hyperparameters(metadata);
  const Keys keys(metadata);
  read_shared_mixture(keys, hp);
  return load(std::move(hp), keys, weights);
}

}  // namespace v100
