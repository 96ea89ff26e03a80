// Infill: for text between a prefix and a suffix. It ends the text where ending is likely enough, joins candidates of which
// one begins with the other, and keeps only what is likely. The rule, step by step: docs/sampling.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sampling/candidates.h"

namespace v100 {

// What the stage must know of a vocabulary. Immutable, shared by the samplers of one model.
class InfillVocabulary {
 public:
  // texts: the bytes of every token, empty where it has none (control tokens); end_tokens: those that end a generation;
  // end: the one that stands for them where nothing else is left. Throws InvalidArgument for ids outside the texts.
  InfillVocabulary(const std::vector<std::string>& texts, std::span<const int32_t> end_tokens, int32_t end);

  int32_t size() const { return static_cast<int32_t>(order_.size()); }
  int32_t end() const { return end_; }
  bool is_end(int32_t token) const { return is_end_[static_cast<size_t>(token)] != 0; }

  // Tokens are numbered by their texts' order; those whose text begins with a token's text are neighbours. An empty text
  // is taken to begin none.
  struct Range {
    int32_t begin, end;
  };
  int32_t order(int32_t token) const { return order_[static_cast<size_t>(token)]; }
  Range begun_by(int32_t token) const { return begun_by_[static_cast<size_t>(token)]; }

 private:
  std::vector<int32_t> order_;
  std::vector<Range> begun_by_;
  std::vector<uint8_t> is_end_;
  int32_t end_;
};

// Requires one candidate that is not banned.
void apply_infill(const InfillVocabulary& vocabulary, CandidateList& candidates);

}  // namespace v100
