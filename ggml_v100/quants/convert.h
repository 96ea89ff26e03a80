// Conversion of a matrix from one tensor type to another on several threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/thread_pool.h"
#include "quants/types.h"

namespace v100 {

// Converts n_rows rows of n_columns values: copies them when the types are equal, else decodes and encodes each row.
// n_columns is a multiple of both types' block_values; importance: encode_rows (quants/encode.h). source and target
// hold n_rows * row_bytes each and do not overlap. The bytes do not depend on the number of threads; each thread needs
// n_columns floats of scratch memory. Throws InvalidArgument as decode and encode_rows do.
void convert_rows(QuantType source_type, const std::byte* source, QuantType target_type, int64_t n_rows,
                  int64_t n_columns, const float* importance, std::byte* target, ThreadPool& threads);

}  // namespace v100
