// Keeping up with the target, and drafting for all sequences in one batch per token.
#include "speculative/draft_model.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace v100 {

DraftModel::DraftModel(std::shared_ptr<Engine> engine, int32_t n_sequences, int32_t n_vocab,
                       const DraftChainParams& params)
    : engine_(std::move(engine)), n_sequences_(n_sequences), n_vocab_(n_vocab), chain_(params) {
  const int32_t needed = engine_->is_recurrent() ? 2 * n_sequences : n_sequences;
  if (engine_->n_seq_max() < needed)
    throw InvalidArgument("the draft model's engine has " + std::to_string(engine_->n_seq_max()) +
                          " sequences, expected " + std::to_string(needed));
}

void DraftModel::begin(int32_t sequence, std::span<const int32_t>) { chain_.begin(sequence); }

void DraftModel::forget(int32_t sequence) {
  chain_.forget(sequence);
  engine_->clear(sequence);
}

void DraftModel::follow(int32_t sequence, std::span<const int32_t> history) {
  try {
    catch_up(sequence, history);
  } catch (const ContextFull&) {
    engine_->clear(sequence);  // room will be made when it drafts
  }
}

// The engine's sequence becomes `history`. False for tokens that the draft model does not know. Throws ContextFull.
bool DraftModel::catch_up(int32_t sequence, std::span<const int32_t> history) {
  const int32_t vocab = engine_->model().text().hyperparameters().vocab;
  const int32_t held = engine_->length(sequence);
  const auto known = engine_->view_tokens(sequence);
  const bool goes_on =
      static_cast<size_t>(held) <= history.size() && std::equal(known.begin(), known.end(), history.begin());
  const auto unchecked = goes_on ? history.subspan(static_cast<size_t>(held)) : history;
  if (std::any_of(unchecked.begin(), unchecked.end(), [vocab](int32_t token) { return token >= vocab; })) return false;
  const int32_t length =
      goes_on ? held : engine_->reuse_prefix(sequence, history, static_cast<int32_t>(history.size())).length;
  const auto missing = history.subspan(static_cast<size_t>(length));
  const auto n_batch = static_cast<size_t>(engine_->n_batch());
  for (size_t at = 0; at < missing.size(); at += n_batch) {
    const auto chunk = missing.subspan(at, std::min(n_batch, missing.size() - at));
    const std::vector<int32_t> sequences(chunk.size(), sequence);
    const std::vector<uint8_t> wanted(chunk.size(), 0);
    engine_->decode(chunk, sequences, wanted);
  }
  return true;
}

// Sequences that do not draft now give their pages up; false when there is none.
bool DraftModel::make_room(std::span<const DraftRequest> requests) {
  bool has_room = false;
  for (int32_t sequence = 0; sequence < engine_->n_seq_max(); ++sequence) {
    const bool drafts = std::any_of(requests.begin(), requests.end(),
                                    [sequence](const DraftRequest& r) { return r.sequence == sequence; });
    if (drafts || engine_->length(sequence) == 0) continue;
    engine_->clear(sequence);
    has_room = true;
  }
  return has_room;
}

// One token more for each of them.
void DraftModel::extend(std::vector<Running>& running) {
  std::vector<int32_t> tokens, sequences;
  for (const Running& r : running) {
    tokens.push_back(r.next);
    sequences.push_back(r.sequence);
  }
  const std::vector<uint8_t> wanted(tokens.size(), 1);
  engine_->decode(tokens, sequences, wanted);
  const int32_t vocab = engine_->model().text().hyperparameters().vocab;
  const auto logits = engine_->logits();
  std::vector<Running> going_on;
  for (size_t i = 0; i < running.size(); ++i) {
    Running r = running[i];
    const auto row = logits.subspan(i * static_cast<size_t>(vocab), static_cast<size_t>(vocab));
    if (!chain_.extend(*r.request, row, {}, std::min(vocab, n_vocab_), *r.draft)) continue;
    r.next = r.draft->tokens.back();
    if (chain_.has_room(*r.request, *r.draft)) going_on.push_back(r);
  }
  running = std::move(going_on);
}

void DraftModel::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  const int32_t vocab = engine_->model().text().hyperparameters().vocab;
  std::vector<Running> running;
  const auto start = [&] {
    running.clear();
    for (size_t i = 0; i < requests.size(); ++i) {
      const DraftRequest& request = requests[i];
      drafts[i] = {};
      if (request.last >= vocab || !chain_.has_room(request, drafts[i])) continue;
      if (!catch_up(request.sequence, request.history)) continue;
      int32_t sequence = request.sequence;
      if (engine_->is_recurrent()) {  // it cannot be cut back: drafts go on from a copy
        sequence += n_sequences_;
        engine_->fork(request.sequence, sequence, static_cast<int32_t>(request.history.size()));
      }
      running.push_back({&request, &drafts[i], sequence, request.last});
    }
    while (!running.empty()) extend(running);
  };
  try {
    try {
      start();
    } catch (const ContextFull&) {
      if (!make_room(requests)) throw;
      start();
    }
  } catch (const ContextFull&) {
    for (Draft& draft : drafts) draft = {};
  }
  for (Draft& draft : drafts) chain_.finish(draft);
  if (engine_->is_recurrent())
    for (const DraftRequest& request : requests) engine_->clear(request.sequence + n_sequences_);
}

}  // namespace v100
