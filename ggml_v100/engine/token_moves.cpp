// Search for runs by the automaton of Knuth, Morris and Pratt: hostile texts of equal tokens take no longer than others.
#include "engine/token_moves.h"

#include <algorithm>

namespace v100 {

namespace {

// Where `pattern` stands first in `text`; the size of `text` when nowhere.
size_t first_occurrence(std::span<const int32_t> text, std::span<const int32_t> pattern) {
  std::vector<size_t> border(pattern.size(), 0);  // of each beginning: the longest end that is a shorter beginning
  for (size_t i = 1, n = 0; i < pattern.size(); ++i) {
    while (n > 0 && pattern[i] != pattern[n]) n = border[n - 1];
    if (pattern[i] == pattern[n]) ++n;
    border[i] = n;
  }
  for (size_t i = 0, n = 0; i < text.size(); ++i) {
    while (n > 0 && text[i] != pattern[n]) n = border[n - 1];
    if (text[i] == pattern[n]) ++n;
    if (n == pattern.size()) return i + 1 - n;
  }
  return text.size();
}

size_t common_length(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t end = std::min(a.size(), b.size());
  size_t n = 0;
  while (n < end && a[n] == b[n]) ++n;
  return n;
}

}  // namespace

ChunkPlan plan_chunks(std::span<const int32_t> held, std::span<const int32_t> wanted, int32_t most, int32_t least) {
  const size_t limit = static_cast<size_t>(most), run = static_cast<size_t>(least);
  ChunkPlan plan;
  size_t to = std::min(common_length(held, wanted), limit), from = to;
  plan.common = static_cast<int32_t>(to);
  while (to < limit && wanted.size() - to >= run && held.size() - from >= run) {
    const auto rest = held.subspan(from);
    const size_t skipped = first_occurrence(rest, wanted.subspan(to, run));
    if (skipped == rest.size()) break;
    from += skipped;
    const size_t matched = common_length(held.subspan(from), wanted.subspan(to));
    const size_t length = std::min(matched, limit - to);
    plan.moves.push_back({static_cast<int32_t>(from), static_cast<int32_t>(to), static_cast<int32_t>(length)});
    to += length;
    from += matched;
  }
  plan.length = static_cast<int32_t>(to);
  return plan;
}

}  // namespace v100
