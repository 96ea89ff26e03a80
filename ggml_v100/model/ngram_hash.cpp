// One pass over the tokens: the hash of n tokens is that of n - 1 with one more mixed in.
#include "model/ngram_hash.h"

namespace v100 {

void NgramHash::rows_of(std::span<const int32_t> tokens, int32_t index, int32_t* rows) const {
  bool reaches = true;
  uint64_t mixed = static_cast<uint64_t>(tokens[static_cast<size_t>(index)]) * multipliers[0];
  for (int32_t back = 1; back < ngram_size; ++back) {
    const int32_t token = index >= back ? tokens[static_cast<size_t>(index - back)] : eos;
    reaches = reaches && token != eos;
    mixed ^= static_cast<uint64_t>(reaches ? token : eos) * multipliers[static_cast<size_t>(back)];
    for (int32_t head = 0; head < heads; ++head) {
      const auto hash = static_cast<size_t>((back - 1) * heads + head);
      *rows++ = static_cast<int32_t>(mixed % sizes[hash] + offsets[hash]);
    }
  }
}

}  // namespace v100
