// Encoders of the plain float types: one value per block, importance has no say.
#include <cstring>

#include "quants/block_bytes.h"
#include "quants/encode_blocks.h"

namespace v100 {

void encode_f32(const float* values, int64_t n, const float*, uint8_t* blocks) {
  std::memcpy(blocks, values, static_cast<size_t>(n) * sizeof(float));
}

void encode_f16(const float* values, int64_t n, const float*, uint8_t* blocks) {
  for (int64_t i = 0; i < n; ++i) store_half(blocks + 2 * i, values[i]);
}

void encode_bf16(const float* values, int64_t n, const float*, uint8_t* blocks) {
  for (int64_t i = 0; i < n; ++i) store(blocks + 2 * i, bf16_from_f32(values[i]));
}

void encode_f64(const float* values, int64_t n, const float*, uint8_t* blocks) {
  for (int64_t i = 0; i < n; ++i) store(blocks + 8 * i, static_cast<double>(values[i]));
}

}  // namespace v100
