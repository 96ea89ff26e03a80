// Passes over one whole row of logits (a vocabulary of up to some 250 000), written so that they run on vector units.
//
// Order of candidates everywhere: falling logit, equal logits by rising token id. -0 equals +0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace v100 {

struct Candidate {
  int32_t token;
  float logit;
};

inline bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Largest value; -inf for an empty row. NaN is undefined.
float largest(std::span<const float> row);

// The same for untrusted rows: throws Error that names the first position of NaN or +inf.
float largest_checked(std::span<const float> row);

// First position of `value`, which the row holds.
int32_t first_position(std::span<const float> row, float value);

// Appends (position, value) of every value >= threshold, in row order.
void append_at_least(std::span<const float> row, float threshold, std::vector<Candidate>& out);

// out := the min(k, size) first candidates in order. One pass with a rising threshold, no sort of the row.
void select_first(std::span<const float> row, size_t k, std::vector<Candidate>& out);

// The same for untrusted rows: NaN counts as -inf.
void select_first_of_untrusted(std::span<const float> row, size_t k, std::vector<Candidate>& out);

// Puts candidates in order. Long lists take a radix sort.
void sort_candidates(std::vector<Candidate>& candidates);

// Sum of e^(value - shift) for shift >= every value. Relative error below 1e-6: e^x in f32 to 3e-7, sums in f64.
double sum_exp(std::span<const float> row, float shift);

}  // namespace v100
