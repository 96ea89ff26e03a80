// Half-open ranges of rows, heads, columns, layers.
#pragma once

#include <cstdint>

namespace v100 {

struct RowRange {  // [begin, end)
  int32_t begin = 0;
  int32_t end = 0;

  int32_t size() const { return end - begin; }
};

}  // namespace v100
