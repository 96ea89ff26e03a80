// One device's share of a running model: its operations, KV pages and recurrent states.
//
// Pages and slots are numbered alike on all ranks: page p of every rank holds the same tokens, each rank's heads of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/model.h"
#include "ops/ops.h"

namespace v100 {

// Rows of one forward pass, and what the model reads beside them.
struct Ubatch {
  Rows rows;
  Rows windowed;                           // as layers with a sliding window see them
  std::span<const RopeTable> ropes;        // one for each of TextModel::ropes()
  std::span<const RopeTable> block_ropes;  // as in ForwardState
  std::span<const int32_t> outputs;        // rows whose hidden states are wanted
  int32_t kept_rows = 0;                   // the first ones, of which recurrent layers keep what replay() needs
};

// Bytes of a page of all layers, of one of those with a window, and of a slot of states.
struct RankSizes {
  size_t page_bytes = 0, window_page_bytes = 0, state_bytes = 0;
};
// shapes: as of Rank. Throws InvalidArgument.
RankSizes rank_sizes(const TextModel& text, const Backend& backend, std::span<const KvShape> shapes);

// A rank's part of logits, its rows of the output matrix, to columns `first` and on of those of all ranks [rows, width].
void read_part(Ops& ops, Tensor part, int32_t first, std::span<float> all, int32_t width);

class Rank {
 public:
  // shapes: TextModel::kv_shapes() with their types; windowed ones have pages of their own. directions: as in
  // ForwardState. kv_on_host: pages lie in memory of the host. Throws OutOfMemory, InvalidArgument.
  Rank(const TextModel& text, const Backend& backend, std::unique_ptr<Ops> ops, std::vector<KvShape> shapes,
       int32_t n_pages, int32_t n_window_pages, int32_t n_state_slots, std::vector<VectorWeight> directions,
       bool kv_on_host);

  const TextModel& text() const { return text_; }
  Ops& ops() const { return *ops_; }

  size_t page_bytes() const { return page_bytes_; }  // all layers
  std::byte* page(PageId id) const { return kv_.get() + static_cast<size_t>(id) * page_bytes_; }
  size_t window_page_bytes() const { return window_page_bytes_; }  // layers with a window
  std::byte* window_page(PageId id) const { return window_kv_.get() + static_cast<size_t>(id) * window_page_bytes_; }
  const KvLayer& kv_layer(size_t layer) const { return kv_layers_[layer]; }

  size_t state_bytes() const { return static_cast<size_t>(state_values_) * sizeof(float); }  // all records of a slot
  std::byte* state(int32_t slot) const { return states_.get() + static_cast<size_t>(slot) * state_bytes(); }

  // Hidden states [outputs, hidden] after the output norm, the same on all ranks. The caller holds a Scope.
  Tensor forward(const Ubatch& ubatch) const;
  // TextModel::block_states of the rows. The caller holds a Scope.
  Tensor block_states(const Ubatch& ubatch, int32_t block_rows) const;
  // TextModel::predict; before: rows of the last prediction that these go on from, or none. The caller holds a Scope.
  Tensor predict(const Ubatch& ubatch, std::span<const int32_t> before) const;
  // TextModel::replay of the last ubatch with kept_rows; of this one, only the rows matter.
  void replay(const Ubatch& ubatch) const;

 private:
  // The caller holds a Scope: angles are brought to the device.
  ForwardState state_of(const Ubatch& ubatch) const;

  const TextModel& text_;
  std::unique_ptr<Ops> ops_;
  size_t page_bytes_ = 0, window_page_bytes_ = 0;
  int64_t state_values_ = 0;
  std::shared_ptr<std::byte[]> kv_, window_kv_;  // [pages][layers] page of layer
  std::vector<KvLayer> kv_layers_;
  std::shared_ptr<std::byte[]> states_;  // [slots][records]
  std::vector<StateRecords> records_;
  mutable std::vector<KeptInputs> kept_;                // scratch, one for each record
  mutable std::vector<RopeTable> ropes_, block_ropes_;  // of the ubatch, on the device
  mutable KeptInputs predicted_;                        // hidden states of the last prediction
  std::vector<VectorWeight> directions_;
};

}  // namespace v100
