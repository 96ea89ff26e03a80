// One sampler chain: logit bias, stages in a chosen order, then a draw.
//
// Order, edge cases and random numbers: docs/sampling.md. Ties of equal logits: smaller token id first, everywhere.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sampling/dry.h"
#include "sampling/infill.h"
#include "sampling/logits_row.h"

namespace v100 {

// adaptive_p stands for the draw: wherever it is named, it comes last.
enum class SamplerStage {
  penalties,
  dry,
  top_n_sigma,
  top_k,
  typ_p,
  top_p,
  min_p,
  xtc,
  temperature,
  infill,
  adaptive_p
};

struct TokenBias {
  int32_t token;
  float bias;  // added to the logit; -inf bans
};

struct TokenProbability {
  int32_t token;
  float value;  // probability, or natural logarithm of one; the caller says which
};

// No defaults here: the option table and the request table fill every field.
struct SamplerParams {
  uint32_t seed;  // 0xFFFFFFFF draws one
  float temperature;
  float dynatemp_range;  // half width of the interval of temperatures; <= 0: off
  float dynatemp_exponent;
  int32_t top_k;
  float top_p;
  float min_p;
  float top_n_sigma;      // standard deviations; <= 0: off
  float typical_p;        // >= 1: off
  float xtc_probability;  // of acting at a step; <= 0: off
  float xtc_threshold;    // > 0.5: off
  int32_t min_keep;
  int32_t repeat_last_n;
  float repeat_penalty;
  float presence_penalty;
  float frequency_penalty;
  DryParams dry;
  std::shared_ptr<const DryBreakers> dry_breakers;            // null: none
  std::shared_ptr<const InfillVocabulary> infill_vocabulary;  // for the stage infill
  int32_t mirostat;    // 1 or 2: replaces all stages but temperature, and the draw; 0: off
  float mirostat_tau;  // bits
  float mirostat_eta;
  float adaptive_target;  // < 0: an ordinary draw
  float adaptive_decay;
  std::vector<TokenBias> logit_bias;
  std::vector<SamplerStage> stages;
};

class Sampler {
 public:
  // Throws InvalidArgument: penalties, temperature, its range or exponent, DRY, mirostat or adaptive-p values not
  // finite, repeat penalty <= 0 or its reciprocal not finite, negative min_keep, repeat_last_n, DRY history or allowed
  // length, mirostat other than 0, 1 and 2, a bias of +inf, NaN anywhere, n_vocab < 1, the stage infill without its
  // vocabulary or with one of another size. Biases of ids outside the vocabulary are ignored.
  Sampler(int32_t n_vocab, SamplerParams params);
  ~Sampler();
  Sampler(const Sampler& other);
  Sampler& operator=(const Sampler&) = delete;

  int32_t n_vocab() const;
  uint32_t seed() const;  // in use
  // Appends to the history that penalties look at. Throws InvalidArgument for ids outside the vocabulary.
  void accept(std::span<const int32_t> tokens);
  // Bans tokens ahead of every stage until the next call: token t may be drawn when bit t % 32 of word t / 32 is set. An
  // empty mask lifts the ban. Throws InvalidArgument unless there are ceil(n_vocab / 32) words or none.
  void set_mask(std::span<const uint32_t> mask);
  // The part of a row that sample() and distribution() need, also if some of the tokens `following` were accepted before:
  // with it they do what they do with the whole row, bit for bit. Nothing where they need all of it: chains that neither
  // begin with top-k (after biases and penalties) nor draw the likeliest token, masks, and parts of more than kMostOfRow
  // values.
  std::optional<RowNeeds> needs(std::span<const int32_t> following = {}) const;
  static constexpr int32_t kMostOfRow = 256;
  // The row is read during the call only. Throws InvalidArgument when every candidate is banned or the size differs, Error
  // for NaN and +inf logits; the generator has then not advanced.
  int32_t sample(const LogitsRow& logits);
  // Of the last sample() or distribution(): candidates after the chain by falling probability (ties: smaller id), zeros
  // dropped.
  std::vector<TokenProbability> candidates() const;

  // Whether sample() is one draw from distribution(), so that any other way to draw from it will do: not so for mirostat
  // and adaptive-p, and for a temperature of 0 there is nothing to draw.
  bool draws_from_distribution() const;
  // What sample() would draw from: candidates(), without drawing. Errors as of sample(). Stages that draw on their own
  // (XTC) do so.
  std::vector<TokenProbability> distribution(const LogitsRow& logits);
  // The generator's next number in [0, 1).
  double next_uniform();

  // Histories and generators, all that accept() and sample() change.
  class Progress;
  std::shared_ptr<const Progress> progress() const;
  void go_back(const Progress& progress);
  // Forgets the history and seeds the generator again (a random seed is drawn anew).
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ln softmax(logits)[token] and the n most likely tokens with theirs, falling. Sums in f64, error below 1e-5 (or half a
// unit in the last place of the result). A logit of -inf gives the most negative finite f32. n_top may exceed the
// vocabulary.
// Throws InvalidArgument for a token outside it, a negative n_top and a row of only -inf; Error for NaN and +inf.
struct LogProbabilities {
  float chosen;
  std::vector<TokenProbability> top;
};
LogProbabilities log_probabilities(std::span<const float> logits, int32_t token, int32_t n_top);

// ln sum exp(logits), to be taken from each logit for its log-probability. Errors as above.
double log_sum_exp(std::span<const float> logits);

}  // namespace v100
