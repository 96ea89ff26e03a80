// Several drafters in a fixed order of precedence: of each sequence the first that has a draft is heard.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "speculative/draft_chain.h"
#include "speculative/drafter.h"
#include "speculative/ngram_mod.h"
#include "speculative/ngram_simple.h"

namespace v100 {

// No defaults here: the option table fills every field.
struct SpeculationParams {
  std::vector<std::string> types;  // as in --spec-type, in any order; "none" among them: no drafter
  DraftChainParams chain;          // of drafters that compute
  NgramSizes simple, map_k, map_k4v;
  int32_t map_k_min_hits, map_k4v_min_hits;
  NgramModParams mod;
  std::string lookup_static, lookup_dynamic;  // files of ngram-cache; empty: none
};

// Of one drafter since the start.
struct DrafterStatistics {
  std::string name;
  int64_t n_begins = 0, n_draft_calls = 0, n_accept_calls = 0;
  int64_t n_drafts = 0;           // that were verified
  int64_t n_accepted_drafts = 0;  // of which at least one token stood
  int64_t n_tokens = 0, n_accepted_tokens = 0;
  std::vector<int64_t> accepted_at;  // drafts whose i-th token stood
  double begin_ms = 0.0, draft_ms = 0.0, accept_ms = 0.0;
};

struct DraftOrder {
  int32_t sequence;
  int32_t last;  // drawn, not computed yet
  int32_t most;  // > 0
  float temperature;
  uint32_t seed;
};

// Not thread-safe: driven by the thread that drives the target's engine, between its steps.
class Speculator {
 public:
  // draft: engine of the draft model, which draft-simple needs. Throws InvalidArgument for unknown types, for values out
  // of range and for a type without what it needs.
  Speculator(std::shared_ptr<Engine> target, const SpeculationParams& params, std::shared_ptr<Engine> draft);
  ~Speculator();

  // Active drafters in their order.
  std::vector<std::string> names() const;
  // Tokens of a draft at most, by any of them.
  int32_t longest() const;
  // A generation begins with the prompt that the target's sequence holds.
  void begin(int32_t sequence);
  // The target has computed a part of a prompt.
  void follow(int32_t sequence);
  // One draft for each order, at most `most` tokens of the target's vocabulary, perhaps none.
  std::vector<Draft> draft(std::span<const DraftOrder> orders);
  // Of the sequence's last draft, which was not empty and was verified, n_accepted tokens stood. n_verified: how many of
  // them were verified.
  void accept(int32_t sequence, int32_t n_verified, int32_t n_accepted);
  void forget(int32_t sequence);
  // Writes what drafters have learnt to their files. Throws Error.
  void save();
  std::vector<DrafterStatistics> statistics() const;

 private:
  struct Active {
    std::unique_ptr<Drafter> drafter;
    DrafterStatistics statistics;
  };

  void add(std::unique_ptr<Drafter> drafter);

  std::shared_ptr<Engine> target_;
  std::vector<Active> active_;
  std::vector<int32_t> winner_;  // of each sequence: who drafted last, or -1
};

// The types of --spec-type in their order.
std::span<const std::string_view> speculation_types();

}  // namespace v100
