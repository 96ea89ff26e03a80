// Hashes of n-grams: which rows of a memory table the last few tokens name.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace v100 {

// For each n from 2 to ngram_size there are `heads` hashes of n tokens.
struct NgramHash {
  int32_t ngram_size = 0;
  int32_t heads = 0;
  int32_t eos = 0;                       // ends what an n-gram reaches back to
  std::vector<uint64_t> multipliers;     // [ngram_size]
  std::vector<uint64_t> offsets, sizes;  // [hashes()], the part of the table that each hash names rows of

  int32_t hashes() const { return (ngram_size - 1) * heads; }

  // Table rows of the token at `index`, [hashes()]. tokens: the ids of the sequence, at least up to it.
  //   c_0 the token itself, c_s the one s places before it, or eos where that one, or one between, is eos or missing;
  //   row = (c_0 m_0 xor ... xor c_(n-1) m_(n-1)) mod size + offset, all in 64 bits that wrap around.
  void rows_of(std::span<const int32_t> tokens, int32_t index, int32_t* rows) const;
};

}  // namespace v100
