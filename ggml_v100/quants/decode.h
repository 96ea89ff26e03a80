// Decoding of quantised blocks to f32, exactly by the formulas of the GGUF block formats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quants/types.h"

namespace v100 {

// Decodes n_values (a multiple of the type's block_values) from packed blocks. Every type of the table but the integers
// (I8..I64) decodes; F64 is rounded to f32. Throws InvalidArgument for the integer types.
void decode(QuantType type, const std::byte* blocks, float* values, int64_t n_values);

// True when all scales (or values, for float types) of the blocks are finite (`--check-tensors`).
bool all_finite(QuantType type, const std::byte* blocks, int64_t n_values);

}  // namespace v100
