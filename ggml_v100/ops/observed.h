// Watches what linear layers are fed: sums of squared inputs per weight column, what an importance matrix is made of.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace v100 {

// Passes of fewer rows are generation, not text to learn from, and are not counted.
inline constexpr int32_t kLeastObservedRows = 16;

struct InputSums {
  int32_t matrices = 1;         // experts of a stack, otherwise 1
  int32_t features = 0;         // columns of the weight
  std::vector<double> squares;  // [matrices, features] sum of x_c^2 over the rows, added in their order
  std::vector<int64_t> n_rows;  // [matrices] rows summed
};

using InputStatistics = std::map<std::string, InputSums>;  // by the weight's name in the file

// Ops that hand every call on to `inner`, whose results they do not touch, and add the inputs of named weights to
// `statistics`, which outlives them. The sums are made in f64 on the calling thread: they depend neither on the number
// of threads nor, but for passes too small to count, on the ubatches.
std::unique_ptr<Ops> observe_inputs(std::unique_ptr<Ops> inner, InputStatistics& statistics);

}  // namespace v100
