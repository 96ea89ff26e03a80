// One token of a draft after the other, from the logits of a drafter that computes: what draft models, blocks of multi-token
// prediction and EAGLE-3 have in common.
#pragma once

#include "speculative/drafter.h"
#include "speculative/drawing.h"

namespace v100 {

struct DraftChainParams {
  int32_t n_max;  // tokens of a draft at most
  int32_t n_min;  // shorter drafts are dropped
  float p_min;    // a draft ends before a token whose best candidate is less likely than this among the ten best
  bool samples;   // draw from the ten best at the request's temperature, for rejection sampling; else take the best
};

// Throws InvalidArgument naming the value.
void check_draft_chain(const DraftChainParams& params);

class DraftChain {
 public:
  explicit DraftChain(const DraftChainParams& params) : params_(params) { check_draft_chain(params); }

  const DraftChainParams& params() const { return params_; }
  // A generation begins: equal requests shall draw equal drafts.
  void begin(int32_t sequence) { numbers_.forget(sequence); }
  void forget(int32_t sequence) { numbers_.forget(sequence); }
  // Whether a draft may go on: shorter than n_max and than the request wants.
  bool has_room(const DraftRequest& request, const Draft& draft) const;
  // Adds a token, chosen by the logits after the last one, [vocabulary of the drafter]. tokens: the target's token of each of
  // them; none: the same ids. n_vocab: of the target. False when the draft ends here, without a token more.
  bool extend(const DraftRequest& request, std::span<const float> logits, std::span<const int32_t> tokens,
              int32_t n_vocab, Draft& draft);
  // Drops a draft that is shorter than n_min.
  void finish(Draft& draft) const;

 private:
  DraftChainParams params_;
  DraftNumbers numbers_{0x85ebca6bu};
};

}  // namespace v100
