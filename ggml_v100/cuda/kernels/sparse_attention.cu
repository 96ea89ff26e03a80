// Attention of a row to the tokens of its chosen blocks and to those after its last complete block. Nothing else is read.
//
// Shapes    SparseAttentionParams; a block has a query row, up to 8, 16 or 32 of the heads that read a kv head, and either all
//           that the row sees or one partition of it: a stretch of 256 of these tokens. sparse_combine: grid (heads, rows).
// Units     Quads: four adjacent tokens of a page, with a mask for those the row sees. A stretch is 64 of them. Keys of a quad are
//           64 adjacent bytes of each load of a strip (kv_page.h). Values of a quad are 8 of 16 bytes per lane and feature in f16,
//           so twice of them is read, four times in q8_0, eight times in q4_0: 512 bytes for 32 features in all.
// Steps     1. scores: a warp has 8 quads, 2. weights, 3. sums: a warp has 32 features.
// Bound     L2 or latency: 2048 tokens of 256 features are 3 MB for a row and kv head in f16, 2.5 MB in q8_0. A decode step of one
//           row and 2 kv heads has 18 blocks: two or three latencies of memory, some 10 us.
// Shared    sparse_shared_bytes (params.h), dynamic: 36 KB for 32 heads of 256 features.
// Budget    sparse_attention_8   256 threads, <= 128 registers
// Budget    sparse_attention_16  256 threads, <= 128 registers, <= 32 B stack
// Budget    sparse_attention_32  256 threads, <= 224 registers
// Budget    sparse_combine       256 threads, <= 40 registers
// Numerics  attention.cuh, stretches in order; partitions are brought to the largest score of all and added in order.
#include "attention.cuh"
#include "kv_values.cuh"

namespace v100::cuda {

constexpr int kQuadTokens = 4;
constexpr int kStretchQuads = kPageTokens / kQuadTokens;
constexpr int kUnitQuads = kStripValues / kQuadTokens;  // a warp's scores

// Which quads a row sees, ascending. Of blocks of two tokens each has an entry of its own.
struct SeenQuads {
  const int32_t* blocks;
  int32_t block, end, per_block, in_blocks, count;

  __device__ __forceinline__ SeenQuads(const SparseAttentionParams& p, int row) {
    block = p.block, end = p.visible[2 * row + 1];
    blocks = p.blocks + static_cast<int64_t>(row) * p.most;
    per_block = max(1, block / kQuadTokens);
    in_blocks = p.count[row] * per_block;
    count = in_blocks + (end % block + kQuadTokens - 1) / kQuadTokens;
  }
  __device__ __forceinline__ int stretches() const { return (count + kStretchQuads - 1) / kStretchQuads; }

  // The first token of quad i and a bit for each that is seen. Past the last one: a quad of which nothing is seen.
  __device__ __forceinline__ int2 at(int i) const {
    const bool is_there = i < count;
    if (!is_there) i = count - 1;
    int token = end / block * block + (i - in_blocks) * kQuadTokens, tokens = min(kQuadTokens, end - token);
    if (i < in_blocks) {
      token = blocks[i / per_block] * block + i % per_block * kQuadTokens;
      tokens = min(kQuadTokens, block);
    }
    const int within = token % kQuadTokens;
    return {token - within, is_there ? ((1 << tokens) - 1) << within : 0};
  }
};

template <int kTiles>
struct SparseAttention {
  static constexpr int kRows = kTiles * kTileRows;  // heads
  static constexpr int kOctet = kRows * 8;

  // A quad in shared memory: where its page is, its first token there, its mask.
  struct Quad {
    const uint8_t* page;
    int32_t token, mask;
  };

  struct Shared {
    float warp_largest[kAttentionWarps][kRows], warp_sum[kAttentionWarps][kRows];
    float largest[2][kRows];  // before and after a stretch, in turns
    float rescale[kRows];     // of the sums before a stretch
    float row_scale[kRows];   // from accumulators to scores in powers of 2
    Quad quads[2][kStretchQuads];
  };
  // Then: weights [token / 8][rows][8] f16, queries [feature / 8][rows][8] f16, sums of parts [warps][256] f32.
  static_assert(sizeof(Shared) <= kRows * 80 + 2048, "sparse_shared_bytes");

  const SparseAttentionParams& p;
  Shared& shared;
  uint16_t *weights, *queries;
  float* merged;
  int row, kv_head, first_head, heads;  // heads 0: nothing to do
  int head_dim, blocks, parts;
  SeenQuads seen;
  const int32_t* pages;
  float y[kTiles][8];
  float largest, sum;  // of head threadIdx.x, in its thread

  __device__ __forceinline__ SparseAttention(const SparseAttentionParams& p, uint4* memory)
      : p(p), shared(*reinterpret_cast<Shared*>(memory)), row(static_cast<int>(blockIdx.x)), seen(p, row) {
    head_dim = p.cache.head_dim, blocks = kv_feature_blocks(head_dim), parts = kAttentionWarps / blocks;
    kv_head = static_cast<int>(blockIdx.y) / p.head_blocks;
    const int begin = kv_head * p.cache.group - p.cache.skew, end = min(p.heads, begin + p.cache.group);
    first_head = max(0, begin) + static_cast<int>(blockIdx.y) % p.head_blocks * kRows;
    heads = max(0, min(kRows, end - first_head));
    pages = p.page_table + static_cast<int64_t>(p.sequence[row]) * p.most_pages;
    weights = reinterpret_cast<uint16_t*>(&shared + 1);
    queries = weights + kPageTokens / 8 * kOctet;
    merged = reinterpret_cast<float*>(queries + blocks * 4 * kOctet);
    largest = no_score(), sum = 0.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) y[t][i] = 0.0f;
  }

  __device__ __forceinline__ int feature_block() const { return warp_id() % blocks; }
  __device__ __forceinline__ int part() const { return warp_id() / blocks; }

  // Stretches [begin, end), at least one of them.
  __device__ __forceinline__ void run(int begin, int end) {
    find_quads(begin, 0);
    load_queries();
    __syncthreads();  // quads and queries written above are read below
    int turn = 0;
#pragma unroll 1
    for (int stretch = begin; stretch < end; ++stretch, turn ^= 1) {
      float s[kTiles][8];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 8; ++i) s[t][i] = 0.0f;
      if (stretch * kStretchQuads + warp_id() * kUnitQuads < seen.count)
        with_kv_type<true>(p.cache.type_k, [&]<class Strip>() { add_scores<Strip>(turn, s); });
      find_largest(turn, s);
      __syncthreads();  // the largest scores are read below; weights and quads of the stretch before are done with
      if (stretch + 1 < end) find_quads(stretch + 1, turn ^ 1);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = t * kTileRows + row_of_c(lane_id(), 2 * half);
          uint32_t pairs[1][2];
          weigh_row<kAttentionWarps, 1>(&s[t], m, half, turn, shared, shared.rescale, pairs);
          put_weights<kRows>(pairs[0], warp_id(), m, half, weights);
        }
      __syncthreads();  // weights, sums and rescaling are read below
      if (static_cast<int>(threadIdx.x) < kRows) {
        float added = 0.0f;
#pragma unroll
        for (int w = 0; w < kAttentionWarps; ++w) added += shared.warp_sum[w][threadIdx.x];
        sum = fmaf(sum, shared.rescale[threadIdx.x], added);
        largest = shared.largest[turn ^ 1][threadIdx.x];
      }
      if (part() < parts) {
        rescale();
        const int units = min(kPageTiles, (seen.count - stretch * kStretchQuads + kUnitQuads - 1) / kUnitQuads);
        with_kv_type<true>(p.cache.type_v, [&]<class Strip>() { add_values<Strip>(turn, units); });
      }
    }
    merge_parts();
  }

 private:
  __device__ __forceinline__ void find_quads(int stretch, int turn) const {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kStretchQuads) return;
    const int2 quad = seen.at(stretch * kStretchQuads + i);
    const uint8_t* page = p.cache.pages + pages[quad.x / kPageTokens] * p.cache.page_bytes;
    shared.quads[turn][i] = {page, quad.x % kPageTokens, quad.y};
  }

  // A warp per head.
  __device__ __forceinline__ void load_queries() const {
    const int lane = lane_id();
#pragma unroll 1
    for (int m = warp_id(); m < kRows; m += kAttentionWarps) {
      const bool is_there = m < heads;
      const float* q = p.q + (static_cast<int64_t>(row) * p.heads + first_head + (is_there ? m : 0)) * head_dim;
      float most = 0.0f;
      for (int i = lane; i < head_dim; i += kWarp) most = fmaxf(most, is_there ? fabsf(q[i]) : 0.0f);
      most = warp_max(most);
      // As in panel.cu: most = 1..2 times 2^exponent is brought to 2^14..2^15.
      const int exponent = static_cast<int>(__float_as_uint(most) >> 23 & 255u) - 127;
      const int shift = most > 0.0f && exponent < 128 ? min(14 - exponent, 126) : 0;
      const float factor = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
      if (lane == 0)
        shared.row_scale[m] =
            p.scale * 1.44269504088896341f * __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
      if (lane == 0) shared.largest[0][m] = no_score();
      for (int i = lane; i < blocks * kStripValues; i += kWarp) {
        const float x = is_there && i < head_dim ? q[i] * factor : 0.0f;
        queries[i / 8 * kOctet + m * 8 + i % 8] = __half_as_ushort(__float2half_rn(x));
      }
    }
  }

  // A lane has the key of one token of the warp's quads.
  template <class Strip>
  __device__ __forceinline__ void add_scores(int turn, float (&s)[kTiles][8]) const {
    constexpr bool kScaled = Strip::kType != kKvF16;
    const int32_t type = type_of<Strip>(p.cache.type_k);
    const int lane = lane_id(), column = column_of_lane(lane), strip_bytes = kv_strip_bytes(type);
    const Quad& quad = shared.quads[turn][warp_id() * kUnitQuads + column / kQuadTokens];
    const int token = quad.token + column % kQuadTokens, tile = token / kStripValues;
    const int owner = lane_of_column(token % kStripValues);
    const uint8_t* keys = quad.page + static_cast<int64_t>(kv_head) * kv_key_bytes(p.cache);
    const uint8_t* from = keys + tile * blocks * strip_bytes + owner * 16;
    const uint16_t* scales =
        reinterpret_cast<const uint16_t*>(keys + kv_code_bytes(type, head_dim)) + tile * blocks * kWarp + owner;
    const uint16_t* a = queries + row_of_a(lane) * 8;
    Strip strip;
    load_strip(strip, from, owner, type);
    uint32_t next_scale = kScaled ? stream_2(scales) : 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, a += 4 * kOctet) {
      const __half2 scale = low_twice(next_scale);
      __half2 minimum = scale;
      if constexpr (Strip::kHasMinimum)
        minimum =
            kv_has_minimum(type) ? low_twice(stream_2(scales + kv_scale_bytes(head_dim) / 2)) : q5_0_minimum(scale);
      const bool has_next = block + 1 < blocks;
      from += strip_bytes, scales += kWarp;
      if (kScaled && has_next) next_scale = stream_2(scales);
      for_each<4>([&]<int octet>() {
        uint32_t w[4];
        strip.template decode<octet>(w);
        if (has_next) refill<octet>(strip, from, owner, type);
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

  // Scores in powers of 2, no_score() of what is not in the mask.
  __device__ __forceinline__ void find_largest(int turn, float (&s)[kTiles][8]) const {
    const int lane = lane_id();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = t * kTileRows + row_of_c(lane, 2 * half);
        const float scale = shared.row_scale[m];
        float most = no_score();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = (j & 1) + 2 * half + 4 * (j >> 1), column = column_of_c(lane, i);
          const int mask = shared.quads[turn][warp_id() * kUnitQuads + column / kQuadTokens].mask;
          s[t][i] = (mask >> column % kQuadTokens & 1) != 0 ? __fmul_rn(s[t][i], scale) : no_score();
          most = fmaxf(most, s[t][i]);
        }
        tell_largest(most, m, shared);
      }
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) y[t][i] = __fmul_rn(y[t][i], shared.rescale[t * kTileRows + row_of_c(lane_id(), i)]);
  }

  // The values of a quad of a lane's feature, packed. `from` is the lane's place in the strip.
  template <class Strip>
  __device__ __forceinline__ static uint2 load_quad(const uint8_t* from, int within, int32_t type) {
    if (Strip::kType == kKvF16) return stream_8(from + within / 8 * 512 + within % 8 * 2);
    if (Strip::kType == kKvQ8_0) return {stream_4(from + within / 16 * 512 + within % 16), 0};
    uint2 codes = {stream_4(from + within / 8 * 4) >> (within % 8 * 2),
                   0};  // the second quad of a word is 8 bits higher
    if (Strip::kHasMinimum && kv_has_fifth_bit(type))
      codes.y = rotate_right(stream_4(from + 512 - lane_id() * 12), within / 8 + within % 8 * 2);
    return codes;
  }
  template <class Strip>
  __device__ __forceinline__ static void decode_quad(const uint2& codes, uint32_t (&w)[2]) {
    if constexpr (Strip::kType == kKvF16) {
      w[0] = codes.x, w[1] = codes.y;
    } else if constexpr (Strip::kType == kKvQ8_0) {
      KvQ8_0::decode_word(codes.x, w[0], w[1]);
    } else {
      constexpr int kOffset = Strip::kHasMinimum ? 0 : 8;
      w[0] = as_bits(pair_of_nibbles<0, kOffset>(codes.x, codes.y & 0x00100010u));
      w[1] = as_bits(pair_of_nibbles<1, kOffset>(codes.x, codes.y & 0x01000100u));
    }
  }

  // Units of 8 quads part(), part() + parts, ... of the stretch.
  template <class Strip>
  __device__ __forceinline__ void add_values(int turn, int units) {
    constexpr bool kScaled = Strip::kType != kKvF16;
    const int32_t type = type_of<Strip>(p.cache.type_v);
    const int lane = lane_id(), first_strip = feature_block() * kPageTiles, strip_bytes = kv_strip_bytes(type);
    const int64_t head_at = static_cast<int64_t>(p.cache.kv_heads) * kv_key_bytes(p.cache) +
                            static_cast<int64_t>(kv_head) * kv_part_bytes(type, head_dim);
    const int scales_at = kv_code_bytes(type, head_dim);
    const uint16_t* a = weights + row_of_a(lane) * 8;
#pragma unroll 1
    for (int unit = part(); unit < units; unit += parts) {
      uint2 codes[kUnitQuads], scales[kUnitQuads], minimums[kUnitQuads];
#pragma unroll
      for (int i = 0; i < kUnitQuads; ++i) {
        const Quad& quad = shared.quads[turn][unit * kUnitQuads + i];
        const uint8_t* values = quad.page + head_at;
        const int strip = first_strip + quad.token / kStripValues, within = quad.token % kStripValues;
        codes[i] = load_quad<Strip>(values + strip * strip_bytes + lane * 16, within, type);
        const uint8_t* scale = values + scales_at + strip * (kStripValues * 2) + within * 2;
        if (kScaled) scales[i] = stream_8(scale);
        minimums[i] =
            Strip::kHasMinimum && kv_has_minimum(type) ? stream_8(scale + kv_scale_bytes(head_dim)) : scales[i];
      }
#pragma unroll
      for (int i = 0; i < kUnitQuads; ++i) {
        const int mask = shared.quads[turn][unit * kUnitQuads + i].mask;
        uint32_t w[2];
        decode_quad<Strip>(codes[i], w);
        if (kScaled) {
          __half2 minimum[2] = {as_half2(minimums[i].x), as_half2(minimums[i].y)};
          if (Strip::kHasMinimum && !kv_has_minimum(type))
            minimum[0] = q5_0_minimum(minimum[0]), minimum[1] = q5_0_minimum(minimum[1]);
          w[0] = scaled<Strip>(w[0], as_half2(scales[i].x), minimum[0]);
          w[1] = scaled<Strip>(w[1], as_half2(scales[i].y), minimum[1]);
        }
        if (mask != 15) {  // what lies there may be anything, and 0 times infinity is not 0
          w[0] &= ((mask & 1) != 0 ? 0xffffu : 0u) | ((mask & 2) != 0 ? 0xffff0000u : 0u);
          w[1] &= ((mask & 4) != 0 ? 0xffffu : 0u) | ((mask & 8) != 0 ? 0xffff0000u : 0u);
        }
        const int quad = unit * kUnitQuads + i;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint2 weight =
              *reinterpret_cast<const uint2*>(a + quad / 2 * kOctet + t * (kTileRows * 8) + quad % 2 * kQuadTokens);
          mma_8x32x4(y[t], weight.x, weight.y, w[0], w[1]);
        }
      }
    }
  }

  // The sums of the parts, in their order, in the warps of part 0.
  __device__ __forceinline__ void merge_parts() {
    if (parts == 1) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      __syncthreads();  // the sums of the tile before are read
      if (part() > 0 && part() < parts) {
#pragma unroll
        for (int i = 0; i < 8; ++i) merged[(warp_id() - blocks) * 256 + i * kWarp + lane_id()] = y[t][i];
      }
      __syncthreads();  // those written above are read below
      if (part() == 0) {
        for (int other = 1; other < parts; ++other)
#pragma unroll
          for (int i = 0; i < 8; ++i)
            y[t][i] = __fadd_rn(y[t][i], merged[(warp_id() + (other - 1) * blocks) * 256 + i * kWarp + lane_id()]);
      }
    }
  }
};

template <int kTiles>
__device__ __forceinline__ void attend_sparsely(const SparseAttentionParams& p) {
  extern __shared__ uint4 attention_memory[];
  using Block = SparseAttention<kTiles>;
  Block block(p, attention_memory);
  if (block.heads == 0) return;
  const int64_t item = static_cast<int64_t>(block.row) * p.heads + block.first_head;
  const int m = static_cast<int>(threadIdx.x), lane = lane_id(), stretches = block.seen.stretches();
  const bool is_part = p.part_y != nullptr;
  const int partition = static_cast<int>(blockIdx.z);
  if (is_part && partition >= stretches) return;
  if (stretches > 0) block.run(is_part ? partition : 0, is_part ? partition + 1 : stretches);

  if (is_part) {
    if (m < block.heads)
      reinterpret_cast<float2*>(p.part_weight)[(item + m) * p.partitions + partition] = {block.largest, block.sum};
  } else {
    __syncthreads();  // rescaling is used before its place takes the sums
    if (m < Block::kRows) block.shared.rescale[m] = block.sum;
    __syncthreads();  // the sums written above are read below
  }
  if (block.part() != 0) return;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int head = t * kTileRows + row_of_c(lane, i);
      const int feature = block.feature_block() * kTileColumns + column_of_c(lane, i);
      if (head >= block.heads || feature >= block.head_dim) continue;
      if (is_part)
        p.part_y[((item + head) * p.partitions + partition) * block.head_dim + feature] = block.y[t][i];
      else
        p.y[(item + head) * block.head_dim + feature] =
            stretches > 0 ? block.y[t][i] / block.shared.rescale[head] : 0.0f;
    }
}

#define V100_SPARSE(name, tiles, blocks)                                                                  \
  extern "C" __global__ void __launch_bounds__(kAttentionThreads, blocks) name(SparseAttentionParams p) { \
    attend_sparsely<tiles>(p);                                                                            \
  }

V100_SPARSE(sparse_attention_8, 1, 2)
V100_SPARSE(sparse_attention_16, 2, 2)
V100_SPARSE(sparse_attention_32, 4, 1)

// A row's partitions are few: each thread goes through all of them for its feature.
extern "C" __global__ void __launch_bounds__(kAttentionThreads) sparse_combine(SparseAttentionParams p) {
  const int row = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x);
  const int feature = static_cast<int>(threadIdx.x), head_dim = p.cache.head_dim;
  if (feature >= head_dim) return;
  const int64_t item = static_cast<int64_t>(row) * p.heads + head;
  const int stretches = SeenQuads(p, row).stretches();
  const float2* weights = reinterpret_cast<const float2*>(p.part_weight) + item * p.partitions;
  const float* sums = p.part_y + item * p.partitions * head_dim + feature;
  float largest = no_score();
  for (int i = 0; i < stretches; ++i) largest = fmaxf(largest, weights[i].x);
  float y = 0.0f, weight = 0.0f;
#pragma unroll 4
  for (int i = 0; i < stretches; ++i) {
    const float factor = weights[i].x == no_score() ? 0.0f : exp2f(weights[i].x - largest);
    weight = fmaf(weights[i].y, factor, weight);
    y = fmaf(sums[static_cast<int64_t>(i) * head_dim], factor, y);
  }
  p.y[item * head_dim + feature] = stretches > 0 ? y / weight : 0.0f;
}

}  // namespace v100::cuda
