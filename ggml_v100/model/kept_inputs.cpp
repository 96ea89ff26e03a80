// One buffer per layer, which grows to the most rows that were ever kept.
#include "model/kept_inputs.h"

namespace v100 {

void KeptInputs::keep(Ops& ops, std::initializer_list<Tensor> inputs, int32_t rows) {
  size_t values = 0;
  for (const Tensor& input : inputs) values += static_cast<size_t>(rows) * static_cast<size_t>(input.features);
  if (bytes_ < values * sizeof(float)) {
    memory_ = ops.allocate(values * sizeof(float));
    bytes_ = values * sizeof(float);
  }
  auto* to = reinterpret_cast<float*>(memory_.get());
  tensors_.clear();
  for (const Tensor& input : inputs) {
    tensors_.push_back({to, rows, input.features});
    ops.copy({input.data, rows, input.features}, tensors_.back());
    to += tensors_.back().size();
  }
}

}  // namespace v100
