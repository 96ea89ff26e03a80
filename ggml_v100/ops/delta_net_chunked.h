// The gated delta net in its chunked form (Yang et al. 2024, "Gated Delta Networks", section 3.3): the recurrence of
// ops.h as matrix products over chunks of tokens, for devices that multiply matrices faster than they walk tokens.
//
// Plain loops in f32. Not one of the contract's exact forms: a result depends on where chunks begin and differs from the
// recurrence by about 1e-6 of the largest output. It says what a kernel of this form computes.
#pragma once

#include "ops/ops.h"

namespace v100 {

inline constexpr int32_t kDeltaChunk = 64;

// The rows of one sequence, as Ops::delta_net takes them; y [rows, value_size].
void delta_net_chunked_sequence(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps,
                                const SequenceRows& sequence, const StateRecords& memory, Tensor y,
                                int32_t chunk = kDeltaChunk);

}  // namespace v100
