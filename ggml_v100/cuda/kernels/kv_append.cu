// Keys and values of new tokens into the pages of the cache, rounded as ops.h says.
//
// Shapes    k, v [rows, kv_heads * head_dim] f32 -> pages (kv_page.h). A warp per row, kv head and 32 features of k or of v.
// Bound     launch: 64 rows of 4 heads of 256 features are 1 MB. Single bytes of values are scattered 16 bytes apart.
// Budget    kv_append          256 threads, <= 40 registers
// Numerics  f16: nearest even. q8_0, q4_0: division, product and fma rounded as on the CPU, so the codes are the same.
#include "codecs.cuh"
#include "kv_page.h"

namespace v100::cuda {

constexpr int kThreads = 256;

// Codes of a lane's value among the 32 of its block, and the block's scale in every lane.
__device__ __forceinline__ int code_q8_0(float x, float& scale) {
  const float largest = warp_max(fabsf(x));
  const float quotient = __fdiv_rn(127.0f, largest);
  scale = __fdiv_rn(largest, 127.0f);
  return isfinite(quotient) ? __float2int_rn(__fmul_rn(x, quotient)) : 0;
}
__device__ __forceinline__ int code_q4_0(float x, float& scale) {
  const float largest = warp_max(fabsf(x));
  const int first = __ffs(static_cast<int>(__ballot_sync(kAllLanes, fabsf(x) == largest))) - 1;
  const float extreme = __shfl_sync(kAllLanes, x, max(first, 0));  // max: a block of NaN has none
  scale = __fdiv_rn(extreme, -8.0f);
  const float inverse = scale != 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
  return min(15, max(0, __float2int_rz(__fmaf_rn(x, inverse, 8.5f))));
}

extern "C" __global__ void __launch_bounds__(kThreads) kv_append(KvAppendParams p) {
  const int head_dim = p.cache.head_dim, blocks = kv_feature_blocks(head_dim);
  int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  const int block = static_cast<int>(item % blocks);
  item /= blocks;
  const int head = static_cast<int>(item % p.cache.kv_heads);
  item /= p.cache.kv_heads;
  const bool is_value = item % 2 != 0;
  const int64_t row = item / 2;
  if (row >= p.rows) return;

  const int lane = lane_id(), feature = block * kStripValues + lane;
  const float* from = (is_value ? p.v : p.k) + (row * p.cache.kv_heads + head) * head_dim;
  const float x = feature < head_dim ? from[feature] : 0.0f;
  const int index = p.kv_index[row], token = index % kPageTokens;
  const int64_t page = p.page_table[static_cast<int64_t>(p.sequence[row]) * p.most_pages + index / kPageTokens];
  const int key_bytes = kv_part_bytes(p.cache.type_k, head_dim);
  const int type = is_value ? p.cache.type_v : p.cache.type_k;
  uint8_t* part = p.cache.pages + page * p.cache.page_bytes +
                  (is_value ? static_cast<int64_t>(p.cache.kv_heads) * key_bytes +
                                  static_cast<int64_t>(head) * kv_part_bytes(type, head_dim)
                            : static_cast<int64_t>(head) * key_bytes);

  // Place of the value: which strip, whose lane, the how-manieth of its 32.
  const int tile = token / kStripValues, within = token % kStripValues;
  const int strip = is_value ? block * kPageTiles + tile : tile * blocks + block;
  const int owner = lane_of_column(is_value ? lane : within), j = is_value ? within : lane;
  uint8_t* codes = part + strip * kv_strip_bytes(type) + owner * 16;

  float scale = 0.0f;
  if (type == kKvF16) {
    *reinterpret_cast<__half*>(codes + j / 8 * 512 + j % 8 * 2) = __float2half_rn(x);
    return;
  }
  if (type == kKvQ8_0) {
    codes[j / 16 * 512 + j % 16] = static_cast<uint8_t>(code_q8_0(x, scale));
  } else {
    uint32_t bits = static_cast<uint32_t>(code_q4_0(x, scale)) << nibble_place(j);
    uint32_t* word = reinterpret_cast<uint32_t*>(codes + j / 8 * 4);
    if (is_value) {  // seven other tokens, perhaps of this launch, share the word: only its own four bits are touched
      atomicAnd(word, ~(15u << nibble_place(j)));
      atomicOr(word, bits);
    } else {
      for (int apart = 4; apart > 0; apart /= 2) bits |= __shfl_xor_sync(kAllLanes, bits, apart);
      if (lane % 8 == 0) *word = bits;
    }
  }
  if (lane == 0) {
    uint8_t* scales = part + kv_code_bytes(type, head_dim) + strip * (kStripValues * 2);
    reinterpret_cast<__half*>(scales)[is_value ? within : lane_of_column(within)] = __float2half_rn(scale);
  }
}

}  // namespace v100::cuda
