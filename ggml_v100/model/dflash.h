// `dflash`: the drafters DFlash, DFlash2 and DSpark. They propose the next tokens of a text all at once, from what a larger
// model, the target, computed for the text so far.
//
// For every token of the text the inputs of some of the target's layers become features, and these the keys and values
// that the drafter attends to (take_in). A round puts the last token, the anchor, and mask tokens after it in one block;
// each row of the block tells the token at its own position, or, where the anchor's row counts too, the one after it
// (states, then lattice).
//
// E hidden, D drafted tokens, V vocabulary, K candidates of a row, R rank of the selector.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "model/hidden_drafter.h"
#include "model/markov_head.h"

namespace v100 {

// The likeliest tokens of D rows and their scores: of DFlash2 how well each follows each of the row before, of DFlash the
// logits, whatever came before. Those of DSpark are corrected for the first candidate of the row before.
struct DraftLattice {
  int32_t rows = 0;             // D
  int32_t candidates = 0;       // K
  std::vector<int32_t> tokens;  // [D, K], by falling logit, of equal ones the lower id first
  std::vector<float> scores;    // [D, K, K] of candidate j after candidate i of the row before; row 0: after the anchor
  std::vector<float> confidences;  // [D], of drafters that say how likely a row's first candidate stands; else empty

  int32_t token(int32_t row, int32_t j) const { return tokens[static_cast<size_t>(row * candidates + j)]; }
  // Of a row's candidates after candidate i of the row before (row 0: i is 0).
  std::span<const float> after(int32_t row, int32_t i) const {
    return std::span(scores).subspan(static_cast<size_t>((row * candidates + i) * candidates),
                                     static_cast<size_t>(candidates));
  }
};

class DFlash final : public HiddenDrafter {
 public:
  // Throws ModelError for a file that does not fit together.
  DFlash(const Metadata& metadata, const WeightLoader& weights);

  // Rows of a block before the first that tells a token, and the most tokens that a block tells.
  int32_t silent_rows() const { return tells_from_anchor_ ? 0 : 1; }
  int32_t most_drafted() const { return block_size_ - silent_rows(); }
  int32_t mask_token() const { return mask_token_; }
  bool is_version_2() const { return selector_.has_value(); }
  // Of DSpark; else nullptr.
  const MarkovHead* markov_head() const { return markov_head_ ? &*markov_head_ : nullptr; }
  void require_fit(const TextModel& target) const override;
  int32_t window() const override;
  std::vector<KvShape> kv_shapes() const override;
  std::vector<std::optional<RopeLayout>> key_layouts() const override {
    return std::vector<std::optional<RopeLayout>>(blocks_.size(), RopeLayout::halves);
  }
  RopeAngles rope() const override;
  // Appends keys and values.
  void take_in(Ops& ops, Tensor taps, const TextModel& target, const Rows& rows, std::span<const KvLayer> kv,
               const RopeTable& rope) const override;
  // embedded [blocks * block_rows, E] of anchors and masks, which it changes -> their normed states. They stand after the
  // tokens taken in; what they see is `visible`, on layers with a window (`windowed`) and without. Appends to the pages.
  Tensor states(Ops& ops, Tensor embedded, const Rows& rows, const Rows& windowed, int32_t block_rows,
                std::span<const KvLayer> kv, const RopeTable& rope) const;
  // kv indices that row j of a block sees when n tokens were taken in.
  RowRange visible(int32_t n, int32_t j, int32_t block_rows, bool is_windowed) const;
  // K, of logits of so many tokens.
  int32_t candidates(int32_t width) const;
  // states [D, E] of the rows after an anchor; ids and logits [D, K]: the first candidates of each row of their logits by
  // the output matrix in use, by falling logit, of equal ones the lower id first.
  DraftLattice lattice(Ops& ops, int32_t anchor, Tensor states, std::span<const int32_t> ids,
                       std::span<const float> logits) const;

 private:
  struct Block {
    VectorWeight attn_norm, ffn_norm;            // [E]
    Linear q, k, v, output;                      // v: or none, then values are keys without rotation
    VectorWeight q_norm, k_norm;                 // [head size]
    VectorWeight ones;                           // [head size], without v
    VectorWeight attn_post_norm, ffn_post_norm;  // [E] or empty
    Linear gate, up, down;
    BlockConv attn_conv, ffn_conv;               // DFlash2
    Linear attn_coefficients, ffn_coefficients;  // of the rows' own, [own_size, E]
    float output_scale = 1.0f;
    bool is_windowed = false;
  };
  struct Selector {
    EmbeddingTable before, after;  // [V, R]: of a predecessor and of a successor
    Linear hidden;                 // [R, E]
    int32_t candidates = 0;
  };

  void add_transitions(Ops& ops, int32_t anchor, Tensor states, DraftLattice& lattice) const;
  Block load_block(const WeightLoader& weights, int32_t layer) const;
  // Of x, and with q its queries, from one reading of x; none of them turned.
  KeysValues keys_values(Ops& ops, const Block& w, Tensor x, Tensor* q) const;
  Rotation rotation_of(const Block& w, const RopeTable& rope) const;
  Tensor attention(Ops& ops, const Block& w, Tensor x, const Rows& rows, int32_t block_rows, const KvLayer& kv,
                   const RopeTable& rope) const;
  Tensor feed_forward(Ops& ops, const Block& w, Tensor x, int32_t block_rows) const;

  int32_t block_size_ = 0, mask_token_ = 0, window_ = 0;
  bool is_causal_ = false, tells_from_anchor_ = false;
  float scale_ = 0, value_scale_ = 1, embedding_scale_ = 1, logit_scale_ = 1, logit_cap_ = 0;
  Activation activation_ = Activation::silu;
  int32_t conv_taps_ = 0, conv_group_ = 0;
  std::vector<float> rope_divisors_;
  Linear fuse_;             // [E, target_layers * E]
  VectorWeight fuse_norm_;  // [E]
  VectorWeight output_norm_;
  std::vector<Block> blocks_;
  std::optional<Selector> selector_;
  std::optional<MarkovHead> markov_head_;
};

}  // namespace v100
