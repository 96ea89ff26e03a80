// `qwen4exp`: Qwen3.8-Flash-Next. The layers of `qwen35moe` between several residual streams, which mixers join in front of
// a layer and share its output out to again, in place of all norms; attention to the best blocks of tokens only; and a
// memory of n-grams that is added to the streams once.
//
// H hidden, n streams, N = n H.
#include <optional>

#include "base/error.h"
#include "model/families.h"
#include "model/gated_attention.h"
#include "model/gated_delta_net.h"
#include "model/hyper_connections.h"
#include "model/keys.h"
#include "model/ngram_memory.h"
#include "model/parts.h"
#include "model/sparse_attention.h"
#include "model/stages.h"

namespace v100 {

namespace {

struct Block {
  MixerWeights attn_mixer;
  // A delta net, or attention, which is sparse where it has an indexer.
  std::optional<GatedDeltaNetWeights> delta_net;
  std::optional<GatedAttentionWeights> attention;
  std::optional<IndexerWeights> indexer;
  size_t memory = 0;  // the first of the model's caches or states that is its own
  MixerWeights ffn_mixer;
  FeedForwardWeights ffn;
};

// Predicts the token after the next from the streams of a position and the token that followed it.
struct MtpBlock {
  VectorWeight embedding_norm, hidden_norm;  // [H], [N]
  Linear projection;                         // [H, 2 H], of the embedding and one stream
  Block block;                               // attends
  MixerWeights output_mixer;
  size_t hidden_record = 0;  // the last token's streams, among the model's records
};

struct Qwen4ExpHyperparameters {
  Hyperparameters common;
  StreamsShape streams;
  DeltaNetHyperparameters delta;
  IndexerHyperparameters indexer;
  NgramMemoryHyperparameters memory;
};

class Qwen4Exp final : public TextModel {
 public:
  Qwen4Exp(Qwen4ExpHyperparameters hyperparameters, const WeightLoader& weights);
  const Hyperparameters& hyperparameters() const override { return hp_.common; }
  std::vector<KvShape> kv_shapes() const override { return kv_shapes_; }
  std::vector<StateShape> state_shapes() const override { return state_shapes_; }
  bool has_residual_stream() const override { return false; }
  int32_t block_tokens() const override { return hp_.indexer.block; }
  int32_t loaded_mtp_blocks() const override { return static_cast<int32_t>(mtp_.size()); }
  std::vector<RopeAngles> ropes(const RopeSettings& settings, int32_t n_ctx) const override;
  Tensor forward(Ops& ops, const Rows& rows, const ForwardState& state,
                 std::span<const int32_t> outputs) const override;
  void replay(Ops& ops, const Rows& rows, const ForwardState& state) const override;
  bool can_predict() const override { return !mtp_.empty(); }
  // Returns streams [rows, N].
  Tensor predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const override;
  Tensor predicted_head(Ops& ops, Tensor streams) const override;
  RowRange vocabulary() const override { return output_.rows; }
  Tensor head(Ops& ops, Tensor hidden) const override { return ops.linear(hidden, output_.matrix); }
  Tensor embed(Ops& ops, std::span<const int32_t> tokens) const override { return ops.embed(tokens, token_embd_); }

 private:
  Block load_block(const WeightLoader& weights, int32_t layer, bool is_recurrent) const;
  // Gives a block that attends its caches.
  void add_caches(Block& block);
  MtpBlock load_mtp_block(const WeightLoader& weights, int32_t layer) const;

  // n [rows, H], mixed -> [rows, H].
  Tensor attention(Ops& ops, const Block& w, const Rows& rows, const ForwardState& state, Tensor n) const;
  void feed_forward(Ops& ops, const Block& w, Tensor x) const;
  SparseAttentionState sparse_state(const Block& w, const ForwardState& state) const;
  // What a block of multi-token prediction begins with: streams [rows, N], from those of the tokens before.
  Tensor join(Ops& ops, const MtpBlock& w, std::span<const int32_t> tokens, Tensor before) const;
  // Lets the block of multi-token prediction know of rows, whose streams are x [rows, N] after the last layer.
  void follow_streams(Ops& ops, const Rows& rows, const ForwardState& state, Tensor x) const;
  NgramMemoryState ngram_memory_of(const ForwardState& state) const;

  Qwen4ExpHyperparameters hp_;
  float eps_;
  EmbeddingTable token_embd_;  // [vocab, H]
  std::vector<Block> blocks_;
  std::vector<MtpBlock> mtp_;  // empty unless asked for
  std::optional<NgramMemoryWeights> memory_;
  size_t memory_state_ = 0;  // its record
  MixerWeights output_mixer_;
  Stages stages_;
  OutputWeights output_;
  std::vector<KvShape> kv_shapes_;
  std::vector<StateShape> state_shapes_;
};

Qwen4Exp::Qwen4Exp(Qwen4ExpHyperparameters hyperparameters, const WeightLoader& weights)
    : hp_(std::move(hyperparameters)),
      eps_(hp_.common.rms_epsilon),
      token_embd_(weights.embedding("token_embd", hp_.common.hidden, hp_.common.vocab)),
      output_mixer_(load_output_mixer(weights, "output_hc_", hp_.streams)),
      stages_(weights, hp_.common.layers),
      output_(load_output(weights, hp_.common)) {
  for (int32_t layer = 0; layer < hp_.common.layers; ++layer) {
    const auto l = static_cast<size_t>(layer);
    Block block = load_block(weights, layer, hp_.delta.is_recurrent[l] != 0);
    if (block.delta_net) {
      block.memory = state_shapes_.size();
      for (const StateShape& shape : delta_net_state_shapes(*block.delta_net)) state_shapes_.push_back(shape);
    } else {
      add_caches(block);
    }
    blocks_.push_back(std::move(block));
  }
  if (hp_.memory.layer >= 0) {
    memory_ = load_ngram_memory(weights, hp_.memory, hp_.streams);
    memory_state_ = state_shapes_.size();
    state_shapes_.push_back(ngram_memory_state(hp_.memory, hp_.streams));
  }
  if (weights.load_mtp())
    for (int32_t i = 0; i < hp_.common.mtp_blocks; ++i) mtp_.push_back(load_mtp_block(weights, hp_.common.layers + i));
  for (MtpBlock& mtp : mtp_) {
    add_caches(mtp.block);
    mtp.hidden_record = state_shapes_.size();
    state_shapes_.push_back({hp_.streams.width()});
  }
}

void Qwen4Exp::add_caches(Block& block) {
  block.memory = kv_shapes_.size();
  kv_shapes_.push_back(block.attention->attn.kv);
  if (block.indexer) kv_shapes_.push_back(index_shape(hp_.indexer, *block.attention));
}

Block Qwen4Exp::load_block(const WeightLoader& weights, int32_t layer, bool is_recurrent) const {
  const std::string prefix = block_prefix(layer);
  Block block;
  block.attn_mixer = load_mixer(weights, prefix + "hc_attn_", hp_.streams);
  if (is_recurrent) {
    block.delta_net = load_gated_delta_net(weights, hp_.common, hp_.delta, layer);
  } else {
    block.attention = load_gated_attention(weights, hp_.common, layer);
    if (hp_.indexer.has_indexer[static_cast<size_t>(layer)] != 0)
      block.indexer = load_indexer(weights, hp_.common, hp_.indexer, layer, *block.attention);
  }
  block.ffn_mixer = load_mixer(weights, prefix + "hc_ffn_", hp_.streams);
  block.ffn = load_feed_forward(weights, hp_.common, layer);
  return block;
}

MtpBlock Qwen4Exp::load_mtp_block(const WeightLoader& weights, int32_t layer) const {
  const std::string prefix = block_prefix(layer) + "nextn.";
  const int32_t hidden = hp_.common.hidden;
  MtpBlock mtp;
  mtp.embedding_norm = weights.vector(prefix + "enorm.weight", hidden);
  mtp.hidden_norm = weights.vector(prefix + "hnorm.weight", hp_.streams.width());
  mtp.projection = weights.linear(prefix + "eh_proj", 2 * hidden, hidden);
  mtp.block = load_block(weights, layer, false);
  mtp.output_mixer = load_output_mixer(weights, prefix + "hc_head_", hp_.streams);
  return mtp;
}

std::vector<RopeAngles> Qwen4Exp::ropes(const RopeSettings& settings, int32_t) const {
  return {rope_angles(hp_.common.rope, settings, {})};
}

Tensor Qwen4Exp::forward(Ops& ops, const Rows& rows, const ForwardState& state,
                         std::span<const int32_t> outputs) const {
  std::vector<int32_t> table_rows;
  const bool recalls = memory_ && stages_.has(hp_.memory.layer);
  if (recalls) table_rows = ngram_rows(rows, *memory_);  // now, so that they are read while the first layers compute
  Tensor x = ops.repeat_streams(ops.embed(rows.tokens, token_embd_), hp_.streams.streams);  // [rows, N]
  const int32_t last = hp_.common.layers - 1;
  const auto mix_in = [&](int32_t layer) {  // [rows, H], [rows, n]
    if (recalls && layer == hp_.memory.layer) recall(ops, x, table_rows, rows, ngram_memory_of(state), eps_, *memory_);
    return mix(ops, x, eps_, blocks_[static_cast<size_t>(layer)].attn_mixer);
  };
  for (int32_t layer = 0; layer < last; ++layer) {
    const Ops::Scope scope(ops);
    if (stages_.has(layer)) {
      const Block& w = blocks_[static_cast<size_t>(layer)];
      const auto [n, inject] = mix_in(layer);
      ops.add_to_streams(x, attention(ops, w, rows, state, n), inject);
      feed_forward(ops, w, x);
      ops.tap("block_out", layer, x);
    }
    stages_.hand_over(ops, layer, x);
  }
  // Past the last layer's caches and states only the rows whose logits are wanted matter, or all where a block follows.
  const Block& w = blocks_[static_cast<size_t>(last)];
  MixedStreams mixed;
  Tensor a;
  if (stages_.has(last)) {
    mixed = mix_in(last);
    a = attention(ops, w, rows, state, mixed.input);
  }
  const bool is_followed = !mtp_.empty();
  const auto narrow_to_outputs = [&] {
    x = ops.gather_rows(x, outputs);  // [outputs, N]
    ops.narrow(outputs);
  };
  if (!is_followed) {
    if (outputs.empty()) return {};
    narrow_to_outputs();
    if (stages_.has(last)) a = ops.gather_rows(a, outputs), mixed.inject = ops.gather_rows(mixed.inject, outputs);
  }
  if (stages_.has(last)) {
    ops.add_to_streams(x, a, mixed.inject);
    feed_forward(ops, w, x);
    ops.tap("block_out", last, x);
  }
  stages_.hand_over(ops, last, x);
  if (is_followed) {
    follow_streams(ops, rows, state, x);
    if (outputs.empty()) return {};
    narrow_to_outputs();
  }
  return mix(ops, x, eps_, output_mixer_).input;  // [outputs, H]
}

Tensor Qwen4Exp::attention(Ops& ops, const Block& w, const Rows& rows, const ForwardState& state, Tensor n) const {
  if (w.delta_net)
    return gated_delta_net(ops, n, rows, delta_net_state(state, w.memory), eps_, GateFunction::sigmoid, *w.delta_net);
  if (!w.indexer) return gated_attention(ops, n, rows, state.kv[w.memory], state.ropes[0], eps_, *w.attention);
  return sparse_gated_attention(ops, n, rows, sparse_state(w, state), eps_, *w.attention, *w.indexer);
}

SparseAttentionState Qwen4Exp::sparse_state(const Block& w, const ForwardState& state) const {
  return {state.kv[w.memory], state.kv[w.memory + 1], state.ropes[0], state.block_ropes[0]};
}

NgramMemoryState Qwen4Exp::ngram_memory_of(const ForwardState& state) const {
  return {state.states[memory_state_], state.kept.empty() ? nullptr : &state.kept[memory_state_], state.kept_rows};
}

void Qwen4Exp::replay(Ops& ops, const Rows& rows, const ForwardState& state) const {
  for (int32_t layer = 0; layer < hp_.common.layers; ++layer) {
    const Block& w = blocks_[static_cast<size_t>(layer)];
    if (!w.delta_net || !stages_.has(layer)) continue;
    const Ops::Scope scope(ops);
    replay_gated_delta_net(ops, rows, delta_net_state(state, w.memory), eps_, *w.delta_net);
  }
  const Ops::Scope scope(ops);
  if (memory_ && stages_.has(hp_.memory.layer)) replay_ngram_memory(ops, rows, ngram_memory_of(state), *memory_);
  if (!mtp_.empty() && stages_.has_block_after())
    ops.previous_rows(state.kept[mtp_[0].hidden_record][0], rows, state.states[mtp_[0].hidden_record]);
}

Tensor Qwen4Exp::join(Ops& ops, const MtpBlock& w, std::span<const int32_t> tokens, Tensor before) const {
  const int32_t streams = hp_.streams.streams, rows = static_cast<int32_t>(tokens.size());
  const auto apart = [&](Tensor x) { return Tensor{x.data, rows * streams, hp_.common.hidden}; };  // a row per stream
  const Tensor e = ops.rms_norm(ops.embed(tokens, token_embd_), w.embedding_norm, eps_);
  const Tensor h = ops.norm_streams(before, streams, w.hidden_norm, eps_);
  const Tensor x = ops.linear(ops.concatenate(apart(ops.repeat_streams(e, streams)), apart(h)), w.projection);
  return {x.data, rows, hp_.streams.width()};
}

// A row pairs its token with the streams of the token before it. Of the block only what it attends to is kept.
void Qwen4Exp::follow_streams(Ops& ops, const Rows& rows, const ForwardState& state, Tensor x) const {
  if (!stages_.has_block_after()) return;
  const Ops::Scope scope(ops);
  const MtpBlock& w = mtp_[0];
  if (state.kept_rows > 0) state.kept[w.hidden_record].keep(ops, {x}, state.kept_rows);
  const Tensor before = ops.previous_rows(x, rows, state.states[w.hidden_record]);
  const Tensor n = mix(ops, join(ops, w, rows.tokens, before), eps_, w.block.attn_mixer).input;
  if (w.block.indexer)
    append_sparse_gated(ops, n, rows, sparse_state(w.block, state), eps_, *w.block.attention, *w.block.indexer);
  else
    append_gated(ops, n, rows, state.kv[w.block.memory], state.ropes[0], eps_, *w.block.attention);
}

Tensor Qwen4Exp::predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const {
  const MtpBlock& w = mtp_[0];
  Tensor x = ops.create(rows.count(), hp_.streams.width());
  if (stages_.has_block_after()) {
    if (before.rows == 0)  // of each row's sequence, as forward() left it
      before = ops.previous_rows(x, rows, state.states[w.hidden_record]);
    x = join(ops, w, rows.tokens, before);
    const auto [n, inject] = mix(ops, x, eps_, w.block.attn_mixer);
    ops.add_to_streams(x, attention(ops, w.block, rows, state, n), inject);
    feed_forward(ops, w.block, x);
  }
  stages_.hand_out_after(ops, x);
  return x;
}

Tensor Qwen4Exp::predicted_head(Ops& ops, Tensor streams) const {
  return head(ops, mix(ops, streams, eps_, mtp_[0].output_mixer).input);
}

void Qwen4Exp::feed_forward(Ops& ops, const Block& w, Tensor x) const {
  const auto [n, inject] = mix(ops, x, eps_, w.ffn_mixer);
  ops.add_to_streams(x, gated_feed_forward(ops, n, w.ffn, Activation::silu), inject);
}

Qwen4ExpHyperparameters read_qwen4exp_hyperparameters(const Metadata& metadata) {
  const Keys keys(metadata);
  Qwen4ExpHyperparameters hp;
  hp.common = read_hyperparameters(metadata);
  hp.common.rope.sections = read_rope_sections(keys);
  read_shared_mixture(keys, hp.common);
  hp.streams = read_streams_shape(metadata, hp.common);
  hp.delta = read_delta_net_hyperparameters(keys, hp.common);
  hp.indexer = read_indexer_hyperparameters(keys, hp.common);
  hp.memory = read_ngram_memory_hyperparameters(metadata, hp.common);
  if (hp.memory.layer >= 0 && hp.delta.is_recurrent[static_cast<size_t>(hp.memory.layer)] == 0)
    throw ModelError(keys.full("ple.layers") + " has " + std::to_string(hp.memory.layer) +
                     ", which attends; expected a recurrent layer");
  return hp;
}

}  // namespace

std::unique_ptr<TextModel> load_qwen4exp(const Metadata& metadata, const WeightLoader& weights) {
  Qwen4ExpHyperparameters hp = read_qwen4exp_hyperparameters(metadata);
  require_trunk(weights, hp.common, "hc_attn_norm.weight");
  return std::make_unique<Qwen4Exp>(std::move(hp), weights);
}

}  // namespace v100
