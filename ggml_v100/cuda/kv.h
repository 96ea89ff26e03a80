// KV caches as kernels are told of them.
#pragma once

#include "cuda/kernels/attention_shape.h"
#include "ops/kv.h"

namespace v100::cuda {

// Throws InvalidArgument for a type or head size that no kernel reads, with those that are.
size_t checked_page_bytes(const KvShape& shape);
// Whether attention takes the units of its own for q4_1, q5_0 and q5_1.
bool is_counted(const KvCache& cache);
// Of a shape that was checked.
KvCache kv_cache(const KvLayer& layer);

}  // namespace v100::cuda
