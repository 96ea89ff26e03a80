// Which tokens of a sequence can serve another text after moving to other positions. Lists of tokens only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace v100 {

// The tokens [from, from + length) move to [to, to + length); to <= from.
struct TokenMove {
  int32_t from, to, length;
};

// How `wanted` can begin with tokens of `held`: the common beginning, then runs of at least `least` tokens of `held` in
// their order, each the first that goes on where the last one ended. Runs are cut at `most` tokens of `wanted`.
// least > 0. Takes time linear in both lengths.
struct ChunkPlan {
  int32_t common = 0;            // tokens that stay where they are
  std::vector<TokenMove> moves;  // ascending in both places
  int32_t length = 0;            // of the beginning of `wanted` in the end
};
ChunkPlan plan_chunks(std::span<const int32_t> held, std::span<const int32_t> wanted, int32_t most, int32_t least);

}  // namespace v100
