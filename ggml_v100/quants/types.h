// One table of the tensor types of GGUF files: names, block sizes. The only home of these numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace v100 {

// Values are the type ids of the GGUF format.
enum class QuantType : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q8_1 = 9,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  Q8_K = 15,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ1_S = 19,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  I8 = 24,
  I16 = 25,
  I32 = 26,
  I64 = 27,
  F64 = 28,
  IQ1_M = 29,
  BF16 = 30,
  TQ1_0 = 34,
  TQ2_0 = 35,
  MXFP4 = 39,
  NVFP4 = 40,
  Q1_0 = 41,
  Q2_0 = 42,
};

inline constexpr int32_t kQuantTypeCount = 43;  // ids are below this; some are holes

struct QuantTraits {
  QuantType type;
  std::string_view name;  // as GGUF tools print it: "q4_1", "q6_K"
  int32_t block_values;   // values per block
  int32_t block_bytes;    // bytes per block
  bool is_quantized;      // false for plain floats and integers
};

// nullptr for an id that is unknown or was removed from the format.
const QuantTraits* find_traits(int32_t type_id);
// Throws InvalidArgument for such an id.
const QuantTraits& traits(QuantType type);
// Case-insensitive; nullopt for an unknown name.
std::optional<QuantType> quant_type_from_name(std::string_view name);

// Bytes of one row of n_values (a multiple of block_values).
// Whether decode() takes it: all but the integers.
inline bool can_decode(QuantType type) {
  return type != QuantType::I8 && type != QuantType::I16 && type != QuantType::I32 && type != QuantType::I64;
}

inline int64_t row_bytes(const QuantTraits& t, int64_t n_values) { return n_values / t.block_values * t.block_bytes; }

}  // namespace v100
