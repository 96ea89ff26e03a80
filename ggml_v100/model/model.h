// What the engine knows of a model: its hyperparameters, its memory needs and one forward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/hyperparameters.h"
#include "model/kept_inputs.h"
#include "model/rope.h"
#include "ops/ops.h"

namespace v100 {

class DFlash;
class Eagle3;

// The inputs of some of a model's layers, for a drafter: the residual stream as it enters them. The layer after the last
// stands for the output: its input are the states after the output norm.
struct LayerInputs {
  std::span<const int32_t> layers;
  int32_t rank;   // that wants them
  Tensor values;  // there: [rows, layers * hidden], the layers side by side; on other ranks none

  bool wants(int32_t layer) const;
  void take(Ops& ops, int32_t layer, Tensor x) const;
};

// What a forward pass reads besides its rows: built by the engine for each ubatch.
struct ForwardState {
  std::span<const KvLayer> kv;           // one for each of TextModel::kv_shapes()
  std::span<const StateRecords> states;  // one for each of TextModel::state_shapes()
  std::span<const RopeTable> ropes;      // one for each of TextModel::ropes()
  // As ropes, with a row for each block of TextModel::block_tokens() whose last token is one of the rows, in their order: the
  // angles of its first token.
  std::span<const RopeTable> block_ropes;
  // Added to the residual stream after each layer, [hidden] of each or empty; no entries: after none.
  std::span<const VectorWeight> directions;
  Rows windowed;  // the rows as layers with a sliding window see them; else the rows as they are
  // Where recurrent layers keep what they were given in the first kept_rows rows, for TextModel::replay; one for each of
  // TextModel::state_shapes(), of which a layer uses that of its first record.
  std::span<KeptInputs> kept;
  int32_t kept_rows = 0;              // 0: nothing is kept
  const LayerInputs* taps = nullptr;  // what to take down on the way, of all rows
};

// How the keys of a layer were turned before they were stored.
struct KeyRotation {
  int32_t rope = 0;  // index into TextModel::ropes(); -1: not at all
  RopeLayout layout = RopeLayout::halves;
};

// The head of rerankers: scores of labels from the hidden state that stands for a text. H hidden.
struct Classifier {
  Linear dense;                      // [H, H], followed by tanh; or none
  Linear output;                     // [labels, H]
  bool gives_probabilities = false;  // the scores of a row are meant to go through a softmax

  // [rows, H] after the output norm -> [rows, labels], before any softmax.
  Tensor scores(Ops& ops, Tensor hidden) const;
};

class TextModel {
 public:
  virtual ~TextModel() = default;
  virtual const Hyperparameters& hyperparameters() const = 0;
  // The caches of the layers that attend, types left to the engine.
  virtual std::vector<KvShape> kv_shapes() const = 0;
  // The records of a sequence's recurrent state; none for models that only attend.
  virtual std::vector<StateShape> state_shapes() const { return {}; }
  // Whether sequences carry a state that cannot be cut back.
  bool is_recurrent() const { return !state_shapes().empty(); }
  // Blocks that predict further tokens (multi-token prediction), if they were asked for at loading.
  virtual int32_t loaded_mtp_blocks() const { return 0; }
  // Angles for sequences of at most n_ctx tokens (longrope chooses its factors by that length), one for each kind of
  // layer that rotates by its own.
  virtual std::vector<RopeAngles> ropes(const RopeSettings& settings, int32_t n_ctx) const = 0;
  // One for each of kv_shapes(); none where stored keys cannot be turned on to another position.
  virtual std::vector<KeyRotation> key_rotations() const { return {}; }
  // Tokens that a layer with a sliding window sees, the row's own included; 0: no such layers.
  virtual int32_t sliding_window() const { return 0; }
  // Tokens of a block of sparse attention, a divisor of kPageTokens; 0: no such layers.
  virtual int32_t block_tokens() const { return 0; }
  // Runs the rows through all layers, appending to the KV pages and moving the states on. Returns the hidden states
  // [outputs, hidden] of the given rows after the output norm; a tensor without rows when outputs is empty. The caller
  // holds an Ops::Scope.
  virtual Tensor forward(Ops& ops, const Rows& rows, const ForwardState& state,
                         std::span<const int32_t> outputs) const = 0;
  // The drafter of whole blocks that came with the model (model/drafted_model.h), the same on all ranks; nullptr: none.
  virtual const DFlash* block_drafter() const { return nullptr; }
  // Whether its weights are on this rank: then its states of blocks of rows, and the logits of such states.
  virtual bool has_block_drafter() const { return false; }
  virtual Tensor block_states(Ops& ops, const Rows& rows, int32_t block_rows, const ForwardState& state) const {
    (void)ops, (void)rows, (void)block_rows, (void)state;
    return {};
  }
  virtual Tensor block_head(Ops& ops, Tensor states) const {
    (void)ops, (void)states;
    return {};
  }
  // For drafters: rows of the table of embeddings as they are in the file, [tokens, hidden]; and whether forward() knows
  // ForwardState::taps.
  virtual Tensor embed(Ops& ops, std::span<const int32_t> tokens) const = 0;
  virtual bool has_taps() const { return false; }
  // Makes states again from what the last pass with kept_rows kept: rows.sequences are sequences of that pass, perhaps with
  // fewer rows, each from its state_from to its state_to. Same bits as a pass over these rows.
  virtual void replay(Ops& ops, const Rows& rows, const ForwardState& state) const {
    (void)ops, (void)rows, (void)state;
  }
  // One step of a draft by the block of multi-token prediction, which forward() keeps up with where it is loaded: its cache
  // is one of kv_shapes(), and the hidden state of a sequence's last token one of the records. rows: one for each
  // sequence, of a drafted token. before: what predict() returned for the token before; no rows: forward() has seen it.
  // Returns hidden states [rows, as wide as the family keeps them] for predicted_head(), and for the next step.
  virtual Tensor predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const {
    (void)ops, (void)rows, (void)state, (void)before;
    return {};
  }
  virtual bool can_predict() const { return false; }
  // kv index of the first token that predict() sees.
  virtual int32_t first_predicted() const { return 0; }
  // The drafter of single tokens that came with the model, which predict() then is, the same on all ranks; nullptr: none.
  virtual const Eagle3* token_drafter() const { return nullptr; }
  // This rank's part of the logits [rows, predicted_width()] of what predict() returned: of vocabulary(), where the width is
  // that of the vocabulary.
  virtual Tensor predicted_head(Ops& ops, Tensor hidden) const { return head(ops, hidden); }
  virtual int32_t predicted_width() const { return hyperparameters().vocab; }
  // Whether there is one residual stream, to which directions can be added.
  virtual bool has_residual_stream() const { return true; }
  // Rows of the output matrix that this rank has.
  virtual RowRange vocabulary() const = 0;
  // Logits [rows, vocabulary()] of hidden states.
  virtual Tensor head(Ops& ops, Tensor hidden) const = 0;
  // nullptr: the file has none.
  virtual const Classifier* classifier() const { return nullptr; }
};

}  // namespace v100
