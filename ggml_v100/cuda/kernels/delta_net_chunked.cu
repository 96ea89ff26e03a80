// Gated delta net of prompts: the recurrence of ops.h as matrix products over chunks of 64 tokens (ops/delta_net_chunked.h).
//
// Chunks    A chunk ends where the token's position in its sequence is a multiple of 64, or where the rows do. A sequence's
//           first and last chunk may be shorter: rows that are not there have keys, queries and strengths of zero. So a
//           prompt that is cut at multiples of 64 has the bits of the whole one; cut elsewhere, its values but other bits.
// Shapes    DeltaNetChunksParams, two launches; C = 64, N = head_dim, one pair of kernels per N: 64, 128, 256.
//           delta_net_chunks_N   grid (chunks, key_heads): all that needs no state. With k and q of length 1, c the sums of the
//             chunk's log decays and b the strengths:  A_ts = b_t exp(c_t - c_s) (k_t . k_s) for s < t,  T = (I + A)^-1,
//             P_ts = exp(c_t - c_s) (q_t . k_s) for s <= t.  A block serves all value heads of a key head.
//           delta_net_scan_N     grid (value_heads * N / 32, sequences): a block walks the chunks with 32 columns of a state S
//             [N, 32] in its accumulators:  R = b v - b exp(c) (K S),  D = T R,  Y = (exp(c) (Q S) + P D) / sqrt(N),
//             S = exp(c_last) S + sum over t of exp(c_last - c_t) k_t d_t.  R and D take the place of the U and W of the
//             paper: no more products, and half of the workspace.
// Layout    Whatever is A of a tensor instruction is a panel [k / 8][rows][8] f16 (mma_sm70.cuh); R, D and S are its B: strips
//           [k / 8][32 lanes][8]. Eight values of k stand in the order 0 2 1 3 4 6 5 7: an accumulator's lane has rows r and
//           r + 2 of a column, which are then one word of B, and no lane needs a value of another one.
// Bound     scan: tensor instructions, 912 per 32 columns and chunk; 48 heads, 2048 tokens: 5.6 M, 92 us on 80 SMs of 1.53 GHz.
//           A operands come from L2, 57 KB per 32 columns and chunk: 350 MB, 170 us at 2.1 TB/s. So about 200 us.
//           chunks: DRAM, 33 MB read and 52 MB written: 105 us. Together 0.3 ms; the layer's matrices take 20 ms.
// Shared    delta_net_chunks: delta_chunks_shared_bytes (delta_chunk_shape.h), dynamic.
// Budget    delta_net_chunks_256   256 threads, <= 128 registers
// Budget    delta_net_chunks_128   256 threads, <= 128 registers
// Budget    delta_net_chunks_64    256 threads, <= 128 registers
// Budget    delta_net_scan_256     128 threads, <= 255 registers, 28704 B shared
// Budget    delta_net_scan_128     128 threads, <= 168 registers, 20512 B shared
// Budget    delta_net_scan_64      128 threads, <= 168 registers, 16416 B shared
// Numerics  Gates and sums of log decays in f64, the inverse in f32, S in f32 between chunks. K, Q, T, P, S, R and D are rounded
//           to f16 as operands, the last three times powers of two that follow from their largest value in the block, so that
//           nothing overflows: |k| <= 1 makes |T| <= 1 and so |D| <= 64 max |R|. Against float64 over 70,000 tokens: error
//           below 1.5e-3 of the outputs' size, root mean square, with keys that are alike and memories that do not fade.
// Rejected  f32 arithmetic in the scan: 7 times the tensor cores' time.
#include "delta_chunk_shape.h"
#include "memory.cuh"
#include "mma_sm70.cuh"

namespace v100::cuda {

constexpr int kChunk = kDeltaChunk;
constexpr int kOctets = kChunk / 8;         // of tokens: panels of T and P
constexpr int kRowOctet = kChunk * 8;       // a panel's 8 values of k for all tokens
constexpr int kTriangle = kChunk * kChunk;  // values of T, of P
enum Factor { kStrength, kStrengthDecay, kDecay, kDecayToLast, kFactors };
static_assert(kFactors * kChunk == kDeltaFactorValues && 2 * kTriangle == kDeltaValuePanelValues,
              "what the workspace has");

// Where a value stands among the eight of its octet.
__device__ __forceinline__ constexpr int place_of(int k) { return (k & 4) | (k & 1) << 1 | (k >> 1 & 1); }

// Which rows of the ubatch a chunk has.
struct ChunkRows {
  int32_t begin, count;
};
__device__ __forceinline__ ChunkRows rows_of_chunk(const DeltaNetChunksParams& p, int sequence, int chunk) {
  const int first = p.first_row[sequence], rows = p.end_row[sequence] - first;
  const int skipped = p.first_position[sequence] % kChunk;  // of the chunk that the first row is in
  const int begin = max(0, chunk * kChunk - skipped), end = min(rows, (chunk + 1) * kChunk - skipped);
  return {first + begin, end - begin};
}

__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Eight values in the order of an octet.
__device__ __forceinline__ uint4 octet_of(const float (&x)[8]) {
  return {half_pair(x[0], x[2]), half_pair(x[1], x[3]), half_pair(x[4], x[6]), half_pair(x[5], x[7])};
}

// The power of two that brings `most` to 2^top..2^(top + 1), and its inverse; 1 for what has no such power.
struct Scale {
  float factor, inverse;
};
__device__ __forceinline__ Scale scale_to(float most, int top) {
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23 & 255u) - 127;
  const int shift = most > 0.0f && exponent < 128 ? min(top - exponent, 120) : 0;
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
}

// ---- What needs no state.

constexpr int kChunkThreads = 256;
constexpr int kChunkWarps = kChunkThreads / kWarp;
static_assert(kChunkWarps == kOctets, "a warp has eight tokens");
constexpr int kHeadsAtOnce = kChunkThreads / kChunk;  // value heads whose gates are computed together

template <int kHeadDim>
struct ChunkShared {
  static constexpr int kOctet = kRowOctet + 8;  // eight more, or lanes that write the same token share banks
  static constexpr int kPitch = kChunk + 4;     // the same for f32 matrices
  struct Panels {
    uint16_t keys[kHeadDim / 8 * kOctet], queries[kHeadDim / 8 * kOctet];
  };
  struct Matrices {
    float a[kChunk][kPitch];  // A; products of it where A is not: above the diagonal
    float t[kChunk][kPitch];  // P, then T
  };
  union {
    Panels panels;  // first
    Matrices matrices;
  };
  double log_decays[kHeadsAtOnce][kChunk], sums[kHeadsAtOnce][kChunk];
  float strengths[kHeadsAtOnce][kChunk];
};

// Keys and queries of the chunk, of length 1, as f16 panels. A warp per token.
template <int kHeadDim>
__device__ __forceinline__ void load_keys(const DeltaNetChunksParams& p, int key_head, ChunkRows rows,
                                          ChunkShared<kHeadDim>& shared) {
  constexpr int kOfLane = kHeadDim / kWarp;
  const int lane = lane_id();
  const int64_t width = static_cast<int64_t>(2 * p.key_heads + p.value_heads) * kHeadDim;
#pragma unroll 1
  for (int t = warp_id(); t < kChunk; t += kChunkWarps) {
    const bool is_there = t < rows.count;
    const float* q = p.qkv + (is_there ? (rows.begin + t) * width + key_head * kHeadDim : 0) + lane;
    float k[kOfLane], x[kOfLane];
    float k_squares = 0.0f, q_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      k[i] = is_there ? q[p.key_heads * kHeadDim + i * kWarp] : 0.0f;
      x[i] = is_there ? q[i * kWarp] : 0.0f;
      k_squares = fmaf(k[i], k[i], k_squares);
      q_squares = fmaf(x[i], x[i], q_squares);
    }
    const float k_scale = 1.0f / sqrtf(warp_sum(k_squares) + p.eps);
    const float q_scale = 1.0f / sqrtf(warp_sum(q_squares) + p.eps);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int feature = i * kWarp + lane;
      const int at = feature / 8 * shared.kOctet + t * 8 + place_of(feature % 8);
      shared.panels.keys[at] = __half_as_ushort(__float2half_rn(k[i] * k_scale));
      shared.panels.queries[at] = __half_as_ushort(__float2half_rn(x[i] * q_scale));
    }
  }
}

// The panels of keys, queries and keys across (rows are features, k is the token), for the scan.
template <int kHeadDim>
__device__ __forceinline__ void store_keys(const ChunkShared<kHeadDim>& shared, uint16_t* panels) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int item = thread; item < kHeadDim / 8 * kChunk; item += kChunkThreads) {
    const int from = item / kChunk * shared.kOctet + item % kChunk * 8;
    reinterpret_cast<uint4*>(panels)[item] = *reinterpret_cast<const uint4*>(&shared.panels.keys[from]);
    reinterpret_cast<uint4*>(panels + kChunk * kHeadDim)[item] =
        *reinterpret_cast<const uint4*>(&shared.panels.queries[from]);
  }
#pragma unroll 1
  for (int item = thread; item < kOctets * kHeadDim; item += kChunkThreads) {
    const int octet = item / kHeadDim, feature = item % kHeadDim;
    const uint16_t* from = &shared.panels.keys[feature / 8 * shared.kOctet + octet * 64 + place_of(feature % 8)];
    const auto pair = [&](int t) { return from[t * 8] | static_cast<uint32_t>(from[(t + 2) * 8]) << 16; };
    reinterpret_cast<uint4*>(panels + 2 * kChunk * kHeadDim)[item] = {pair(0), pair(1), pair(4), pair(5)};
  }
}

// Products of the warp's eight tokens with all that are not after them: of rows row_of_c(lane, i), columns column_of_c(lane, i)
// of each 32.
struct TokenProducts {
  float keys[2][8], queries[2][8];
};
template <int kHeadDim>
__device__ __forceinline__ void multiply_keys(const ChunkShared<kHeadDim>& shared, TokenProducts& products) {
  const int lane = lane_id(), a_row = (warp_id() * kTileRows + row_of_a(lane)) * 8;
  const int b_row = column_of_lane(lane) * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 8; ++i) products.keys[half][i] = products.queries[half][i] = 0.0f;
#pragma unroll 2
  for (int octet = 0; octet < kHeadDim / 8; ++octet) {
    const uint4 k = *reinterpret_cast<const uint4*>(&shared.panels.keys[octet * shared.kOctet + a_row]);
    const uint4 q = *reinterpret_cast<const uint4*>(&shared.panels.queries[octet * shared.kOctet + a_row]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && warp_id() < kOctets / 2) break;  // tokens 32.. come after all of the warp's
      const uint4 b = *reinterpret_cast<const uint4*>(
          &shared.panels.keys[octet * shared.kOctet + half * (kTileColumns * 8) + b_row]);
      mma_8x32x4(products.keys[half], k.x, k.y, b.x, b.y);
      mma_8x32x4(products.keys[half], k.z, k.w, b.z, b.w);
      mma_8x32x4(products.queries[half], q.x, q.y, b.x, b.y);
      mma_8x32x4(products.queries[half], q.z, q.w, b.z, b.w);
    }
  }
}

// a * softplus(alpha + dt_bias) and 1 / (1 + exp(-beta)) of a token and value head per thread, and the sums over the tokens.
template <int kHeadDim>
__device__ __forceinline__ void load_gates(const DeltaNetChunksParams& p, int key_head, int first_head, ChunkRows rows,
                                           ChunkShared<kHeadDim>& shared) {
  const int t = static_cast<int>(threadIdx.x) % kChunk, place = static_cast<int>(threadIdx.x) / kChunk;
  const int head = key_head + (first_head + place) * p.key_heads;
  const bool is_there = t < rows.count && head < p.value_heads;
  double log_decay = 0.0;
  float strength = 0.0f;
  if (is_there) {
    const int64_t gate = static_cast<int64_t>(rows.begin + t) * p.value_heads + head;
    const double x = static_cast<double>(p.alpha[gate]) + static_cast<double>(p.dt_bias[head]);
    const double softplus = x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
    log_decay = static_cast<double>(p.a[head]) * softplus;
    strength = static_cast<float>(1.0 / (1.0 + exp(-static_cast<double>(p.beta[gate]))));
  }
  shared.log_decays[place][t] = log_decay;
  shared.strengths[place][t] = strength;
  __syncthreads();  // the decays written above are read below
  double sum = 0.0;
#pragma unroll 8
  for (int s = 0; s < kChunk; ++s) sum += s <= t ? shared.log_decays[place][s] : 0.0;
  shared.sums[place][t] = sum;
}

// A panel of a lower triangle of f32.
template <int kPitch>
__device__ __forceinline__ void store_triangle(const float (&matrix)[kChunk][kPitch], uint16_t* panel) {
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < kOctets * kChunk; item += kChunkThreads) {
    const int first = item / kChunk * 8, t = item % kChunk;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = first + j <= t ? matrix[t][first + j] : 0.0f;
    reinterpret_cast<uint4*>(panel)[item] = octet_of(x);
  }
}

// t = (I + a)^-1 of strictly lower a: 16 x 16 along the diagonal by substitution, then twice from two triangles on the
// diagonal and the square below them: of [X 0; Y Z] the inverse is [X' 0; -Z' Y X' Z']. The products Y X' go into a, above the
// diagonal.
template <int kPitch>
__device__ __forceinline__ void invert(float (&a)[kChunk][kPitch], float (&t)[kChunk][kPitch]) {
  constexpr int kBlock = 16;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kChunk) {
    const int first = thread / kBlock * kBlock, column = thread % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) x[i] = fmaf(-a[first + i][first + j], x[j], x[i]);
      t[first + i][first + column] = x[i];
    }
  }
  __syncthreads();  // the blocks on the diagonal are read below
  {
    const int first = thread / 128 * 32, row = thread % 128 / 8, column = thread % 8 * 2;
    float x[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (int i = 0; i < kBlock; ++i) {
      const float y = a[first + kBlock + row][first + i];
      x[0] = fmaf(y, t[first + i][first + column], x[0]);
      x[1] = fmaf(y, t[first + i][first + column + 1], x[1]);
    }
    a[first + row][first + kBlock + column] = x[0];
    a[first + row][first + kBlock + column + 1] = x[1];
    __syncthreads();  // the products written above are read below
    x[0] = x[1] = 0.0f;
#pragma unroll 4
    for (int i = 0; i < kBlock; ++i) {
      const float z = t[first + kBlock + row][first + kBlock + i];
      x[0] = fmaf(-z, a[first + i][first + kBlock + column], x[0]);
      x[1] = fmaf(-z, a[first + i][first + kBlock + column + 1], x[1]);
    }
    t[first + kBlock + row][first + column] = x[0];
    t[first + kBlock + row][first + column + 1] = x[1];
  }
  __syncthreads();  // the inverses of 32 x 32 are read below
  {
    constexpr int kHalf = 2 * kBlock;
    const int row = thread / 8, column = thread % 8 * 4;
    const auto add = [](float4& sum, float factor, const float4& x) {
      sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
      sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
    };
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = column / kBlock * kBlock; i < kHalf; ++i)
      add(x, a[kHalf + row][i], *reinterpret_cast<const float4*>(&t[i][column]));
    *reinterpret_cast<float4*>(&a[row][kHalf + column]) = x;
    __syncthreads();  // the products written above are read below
    x = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = 0; i < (row / kBlock + 1) * kBlock; ++i)
      add(x, -t[kHalf + row][kHalf + i], *reinterpret_cast<const float4*>(&a[i][kHalf + column]));
    *reinterpret_cast<float4*>(&t[kHalf + row][column]) = x;
  }
  __syncthreads();  // the inverse is read by all
}

template <int kHeadDim>
__device__ __forceinline__ void prepare_chunk(const DeltaNetChunksParams& p) {
  extern __shared__ uint4 chunk_memory[];
  using Shared = ChunkShared<kHeadDim>;
  Shared& shared = *reinterpret_cast<Shared*>(chunk_memory);
  static_assert(sizeof(Shared) <= delta_chunks_shared_bytes(kHeadDim), "what the host asks for");
  const int chunk = static_cast<int>(blockIdx.x), key_head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id();
  int sequence = 0;
#pragma unroll 1
  while (p.first_chunk[sequence + 1] <= chunk) ++sequence;
  const ChunkRows rows = rows_of_chunk(p, sequence, chunk - p.first_chunk[sequence]);

  load_keys<kHeadDim>(p, key_head, rows, shared);
  __syncthreads();  // the panels written above are read below
  const int64_t key_place = static_cast<int64_t>(chunk) * p.key_heads + key_head;
  store_keys<kHeadDim>(shared, p.key_panels + key_place * delta_key_panel_values(kHeadDim));
  TokenProducts products;
  multiply_keys<kHeadDim>(shared, products);

  const int heads = (p.value_heads - key_head + p.key_heads - 1) / p.key_heads;  // that read the key head
#pragma unroll 1
  for (int index = 0; index < heads; ++index) {
    __syncthreads();  // panels, matrices and gates before these are used
    const int place = index % kHeadsAtOnce;
    if (place == 0) load_gates<kHeadDim>(p, key_head, index, rows, shared);
    __syncthreads();  // sums and strengths are read below
    const double* sums = shared.sums[place];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int t = warp_id() * kTileRows + row_of_c(lane, i), s = half * kTileColumns + column_of_c(lane, i);
        if (s > t) continue;
        const float decay = expf(static_cast<float>(sums[t] - sums[s]));
        shared.matrices.t[t][s] = decay * products.queries[half][i];
        shared.matrices.a[t][s] = shared.strengths[place][t] * decay * products.keys[half][i];
      }
    const int64_t place_of_head = static_cast<int64_t>(chunk) * p.value_heads + key_head + index * p.key_heads;
    if (thread < kChunk) {
      float* factors = p.factors + place_of_head * (kFactors * kChunk) + thread;
      const float strength = shared.strengths[place][thread], decay = expf(static_cast<float>(sums[thread]));
      factors[kStrength * kChunk] = strength;
      factors[kStrengthDecay * kChunk] = strength * decay;
      factors[kDecay * kChunk] = decay;
      factors[kDecayToLast * kChunk] = expf(static_cast<float>(sums[kChunk - 1] - sums[thread]));
    }
    __syncthreads();  // the matrices written above are read below
    uint16_t* panels = p.value_panels + place_of_head * (2 * kTriangle);
    store_triangle(shared.matrices.t, panels + kTriangle);
    __syncthreads();  // P is used; T takes its place
    invert(shared.matrices.a, shared.matrices.t);
    store_triangle(shared.matrices.t, panels);
  }
}

// ---- The walk along the chunks.

constexpr int kScanThreads = 128;
constexpr int kScanWarps = kScanThreads / kWarp;
constexpr int kTriangleSteps =
    kOctets + 1;  // octets of two tiles of a triangle, one as far from the top as the other from the bottom

template <int kHeadDim>
struct ScanShared {
  uint4 state[kHeadDim / 8][kWarp], changes[kOctets][kWarp], written[kOctets][kWarp], kept[kOctets][kWarp];
  float largest_state[kScanWarps], largest_change[kScanWarps];
};

// The eight values that a lane has of a strip. Lanes of the upper columns are swapped in pairs, or stores share banks.
__device__ __forceinline__ int place_in_strip(int lane) { return lane ^ (lane >> 3 & 1); }

// An accumulator tile, rows 8 * octet.., as part of a strip.
__device__ __forceinline__ void store_strip(const float (&tile)[8], float low_factor, float high_factor,
                                            uint4 (&strip)[kWarp]) {
  const int lane = lane_id(), word = (lane & 1) + 2 * (lane >> 4);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const int i = (pair & 1) + 4 * (pair >> 1);
    const int place = place_in_strip(lane_of_column(column_of_c(lane, i)));
    reinterpret_cast<uint32_t*>(&strip[place])[word] = half_pair(tile[i] * low_factor, tile[i + 2] * high_factor);
  }
}

// A warp has two tiles of eight of the chunk's tokens, one as far from the first as the other is from the last.
__device__ __forceinline__ int token_tile(int which) { return which == 0 ? warp_id() : kOctets - 1 - warp_id(); }
// Where a lane's A operand of a tile begins in a panel of the chunk's tokens.
__device__ __forceinline__ int panel_place(int tile) { return (tile * kTileRows + row_of_a(lane_id())) * 8; }

__device__ __forceinline__ void clear(float (&tiles)[2][8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < 8; ++i) tiles[h][i] = 0.0f;
}

template <class Body>
__device__ __forceinline__ void with_warp(const Body& body) {
  switch (warp_id()) {
    case 0:
      return body.template operator()<0>();
    case 1:
      return body.template operator()<1>();
    case 2:
      return body.template operator()<2>();
    default:
      return body.template operator()<3>();
  }
}

// The warp's two tiles of a lower triangle's panel: tile `warp` has warp + 1 octets, tile 7 - warp the rest of nine.
struct TriangleTiles {
  uint4 a[kTriangleSteps];

  __device__ __forceinline__ void load(const uint16_t* panel) {
    const uint16_t* first = panel + panel_place(token_tile(0));
    const uint16_t* second = panel + panel_place(token_tile(1)) - (warp_id() + 1) * kRowOctet;
#pragma unroll
    for (int step = 0; step < kTriangleSteps; ++step)
      a[step] = stream_16((step <= warp_id() ? first : second) + step * kRowOctet);
  }
  // y = the tiles times a strip of the chunk's tokens.
  __device__ __forceinline__ void multiply(const uint4 (&strips)[kOctets][kWarp], float (&y)[2][8]) const {
    clear(y);
    const int place = place_in_strip(lane_id());
    with_warp([&]<int warp>() {  // which step is of which tile must be known, or both are computed and one is dropped
#pragma unroll
      for (int step = 0; step < kTriangleSteps; ++step) {
        constexpr int kFirst = warp + 1;
        const uint4 b = strips[step < kFirst ? step : step - kFirst][place];
        float (&sums)[8] = y[step < kFirst ? 0 : 1];
        mma_8x32x4(sums, a[step].x, a[step].y, b.x, b.y);
        mma_8x32x4(sums, a[step].z, a[step].w, b.z, b.w);
      }
    });
  }
};

// The warp's tokens of a panel of keys or queries, some octets ahead of their use.
struct TokenTiles {
  static constexpr int kAhead = 4;
  uint4 a[kAhead][2];

  __device__ __forceinline__ void start(const uint16_t* panel) {
#pragma unroll
    for (int octet = 0; octet < kAhead; ++octet)
#pragma unroll
      for (int which = 0; which < 2; ++which)
        a[octet][which] = stream_16(panel + octet * kRowOctet + panel_place(token_tile(which)));
  }
  // y = the tiles times the state. After start().
  template <int kHeadDim>
  __device__ __forceinline__ void multiply(const uint16_t* panel, const uint4 (&strips)[kHeadDim / 8][kWarp],
                                           float (&y)[2][8]) {
    clear(y);
    const uint4* strip = &strips[0][place_in_strip(lane_id())];
#pragma unroll 1
    for (int first = 0; first < kHeadDim / 8; first += kAhead, strip += kAhead * kWarp) {
      panel += kAhead * kRowOctet;
      const bool has_next = first + kAhead < kHeadDim / 8;
#pragma unroll
      for (int octet = 0; octet < kAhead; ++octet) {
        const uint4 b = strip[octet * kWarp];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          uint4& tile = a[octet][which];
          mma_8x32x4(y[which], tile.x, tile.y, b.x, b.y);
          mma_8x32x4(y[which], tile.z, tile.w, b.z, b.w);
          if (has_next) tile = stream_16(panel + octet * kRowOctet + panel_place(token_tile(which)));
        }
      }
    }
  }
};

// The largest of the block, after what each warp found was written and a barrier.
__device__ __forceinline__ float largest_of(const float (&warps)[kScanWarps]) {
  float most = warps[0];
#pragma unroll
  for (int w = 1; w < kScanWarps; ++w) most = fmaxf(most, warps[w]);
  return most;
}

template <int kHeadDim>
__device__ __forceinline__ void scan_chunks(const DeltaNetChunksParams& p) {
  constexpr int kTiles = kHeadDim / 8 / kScanWarps;  // of the state's rows, in a warp
  constexpr int kGroups = kHeadDim / kTileColumns;   // of columns
  constexpr int kStateColumns = 16;                  // that lie together in a record
  __shared__ ScanShared<kHeadDim> shared;
  const int lane = lane_id(), warp = warp_id();
  const int head = static_cast<int>(blockIdx.x) / kGroups, group = static_cast<int>(blockIdx.x) % kGroups;
  const int sequence = static_cast<int>(blockIdx.y), chunks = p.first_chunk[sequence + 1] - p.first_chunk[sequence];
  if (chunks <= 0) return;

  // Columns column_of_c(lane, i), i even, and the next one; rows row_of_c(lane, i) of tile j.
  const auto state_place = [&](int j, int i) {
    const int row = (warp * kTiles + j) * 8 + row_of_c(lane, i), column = group * kTileColumns + column_of_c(lane, i);
    return ((static_cast<int64_t>(head) * (kHeadDim / kStateColumns) + column / kStateColumns) * kHeadDim + row) *
               kStateColumns +
           column % kStateColumns;
  };
  float state[kTiles][8];
  const int from = p.state_from[sequence];
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float2 values = {0.0f, 0.0f};
      if (from >= 0) values = *reinterpret_cast<const float2*>(p.memory + from * p.slot_values + state_place(j, i));
      state[j][i] = values.x, state[j][i + 1] = values.y;
    }

  const float r = 1.0f / sqrtf(static_cast<float>(kHeadDim));
  const int width = (2 * p.key_heads + p.value_heads) * kHeadDim;  // of a row; 64 of them are below 2^31
  const int key_head = head % p.key_heads;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int64_t place = p.first_chunk[sequence] + chunk;
    const ChunkRows rows = rows_of_chunk(p, sequence, chunk);
    const uint16_t* keys = p.key_panels + (place * p.key_heads + key_head) * delta_key_panel_values(kHeadDim);
    const uint16_t* triangles = p.value_panels + (place * p.value_heads + head) * (2 * kTriangle);
    const float* factors = p.factors + (place * p.value_heads + head) * (kFactors * kChunk);

    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(state[j][i]));
    largest = warp_max(largest);
    if (lane == 0) shared.largest_state[warp] = largest;
    TokenTiles tokens;
    tokens.start(keys);
    __syncthreads();  // the largest written above are read below; the strips of the chunk before are used
    const Scale of_state = scale_to(largest_of(shared.largest_state), 14);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
      store_strip(state[j], of_state.factor, of_state.factor, shared.state[warp * kTiles + j]);
    __syncthreads();  // the state's strips are read below

    // What the tokens bring, asked for before it is needed.
    const float* v =
        p.qkv + static_cast<int64_t>(rows.begin) * width + (2 * p.key_heads + head) * kHeadDim + group * kTileColumns;
    float2 values[2][4];
    float strengths[2][2], of_memory[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int t = token_tile(h) * kTileRows + row_of_c(lane, 2 * below);
        strengths[h][below] = factors[kStrength * kChunk + t];
        of_memory[h][below] = factors[kStrengthDecay * kChunk + t];
        values[h][below] = values[h][below + 2] = {0.0f, 0.0f};
        if (t >= rows.count) continue;
        values[h][below] = *reinterpret_cast<const float2*>(v + t * width + column_of_c(lane, 0));
        values[h][below + 2] = *reinterpret_cast<const float2*>(v + t * width + column_of_c(lane, 4));
      }
    }

    float by_key[2][8];
    tokens.multiply<kHeadDim>(keys, shared.state, by_key);

    // R, in the place of K S.
    largest = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 pair = values[h][i / 2];
        const int below = i / 2 % 2;
        by_key[h][i] = fmaf(-of_memory[h][below] * of_state.inverse, by_key[h][i],
                            strengths[h][below] * (i % 2 == 0 ? pair.x : pair.y));
        largest = fmaxf(largest, fabsf(by_key[h][i]));
      }
    TriangleTiles triangle;
    triangle.load(triangles);
    largest = warp_max(largest);
    if (lane == 0) shared.largest_change[warp] = largest;
    __syncthreads();  // the largest written above are read below
    const Scale of_change = scale_to(largest_of(shared.largest_change), 13);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      store_strip(by_key[h], of_change.factor, of_change.factor, shared.changes[token_tile(h)]);
    __syncthreads();  // the strips of R are read below

    // D, 64 times smaller: |T| <= 1.
    constexpr float kRoom = 1.0f / kChunk;
    float written[2][8];
    float to_last[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int below = 0; below < 2; ++below)
        to_last[h][below] = factors[kDecayToLast * kChunk + token_tile(h) * kTileRows + row_of_c(lane, 2 * below)];
    triangle.multiply(shared.changes, written);
    triangle.load(triangles + kTriangle);
    tokens.start(keys + kChunk * kHeadDim);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_strip(written[h], kRoom, kRoom, shared.written[token_tile(h)]);
      store_strip(written[h], kRoom * to_last[h][0], kRoom * to_last[h][1], shared.kept[token_tile(h)]);
    }
    __syncthreads();  // the strips of D are read below

    // Y.
    float decays[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int below = 0; below < 2; ++below)
        decays[h][below] = factors[kDecay * kChunk + token_tile(h) * kTileRows + row_of_c(lane, 2 * below)];
    triangle.multiply(shared.written, written);
    float by_query[2][8];
    tokens.multiply<kHeadDim>(keys + kChunk * kHeadDim, shared.state, by_query);
    const float decay = factors[kDecay * kChunk + kChunk - 1];
    const uint16_t* across = keys + 2 * kChunk * kHeadDim + panel_place(warp * kTiles);
    uint4 a[kOctets];
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) a[octet] = stream_16(across + octet * (kHeadDim * 8));

    const float of_written = of_change.inverse * kChunk;
    const ChunkRows rows_again = rows_of_chunk(p, sequence, chunk);  // kept until here they are two registers
    float* y = p.y + (static_cast<int64_t>(rows_again.begin) * p.value_heads + head) * kHeadDim + group * kTileColumns;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int t = token_tile(h) * kTileRows + row_of_c(lane, 2 * below);
        if (t >= rows_again.count) continue;
        const float of_past = decays[h][below] * of_state.inverse;
#pragma unroll
        for (int i = 2 * below; i < 8; i += 4) {
          const float2 out = {r * fmaf(of_past, by_query[h][i], of_written * written[h][i]),
                              r * fmaf(of_past, by_query[h][i + 1], of_written * written[h][i + 1])};
          *reinterpret_cast<float2*>(y + t * p.value_heads * kHeadDim + column_of_c(lane, i)) = out;
        }
      }

    // S. The products are summed by themselves: tensor cores cut off what they add to, and the state lives on.
    uint4 b[kOctets];
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) b[octet] = shared.kept[octet][place_in_strip(lane)];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float added[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        mma_8x32x4(added, a[octet].x, a[octet].y, b[octet].x, b[octet].y);
        mma_8x32x4(added, a[octet].z, a[octet].w, b[octet].z, b[octet].w);
        if (j + 1 < kTiles) a[octet] = stream_16(across + octet * (kHeadDim * 8) + (j + 1) * (kTileRows * 8));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) state[j][i] = fmaf(decay, state[j][i], of_written * added[i]);
    }
  }

  float* to = p.memory + p.state_to[sequence] * p.slot_values;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int i = 0; i < 8; i += 2) *reinterpret_cast<float2*>(to + state_place(j, i)) = {state[j][i], state[j][i + 1]};
}

#define V100_DELTA_NET_CHUNKED(head_dim, blocks)                                                                       \
  extern "C" __global__ void __launch_bounds__(kChunkThreads, 2) delta_net_chunks_##head_dim(DeltaNetChunksParams p) { \
    prepare_chunk<head_dim>(p);                                                                                        \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kScanThreads, blocks)                                                   \
      delta_net_scan_##head_dim(DeltaNetChunksParams p) {                                                              \
    scan_chunks<head_dim>(p);                                                                                          \
  }

V100_DELTA_NET_CHUNKED(64, 3)
V100_DELTA_NET_CHUNKED(128, 3)
V100_DELTA_NET_CHUNKED(256, 2)

}  // namespace v100::cuda
