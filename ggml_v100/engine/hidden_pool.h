// Pooling: the hidden states of a text's tokens become its embedding. The text may come in pieces of any size; the result
// is the same bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/hyperparameters.h"

namespace v100 {

class HiddenPool {
 public:
  // hidden: features of a hidden state. Throws InvalidArgument when it is not positive.
  HiddenPool(PoolingType type, int32_t hidden);

  PoolingType type() const { return type_; }
  int32_t hidden() const { return hidden_; }
  int32_t n_tokens() const { return n_tokens_; }  // of the text so far
  bool is_complete() const { return is_complete_; }

  // What is known so far, and once the text has ended its embedding:
  //   none  [tokens, hidden], each token's own            mean  [hidden], f64 sums in order of the tokens, rounded once
  //   cls   [hidden], the first token's                   last  [hidden], the last token's
  //   rank  [labels], what the classification head makes of the last token's
  std::vector<float> values() const;

  // ---- for the engine

  // Whether the state of the token at `index` is needed; ends: it is the last one of the text.
  bool wants(int32_t index, bool ends) const;
  // The next wanted token's hidden state, or with `rank` its scores. In order.
  void add(std::span<const float> state);
  // The tokens of a piece are through.
  void advance(int32_t n_tokens, bool ends);
  // Forget everything.
  void reset() noexcept;

 private:
  PoolingType type_;
  int32_t hidden_;
  int32_t n_tokens_ = 0;
  bool is_complete_ = false;
  std::vector<double> sums_;   // mean
  std::vector<float> states_;  // others
};

}  // namespace v100
