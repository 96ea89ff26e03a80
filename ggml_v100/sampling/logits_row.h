// What a sampler is shown of a row of logits: all of it, or the part that decides (Sampler::needs), where the row lies on a
// device and most of it need not come to the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sampling/row_scan.h"

namespace v100 {

// A part of a row: its `largest` values and those of some tokens.
struct RowNeeds {
  int32_t largest = 0;
  std::vector<int32_t> tokens;  // each once
};

class LogitsRow {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): a whole row is the usual one
  LogitsRow(std::span<const float> all) : all_(all), n_vocab_(all.size()) {}
  // largest: in order (comes_before), no NaN or +infinity. listed: of the tokens asked for, which may be among the largest.
  LogitsRow(size_t n_vocab, std::span<const Candidate> largest, std::span<const Candidate> listed)
      : largest_(largest), listed_(listed), n_vocab_(n_vocab) {}

  size_t n_vocab() const { return n_vocab_; }
  bool is_whole() const { return !all_.empty(); }
  std::span<const float> all() const { return all_; }  // of a whole row
  // Of a part: each token once, in no order.
  std::vector<Candidate> part() const {
    std::vector<Candidate> part(largest_.begin(), largest_.end());
    for (const Candidate& c : listed_)
      if (std::ranges::none_of(largest_, [&](const Candidate& other) { return other.token == c.token; }))
        part.push_back(c);
    return part;
  }

 private:
  std::span<const float> all_;
  std::span<const Candidate> largest_, listed_;
  size_t n_vocab_;
};

}  // namespace v100
