// Decoders of the plain float types: one value per block.
#include <cstring>

#include "quants/block_bytes.h"
#include "quants/decode_blocks.h"

namespace v100 {

void decode_f32(const uint8_t* blocks, float* values, int64_t n_blocks) {
  std::memcpy(values, blocks, static_cast<size_t>(n_blocks) * sizeof(float));
}

void decode_f16(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (int64_t i = 0; i < n_blocks; ++i) values[i] = load_half(blocks + 2 * i);
}

void decode_bf16(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (int64_t i = 0; i < n_blocks; ++i) values[i] = f32_from_bf16(load<uint16_t>(blocks + 2 * i));
}

void decode_f64(const uint8_t* blocks, float* values, int64_t n_blocks) {
  for (int64_t i = 0; i < n_blocks; ++i) values[i] = static_cast<float>(load<double>(blocks + 8 * i));
}

}  // namespace v100
