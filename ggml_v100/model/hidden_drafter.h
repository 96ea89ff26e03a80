// A drafter that reads a larger model's hidden states, its target's: what DFlash and EAGLE-3 have in common.
//
// With every token that the target computes, the drafter takes in the inputs of some of the target's layers. What it keeps
// of a token lies in the same pages as the target's keys and values (model/drafted_model.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gguf/metadata.h"
#include "model/hyperparameters.h"
#include "model/loader.h"
#include "model/model.h"
#include "model/rope.h"
#include "ops/ops.h"

namespace v100 {

class HiddenDrafter {
 public:
  virtual ~HiddenDrafter() = default;

  const Hyperparameters& hyperparameters() const { return hp_; }
  // Layers of the target whose inputs are taken in, in this order; the number of layers: the states after the output norm.
  const std::vector<int32_t>& target_layers() const { return target_layers_; }
  // Throws ModelError for a target that the drafter was not made for.
  virtual void require_fit(const TextModel& target) const = 0;
  // Tokens that every layer sees at most, the row's own included; 0: a layer sees all.
  virtual int32_t window() const { return 0; }
  // Types left to the engine; none is marked as windowed.
  virtual std::vector<KvShape> kv_shapes() const = 0;
  // One for each of kv_shapes(): how stored keys were turned, by the angles of rope(), if they were.
  virtual std::vector<std::optional<RopeLayout>> key_layouts() const = 0;
  virtual RopeAngles rope() const = 0;
  // taps [rows, target_layers * hidden of the target], the layers side by side: appends what is kept of the rows' tokens.
  virtual void take_in(Ops& ops, Tensor taps, const TextModel& target, const Rows& rows, std::span<const KvLayer> kv,
                       const RopeTable& rope) const = 0;

  // A file may have embeddings and an output matrix of its own; else the target's are used.
  Tensor embed(Ops& ops, const TextModel& target, std::span<const int32_t> tokens) const;
  bool has_head() const { return head_.weight != nullptr; }
  // [rows, V_d], V_d rows of the output matrix in use: all of the target's, or of this rank.
  Tensor head(Ops& ops, const TextModel& target, Tensor states) const;
  // The target's token of each row of the own output matrix; empty: the same ids.
  const std::vector<int32_t>& draft_tokens() const { return draft_tokens_; }
  int32_t target_token(int32_t row) const {
    return draft_tokens_.empty() ? row : draft_tokens_[static_cast<size_t>(row)];
  }
  // V_d.
  int32_t head_rows() const { return draft_tokens_.empty() ? hp_.vocab : static_cast<int32_t>(draft_tokens_.size()); }

 protected:
  // Reads what files of all kinds have. Throws ModelError.
  HiddenDrafter(const Metadata& metadata, const WeightLoader& weights);

  [[noreturn]] static void differ(const char* what, int32_t drafter_has, int32_t target_has);
  // The checks that hold for all: V, and layers [0, `layers`) that there are inputs of.
  void require_vocabulary_and_layers(const TextModel& target, int32_t layers) const;
  bool has_embeddings() const { return token_embd_.rows != nullptr; }

  Hyperparameters hp_;
  std::vector<int32_t> target_layers_;

 private:
  EmbeddingTable token_embd_;  // [V, E]
  Linear head_;                // [V_d, E]
  std::vector<int32_t> draft_tokens_;
};

}  // namespace v100
