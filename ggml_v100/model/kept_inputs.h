// What a recurrent layer was given in a pass, kept so that its state can be made again after fewer of the rows.
//
// A draft may be refused from any of its rows on, and a recurrent state cannot be cut back. Its inputs are small beside the
// state (a row of a delta net with 128 x 128 memories: less than a hundredth), so the rows that stand are run through the
// recurrence once more, from the state before the step, which a step never overwrites.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <vector>

#include "ops/ops.h"

namespace v100 {

class KeptInputs {
 public:
  // Copies the first `rows` rows of each; they stay until the next call. Throws OutOfMemory.
  void keep(Ops& ops, std::initializer_list<Tensor> inputs, int32_t rows);
  // [rows, features] of the i-th input of the last keep().
  Tensor operator[](size_t i) const { return tensors_[i]; }

 private:
  std::shared_ptr<std::byte[]> memory_;
  size_t bytes_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace v100
