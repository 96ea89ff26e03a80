// Draws with random chains from random rows, once from the whole row and once from the part that Sampler::needs names, and
// compares tokens and candidates bit for bit, step after step, with drafts in between.
//
// usage: row_needs_driver SEED CHAINS. Prints "compared N" (steps where a part sufficed) and "whole N"; exit status 1 and what
// differs on stderr.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <vector>

#include "sampling/sampler.h"

namespace {

using v100::SamplerStage;

struct Choices {
  std::mt19937 generator;

  int32_t below(int32_t n) { return static_cast<int32_t>(generator() % static_cast<uint32_t>(n)); }
  bool coin() { return below(2) == 0; }
  template <class Value>
  Value one_of(std::vector<Value> values) {
    return values[static_cast<size_t>(below(static_cast<int32_t>(values.size())))];
  }
};

v100::SamplerParams chain(Choices& choices, int32_t n_vocab) {
  v100::SamplerParams p{};
  p.seed = choices.generator();
  p.temperature = choices.one_of<float>({0.0f, 0.7f, 1.0f, 3.0f});
  p.dynatemp_range = choices.one_of<float>({0.0f, 0.0f, 0.5f});
  p.dynatemp_exponent = 1.0f;
  p.top_k = choices.one_of<int32_t>({0, 1, 2, 40, 250, 300});
  p.top_p = choices.one_of<float>({1.0f, 0.9f});
  p.min_p = choices.one_of<float>({0.0f, 0.05f});
  p.top_n_sigma = choices.one_of<float>({-1.0f, -1.0f, 2.0f});
  p.typical_p = choices.one_of<float>({1.0f, 1.0f, 0.8f});
  p.xtc_probability = choices.one_of<float>({0.0f, 0.0f, 0.5f});
  p.xtc_threshold = 0.1f;
  p.min_keep = choices.below(3);
  p.repeat_last_n = choices.one_of<int32_t>({0, 3, 64, 300});
  p.repeat_penalty = choices.one_of<float>({1.0f, 1.3f, 0.6f});
  p.presence_penalty = choices.one_of<float>({0.0f, 1.0f, -2.0f});
  p.frequency_penalty = choices.one_of<float>({0.0f, 0.4f});
  p.dry = {choices.one_of<float>({0.0f, 0.0f, 0.0f, 0.8f}), 1.75f, 1, 64};
  p.mirostat = choices.below(8) == 0 ? 2 : 0;
  p.mirostat_tau = 5.0f, p.mirostat_eta = 0.1f;
  p.adaptive_target = 0.5f, p.adaptive_decay = 0.9f;
  for (int32_t i = choices.coin() ? 0 : choices.below(6); i > 0; --i)
    p.logit_bias.push_back({choices.below(n_vocab), choices.one_of<float>({-INFINITY, -3.0f, 2.0f, 30.0f})});
  p.stages = {SamplerStage::penalties, SamplerStage::dry,   SamplerStage::top_n_sigma,
              SamplerStage::top_k,     SamplerStage::typ_p, SamplerStage::top_p,
              SamplerStage::min_p,     SamplerStage::xtc,   SamplerStage::temperature};
  if (choices.below(4) == 0) std::shuffle(p.stages.begin(), p.stages.end(), choices.generator);
  if (choices.below(6) == 0) p.stages.push_back(SamplerStage::adaptive_p);
  return p;
}

// With many equal values, both zeros and some that are banned.
std::vector<float> row(Choices& choices, int32_t n_vocab) {
  std::normal_distribution<float> normal(0.0f, 4.0f);
  std::vector<float> row(static_cast<size_t>(n_vocab));
  const float step = choices.one_of<float>({0.0f, 0.5f, 4.0f});
  for (float& x : row) {
    x = normal(choices.generator);
    if (step > 0.0f) x = std::round(x / step) * step;
    if (choices.below(20) == 0) x = -INFINITY;
  }
  row[0] = 1.0f;
  return row;
}

bool same(const std::vector<v100::TokenProbability>& a, const std::vector<v100::TokenProbability>& b) {
  return std::ranges::equal(a, b,
                            [](const auto& x, const auto& y) { return x.token == y.token && x.value == y.value; });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Choices choices{std::mt19937(static_cast<uint32_t>(std::atoi(argv[1])))};
  int compared = 0, whole = 0;
  for (int i = 0; i < std::atoi(argv[2]); ++i) {
    const int32_t n_vocab = choices.one_of<int32_t>({5, 300, 2000});
    v100::Sampler a(n_vocab, chain(choices, n_vocab));
    std::optional<v100::Sampler> b;
    for (int step = 0; step < 12; ++step) {
      const std::vector<float> logits = row(choices, n_vocab);
      const std::vector<int32_t> draft{choices.below(n_vocab), choices.below(n_vocab)};
      const std::optional<v100::RowNeeds> needs = a.needs(draft);
      a.accept(std::span(draft).first(static_cast<size_t>(choices.below(3))));  // what stands of it
      b.emplace(a);
      if (!needs) {
        ++whole;
        a.accept({{choices.below(n_vocab)}});
        continue;
      }
      std::vector<v100::Candidate> largest, listed;
      v100::select_first(logits, static_cast<size_t>(needs->largest), largest);
      for (const int32_t token : needs->tokens) listed.push_back({token, logits[static_cast<size_t>(token)]});
      const v100::LogitsRow part(logits.size(), largest, listed);
      const bool draws = choices.coin() || !a.draws_from_distribution();
      const auto expected =
          draws ? std::vector<v100::TokenProbability>{} : a.distribution(std::span<const float>(logits));
      const auto found = draws ? expected : b->distribution(part);
      const int32_t token = a.sample(std::span<const float>(logits)), drawn = b->sample(part);
      if (token != drawn || !same(expected, found) || !same(a.candidates(), b->candidates())) {
        std::fprintf(stderr, "chain %d, step %d: token %d from the whole row, %d from its part\n", i, step, token,
                     drawn);
        return 1;
      }
      a.accept({{token}});
      ++compared;
    }
  }
  std::printf("compared %d\nwhole %d\n", compared, whole);
  return 0;
}
