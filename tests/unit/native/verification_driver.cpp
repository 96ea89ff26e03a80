// Draws the first three tokens of a text many times with drafts that are drawn, and prints how often each triple came.
//
// The "model" gives fixed random logits for every prefix, the "drafter" other ones; vocabulary of V tokens.
// usage: verification_driver SAMPLES MODE CASE DRAFT SEED   MODE: none, match, reject   CASE: see sampler_of
//        DRAFT: far (unlike the model), near, equal, narrow (two candidates)
// Output: V^3 lines "COUNT PROBABILITY": the triple's count, and its probability by the sampler's own distributions. CASE xtc
// has probabilities of 0: compare with MODE none.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "sampling/verification.h"

namespace {

using v100::Proposal;
using v100::Sampler;
using v100::SamplerParams;
using v100::SamplerStage;

constexpr int32_t V = 6;
constexpr int32_t kForgotten = V;  // a token that never comes: histories full of it are empty ones
constexpr int32_t kVocabulary = V + 1;
constexpr int32_t kHistory = 8;

SamplerParams sampler_of(const std::string& name, uint32_t seed) {
  SamplerParams p{};
  p.seed = seed;
  p.temperature = 1.0f;
  p.dynatemp_exponent = 1.0f;
  p.top_p = 1.0f;
  p.typical_p = 1.0f;
  p.xtc_threshold = 0.1f;
  p.repeat_penalty = 1.0f;
  p.mirostat_tau = 5.0f;
  p.mirostat_eta = 0.1f;
  p.adaptive_target = -1.0f;
  p.adaptive_decay = 0.9f;
  p.dry.base = 1.75f;
  p.stages = {SamplerStage::penalties, SamplerStage::top_k, SamplerStage::typ_p, SamplerStage::top_p,
              SamplerStage::min_p,     SamplerStage::xtc,   SamplerStage::temperature};
  if (name == "cold") p.temperature = 0.5f;
  if (name == "top_k" || name == "all") p.top_k = 4;
  if (name == "top_p" || name == "all") p.top_p = 0.8f;
  if (name == "min_p" || name == "all") p.min_p = 0.1f;
  if (name == "typical") p.typical_p = 0.7f;
  if (name == "xtc") p.xtc_probability = 0.5f;
  if (name == "dynamic") p.dynatemp_range = 0.5f;
  if (name == "penalties" || name == "all") {
    p.repeat_last_n = kHistory;
    p.repeat_penalty = 1.4f;
    p.frequency_penalty = 0.3f;
    p.presence_penalty = 0.4f;
  }
  if (name == "bias") p.logit_bias = {{2, -std::numeric_limits<float>::infinity()}, {3, 1.5f}};
  return p;
}

// Of a prefix: every one has its own.
int32_t code_of(const std::vector<int32_t>& prefix) {
  int32_t code = 0;
  for (const int32_t token : prefix) code = code * V + token + 1;
  return code;
}

const std::vector<float>& random_row(uint32_t salt, const std::vector<int32_t>& prefix) {
  static std::unordered_map<int32_t, std::vector<float>> rows[3];
  const int32_t code = code_of(prefix);
  std::vector<float>& row = rows[salt][code];
  if (row.empty()) {
    std::mt19937 numbers(salt * 1000003u + static_cast<uint32_t>(code));
    for (int32_t i = 0; i < V; ++i) row.push_back(static_cast<float>(numbers()) * 0x1p-32f * 4.0f - 2.0f);
    row.push_back(-std::numeric_limits<float>::infinity());
  }
  return row;
}

std::vector<float> drafter_row(const std::string& kind, const std::vector<int32_t>& prefix) {
  std::vector<float> row = random_row(1, prefix);
  const std::vector<float>& other = random_row(2, prefix);
  if (kind == "far") return other;
  if (kind == "near")
    for (size_t i = 0; i < V; ++i) row[i] += 0.3f * other[i];
  return row;
}

Proposal softmax(const std::vector<float>& row, const std::string& kind) {
  Proposal q;
  const int32_t n = kind == "narrow" ? 2 : V;
  double sum = 0.0;
  for (int32_t i = 0; i < n; ++i) sum += std::exp(static_cast<double>(row[static_cast<size_t>(i)]));
  for (int32_t i = 0; i < n; ++i)
    q.push_back({i, static_cast<float>(std::exp(static_cast<double>(row[static_cast<size_t>(i)])) / sum)});
  return q;
}

const Proposal& proposal_of(const std::string& kind, const std::vector<int32_t>& prefix) {
  static std::unordered_map<int32_t, Proposal> proposals;
  Proposal& q = proposals[code_of(prefix)];
  if (q.empty()) q = softmax(drafter_row(kind, prefix), kind);
  return q;
}

int32_t draw(const Proposal& q, std::mt19937& numbers) {
  const double uniform = static_cast<double>(numbers()) * 0x1p-32;
  double reached = 0.0;
  for (const auto& candidate : q) {
    reached += static_cast<double>(candidate.value);
    if (reached > uniform) return candidate.token;
  }
  return q.back().token;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const int samples = std::atoi(argv[1]);
  const std::string mode = argv[2], sampler_case = argv[3], kind = argv[4];
  const auto first_seed = static_cast<uint32_t>(std::atoi(argv[5]));
  std::vector<int64_t> counts(V * V * V);
  std::mt19937 draft_numbers(first_seed + 77);
  Sampler sampler(kVocabulary, sampler_of(sampler_case, first_seed));
  const std::vector<int32_t> forgotten(kHistory, kForgotten);
  for (int s = 0; s < samples; ++s) {
    sampler.accept(forgotten);
    std::vector<int32_t> text;
    while (text.size() < 3) {
      std::vector<int32_t> draft, prefix = text;
      std::vector<Proposal> proposals;
      while (mode != "none" && prefix.size() < 2) {  // no further than the text: all draw as many random numbers
        const Proposal& q = proposal_of(kind, prefix);
        draft.push_back(draw(q, draft_numbers));
        proposals.push_back(q);
        prefix.push_back(draft.back());
      }
      if (mode == "match") proposals.clear();
      v100::Verification verification(sampler, draft, proposals, {});
      while (!verification.is_decided()) text.push_back(verification.next(std::span(random_row(1, text))));
    }
    ++counts[static_cast<size_t>((text[0] * V + text[1]) * V + text[2])];
  }
  for (int32_t a = 0; a < V; ++a)
    for (int32_t b = 0; b < V; ++b)
      for (int32_t c = 0; c < V; ++c) {
        Sampler exact(kVocabulary, sampler_of(sampler_case, 1));
        double probability = 1.0;
        std::vector<int32_t> prefix;
        for (const int32_t token : {a, b, c}) {
          double p = 0.0;
          if (probability > 0.0 && sampler_case != "xtc")
            for (const auto& candidate : exact.distribution(std::span(random_row(1, prefix))))
              if (candidate.token == token) p = static_cast<double>(candidate.value);
          probability *= p;
          exact.accept({&token, 1});
          prefix.push_back(token);
        }
        std::printf("%lld %.12g\n", static_cast<long long>(counts[static_cast<size_t>((a * V + b) * V + c)]), probability);
      }
  return 0;
}
