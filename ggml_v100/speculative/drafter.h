// A drafter guesses the tokens that follow a sequence. Whatever it guesses, the text stays the same: the engine verifies
// (sampling/verification.h); a better guess only saves time.
//
// A drafter is handed the tokens of a sequence whenever it drafts, so that it finds out by itself what changed since: cuts,
// forks, reused prefixes, shifts. What it keeps per sequence is its own business, and may be wrong at no cost but that of a
// bad guess. Not thread-safe: driven by the thread that drives the engine, between its steps.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "sampling/verification.h"

namespace v100 {

struct DraftRequest {
  int32_t sequence;
  std::span<const int32_t> history;  // what the engine holds of the sequence, n tokens
  int32_t last;                      // drawn after them, not computed yet
  int32_t most;                      // > 0: tokens worth drafting
  float temperature = 0.0f;          // of the request, for drafters that draw
  uint32_t seed = 0;
};

struct Draft {
  std::vector<int32_t> tokens;      // tokens[i] may be the token at place n + 1 + i
  std::vector<Proposal> proposals;  // what each was drawn from, or none: they are the likeliest ones
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  // As in --spec-type.
  virtual std::string_view name() const = 0;
  // Tokens of a draft at most.
  virtual int32_t longest() const = 0;
  // A generation begins: the sequence's prompt is computed.
  virtual void begin(int32_t sequence, std::span<const int32_t> history) { (void)sequence, (void)history; }
  // The engine has computed more of a sequence, a part of its prompt say, so that a drafter that computes can keep up.
  virtual void follow(int32_t sequence, std::span<const int32_t> history) { (void)sequence, (void)history; }
  // One draft for each request, of different sequences, perhaps empty, perhaps longer than asked for. A drafter that
  // cannot draft for want of memory drafts nothing.
  virtual void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) = 0;
  // Of the round's draft n_accepted tokens stood; is_other: it was another drafter's.
  virtual void accept(int32_t sequence, int32_t n_accepted, bool is_other) {
    (void)sequence, (void)n_accepted, (void)is_other;
  }
  // Writes what was learnt to where it shall be kept. Throws Error.
  virtual void save() {}
  // The sequence is gone.
  virtual void forget(int32_t sequence) { (void)sequence; }
};

}  // namespace v100
