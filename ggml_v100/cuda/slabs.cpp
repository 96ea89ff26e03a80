#include "cuda/slabs.h"

namespace v100::cuda {

namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kSlabBytes = size_t{32} << 20;
constexpr size_t kLargeBytes = size_t{16} << 20;  // from here on memory of its own

template <class Memory>
struct Owned {
  std::shared_ptr<const Launches> launches;  // outlives the memory
  Memory memory;
};

template <class Memory>
std::shared_ptr<Owned<Memory>> own(std::shared_ptr<const Launches> launches, size_t bytes) {
  const Device& device = launches->device();
  return std::make_shared<Owned<Memory>>(Owned<Memory>{std::move(launches), Memory(device, bytes)});
}

}  // namespace

std::shared_ptr<std::byte> allocate_on(std::shared_ptr<const Launches> launches, size_t bytes) {
  const auto owned = own<DeviceMemory>(std::move(launches), bytes);
  return {owned, reinterpret_cast<std::byte*>(owned->memory.address())};
}

std::shared_ptr<std::byte> allocate_pinned(std::shared_ptr<const Launches> launches, size_t bytes) {
  const auto owned = own<PinnedMemory>(std::move(launches), bytes);
  return {owned, owned->memory.data()};
}

std::shared_ptr<std::byte> Slabs::allocate(size_t bytes) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes >= kLargeBytes) return allocate_on(launches_, bytes);
  const std::lock_guard lock(mutex_);
  if (slab_ == nullptr || bytes > slab_bytes_ - used_) {
    slab_ = allocate_on(launches_, kSlabBytes);
    slab_bytes_ = kSlabBytes;
    used_ = 0;
  }
  std::byte* part = slab_.get() + used_;
  used_ += bytes;
  return {slab_, part};
}

}  // namespace v100::cuda
