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
#include "parallel/placement.h"

namespace v100 {

// pack: tensors go to the backend. measure: only what they would take there is found; of the file's data no more is read
// than vectors.
enum class LoadFor { pack, measure };

class WeightLoader {
 public:
  // check_values: refuse tensors with non-finite scales or values (`--check-tensors`). load_mtp: families load their blocks
  // of multi-token prediction too. shard: what the rank that loads gets; it remembers what it was asked.
  WeightLoader(std::shared_ptr<const GgufFile> file, const Backend& backend, ThreadPool& pool, bool check_values,
               bool load_mtp, Shard& shard, LoadFor purpose = LoadFor::pack);

  bool has(const std::string& name) const;
  bool load_mtp() const { return load_mtp_; }
  Shard& shard() const { return shard_; }
  // Of all packed weights so far, and of all vectors on the device.
  size_t packed_bytes() const { return packed_bytes_; }
  size_t vector_bytes() const { return vector_bytes_; }
  // Of all matrices and embedding tables so far, as families hold them.
  const std::vector<std::shared_ptr<const WeightOrigin>>& origins() const { return origins_; }
  // For cutting: bytes of the file's tensors together, those that are not there left out; values of a block of one, 1 if
  // it is not there (loading it will say so).
  double bytes(const std::vector<std::string>& names) const;
  int32_t block_values(const std::string& name) const;
  // Of a matrix of the file; for sizes that no key says. Throws ModelError where there is none.
  int32_t columns(const std::string& name) const;

  // All throw ModelError naming the tensor, its shape and the one expected.
  VectorWeight vector(const std::string& name, int32_t size) const;
  VectorWeight optional_vector(const std::string& name, int32_t size) const;
  // Values that are no tensor of the file.
  VectorWeight place(std::span<const float> values) const;
  // A vector in host memory; empty where the file has none.
  std::vector<float> optional_values(const std::string& name, int32_t size) const;
  // All values of a tensor of the given shape, the first dimension contiguous.
  VectorWeight flat_vector(const std::string& name, std::vector<int64_t> shape) const;
  // A list of token ids below `vocab`; empty where the file has none.
  std::vector<int32_t> token_ids(const std::string& name, int32_t vocab) const;
  // The given entries, one range after the other.
  VectorWeight vector_entries(const std::string& name, int32_t size, std::span<const RowRange> entries) const;
  VectorWeight optional_vector_entries(const std::string& name, int32_t size, std::span<const RowRange> entries) const;
  // `name.weight` [out, in], and `name.bias` [out] where the file has it. Every rank that has the layer has all of it. Here
  // and below matrices are multiplied by `name.scale` where the file has it: one value, or one for each expert.
  Linear linear(const std::string& name, int32_t in_features, int32_t out_features) const;
  // The given rows, one range after the other, of `name.weight` [all_rows, in], and the same entries of `name.bias`.
  Linear linear_rows(const std::string& name, int32_t in_features, int32_t all_rows,
                     std::span<const RowRange> rows) const;
  // The given columns, whole blocks of the type, of `name.weight` [out, all_columns]: a part of the product's sums. The
  // rank that has the first column adds `name.bias`.
  Linear linear_columns(const std::string& name, int32_t all_columns, std::span<const RowRange> columns,
                        int32_t out_features) const;
  // `name.weight` [experts, out, in]; only experts `mine` are there.
  ExpertLinear expert_linear(const std::string& name, int32_t in_features, int32_t out_features, int32_t experts,
                             RowRange mine) const;
  // The given rows of each expert of `name.weight` [experts, all_rows, in].
  ExpertLinear expert_linear_rows(const std::string& name, int32_t in_features, int32_t all_rows,
                                  std::span<const RowRange> rows, int32_t experts, RowRange mine) const;
  // The given channels of `name.weight` [channels, taps], the oldest tap first.
  ConvWeight convolution(const std::string& name, int32_t taps, int32_t channels, std::span<const RowRange> mine) const;
  EmbeddingTable embedding(const std::string& name, int32_t features, int32_t vocab) const;
  // `name.weight` [at least `rows`, features] that may be far larger than memory: of its data nothing is read here, also with
  // check_values, and later only the pages of the rows asked for.
  EmbeddingTable lazy_table(const std::string& name, int32_t features, int64_t rows) const;

 private:
  const GgufTensor& require(const std::string& name, std::vector<int64_t> shape) const;
  const GgufTensor& find(const std::string& name) const;
  static void require_weight_type(const GgufTensor& tensor);
  // f32 in host memory.
  std::vector<float> decode_values(const GgufTensor& tensor) const;
  // The one place where rows and columns of a tensor's matrix are picked. nullptr when none are.
  std::shared_ptr<const LinearWeight> pack(const GgufTensor& tensor, int32_t matrix, std::span<const RowRange> rows,
                                           std::span<const RowRange> columns, float scale) const;
  std::shared_ptr<const WeightOrigin> remember(WeightOrigin origin) const;
  // Whether this rank computes in the block the tensor belongs to.
  bool is_here(const std::string& name) const;
  // `name.scale` of a stack of matrices, ones where the file has none.
  std::vector<float> scales(const std::string& name, int32_t matrices) const;
  void refuse_scale(const std::string& name) const;
  void check(const GgufTensor& tensor) const;

  std::shared_ptr<const GgufFile> file_;
  const Backend& backend_;
  ThreadPool& pool_;
  bool check_values_;
  bool load_mtp_;
  Shard& shard_;
  LoadFor purpose_;
  mutable size_t packed_bytes_ = 0, vector_bytes_ = 0;
  mutable std::vector<std::shared_ptr<const WeightOrigin>> origins_;
};

}  // namespace v100
