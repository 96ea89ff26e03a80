// Softmax attention of up to 64 query rows of one kv head over a stretch of a sequence: what decode and prompt share.
//
// Rows      A row here is a query row and one of the heads that read the kv head, heads fastest: row m of a sequence is query
//           row m / heads, head m % heads. So every byte of keys and values is read once for up to 64 of them.
// A page    1. scores   warp w has tokens 32 w..: keys stream from memory into the B operand, queries are A, from shared memory
//           2. weights  the largest score over the warps, then 2^(score - largest + 14) as f16 to shared memory
//           3. sums     a warp has 32 features and every kParts-th unit of 32 tokens: values stream into B, weights are A
//           Two barriers per page. Neither keys nor values pass through shared memory.
// Layout    queries [feature / 8][rows][8] f16 and weights [token / 8][rows][8] f16, like the panels of linear.cu
// Numerics  A query row times a power of two that brings its largest value to 2^14..2^15, to f16. Keys and values: f16, or code
//           times scale (and minimum) rounded to f16. Products are exact, sums f32. The weights' factor 2^14 keeps 11 bits down to 2^-28 of
//           the largest; the sum of the weights is that of the rounded ones. Tokens that nobody sees are skipped in units of 32
//           and their values count as zero; a row adds exact zeros for tokens that only others see. So a row's bits depend
//           on its own queries and view only.
#pragma once

#include "attention_shape.h"
#include "codecs.cuh"

namespace v100::cuda {

constexpr int kAttentionThreads = 256;
constexpr int kAttentionWarps = kAttentionThreads / kWarp;
static_assert(kAttentionWarps == kPageTiles, "a warp has 32 tokens of a page");
constexpr float kWeightPower = 14.0f;

// A score that is not there.
__device__ __forceinline__ float no_score() { return __uint_as_float(0xff800000u); }  // -infinity

// The packed values of a lane in a strip: eight of them, unscaled, as pairs.
struct KvF16 {
  static constexpr KvType kType = kKvF16;
  static constexpr bool kHasMinimum = false;
  uint4 load[4];
  template <int octet>
  __device__ __forceinline__ void decode(uint32_t (&w)[4]) const {
    w[0] = load[octet].x, w[1] = load[octet].y, w[2] = load[octet].z, w[3] = load[octet].w;
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
  int32_t first, rows;  // rows of the sequence (see above): first.. , 0 rows: nothing to do

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

// Step 2 of the scores of a warp's 32 tokens. Rows of a tile that a lane has: row_of_c(lane, 0) and, two below,
// row_of_c(lane, 2). Four values of each, and with three other lanes all of the warp.
// Shared: warp_largest[warps][rows], warp_sum[warps][rows], largest[2][rows] before and after in turns, rescale[rows].

// most: of the four scores of row m.
template <class Shared>
__device__ __forceinline__ void tell_largest(float most, int m, Shared& shared) {
#pragma unroll
  for (int apart = 2; apart <= 8; apart *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, apart));
  if ((lane_id() & 14) == 0) shared.warp_largest[warp_id()][m] = most;
}

// Weights [token / 8][rows][8] f16, their sums per warp, the largest scores and the rescaling of what was before. After a
// barrier that follows tell_largest.
template <int kTiles, class Shared>
__device__ __forceinline__ void weigh_scores(const float (&s)[kTiles][8], int turn, Shared& shared, uint16_t* weights) {
  constexpr int kOctet = kTiles * kTileRows * 8;  // 8 tokens of all rows
  const int lane = lane_id();
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = t * kTileRows + row_of_c(lane, 2 * half);
      const float before = shared.largest[turn][m];
      float most = before;
#pragma unroll
      for (int w = 0; w < kAttentionWarps; ++w) most = fmaxf(most, shared.warp_largest[w][m]);
      const float base = most == no_score() ? 0.0f : most;  // a row that sees nothing yet, or scores that are NaN
      float total = 0.0f;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int i = 2 * half + 4 * pair;
        const __half2 weight = __floats2half2_rn(exp2f(__fadd_rn(__fadd_rn(s[t][i], -base), kWeightPower)),
                                                 exp2f(__fadd_rn(__fadd_rn(s[t][i + 1], -base), kWeightPower)));
        const int token = warp_id() * kStripValues + column_of_c(lane, i);
        *reinterpret_cast<__half2*>(&weights[token / 8 * kOctet + m * 8 + token % 8]) = weight;
        total += __low2float(weight);
        total += __high2float(weight);
      }
#pragma unroll
      for (int apart = 2; apart <= 8; apart *= 2) total += __shfl_xor_sync(kAllLanes, total, apart);
      if ((lane & 14) == 0) {
        shared.warp_sum[warp_id()][m] = total;
        if (warp_id() == 0) {
          shared.largest[turn ^ 1][m] = most;
          shared.rescale[m] = exp2f(__fadd_rn(before, -base));
        }
      }
    }
}

template <int kHeadDim, int kTiles, bool kCounted>
struct Attention {
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kBlocks = kv_feature_blocks(kHeadDim);
  static constexpr int kParts = kAttentionWarps / kBlocks;  // of a page's tokens: warps that share 32 features
  static constexpr int kOctet = kRows * 8;                  // 8 values of all rows

  struct Shared {
    uint16_t queries[kBlocks * 4 * kOctet];
    uint16_t weights[kPageTokens / 8 * kOctet];
    float merged[kParts > 1 ? (kParts - 1) * kBlocks : 1][kParts > 1 ? kTileRows * kTileColumns : 1];
    float warp_largest[kAttentionWarps][kRows], warp_sum[kAttentionWarps][kRows];
    float largest[2][kRows];  // before and after a page, in turns
    float rescale[kRows];     // of the sums before a page
    float row_scale[kRows];   // from accumulators to scores in powers of 2
    int2 visible[kRows];
  };
  static_assert(sizeof(Shared) <= attention_shared_bytes(kHeadDim, kRows), "what the host asks for");

  // After `run`: of rows row_of_c(lane, i) of each tile and features column_of_c(lane, i) of the warp's 32.
  float y[kTiles][8];
  // Of row threadIdx.x, in its thread.
  float largest, sum;

  __device__ __forceinline__ static int feature_block() { return warp_id() % kBlocks; }
  __device__ __forceinline__ static int part() { return warp_id() / kBlocks; }
  __device__ __forceinline__ static bool has_features() { return part() < kParts; }

  // Over kv indices [begin, end), or what the rows see of them. False, for all threads, where that is nothing.
  __device__ __forceinline__ bool run(const AttentionParams& p, const AttentionBlock& b, int begin, int end,
                                      Shared& shared) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) y[t][i] = 0.0f;
    largest = no_score(), sum = 0.0f;
    load_views(p, b, shared);
    __syncthreads();  // the views written above are read below
    narrow(shared, begin, end);
    if (begin >= end) return false;
    load_queries(p, b, shared);
    __syncthreads();  // the queries written above are read below

    int turn = 0;
#pragma unroll 1
    for (int page = begin / kPageTokens; page * kPageTokens < end; ++page, turn ^= 1) {
      weigh(p.cache.type_k, head_part(p, b, page, false), page * kPageTokens, begin, end, turn, shared);
      if (static_cast<int>(threadIdx.x) < kRows) {
        float added = 0.0f;
#pragma unroll
        for (int w = 0; w < kAttentionWarps; ++w) added += shared.warp_sum[w][threadIdx.x];
        sum = fmaf(sum, shared.rescale[threadIdx.x], added);
        largest = shared.largest[turn ^ 1][threadIdx.x];
      }
      if (has_features()) {
        rescale(shared);
        with_kv_type<kCounted>(p.cache.type_v, [&]<class Strip>() {
          add_values<Strip>(p.cache.type_v, head_part(p, b, page, true), page * kPageTokens, begin, end, shared);
        });
      }
    }
    merge_parts(shared);
    return true;
  }

 private:
  // kv_part_bytes; for fewer types it takes fewer registers.
  __device__ __forceinline__ static constexpr int part_bytes(int32_t type) {
    if constexpr (kCounted) return kv_part_bytes(type, kHeadDim);
    return kPageTiles * kBlocks * (kv_strip_loads(type) * 512 + (type == kKvF16 ? 0 : kStripValues * 2));
  }
  // Keys or values of the block's kv head in a page. Found anew for each: an address kept over a page is two registers.
  __device__ __forceinline__ static const uint8_t* head_part(const AttentionParams& p, const AttentionBlock& b,
                                                             int page, bool is_value) {
    const int key_bytes = part_bytes(p.cache.type_k);
    const int64_t id = p.page_table[static_cast<int64_t>(b.sequence) * p.most_pages + page];
    const uint8_t* parts = p.cache.pages + id * p.cache.page_bytes;
    if (!is_value) return parts + static_cast<int64_t>(b.kv_head) * key_bytes;
    return parts + static_cast<int64_t>(p.cache.kv_heads) * key_bytes +
           static_cast<int64_t>(b.kv_head) * part_bytes(p.cache.type_v);
  }

  __device__ __forceinline__ void load_views(const AttentionParams& p, const AttentionBlock& b, Shared& shared) {
    const int m = static_cast<int>(threadIdx.x);
    if (m >= kRows) return;
    int2 view = {0, 0};
    if (m < b.rows) view = reinterpret_cast<const int2*>(p.visible)[b.query_row(m)];
    shared.visible[m] = view;
    shared.largest[0][m] = no_score();
  }

  // [begin, end) to what at least one row sees, the same in all threads.
  __device__ __forceinline__ static void narrow(const Shared& shared, int& begin, int& end) {
    int first = end, last = begin;
    for (int m = lane_id(); m < kRows; m += kWarp) {
      const int2 view = shared.visible[m];
      if (view.x < view.y) first = min(first, view.x), last = max(last, view.y);
    }
#pragma unroll
    for (int apart = kWarp / 2; apart > 0; apart /= 2) {
      first = min(first, __shfl_xor_sync(kAllLanes, first, apart));
      last = max(last, __shfl_xor_sync(kAllLanes, last, apart));
    }
    begin = max(begin, first), end = min(end, last);
  }

  // A warp per row.
  __device__ __forceinline__ static void load_queries(const AttentionParams& p, const AttentionBlock& b,
                                                      Shared& shared) {
    const int lane = lane_id();
#pragma unroll 1
    for (int m = warp_id(); m < kRows; m += kAttentionWarps) {
      float x[kBlocks];
      float most = 0.0f;
      const float* q = p.q;
      if (m < b.rows) q += (static_cast<int64_t>(b.query_row(m)) * p.heads + b.head(m)) * kHeadDim;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int feature = i * kWarp + lane;
        x[i] = m < b.rows && feature < kHeadDim ? q[feature] : 0.0f;
        most = fmaxf(most, fabsf(x[i]));
      }
      most = warp_max(most);
      // As in panel.cu: most = 1..2 times 2^exponent is brought to 2^14..2^15.
      const int exponent = static_cast<int>(__float_as_uint(most) >> 23 & 255u) - 127;
      const bool is_plain = most > 0.0f && exponent < 128;
      const int shift = is_plain ? min(14 - exponent, 126) : 0;
      const float factor = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
      if (lane == 0)
        shared.row_scale[m] =
            p.scale * 1.44269504088896341f * __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int feature = i * kWarp + lane;
        shared.queries[feature / 8 * kOctet + m * 8 + feature % 8] = __half_as_ushort(__float2half_rn(x[i] * factor));
      }
    }
  }

  template <class Strip>
  __device__ __forceinline__ static void add_scores(int32_t type, const uint8_t* keys, const Shared& shared,
                                                    float (&s)[kTiles][8]) {
    constexpr bool kScaled = Strip::kType != kKvF16;
    const int tile = warp_id(), lane = lane_id(), strip_bytes = kv_strip_bytes(type_of<Strip>(type));
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(keys + kv_code_bytes(type_of<Strip>(type), kHeadDim)) +
                             tile * kBlocks * kWarp + lane;
    const uint16_t* a = shared.queries + row_of_a(lane) * 8;
    const uint8_t* from = keys + tile * kBlocks * strip_bytes + lane * 16;
    Strip strip;
    load_strip(strip, from, lane_id(), type_of<Strip>(type));
    uint32_t next_scale = kScaled ? stream_2(scales) : 0;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block, a += 4 * kOctet) {
      const __half2 scale = low_twice(next_scale);
      __half2 minimum = scale;
      if constexpr (Strip::kHasMinimum)
        minimum =
            kv_has_minimum(type) ? low_twice(stream_2(scales + kv_scale_bytes(kHeadDim) / 2)) : q5_0_minimum(scale);
      const bool has_next = block + 1 < kBlocks;
      from += strip_bytes, scales += kWarp;
      if (kScaled && has_next) next_scale = stream_2(scales);
      for_each<4>([&]<int octet>() {
        uint32_t w[4];
        strip.template decode<octet>(w);
        if (has_next) refill<octet>(strip, from, lane_id(), type_of<Strip>(type));
        if (kScaled) {
#pragma unroll
          for (int i = 0; i < 4; ++i) w[i] = scaled<Strip>(w[i], scale, minimum);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4 q = *reinterpret_cast<const uint4*>(a + octet * kOctet + t * (kTileRows * 8));
          mma_8x32x4(s[t], q.x, q.y, w[0], w[1]);
          mma_8x32x4(s[t], q.z, q.w, w[2], w[3]);
        }
      });
    }
  }

  // Steps 1 and 2: weights, their sums per warp, the largest scores and the rescaling of what was before.
  __device__ __forceinline__ static void weigh(int32_t type, const uint8_t* keys, int page_begin, int begin, int end,
                                               int turn, Shared& shared) {
    const int lane = lane_id(), first = page_begin + warp_id() * kStripValues;
    float s[kTiles][8];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) s[t][i] = 0.0f;
    const bool is_seen = first < end && first + kStripValues > begin;
    if (is_seen) with_kv_type<kCounted>(type, [&]<class Strip>() { add_scores<Strip>(type, keys, shared, s); });

#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = t * kTileRows + row_of_c(lane, 2 * half);
        const int2 view = shared.visible[m];
        const float scale = shared.row_scale[m];
        float most = no_score();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = (j & 1) + 2 * half + 4 * (j >> 1), token = first + column_of_c(lane, i);
          s[t][i] = token >= view.x && token < view.y ? __fmul_rn(s[t][i], scale) : no_score();
          most = fmaxf(most, s[t][i]);
        }
        tell_largest(most, m, shared);
      }
    __syncthreads();  // the largest scores written above are read below; the weights of the page before are done with

    weigh_scores(s, turn, shared, shared.weights);
    __syncthreads();  // weights, sums and rescaling written above are read by all
  }

  __device__ __forceinline__ void rescale(const Shared& shared) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = shared.rescale[t * kTileRows + row_of_c(lane_id(), 2 * half)];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& value = y[t][(j & 1) + 2 * half + 4 * (j >> 1)];
          value = __fmul_rn(value, factor);
        }
      }
  }

  // Step 3: units of 32 tokens part(), part() + kParts, ... of the page.
  template <class Strip>
  __device__ __forceinline__ void add_values(int32_t type, const uint8_t* values, int page_begin, int begin, int end,
                                             const Shared& shared) {
    constexpr bool kScaled = Strip::kType != kKvF16;
    const int strip_bytes = kv_strip_bytes(type_of<Strip>(type));
    const uint8_t* codes = values + feature_block() * kPageTiles * strip_bytes + lane_id() * 16;
    // Scales of tokens 2 l and 2 l + 1 of a unit are for lane l, those below 16, and again for the upper lanes.
    const uint8_t* scales = values + kv_code_bytes(type_of<Strip>(type), kHeadDim) +
                            feature_block() * (kPageTokens * 2) + lane_id() % 16 * 4;
    // The units of this warp that anybody sees.
    const int skipped = max(0, begin - page_begin) / kStripValues;
    int unit = part() + (max(0, skipped - part()) + kParts - 1) / kParts * kParts;
    const int stop = min(kPageTiles, (end - page_begin + kStripValues - 1) / kStripValues);
    const uint16_t* a = shared.weights + row_of_a(lane_id()) * 8;
    Strip strip;
    uint32_t next_pair = 0;
    if (unit < stop) {
      load_strip(strip, codes + unit * strip_bytes, lane_id(), type_of<Strip>(type));
      if (kScaled) next_pair = stream_4(scales + unit * (kStripValues * 2));
    }
#pragma unroll 1
    for (; unit < stop; unit += kParts) {
      const uint32_t pairs = next_pair;
      uint32_t minimums = 0;
      if constexpr (Strip::kHasMinimum)
        minimums = kv_has_minimum(type) ? stream_4(scales + kv_scale_bytes(kHeadDim) + unit * (kStripValues * 2))
                                        : as_bits(q5_0_minimum(as_half2(pairs)));
      const bool has_next = unit + kParts < stop;
      if (kScaled && has_next) next_pair = stream_4(scales + (unit + kParts) * (kStripValues * 2));
      const int first = page_begin + unit * kStripValues;
      const bool is_whole = first >= begin && first + kStripValues <= end;
      for_each<4>([&]<int octet>() {
        uint32_t w[4];
        strip.template decode<octet>(w);
        if (has_next) refill<octet>(strip, codes + (unit + kParts) * strip_bytes, lane_id(), type_of<Strip>(type));
        if (kScaled) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t pair = __shfl_sync(kAllLanes, pairs, octet * 4 + i);
            const uint32_t minimum = Strip::kHasMinimum ? __shfl_sync(kAllLanes, minimums, octet * 4 + i) : 0;
            w[i] = scaled<Strip>(w[i], as_half2(pair), as_half2(minimum));
          }
        }
        if (!is_whole) {  // what lies there may be anything, and 0 times infinity is not 0
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = first + octet * 8 + 2 * i;
            if (token < begin || token >= end) w[i] &= 0xffff0000u;
            if (token + 1 < begin || token + 1 >= end) w[i] &= 0x0000ffffu;
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4 p = *reinterpret_cast<const uint4*>(a + (unit * 4 + octet) * kOctet + t * (kTileRows * 8));
          mma_8x32x4(y[t], p.x, p.y, w[0], w[1]);
          mma_8x32x4(y[t], p.z, p.w, w[2], w[3]);
        }
      });
    }
  }

  // The sums of the parts, in their order, in the warps of part 0.
  __device__ __forceinline__ void merge_parts(Shared& shared) {
    if constexpr (kParts > 1) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        __syncthreads();  // the sums of the tile before are read
        if (part() > 0 && has_features()) {
#pragma unroll
          for (int i = 0; i < 8; ++i) shared.merged[warp_id() - kBlocks][i * kWarp + lane_id()] = y[t][i];
        }
        __syncthreads();  // those written above are read below
        if (part() == 0) {
#pragma unroll
          for (int other = 1; other < kParts; ++other)
#pragma unroll
            for (int i = 0; i < 8; ++i)
              y[t][i] = __fadd_rn(y[t][i], shared.merged[warp_id() + (other - 1) * kBlocks][i * kWarp + lane_id()]);
        }
      }
    }
  }
};

}  // namespace v100::cuda
