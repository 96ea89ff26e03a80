// Finds tensors by name, checks type and shape against what the architecture needs, and packs them for the backend.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "gguf/gguf.h"
#include "ops/ops.h"

namespace v100 {

class WeightLoader {
 public:
  // check_values: refuse tensors with non-finite scales or values (`--check-tensors`).
  WeightLoader(std::shared_ptr<const GgufFile> file, const Backend& backend, ThreadPool& pool, bool check_values);

  bool has(const std::string& name) const;

  // All throw ModelError naming the tensor, its shape and the one expected.
  VectorWeight vector(const std::string& name, int32_t size) const;
  VectorWeight optional_vector(const std::string& name, int32_t size) const;
  // `name.weight` [out, in], and `name.bias` [out] where the file has it.
  Linear linear(const std::string& name, int32_t in_features, int32_t out_features) const;
  // Rows [first, first + out_features) of a fused weight of all_rows rows, with its own bias `bias_name.bias` if present.
  Linear linear_rows(const std::string& name, int32_t in_features, int32_t all_rows, int32_t first,
                     int32_t out_features, const std::string& bias_name) const;
  // `name.weight` [experts, out, in].
  ExpertLinear expert_linear(const std::string& name, int32_t in_features, int32_t out_features, int32_t experts) const;
  EmbeddingTable embedding(const std::string& name, int32_t features, int32_t vocab) const;

 private:
  const GgufTensor& require(const std::string& name, std::vector<int64_t> shape) const;
  VectorWeight decode_vector(const GgufTensor& tensor) const;
  void check(const GgufTensor& tensor) const;

  std::shared_ptr<const GgufFile> file_;
  const Backend& backend_;
  ThreadPool& pool_;
  bool check_values_;
};

}  // namespace v100
