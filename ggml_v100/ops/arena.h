// Stack of activation memory with marks. Grows in slabs, so that pointers stay valid; keeps its slabs between ubatches.
#pragma once

#include <cstddef>
#include <vector>

#include "tensor/buffer.h"
#include "tensor/tensor.h"

namespace v100 {

class Arena {
 public:
  Tensor create(int32_t rows, int32_t features);  // 64-byte aligned, uninitialised
  std::byte* take(size_t bytes);                  // 64-byte aligned scratch, freed by release like a tensor
  size_t mark() const { return used_; }
  void release(size_t mark) { used_ = mark; }

 private:
  // Position x of the stack lies in slab i where slab_start[i] <= x < slab_start[i] + slab size.
  struct Slab {
    size_t start;
    Buffer buffer;
  };
  std::vector<Slab> slabs_;
  size_t used_ = 0;
};

}  // namespace v100
