// Probabilities are those of CandidateList: softmax in f32.
#include "sampling/steered_draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace v100 {

namespace {

// How many of the most likely candidates the estimate of the distribution's exponent looks at.
constexpr size_t kEstimated = 100;

float bounded(double value) {
  constexpr double kLargestFinite = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(value, -kLargestFinite, kLargestFinite));
}

int32_t draw_discrete(CandidateList& candidates, const Uniform& uniform) {
  return candidates.draw(candidates.size() > 1 ? uniform() : 0.0);
}

}  // namespace

// Version 1 assumes Zipf's law: estimates its exponent s from neighbouring probabilities and derives the number of
// candidates whose surprise is mu (equations of section 4 there). Version 2 cuts at the surprise itself.
int32_t Mirostat::n_kept(std::span<const float> probabilities) const {
  const size_t n = probabilities.size();
  if (version_ == 2) {
    const auto surprising = [this](float p) { return -std::log2(p) > mu_; };
    const auto first = std::find_if(probabilities.begin(), probabilities.end(), surprising);
    return static_cast<int32_t>(std::max<ptrdiff_t>(first - probabilities.begin(), 1));
  }
  double sum_tb = 0.0, sum_tt = 0.0;
  for (size_t i = 0; i + 1 < std::min(n, kEstimated) && probabilities[i + 1] > 0.0f; ++i) {
    const double t = std::log(static_cast<double>(i + 2) / static_cast<double>(i + 1));
    sum_tb += t * std::log(static_cast<double>(probabilities[i]) / static_cast<double>(probabilities[i + 1]));
    sum_tt += t * t;
  }
  if (sum_tt == 0.0) return 1;  // everything behind the first is banned
  const double s = sum_tb / sum_tt;
  const double epsilon = s - 1.0;
  const double log_vocab = std::log(static_cast<double>(n_vocab_));
  // Its limit at epsilon 0 is 1 / ln V.
  const double scale = std::abs(epsilon) < 1e-9 ? 1.0 / log_vocab : epsilon / -std::expm1(-epsilon * log_vocab);
  const double k = std::pow(scale * std::exp2(static_cast<double>(mu_)), 1.0 / s);
  if (!(k < static_cast<double>(n))) return static_cast<int32_t>(n);  // infinite and undefined (s = 0) too
  return std::max(static_cast<int32_t>(k), 1);
}

void Mirostat::reset() { mu_ = bounded(2.0 * static_cast<double>(tau_)); }

int32_t Mirostat::draw(CandidateList& candidates, const Uniform& uniform) {
  candidates.keep_top_k(n_kept(candidates.sort_for_softmax()));
  const int32_t token = draw_discrete(candidates, uniform);
  const double surprise = -std::log2(candidates.drawn_probability());
  mu_ = bounded(static_cast<double>(mu_) - static_cast<double>(eta_) * (surprise - static_cast<double>(tau_)));
  return token;
}

AdaptiveP::AdaptiveP(float target, float decay) : target_(target), decay_(std::clamp(decay, 0.0f, 0.99f)) { reset(); }

void AdaptiveP::reset() {
  total_weight_ = 1.0f / (1.0f - decay_);
  weighted_sum_ = target_ * total_weight_;
  pending_ = -1;
}

int32_t AdaptiveP::draw(CandidateList& candidates, const Uniform& uniform) {
  if (target_ < 0.0f) return draw_discrete(candidates, uniform);
  const float target = std::clamp(target_, 0.0f, 1.0f);
  const float aim = std::clamp(2.0f * target - weighted_sum_ / total_weight_, 0.0f, 1.0f);
  const std::vector<float> original = candidates.reshape([aim](float p) {
    // Near the aim a parabola, far from it a line: far candidates stay possible relative to each other.
    const float distance = std::abs(p - aim) / 0.3f;
    return 5.0f - 10.0f * distance * distance / (1.0f + distance);
  });
  const int32_t token = draw_discrete(candidates, uniform);
  pending_ = token;
  pending_probability_ = original[candidates.drawn_position()];
  return token;
}

void AdaptiveP::accept(int32_t token) {
  if (token == pending_) {
    weighted_sum_ = pending_probability_ + decay_ * weighted_sum_;
    total_weight_ = 1.0f + decay_ * total_weight_;
  }
  pending_ = -1;
}

}  // namespace v100
