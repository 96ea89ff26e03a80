// The chain: logit bias, the stages in their order, the draw; seeds and the generator.
#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "base/error.h"
#include "sampling/candidates.h"
#include "sampling/penalties.h"
#include "sampling/steered_draw.h"

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

// The same in f32 from one output.
float uniform_f32(std::mt19937& generator) {
  const float result = static_cast<float>(generator()) * 0x1p-32f;
  return result < 1.0f ? result : std::nextafter(1.0f, 0.0f);
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
  require_finite("dynatemp_range", p.dynatemp_range);
  require_finite("dynatemp_exponent", p.dynatemp_exponent);
  require_not_nan("top_n_sigma", p.top_n_sigma);
  require_not_nan("typical_p", p.typical_p);
  require_not_nan("xtc_probability", p.xtc_probability);
  require_not_nan("xtc_threshold", p.xtc_threshold);
  require_finite("dry_multiplier", p.dry.multiplier);
  require_finite("dry_base", p.dry.base);
  require_not_negative("dry_allowed_length", p.dry.allowed_length);
  require_not_negative("dry_penalty_last_n", p.dry.last_n);
  if (p.mirostat < 0 || p.mirostat > 2) throw_invalid("mirostat", std::to_string(p.mirostat), "0, 1 or 2");
  require_finite("mirostat_tau", p.mirostat_tau);
  require_finite("mirostat_eta", p.mirostat_eta);
  require_finite("adaptive_target", p.adaptive_target);
  require_finite("adaptive_decay", p.adaptive_decay);
  require_not_nan("top_p", p.top_p);
  require_not_nan("min_p", p.min_p);
  require_not_negative("min_keep", p.min_keep);
  require_not_negative("repeat_last_n", p.repeat_last_n);
  require_finite("presence_penalty", p.presence_penalty);
  require_finite("frequency_penalty", p.frequency_penalty);
  if (!(p.repeat_penalty > 0.0f) || !std::isfinite(p.repeat_penalty) || !std::isfinite(1.0f / p.repeat_penalty))
    throw_invalid("repeat_penalty", std::to_string(p.repeat_penalty),
                  "a finite number above 0 with a finite reciprocal");
  if (p.mirostat == 0 && std::find(p.stages.begin(), p.stages.end(), SamplerStage::infill) != p.stages.end()) {
    if (p.infill_vocabulary == nullptr) throw InvalidArgument("sampler: infill needs the texts of the vocabulary");
    if (p.infill_vocabulary->size() != n_vocab)
      throw_invalid("size of the infill vocabulary", std::to_string(p.infill_vocabulary->size()),
                    std::to_string(n_vocab));
  }
  for (const TokenBias& b : p.logit_bias)
    if (!(b.bias < kInfinity))
      throw_invalid("logit bias of token " + std::to_string(b.token), std::to_string(b.bias),
                    "a finite number or -inf");
}

}  // namespace

class Sampler::Progress {
 public:
  TokenWindow window;
  DryHistory history;
  std::optional<Mirostat> mirostat;     // in place of the draw
  std::optional<AdaptiveP> adaptive_p;  // likewise
  std::mt19937 generator;
  std::vector<std::mt19937> xtc_generators;
};

struct Sampler::State : Sampler::Progress {
  State(int32_t vocabulary, SamplerParams given)
      : Progress{TokenWindow(given.repeat_last_n), DryHistory(given.dry.last_n), {}, {}, {}, {}},
        n_vocab(vocabulary),
        params(std::move(given)),
        penalties{params.repeat_penalty, params.frequency_penalty, params.presence_penalty},
        breakers(params.dry_breakers ? params.dry_breakers : std::make_shared<const DryBreakers>(no_breakers())) {
    if (params.mirostat != 0) {
      params.stages = {SamplerStage::temperature};
      params.dynatemp_range = 0.0f;
      mirostat.emplace(params.mirostat, n_vocab, params.mirostat_tau, params.mirostat_eta);
    } else if (names(SamplerStage::adaptive_p)) {
      adaptive_p.emplace(params.adaptive_target, params.adaptive_decay);
    }
    std::erase_if(params.logit_bias, [this](const TokenBias& b) { return b.token < 0 || b.token >= n_vocab; });
    std::erase_if(params.stages, [this](SamplerStage stage) { return has_no_effect(stage); });
    uses_window = names(SamplerStage::penalties);
    uses_history = names(SamplerStage::dry);
    start_generators();
  }

  static std::vector<DryBreaker> no_breakers() { return {}; }

  bool names(SamplerStage stage) const {
    return std::find(params.stages.begin(), params.stages.end(), stage) != params.stages.end();
  }

  // XTC draws from generators of its own, one per stage, with the chain's seed: whether it acts moves no other draw.
  void start_generators() {
    seed = seed_to_use(params.seed);
    generator.seed(seed);
    const auto n_xtc = std::count(params.stages.begin(), params.stages.end(), SamplerStage::xtc);
    xtc_generators.assign(static_cast<size_t>(n_xtc), std::mt19937(seed));
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
        return params.temperature == 1.0f && params.dynatemp_range <= 0.0f;
      case SamplerStage::dry:
        return params.dry.neutral();
      case SamplerStage::top_n_sigma:
        return params.top_n_sigma <= 0.0f;
      case SamplerStage::typ_p:
        return params.typical_p >= 1.0f;
      case SamplerStage::xtc:
        return params.xtc_probability <= 0.0f || params.xtc_threshold > 0.5f;
      case SamplerStage::infill:
        return false;
      case SamplerStage::adaptive_p:
        return true;  // not a stage of the chain but its end
    }
    throw InvalidArgument("sampler: unknown stage " + std::to_string(static_cast<int>(stage)));
  }

  // True when the stages from `first` on keep the first candidate alone: with a greedy temperature ahead and before it
  // only truncations that never drop the first, there is nothing to compute but a maximum.
  bool only_first_survives(size_t first) const {
    if (params.temperature > 0.0f || params.dynatemp_range > 0.0f) return false;
    for (size_t i = first; i < params.stages.size(); ++i) {
      switch (params.stages[i]) {
        case SamplerStage::temperature:
          return true;
        case SamplerStage::penalties:
        case SamplerStage::dry:
        case SamplerStage::typ_p:
        case SamplerStage::xtc:
        case SamplerStage::infill:
          return false;
        default:
          break;
      }
    }
    return false;
  }

  static float with_bias(float logit, const TokenBias& b) {
    return std::min(logit + b.bias, std::numeric_limits<float>::max());
  }

  void apply_bias() {
    for (const TokenBias& b : params.logit_bias) candidates.set_logit(b.token, with_bias(candidates.logit(b.token), b));
  }

  // The same on a part of the row, which has all tokens with a bias.
  void start_with_part(const LogitsRow& row) {
    std::vector<Candidate> part = row.part();
    for (const TokenBias& b : params.logit_bias)
      for (Candidate& c : part)
        if (c.token == b.token) c.logit = with_bias(c.logit, b);
    candidates.start_with_part(std::move(part));
  }

  // Tokens whose logits change before the first truncation can pass others. So of `largest` values and as many more as there
  // are such tokens, `largest` are certain to be the first ones, with those tokens' own values beside them.
  std::optional<RowNeeds> needs(std::span<const int32_t> following) const {
    if (mirostat || !mask.empty()) return {};
    RowNeeds needs;
    std::vector<int32_t>& changed = needs.tokens;
    for (const TokenBias& b : params.logit_bias) changed.push_back(b.token);
    size_t i = 0;
    for (; i < params.stages.size() && params.stages[i] == SamplerStage::penalties && !only_first_survives(i); ++i) {
      for (const auto& [token, count] : window.counts()) changed.push_back(token);
      changed.insert(changed.end(), following.begin(), following.end());
    }
    if (only_first_survives(i))
      needs.largest = 1;
    else if (i < params.stages.size() && params.stages[i] == SamplerStage::top_k)
      needs.largest = params.top_k;
    else
      return {};
    std::sort(changed.begin(), changed.end());
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    if (needs.largest > kMostOfRow || changed.size() > static_cast<size_t>(kMostOfRow - needs.largest)) return {};
    needs.largest = std::min(needs.largest + static_cast<int32_t>(changed.size()), n_vocab);
    return needs;
  }

  void apply_mask() {
    if (mask.empty()) return;
    for (int32_t token = 0; token < n_vocab; ++token) {
      const auto t = static_cast<uint32_t>(token);
      if ((mask[t / 32] >> (t % 32) & 1u) == 0) candidates.set_logit(token, -kInfinity);
    }
  }

  void apply_xtc(std::mt19937& chance) {
    if (candidates.size() < 2 || uniform_f32(chance) > params.xtc_probability) return;
    candidates.drop_all_but_last_above(params.xtc_threshold, params.min_keep);
  }

  void apply_stages() {
    size_t n_xtc = 0;
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
          if (params.dynatemp_range > 0.0f)
            candidates.apply_dynamic_temperature(params.temperature, params.dynatemp_range, params.dynatemp_exponent);
          else
            candidates.apply_temperature(params.temperature);
          break;
        case SamplerStage::dry:
          apply_dry(params.dry, history, *breakers, candidates);
          break;
        case SamplerStage::top_n_sigma:
          candidates.ban_below_deviations(params.top_n_sigma);
          break;
        case SamplerStage::typ_p:
          candidates.keep_typical(params.typical_p, params.min_keep);
          break;
        case SamplerStage::xtc:
          apply_xtc(xtc_generators[n_xtc++]);
          break;
        case SamplerStage::infill:
          apply_infill(*params.infill_vocabulary, candidates);
          break;
        case SamplerStage::adaptive_p:
          break;  // draw()
      }
    }
  }

  // The row's logits through bias, mask and stages.
  void narrow(const LogitsRow& logits) {
    if (logits.n_vocab() != static_cast<size_t>(n_vocab))
      throw_invalid("number of logits", std::to_string(logits.n_vocab()), std::to_string(n_vocab));
    if (logits.is_whole()) {
      candidates.start(logits.all());
      apply_bias();
      apply_mask();
    } else {
      start_with_part(logits);
    }
    if (candidates.largest_logit() == -kInfinity)
      throw InvalidArgument("sampler: all " + std::to_string(n_vocab) +
                            " tokens are banned (logit -inf); expected at least one allowed token");
    apply_stages();
  }

  int32_t draw() {
    const auto next = [this] { return uniform(generator); };
    if (mirostat) return mirostat->draw(candidates, next);
    if (adaptive_p) return adaptive_p->draw(candidates, next);
    return candidates.draw(next());
  }

  void accept(std::span<const int32_t> tokens) {
    if (uses_window) window.append(tokens);
    if (uses_history) history.append(tokens);
    if (adaptive_p)
      for (const int32_t token : tokens) adaptive_p->accept(token);
  }

  void reset() {
    window.clear();
    history.clear();
    if (mirostat) mirostat->reset();
    if (adaptive_p) adaptive_p->reset();
    start_generators();
  }

  int32_t n_vocab;
  SamplerParams params;  // without stages that have no effect and biases outside the vocabulary
  Penalties penalties;
  bool uses_window = false;
  std::shared_ptr<const DryBreakers> breakers;
  bool uses_history = false;
  uint32_t seed = 0;
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
  state_->accept(tokens);
}

void Sampler::set_mask(std::span<const uint32_t> mask) {
  const size_t n_words = (static_cast<size_t>(state_->n_vocab) + 31) / 32;
  if (!mask.empty() && mask.size() != n_words)
    throw_invalid("number of mask words", std::to_string(mask.size()), "0 or " + std::to_string(n_words));
  state_->mask.assign(mask.begin(), mask.end());
}

std::optional<RowNeeds> Sampler::needs(std::span<const int32_t> following) const { return state_->needs(following); }

int32_t Sampler::sample(const LogitsRow& logits) {
  state_->narrow(logits);
  return state_->draw();
}

bool Sampler::draws_from_distribution() const {
  const State& s = *state_;
  const bool is_greedy =
      s.names(SamplerStage::temperature) && s.params.temperature <= 0.0f && s.params.dynatemp_range <= 0.0f;
  return !s.mirostat && !s.adaptive_p && !is_greedy;
}

std::vector<TokenProbability> Sampler::distribution(const LogitsRow& logits) {
  state_->narrow(logits);
  state_->candidates.draw(0.0);  // computes the probabilities; which one it picks does not matter
  return candidates();
}

double Sampler::next_uniform() { return uniform(state_->generator); }

std::shared_ptr<const Sampler::Progress> Sampler::progress() const { return std::make_shared<const Progress>(*state_); }

void Sampler::go_back(const Progress& progress) { static_cast<Progress&>(*state_) = progress; }

std::vector<TokenProbability> Sampler::candidates() const {
  std::vector<TokenProbability> result;
  for (const Candidate& c : state_->candidates.probabilities()) result.push_back({c.token, c.logit});
  return result;
}

void Sampler::reset() { state_->reset(); }

}  // namespace v100
