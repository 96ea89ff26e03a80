// The indexer of sparse attention: a key for each block of tokens, scores of the blocks, the best of them.
//
// Shapes    An index cache is a KV cache of one head (kv_page.h): its values are the tokens' index keys, its keys those of the
//           blocks. kv_append without k stores the former; then append_block_keys makes a key of each block that is complete.
//           score_blocks_N: a block has up to N rows of a sequence, its warps 32 block keys each; choose_blocks: a block per row.
// Bound     score_blocks: DRAM, the block keys once for 8 or 32 rows: 256 K tokens in blocks of 4, 128 features, f16: 16.8 MB,
//           19 us; with 32 rows and 4 heads tensor instructions need about as long. choose_blocks: five passes over the scores in
//           L2, about 25 us for 65,536 blocks, 2 us for 2048.
// Shared    score_blocks_N: index_shared_bytes (params.h), dynamic: 64 KB for 32 rows of 4 heads of 128 features.
// Budget    append_block_keys  256 threads, <= 64 registers, 8192 B shared
// Budget    score_blocks_8     256 threads, <= 128 registers
// Budget    score_blocks_32    256 threads, <= 192 registers
// Budget    choose_blocks      512 threads, <= 64 registers, 8448 B shared
// Numerics  Scores as in ops.h but for the order of sums: queries are split in two f16 halves, 22 bits of each value; products
//           are exact, sums f32; a quantised key's scale multiplies the sum over its 32 features, but q4_1, q5_0 and q5_1 keys are
//           rounded to f16. The choice is exact.
#include "attention.cuh"
#include "kv_values.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostIndexFeatures = 256;

// A warp per row; the rows that end a block do something.
extern "C" __global__ void __launch_bounds__(kThreads) append_block_keys(BlockKeysParams p) {
  __shared__ float keys[kWarps][kMostIndexFeatures];
  const int row = static_cast<int>(blockIdx.x) * kWarps + warp_id();
  const int angles = row < p.rows ? p.block_row[row] : -1;
  if (angles < 0) return;
  const int head_dim = p.cache.head_dim, blocks = kv_feature_blocks(head_dim), length = p.cache.block;
  const int last = p.kv_index[row] % kPageTokens;
  const int64_t page =
      p.page_table[static_cast<int64_t>(p.sequence[row]) * p.most_pages + p.kv_index[row] / kPageTokens];
  const uint8_t* values = kv_part(p.cache, page, 0, true);

  float* key = keys[warp_id()];
  float squares = 0.0f;
  for (int block = 0; block < blocks; ++block) {
    float sum = 0.0f;
#pragma unroll 1
    for (int token = last + 1 - length; token <= last; ++token) {
      const float value = load_kv(p.cache, values, true, token, block);
      sum = token == last + 1 - length ? value : sum + value;
    }
    const int feature = block * kStripValues + lane_id();
    if (feature >= head_dim) continue;
    sum *= 1.0f / static_cast<float>(length);
    key[feature] = sum;
    squares = fmaf(sum, sum, squares);
  }
  const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + p.eps);
  __syncwarp();  // each lane reads the other half of its pairs below

  const float* cosine = p.cosine + static_cast<int64_t>(angles) * p.pairs;
  const float* sine = p.sine + static_cast<int64_t>(angles) * p.pairs;
  uint8_t* part = kv_part(p.cache, page, 0, false);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const int feature = block * kStripValues + lane_id();
    float x = 0.0f;
    if (feature < head_dim) {
      x = key[feature] * scale * p.weight[feature];
      if (feature < 2 * p.pairs) {
        const bool is_second = feature >= p.pairs;
        const int pair = is_second ? feature - p.pairs : feature, other = is_second ? pair : feature + p.pairs;
        const float y = key[other] * scale * p.weight[other];
        x = is_second ? fmaf(y, sine[pair], x * cosine[pair]) : fmaf(x, cosine[pair], -(y * sine[pair]));
      }
    }
    store_kv(p.cache, part, false, last / length, block, x);
  }
}

template <int kTiles>
struct BlockScores {
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kOctet = kRows * 8;  // 8 features of all rows

  // Dynamic shared memory: [heads][2: upper, lower half][features / 8][rows][8] f16, then [heads][rows] scales f32.
  uint16_t* queries;
  float* row_scale;
  int heads, blocks;

  __device__ __forceinline__ BlockScores(const ScoreBlocksParams& p, uint4* memory)
      : queries(reinterpret_cast<uint16_t*>(memory)), heads(p.heads), blocks(kv_feature_blocks(p.cache.head_dim)) {
    row_scale = reinterpret_cast<float*>(queries + heads * 2 * half());
  }
  __device__ __forceinline__ int half() const { return blocks * 4 * kOctet; }

  // A warp per row and head.
  __device__ __forceinline__ void load_queries(const ScoreBlocksParams& p, int first_row, int rows) const {
    const int lane = lane_id(), head_dim = p.cache.head_dim;
#pragma unroll 1
    for (int item = warp_id(); item < kRows * heads; item += kWarps) {
      const int m = item / heads, head = item % heads;
      const float* q = p.q + (static_cast<int64_t>(first_row + (m < rows ? m : 0)) * heads + head) * head_dim;
      float most = 0.0f;
      for (int i = lane; i < head_dim; i += kWarp) most = fmaxf(most, m < rows ? fabsf(q[i]) : 0.0f);
      most = warp_max(most);
      // As in panel.cu: most = 1..2 times 2^exponent is brought to 2^14..2^15.
      const int exponent = static_cast<int>(__float_as_uint(most) >> 23 & 255u) - 127;
      const int shift = most > 0.0f && exponent < 128 ? min(14 - exponent, 126) : 0;
      const float factor = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
      if (lane == 0) row_scale[head * kRows + m] = __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
      uint16_t* to = queries + head * 2 * half() + m * 8;
      for (int i = lane; i < blocks * kStripValues; i += kWarp) {
        const float x = m < rows && i < head_dim ? q[i] * factor : 0.0f;
        const __half upper = __float2half_rn(x);
        to[i / 8 * kOctet + i % 8] = __half_as_ushort(upper);
        to[half() + i / 8 * kOctet + i % 8] = __half_as_ushort(__float2half_rn(x - __half2float(upper)));
      }
    }
  }

  // Scores of 32 keys for all rows: rows row_of_c, keys column_of_c of the lane.
  template <class Strip>
  __device__ __forceinline__ void score(int32_t type, const uint8_t* keys, int tile, int key_tiles, int head_dim,
                                        float (&total)[kTiles][8]) const {
    // Codes with a minimum are turned to f16 values first, others scaled after they are summed.
    constexpr bool kScaled = Strip::kType != kKvF16 && !Strip::kHasMinimum;
    const int lane = lane_id(), strip_bytes = kv_strip_bytes(type_of<Strip>(type));
    const uint16_t* scales =
        reinterpret_cast<const uint16_t*>(keys + kv_code_bytes(type_of<Strip>(type), head_dim, key_tiles)) +
        tile * blocks * kWarp;
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
      float sum[kTiles][8];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[t][i] = 0.0f;
      const uint16_t* a = queries + head * 2 * half() + row_of_a(lane) * 8;
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, a += 4 * kOctet) {
        const uint8_t* from = keys + (tile * blocks + block) * strip_bytes + lane * 16;
        Strip strip;
#pragma unroll
        for (int i = 0; i < kv_strip_loads(Strip::kType); ++i) strip.load[i] = cached_16(from + i * 512);
        __half2 own_scale{}, minimum{};  // of the lane's key
        if constexpr (Strip::kHasMinimum) {
          strip.load_fifth(from, lane, type);
          const uint16_t* own = scales + block * kWarp + lane;
          own_scale = low_twice(*own);
          minimum =
              kv_has_minimum(type) ? low_twice(own[kv_scale_bytes(head_dim, key_tiles) / 2]) : q5_0_minimum(own_scale);
        }
        float part[kTiles][8];
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < 8; ++i) part[t][i] = kScaled ? 0.0f : sum[t][i];
        for_each<4>([&]<int octet>() {
          uint32_t w[4];
          strip.template decode<octet>(w);
          if constexpr (Strip::kHasMinimum) {
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = scaled<Strip>(w[i], own_scale, minimum);
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const uint4* q = reinterpret_cast<const uint4*>(a + octet * kOctet + t * (kTileRows * 8));
            const uint4 upper = *q, lower = q[half() / 8];
            mma_8x32x4(part[t], upper.x, upper.y, w[0], w[1]);
            mma_8x32x4(part[t], upper.z, upper.w, w[2], w[3]);
            mma_8x32x4(part[t], lower.x, lower.y, w[0], w[1]);
            mma_8x32x4(part[t], lower.z, lower.w, w[2], w[3]);
          }
        });
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float scale = 1.0f;
          if (kScaled)
            scale = __half2float(__ushort_as_half(scales[block * kWarp + lane_of_column(column_of_c(lane, i))]));
#pragma unroll
          for (int t = 0; t < kTiles; ++t) sum[t][i] = kScaled ? fmaf(scale, part[t][i], sum[t][i]) : part[t][i];
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float factor = row_scale[head * kRows + t * kTileRows + row_of_c(lane, i)];
          total[t][i] += fmaxf(sum[t][i] * factor, 0.0f);  // 0 for NaN
        }
    }
  }
};

template <int kTiles>
__device__ __forceinline__ void score_blocks(const ScoreBlocksParams& p) {
  constexpr int kRows = kTiles * kTileRows;
  extern __shared__ uint4 index_memory[];
  const int sequence = static_cast<int>(blockIdx.z), length = p.cache.block;
  const int first_row = p.first_row[sequence] + static_cast<int>(blockIdx.x) * kRows;
  const int rows = min(kRows, p.first_row[sequence + 1] - first_row);
  if (rows <= 0) return;
  // Rows of a sequence see more and more: the last one most. Rows that may choose all they see need no scores.
  int complete = 0;
  for (int m = lane_id(); m < rows; m += kWarp) complete = max(complete, p.visible[2 * (first_row + m) + 1] / length);
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2)
    complete = max(complete, __shfl_xor_sync(kAllLanes, complete, apart));
  if (complete <= p.most) return;

  const BlockScores<kTiles> scores(p, index_memory);
  scores.load_queries(p, first_row, rows);
  __syncthreads();  // the queries written above are read below

  const int keys = kPageTokens / length, key_tiles = kv_key_tiles(length), lane = lane_id();
#pragma unroll 1
  for (int at = static_cast<int>(blockIdx.y) * kWarps + warp_id();; at += static_cast<int>(gridDim.y) * kWarps) {
    const int page = at / key_tiles, tile = at % key_tiles, first = page * keys + tile * kStripValues;
    if (first >= complete) break;
    const int64_t id = p.page_table[static_cast<int64_t>(sequence) * p.most_pages + page];
    float total[kTiles][8];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) total[t][i] = 0.0f;
    with_kv_type<true>(p.cache.type_k, [&]<class Strip>() {
      scores.template score<Strip>(p.cache.type_k, kv_part(p.cache, id, 0, false), tile, key_tiles, p.cache.head_dim,
                                   total);
    });
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int m = t * kTileRows + row_of_c(lane, i), column = column_of_c(lane, i), block = first + column;
        if (m >= rows || tile * kStripValues + column >= keys) continue;
        if (block >= p.visible[2 * (first_row + m) + 1] / length) continue;
        p.scores[static_cast<int64_t>(first_row + m) * p.score_stride + block] = total[t][i];
      }
  }
}

#define V100_SCORE(name, tiles) \
  extern "C" __global__ void __launch_bounds__(kThreads) name(ScoreBlocksParams p) { score_blocks<tiles>(p); }

V100_SCORE(score_blocks_8, 1)
V100_SCORE(score_blocks_32, 4)

// Numbers >= 0 have the order of their bits: three passes over 11, 11 and 10 bits find those of the least score chosen, a
// last one writes the blocks above it and the first of those that equal it, ascending.
constexpr int kChooseThreads = 512;
constexpr int kChooseWarps = kChooseThreads / kWarp;
constexpr int kBins = 2048;

// Sum of `value` over the threads before this one; `all` over all threads.
__device__ __forceinline__ int sum_before(int value, int* shared, int& all) {
  int sum = value;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, apart);
    if (lane_id() >= apart) sum += other;
  }
  if (lane_id() == kWarp - 1) shared[warp_id()] = sum;
  __syncthreads();  // the warps' sums written above are read below
  int before = 0;
  all = 0;
#pragma unroll
  for (int w = 0; w < kChooseWarps; ++w) {
    if (w < warp_id()) before += shared[w];
    all += shared[w];
  }
  __syncthreads();  // they are read: their place may be used again
  return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(kChooseThreads) choose_blocks(ChooseBlocksParams p) {
  __shared__ int bins[kBins], sums[kChooseWarps], found[2];
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int n = p.visible[2 * row + 1] / p.block;
  int32_t* blocks = p.blocks + static_cast<int64_t>(row) * p.most;
  if (thread == 0) p.count[row] = min(n, p.most);
  if (n <= p.most) {
    for (int i = thread; i < n; i += kChooseThreads) blocks[i] = i;
    return;
  }
  const uint32_t* scores = reinterpret_cast<const uint32_t*>(p.scores + static_cast<int64_t>(row) * p.score_stride);

  uint32_t least = 0;   // the upper bits found so far
  int wanted = p.most;  // of those that share these bits
  int upper = 32;       // the lowest bit found
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, most_bins = 1 << (upper - shift);
    for (int i = thread; i < kBins; i += kChooseThreads) bins[i] = 0;
    __syncthreads();  // the zeros written above are counted from below
#pragma unroll 4
    for (int i = thread; i < n; i += kChooseThreads) {
      const uint32_t bits = scores[i];
      if (pass == 0 || bits >> upper == least >> upper)
        atomicAdd(&bins[bits >> shift & static_cast<uint32_t>(most_bins - 1)], 1);
    }
    __syncthreads();  // the counts are complete
    // From the highest bin down, four to a thread.
    const int highest = kBins - 1 - 4 * thread;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) mine += bins[highest - i];
    int all;
    int above = sum_before(mine, sums, all);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int count = bins[highest - i];
      if (above < wanted && above + count >= wanted) found[0] = highest - i, found[1] = wanted - above;
      above += count;
    }
    __syncthreads();  // what one thread found is read by all; the counts are done with
    least |= static_cast<uint32_t>(found[0]) << shift;
    wanted = found[1];
    upper = shift;
  }

  // Four adjacent blocks to a thread. Of those equal to the least score the first `wanted` are chosen.
  int taken = 0, equal_before = 0;
#pragma unroll 1
  for (int first = 0; first < n; first += 4 * kChooseThreads) {
    uint32_t bits[4];
    int above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + 4 * thread + i;
      bits[i] = at < n ? scores[at] : 0;
      above += at < n && bits[i] > least ? 1 : 0;
      equal += at < n && bits[i] == least ? 1 : 0;
    }
    int all;
    const int packed = sum_before(above | equal << 16, sums, all);  // at most 2048 of either
    int equals = equal_before + (packed >> 16), place = taken + (packed & 0xffff) + min(equals, wanted);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + 4 * thread + i;
      if (at >= n) continue;
      const bool is_equal = bits[i] == least;
      if (bits[i] > least || (is_equal && equals < wanted)) blocks[place++] = at;
      if (is_equal) ++equals;
    }
    taken += all & 0xffff;
    equal_before += all >> 16;
  }
}

}  // namespace v100::cuda
