// The chain: logit bias, the stages in their order, the draw; seeds and the generator.
#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "base/error.h"
#include "sampling/candidates.h"
#include "sampling/penalties.h"

namespace v100 {

namespace {

constexpr uint32_t kRandomSeed = 0xFFFFFFFFu;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint32_t seed_to_use(uint32_t seed) { return seed == kRandomSeed ? std::random_device()() : seed; }

// Uniform in [0, 1) from two 32-bit outputs, the first one low. Written out: standard libraries may differ here.
double uniform(std::mt19937& generator) {
  const double low = static_cast<double>(generator());
  const double high = static_cast<double>(generator());
  const double result = (low + high * 0x1p32) * 0x1p-64;
  return result < 1.0 ? result : std::nextafter(1.0, 0.0);
}

[[noreturn]] void throw_invalid(const std::string& name, const std::string& found, const std::string& expected) {
  throw InvalidArgument("sampler: " + name + " is " + found + "; expected " + expected);
}

void require_finite(const char* name, float value) {
  if (!std::isfinite(value)) throw_invalid(name, std::to_string(value), "a finite number");
}

void require_not_nan(const char* name, float value) {
  if (std::isnan(value)) throw_invalid(name, "NaN", "a number");
}

void require_not_negative(const char* name, int32_t value) {
  if (value < 0) throw_invalid(name, std::to_string(value), "0 or more");
}

void validate(int32_t n_vocab, const SamplerParams& p) {
  if (n_vocab < 1) throw_invalid("n_vocab", std::to_string(n_vocab), "1 or more");
  require_finite("temperature", p.temperature);
  require_not_nan("top_p", p.top_p);
  require_not_nan("min_p", p.min_p);
  require_not_negative("min_keep", p.min_keep);
  require_not_negative("repeat_last_n", p.repeat_last_n);
  require_finite("presence_penalty", p.presence_penalty);
  require_finite("frequency_penalty", p.frequency_penalty);
  if (!(p.repeat_penalty > 0.0f) || !std::isfinite(p.repeat_penalty) || !std::isfinite(1.0f / p.repeat_penalty))
    throw_invalid("repeat_penalty", std::to_string(p.repeat_penalty),
                  "a finite number above 0 with a finite reciprocal");
  for (const TokenBias& b : p.logit_bias)
    if (!(b.bias < kInfinity))
      throw_invalid("logit bias of token " + std::to_string(b.token), std::to_string(b.bias),
                    "a finite number or -inf");
}

}  // namespace

struct Sampler::State {
  State(int32_t vocabulary, SamplerParams given)
      : n_vocab(vocabulary),
        params(std::move(given)),
        penalties{params.repeat_penalty, params.frequency_penalty, params.presence_penalty},
        window(params.repeat_last_n),
        seed(seed_to_use(params.seed)),
        generator(seed) {
    std::erase_if(params.logit_bias, [this](const TokenBias& b) { return b.token < 0 || b.token >= n_vocab; });
    std::erase_if(params.stages, [this](SamplerStage stage) { return has_no_effect(stage); });
    uses_window = std::find(params.stages.begin(), params.stages.end(), SamplerStage::penalties) != params.stages.end();
  }

  bool has_no_effect(SamplerStage stage) const {
    switch (stage) {
      case SamplerStage::penalties:
        return params.repeat_last_n == 0 || penalties.neutral();
      case SamplerStage::top_k:
        return params.top_k <= 0;
      case SamplerStage::top_p:
        return params.top_p >= 1.0f;
      case SamplerStage::min_p:
        return params.min_p <= 0.0f;
      case SamplerStage::temperature:
        return params.temperature == 1.0f;
    }
    throw InvalidArgument("sampler: unknown stage " + std::to_string(static_cast<int>(stage)));
  }

  // True when the stages from `first` on keep the first candidate alone: truncations never drop it, so with a greedy
  // temperature ahead and no penalties before it there is nothing to compute but a maximum.
  bool only_first_survives(size_t first) const {
    if (params.temperature > 0.0f) return false;
    for (size_t i = first; i < params.stages.size(); ++i) {
      if (params.stages[i] == SamplerStage::temperature) return true;
      if (params.stages[i] == SamplerStage::penalties) return false;
    }
    return false;
  }

  void apply_bias() {
    constexpr float kLargestFinite = std::numeric_limits<float>::max();
    for (const TokenBias& b : params.logit_bias)
      candidates.set_logit(b.token, std::min(candidates.logit(b.token) + b.bias, kLargestFinite));
  }

  void apply_mask() {
    if (mask.empty()) return;
    for (int32_t token = 0; token < n_vocab; ++token) {
      const auto t = static_cast<uint32_t>(token);
      if ((mask[t / 32] >> (t % 32) & 1u) == 0) candidates.set_logit(token, -kInfinity);
    }
  }

  void apply_stages() {
    for (size_t i = 0; i < params.stages.size(); ++i) {
      if (only_first_survives(i)) return candidates.keep_first();  // no later stage changes a single candidate
      switch (params.stages[i]) {
        case SamplerStage::penalties:
          apply_penalties(penalties, window, candidates);
          break;
        case SamplerStage::top_k:
          candidates.keep_top_k(params.top_k);
          break;
        case SamplerStage::top_p:
          candidates.keep_top_p(params.top_p, params.min_keep);
          break;
        case SamplerStage::min_p:
          candidates.keep_min_p(params.min_p, params.min_keep);
          break;
        case SamplerStage::temperature:
          candidates.apply_temperature(params.temperature);
          break;
      }
    }
  }

  int32_t n_vocab;
  SamplerParams params;  // without stages that have no effect and biases outside the vocabulary
  Penalties penalties;
  TokenWindow window;
  bool uses_window = false;
  uint32_t seed;
  std::mt19937 generator;
  CandidateList candidates;
  std::vector<uint32_t> mask;  // one bit per token; empty: all allowed
};

Sampler::Sampler(int32_t n_vocab, SamplerParams params) {
  validate(n_vocab, params);
  state_ = std::make_unique<State>(n_vocab, std::move(params));
}

Sampler::~Sampler() = default;

Sampler::Sampler(const Sampler& other) : state_(std::make_unique<State>(*other.state_)) {}

int32_t Sampler::n_vocab() const { return state_->n_vocab; }

uint32_t Sampler::seed() const { return state_->seed; }

void Sampler::accept(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens)
    if (token < 0 || token >= state_->n_vocab)
      throw_invalid("accepted token", std::to_string(token), "0 to " + std::to_string(state_->n_vocab - 1));
  if (state_->uses_window) state_->window.append(tokens);
}

void Sampler::set_mask(std::span<const uint32_t> mask) {
  const size_t n_words = (static_cast<size_t>(state_->n_vocab) + 31) / 32;
  if (!mask.empty() && mask.size() != n_words)
    throw_invalid("number of mask words", std::to_string(mask.size()), "0 or " + std::to_string(n_words));
  state_->mask.assign(mask.begin(), mask.end());
}

int32_t Sampler::sample(std::span<const float> logits) {
  State& s = *state_;
  if (logits.size() != static_cast<size_t>(s.n_vocab))
    throw_invalid("number of logits", std::to_string(logits.size()), std::to_string(s.n_vocab));
  s.candidates.start(logits);
  s.apply_bias();
  s.apply_mask();
  if (s.candidates.largest_logit() == -kInfinity)
    throw InvalidArgument("sampler: all " + std::to_string(s.n_vocab) +
                          " tokens are banned (logit -inf); expected at least one allowed token");
  s.apply_stages();
  return s.candidates.draw(uniform(s.generator));
}

std::vector<TokenProbability> Sampler::candidates() const {
  std::vector<TokenProbability> result;
  for (const Candidate& c : state_->candidates.probabilities()) result.push_back({c.token, c.logit});
  return result;
}

void Sampler::reset() {
  state_->window.clear();
  state_->seed = seed_to_use(state_->params.seed);
  state_->generator.seed(state_->seed);
}

}  // namespace v100
