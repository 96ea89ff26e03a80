// Finds tensors by name, checks type and shape against what the architecture needs, and packs them for the backend.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "gguf/gguf.h"
#include "ops/ops.h"

namespace v100 {

class WeightLoader {
 public:
  // check_values: refuse tensors with non-finite scales or values (`--check-tensors`). load_mtp: families load their blocks
  // of multi-token prediction too.
  WeightLoader(std::shared_ptr<const GgufFile> file, const Backend& backend, ThreadPool& pool, bool check_values,
               bool load_mtp);

  bool has(const std::string& name) const;
  bool load_mtp() const { return load_mtp_; }

  // All throw ModelError naming the tensor, its shape and the one expected.
  VectorWeight vector(const std::string& name, int32_t size) const;
  VectorWeight optional_vector(const std::string& name, int32_t size) const;
  // `name.weight` [out, in], and `name.bias` [out] where the file has it. Here and below matrices are multiplied by
  // `name.scale` where the file has it: one value, or one for each expert.
  Linear linear(const std::string& name, int32_t in_features, int32_t out_features) const;
  // The given rows, one range after the other, of `name.weight` [all_rows, in]. Their bias, where the file has it: the same
  // entries of `name.bias` [all_rows], or the whole of `bias_name.bias`.
  Linear linear_rows(const std::string& name, int32_t in_features, int32_t all_rows, std::span<const RowRange> rows,
                     const std::string& bias_name) const;
  // `name.weight` [experts, out, in].
  ExpertLinear expert_linear(const std::string& name, int32_t in_features, int32_t out_features, int32_t experts) const;
  // The given rows of each expert of `name.weight` [experts, all_rows, in].
  ExpertLinear expert_linear_rows(const std::string& name, int32_t in_features, int32_t all_rows,
                                  std::span<const RowRange> rows, int32_t experts) const;
  // `name.weight` [channels, taps], the oldest tap first.
  ConvWeight convolution(const std::string& name, int32_t taps, int32_t channels) const;
  EmbeddingTable embedding(const std::string& name, int32_t features, int32_t vocab) const;

 private:
  const GgufTensor& require(const std::string& name, std::vector<int64_t> shape) const;
  VectorWeight decode_vector(const GgufTensor& tensor) const;
  // The given rows of one matrix of a tensor.
  std::shared_ptr<const LinearWeight> pack_rows(const GgufTensor& tensor, int32_t matrix, int32_t in_features,
                                                int32_t all_rows, std::span<const RowRange> rows, float scale) const;
  // `name.scale` of a stack of matrices, ones where the file has none.
  std::vector<float> scales(const std::string& name, int32_t matrices) const;
  void refuse_scale(const std::string& name) const;
  void check(const GgufTensor& tensor) const;

  std::shared_ptr<const GgufFile> file_;
  const Backend& backend_;
  ThreadPool& pool_;
  bool check_values_;
  bool load_mtp_;
};

}  // namespace v100
