// Truncation stages, temperature and the draw. f32 sums run in list order: their rounding decides close cuts.
#include "sampling/candidates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace v100 {

namespace {

// e^x for x <= 0. Below -104 the f32 result is 0.
float weight(float x) { return x < -104.0f ? 0.0f : std::exp(x); }

// Distance from the largest logit in steps of 1/8; everything from 32 on shares the last bucket.
constexpr size_t kBuckets = 257;

size_t bucket_of(float distance) { return distance < 32.0f ? static_cast<size_t>(distance * 8.0f) : kBuckets - 1; }

}  // namespace

void CandidateList::start(std::span<const float> logits) {
  whole_row_ = true;
  sorted_ = false;
  weight_sum_ = 0.0;
  list_.clear();
  largest_checked(logits);
  row_ = logits;
}

void CandidateList::start_with_part(std::vector<Candidate> part) {
  weight_sum_ = 0.0;
  replace(std::move(part));
}

void CandidateList::set_logit(int32_t token, float logit) { writable_row()[static_cast<size_t>(token)] = logit; }

std::span<float> CandidateList::writable_row() {
  if (row_.data() != copy_.data()) {
    copy_.assign(row_.begin(), row_.end());
    row_ = copy_;
  }
  return copy_;
}

void CandidateList::narrow_to_list(bool sorted) {
  whole_row_ = false;
  sorted_ = sorted;
}

float CandidateList::largest_logit() const {
  if (whole_row_) return largest(row_);
  if (sorted_) return list_.front().logit;
  return std::min_element(list_.begin(), list_.end(), comes_before)->logit;
}

void CandidateList::keep_top_k(int32_t k) {
  const size_t kept = std::min(static_cast<size_t>(k), size());
  if (whole_row_) {
    select_first(row_, kept, list_);
    return narrow_to_list(true);
  }
  if (!sorted_ && kept < list_.size() / 2) {
    std::partial_sort(list_.begin(), list_.begin() + static_cast<ptrdiff_t>(kept), list_.end(), comes_before);
  } else if (!sorted_) {
    sort_candidates(list_);
  }
  list_.resize(kept);
  sorted_ = true;
}

void CandidateList::keep_top_p(float p, int32_t min_keep) {
  const float largest = largest_logit();
  if (whole_row_) return gather_nucleus(largest, p, min_keep);
  const float sum = sum_weights(largest);
  if (!sorted_) sort_candidates(list_);
  sorted_ = true;
  cut_nucleus(largest, sum, p, min_keep);
}

float CandidateList::sum_weights(float largest) {
  float sum = 0.0f;
  for (const Candidate& c : list_) sum += weight(c.logit - largest);
  return sum;
}

// Cuts the sorted list behind the first candidate at which the running sum reaches p. False when none does.
bool CandidateList::cut_nucleus(float largest, float sum, float p, int32_t min_keep) {
  float cumulative = 0.0f;
  for (size_t i = 0; i < list_.size(); ++i) {
    cumulative += weight(list_[i].logit - largest) / sum;
    if (cumulative >= p && i + 1 >= static_cast<size_t>(min_keep)) {
      list_.resize(i + 1);
      return true;
    }
  }
  return false;
}

// Top-p of the whole row. Sorts only candidates near the largest: a histogram over the distance from it tells how far
// the nucleus reaches. Should rounding make the exact f32 walk need more, the next bucket joins.
void CandidateList::gather_nucleus(float largest, float p, int32_t min_keep) {
  std::array<double, kBuckets> mass = {};
  std::array<size_t, kBuckets> count = {};
  float sum = 0.0f;
  for (const float logit : row_) {
    const float w = weight(logit - largest);
    const size_t bucket = bucket_of(largest - logit);
    sum += w;
    mass[bucket] += static_cast<double>(w);
    ++count[bucket];
  }

  double mass_so_far = 0.0;
  size_t count_so_far = 0;
  for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
    mass_so_far += mass[bucket];
    count_so_far += count[bucket];
    const bool last = count_so_far == row_.size();
    const bool enough = mass_so_far >= static_cast<double>(p) * static_cast<double>(sum) &&
                        count_so_far >= static_cast<size_t>(std::max(min_keep, 1));
    if (count[bucket] == 0 || !(enough || last)) continue;
    list_.clear();
    if (last) {
      for (size_t i = 0; i < row_.size(); ++i) list_.push_back({static_cast<int32_t>(i), row_[i]});
    } else {
      // A superset of buckets 0 .. bucket by a hair; exact membership decides.
      append_at_least(row_, largest - static_cast<float>(bucket + 2) / 8.0f, list_);
      std::erase_if(list_, [&](const Candidate& c) { return bucket_of(largest - c.logit) > bucket; });
    }
    sort_candidates(list_);
    if (cut_nucleus(largest, sum, p, min_keep) || last) return narrow_to_list(true);
  }
}

void CandidateList::keep_min_p(float p, int32_t min_keep) {
  const float threshold = largest_logit() + std::log(p);
  const size_t least = static_cast<size_t>(std::max(min_keep, 1));
  if (whole_row_) {
    list_.clear();
    append_at_least(row_, threshold, list_);
    if (list_.size() >= least) return narrow_to_list(false);
    select_first(row_, least, list_);
    return narrow_to_list(true);
  }
  const auto passes = [&](const Candidate& c) { return c.logit >= threshold; };
  const size_t matching = static_cast<size_t>(std::count_if(list_.begin(), list_.end(), passes));
  if (!sorted_ && matching >= least) {
    std::erase_if(list_, [&](const Candidate& c) { return !passes(c); });  // keeps the order
    return;
  }
  if (!sorted_) sort_candidates(list_);
  sorted_ = true;
  list_.resize(std::min(list_.size(), std::max(matching, least)));
}

void CandidateList::apply_temperature(float temperature) {
  if (temperature <= 0.0f || !std::isfinite(largest_logit() / temperature)) return keep_first();
  if (whole_row_) {
    for (float& logit : writable_row()) logit /= temperature;
  } else {
    for (Candidate& c : list_) c.logit /= temperature;
  }
}

void CandidateList::keep_first() {
  if (whole_row_) {
    const int32_t token = first_position(row_, largest(row_));
    list_.assign(1, {token, logit(token)});
  } else {
    list_.assign(1, *std::min_element(list_.begin(), list_.end(), comes_before));
  }
  narrow_to_list(true);
}

std::span<const float> CandidateList::softmax() {
  const float largest = largest_logit();
  const size_t n = size();
  probabilities_.resize(n);
  float sum = 0.0f;
  for (size_t i = 0; i < n; ++i) sum += probabilities_[i] = weight(logit_at(i) - largest);
  for (float& p : probabilities_) p /= sum;
  return probabilities_;
}

std::span<const float> CandidateList::sort_for_softmax() {
  keep_top_k(std::numeric_limits<int32_t>::max());
  return softmax();
}

void CandidateList::replace(std::vector<Candidate> kept) {
  list_ = std::move(kept);
  narrow_to_list(std::is_sorted(list_.begin(), list_.end(), comes_before));
}

std::vector<float> CandidateList::reshape(const std::function<float(float)>& new_logit) {
  const std::span<const float> p = softmax();
  const std::span<float> row = whole_row_ ? writable_row() : std::span<float>();
  for (size_t i = 0; i < p.size(); ++i) {
    float& logit = whole_row_ ? row[i] : list_[i].logit;
    if (std::isfinite(logit)) logit = new_logit(p[i]);
  }
  sorted_ = false;
  return {p.begin(), p.end()};
}

void CandidateList::ban_below_deviations(float n) {
  if (size() < 2) return;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  double sum = 0.0;
  size_t count = 0;
  for (size_t i = 0; i < size(); ++i) {
    if (logit_at(i) == -kInfinity) continue;
    sum += static_cast<double>(logit_at(i));
    ++count;
  }
  const double mean = sum / static_cast<double>(count);
  double squares = 0.0;
  for (size_t i = 0; i < size(); ++i) {
    if (logit_at(i) == -kInfinity) continue;
    const double difference = static_cast<double>(logit_at(i)) - mean;
    squares += difference * difference;
  }
  const double deviation = std::sqrt(squares / static_cast<double>(count));
  const double threshold = static_cast<double>(largest_logit()) - static_cast<double>(n) * deviation;
  const auto ban = [=](float& logit) {
    if (static_cast<double>(logit) < threshold) logit = -kInfinity;
  };
  if (whole_row_) {
    for (float& logit : writable_row()) ban(logit);
  } else {
    for (Candidate& c : list_) ban(c.logit);
  }
}

void CandidateList::keep_typical(float p, int32_t min_keep) {
  const std::span<const float> probabilities = sort_for_softmax();
  float entropy = 0.0f;
  for (const float q : probabilities)
    if (q > 0.0f) entropy -= q * std::log(q);
  struct Scored {
    float score;
    size_t position;
  };
  std::vector<Scored> order(list_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = {std::abs(-std::log(probabilities[i]) - entropy), i};
  const auto by_score = [](const Scored& a, const Scored& b) {
    return a.score < b.score || (a.score == b.score && a.position < b.position);
  };

  std::vector<Candidate> kept;
  float cumulative = 0.0f;
  size_t in_order = 0;  // so many first places are found; of a long list few are needed
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == in_order) {
      in_order = std::min(order.size(), std::max<size_t>(2 * i, 256));
      std::partial_sort(order.begin() + static_cast<ptrdiff_t>(i), order.begin() + static_cast<ptrdiff_t>(in_order),
                        order.end(), by_score);
    }
    kept.push_back(list_[order[i].position]);
    cumulative += probabilities[order[i].position];
    if (cumulative > p && kept.size() >= static_cast<size_t>(min_keep)) break;
  }
  list_ = std::move(kept);
  sorted_ = false;
}

void CandidateList::drop_all_but_last_above(float threshold, int32_t min_keep) {
  const std::span<const float> p = sort_for_softmax();
  size_t above = 0;
  while (above < p.size() && p[above] >= threshold && p[above] > 0.0f) ++above;  // never down to a banned one
  if (above < 2 || p.size() - (above - 1) < static_cast<size_t>(min_keep)) return;
  list_.erase(list_.begin(), list_.begin() + static_cast<ptrdiff_t>(above - 1));
}

void CandidateList::apply_dynamic_temperature(float temperature, float range, float exponent) {
  if (size() < 2) return;
  constexpr float kLargestFinite = std::numeric_limits<float>::max();
  const float lowest = std::max(0.0f, temperature - range);
  const float highest = std::min(temperature + range, kLargestFinite);
  float entropy = 0.0f;
  for (const float p : sort_for_softmax())
    if (p > 0.0f) entropy -= p * std::log(p);
  const float normalised = std::max(entropy, 0.0f) / std::log(static_cast<float>(size()));
  const float share = std::min(std::pow(normalised, exponent), kLargestFinite);  // infinite: entropy 0, exponent < 0
  apply_temperature(std::min(lowest + (highest - lowest) * share, kLargestFinite));
}

int32_t CandidateList::draw(double uniform) {
  const float largest = largest_logit();
  const size_t n = size();
  weights_.resize(n);
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) {
    weights_[i] = weight(logit_at(i) - largest);
    sum += static_cast<double>(weights_[i]);
  }
  weight_sum_ = sum;

  const double target = uniform * sum;
  double cumulative = 0.0;
  size_t chosen = 0;
  for (size_t i = 0; i < n; ++i) {
    if (weights_[i] == 0.0f) continue;  // a target of exactly 0 must not pick a banned candidate
    chosen = i;
    cumulative += static_cast<double>(weights_[i]);
    if (cumulative >= target) break;
  }
  drawn_ = chosen;
  const int32_t token = token_at(chosen);
  if (whole_row_) row_ = {};  // the caller's logits may go now; probabilities() needs only their number
  return token;
}

std::vector<Candidate> CandidateList::probabilities() const {
  std::vector<Candidate> result;
  if (weight_sum_ == 0.0) return result;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const float p = static_cast<float>(static_cast<double>(weights_[i]) / weight_sum_);
    if (p > 0.0f) result.push_back({token_at(i), p});
  }
  sort_candidates(result);
  return result;
}

}  // namespace v100
