// How much of a draft stands: the target's logits, row after row, against the tokens that were guessed.
//
// Two rules, both exact.
// Match: each token is drawn from the target's logits by the sequence's own sampler, as if there were no draft; a draft
// stands as long as it says the same. Text and random numbers are those of an undrafted run, at every temperature.
// Rejection (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023): of a
// token d drawn by the drafter from q, with p what the sampler would draw from: d stands with probability
// min(1, p(d) / q(d)), else the token is drawn from max(0, p - q). Its distribution is p, but not its random numbers.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "sampling/sampler.h"

namespace v100 {

// What a drafted token was drawn from: (token, probability), each token once; others have probability 0.
using Proposal = std::vector<TokenProbability>;

// For benchmarks: token i stands with probability rates[i], given those before it, whatever the target says.
struct SyntheticAcceptance {
  std::vector<double> rates;
  std::mt19937 generator;
};

class Verification {
 public:
  // proposals: of each token of the draft, or none; they count where the sampler draws_from_distribution(). ends: tokens
  // after which nothing follows, so that no draft stands behind them. masks: what a grammar allows at each row (see
  // Sampler::set_mask), one after the other, of the row after the draft too; none: the sampler's own holds at all.
  // All outlive this object.
  Verification(Sampler& sampler, std::span<const int32_t> draft, std::span<const Proposal> proposals,
               std::span<const int32_t> ends, SyntheticAcceptance* synthetic = nullptr,
               std::span<const uint32_t> masks = {})
      : sampler_(sampler), draft_(draft), proposals_(proposals), ends_(ends), synthetic_(synthetic), masks_(masks) {}

  // Takes the logits of the next row, of the token before the draft first; the token that stands there, which the sampler
  // has accepted. Errors of Sampler::sample().
  int32_t next(const LogitsRow& logits);
  // No more rows are wanted: the last token was not the drafted one, ends the text, or there is no draft left.
  bool is_decided() const { return is_decided_; }
  // Tokens of the draft that stand and are followed by another.
  int32_t n_accepted() const { return n_accepted_; }

 private:
  int32_t draw(const LogitsRow& logits) const;
  int32_t accept_or_redraw(const LogitsRow& logits, int32_t drafted, const Proposal& proposal) const;
  bool ends_text(int32_t token) const;

  Sampler& sampler_;
  std::span<const int32_t> draft_;
  std::span<const Proposal> proposals_;
  std::span<const int32_t> ends_;
  SyntheticAcceptance* synthetic_;
  std::span<const uint32_t> masks_;
  int32_t n_accepted_ = 0;
  bool is_decided_ = false;
};

// Draws from p, less q where it is more; from p where nothing is left. uniform in [0, 1).
int32_t draw_residual(std::span<const TokenProbability> p, const Proposal& q, double uniform);

}  // namespace v100
