// Row passes on four-wide vectors of the compiler (gcc and clang, every instruction set), and the order of candidates.
#include "sampling/row_scan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace v100 {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargestFinite = std::numeric_limits<float>::max();
constexpr size_t kLanes = 4;

using FloatLanes = float __attribute__((vector_size(16)));
using IntLanes = int32_t __attribute__((vector_size(16)));

FloatLanes load(const float* from) {
  FloatLanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

FloatLanes broadcast(float value) { return FloatLanes{value, value, value, value}; }

bool any(IntLanes mask) {
  int64_t halves[2];
  std::memcpy(halves, &mask, sizeof(mask));
  return (halves[0] | halves[1]) != 0;
}

[[noreturn]] void throw_not_finite(std::span<const float> row) {
  size_t i = 0;
  while (row[i] <= kLargestFinite) ++i;
  throw Error((row[i] > 0 ? "+inf" : "NaN") + std::string(" logits: token ") + std::to_string(i) + " of " +
              std::to_string(row.size()) + "; expected finite values or -inf");
}

template <bool checked>
float scan_largest(std::span<const float> row) {
  FloatLanes largest_a = broadcast(-kInfinity), largest_b = largest_a;
  IntLanes bad_a = {}, bad_b = {};
  const FloatLanes limit = broadcast(kLargestFinite);
  size_t i = 0;
  for (; i + 2 * kLanes <= row.size(); i += 2 * kLanes) {
    const FloatLanes a = load(row.data() + i), b = load(row.data() + i + kLanes);
    largest_a = a > largest_a ? a : largest_a;
    largest_b = b > largest_b ? b : largest_b;
    if constexpr (checked) {
      bad_a |= ~(a <= limit);
      bad_b |= ~(b <= limit);
    }
  }
  bool bad = any(bad_a | bad_b);
  float result = -kInfinity;
  for (size_t lane = 0; lane < kLanes; ++lane) result = std::max({result, largest_a[lane], largest_b[lane]});
  for (; i < row.size(); ++i) {
    result = row[i] > result ? row[i] : result;
    bad |= !(row[i] <= kLargestFinite);
  }
  if (checked && bad) throw_not_finite(row);
  return result;
}

// Calls visit(position) for values that pass, in row order; the predicate comes for vectors and for scalars. Blocks
// without one are skipped whole; visit may tighten what passes.
template <typename PassesLanes, typename Passes, typename Visit>
void visit_rare(std::span<const float> row, size_t begin, PassesLanes passes_lanes, Passes passes, Visit visit) {
  constexpr size_t kBlock = 4 * kLanes;
  size_t i = begin;
  for (; i + kBlock <= row.size(); i += kBlock) {
    const float* x = row.data() + i;
    if (!any(passes_lanes(load(x)) | passes_lanes(load(x + kLanes)) | passes_lanes(load(x + 2 * kLanes)) |
             passes_lanes(load(x + 3 * kLanes))))
      continue;
    for (size_t j = i; j < i + kBlock; ++j)
      if (passes(row[j])) visit(j);
  }
  for (; i < row.size(); ++i)
    if (passes(row[i])) visit(i);
}

Candidate candidate_at(std::span<const float> row, size_t i) { return {static_cast<int32_t>(i), row[i]}; }

// Ascending keys = falling values.
uint32_t falling_key(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes +0
  return (bits >> 31) != 0 ? bits : ~bits & 0x7fffffffu;
}

// Stable: candidates of equal keys keep their order.
template <typename Key>
void radix_sort(std::vector<Candidate>& candidates, Key key) {
  constexpr int kDigitBits = 11, kPasses = 3;
  constexpr uint32_t kDigits = 1u << kDigitBits;
  const auto digit = [&](const Candidate& c, size_t pass) { return key(c) >> (pass * kDigitBits) & (kDigits - 1); };
  std::array<std::array<uint32_t, kDigits>, kPasses> starts = {};
  for (const Candidate& c : candidates)
    for (size_t pass = 0; pass < kPasses; ++pass) ++starts[pass][digit(c, pass)];
  std::vector<Candidate> other(candidates.size());
  for (size_t pass = 0; pass < kPasses; ++pass) {
    uint32_t start = 0;
    for (uint32_t& count : starts[pass]) start += std::exchange(count, start);
    for (const Candidate& c : candidates) other[starts[pass][digit(c, pass)]++] = c;
    candidates.swap(other);
  }
}

// e^x for x <= 0; below -87 the value at -87, which is nothing beside the e^0 of the largest.
FloatLanes exp_lanes(FloatLanes x) {
  const FloatLanes lowest = broadcast(-87.0f);
  x = x > lowest ? x : lowest;
  // Adding 1.5 * 2^23 rounds to an integer n, which then stands in the low bits.
  const FloatLanes round = broadcast(12582912.0f);
  const FloatLanes shifted = x * 1.44269504088896341f + round;
  const FloatLanes n = shifted - round;
  const FloatLanes r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;  // ln 2 in two parts
  FloatLanes p = broadcast(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const IntLanes exponent = (std::bit_cast<IntLanes>(shifted) + 127) << 23;
  return p * std::bit_cast<FloatLanes>(exponent);
}

// The order of these sums is that of cuda/kernels/sampling.cu, too.
constexpr size_t kSumChunk = 2048;

double sum_exp_of_chunk(std::span<const float> row, float shift) {
  constexpr size_t kBlock = 4 * kLanes;
  double sums[kLanes] = {};
  size_t i = 0;
  for (; i + kBlock <= row.size(); i += kBlock) {
    const float* x = row.data() + i;
    const FloatLanes part = (exp_lanes(load(x) - shift) + exp_lanes(load(x + kLanes) - shift)) +
                            (exp_lanes(load(x + 2 * kLanes) - shift) + exp_lanes(load(x + 3 * kLanes) - shift));
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += static_cast<double>(part[lane]);
  }
  double total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (; i < row.size(); ++i) total += static_cast<double>(exp_lanes(broadcast(row[i] - shift))[0]);
  return total;
}

}  // namespace

float largest(std::span<const float> row) { return scan_largest<false>(row); }

float largest_checked(std::span<const float> row) { return scan_largest<true>(row); }

int32_t first_position(std::span<const float> row, float value) {
  constexpr size_t kBlock = 4 * kLanes;
  size_t i = 0;
  for (; i + kBlock <= row.size(); i += kBlock) {
    const float* x = row.data() + i;
    if (any((load(x) == value) | (load(x + kLanes) == value) | (load(x + 2 * kLanes) == value) |
            (load(x + 3 * kLanes) == value)))
      break;
  }
  while (i < row.size() && row[i] != value) ++i;
  return static_cast<int32_t>(i);
}

void append_at_least(std::span<const float> row, float threshold, std::vector<Candidate>& out) {
  visit_rare(
      row, 0, [=](FloatLanes x) { return x >= threshold; }, [=](float x) { return x >= threshold; },
      [&](size_t i) { out.push_back(candidate_at(row, i)); });
}

void select_first(std::span<const float> row, size_t k, std::vector<Candidate>& out) {
  out.clear();
  k = std::min(k, row.size());
  if (k == 0) return;
  // Until it is full every value enters; then only what is above the k-th best so far (later ids lose ties).
  const size_t capacity = std::min(row.size(), std::max<size_t>(4 * k, 256));
  out.reserve(capacity);
  for (size_t i = 0; i < capacity; ++i) out.push_back(candidate_at(row, i));
  float threshold = -kInfinity;
  const auto cut = [&] {
    std::nth_element(out.begin(), out.begin() + static_cast<ptrdiff_t>(k - 1), out.end(), comes_before);
    out.resize(k);
    threshold = out.back().logit;
  };
  if (k < out.size()) cut();
  visit_rare(
      row, capacity, [&](FloatLanes x) { return x > threshold; }, [&](float x) { return x > threshold; },
      [&](size_t i) {
        out.push_back(candidate_at(row, i));
        if (out.size() == capacity) cut();
      });
  if (k < out.size()) cut();
  sort_candidates(out);
}

void select_first_of_untrusted(std::span<const float> row, size_t k, std::vector<Candidate>& out) {
  std::vector<float> defined;  // stays empty for almost every row
  const auto replace = [&](size_t i) {
    if (defined.empty()) defined.assign(row.begin(), row.end());
    defined[i] = -kInfinity;
  };
  visit_rare(row, 0, [](FloatLanes x) { return x != x; }, [](float x) { return std::isnan(x); }, replace);
  select_first(defined.empty() ? row : defined, k, out);
}

void sort_candidates(std::vector<Candidate>& candidates) {
  constexpr size_t kRadixPays = 2000;
  if (candidates.size() < kRadixPays) {
    std::sort(candidates.begin(), candidates.end(), comes_before);
    return;
  }
  const auto by_token = [](const Candidate& a, const Candidate& b) { return a.token < b.token; };
  if (!std::is_sorted(candidates.begin(), candidates.end(), by_token))
    radix_sort(candidates, [](const Candidate& c) { return static_cast<uint32_t>(c.token); });
  radix_sort(candidates, [](const Candidate& c) { return falling_key(c.logit); });
}

double sum_exp(std::span<const float> row, float shift) {
  double sum = 0.0;
  for (size_t begin = 0; begin < row.size(); begin += kSumChunk)
    sum += sum_exp_of_chunk(row.subspan(begin, std::min(kSumChunk, row.size() - begin)), shift);
  return sum;
}

}  // namespace v100
