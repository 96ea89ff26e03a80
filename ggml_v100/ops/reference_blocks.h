// The quantised data of the reference operations: integer weight codes, rounded activations, KV rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/kv.h"
#include "quants/types.h"

namespace v100 {

// Types whose linear layers use integer dot products (ops/ops.h, linear).
bool has_integer_path(QuantType type);

// Weights as y = sum over groups of scale * q . p + minimum * Sg.
struct IntegerRows {
  int32_t group = 32;           // values per scale
  std::vector<int8_t> codes;    // [out, in]
  std::vector<float> scales;    // [out, in / group]
  std::vector<float> minimums;  // same, or empty for types without
};

IntegerRows unpack_integer_rows(QuantType type, const std::byte* rows, int32_t in_features, int32_t out_features);

struct QuantizedRow {
  std::vector<int8_t> codes;  // [features]
  std::vector<float> scale;   // dx [features / 32]
  std::vector<float> sum;     // Sg [features / group]
};

// features is a multiple of 32, group is 32 or 16.
QuantizedRow quantize_row(const float* x, int32_t features, int32_t group);

// One head's key or value in the GGUF encoding of the type.
void encode_kv(QuantType type, const float* values, std::byte* encoded, int32_t features);

// A page: K rows [kv_head][key], then V rows [kv_head][token]. A key is a token's, or a block's (KvShape::block).
class PageLayout {
 public:
  explicit PageLayout(const KvShape& shape);  // throws InvalidArgument for an unsupported type or head size
  size_t k_offset(int32_t kv_head, int32_t key) const;
  size_t v_offset(int32_t kv_head, int32_t token) const;
  size_t bytes() const;

 private:
  int32_t kv_heads_;
  int32_t keys_;
  size_t k_row_bytes_, v_row_bytes_;
};

}  // namespace v100
