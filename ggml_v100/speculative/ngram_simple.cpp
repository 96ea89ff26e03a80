// The newest earlier occurrence counts, found by walking back.
#include "speculative/ngram_simple.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace v100 {

void check_ngram_sizes(std::string_view name, NgramSizes sizes) {
  constexpr int32_t kMost = 1024;
  for (const auto& [what, size] : {std::pair{"n", sizes.n}, std::pair{"m", sizes.m}})
    if (size < 1 || size > kMost)
      throw InvalidArgument(std::string(name) + ": size " + what + " is " + std::to_string(size) + ", expected 1 to " +
                            std::to_string(kMost));
}

std::vector<int32_t> last_ngram(const DraftRequest& request, int32_t n) {
  const auto tail = request.history.last(static_cast<size_t>(n - 1));
  std::vector<int32_t> ngram(tail.begin(), tail.end());
  ngram.push_back(request.last);
  return ngram;
}

NgramSimple::NgramSimple(NgramSizes sizes) : sizes_(sizes) { check_ngram_sizes(name(), sizes); }

void NgramSimple::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  const auto [n, m] = sizes_;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto history = requests[i].history;
    const auto length = static_cast<int32_t>(history.size());
    if (length <= n + m + 1) continue;
    const std::vector<int32_t> ngram = last_ngram(requests[i], n);
    for (int32_t at = length - n - 1; at >= 1; --at) {
      if (!std::equal(ngram.begin(), ngram.end(), history.begin() + at)) continue;
      const auto following = history.subspan(static_cast<size_t>(at + n));
      const size_t count = std::min(static_cast<size_t>(m), following.size());
      if (count >= static_cast<size_t>(n))  // shorter ones are the n-gram running into itself
        drafts[i].tokens.assign(following.begin(), following.begin() + static_cast<ptrdiff_t>(count));
      break;
    }
  }
}

}  // namespace v100
