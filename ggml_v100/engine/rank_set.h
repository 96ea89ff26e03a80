// The ranks of a running model as one: they compute a ubatch together, and their pages and states are kept together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/control_vector.h"
#include "engine/loaded_model.h"
#include "engine/lora_adapter.h"
#include "engine/rank.h"
#include "engine/row_look_up.h"
#include "memory/sequence_bytes.h"
#include "ops/observed.h"
#include "parallel/rank_threads.h"
#include "sampling/logits_row.h"

namespace v100 {

struct RankSetParams {
  QuantType type_k, type_v;
  int32_t n_pages;
  int32_t n_window_pages;  // of layers with a sliding window; 0: these have pages as the others
  int32_t n_state_slots;
  bool kv_on_host;    // as of EngineParams
  int32_t n_threads;  // of all ranks together that compute at the same time
  int32_t n_threads_batch;
  ThreadSettings threads;                                    // the count is not used
  InputStatistics* importance;                               // sums up the inputs of linear weights there, or nullptr
  std::vector<std::shared_ptr<const LoraAdapter>> adapters;  // in the order of SequenceRows::adapters
  std::shared_ptr<const ControlVector> control;              // or nullptr
};

class RankSet : public SequenceBytes {
 public:
  // Throws OutOfMemory, InvalidArgument.
  RankSet(std::shared_ptr<const LoadedModel> model, const RankSetParams& params);
  ~RankSet() override;

  int32_t size() const { return static_cast<int32_t>(ranks_.size()); }

  // Of all ranks, layers and records together: a copy of a page or slot is this many bytes, one rank after the other.
  size_t page_bytes() const override { return page_bytes_; }
  size_t window_page_bytes() const override { return window_page_bytes_; }
  size_t state_bytes() const override { return state_bytes_; }
  void copy_page(PageId from, PageId to) const;
  void copy_window_page(PageId from, PageId to) const;
  void read_page(PageId page, std::byte* to) const override;
  void write_page(PageId page, const std::byte* from) const override;
  void read_window_page(PageId page, std::byte* to) const override;
  void write_window_page(PageId page, const std::byte* from) const override;
  void read_state(int32_t slot, std::byte* to) const override;
  void write_state(int32_t slot, const std::byte* from) const override;

  // Hidden states [outputs, hidden] after the output norm, in the memory of the first rank until the next call. is_decode:
  // runs with n_threads, else n_threads_batch. Throws what the only rank throws; of several, DeviceError that names the
  // rank and the cause.
  Tensor forward(const Ubatch& ubatch, bool is_decode);
  // Rank::predict on all ranks, with n_threads; errors as of forward(). logits() then are of it.
  void predict(const Ubatch& ubatch, std::span<const int32_t> before);
  // Rank::replay on all ranks, with n_threads; errors as of forward().
  void replay(const Ubatch& ubatch);
  // Logits [outputs, vocab] of the last forward() or predict(), readable by the host until the next call.
  Tensor logits();
  // The same row by row, those with needs in part, others (nullptr) whole. Less work than logits() where logits_are_elsewhere(),
  // on a device, and not for hosts.
  std::span<const LogitsRow> logits_rows(std::span<const RowNeeds* const> needs);
  bool logits_are_elsewhere() const { return logits_are_elsewhere_; }
  // Work on each rank's own part, all at once with n_threads_batch; errors as of forward(). What it refers to must be its own.
  void on_each(const std::function<void(const Rank&)>& work);
  // Operations on what forward() returned.
  Ops& ops() const { return ranks_[0]->ops(); }

  // False while a rank is lost (see RankThreads): this object and all that the last ubatch refers to must be kept.
  bool is_usable() const { return threads_ == nullptr || threads_->is_usable(); }
  // Throws DeviceError when it is not usable and does not come to be so in a moment.
  void require_usable() const {
    if (threads_ != nullptr) threads_->require_usable();
  }

  // For tests: a rank throws, or hangs, at its n-th operation from now. stall_seconds: how long it may be silent.
  void inject(InjectedFault fault, std::optional<double> stall_seconds);

 private:
  // What a rank keeps of the last forward pass.
  struct Pass {
    std::optional<Ops::Scope> scope;
    Tensor hidden;
    bool is_prediction = false;
  };

  Tensor head(int32_t rank) const;  // its rows of the vocabulary, of its last pass
  int32_t threads_of(int32_t rank, int32_t n_threads) const;
  template <class Work>
  void on_all(Work&& work);

  std::shared_ptr<const LoadedModel> model_;
  std::vector<std::shared_ptr<const LoraAdapter>> adapters_;
  std::shared_ptr<const ControlVector> control_;
  int32_t n_threads_, n_threads_batch_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  size_t page_bytes_ = 0, window_page_bytes_ = 0, state_bytes_ = 0;
  std::vector<float> logits_;           // of several ranks, gathered
  std::shared_ptr<RowLookUp> look_up_;  // the last one
  bool logits_are_elsewhere_ = false;
  std::vector<Pass> passes_;              // of each rank
  std::unique_ptr<RankThreads> threads_;  // of several ranks
};

}  // namespace v100
