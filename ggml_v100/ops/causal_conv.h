// The causal convolution of ops.h in plain loops.
#pragma once

#include "ops/ops.h"

namespace v100 {

// The rows of one sequence: x, y [rows, channels].
void causal_conv_silu_sequence(Tensor x, const ConvWeight& w, const SequenceRows& sequence, const StateRecords& history,
                               Tensor y);

}  // namespace v100
