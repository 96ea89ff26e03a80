// What the attention kernels share: strips of a KV page as operands of the tensor instruction, the rows of a block, and how
// scores become weights.
//
// Numerics  A query row times a power of two that brings its largest value to 2^14..2^15, to f16. Keys and values: f16, or code
//           times scale (and minimum) rounded to f16. Products are exact, sums f32. Weights are 2^(score - largest + 14) as f16,
//           which keeps 11 bits down to 2^-28 of the largest; the sum of the weights is that of the rounded ones.
#pragma once

#include "codecs.cuh"
#include "kv_page.h"

namespace v100::cuda {

constexpr int kAttentionThreads = 256;
constexpr int kAttentionWarps = kAttentionThreads / kWarp;
constexpr float kWeightPower = 14.0f;

// A score that is not there.
__device__ __forceinline__ float no_score() { return __uint_as_float(0xff800000u); }  // -infinity

// 0xffff where the bit of a half is set, of two.
__device__ __forceinline__ uint32_t halves_of(uint32_t bits) {
  return (bits & 1u) * 0x0000ffffu | (bits >> 1 & 1u) * 0xffff0000u;
}

// The packed values of a lane in a strip: eight of them, unscaled, as pairs.
struct KvF16 {
  static constexpr KvType kType = kKvF16;
  static constexpr bool kHasMinimum = false;
  uint4 load[4];
  template <int octet>
  __device__ __forceinline__ void decode(uint32_t (&w)[4]) const {
    w[0] = load[octet].x, w[1] = load[octet].y, w[2] = load[octet].z, w[3] = load[octet].w;
  }
  // Values without a bit become zeros.
  __device__ __forceinline__ void keep(uint32_t bits) {
#pragma unroll
    for (int i = 0; i < 4; ++i, bits >>= 8) {
      load[i].x &= halves_of(bits), load[i].y &= halves_of(bits >> 2);
      load[i].z &= halves_of(bits >> 4), load[i].w &= halves_of(bits >> 6);
    }
  }
};
struct KvQ8_0 {
  static constexpr KvType kType = kKvQ8_0;
  static constexpr bool kHasMinimum = false;
  uint4 load[2];
  // The bytes of a word, moved to 0..255, into the low bits of 1024: pairs of 1024 + 128 + code.
  __device__ __forceinline__ static void decode_word(uint32_t word, uint32_t& low, uint32_t& high) {
    const uint32_t bytes = word ^ 0x80808080u;
    const __half2 offset = __float2half2_rn(1152.0f);
    low = as_bits(__hsub2(as_half2(__byte_perm(bytes, kMagic, 0x7170)), offset));
    high = as_bits(__hsub2(as_half2(__byte_perm(bytes, kMagic, 0x7372)), offset));
  }
  template <int octet>
  __device__ __forceinline__ void decode(uint32_t (&w)[4]) const {
    const uint4& from = load[octet / 2];
    decode_word(octet % 2 == 0 ? from.x : from.z, w[0], w[1]);
    decode_word(octet % 2 == 0 ? from.y : from.w, w[2], w[3]);
  }
};
struct KvQ4_0 {
  static constexpr KvType kType = kKvQ4_0;
  static constexpr bool kHasMinimum = false;
  uint4 load[1];
  template <int octet>
  __device__ __forceinline__ void decode(uint32_t (&w)[4]) const {
    const uint32_t word = octet == 0 ? load[0].x : octet == 1 ? load[0].y : octet == 2 ? load[0].z : load[0].w;
    for_each<4>([&]<int pair>() { w[pair] = as_bits(pair_of_nibbles<pair, 8>(word, 0)); });
  }
};

// q4_1, q5_0 and q5_1. Which of them is found at run time: every type with code of its own makes the kernels a third larger.
struct KvCounted {
  static constexpr KvType kType = kKvQ4_1;  // what is the same for all
  static constexpr bool kHasMinimum = true;
  uint4 load[1];
  uint32_t fifth;
  template <int octet>
  __device__ __forceinline__ void decode(uint32_t (&w)[4]) const {
    const uint32_t word = octet == 0 ? load[0].x : octet == 1 ? load[0].y : octet == 2 ? load[0].z : load[0].w;
    for_each<4>([&]<int pair>() {
      const uint32_t turned = rotate_right(fifth, octet + 8 * (pair / 2));
      w[pair] = as_bits(pair_of_nibbles<pair, 0>(word, turned & (pair % 2 == 0 ? 0x00100010u : 0x01000100u)));
    });
  }
  __device__ __forceinline__ void load_fifth(const uint8_t* from, int owner, int32_t type) {
    fifth = kv_has_fifth_bit(type) ? stream_4(from + 512 - owner * 12) : 0;
  }
};

// The type of a strip, known when compiling but for KvCounted.
template <class Strip>
__device__ __forceinline__ constexpr int32_t type_of(int32_t type) {
  return Strip::kHasMinimum ? type : Strip::kType;
}

// A pair of values times their scales; of KvCounted, codes, to which minimums are added.
template <class Strip>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, __half2 scale, __half2 minimum) {
  if constexpr (Strip::kHasMinimum) return as_bits(__hfma2(as_half2(pair), scale, minimum));
  return as_bits(__hmul2(as_half2(pair), scale));
}
__device__ __forceinline__ __half2 q5_0_minimum(__half2 scale) { return __hmul2(scale, __float2half2_rn(-16.0f)); }

// `from` is the place in the strip of lane `owner`.
template <class Strip>
__device__ __forceinline__ void load_strip(Strip& strip, const uint8_t* from, int owner, int32_t type) {
#pragma unroll
  for (int i = 0; i < kv_strip_loads(Strip::kType); ++i) strip.load[i] = stream_16(from + i * 512);
  if constexpr (Strip::kHasMinimum) strip.load_fifth(from, owner, type);
}
// After an octet was decoded: what it was the last to need takes the same place of another strip. So the next strip is on
// its way while this one is computed, without registers of its own.
template <int octet, class Strip>
__device__ __forceinline__ void refill(Strip& strip, const uint8_t* from, int owner, int32_t type) {
  constexpr int kOctets = 4 / kv_strip_loads(Strip::kType);  // of a load
  if constexpr ((octet + 1) % kOctets == 0) strip.load[octet / kOctets] = stream_16(from + octet / kOctets * 512);
  if constexpr (Strip::kHasMinimum && octet == 3) strip.load_fifth(from, owner, type);
}

// Without kCounted for kernels that are not launched with those types.
template <bool kCounted, class Body>
__device__ __forceinline__ void with_kv_type(int32_t type, const Body& body) {
  if (type == kKvF16)
    body.template operator()<KvF16>();
  else if (type == kKvQ8_0)
    body.template operator()<KvQ8_0>();
  else if (!kCounted || type == kKvQ4_0)
    body.template operator()<KvQ4_0>();
  else if constexpr (kCounted)
    body.template operator()<KvCounted>();
}

// Which rows of which sequence a block computes, and where their keys are.
struct AttentionBlock {
  int32_t sequence, kv_head;
  int32_t first_row;    // of the ubatch: query row 0 of the sequence
  int32_t first_head;   // of those that read the kv head
  int32_t heads;        // that read it
  int32_t first, rows;  // rows of the sequence (attention_pages.cuh): first.. , 0 rows: nothing to do

  __device__ __forceinline__ int32_t query_row(int32_t m) const { return first_row + (first + m) / heads; }
  __device__ __forceinline__ int32_t head(int32_t m) const { return first_head + (first + m) % heads; }
};

__device__ __forceinline__ AttentionBlock attention_block(const AttentionParams& p, int sequence, int kv_head,
                                                          int block, int most_rows) {
  AttentionBlock b;
  b.sequence = sequence, b.kv_head = kv_head;
  b.first_row = p.first_row[sequence];
  const int begin = kv_head * p.cache.group - p.cache.skew;
  b.first_head = max(0, begin);
  b.heads = max(0, min(p.heads, begin + p.cache.group) - b.first_head);
  b.first = block * most_rows;
  b.rows = max(0, min(most_rows, (p.first_row[sequence + 1] - b.first_row) * b.heads - b.first));
  return b;
}

// How scores become weights. A lane has four scores of a row in a tile of 32 tokens: rows of a tile of rows are
// row_of_c(lane, 2 * half) for both halves. With three other lanes it has all scores of the warp.
// Shared: warp_largest[warps][rows], warp_sum[warps][rows], largest[2][rows] before and after in turns.

// most: of a lane's scores of row m.
template <class Shared>
__device__ __forceinline__ void tell_largest(float most, int m, Shared& shared) {
#pragma unroll
  for (int apart = 2; apart <= 8; apart *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, apart));
  if ((lane_id() & 14) == 0) shared.warp_largest[warp_id()][m] = most;
}

// After a barrier that follows tell_largest. Weights, in pairs, of a lane's scores s of row m in kTiles tiles of tokens; the warp's
// sum of them and, by warp 0, what is new of the row: the largest score and the rescaling of what was before.
template <int kWarps, int kTiles, class Shared>
__device__ __forceinline__ void weigh_row(const float (*s)[8], int m, int half, int turn, Shared& shared,
                                          float* rescale, uint32_t (*weights)[2]) {
  const float before = shared.largest[turn][m];
  float most = before;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.warp_largest[w][m]);
  const float base = most == no_score() ? 0.0f : most;  // a row that sees nothing yet, or scores that are NaN
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int i = 2 * half + 4 * pair;
      const __half2 weight = __floats2half2_rn(exp2f(__fadd_rn(__fadd_rn(s[j][i], -base), kWeightPower)),
                                               exp2f(__fadd_rn(__fadd_rn(s[j][i + 1], -base), kWeightPower)));
      weights[j][pair] = as_bits(weight);
      total += __low2float(weight);
      total += __high2float(weight);
    }
#pragma unroll
  for (int apart = 2; apart <= 8; apart *= 2) total += __shfl_xor_sync(kAllLanes, total, apart);
  if ((lane_id() & 14) == 0) {
    shared.warp_sum[warp_id()][m] = total;
    if (warp_id() == 0) {
      shared.largest[turn ^ 1][m] = most;
      rescale[m] = exp2f(__fadd_rn(before, -base));
    }
  }
}
// Where the weights of a lane's row m and tile of tokens go: weights [token / 8][rows][8] f16.
template <int kRows>
__device__ __forceinline__ void put_weights(const uint32_t (&pairs)[2], int tile, int m, int half, uint16_t* weights) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int token = tile * kStripValues + column_of_c(lane_id(), 2 * half + 4 * pair);
    *reinterpret_cast<uint32_t*>(&weights[token / 8 * (kRows * 8) + m * 8 + token % 8]) = pairs[pair];
  }
}

}  // namespace v100::cuda
