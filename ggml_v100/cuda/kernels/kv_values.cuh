// Single values of a KV page (kv_page.h): rounded and stored 32 features of a token at a time, read back one per lane.
#pragma once

#include "codecs.cuh"
#include "kv_page.h"

namespace v100::cuda {

// A head's keys or values in a page.
__device__ __forceinline__ uint8_t* kv_part(const KvCache& cache, int64_t page, int head, bool is_value) {
  const int key_bytes = kv_key_bytes(cache);
  return cache.pages + page * cache.page_bytes +
         (is_value ? static_cast<int64_t>(cache.kv_heads) * key_bytes +
                         static_cast<int64_t>(head) * kv_part_bytes(cache.type_v, cache.head_dim)
                   : static_cast<int64_t>(head) * key_bytes);
}

// Where a lane's value among 32 features of a token lies: in which strip, among whose 32 values, the how-manieth.
struct KvPlace {
  int strip, owner, j;
  int scale;  // in the strip's scales

  __device__ __forceinline__ KvPlace(bool is_value, int blocks, int token, int block) {
    const int tile = token / kStripValues, within = token % kStripValues, lane = lane_id();
    strip = is_value ? block * kPageTiles + tile : tile * blocks + block;
    owner = lane_of_column(is_value ? lane : within);
    j = is_value ? within : lane;
    scale = is_value ? within : lane_of_column(within);
  }
};

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
  scale = __fdiv_rn(extreme + 0.0f, -8.0f);                        // the same for both zeros
  const float inverse = scale != 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
  return min(15, max(0, __float2int_rz(__fmaf_rn(x, inverse, 8.5f))));
}

// Features 32 block.. of a token (of a key of an index cache) of a page; a lane has one of them, 0 past the head's last.
__device__ __forceinline__ void store_kv(const KvCache& cache, uint8_t* part, bool is_value, int token, int block,
                                         float x) {
  const int type = is_value ? cache.type_v : cache.type_k, lane = lane_id();
  const KvPlace place(is_value, kv_feature_blocks(cache.head_dim), token, block);
  uint8_t* codes = part + place.strip * kv_strip_bytes(type) + place.owner * 16;
  const int j = place.j;
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
    uint8_t* scales = part + kv_scales_at(cache, is_value) + place.strip * (kStripValues * 2);
    reinterpret_cast<__half*>(scales)[place.scale] = __float2half_rn(scale);
  }
}

// The value of a lane, exactly.
__device__ __forceinline__ float load_kv(const KvCache& cache, const uint8_t* part, bool is_value, int token,
                                         int block) {
  const int type = is_value ? cache.type_v : cache.type_k;
  const KvPlace place(is_value, kv_feature_blocks(cache.head_dim), token, block);
  const uint8_t* codes = part + place.strip * kv_strip_bytes(type) + place.owner * 16;
  const int j = place.j;
  if (type == kKvF16) return __half2float(*reinterpret_cast<const __half*>(codes + j / 8 * 512 + j % 8 * 2));
  const int code = type == kKvQ8_0 ? static_cast<int8_t>(codes[j / 16 * 512 + j % 16])
                                   : static_cast<int>(get_4(codes + j / 8 * 4) >> nibble_place(j) & 15u) - 8;
  const uint8_t* scales = part + kv_scales_at(cache, is_value) + place.strip * (kStripValues * 2);
  return static_cast<float>(code) * __half2float(reinterpret_cast<const __half*>(scales)[place.scale]);
}

}  // namespace v100::cuda
