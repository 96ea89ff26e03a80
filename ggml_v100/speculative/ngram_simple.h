// `ngram-simple`: what followed the last n-gram where it occurred before.
#pragma once

#include "speculative/drafter.h"

namespace v100 {

// n: tokens that must agree; m: tokens of a draft.
struct NgramSizes {
  int32_t n, m;
};

class NgramSimple final : public Drafter {
 public:
  // Throws InvalidArgument for sizes outside 1..1024.
  explicit NgramSimple(NgramSizes sizes);
  std::string_view name() const override { return "ngram-simple"; }
  int32_t longest() const override { return sizes_.m; }
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;

 private:
  NgramSizes sizes_;
};

// Throws InvalidArgument for sizes outside 1..1024.
void check_ngram_sizes(std::string_view name, NgramSizes sizes);
// The last n - 1 tokens of a history and the token drawn after them. The history has as many.
std::vector<int32_t> last_ngram(const DraftRequest& request, int32_t n);

}  // namespace v100
