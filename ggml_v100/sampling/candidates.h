// The list of candidates that a chain narrows: the whole row at first, an explicit list after the first truncation.
//
// List order is part of the result: the draw walks the list, so the same random number may pick another token from a
// sorted list than from an unsorted one. What each stage does to order and numbers: docs/sampling.md.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "sampling/row_scan.h"

namespace v100 {

class CandidateList {
 public:
  // All tokens in id order. The row must live until draw(). Throws Error for NaN and +inf.
  void start(std::span<const float> logits);
  // Some tokens of a row, each once, in any order: those that may become the first ones.
  void start_with_part(std::vector<Candidate> part);

  // To change logits: by token in a whole row, by walking a narrowed list. New values are finite or -inf.
  bool is_whole_row() const { return whole_row_; }
  size_t size() const { return whole_row_ ? row_.size() : list_.size(); }
  float logit(int32_t token) const { return row_[static_cast<size_t>(token)]; }  // whole row only
  void set_logit(int32_t token, float logit);                                    // whole row only
  std::span<Candidate> listed() { return list_; }                                // narrowed list only
  void forget_order() { sorted_ = false; }                                       // after logits changed

  // Largest logit; -inf when every candidate is banned. The methods below require a finite one.
  float largest_logit() const;

  void keep_top_k(int32_t k);
  void keep_top_p(float p, int32_t min_keep);
  void keep_min_p(float p, int32_t min_keep);
  // Divides; at or below 0, and where the quotient of the largest logit is no longer finite, keeps only the first.
  void apply_temperature(float temperature);
  void keep_first();
  // Bans what is more than n standard deviations of the finite logits below the largest. Bans, so the list keeps its
  // length and order.
  void ban_below_deviations(float n);
  // Keeps the candidates whose surprise is nearest to the entropy, until they hold more than p; in that order.
  void keep_typical(float p, int32_t min_keep);
  // Drops all but the least likely of the candidates with at least this probability, if at least min_keep stay.
  void drop_all_but_last_above(float threshold, int32_t min_keep);
  // Temperature between T - range (at least 0) and T + range by entropy: (H / ln size)^exponent of the way.
  void apply_dynamic_temperature(float temperature, float range, float exponent);

  // Narrows to these, in this order.
  void replace(std::vector<Candidate> kept);

  // Sorts everything. The probabilities, softmax in f32, are valid until the list changes.
  std::span<const float> sort_for_softmax();
  // Replaces finite logits by new_logit(probability). Returns the probabilities in list order.
  std::vector<float> reshape(const std::function<float(float)>& new_logit);

  // uniform in [0, 1). Computes the probabilities and picks the first candidate whose cumulative one reaches `uniform`.
  int32_t draw(double uniform);
  size_t drawn_position() const { return drawn_; }  // in the list of the last draw()
  double drawn_probability() const { return static_cast<double>(weights_[drawn_]) / weight_sum_; }

  // Of the last draw(): (token, probability) in order, zeros dropped. Empty before and after a start() without draw().
  std::vector<Candidate> probabilities() const;

 private:
  float logit_at(size_t i) const { return whole_row_ ? row_[i] : list_[i].logit; }
  int32_t token_at(size_t i) const { return whole_row_ ? static_cast<int32_t>(i) : list_[i].token; }
  std::span<float> writable_row();
  void narrow_to_list(bool sorted);
  void gather_nucleus(float largest, float p, int32_t min_keep);
  float sum_weights(float largest);
  std::span<const float> softmax();
  bool cut_nucleus(float largest, float sum, float p, int32_t min_keep);

  bool whole_row_ = true;
  bool sorted_ = false;
  std::span<const float> row_;  // the caller's logits, or copy_ once a logit was changed
  std::vector<float> copy_;
  std::vector<Candidate> list_;
  std::vector<float> weights_;  // e^(logit - largest), in list order
  double weight_sum_ = 0.0;     // of the last draw; 0: none
  size_t drawn_ = 0;
  std::vector<float> probabilities_;  // of the last softmax, in list order
};

}  // namespace v100
