// The engine: checks at the door, makes room in memory, runs ubatches, samples. Nothing is computed for a refused call.
#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/thread_pool.h"
#include "engine/append_guard.h"
#include "engine/pool_sizes.h"
#include "ops/delta_net_chunked.h"

namespace v100 {

namespace {

int32_t in_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw InvalidArgument(std::string(field) + " is " + std::to_string(value) + ", expected " + std::to_string(low) +
                          " to " + std::to_string(high));
  return static_cast<int32_t>(value);
}

constexpr int64_t kLongestContext = int64_t{1} << 30;

int32_t window_of(const LoadedModel& model, bool swa_full) {
  std::vector<const TextModel*> texts;
  for (int32_t rank = 0; rank < model.placement().ranks(); ++rank) texts.push_back(&model.text(rank));
  return kept_window(texts, swa_full);
}

template <class T>
void keep_forever(T&& value) {
  (void)new std::remove_cvref_t<T>(std::forward<T>(value));
}

}  // namespace

Engine::Engine(std::shared_ptr<const LoadedModel> model, const EngineParams& params)
    : model_(std::move(model)),
      n_ctx_(rounded_context(model_->text(), in_range("n_ctx", params.n_ctx, 0, kLongestContext))),
      n_batch_(in_range("n_batch", params.n_batch, 1, 1 << 24)),
      n_ubatch_(std::min(n_batch_, in_range("n_ubatch", params.n_ubatch, 1, 1 << 20))),
      n_threads_(in_range("n_threads", params.n_threads, 0, 512)),
      n_threads_batch_(in_range("n_threads_batch", params.n_threads_batch, 0, 512)),
      keeps_prefixes_(params.cache_bytes != 0),
      type_k_(cache_type("type_k", params.type_k)),
      type_v_(cache_type("type_v", params.type_v)),
      window_(window_of(*model_, params.swa_full)),
      memory_(pool_pages(n_ctx_, in_range("n_seq_max", params.n_seq_max, 1, 4096)), params.n_seq_max,
              [this](PageId from, PageId to) { ranks_->copy_page(from, to); }),
      states_(params.n_seq_max),
      tokens_(static_cast<size_t>(params.n_seq_max)),
      adapters_(params.adapters),
      control_(params.control),
      scales_(static_cast<size_t>(params.n_seq_max)),
      ropes_(model_->text().ropes(params.rope, n_ctx_)),
      rope_tables_(ropes_.size()),
      block_rope_tables_(ropes_.size()) {
  for (const auto& adapter : adapters_)
    if (&adapter->model() != model_.get()) throw InvalidArgument("an adapter was loaded for another model");
  if (control_ != nullptr &&
      control_->directions().size() != static_cast<size_t>(model_->text().hyperparameters().layers))
    throw InvalidArgument("the control vector was made for another model");
  if (n_threads_ == 0) n_threads_ = ThreadPool::hardware_threads();
  if (n_threads_batch_ == 0) n_threads_batch_ = n_threads_;
  const int32_t n_window_pages = window_pool_pages(window_, memory_.n_pages(), params.n_seq_max);
  if (window_ > 0) {
    window_memory_ = std::make_unique<PagedMemory>(
        n_window_pages, params.n_seq_max, [this](PageId from, PageId to) { ranks_->copy_window_page(from, to); });
  }
  ranks_ =
      std::make_unique<RankSet>(model_, RankSetParams{.type_k = type_k_,
                                                      .type_v = type_v_,
                                                      .n_pages = memory_.n_pages(),
                                                      .n_window_pages = n_window_pages,
                                                      .n_state_slots = states_.n_slots(),
                                                      .kv_on_host = params.kv_on_host,
                                                      .n_threads = n_threads_,
                                                      .n_threads_batch = n_threads_batch_,
                                                      .threads = params.threads,
                                                      .importance = params.collect_importance ? &importance_ : nullptr,
                                                      .adapters = adapters_,
                                                      .control = control_});
  prefixes_ = std::make_unique<PrefixMemory>(memory_, window_memory_.get(), window_, states_, tokens_, scales_, *ranks_,
                                             params.cache_bytes, params.n_checkpoints);
}

Engine::~Engine() {
  if (ranks_->is_usable()) return;
  // A lost rank may wake up and go on: all that it reads stays. Calls that would have moved any of it were refused.
  prefixes_.reset();
  keep_forever(std::move(model_));
  keep_forever(std::move(memory_));
  keep_forever(std::move(window_memory_));
  keep_forever(std::move(tokens_));
  keep_forever(std::move(scales_));
  keep_forever(std::move(rope_tables_));
  keep_forever(std::move(block_rope_tables_));
  keep_forever(std::move(ubatch_));
  keep_forever(std::move(ranks_));
}

void Engine::inject(InjectedFault fault, std::optional<double> stall_seconds) {
  const std::lock_guard lock(mutex_);
  ranks_->inject(fault, stall_seconds);
}

size_t Engine::kv_bytes() const {
  const int32_t windows = n_seq_max() * window_pages(window_) + (n_batch_ + kPageTokens - 1) / kPageTokens;
  return static_cast<size_t>(memory_.n_pages()) * ranks_->page_bytes() +
         static_cast<size_t>(std::min(windows, memory_.n_pages())) * ranks_->window_page_bytes();
}

void Engine::check_token(int32_t token) const {
  const int32_t vocab = model_->text().hyperparameters().vocab;
  if (token < 0 || token >= vocab)
    throw InvalidArgument("token id " + std::to_string(token) + " is outside the vocabulary of " +
                          std::to_string(vocab));
}

// continues: an earlier ubatch of this step has rows of the sequence already.
SequenceRows Engine::sequence_rows(int32_t sequence, int32_t row, bool continues) const {
  const int32_t written = states_.written(sequence);
  return {{row, row}, memory_.pages(sequence),
          {},         continues ? written : states_.slot(sequence),
          written,    scales_[static_cast<size_t>(sequence)]};
}

void Engine::UbatchRows::clear() {
  tokens.clear(), positions.clear(), outputs.clear(), rope_positions.clear(), block_positions.clear();
  visible.clear(), windowed.clear(), sequences.clear(), windowed_sequences.clear();
}

void Engine::UbatchRows::place(int32_t index, int32_t block) {
  positions.push_back(index);
  rope_positions.push_back(text_position(index));
  if (block > 0 && (index + 1) % block == 0) block_positions.push_back(text_position(index + 1 - block));
}

void Engine::fill_rope_tables() {
  UbatchRows& u = ubatch_;
  u.tables.resize(ropes_.size());
  u.block_tables.resize(ropes_.size());
  for (size_t i = 0; i < ropes_.size(); ++i) {
    u.tables[i] = rope_tables_[i].fill(ropes_[i], u.rope_positions);
    u.block_tables[i] = block_rope_tables_[i].fill(ropes_[i], u.block_positions);
  }
}

size_t Engine::ubatch_end(std::span<const Row> rows, size_t begin) const {
  const size_t end = begin + static_cast<size_t>(n_ubatch_);
  if (end >= rows.size()) return rows.size();
  const Row& next = rows[end];
  if (!is_recurrent() || rows[end - 1].sequence != next.sequence) return end;
  size_t first = end, last = end;
  while (first > begin && rows[first - 1].sequence == next.sequence) --first;
  while (last < rows.size() && rows[last].sequence == next.sequence) ++last;
  const size_t back = static_cast<size_t>(next.index % kDeltaChunk), own = end - first;
  size_t kept = own > back ? own - back : 0;
  if (last - first - kept <= kDecodeRows && kept > kDeltaChunk) kept -= kDeltaChunk;
  if (kept > kDecodeRows) return first + kept;
  return first > begin ? first : end;
}

void Engine::forward(std::span<const Row> rows, const OnHidden& on_hidden, int32_t kept_rows) {
  auto& [tokens, positions, outputs, rope_positions, block_positions, visible, windowed, sequences, windowed_sequences,
         tables, block_tables] = ubatch_;
  const int32_t window = model_->text().sliding_window(), block = model_->text().block_tokens();
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    end = ubatch_end(rows, begin);
    const auto ubatch = rows.subspan(begin, end - begin);
    ubatch_.clear();
    for (const Row& row : ubatch) {
      const auto r = static_cast<int32_t>(tokens.size());
      if (r == 0 || row.sequence != ubatch[static_cast<size_t>(r) - 1].sequence)
        sequences.push_back(sequence_rows(row.sequence, r, begin > 0 && rows[begin - 1].sequence == row.sequence));
      SequenceRows& sequence = sequences.back();
      sequence.rows.end = r + 1;
      sequence.tokens = std::span(tokens_[static_cast<size_t>(row.sequence)]).first(static_cast<size_t>(row.index) + 1);
      tokens.push_back(row.token);
      ubatch_.place(row.index, block);
      visible.push_back({0, row.index + 1});
      windowed.push_back({window > 0 ? std::max(0, row.index + 1 - window) : 0, row.index + 1});
      if (row.wanted) outputs.push_back(r);
    }
    const Rows ubatch_rows{tokens, positions, positions, visible, sequences};
    windowed_sequences = sequences;
    if (window_memory_ != nullptr)
      for (SequenceRows& sequence : windowed_sequences)
        sequence.pages = window_memory_->pages(ubatch[static_cast<size_t>(sequence.rows.begin)].sequence);
    const Rows windowed_rows{tokens, positions, positions, windowed, windowed_sequences};
    fill_rope_tables();
    const Tensor hidden =
        ranks_->forward({ubatch_rows, windowed_rows, tables, block_tables, outputs, begin == 0 ? kept_rows : 0},
                        ubatch_rows.count() <= kDecodeRows);
    if (!outputs.empty()) on_hidden(begin, outputs, hidden);
  }
}

void Engine::compute(std::span<const Row> rows, const OnLogits& on_logits, int32_t kept_rows,
                     std::span<const std::optional<RowNeeds>> needs) {
  std::vector<const RowNeeds*> of_outputs;
  const auto on_hidden = [&](size_t begin, std::span<const int32_t> outputs, Tensor) {
    of_outputs.clear();
    for (const int32_t output : outputs) {
      const size_t row = begin + static_cast<size_t>(output);
      of_outputs.push_back(row < needs.size() && needs[row] ? &*needs[row] : nullptr);
    }
    if (std::ranges::any_of(of_outputs, [](const RowNeeds* need) { return need != nullptr; })) {
      const std::span<const LogitsRow> found = ranks_->logits_rows(of_outputs);
      for (size_t i = 0; i < found.size(); ++i) on_logits(begin + static_cast<size_t>(outputs[i]), found[i]);
      return;
    }
    const Tensor logits = ranks_->logits();
    for (int32_t i = 0; i < logits.rows; ++i)
      on_logits(begin + static_cast<size_t>(outputs[static_cast<size_t>(i)]),
                std::span<const float>(logits.row(i), static_cast<size_t>(logits.features)));
  };
  forward(rows, on_hidden, kept_rows);
}

void Engine::run(std::span<const EmbeddingWork> work, std::span<const Row> rows, const OnHidden& on_hidden) {
  AppendGuard guard(*this);
  for (const EmbeddingWork& w : work) guard.append(w.sequence, w.tokens);
  forward(rows, on_hidden);
  guard.complete();
}

void Engine::decode(std::span<const int32_t> tokens, std::span<const int32_t> sequences,
                    std::span<const uint8_t> wanted) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  if (tokens.empty()) throw InvalidArgument("the batch has no tokens");
  if (tokens.size() > static_cast<size_t>(n_batch_))
    throw InvalidArgument("the batch has " + std::to_string(tokens.size()) + " tokens, n_batch is " +
                          std::to_string(n_batch_));
  if (sequences.size() != tokens.size() || wanted.size() != tokens.size())
    throw InvalidArgument("the batch has " + std::to_string(tokens.size()) + " tokens, " +
                          std::to_string(sequences.size()) + " sequence ids and " + std::to_string(wanted.size()) +
                          " logits flags");
  // Rows of a sequence must be consecutive in a ubatch: group them, remembering where each came from.
  std::map<int32_t, std::vector<size_t>> rows_of_sequence;
  for (size_t i = 0; i < tokens.size(); ++i) {
    check_token(tokens[i]);
    rows_of_sequence[sequences[i]].push_back(i);
  }
  std::vector<Row> rows;
  std::vector<size_t> origin;
  for (const auto& [sequence, members] : rows_of_sequence) {
    forget_behind_window(sequence);
    int32_t index = memory_.length(sequence);
    for (const size_t i : members) {
      rows.push_back({tokens[i], sequence, index++, wanted[i] != 0});
      origin.push_back(i);
    }
  }
  std::vector<size_t> output_row(tokens.size());  // kept row number of each batch row
  size_t n_wanted = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    output_row[i] = n_wanted;
    n_wanted += wanted[i] != 0;
  }
  const auto vocab = static_cast<size_t>(model_->text().hyperparameters().vocab);
  logits_rows_ = 0;
  logits_.resize(n_wanted * vocab);

  AppendGuard guard(*this);
  std::vector<int32_t> added;
  for (const auto& [sequence, members] : rows_of_sequence) {
    added.clear();
    for (const size_t i : members) added.push_back(tokens[i]);
    guard.append(sequence, added);
  }
  compute(rows, [&](size_t row, const LogitsRow& logits) {
    std::ranges::copy(logits.all(), logits_.begin() + static_cast<ptrdiff_t>(output_row[origin[row]] * vocab));
  });
  guard.complete();
  logits_rows_ = static_cast<int32_t>(n_wanted);
}

int32_t Engine::length(int32_t sequence) const {
  const std::lock_guard lock(mutex_);
  return memory_.length(sequence);
}

std::vector<int32_t> Engine::tokens(int32_t sequence) const {
  const std::lock_guard lock(mutex_);
  memory_.length(sequence);  // throws for an unknown one
  return tokens_[static_cast<size_t>(sequence)];
}

std::span<const int32_t> Engine::view_tokens(int32_t sequence) const {
  const std::lock_guard lock(mutex_);
  memory_.length(sequence);  // throws for an unknown one
  return tokens_[static_cast<size_t>(sequence)];
}

bool Engine::can_append(int32_t sequence, int32_t n_tokens) const {
  const std::lock_guard lock(mutex_);
  return memory_.can_append(sequence, n_tokens) &&
         (window_memory_ == nullptr || window_memory_->can_append(sequence, n_tokens));
}

int32_t Engine::free_tokens() const {
  const std::lock_guard lock(mutex_);
  return memory_.free_pages() * kPageTokens;
}

void Engine::check_cut(int32_t sequence, int32_t length) const {
  const int32_t held = memory_.length(sequence);
  if (is_recurrent() && length != 0 && length != held)
    throw InvalidArgument("sequence " + std::to_string(sequence) + " of a recurrent model holds " +
                          std::to_string(held) + " tokens; it cannot be cut to " + std::to_string(length));
  if (window_memory_ != nullptr && length > 0 &&
      window_memory_->first_kept(sequence) > std::max(0, length + 1 - window_))
    throw InvalidArgument("sequence " + std::to_string(sequence) + " has forgotten what is behind its window of " +
                          std::to_string(window_) + " tokens; it cannot be cut to " + std::to_string(length));
}

// Called before a step, not after: until then the sequence can be cut back to where the step began.
void Engine::forget_behind_window(int32_t sequence) {
  if (window_memory_ != nullptr) window_memory_->forget(sequence, memory_.length(sequence) + 1 - window_);
}

void Engine::cut(int32_t sequence, int32_t length) {
  memory_.truncate(sequence, length);
  if (window_memory_ != nullptr) window_memory_->truncate(sequence, length);
  tokens_[static_cast<size_t>(sequence)].resize(static_cast<size_t>(length));
  prefixes_->was_cut(sequence, length);
  if (length == 0) states_.clear(sequence);
}

void Engine::truncate(int32_t sequence, int32_t length) {
  const std::lock_guard lock(mutex_);
  check_cut(sequence, length);
  cut(sequence, length);
}

void Engine::fork(int32_t source, int32_t destination, int32_t length) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  check_cut(source, length);
  memory_.length(destination);  // throws for an unknown one
  const std::vector<int32_t>& from = tokens_[static_cast<size_t>(source)];
  std::vector<int32_t> shared(from.begin(), from.begin() + std::clamp(length, 0, static_cast<int32_t>(from.size())));
  AdapterScales scales = scales_[static_cast<size_t>(source)];
  memory_.fork(source, destination, length);
  if (window_memory_ != nullptr) window_memory_->fork(source, destination, length);
  tokens_[static_cast<size_t>(destination)] = std::move(shared);
  scales_[static_cast<size_t>(destination)] = std::move(scales);
  prefixes_->was_forked(source, destination, length);
  if (length > 0)
    states_.fork(source, destination);
  else
    states_.clear(destination);
}

void Engine::clear(int32_t sequence) {
  const std::lock_guard lock(mutex_);
  cut(sequence, 0);
}

void Engine::pretend(int32_t sequence, int32_t n_tokens) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  if (keeps_prefixes_) throw InvalidArgument("tokens are pretended only where no prefixes are kept (cache_bytes 0)");
  const std::vector<int32_t> tokens(static_cast<size_t>(in_range("n_tokens", n_tokens, 0, n_ctx_)), 0);
  AppendGuard guard(*this);
  guard.append(sequence, tokens);
  guard.complete();
}

InputStatistics Engine::importance() const {
  const std::lock_guard lock(mutex_);
  return importance_;
}

}  // namespace v100
