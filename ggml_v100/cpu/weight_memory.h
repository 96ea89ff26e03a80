// Memory of packed weights: many matrices share a slab of huge pages.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "tensor/buffer.h"

namespace v100::cpu {

// A small model's matrices are smaller than a huge page (2 MiB). Alone in their mappings they would lie on 4 KiB
// pages, and each page's first access costs a walk of the page tables while the hardware prefetcher stops at its end.
class WeightMemory {
 public:
  // Zero-filled, 64-byte aligned. The slab lives as long as any of its matrices. Throws OutOfMemory.
  std::shared_ptr<std::byte> allocate(size_t bytes);

 private:
  std::mutex mutex_;  // models may be loaded from several threads
  std::shared_ptr<Buffer> slab_;
  size_t used_ = 0;
};

}  // namespace v100::cpu
