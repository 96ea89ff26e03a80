// Decoding of quantised blocks to f32, exactly by the formulas of the GGUF block formats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quants/types.h"

namespace v100 {

// Decodes n_values (a multiple of the type's block_values) from packed blocks. Every type of the table but the integers
// (I8..I64) decodes; F64 is rounded to f32. Throws InvalidArgument for the integer types.
void decode(QuantType type, const std::byte* blocks, float* values, int64_t n_values);

// Blocks with a scale that is not finite, or such values of a float type. Integer types have none.
int64_t count_non_finite(QuantType type, const std::byte* blocks, int64_t n_values);
// True when there is none (`--check-tensors`).
bool all_finite(QuantType type, const std::byte* blocks, int64_t n_values);

}  // namespace v100
