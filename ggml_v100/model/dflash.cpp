// Loading of DFlash drafters and their forward passes.
#include "model/dflash.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "base/error.h"
#include "base/math.h"
#include "model/keys.h"
#include "model/parts.h"

namespace v100 {

namespace {

Activation read_activation(const Metadata& metadata, const Keys& keys) {
  const std::string name = metadata.find_string(keys.full("hidden_activation")).value_or("silu");
  if (name == "silu") return Activation::silu;
  if (name == "gelu_pytorch_tanh") return Activation::gelu;
  throw ModelError(keys.full("hidden_activation") + " is '" + name + "', expected silu or gelu_pytorch_tanh");
}

constexpr int32_t kCandidates = 10;  // of DFlash, which does not say

}  // namespace

DFlash::DFlash(const Metadata& metadata, const WeightLoader& weights) : HiddenDrafter(metadata, weights) {
  const Keys keys(metadata);
  if (keys.has("hyper_connection.count"))
    throw ModelError("the file is a DSpark drafter with hyper-connections (DeepSeek-V4), which is not supported");
  if (hp_.head_dim_k != hp_.head_dim_v)
    throw ModelError("dflash: keys of " + std::to_string(hp_.head_dim_k) + " and values of " +
                     std::to_string(hp_.head_dim_v) + " features, expected the same size");
  const bool is_dspark = weights.has("markov_w1.weight");
  block_size_ = is_dspark ? keys.required("block_size", 2, 64) : keys.optional("block_size", 16, 2, 64);
  const auto mask = metadata.find_int("tokenizer.ggml.mask_token_id");
  if (!mask || *mask < 0 || *mask >= hp_.vocab)
    throw ModelError("tokenizer.ggml.mask_token_id is missing or outside the vocabulary of " +
                     std::to_string(hp_.vocab));
  mask_token_ = static_cast<int32_t>(*mask);
  window_ = keys.optional("attention.sliding_window", 0, 0, 1 << 30);
  if (is_dspark && weights.has("selector_hidden.weight"))
    throw ModelError("the file has the heads of both DFlash2 and DSpark");
  tells_from_anchor_ = metadata.find_bool(keys.full("sample_from_anchor")).value_or(is_dspark);
  is_causal_ = metadata.find_bool(keys.full("attention.causal")).value_or(false);
  scale_ = static_cast<float>(keys.real("attention.scale", 1.0 / std::sqrt(hp_.head_dim_k)));
  value_scale_ = static_cast<float>(keys.real("attention.value_scale", 1.0));
  embedding_scale_ = static_cast<float>(keys.real("embedding_scale", 1.0));
  if (!is_dspark) {  // whose corrections are made for the plain logits
    logit_scale_ = static_cast<float>(keys.real("logit_scale", 1.0));
    logit_cap_ = static_cast<float>(keys.real("final_logit_softcapping", 0.0));
  }
  activation_ = read_activation(metadata, keys);

  const auto inputs = static_cast<int32_t>(target_layers().size()) * hp_.hidden;
  fuse_ = weights.linear("fc", inputs, hp_.hidden);
  fuse_norm_ = weights.vector("enc.output_norm.weight", hp_.hidden);
  output_norm_ = weights.vector("output_norm.weight", hp_.hidden);
  if (weights.has("selector_hidden.weight")) {
    conv_taps_ = keys.required("conv_kernel_size", 1, 64);
    conv_group_ = keys.required("conv_group_size", 1, hp_.hidden);
    if (hp_.hidden % conv_group_ != 0)
      throw ModelError("dflash.conv_group_size is " + std::to_string(conv_group_) + ", which does not divide the " +
                       std::to_string(hp_.hidden) + " features");
    const int32_t rank = keys.required("selector_rank", 1, 1 << 16);
    selector_ = Selector{weights.embedding("selector_predecessor", rank, hp_.vocab),
                         weights.embedding("selector_successor", rank, hp_.vocab),
                         weights.linear("selector_hidden", hp_.hidden, rank),
                         keys.required("selector_top_k", 1, std::min(256, hp_.vocab))};
  }
  rope_divisors_ = weights.optional_values("rope_freqs.weight", hp_.rope.dimension / 2);
  for (int32_t layer = 0; layer < hp_.layers; ++layer) blocks_.push_back(load_block(weights, layer));
  if (const auto count = metadata.find_array_size(keys.full("attention.sliding_window_pattern"));
      count && window_ > 0) {
    const auto pattern = metadata.find_ints(keys.full("attention.sliding_window_pattern"), hp_.layers);
    if (!pattern || *count != static_cast<uint64_t>(hp_.layers))
      throw ModelError(keys.full("attention.sliding_window_pattern") + " does not name each of the " +
                       std::to_string(hp_.layers) + " layers");
    for (size_t layer = 0; layer < blocks_.size(); ++layer) blocks_[layer].is_windowed = (*pattern)[layer] != 0;
  } else if (window_ > 0) {
    for (Block& block : blocks_) block.is_windowed = true;
  }
  if (is_dspark) markov_head_.emplace(metadata, weights, hp_.hidden, hp_.vocab, head_rows());
}

DFlash::Block DFlash::load_block(const WeightLoader& weights, int32_t layer) const {
  const std::string prefix = block_prefix(layer);
  const auto at = static_cast<size_t>(layer);
  const int32_t hidden = hp_.hidden, d = hp_.head_dim_k, ffn = hp_.ffn[at];
  const int32_t heads = hp_.heads[at], kv_heads = hp_.kv_heads[at];
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
    throw ModelError(prefix + "*: " + std::to_string(heads) + " heads over " + std::to_string(kv_heads) +
                     " kv heads do not make an attention layer");
  if (weights.has(prefix + "attn_sinks.weight"))
    throw ModelError(prefix + "attn_sinks.weight: attention sinks are not supported");
  Block w;
  w.attn_norm = weights.vector(prefix + "attn_norm.weight", hidden);
  w.q = weights.linear(prefix + "attn_q", hidden, heads * d);
  w.k = weights.linear(prefix + "attn_k", hidden, kv_heads * d);
  if (weights.has(prefix + "attn_v.weight"))
    w.v = weights.linear(prefix + "attn_v", hidden, kv_heads * d);
  else
    w.ones = weights.place(std::vector<float>(static_cast<size_t>(d), 1.0f));
  w.output = weights.linear(prefix + "attn_output", heads * d, hidden);
  w.q_norm = weights.vector(prefix + "attn_q_norm.weight", d);
  w.k_norm = weights.vector(prefix + "attn_k_norm.weight", d);
  w.attn_post_norm = weights.optional_vector(prefix + "attn_post_norm.weight", hidden);
  w.ffn_norm = weights.vector(prefix + "ffn_norm.weight", hidden);
  w.gate = weights.linear(prefix + "ffn_gate", hidden, ffn);
  w.up = weights.linear(prefix + "ffn_up", hidden, ffn);
  w.down = weights.linear(prefix + "ffn_down", ffn, hidden);
  w.ffn_post_norm = weights.optional_vector(prefix + "ffn_post_norm.weight", hidden);
  const std::vector<float> scale = weights.optional_values(prefix + "layer_output_scale.weight", 1);
  if (!scale.empty()) w.output_scale = scale[0];
  if (selector_) {
    const auto conv = [&](const char* name) {
      BlockConv made{.base = {}, .taps = conv_taps_, .group = conv_group_};
      made.base = weights.flat_vector(prefix + name, {hidden, conv_taps_, 2});
      return made;
    };
    w.attn_conv = conv("attn_conv_base");
    w.ffn_conv = conv("ffn_conv_base");
    const int32_t own = w.attn_conv.own_size(hidden);
    w.attn_coefficients = weights.linear(prefix + "attn_conv_proj", hidden, own);
    w.ffn_coefficients = weights.linear(prefix + "ffn_conv_proj", hidden, own);
  }
  return w;
}

void DFlash::require_fit(const TextModel& target) const {
  const int32_t theirs = target.hyperparameters().hidden;
  if (hp_.hidden != theirs) differ("width", hp_.hidden, theirs);
  require_vocabulary_and_layers(target, target.hyperparameters().layers);
}

int32_t DFlash::window() const {
  const bool all = std::all_of(blocks_.begin(), blocks_.end(), [](const Block& block) { return block.is_windowed; });
  return all ? window_ : 0;
}

std::vector<KvShape> DFlash::kv_shapes() const {
  std::vector<KvShape> shapes;
  for (const int32_t kv_heads : hp_.kv_heads)
    shapes.push_back({.kv_heads = kv_heads, .head_dim_k = hp_.head_dim_k, .head_dim_v = hp_.head_dim_v});
  return shapes;
}

// Sections, where the file has them, give all pairs to time: text stands at its index there.
RopeAngles DFlash::rope() const { return rope_angles(hp_.rope, {}, rope_divisors_); }

RowRange DFlash::visible(int32_t n, int32_t j, int32_t block_rows, bool is_windowed) const {
  const int32_t first = is_windowed ? std::max(0, n + j + 1 - window_) : 0;
  return {first, is_causal_ ? n + j + 1 : n + block_rows};
}

KeysValues DFlash::keys_values(Ops& ops, const Block& w, Tensor x, Tensor* q) const {
  std::vector<const Linear*> weights{&w.k};
  if (w.v.weight) weights.push_back(&w.v);
  if (q != nullptr) weights.push_back(&w.q);
  std::vector<Tensor> made(weights.size());
  ops.multi_linear(x, weights, made);
  if (q != nullptr) *q = made.back();
  const Tensor k = made[0];
  if (w.v.weight) return {k, made[1]};
  const int32_t d = hp_.head_dim_k;
  const Tensor normed = ops.rms_norm({k.data, k.rows * (k.features / d), d}, w.ones, hp_.rms_epsilon);
  return {k, {normed.data, k.rows, k.features}};
}

Rotation DFlash::rotation_of(const Block& w, const RopeTable& rope) const {
  return {rope, RopeLayout::halves, &w.q_norm, &w.k_norm, hp_.rms_epsilon};
}

void DFlash::take_in(Ops& ops, Tensor taps, const TextModel&, const Rows& rows, std::span<const KvLayer> kv,
                     const RopeTable& rope) const {
  const Tensor context = ops.rms_norm(ops.linear(taps, fuse_), fuse_norm_, hp_.rms_epsilon);  // [rows, E]
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    const Ops::Scope scope(ops);
    const Block& w = blocks_[layer];
    const KeysValues made = keys_values(ops, w, context, nullptr);
    ops.rotate_and_append({nullptr, context.rows, 0}, made.k, made.v, 0, rotation_of(w, rope), rows, kv[layer]);
  }
}

Tensor DFlash::attention(Ops& ops, const Block& w, Tensor x, const Rows& rows, int32_t block_rows, const KvLayer& kv,
                         const RopeTable& rope) const {
  const int32_t d = hp_.head_dim_k, heads = w.q.weight->out_features / d;
  Tensor n = ops.rms_norm(x, w.attn_norm, hp_.rms_epsilon);
  const Tensor own = w.attn_conv ? ops.linear(n, w.attn_coefficients) : Tensor{};
  if (w.attn_conv) n = ops.block_conv(n, w.attn_conv, 0, own, block_rows);
  Tensor q;
  const KeysValues made = keys_values(ops, w, n, &q);
  ops.rotate_and_append(q, made.k, made.v, heads, rotation_of(w, rope), rows, kv);
  Tensor a = ops.linear(ops.attention(q, rows, kv, heads, scale_), w.output);
  if (value_scale_ != 1.0f) ops.scale(a, value_scale_);
  if (w.attn_conv) a = ops.block_conv(a, w.attn_conv, 1, own, block_rows);
  return w.attn_post_norm ? ops.rms_norm(a, w.attn_post_norm, hp_.rms_epsilon) : a;
}

Tensor DFlash::feed_forward(Ops& ops, const Block& w, Tensor x, int32_t block_rows) const {
  Tensor n = ops.rms_norm(x, w.ffn_norm, hp_.rms_epsilon);
  const Tensor own = w.ffn_conv ? ops.linear(n, w.ffn_coefficients) : Tensor{};
  if (w.ffn_conv) n = ops.block_conv(n, w.ffn_conv, 0, own, block_rows);
  Tensor f = ops.linear(ops.gated_linear(n, w.gate, w.up, activation_), w.down);
  if (w.ffn_conv) f = ops.block_conv(f, w.ffn_conv, 1, own, block_rows);
  return w.ffn_post_norm ? ops.rms_norm(f, w.ffn_post_norm, hp_.rms_epsilon) : f;
}

Tensor DFlash::states(Ops& ops, Tensor embedded, const Rows& rows, const Rows& windowed, int32_t block_rows,
                      std::span<const KvLayer> kv, const RopeTable& rope) const {
  const Tensor x = embedded;  // [blocks * block_rows, E], the residual stream
  if (embedding_scale_ != 1.0f) ops.scale(x, embedding_scale_);
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    const Ops::Scope scope(ops);
    const Block& w = blocks_[layer];
    ops.add(x, attention(ops, w, x, w.is_windowed ? windowed : rows, block_rows, kv[layer], rope));
    ops.add(x, feed_forward(ops, w, x, block_rows));
    if (w.output_scale != 1.0f) ops.scale(x, w.output_scale);
  }
  return ops.rms_norm(x, output_norm_, hp_.rms_epsilon);
}

int32_t DFlash::candidates(int32_t width) const {
  return std::min(selector_ ? selector_->candidates : kCandidates, width);
}

DraftLattice DFlash::lattice(Ops& ops, int32_t anchor, Tensor states, std::span<const int32_t> ids,
                             std::span<const float> logits) const {
  const int32_t n = states.rows, k = static_cast<int32_t>(ids.size()) / n;
  DraftLattice lattice{n, k, {ids.begin(), ids.end()}, {}, {}};
  for (int32_t& token : lattice.tokens) token = target_token(token);
  std::vector<float> scores(logits.begin(), logits.end());  // [D, K]
  for (float& score : scores) {
    score *= logit_scale_;
    if (logit_cap_ > 0.0f) score = logit_cap_ * std::tanh(score / logit_cap_);
  }
  for (int32_t t = 0; t < n; ++t)
    for (int32_t i = 0; i < k; ++i)
      lattice.scores.insert(lattice.scores.end(), scores.begin() + t * k, scores.begin() + (t + 1) * k);
  if (selector_) add_transitions(ops, anchor, states, lattice);
  return lattice;
}

// S_t(a, b) = U_t(b) + sum over r of A[a]_r g_t,r B[b]_r, where a is the anchor for the first row
void DFlash::add_transitions(Ops& ops, int32_t anchor, Tensor states, DraftLattice& lattice) const {
  const Selector& w = *selector_;
  const int32_t k = lattice.candidates, rank = w.hidden.weight->out_features;
  const Ops::Scope scope(ops);
  std::vector<int32_t> predecessors{anchor};
  predecessors.insert(predecessors.end(), lattice.tokens.begin(), lattice.tokens.end() - k);
  const auto host = [&](Tensor x) {
    std::vector<float> values(static_cast<size_t>(x.size()));
    ops.read(x, values);
    return values;
  };
  const std::vector<float> before = host(ops.embed(predecessors, w.before));  // [1 + (D - 1) K, R]
  const std::vector<float> after = host(ops.embed(lattice.tokens, w.after));  // [D K, R]
  const std::vector<float> hidden = host(ops.linear(states, w.hidden));       // [D, R]
  const auto row = [rank](const std::vector<float>& x, int32_t i) { return x.data() + int64_t{i} * rank; };
  std::vector<float> pair(static_cast<size_t>(rank));  // A[a] g_t
  for (int32_t t = 0; t < lattice.rows; ++t)
    for (int32_t i = 0; i < k; ++i) {
      const float *a = row(before, t == 0 ? 0 : 1 + (t - 1) * k + i), *g = row(hidden, t);
      std::transform(a, a + rank, g, pair.begin(), std::multiplies<>());
      for (int32_t j = 0; j < k; ++j) {
        const float* b = row(after, t * k + j);
        float sum = 0;
        for (size_t r = 0; r < pair.size(); ++r) sum = std::fma(pair[r], b[r], sum);
        lattice.scores[static_cast<size_t>((t * k + i) * k + j)] += sum;
      }
    }
}

}  // namespace v100
