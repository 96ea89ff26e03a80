// The infill stage. f32 sums run in list order, as elsewhere in the chain.
#include "sampling/infill.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace v100 {

namespace {

constexpr float kLeast = 0.2f;  // probability of a text after joining

struct Entry {
  Candidate candidate;
  float probability;

  bool is_banned() const { return candidate.logit == -std::numeric_limits<float>::infinity(); }
};

// Where a text begins with another one, the likelier of the two takes the probability of both.
void join_beginnings(const InfillVocabulary& vocabulary, std::vector<Entry>& entries) {
  std::vector<size_t> by_text(entries.size());
  std::iota(by_text.begin(), by_text.end(), size_t{0});
  const auto text_order = [&](size_t i) { return vocabulary.order(entries[i].candidate.token); };
  std::sort(by_text.begin(), by_text.end(), [&](size_t a, size_t b) { return text_order(a) < text_order(b); });

  std::vector<size_t> longer;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].is_banned()) continue;
    const auto range = vocabulary.begun_by(entries[i].candidate.token);
    const auto before = [&](size_t position, int32_t order) { return text_order(position) < order; };
    const auto first = std::lower_bound(by_text.begin(), by_text.end(), range.begin, before);
    const auto last = std::lower_bound(first, by_text.end(), range.end, before);
    longer.assign(first, last);
    std::sort(longer.begin(), longer.end());  // pairs are looked at in list order
    for (const size_t j : longer) {
      if (entries[i].is_banned()) break;
      if (j == i || entries[j].is_banned()) continue;
      const bool takes_over = entries[j].probability > entries[i].probability;
      Entry& kept = entries[takes_over ? j : i];
      Entry& dropped = entries[takes_over ? i : j];
      kept.probability += dropped.probability;
      dropped.probability = 0.0f;
      dropped.candidate.logit = -std::numeric_limits<float>::infinity();
    }
  }
}

// Drops texts below the probability; the rest add up to 1 again. Returns how many texts stay.
size_t keep_likely(const InfillVocabulary& vocabulary, float least, std::vector<Entry>& entries) {
  std::erase_if(entries,
                [&](const Entry& e) { return e.probability < least && !vocabulary.is_end(e.candidate.token); });
  float sum = 0.0f;
  size_t n_texts = 0;
  for (const Entry& e : entries) {
    sum += e.probability;
    n_texts += !vocabulary.is_end(e.candidate.token);
  }
  for (Entry& e : entries) e.probability /= sum;
  return n_texts;
}

}  // namespace

InfillVocabulary::InfillVocabulary(const std::vector<std::string>& texts, std::span<const int32_t> end_tokens,
                                   int32_t end)
    : order_(texts.size()), begun_by_(texts.size()), is_end_(texts.size()), end_(end) {
  const auto require_token = [&](int32_t token) {
    if (token < 0 || static_cast<size_t>(token) >= texts.size())
      throw InvalidArgument("infill: end token " + std::to_string(token) + " is outside the vocabulary of " +
                            std::to_string(texts.size()));
  };
  require_token(end);
  for (const int32_t token : end_tokens) {
    require_token(token);
    is_end_[static_cast<size_t>(token)] = 1;
  }
  std::vector<int32_t> sorted(texts.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  const auto text = [&](int32_t token) -> std::string_view { return texts[static_cast<size_t>(token)]; };
  std::sort(sorted.begin(), sorted.end(),
            [&](int32_t a, int32_t b) { return text(a) != text(b) ? text(a) < text(b) : a < b; });
  for (size_t i = 0; i < sorted.size(); ++i) order_[static_cast<size_t>(sorted[i])] = static_cast<int32_t>(i);
  // Texts that begin with this one follow it; walking backwards, the end of the range is where one of them ends its own.
  for (size_t i = sorted.size(); i-- > 0;) {
    const std::string_view begin = text(sorted[i]);
    size_t last = i + 1;
    while (last < sorted.size() && text(sorted[last]).starts_with(begin))
      last = static_cast<size_t>(begun_by_[static_cast<size_t>(sorted[last])].end);
    begun_by_[static_cast<size_t>(sorted[i])] = {static_cast<int32_t>(i), static_cast<int32_t>(last)};
  }
  // Equal texts begin each other, so their ranges are the first one's.
  for (size_t i = 1; i < sorted.size(); ++i)
    if (text(sorted[i]) == text(sorted[i - 1]))
      begun_by_[static_cast<size_t>(sorted[i])] = begun_by_[static_cast<size_t>(sorted[i - 1])];
  for (size_t token = 0; token < texts.size(); ++token)
    if (texts[token].empty()) begun_by_[token] = {0, 0};
}

void apply_infill(const InfillVocabulary& vocabulary, CandidateList& candidates) {
  const std::span<const float> p = candidates.sort_for_softmax();
  std::vector<Entry> entries;
  entries.reserve(p.size());
  float end_sum = 0.0f, text_sum = 0.0f;
  for (size_t i = 0; i < p.size(); ++i) {
    const Candidate candidate = candidates.listed()[i];
    (vocabulary.is_end(candidate.token) ? end_sum : text_sum) += p[i];
    entries.push_back({candidate, p[i]});
  }
  if (3.0f * end_sum * static_cast<float>(entries.size()) > text_sum) {
    std::erase_if(entries, [&](const Entry& e) { return !vocabulary.is_end(e.candidate.token); });
  } else {
    join_beginnings(vocabulary, entries);
    const size_t n_texts = keep_likely(vocabulary, kLeast, entries);
    if (n_texts == 0) {
      entries.assign(1, {{vocabulary.end(), 1.0f}, 1.0f});
    } else {
      keep_likely(vocabulary, 1.0f / static_cast<float>(n_texts + 1), entries);
    }
  }
  std::vector<Candidate> kept;
  for (const Entry& e : entries) kept.push_back(e.candidate);
  candidates.replace(std::move(kept));
}

}  // namespace v100
