// Rows put beside and behind each other, on the host: nothing is computed, so that all backends on CPUs share it.
#pragma once

#include "ops/kv.h"
#include "ops/state.h"
#include "tensor/tensor.h"

namespace v100 {

// z [rows, features of x + features of y] := x beside y.
void concatenate_rows(Tensor x, Tensor y, Tensor z);
// Ops::previous_rows of one sequence. y must not be x.
void previous_rows_of(Tensor x, const SequenceRows& sequence, const StateRecords& last, Tensor y);

}  // namespace v100
