// A request that does not fit the rest of a slab starts the next one; positions skip the unused rest. Slabs are never freed:
// work under way and recorded work may refer to them.
#include "cuda/arena.h"

#include <algorithm>

namespace v100::cuda {

namespace {
constexpr size_t kAlignment = 256;
constexpr size_t kLeastSlab = size_t{16} << 20, kMostSlab = size_t{256} << 20;
}  // namespace

CUdeviceptr DeviceArena::take(size_t bytes) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  for (const Slab& slab : slabs_) {
    const size_t begin = std::max(used_, slab.start);
    if (begin + bytes <= slab.start + slab.memory.bytes()) {
      used_ = begin + bytes;
      return slab.memory.address() + (begin - slab.start);
    }
  }
  // Twice what is there, so that few slabs make up the memory of a long prompt.
  const size_t start = slabs_.empty() ? 0 : slabs_.back().start + slabs_.back().memory.bytes();
  slabs_.push_back({start, DeviceMemory(device_, std::max(bytes, std::clamp(start, kLeastSlab, kMostSlab)))});
  used_ = start + bytes;
  return slabs_.back().memory.address();
}

}  // namespace v100::cuda
