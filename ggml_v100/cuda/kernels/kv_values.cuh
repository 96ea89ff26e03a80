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
// Of the types whose code 0 is minus 2^(bits - 1): the value of largest magnitude, the first of equals, gets it.
template <int bits>
__device__ __forceinline__ int code_symmetric(float x, float& scale) {
  constexpr float kMiddle = 1 << (bits - 1);
  const float largest = warp_max(fabsf(x));
  const int first = __ffs(static_cast<int>(__ballot_sync(kAllLanes, fabsf(x) == largest))) - 1;
  const float extreme = __shfl_sync(kAllLanes, x, max(first, 0));  // max: a block of NaN has none
  scale = __fdiv_rn(extreme + 0.0f, -kMiddle);                     // the same for both zeros
  const float inverse = scale != 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
  return min((1 << bits) - 1, max(0, __float2int_rz(__fmaf_rn(x, inverse, kMiddle + 0.5f))));
}
// Of the types that count up from the least value.
template <int bits>
__device__ __forceinline__ int code_from_minimum(float x, float& scale, float& minimum) {
  constexpr int kMost = (1 << bits) - 1;
  minimum = -warp_max(-x);
  scale = __fdiv_rn(__fsub_rn(warp_max(x), minimum), static_cast<float>(kMost));
  const float inverse = scale != 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
  return min(kMost, max(0, __float2int_rz(__fmaf_rn(__fsub_rn(x, minimum), inverse, 0.5f))));
}

// A lane's bits of a word that `lanes` lanes share (keys), or that it shares with other tokens, perhaps of this launch
// (values): then only its own bits are touched.
template <int lanes>
__device__ __forceinline__ void store_bits(uint32_t* word, bool is_value, uint32_t mask, uint32_t bits) {
  if (is_value) {
    atomicAnd(word, ~mask);
    atomicOr(word, bits);
    return;
  }
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) bits |= __shfl_xor_sync(kAllLanes, bits, apart);
  if (lane_id() % lanes == 0) *word = bits;
}

// Features 32 block.. of a token (of a key of an index cache) of a page; a lane has one of them, 0 past the head's last.
__device__ __forceinline__ void store_kv(const KvCache& cache, uint8_t* part, bool is_value, int token, int block,
                                         float x) {
  const int type = is_value ? cache.type_v : cache.type_k, lane = lane_id();
  const KvPlace place(is_value, kv_feature_blocks(cache.head_dim), token, block);
  uint8_t* codes = part + place.strip * kv_strip_bytes(type) + place.owner * 16;
  const int j = place.j;
  float scale = 0.0f, minimum = 0.0f;
  if (type == kKvF16) {
    *reinterpret_cast<__half*>(codes + j / 8 * 512 + j % 8 * 2) = __float2half_rn(x);
    return;
  }
  if (type == kKvQ8_0) {
    codes[j / 16 * 512 + j % 16] = static_cast<uint8_t>(code_q8_0(x, scale));
  } else {
    const uint32_t code = static_cast<uint32_t>(type == kKvQ4_0   ? code_symmetric<4>(x, scale)
                                                : type == kKvQ5_0 ? code_symmetric<5>(x, scale)
                                                : type == kKvQ4_1 ? code_from_minimum<4>(x, scale, minimum)
                                                                  : code_from_minimum<5>(x, scale, minimum));
    store_bits<8>(reinterpret_cast<uint32_t*>(codes + j / 8 * 4), is_value, 15u << nibble_place(j),
                  (code & 15u) << nibble_place(j));
    if (kv_has_fifth_bit(type))
      store_bits<32>(reinterpret_cast<uint32_t*>(part + place.strip * kv_strip_bytes(type) + 512 + place.owner * 4),
                     is_value, 1u << fifth_bit_place(j), (code >> 4) << fifth_bit_place(j));
  }
  if (lane == 0) {
    uint8_t* scales = part + kv_scales_at(cache, is_value) + place.strip * (kStripValues * 2);
    reinterpret_cast<__half*>(scales)[place.scale] = __float2half_rn(scale);
    if (kv_has_minimum(type)) {
      scales += kv_minimums_after(cache, is_value);
      reinterpret_cast<__half*>(scales)[place.scale] = __float2half_rn(minimum);
    }
  }
}

// The value of a lane: f32 holds code times scale exactly; the sum with a minimum is rounded once.
__device__ __forceinline__ float load_kv(const KvCache& cache, const uint8_t* part, bool is_value, int token,
                                         int block) {
  const int type = is_value ? cache.type_v : cache.type_k;
  const KvPlace place(is_value, kv_feature_blocks(cache.head_dim), token, block);
  const uint8_t* codes = part + place.strip * kv_strip_bytes(type) + place.owner * 16;
  const int j = place.j;
  if (type == kKvF16) return __half2float(*reinterpret_cast<const __half*>(codes + j / 8 * 512 + j % 8 * 2));
  const uint8_t* scales = part + kv_scales_at(cache, is_value) + place.strip * (kStripValues * 2) + place.scale * 2;
  const float scale = __half2float(*reinterpret_cast<const __half*>(scales));
  if (type == kKvQ8_0) return static_cast<float>(static_cast<int8_t>(codes[j / 16 * 512 + j % 16])) * scale;
  int code = static_cast<int>(get_4(codes + j / 8 * 4) >> nibble_place(j) & 15u);
  if (kv_has_fifth_bit(type)) {
    const uint8_t* fifth = part + place.strip * kv_strip_bytes(type) + 512 + place.owner * 4;
    code |= static_cast<int>(get_4(fifth) >> fifth_bit_place(j) & 1u) << 4;
  }
  if (!kv_has_minimum(type)) return static_cast<float>(code - (type == kKvQ5_0 ? 16 : 8)) * scale;
  const __half minimum = *reinterpret_cast<const __half*>(scales + kv_minimums_after(cache, is_value));
  return fmaf(static_cast<float>(code), scale, __half2float(minimum));
}

}  // namespace v100::cuda
