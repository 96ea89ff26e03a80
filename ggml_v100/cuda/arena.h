// Stack of a device's memory with marks, as ops/arena.h is for hosts. The same requests get the same addresses.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/memory.h"

namespace v100::cuda {

class DeviceArena {
 public:
  explicit DeviceArena(const Device& device) : device_(device) {}

  CUdeviceptr take(size_t bytes);  // aligned to 256 bytes, uninitialised; throws OutOfMemory
  size_t mark() const { return used_; }
  void release(size_t mark) { used_ = mark; }

 private:
  // Position x of the stack lies in the slab where start <= x < start + its size.
  struct Slab {
    size_t start;
    DeviceMemory memory;
  };
  const Device& device_;
  std::vector<Slab> slabs_;
  size_t used_ = 0;
};

}  // namespace v100::cuda
