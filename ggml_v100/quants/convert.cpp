// Conversion of rows: decode to f32 in a thread's own scratch row, encode from there.
#include "quants/convert.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "quants/decode.h"
#include "quants/encode.h"

namespace v100 {

namespace {

constexpr int64_t kChunkValues = 1 << 16;  // handed to a thread at a time: 100 us of work even for the fastest types

}  // namespace

void convert_rows(QuantType source_type, const std::byte* source, QuantType target_type, int64_t n_rows,
                  int64_t n_columns, const float* importance, std::byte* target, ThreadPool& threads) {
  const QuantTraits &from = traits(source_type), &to = traits(target_type);
  if (n_rows < 0 || n_columns < 0 || n_columns % from.block_values != 0 || n_columns % to.block_values != 0)
    throw InvalidArgument(std::string(from.name) + " to " + std::string(to.name) + ": " + std::to_string(n_rows) +
                          " rows of " + std::to_string(n_columns) + " values, expected multiples of " +
                          std::to_string(from.block_values) + " and " + std::to_string(to.block_values));
  if (n_rows == 0 || n_columns == 0) return;
  const int64_t source_bytes = row_bytes(from, n_columns), target_bytes = row_bytes(to, n_columns);
  const int64_t chunk = std::max<int64_t>(1, kChunkValues / n_columns);
  threads.parallel_for(n_rows, chunk, [&](int64_t begin, int64_t end) {
    if (source_type == target_type) {
      std::memcpy(target + begin * target_bytes, source + begin * source_bytes,
                  static_cast<size_t>((end - begin) * source_bytes));
      return;
    }
    std::vector<float> values(static_cast<size_t>(n_columns));
    for (int64_t row = begin; row < end; ++row) {
      decode(source_type, source + row * source_bytes, values.data(), n_columns);
      encode_rows(target_type, values.data(), 1, n_columns, importance, target + row * target_bytes);
    }
  });
}

}  // namespace v100
