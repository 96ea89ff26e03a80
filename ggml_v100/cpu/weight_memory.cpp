// Slabs are filled front to back; what does not fit starts the next slab. Untouched rests take address space only.
#include "cpu/weight_memory.h"

namespace v100::cpu {

namespace {
constexpr size_t kSlabBytes = size_t{64} << 20;
constexpr size_t kLargeBytes = size_t{16} << 20;  // matrices from here on get mappings of their own
}  // namespace

std::shared_ptr<std::byte> WeightMemory::allocate(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes >= kLargeBytes) {
    const auto own = std::make_shared<Buffer>(bytes);
    return {own, own->data()};
  }
  const std::lock_guard lock(mutex_);
  if (slab_ == nullptr || used_ + bytes > slab_->size()) {
    slab_ = std::make_shared<Buffer>(kSlabBytes);
    used_ = 0;
  }
  std::byte* memory = slab_->data() + used_;
  used_ += bytes;
  return {slab_, memory};
}

}  // namespace v100::cpu
