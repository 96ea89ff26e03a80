// Drives a model: paged memory for many sequences, one step API, and the llama-style batch API beside it.
//
// A lock admits one thread at a time; callers queue. Tokens of a sequence are numbered from 0; that index is its position.
//
// A model split over several ranks computes on all of them at once. When one fails, the call throws DeviceError and the
// sequences are as they were before. While one is lost (it does not return), so does every call that computes or
// moves what that rank may read; truncate, clear and release work.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/hidden_pool.h"
#include "engine/loaded_model.h"
#include "engine/rank_set.h"
#include "engine/token_moves.h"
#include "memory/paged_memory.h"
#include "memory/prefix_memory.h"
#include "memory/state_pool.h"
#include "model/dflash.h"
#include "ops/observed.h"
#include "sampling/sampler.h"
#include "sampling/verification.h"

namespace v100 {

// Ubatches of at most this many rows are decode work and run with n_threads, larger ones with n_threads_batch.
inline constexpr int32_t kDecodeRows = 64;

// No defaults here: the option table fills every field.
struct EngineParams {
  int32_t n_ctx;            // tokens in the page pool, rounded up to pages; 0 = training length
  int32_t n_seq_max;        // sequences
  int32_t n_batch;          // rows of one decode() call
  int32_t n_ubatch;         // rows of one forward pass
  int32_t n_threads;        // 0 = all cores
  int32_t n_threads_batch;  // 0 = n_threads
  ThreadSettings threads;   // processors, priority and patience; the count is the larger of the two above
  std::string type_k, type_v;
  RopeSettings rope;
  int64_t cache_bytes;      // host memory for prefixes of sequences: 0 = none, -1 = no limit
  int32_t n_checkpoints;    // states or windows that it keeps per sequence
  bool kv_on_host;          // pages of layers on devices lie in memory of the host, which those read through their bus
  bool swa_full;            // keep the pages behind sliding windows: any beginning of a sequence stays usable
  bool collect_importance;  // sum up the inputs of linear weights, see importance()
  std::vector<std::shared_ptr<const LoraAdapter>> adapters;  // of this model; sequences choose their scales
  std::shared_ptr<const ControlVector> control;              // of this model, or nullptr
};

// Append tokens to a sequence, then, with a sampler, draw the next token from the last row, or keep that row's logits for
// a draw_token() later.
//
// draft: tokens that are guessed to come next. They are computed behind the others and stand as far as the sampler draws
// the same from the target's logits (sampling/verification.h): the sequence gets the tokens and what stands of the draft,
// the answer is one more token than that. Drafts need a sampler.
struct SequenceWork {
  int32_t sequence;
  std::span<const int32_t> tokens;
  Sampler* sampler = nullptr;
  int32_t n_probs = 0;
  bool post_sampling_probs = false;
  std::vector<float>* logits = nullptr;  // [vocab] of the last row; only without a sampler
  std::span<const int32_t> draft = {};
  std::span<const Proposal> proposals = {};  // what each token of the draft was drawn from, or none
  std::span<const int32_t> ends = {};        // tokens that end a text: no draft stands behind them
  SyntheticAcceptance* synthetic = nullptr;  // for benchmarks
  // Of a draft: the tokens allowed at each row that is drawn from, one mask after the other; see Verification.
  std::span<const uint32_t> masks = {};
};

struct StepOutput {
  int32_t sequence;
  int32_t token;
  float logprob;  // or, with post_sampling_probs, the probability after the chain
  std::vector<TokenProbability> top;
};

// Draft for a sequence with the model's own block of multi-token prediction.
struct PredictionWork {
  int32_t sequence;
  int32_t last;  // the token after those that the sequence holds
  int32_t most;  // > 0
};
// What a step does with a row: draws, and tells probabilities if n_probs > 0. The sampler has not accepted the token yet.
// Throws as Sampler::sample.
StepOutput draw_token(int32_t sequence, Sampler& sampler, const LogitsRow& logits, int32_t n_probs,
                      bool post_sampling_probs);

// Draft for a sequence with the drafter of blocks that came with the model.
struct BlockWork {
  int32_t sequence;
  int32_t last;  // the token after those that the sequence holds
};

// Append tokens to a sequence; their hidden states go to the pool, which has taken in all tokens of the sequence so far.
struct EmbeddingWork {
  int32_t sequence;
  std::span<const int32_t> tokens;
  HiddenPool* pool;
  bool ends = true;  // the text ends here
};

class Engine {
 public:
  // Throws InvalidArgument naming the field, OutOfMemory.
  Engine(std::shared_ptr<const LoadedModel> model, const EngineParams& params);
  ~Engine();

  const LoadedModel& model() const { return *model_; }
  int32_t n_ctx() const { return n_ctx_; }
  int32_t n_seq_max() const { return memory_.n_sequences(); }
  int32_t n_batch() const { return n_batch_; }
  int32_t n_ubatch() const { return n_ubatch_; }
  size_t kv_bytes() const;  // of pages for n_ctx tokens

  // Whether sequences carry a state that cannot be cut back (recurrent layers).
  bool is_recurrent() const { return model_->text().is_recurrent(); }
  // Whether a sequence can go back to an earlier length only where checkpoint() was called, or where its windows reach.
  bool needs_checkpoints() const { return is_recurrent() || window_memory_ != nullptr; }

  // One scheduler iteration. All or nothing: throws ContextFull or InvalidArgument before any row is computed; after any
  // other error every sequence has its old length.
  //
  // n_passes > 1 goes on from the drawn tokens, as if step were called again with each as the only token of its sequence,
  // without a word from the caller in between; items without a sampler take part in the first pass only. It ends early
  // when the next token of a sequence finds no page. Outputs come pass by pass, each in the order of the work.
  // Recurrent models are limited to one pass (InvalidArgument): an error in a later one could not be undone. So are drafts,
  // whose outputs come one after the other in the place of their item. The rows of all items with a draft together are at
  // most n_ubatch (InvalidArgument).
  std::vector<StepOutput> step(std::span<const SequenceWork> work, int32_t n_passes = 1);

  // For each item the n_draft tokens that may follow `last`. Sequences stay as they are. Throws ContextFull and
  // InvalidArgument before any row is computed.
  std::vector<DraftLattice> draft_blocks(std::span<const BlockWork> work, int32_t n_draft);
  // Whether predict works: the model has a block of multi-token prediction, and it was loaded.
  bool can_predict() const { return model_->text().can_predict(); }
  // For each item, from token to token: on_logits(item, logits) of what may follow its last one, which returns the token to
  // go on from, or -1 for the end; `most` calls at most. Sequences stay as they are. Throws ContextFull and
  // InvalidArgument before any row is computed.
  using OnPrediction = std::function<int32_t(size_t item, std::span<const float> logits)>;
  void predict(std::span<const PredictionWork> work, const OnPrediction& on_logits);

  // Moves texts on towards their embeddings. All or nothing: throws ContextFull or InvalidArgument before any row is
  // computed; any other error leaves every sequence with its old length and every pool empty.
  void embed(std::span<const EmbeddingWork> work);

  // Appends tokens[i] to sequences[i], in order, and keeps the logits of the rows with wanted[i] (spans of equal length).
  void decode(std::span<const int32_t> tokens, std::span<const int32_t> sequences, std::span<const uint8_t> wanted);
  // [kept rows, vocab] of the last decode(). Valid until the next call that computes.
  std::span<const float> logits() const { return logits_; }
  int32_t logits_rows() const { return logits_rows_; }

  int32_t length(int32_t sequence) const;
  std::vector<int32_t> tokens(int32_t sequence) const;
  // The same, valid until the next call that changes the sequence.
  std::span<const int32_t> view_tokens(int32_t sequence) const;
  bool can_append(int32_t sequence, int32_t n_tokens) const;
  int32_t free_tokens() const;
  // The first `length` tokens of a sequence: kept, or given to another, which shares them. A recurrent model's sequence
  // can be kept or shared whole or not at all, one that has forgotten what is behind its windows only as far as the
  // window at its new end is there (InvalidArgument for other lengths).
  void truncate(int32_t sequence, int32_t length);
  void fork(int32_t source, int32_t destination, int32_t length);
  void clear(int32_t sequence);
  // For benchmarks of long contexts: n more tokens of id 0 that nobody has computed; their keys, values and state are what the
  // memory holds. Errors as of a step; InvalidArgument for an engine that keeps beginnings of sequences, which would hand
  // them on.
  void pretend(int32_t sequence, int32_t n_tokens);
  // Whether shift works: not for recurrent models, where positions have more than one channel, or behind windows.
  bool can_shift() const;
  // Keeps the first n_keep tokens of a sequence, drops the next n_discard and moves the rest down to their positions, so
  // that it can go on. What the moved tokens had taken from the dropped ones stays in them. Pages that other sequences
  // hold are copied: ContextFull changes nothing. InvalidArgument for a model that cannot and for counts that the
  // sequence does not have.
  void shift(int32_t sequence, int32_t n_keep, int32_t n_discard);

  // With which scales the adapters are applied to the tokens of a sequence, one for each; none: not at all, as at first.
  // They stay until set again, or until the sequence becomes another's beginning. Throws InvalidArgument while the
  // sequence holds tokens that were computed with others.
  void set_adapters(int32_t sequence, std::span<const float> scales);
  // Those scales; empty when no adapter is applied.
  AdapterScales adapters(int32_t sequence) const;

  // Prefix reuse, see memory/prefix_memory.h. All or nothing but for what host memory keeps. scales: as of set_adapters,
  // what the sequence has from here on.
  // least_chunk > 0: behind the common beginning, runs of at least so many tokens that the sequence itself holds are moved
  // to where they stand in `tokens`, if that gives more than any exact beginning; 0: never. InvalidArgument where
  // can_shift() is false.
  PrefixReuse reuse_prefix(int32_t sequence, std::span<const int32_t> tokens, int32_t most,
                           std::span<const float> scales = {}, int32_t least_chunk = 0);
  void checkpoint(int32_t sequence);
  void release(int32_t sequence);
  CacheUsage cache_usage() const;

  // Tokens, pages, recurrent state and its checkpoints with a header that names model, adapters, build, types and version.
  // load replaces the sequence, scales of adapters included, or throws InvalidArgument with the reason and leaves it empty.
  std::vector<std::byte> save_sequence(int32_t sequence) const;
  void load_sequence(int32_t sequence, std::span<const std::byte> state);

  // Of all passes so far; empty unless collect_importance was set. A call that failed midway may have left its part.
  InputStatistics importance() const;

  // For tests, see RankSet.
  void inject(InjectedFault fault, std::optional<double> stall_seconds);

 private:
  struct Row {  // one token to compute
    int32_t token;
    int32_t sequence;
    int32_t index;  // within the sequence
    bool wanted;
  };
  // What an Ubatch refers to. Kept between calls for its memory, and for a rank that may be lost while it reads it.
  struct UbatchRows {
    std::vector<int32_t> tokens, positions, outputs;
    std::vector<RopePosition> rope_positions, block_positions;
    std::vector<RowRange> visible, windowed;
    std::vector<SequenceRows> sequences, windowed_sequences;
    std::vector<RopeTable> tables, block_tables;

    void clear();
    // The next row's token is number `index` of its sequence; block: TextModel::block_tokens().
    void place(int32_t index, int32_t block);
  };
  class AppendGuard;
  struct DraftedWork;

  // Of one ubatch: its first row's number, which of its rows are wanted, and their hidden states.
  using OnHidden = std::function<void(size_t begin, std::span<const int32_t> outputs, Tensor hidden)>;

  void check_token(int32_t token) const;
  void check_embedding_work(std::span<const EmbeddingWork> work) const;
  void check_cut(int32_t sequence, int32_t length) const;
  void cut(int32_t sequence, int32_t length);
  void forget_behind_window(int32_t sequence);
  void require_shift() const;
  void move_down(int32_t sequence, std::span<const TokenMove> moves);
  bool reuse_chunks(int32_t sequence, std::span<const int32_t> tokens, int32_t most, int32_t least_chunk,
                    PrefixReuse& result);
  StateIdentity state_identity() const;
  void step_once(std::span<const SequenceWork> work, std::vector<StepOutput>& outputs);
  SequenceRows sequence_rows(int32_t sequence, int32_t row, bool continues) const;
  // The angles of ubatch_, for its positions.
  void fill_rope_tables();
  // Where the ubatch that begins there ends. Devices take the rows of a recurrent model's prompt in chunks that end at
  // multiples of kDeltaChunk, those of a short piece one by one: such a prompt is cut between chunks and into pieces that
  // are long, where n_ubatch allows, so that its bits do not depend on what is beside it.
  size_t ubatch_end(std::span<const Row> rows, size_t begin) const;
  // Computes rows (grouped by sequence, indices ascending) in ubatches. Of the first kept_rows, which are in the first
  // one, recurrent layers keep their inputs.
  void forward(std::span<const Row> rows, const OnHidden& on_hidden, int32_t kept_rows = 0);
  // Appends the work's tokens, whose rows are given, and computes them; all or nothing.
  void run(std::span<const EmbeddingWork> work, std::span<const Row> rows, const OnHidden& on_hidden);
  // As forward, with on_logits(row number, logits) for the wanted rows.
  // needs: of each row what on_logits looks at, nothing: all of it; empty: all of all rows.
  using OnLogits = std::function<void(size_t row, const LogitsRow& logits)>;
  void compute(std::span<const Row> rows, const OnLogits& on_logits, int32_t kept_rows = 0,
               std::span<const std::optional<RowNeeds>> needs = {});
  void check_work(std::span<const SequenceWork> work) const;
  void drop_rejected(std::span<const DraftedWork> drafted);

  std::shared_ptr<const LoadedModel> model_;
  int32_t n_ctx_, n_batch_, n_ubatch_, n_threads_, n_threads_batch_;
  bool keeps_prefixes_;  // of sequences, in host memory
  QuantType type_k_, type_v_;
  int32_t window_;  // of layers whose pages are kept within it; 0: there are none
  PagedMemory memory_;
  std::unique_ptr<PagedMemory> window_memory_;  // of those layers; lengths as in memory_
  StatePool states_;
  std::vector<std::vector<int32_t>> tokens_;  // of each sequence, as many as its length
  std::vector<std::shared_ptr<const LoraAdapter>> adapters_;
  std::shared_ptr<const ControlVector> control_;
  std::vector<AdapterScales> scales_;  // of each sequence
  std::vector<RopeAngles> ropes_;
  std::vector<RopeTableBuffer> rope_tables_, block_rope_tables_;  // one for each
  InputStatistics importance_;                                    // written by the rank's operations
  UbatchRows ubatch_;                                             // the one being computed
  std::unique_ptr<RankSet> ranks_;
  std::unique_ptr<PrefixMemory> prefixes_;
  std::vector<float> logits_;
  int32_t logits_rows_ = 0;
  mutable std::mutex mutex_;
};

}  // namespace v100
