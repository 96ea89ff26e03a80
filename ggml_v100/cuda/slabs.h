// Memory of weights on a device: many of them share a slab, since the driver gives out whole megabytes.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "cuda/launches.h"
#include "cuda/memory.h"

namespace v100::cuda {

class Slabs {
 public:
  explicit Slabs(std::shared_ptr<const Launches> launches) : launches_(std::move(launches)) {}

  // A device address, aligned to 256 bytes, uninitialised. The slab and its device stay as long as any part. Throws
  // OutOfMemory.
  std::shared_ptr<std::byte> allocate(size_t bytes);

 private:
  std::shared_ptr<const Launches> launches_;
  std::mutex mutex_;  // models may be loaded from several threads
  std::shared_ptr<std::byte> slab_;
  size_t slab_bytes_ = 0, used_ = 0;
};

// Memory of its own that keeps the device; zero bytes is legal. Throws OutOfMemory.
std::shared_ptr<std::byte> allocate_on(std::shared_ptr<const Launches> launches, size_t bytes);
// The same in memory of the host, which kernels and copies reach by the same address.
std::shared_ptr<std::byte> allocate_pinned(std::shared_ptr<const Launches> launches, size_t bytes);

inline CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace v100::cuda
