// Arena: a request that does not fit the rest of a slab starts the next one; positions skip the unused rest.
#include "ops/arena.h"

#include <algorithm>

namespace v100 {

namespace {
constexpr size_t kSlabBytes = size_t{32} << 20;
}

std::byte* Arena::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  for (const Slab& slab : slabs_) {
    const size_t begin = std::max(used_, slab.start);
    if (begin + bytes <= slab.start + slab.buffer.size()) {
      used_ = begin + bytes;
      return slab.buffer.data() + (begin - slab.start);
    }
  }
  const size_t start = slabs_.empty() ? 0 : slabs_.back().start + slabs_.back().buffer.size();
  slabs_.push_back({start, Buffer(std::max(bytes, kSlabBytes))});
  used_ = start + bytes;
  return slabs_.back().buffer.data();
}

Tensor Arena::create(int32_t rows, int32_t features) {
  const size_t bytes = static_cast<size_t>(rows) * static_cast<size_t>(features) * sizeof(float);
  return {reinterpret_cast<float*>(take(bytes)), rows, features};
}

}  // namespace v100
