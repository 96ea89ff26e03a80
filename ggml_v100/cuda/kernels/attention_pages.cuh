// Softmax attention of up to 64 query rows of one kv head over a stretch of a sequence: what decode and prompt share.
//
// Rows      A row here is a query row and one of the heads that read the kv head, heads fastest: row m of a sequence is query
//           row m / heads, head m % heads. So every byte of keys and values is read once for up to 64 of them.
// A page    Four warps have its keys, four the values of the page before: one half waits for nothing of the other but weights.
//           keys    warp w has tokens 64 w..: two strips of 32 side by side stream from memory into B operands, queries are
//                   A, from shared memory, each loaded for both. The largest scores over these warps, then
//                   2^(score - largest + 14) as f16 to shared memory, when the values of the page before are summed
//           values  a warp has 64 features, two strips side by side, and every kParts-th unit of 32 tokens; weights are A
//           A warp asks for the next page's first strips while it computes the last ones of a page.
//           Neither keys nor values pass through shared memory.
// Layout    queries [feature / 8][rows][8] f16 and weights [token / 8][rows][8] f16, like the panels of linear.cu
// Numerics  attention.cuh. Units of 32 values that nobody sees are skipped and values of tokens that nobody sees count as zero;
//           a row adds exact zeros for tokens that only others see. So a row's bits depend on its own queries and view only.
#pragma once

#include "attention.cuh"
#include "attention_shape.h"
#include "barriers.cuh"

namespace v100::cuda {

constexpr int kKeyWarps = kAttentionWarps / 2;
constexpr int kBeside = 2;  // strips that a warp computes side by side
static_assert(kKeyWarps * kBeside == kPageTiles, "the tokens of a page");

// What a warp has asked memory for: strips of a type that is known where it is used, and scales.
struct StripsInFlight {
  uint4 load[kBeside][4];
  uint32_t fifth[kBeside];
  uint32_t scale[kBeside];

  template <class Strip>
  __device__ __forceinline__ Strip strip(int i) const {
    Strip found;
#pragma unroll
    for (int l = 0; l < kv_strip_loads(Strip::kType); ++l) found.load[l] = load[i][l];
    if constexpr (Strip::kHasMinimum) found.fifth = fifth[i];
    return found;
  }
  template <class Strip>
  __device__ __forceinline__ void keep(int i, const Strip& strip) {
#pragma unroll
    for (int l = 0; l < kv_strip_loads(Strip::kType); ++l) load[i][l] = strip.load[l];
    if constexpr (Strip::kHasMinimum) fifth[i] = strip.fifth;
  }
};

template <int kHeadDim, int kTiles, bool kCounted>
struct Attention {
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kBlocks = kv_feature_blocks(kHeadDim);
  static constexpr int kSides = (kBlocks + kBeside - 1) / kBeside;  // of kBeside feature blocks
  static constexpr int kParts = kKeyWarps / kSides;                 // of a page's tokens: warps that share features
  static_assert(kSides * kParts == kKeyWarps, "no warp is idle");
  static constexpr int kOctet = kRows * 8;  // 8 values of all rows

  struct Shared {
    uint16_t queries[kBlocks * 4 * kOctet];
    uint16_t weights[kPageTokens / 8 * kOctet];
    float merged[kParts > 1 ? (kParts - 1) * kSides : 1][kParts > 1 ? kBeside * kTileRows * kTileColumns : 1];
    float warp_largest[kKeyWarps][kRows], warp_sum[kKeyWarps][kRows];
    float largest[2][kRows];  // before and after a page, in turns
    float rescale[2][kRows];  // of the sums before a page, in turns
    float row_scale[kRows];   // from accumulators to scores in powers of 2
    int2 visible[kRows];
  };
  static_assert(sizeof(Shared) <= attention_shared_bytes(kHeadDim, kRows), "what the host asks for");

  // After `run`: in warps with has_sums(), of rows row_of_c(lane, i) of each tile and features column_of_c(lane, i) of blocks
  // feature_block(0) and (1), of which the latter may be behind the last.
  float y[kTiles][kBeside][8];
  // Of row threadIdx.x, in its thread.
  float largest, sum;

  __device__ __forceinline__ static bool has_keys() { return warp_id() < kKeyWarps; }
  __device__ __forceinline__ static int side() { return (warp_id() - kKeyWarps) % kSides; }
  __device__ __forceinline__ static int part() { return (warp_id() - kKeyWarps) / kSides; }
  __device__ __forceinline__ static bool has_sums() { return !has_keys() && part() == 0; }
  __device__ __forceinline__ static int feature_block(int i) { return kBeside * side() + i; }

  // Over kv indices [begin, end), or what the rows see of them. False, for all threads, where that is nothing.
  __device__ __forceinline__ bool run(const AttentionParams& p, const AttentionBlock& b, int begin, int end,
                                      Shared& shared) {
    narrow(p, b, begin, end);
    if (begin >= end) {
      largest = no_score(), sum = 0.0f;
      clear();
      return false;
    }
    if (has_keys()) {
      weigh_pages(p, b, begin, end, shared);
      clear();  // here and not before: nobody keeps zeros in registers meanwhile
    } else {
      largest = no_score(), sum = 0.0f;
      add_pages(p, b, begin, end, shared);
    }
    merge_parts(shared);
    return true;
  }

 private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int j = 0; j < kBeside; ++j)
#pragma unroll
        for (int i = 0; i < 8; ++i) y[t][j][i] = 0.0f;
  }

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
  __device__ __forceinline__ static void narrow(const AttentionParams& p, const AttentionBlock& b, int& begin,
                                                int& end) {
    int first = end, last = begin;
    for (int m = lane_id(); m < b.rows; m += kWarp) {
      const int2 view = reinterpret_cast<const int2*>(p.visible)[b.query_row(m)];
      if (view.x < view.y) first = min(first, view.x), last = max(last, view.y);
    }
#pragma unroll
    for (int apart = kWarp / 2; apart > 0; apart /= 2) {
      first = min(first, __shfl_xor_sync(kAllLanes, first, apart));
      last = max(last, __shfl_xor_sync(kAllLanes, last, apart));
    }
    begin = max(begin, first), end = min(end, last);
  }

  // A warp of the values per row.
  __device__ __forceinline__ static void load_queries(const AttentionParams& p, const AttentionBlock& b,
                                                      Shared& shared) {
    const int lane = lane_id();
#pragma unroll 2
    for (int m = warp_id() - kKeyWarps; m < kRows; m += kKeyWarps) {
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

  // Before a block's first page: what follows the strips that are asked for goes to L2, which takes no register. A block of few
  // pages is little but latencies; where there are many blocks, they would push each other's out of L2.
  __device__ __forceinline__ static int bytes_ahead() {
    constexpr int kBytes = (4 << 20) / (2 * kPageTiles), kLeast = 1024;  // of a run of strips, if there were one block
    const int bytes = kBytes / static_cast<int>(gridDim.x * gridDim.y * gridDim.z);
    return bytes < kLeast ? 0 : bytes;
  }
  __device__ __forceinline__ static void prefetch_run(const uint8_t* from, int bytes) {
#pragma unroll 1
    for (int at = lane_id() * 32; at < bytes; at += kWarp * 32) prefetch(from + at);
  }
  __device__ __forceinline__ static void prefetch_keys(int32_t type, const uint8_t* keys) {
    const int strip = kv_strip_bytes(type), run = kBlocks * strip, scales = kBlocks * kStripValues * 2;
#pragma unroll
    for (int tile = kBeside * warp_id(); tile < kBeside * (warp_id() + 1); ++tile) {
      prefetch_run(keys + tile * run + strip, min(run - strip, bytes_ahead()));
      if (type != kKvF16) prefetch_run(keys + kPageTiles * run + tile * scales, scales);
    }
  }
  __device__ __forceinline__ static void prefetch_values(int32_t type, const uint8_t* values) {
    const int strip = kv_strip_bytes(type), run = kPageTiles * strip, scales = kPageTokens * 2;
#pragma unroll
    for (int j = 0; j < kBeside; ++j) {
      if (part() > 0 || feature_block(j) >= kBlocks) return;
      prefetch_run(values + feature_block(j) * run + strip, min(run - strip, kParts * bytes_ahead()));
      if (type != kKvF16) prefetch_run(values + kBlocks * run + feature_block(j) * scales, scales);
    }
  }

  // --- keys -------------------------------------------------------------------------------------------------------------

  // Where a warp's first strip of keys and its scales are, of this lane.
  template <class Strip>
  struct KeyPlace {
    const uint8_t *codes, *scales;

    __device__ __forceinline__ KeyPlace(int32_t type, const uint8_t* keys) {
      const int tile = kBeside * warp_id(), code_bytes = kv_code_bytes(type_of<Strip>(type), kHeadDim);
      codes = keys + tile * kBlocks * kv_strip_bytes(type_of<Strip>(type)) + lane_id() * 16;
      scales = keys + code_bytes + (tile * kBlocks * kWarp + lane_id()) * 2;
    }
  };

  template <class Strip>
  __device__ __forceinline__ static void ask_for_keys(int32_t type, const uint8_t* keys, StripsInFlight& flight) {
    const KeyPlace<Strip> at(type, keys);
#pragma unroll
    for (int j = 0; j < kBeside; ++j) {
      Strip strip;
      load_strip(strip, at.codes + j * kBlocks * kv_strip_bytes(type_of<Strip>(type)), lane_id(), type_of<Strip>(type));
      flight.keep(j, strip);
      if (Strip::kType != kKvF16) flight.scale[j] = stream_2(at.scales + j * kBlocks * kWarp * 2);
    }
  }

  // next: the keys of the page after, or nullptr.
  template <class Strip>
  __device__ __forceinline__ static void add_scores(int32_t type, const uint8_t* keys, const uint8_t* next,
                                                    const Shared& shared, StripsInFlight& flight,
                                                    float (&s)[kTiles][kBeside][8]) {
    constexpr bool kScaled = Strip::kType != kKvF16;
    const int strip_bytes = kv_strip_bytes(type_of<Strip>(type)), apart = kBlocks * strip_bytes;
    const uint16_t* a = shared.queries + row_of_a(lane_id()) * 8;
    KeyPlace<Strip> at(type, keys);
    Strip strip[kBeside];
#pragma unroll
    for (int j = 0; j < kBeside; ++j) strip[j] = flight.template strip<Strip>(j);
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block, a += 4 * kOctet) {
      __half2 scale[kBeside], minimum[kBeside];
#pragma unroll
      for (int j = 0; j < kBeside; ++j) {
        scale[j] = minimum[j] = low_twice(flight.scale[j]);
        if constexpr (Strip::kHasMinimum) {
          const uint8_t* from = at.scales + kv_scale_bytes(kHeadDim) + j * kBlocks * kWarp * 2;
          minimum[j] = kv_has_minimum(type) ? low_twice(stream_2(from)) : q5_0_minimum(scale[j]);
        }
      }
      at.codes += strip_bytes, at.scales += kWarp * 2;
      if (block + 1 == kBlocks && next != nullptr) at = KeyPlace<Strip>(type, next);
      const bool has_next = block + 1 < kBlocks || next != nullptr;
      if (kScaled && has_next) {
#pragma unroll
        for (int j = 0; j < kBeside; ++j) flight.scale[j] = stream_2(at.scales + j * kBlocks * kWarp * 2);
      }
      for_each<4>([&]<int octet>() {
        uint32_t w[kBeside][4];
#pragma unroll
        for (int j = 0; j < kBeside; ++j) {
          strip[j].template decode<octet>(w[j]);
          if (has_next) refill<octet>(strip[j], at.codes + j * apart, lane_id(), type_of<Strip>(type));
          if (kScaled) {
#pragma unroll
            for (int i = 0; i < 4; ++i) w[j][i] = scaled<Strip>(w[j][i], scale[j], minimum[j]);
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4 q = *reinterpret_cast<const uint4*>(a + octet * kOctet + t * (kTileRows * 8));
#pragma unroll
          for (int j = 0; j < kBeside; ++j) mma_8x32x4(s[t][j], q.x, q.y, w[j][0], w[j][1]);
#pragma unroll
          for (int j = 0; j < kBeside; ++j) mma_8x32x4(s[t][j], q.z, q.w, w[j][2], w[j][3]);
        }
      });
    }
#pragma unroll
    for (int j = 0; j < kBeside; ++j) flight.keep(j, strip[j]);
  }

  // What the keys' warps do.
  __device__ __forceinline__ void weigh_pages(const AttentionParams& p, const AttentionBlock& b, int begin, int end,
                                              Shared& shared) {
    const int lane = lane_id();
    largest = no_score(), sum = 0.0f;
    StripsInFlight flight;
    with_kv_type<kCounted>(p.cache.type_k, [&]<class Strip>() {
      ask_for_keys<Strip>(p.cache.type_k, head_part(p, b, begin / kPageTokens, false), flight);
    });
    if (bytes_ahead() > 0) prefetch_keys(p.cache.type_k, head_part(p, b, begin / kPageTokens, false));
    load_views(p, b, shared);
    whole_block_barrier();  // views and queries are written
    int turn = 0;
#pragma unroll 1
    for (int page = begin / kPageTokens; page * kPageTokens < end; ++page, turn ^= 1) {
      float s[kTiles][kBeside][8];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int j = 0; j < kBeside; ++j)
#pragma unroll
          for (int i = 0; i < 8; ++i) s[t][j][i] = 0.0f;
      {
        const uint8_t* keys = head_part(p, b, page, false);
        const uint8_t* next = (page + 1) * kPageTokens < end ? head_part(p, b, page + 1, false) : nullptr;
        with_kv_type<kCounted>(
            p.cache.type_k, [&]<class Strip>() { add_scores<Strip>(p.cache.type_k, keys, next, shared, flight, s); });
      }
      const int first = page * kPageTokens + warp_id() * (kBeside * kStripValues);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = t * kTileRows + row_of_c(lane, 2 * half);
          const int2 view = shared.visible[m];
          const float scale = shared.row_scale[m];
          float most = no_score();
#pragma unroll
          for (int j = 0; j < kBeside; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int i = (k & 1) + 2 * half + 4 * (k >> 1);
              const int token = first + j * kStripValues + column_of_c(lane, i);
              s[t][j][i] = token >= view.x && token < view.y ? __fmul_rn(s[t][j][i], scale) : no_score();
              most = fmaxf(most, s[t][j][i]);
            }
          tell_largest(most, m, shared);
        }
      first_warps_barrier<kKeyWarps>();  // the largest scores written above are read below

      uint32_t weights[kTiles][2][kBeside][2];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          weigh_row<kKeyWarps, kBeside>(s[t], t * kTileRows + row_of_c(lane, 2 * half), half, turn, shared,
                                        shared.rescale[turn], weights[t][half]);
      whole_block_barrier();  // the weights of the page before are done with
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int j = 0; j < kBeside; ++j)
            put_weights<kRows>(weights[t][half][j], kBeside * warp_id() + j, t * kTileRows + row_of_c(lane, 2 * half),
                               half, shared.weights);
      whole_block_barrier();  // weights and rescaling written above are read by all
      if (static_cast<int>(threadIdx.x) < kRows) {
        float added = 0.0f;
#pragma unroll
        for (int w = 0; w < kKeyWarps; ++w) added += shared.warp_sum[w][threadIdx.x];
        sum = fmaf(sum, shared.rescale[turn][threadIdx.x], added);
        largest = shared.largest[turn ^ 1][threadIdx.x];
      }
    }
  }

  // --- values -----------------------------------------------------------------------------------------------------------

  // Units of 32 tokens part(), part() + kParts, ... of a page that anybody sees are this warp's.
  __device__ __forceinline__ static int first_unit(int page_begin, int begin) {
    const int skipped = max(0, begin - page_begin) / kStripValues;
    return part() + (max(0, skipped - part()) + kParts - 1) / kParts * kParts;
  }
  __device__ __forceinline__ static int stop_unit(int page_begin, int end) {
    return min(kPageTiles, (end - page_begin + kStripValues - 1) / kStripValues);
  }

  // A bit for each token of a unit, of which one at least is seen.
  __device__ __forceinline__ static uint32_t seen_of_unit(int first, int begin, int end) {
    const int before = max(0, begin - first), seen = min(kStripValues, end - first);
    return ~0u >> (kStripValues - seen) & ~0u << before;
  }

  // Where a unit of this warp's first strip is, of this lane, and its scales: those of tokens 2 l and 2 l + 1 for lane l,
  // those of the strip beside it for lane l + 16.
  template <class Strip>
  struct ValuePlace {
    const uint8_t *codes, *scales;

    __device__ __forceinline__ ValuePlace(int32_t type, const uint8_t* values, int unit) {
      const int strip = feature_block(0) * kPageTiles + unit;
      codes = values + strip * kv_strip_bytes(type_of<Strip>(type)) + lane_id() * 16;
      scales = values + kv_code_bytes(type_of<Strip>(type), kHeadDim) + strip * (kStripValues * 2) +
               lane_id() / 16 * (beside() * kStripValues * 2) + lane_id() % 16 * 4;
    }
    // Strips between the two. Where the second is behind the last, the first is taken twice.
    __device__ __forceinline__ static int beside() {
      return kBlocks % kBeside == 0 || side() + 1 < kSides ? kPageTiles : 0;
    }
  };

  template <class Strip>
  __device__ __forceinline__ static void ask_for_values(int32_t type, const uint8_t* values, int unit,
                                                        StripsInFlight& flight) {
    const ValuePlace<Strip> at(type, values, unit);
#pragma unroll
    for (int j = 0; j < kBeside; ++j) {
      Strip strip;
      load_strip(strip, at.codes + j * at.beside() * kv_strip_bytes(type_of<Strip>(type)), lane_id(),
                 type_of<Strip>(type));
      flight.keep(j, strip);
    }
    if (Strip::kType != kKvF16) flight.scale[0] = stream_4(at.scales);
  }

  // Units unit, unit + kParts, ... of a page before `stop`, of which there is one at least. next: the values of the page after,
  // if this warp has some there, or nullptr.
  template <class Strip>
  __device__ __forceinline__ void add_values(int32_t type, const uint8_t* values, const uint8_t* next, int unit,
                                             int stop, int page_begin, int begin, int end, const Shared& shared,
                                             StripsInFlight& flight) {
    constexpr bool kScaled = Strip::kType != kKvF16;
    const int strip_bytes = kv_strip_bytes(type_of<Strip>(type));
    const uint16_t* a = shared.weights + row_of_a(lane_id()) * 8;
    ValuePlace<Strip> at(type, values, unit);
    const int apart = at.beside() * strip_bytes;
    Strip strip[kBeside];
#pragma unroll
    for (int j = 0; j < kBeside; ++j) strip[j] = flight.template strip<Strip>(j);
#pragma unroll 1
    for (; unit < stop; unit += kParts) {
      // What nobody sees may be anything, and 0 times infinity is not 0: it is cleared, of codes the scales.
      const uint32_t seen = seen_of_unit(page_begin + unit * kStripValues, begin, end);
      const uint32_t kept = halves_of(seen >> lane_id() % 16 * 2), pairs = flight.scale[0] & kept;
      uint32_t minimums = 0;
      if constexpr (Strip::kHasMinimum)
        minimums = kv_has_minimum(type) ? stream_4(at.scales + kv_scale_bytes(kHeadDim)) & kept
                                        : as_bits(q5_0_minimum(as_half2(pairs)));
      const bool is_last = unit + kParts >= stop, has_next = !is_last || next != nullptr;
      at.codes += kParts * strip_bytes, at.scales += kParts * (kStripValues * 2);
      if (is_last && next != nullptr) at = ValuePlace<Strip>(type, next, part());
      if (kScaled && has_next) flight.scale[0] = stream_4(at.scales);
      if constexpr (!kScaled) {
        if (seen != ~0u) {
#pragma unroll
          for (int j = 0; j < kBeside; ++j) strip[j].keep(seen);
        }
      }
      for_each<4>([&]<int octet>() {
        uint32_t w[kBeside][4];
#pragma unroll
        for (int j = 0; j < kBeside; ++j) {
          strip[j].template decode<octet>(w[j]);
          if (has_next) refill<octet>(strip[j], at.codes + j * apart, lane_id(), type_of<Strip>(type));
          if (kScaled) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int owner = octet * 4 + i + 16 * j;
              const uint32_t scale = __shfl_sync(kAllLanes, pairs, owner);
              const uint32_t minimum = Strip::kHasMinimum ? __shfl_sync(kAllLanes, minimums, owner) : 0;
              w[j][i] = scaled<Strip>(w[j][i], as_half2(scale), as_half2(minimum));
            }
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4 p = *reinterpret_cast<const uint4*>(a + (unit * 4 + octet) * kOctet + t * (kTileRows * 8));
#pragma unroll
          for (int j = 0; j < kBeside; ++j) mma_8x32x4(y[t][j], p.x, p.y, w[j][0], w[j][1]);
#pragma unroll
          for (int j = 0; j < kBeside; ++j) mma_8x32x4(y[t][j], p.z, p.w, w[j][2], w[j][3]);
        }
      });
    }
#pragma unroll
    for (int j = 0; j < kBeside; ++j) flight.keep(j, strip[j]);
  }

  // What the values' warps do.
  __device__ __forceinline__ void add_pages(const AttentionParams& p, const AttentionBlock& b, int begin, int end,
                                            Shared& shared) {
    load_queries(p, b, shared);
    StripsInFlight flight;
    int page_begin = begin / kPageTokens * kPageTokens, unit = first_unit(page_begin, begin);
    const auto ask = [&](int page, int first) {
      with_kv_type<kCounted>(p.cache.type_v, [&]<class Strip>() {
        ask_for_values<Strip>(p.cache.type_v, head_part(p, b, page, true), first, flight);
      });
    };
    if (unit < stop_unit(page_begin, end)) ask(page_begin / kPageTokens, unit);
    if (bytes_ahead() > 0) prefetch_values(p.cache.type_v, head_part(p, b, page_begin / kPageTokens, true));
    clear();
    whole_block_barrier();  // views and queries are written
    int turn = 0;
#pragma unroll 1
    for (; page_begin < end; page_begin += kPageTokens, unit = part(), turn ^= 1) {
      other_warps_pass();
      whole_block_barrier();  // the weights of the page before are done with
      whole_block_barrier();  // those of this page are written
      rescale(shared.rescale[turn]);
      const int page = page_begin / kPageTokens, stop = stop_unit(page_begin, end);
      const bool has_next = part() < stop_unit(page_begin + kPageTokens, end);
      if (unit < stop) {
        const uint8_t* values = head_part(p, b, page, true);
        const uint8_t* next = has_next ? head_part(p, b, page + 1, true) : nullptr;
        with_kv_type<kCounted>(p.cache.type_v, [&]<class Strip>() {
          add_values<Strip>(p.cache.type_v, values, next, unit, stop, page_begin, begin, end, shared, flight);
        });
      } else if (has_next) {
        ask(page + 1, part());
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&factors)[kRows]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors[t * kTileRows + row_of_c(lane_id(), 2 * half)];
#pragma unroll
        for (int j = 0; j < kBeside; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float& value = y[t][j][(k & 1) + 2 * half + 4 * (k >> 1)];
            value = __fmul_rn(value, factor);
          }
      }
  }

  // The sums of the parts, in their order, in the warps of part 0.
  __device__ __forceinline__ void merge_parts(Shared& shared) {
    if constexpr (kParts > 1) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        __syncthreads();  // the sums of the tile before are read
        if (!has_keys() && part() > 0) {
#pragma unroll
          for (int i = 0; i < kBeside * 8; ++i)
            shared.merged[(part() - 1) * kSides + side()][i * kWarp + lane_id()] = y[t][i / 8][i % 8];
        }
        __syncthreads();  // those written above are read below
        if (has_sums()) {
#pragma unroll
          for (int other = 1; other < kParts; ++other)
#pragma unroll
            for (int i = 0; i < kBeside * 8; ++i)
              y[t][i / 8][i % 8] =
                  __fadd_rn(y[t][i / 8][i % 8], shared.merged[(other - 1) * kSides + side()][i * kWarp + lane_id()]);
        }
      }
    }
  }
};

}  // namespace v100::cuda
