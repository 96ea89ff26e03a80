// The step: prompts, tokens and drafts of any set of sequences in one batch, each drawn from by its own sampler.
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "engine/append_guard.h"
#include "engine/engine.h"

namespace v100 {

namespace {

// Samplers of drafts accept while they verify: they go back where they were unless the step was completed.
class SamplerGuard {
 public:
  SamplerGuard() = default;
  SamplerGuard(const SamplerGuard&) = delete;
  SamplerGuard& operator=(const SamplerGuard&) = delete;
  ~SamplerGuard() {
    if (completed_) return;
    for (const auto& [sampler, progress] : before_) sampler->go_back(*progress);
  }
  void watch(Sampler& sampler) { before_.emplace_back(&sampler, sampler.progress()); }
  void complete() { completed_ = true; }

 private:
  std::vector<std::pair<Sampler*, std::shared_ptr<const Sampler::Progress>>> before_;
  bool completed_ = false;
};

StepOutput output_of(int32_t sequence, const Sampler& sampler, int32_t token, const LogitsRow& logits, int32_t n_probs,
                     bool post_sampling_probs) {
  StepOutput output{sequence, token, 0, {}};
  if (n_probs > 0 && post_sampling_probs) {
    output.top = sampler.candidates();
    for (const TokenProbability& candidate : output.top)
      if (candidate.token == output.token) output.logprob = candidate.value;
    output.top.resize(std::min(output.top.size(), static_cast<size_t>(n_probs)));
  } else if (n_probs > 0) {
    LogProbabilities probabilities = log_probabilities(logits.all(), output.token, n_probs);
    output.logprob = probabilities.chosen;
    output.top = std::move(probabilities.top);
  }
  return output;
}

// The part of each of its rows that the item's sampler looks at; nothing where the whole row is looked at.
std::optional<RowNeeds> part_needed(const SequenceWork& w) {
  const bool tells_log_probabilities = w.n_probs > 0 && !w.post_sampling_probs;
  if (w.sampler == nullptr || tells_log_probabilities || !w.masks.empty()) return {};
  return w.sampler->needs(w.draft);
}

}  // namespace

struct Engine::DraftedWork {
  const SequenceWork* work;
  int32_t length;  // of the sequence before the step
  RowRange rows;
  Verification verification;

  int32_t kept_rows() const { return static_cast<int32_t>(work->tokens.size()) + verification.n_accepted(); }
};

StepOutput draw_token(int32_t sequence, Sampler& sampler, const LogitsRow& logits, int32_t n_probs,
                      bool post_sampling_probs) {
  const int32_t token = sampler.sample(logits);
  return output_of(sequence, sampler, token, logits, n_probs, post_sampling_probs);
}

std::vector<StepOutput> Engine::step(std::span<const SequenceWork> work, int32_t n_passes) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  if (n_passes < 1) throw InvalidArgument("n_passes is " + std::to_string(n_passes) + ", expected 1 or more");
  if (n_passes > 1 && is_recurrent())
    throw InvalidArgument("n_passes is " + std::to_string(n_passes) + ", a recurrent model takes 1");
  for (const SequenceWork& item : work)
    if (n_passes > 1 && !item.draft.empty())
      throw InvalidArgument("n_passes is " + std::to_string(n_passes) + ", a step with drafts takes 1");
  std::vector<StepOutput> outputs;
  outputs.reserve(work.size() * static_cast<size_t>(n_passes));
  for (const SequenceWork& item : work) forget_behind_window(item.sequence);
  step_once(work, outputs);
  std::vector<SequenceWork> next;
  for (const SequenceWork& item : work)
    if (item.sampler != nullptr) next.push_back(item);
  std::vector<int32_t> tokens(next.size());
  int32_t pass = 1;
  try {
    for (; pass < n_passes && !next.empty(); ++pass) {
      for (size_t i = 0; i < next.size(); ++i) {
        tokens[i] = outputs[outputs.size() - next.size() + i].token;
        next[i].tokens = {&tokens[i], 1};
      }
      step_once(next, outputs);
    }
  } catch (const ContextFull&) {
    return outputs;  // no page for another pass: those before it stand
  } catch (...) {
    for (const SequenceWork& item : next) cut(item.sequence, memory_.length(item.sequence) - (pass - 1));
    for (const SequenceWork& item : work)
      cut(item.sequence, memory_.length(item.sequence) - static_cast<int32_t>(item.tokens.size()));
    throw;
  }
  return outputs;
}

void Engine::check_work(std::span<const SequenceWork> work) const {
  size_t n_drafted_rows = 0;
  for (size_t item = 0; item < work.size(); ++item) {
    const SequenceWork& w = work[item];
    if (w.tokens.empty()) throw InvalidArgument("work item " + std::to_string(item) + " has no tokens");
    for (size_t other = 0; other < item; ++other)
      if (work[other].sequence == w.sequence)
        throw InvalidArgument("sequence " + std::to_string(w.sequence) + " appears twice in a step");
    if (w.n_probs < 0) throw InvalidArgument("n_probs is " + std::to_string(w.n_probs) + ", expected 0 or more");
    if (w.sampler != nullptr && w.logits != nullptr)
      throw InvalidArgument("work item " + std::to_string(item) + " asks for a token and for logits");
    if (w.sampler != nullptr && w.sampler->n_vocab() != model_->text().hyperparameters().vocab)
      throw InvalidArgument("the sampler is for a vocabulary of " + std::to_string(w.sampler->n_vocab()) +
                            ", the model has " + std::to_string(model_->text().hyperparameters().vocab));
    memory_.length(w.sequence);  // throws for an unknown one
    for (const int32_t token : w.tokens) check_token(token);
    for (const int32_t token : w.draft) check_token(token);
    const size_t words = (static_cast<size_t>(model_->text().hyperparameters().vocab) + 31) / 32;
    if (!w.masks.empty() && (w.draft.empty() || w.masks.size() != (w.draft.size() + 1) * words))
      throw InvalidArgument("work item " + std::to_string(item) + " has masks of " + std::to_string(w.masks.size()) +
                            " words for a draft of " + std::to_string(w.draft.size()) + " tokens");
    if (w.draft.empty()) continue;
    if (w.sampler == nullptr)
      throw InvalidArgument("work item " + std::to_string(item) + " has a draft, but no sampler to verify it");
    if (!w.proposals.empty() && w.proposals.size() != w.draft.size())
      throw InvalidArgument("work item " + std::to_string(item) + " has " + std::to_string(w.proposals.size()) +
                            " proposals for a draft of " + std::to_string(w.draft.size()) + " tokens");
    n_drafted_rows += w.tokens.size() + w.draft.size();
  }
  if (n_drafted_rows > static_cast<size_t>(n_ubatch_))
    throw InvalidArgument("sequences with drafts have " + std::to_string(n_drafted_rows) + " rows, n_ubatch is " +
                          std::to_string(n_ubatch_));
}

void Engine::step_once(std::span<const SequenceWork> work, std::vector<StepOutput>& outputs) {
  check_work(work);
  std::vector<size_t> order(work.size());  // items with drafts come first: their rows share a ubatch
  std::iota(order.begin(), order.end(), size_t{0});
  const auto plain =
      std::stable_partition(order.begin(), order.end(), [&](size_t i) { return !work[i].draft.empty(); });
  const auto n_drafted = static_cast<size_t>(plain - order.begin());

  SamplerGuard samplers;
  AppendGuard guard(*this);
  std::vector<Row> rows;
  std::vector<size_t> place_of_row;  // in `order`, of each row
  std::vector<DraftedWork> drafted;
  std::vector<int32_t> tokens;
  for (size_t place = 0; place < order.size(); ++place) {
    const SequenceWork& w = work[order[place]];
    const int32_t length = memory_.length(w.sequence), begin = static_cast<int32_t>(rows.size());
    tokens.assign(w.tokens.begin(), w.tokens.end());
    tokens.insert(tokens.end(), w.draft.begin(), w.draft.end());
    for (size_t i = 0; i < tokens.size(); ++i) {
      const bool wanted = (w.sampler != nullptr || w.logits != nullptr) && i + 1 >= w.tokens.size();
      rows.push_back({tokens[i], w.sequence, length + static_cast<int32_t>(i), wanted});
      place_of_row.push_back(place);
    }
    guard.append(w.sequence, tokens);
    if (w.draft.empty()) continue;
    samplers.watch(*w.sampler);
    drafted.push_back({&w,
                       length,
                       {begin, static_cast<int32_t>(rows.size())},
                       Verification(*w.sampler, w.draft, w.proposals, w.ends, w.synthetic, w.masks)});
  }

  std::vector<std::vector<StepOutput>> of_item(n_drafted > 0 ? work.size() : 0);
  const auto on_logits = [&](size_t row, const LogitsRow& logits) {
    const size_t place = place_of_row[row];
    const SequenceWork& w = work[order[place]];
    if (w.logits != nullptr) {
      w.logits->assign(logits.all().begin(), logits.all().end());
    } else if (place >= n_drafted) {
      StepOutput output = draw_token(w.sequence, *w.sampler, logits, w.n_probs, w.post_sampling_probs);
      (n_drafted > 0 ? of_item[order[place]] : outputs).push_back(std::move(output));
    } else if (Verification& verification = drafted[place].verification; !verification.is_decided()) {
      const int32_t token = verification.next(logits);
      of_item[order[place]].push_back(
          output_of(w.sequence, *w.sampler, token, logits, w.n_probs, w.post_sampling_probs));
    }
  };
  const size_t n_before = outputs.size();
  std::vector<std::optional<RowNeeds>> needs;
  if (ranks_->logits_are_elsewhere()) {
    for (size_t row = 0; row < rows.size(); ++row)
      needs.push_back(rows[row].wanted ? part_needed(work[order[place_of_row[row]]]) : std::nullopt);
  }
  compute(rows, on_logits, n_drafted > 0 && is_recurrent() ? drafted.back().rows.end : 0, needs);
  drop_rejected(drafted);
  guard.complete();
  samplers.complete();
  for (std::vector<StepOutput>& found : of_item) std::move(found.begin(), found.end(), std::back_inserter(outputs));
  // Accepting comes last: after an error nothing has moved but the samplers' generators.
  size_t output = n_before;
  for (const SequenceWork& w : work) {
    if (w.sampler == nullptr) continue;
    if (w.draft.empty())
      w.sampler->accept({&outputs[output++].token, 1});
    else
      while (output < outputs.size() && outputs[output].sequence == w.sequence) ++output;
  }
}

// Sequences keep what stands of their drafts. States that have seen more are made again from those before the step.
void Engine::drop_rejected(std::span<const DraftedWork> drafted) {
  if (is_recurrent()) {
    ubatch_.clear();
    for (const DraftedWork& item : drafted) {
      if (item.kept_rows() == item.rows.end - item.rows.begin) continue;
      SequenceRows sequence = sequence_rows(item.work->sequence, item.rows.begin, false);
      sequence.rows.end = item.rows.begin + item.kept_rows();
      ubatch_.sequences.push_back(sequence);
    }
    if (!ubatch_.sequences.empty()) {
      ubatch_.tokens.resize(static_cast<size_t>(drafted.back().rows.end));  // rows are counted by them
      for (const DraftedWork& item : drafted)
        for (int32_t i = 0; i < item.rows.size(); ++i) ubatch_.positions.push_back(item.length + i);
      const Rows rows{ubatch_.tokens, {}, ubatch_.positions, {}, ubatch_.sequences};
      ranks_->replay({rows, rows, {}, {}, {}, drafted.back().rows.end});
    }
  }
  for (const DraftedWork& item : drafted) cut(item.work->sequence, item.length + item.kept_rows());
}

}  // namespace v100
