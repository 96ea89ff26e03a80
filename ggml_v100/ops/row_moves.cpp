// Copies of rows.
#include "ops/row_moves.h"

#include <algorithm>

namespace v100 {

void concatenate_rows(Tensor x, Tensor y, Tensor z) {
  for (int32_t r = 0; r < z.rows; ++r) {
    std::copy_n(x.row(r), x.features, z.row(r));
    std::copy_n(y.row(r), y.features, z.row(r) + x.features);
  }
}

void previous_rows_of(Tensor x, const SequenceRows& sequence, const StateRecords& last, Tensor y) {
  const auto [begin, end] = sequence.rows;
  if (const float* before = last.at(sequence.state_from))
    std::copy_n(before, x.features, y.row(begin));
  else
    std::fill_n(y.row(begin), x.features, 0.0f);
  if (end - begin > 1) std::copy_n(x.row(begin), int64_t{end - begin - 1} * x.features, y.row(begin + 1));
  if (float* after = last.at(sequence.state_to)) std::copy_n(x.row(end - 1), x.features, after);
}

}  // namespace v100
