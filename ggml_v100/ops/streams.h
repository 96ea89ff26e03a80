// Residual streams in plain loops: the operations of ops.h on rows that hold several streams side by side.
#pragma once

#include "ops/ops.h"

namespace v100 {

// y [rows, features] <- x and gate [rows, streams * features].
void mix_streams_into(Tensor y, Tensor x, Tensor gate);
void add_to_streams_in_place(Tensor x, Tensor y, Tensor inject);

// The gate of one stream: key, query [features].
float memory_gate(const float* key, const float* query, int32_t features);

// The gate as a function of the dot product of key and query, for backends with a dot product of their own.
float memory_gate_of(float dot, int32_t features);

}  // namespace v100
