// Encoding of f32 rows to packed blocks, byte for byte as the reference quantisers of the GGUF formats do it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quants/types.h"

namespace v100 {

// True for types that cannot be encoded without importance weights (IQ1_S, IQ2_XXS, IQ2_XS).
bool encoding_needs_importance(QuantType type);

// Encodes n_rows rows of n_columns values (n_columns a multiple of the type's block_values) to n_rows * row_bytes bytes.
// importance: n_columns weights >= 0, the same for every row, or nullptr. They are ignored by types that have no use for
// them; when none is positive or one is negative, NaN or beyond 2^64; and for a block whose scale they would make NaN.
// Rows are independent: any split of a matrix gives the same bytes.
// Throws InvalidArgument for a type that nothing encodes to (integers, Q8_1, Q8_K) and when needed weights are missing.
void encode_rows(QuantType type, const float* rows, int64_t n_rows, int64_t n_columns, const float* importance,
                 std::byte* blocks);

}  // namespace v100
