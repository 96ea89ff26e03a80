// The frame that decoder models share: embeddings, a chain of blocks on the residual stream, output norm and head.
//
// A family derives from it and writes down the two halves of its block.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "model/loader.h"
#include "model/model.h"
#include "model/parts.h"
#include "model/stages.h"

namespace v100 {

class Decoder : public TextModel {
 public:
  const Hyperparameters& hyperparameters() const final { return hp_; }
  std::vector<KvShape> kv_shapes() const final { return kv_shapes_; }
  RowRange vocabulary() const final { return output_.rows; }
  std::vector<RopeAngles> ropes(const RopeSettings& settings, int32_t n_ctx) const override;
  Tensor forward(Ops& ops, const Rows& rows, const ForwardState& state, std::span<const int32_t> outputs) const final;
  Tensor embed(Ops& ops, std::span<const int32_t> tokens) const final { return ops.embed(tokens, token_embd_); }
  bool has_taps() const final { return true; }
  Tensor head(Ops& ops, Tensor hidden) const final;
  const Classifier* classifier() const final { return classifier_ ? &*classifier_ : nullptr; }

 protected:
  // Loads what belongs to no block.
  Decoder(Hyperparameters hyperparameters, const WeightLoader& weights);

  // x [rows, hidden] -> output of the attention half [rows, hidden], before its residual add. Appends to the KV pages.
  virtual Tensor attention(Ops& ops, int32_t layer, const Rows& rows, const ForwardState& state, Tensor x) const = 0;
  // x += a, then x += feed-forward of x, in place.
  virtual void feed_forward(Ops& ops, int32_t layer, Tensor x, Tensor a) const = 0;

  // Whether this rank takes part in a layer.
  bool has_layer(int32_t layer) const { return stages_.has(layer); }
  const Stages& stages() const { return stages_; }
  const EmbeddingTable& token_embeddings() const { return token_embd_; }
  const VectorWeight& output_norm() const { return output_norm_; }

  // Families that predict further tokens go on from the hidden states [rows, H] of all rows after the output norm.
  virtual bool follows_hidden() const { return false; }
  virtual void follow_hidden(Ops& ops, const Rows& rows, const ForwardState& state, Tensor hidden) const {
    (void)ops, (void)rows, (void)state, (void)hidden;
  }

  Hyperparameters hp_;
  std::vector<KvShape> kv_shapes_;  // filled by the family, one for each layer that attends
  float embedding_scale_ = 1.0f;
  float logit_cap_ = 0.0f;  // 0: none

 private:
  EmbeddingTable token_embd_;  // [vocab, hidden]
  VectorWeight output_norm_;   // [hidden]
  Stages stages_;
  OutputWeights output_;
  std::optional<Classifier> classifier_;
};

}  // namespace v100
