// Parameters of the kernels: plain structs that the launcher fills and the kernel reads, one per kernel, passed by value.
// Included by host and device code, so both see one layout. Pointers are device addresses; strides are in elements.
//
// No struct has padding (a test sees to it; `unused` takes its place): lists of launches are compared byte by byte.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

namespace v100::cuda {

// Of the blocks of kernels that have a row of activations to themselves. Norms wait more than they compute, and more warps
// make their barriers longer; gates and panels compute.
constexpr int32_t kNormThreads = 256, kRowThreads = 512;

struct RmsNormParams {
  const float* x;       // [rows, features]; with `added`, the sum is written back here
  const float* added;   // [rows, features] or nullptr: x += added before the norm
  const float* weight;  // [features]
  float* y;             // [rows, features], may be x where nothing is added
  int32_t rows, features;
  float eps;
  int32_t unused = 0;
};

struct AddParams {
  float* x;            // [n], in place
  const float* added;  // [n]
  int64_t n;
};

struct ScaleParams {
  float* x;  // [n], in place
  int64_t n;
  float factor;  // of scale and scaled_silu; the cap of soft_cap
  int32_t unused = 0;
};

// Kernels whose grid is (rows, wide_blocks(features)): a thread has four features of a row, 256 apart.
constexpr int32_t wide_blocks(int32_t features) { return (features + 1023) / 1024; }

// Grid (rows, wide_blocks(features)), 256 threads.
struct AddVectorParams {
  float* x;             // [rows, features], in place
  const float* vector;  // [features]
  int32_t rows, features;
};

// x[indices[i]] = fma(factors[i], added[i], x[indices[i]]). Grid (rows, wide_blocks(features)), 256 threads.
struct AddScaledRowsParams {
  float* x;                // [*, features], in place
  const float* added;      // [rows, features]
  const int32_t* indices;  // [rows], all different
  const float* factors;    // [rows]
  int32_t rows, features;
};

// y = act(gate) * up.
struct GatedParams {
  const float* gate;  // [n]
  const float* up;    // [n]
  float* y;           // [n], may be gate or up
  int64_t n;
  int32_t activation;  // 0 silu, 1 gelu: the order of v100::Activation
  int32_t unused = 0;
};

// gated of one row, n a multiple of 4. Grid ((n + 1023) / 1024), 256 threads: block b leaves the largest magnitude that it wrote.
struct GatedLargestParams {
  GatedParams gated;
  float* largest;  // [gridDim.x]
};

// x *= sigmoid(gate); a gate covers features / gates adjacent features.
struct ApplyGateParams {
  float* x;           // [rows, features], in place
  const float* gate;  // [rows, gates]
  int32_t rows, features, gates;
  int32_t unused = 0;
};

// Each head of x: rms_norm where weight is not nullptr, then the rotation.
struct NormRopeParams {
  float* x;             // [rows, heads * head_dim], in place
  const float* weight;  // [head_dim] or nullptr
  const float* cosine;  // [rows, pairs]
  const float* sine;    // [rows, pairs]
  int32_t rows, heads, head_dim, pairs;
  int32_t halves;  // 1: pair p = (p, p + pairs), 0: (2p, 2p + 1)
  float eps;
};

// Each head of x: rms_norm, then times function(gate).
struct NormGateParams {
  const float* x;       // [rows, heads * head_dim]
  const float* gate;    // [rows, heads * head_dim]
  const float* weight;  // [head_dim]
  float* y;             // [rows, heads * head_dim], may be x
  int32_t rows, heads, head_dim;
  int32_t function;  // 0 silu, 1 sigmoid: the order of v100::GateFunction
  float eps;
  int32_t unused = 0;
};

struct GatherRowsParams {
  const float* x;          // [*, features]
  const int32_t* indices;  // [rows]
  float* y;                // [rows, features]
  int32_t rows, features;
};

// A rectangle of one tensor into another: place, copy, each half of concatenate, columns of a fused product. Grid
// (rows, wide_blocks(columns)), 256 threads.
struct CopyColumnsParams {
  const float* x;  // row r at x + r * from_stride
  float* y;        // row r at y + r * to_stride; the two do not overlap
  int64_t from_stride, to_stride;
  int32_t rows, columns;
};

// Grid any, 256 threads.
struct FillParams {
  float* x;  // [n]
  int64_t n;
  float value;
  int32_t unused = 0;
};

// Of each row the one before it in its sequence, or that of the record. No sequence may write a slot that another one reads.
// Grid (rows, wide_blocks(features)), 256 threads.
struct PreviousRowsParams {
  const float* x;             // [rows, features]
  float* y;                   // [rows, features], not x
  float* last;                // slot s at last + s * slot_values: [features]
  const int32_t* sequence;    // [rows], -1: of none, y is not written
  const int32_t* first_row;   // [sequences]
  const int32_t* end_row;     // [sequences], behind the last one
  const int32_t* state_from;  // [sequences], -1: zeros
  const int32_t* state_to;    // [sequences], may be state_from; -1: nothing is written
  int64_t slot_values;
  int32_t rows, features;
};

// Residual streams: `features` are those of one stream; a row holds the streams side by side.
//
// Grid (rows, wide_blocks(features)), 256 threads.
struct RepeatStreamsParams {
  const float* x;  // [rows, features]
  float* y;        // [rows, streams, features]
  int32_t rows, features, streams;
  int32_t unused = 0;
};

// Grid (rows, streams), 256 threads.
struct NormStreamsParams {
  const float* x;       // [rows, streams, features]
  const float* weight;  // [streams, features]
  float* y;             // [rows, streams, features], may be x
  int32_t rows, features, streams;
  float eps;
};

// Grid (rows, wide_blocks(features)), 256 threads.
struct MixStreamsParams {
  const float* x;     // [rows, streams, features]
  const float* gate;  // [rows, streams, features]
  float* y;           // [rows, features]
  int32_t rows, features, streams;
  int32_t unused = 0;
};

// Grid (rows, wide_blocks(features)), 256 threads.
struct AddToStreamsParams {
  float* x;             // [rows, streams, features], in place
  const float* y;       // [rows, features]
  const float* inject;  // [rows, streams]
  int32_t rows, features, streams;
  int32_t unused = 0;
};

// Grid (rows, streams), 256 threads.
struct GateMemoryParams {
  const float* key;    // [rows, streams, features]
  const float* query;  // [rows, streams, features]
  const float* value;  // [rows, features]
  float* y;            // [rows, streams, features], may be key or query
  int32_t rows, features, streams;
  int32_t unused = 0;
};

// Row r belongs to block r / block_rows. Grid (rows, wide_blocks(features)), 256 threads.
struct BlockConvParams {
  const float* x;     // [rows, features]
  const float* base;  // [2, taps, features]
  const float* own;   // [rows, 2, taps, features / group]
  float* y;           // [rows, features], not x
  int32_t rows, features, taps, group;
  int32_t place;  // 0 before, 1 after a layer
  int32_t block_rows;
};

// Activations as an f16 panel: [K / 8][tiles][8 rows][8], so that the eight rows of a tile are 128 adjacent bytes and all
// tiles of 8 values lie side by side.
// A row is multiplied by a power of two that brings its largest value to 2^14..2^15; row_scale undoes that. Rows that are
// not there, up to 8 * tiles, are left as they are: an output row of a product comes from its own row alone.
// Grid (rows), kRowThreads.
struct PanelParams {
  const float* x;          // [rows, features]
  uint16_t* panel;         // f16, [features / 8, tiles, 8, 8]
  float* row_scale;        // [rows]
  int32_t rows, features;  // features a multiple of 8
  int32_t tiles;           // those of the kernel that reads the panel: 1, 2, 4, 8; for linear_prompt.cu 16 per 128 rows
  int32_t unused = 0;
};

// The panel of what a row-wise kernel makes, rows of at most 64. Grid (rows), kRowThreads; of rms_norm_panel kNormThreads.
struct PanelOutput {
  uint16_t* panel;   // as PanelParams::panel
  float* row_scale;  // [8 * tiles]
  int32_t tiles;     // 1, 2, 4 or 8
  int32_t unused = 0;
};
struct RmsNormPanelParams {
  RmsNormParams norm;
  PanelOutput out;  // of norm.y
};
struct NormGatePanelParams {
  NormGateParams gate;
  PanelOutput out;  // of gate.y
};
struct GatedPanelParams {
  GatedParams gated;  // n = rows * features
  PanelOutput out;    // of gated.y
  int32_t features;
  int32_t unused = 0;
};
struct ApplyGatePanelParams {
  ApplyGateParams gate;
  PanelOutput out;  // of gate.x
};

// Weights of file layout into records (codecs.cuh).
struct RepackParams {
  const uint8_t* rows;  // [out_features, in_features / block] blocks
  uint8_t* packed;  // [(out_features + 31) / 32, in_features / block] records; zeros before, for the last one's rest
  int32_t out_features;
  int32_t blocks;    // of a row; of BF16, 32 values are one
  int32_t exponent;  // of BF16: values are multiplied by 2^exponent, -126 to 126
  int32_t unused = 0;
};

// The largest magnitude among bf16 values, as its 15 bits, of each block's share. Any grid, blocks of 256 threads.
struct LargestParams {
  const uint16_t* values;  // [n]
  uint32_t* largest;       // [gridDim.x]
  int64_t n;
};

// RepackParams::exponent of a matrix of bf16: the largest value goes to 2^14..2^15, as rows of a panel do, so none overflows
// and those down to 2^-31 of it keep their 8 bits. The weight's scale, or EmbedParams::exponent, undoes it.
constexpr int32_t bf16_exponent(uint32_t largest) {
  const int32_t exponent = 14 + 127 - static_cast<int32_t>(largest >> 7);
  return largest == 0 ? 0 : exponent < 126 ? exponent : 126;
}

// Mixtures of experts. A routing has slots, slot r * used + j being choice j of row r. group_slots sorts them by expert and
// cuts each expert's into items of at most as many rows as the kernel that multiplies them has.
struct ExpertItem {
  int32_t expert;
  int32_t first, rows;  // order[first], ..., order[first + rows - 1] are its slots; rows 0: there is nothing to do
};

// Grid experts / 8 + 1 of 256 threads: a warp per expert and one for the items that are not needed.
struct GroupSlotsParams {
  const int32_t* expert;   // [slots], each below `experts`
  int32_t* order;          // [slots]: those of expert 0 ascending, then those of expert 1, ...
  ExpertItem* items;       // [most_items], in the order of their slots; those not needed have no rows
  int32_t slots, experts;  // experts at most 1024
  int32_t rows_of_item;    // R of the kernel: 8, 16, 32 or 64
  int32_t most_items;      // most_expert_items(slots, experts, R)
};

// Items that any routing may need, known before it: the grid of a launch does not depend on what was routed where.
constexpr int32_t most_expert_items(int32_t slots, int32_t experts, int32_t rows_of_item) {
  const int32_t in_use = slots < experts ? slots : experts;
  const int64_t items = (slots + static_cast<int64_t>(in_use) * (rows_of_item - 1)) / rows_of_item;
  return static_cast<int32_t>(items < slots ? items : slots);
}

// An expert's matrix, packed; nullptr gives zeros: the expert belongs to another rank.
struct ExpertWeight {
  const uint8_t* weight;
  float scale;  // of the matrix, as LinearJob's
  int32_t unused = 0;
};

// A panel for each item, of the rows of x that its slots read. Grid (R, most_items) of 256 threads.
struct ExpertPanelParams {
  const float* x;           // [slots / slots_per_row, features]: slot s reads row s / slots_per_row
  const ExpertItem* items;  // [most_items]
  const int32_t* order;     // [slots]
  uint16_t* panel;   // f16, [most_items][features / 8, tiles, 8, 8]; rows that an item has not are left as they are
  float* row_scale;  // [slots], in the order of `order`
  int32_t features;  // a multiple of 8
  int32_t tiles;     // R / 8
  int32_t slots_per_row;  // `used` for what is before the experts, 1 for what they made
  int32_t unused = 0;
};

constexpr int32_t kMostLinearJobs = 8;
constexpr int32_t kPromptRows = 128;  // panels of linear_prompt.cu have rows up to a multiple of this

// One weight matrix of a launch, or one per expert. A tile is 32 output features.
struct LinearJob {
  const uint8_t* weight;  // packed
  const float* bias;      // [out_features] or nullptr
  float* y;               // [rows, out_features]; with items [slots, out_features]
  int32_t out_features;
  int32_t first_tile;           // of the launch
  float scale;                  // of the weight: y = scale * W x + bias
  int32_t adds;                 // 1: y += instead of y =
  const ExpertWeight* experts;  // [experts]: with items, instead of weight and scale
};

struct LinearParams {
  const uint16_t* panel;   // of the input, with as many tiles as the kernel has
  const float* row_scale;  // [rows]
  int32_t rows;            // at most 8 times the tiles of the kernel; any number for linear_prompt.cu
  int32_t in_features;
  int32_t jobs, tiles;  // tiles: of all jobs together
  int32_t activation;   // of the gated kernels: job 0 is the gate, job 1 up, job 0 has y
  int32_t unused = 0;
  const ExpertItem* items;  // [gridDim.y], or nullptr. With items panel and row_scale are those of ExpertPanelParams
  const int32_t* order;     // [slots], of the items
  LinearJob job[kMostLinearJobs];
};

// One row (linear_row.cu). Blocks of 256 threads take the tiles blockIdx.x, + gridDim.x, ... of the launch; dynamic shared
// memory of 2 * in_features bytes. `linear` has no panel, row_scale, items and activation, one row, and no job writes what the
// kernel reads. kMostRowFeatures: of in_features.
constexpr int32_t kMostRowFeatures = 22528;
constexpr int32_t kMostRowTaps = 8;
// The convolution of what a job makes (CausalConvParams, dilation 1, at most kMostRowTaps taps), for the only sequence there is.
struct RowConv {
  const float* weight;        // [taps, channels]; nullptr: there is none
  float* y;                   // [channels]
  float* history;             // as CausalConvParams
  const int32_t* state_from;  // [1]
  const int32_t* state_to;    // [1]
  int64_t slot_values;
  int32_t job, taps;
};
constexpr int32_t kMostHeldFeatures = 8192, kHeldHead = 128;  // of rows that norms and gates are made of
struct RowLinearParams {
  const float* x;        // [in_features]
  const float* largest;  // [parts] magnitudes, of which one is the largest of x; nullptr: not known
  LinearParams linear;
  RowConv conv;
  int32_t parts;
  int32_t unused = 0;
};
// Of rms_norm(x), or of rms_norm(x + added): all blocks make it, the first one writes norm.y, and x becomes x + added when all
// have read it. At most kMostHeldFeatures features, a multiple of 4.
struct NormLinearParams {
  RmsNormParams norm;
  uint32_t* arrived;  // zero before and after
  LinearParams linear;
  RowConv conv;
};
// Of norm_gate: heads of kHeldHead, at most kMostHeldFeatures features; y is not x.
struct NormGateLinearParams {
  NormGateParams gate;
  LinearParams linear;
  RowConv conv;
};

// Matrices of f32: the weight of a job is [out_features, in_features] f32, not packed. Blocks of 256 threads; a tile of a job
// is 4 features of rows8, 16 of rows16. Grid (tiles of all jobs, (rows + 7) / 8) for rows8, which is for up to 64 rows, and
// (tiles, (rows + 15) / 16) for rows16; with items (tiles, most_items), R being 8 and 16.
struct LinearF32Params {
  const float* x;  // [rows, in_features]; with items [slots / slots_per_row, in_features]
  int32_t rows;    // without items
  int32_t in_features, jobs;
  int32_t slots_per_row;    // with items: slot s reads row s / slots_per_row
  const ExpertItem* items;  // [gridDim.y], or nullptr
  const int32_t* order;     // [slots], of the items
  LinearJob job[kMostLinearJobs];
};

// One layer's KV cache: pages in the layout of kv_page.h.
struct KvCache {
  uint8_t* pages;              // page i at pages + i * page_bytes
  int64_t page_bytes;          // at least kv_page_bytes, a multiple of 16
  int32_t kv_heads, head_dim;  // of keys and of values
  int32_t type_k, type_v;      // KvType
  int32_t group, skew;         // query head h reads kv head (h + skew) / group
  int32_t block;               // of an index cache, KvShape::block; else 0
  int32_t unused = 0;
};

// Grid: a warp for each row, kv head, 32 features (rounded up) and k or v, 8 to a block of 256 threads.
struct KvAppendParams {
  const float* k;             // [rows, kv_heads * head_dim], or nullptr: only v is stored
  const float* v;             // [rows, kv_heads * head_dim]
  const int32_t* kv_index;    // [rows], of the row's token in its sequence
  const int32_t* sequence;    // [rows]
  const int32_t* page_table;  // [sequences, most_pages]: token i of a sequence lies in page i / 256
  KvCache cache;
  int32_t rows, most_pages;
};

// Queries and keys of a layer are turned in place (norm_rope), then keys and values appended; append.k is k.x. Grid: a warp for
// each row and query head, kv head, and 32 features (rounded up) of each kv head's values, 8 to a block of 256 threads.
struct RotateAppendParams {
  NormRopeParams q, k;  // of the same rows
  KvAppendParams append;
};

// Indices first..first + rows of one sequence. The grid of kv_append.
struct KvReadParams {
  float* k;              // [rows, kv_heads * head_dim]
  float* v;              // the same
  const int32_t* where;  // place of the first in its page, then that page and those after it
  KvCache cache;
  int32_t rows;
  int32_t unused = 0;
};

// Sparse attention: an index cache (KvCache::block > 0) has the tokens' index keys as values, stored by kv_append without k,
// and the blocks' keys as keys. At most 256 features. Grid ((rows + 7) / 8), 256 threads.
struct BlockKeysParams {
  const float* weight;        // [head_dim], of the norm
  const float* cosine;        // [blocks, pairs]: one row for each block that a row ends
  const float* sine;          // [blocks, pairs]
  const int32_t* block_row;   // [rows]: which of these; -1: the row's token ends no block
  const int32_t* kv_index;    // [rows]
  const int32_t* sequence;    // [rows]
  const int32_t* page_table;  // [sequences, most_pages]
  KvCache cache;
  int32_t rows, most_pages, pairs;
  float eps;
};

// Dynamic shared memory of score_blocks_N, `rows` = N. N = 32 where that is at most 96 KB, and more than 8 rows are there.
constexpr int32_t index_shared_bytes(int32_t head_dim, int32_t heads, int32_t rows) {
  return heads * rows * ((head_dim + 31) / 32 * 128 + 4);
}

// Grid (row_blocks, any, sequences), 256 threads: row_blocks at least the rows of any sequence over N; y: eight tiles of 32
// block keys each, or fewer blocks that then take several.
struct ScoreBlocksParams {
  const float* q;             // [rows, heads * head_dim]
  const int32_t* visible;     // [rows, 2]: kv indices [0, end) that the row sees
  const int32_t* first_row;   // [sequences + 1]
  const int32_t* page_table;  // [sequences, most_pages]
  float* scores;              // [rows, score_stride]; not written for rows that see no more blocks than `most`
  KvCache cache;              // of the index
  int32_t heads, most_pages;
  int32_t score_stride;  // at least the complete blocks that any row sees
  int32_t most;          // blocks that a row chooses
};

// Grid (rows), 512 threads.
struct ChooseBlocksParams {
  const float* scores;     // [rows, score_stride]
  const int32_t* visible;  // [rows, 2]
  int32_t* count;          // [rows]
  int32_t* blocks;         // [rows, most], the first count of a row, ascending
  int32_t rows, score_stride, block, most;
};

// Caches with q4_1, q5_0 or q5_1 on either side: units whose names end in _counted, for heads of 64, 128 and 256 features, with
// attention_decode_16_counted and _64_counted, attention_prompt; attention_combine is that of the plain unit.
// The rows of a sequence are adjacent: first_row[s] to first_row[s + 1].
struct AttentionParams {
  const float* q;             // [rows, heads * head_dim]
  const int32_t* visible;     // [rows, 2]: kv indices [begin, end) that the row sees
  const int32_t* first_row;   // [sequences + 1]
  const int32_t* page_table;  // [sequences, most_pages]
  float* y;                   // [rows, heads * head_dim]; of prompts
  float* part_y;              // decode: [rows, heads, partitions, head_dim], not yet divided by the weight
  float* part_weight;         // decode: [rows, heads, partitions, 2]: largest score in powers of 2, sum of the weights
  KvCache cache;
  int32_t heads, most_pages;
  int32_t partitions;  // decode: at least those of the longest view, counted from index 0
  int32_t row_blocks;  // of a kv head: for each sequence at least its rows * group over the rows of the kernel
  float scale;
  int32_t unused = 0;
};

// Merges what decode left of each partition; then, if they are there, the gate of ApplyGateParams and the panel of the row.
// Grid (heads * combine_slices, rows), 256 threads.
struct AttentionCombineParams {
  const int32_t* visible;    // [rows, 2], as AttentionParams
  const float* part_y;       // [rows, heads, partitions, head_dim]
  const float* part_weight;  // [rows, heads, partitions, 2]
  float* y;                  // [rows, heads * head_dim]
  const float* gate;         // [rows, gates], or nullptr
  uint32_t* arrived;         // with a panel: [rows], zeros before and after
  PanelOutput out;           // of y; panel is nullptr where none is wanted
  int32_t heads, partitions, gates;
  int32_t unused = 0;
};

// Dynamic shared memory of sparse_attention_N, `heads` = N.
constexpr int32_t sparse_shared_bytes(int32_t head_dim, int32_t heads) {
  const int32_t blocks = (head_dim + 31) / 32;
  return heads * (64 * blocks + 512 + 80) + 2048 + (8 / blocks - 1) * blocks * 1024;
}

// Tokens of a row that a partition of sparse_attention_N has.
constexpr int32_t kSparsePartition = 256;

// sparse_attention_N, N = 8, 16 or 32: the least with group <= N, or 32. Grid (rows, kv_heads * head_blocks, partitions), 256
// threads; head_blocks: group over N, rounded up. Prompts: part_y is nullptr, partitions 1. Few rows: partitions at least
// ((most + 1) * max(block, 4) + 255) / 256, then sparse_combine, grid (heads, rows), 256 threads. At most 256 features.
struct SparseAttentionParams {
  const float* q;             // [rows, heads * head_dim]
  const int32_t* visible;     // [rows, 2]: kv indices [0, end) that the row sees if their blocks are chosen
  const int32_t* sequence;    // [rows]
  const int32_t* page_table;  // [sequences, most_pages]
  const int32_t* count;       // [rows]: blocks chosen
  const int32_t* blocks;      // [rows, most], ascending: tokens [block * b, block * (b + 1))
  float* y;                   // [rows, heads * head_dim]; with part_y it is sparse_combine that writes it
  float* part_y;              // [rows, heads, partitions, head_dim], not yet divided by the weight; or nullptr
  float* part_weight;         // [rows, heads, partitions, 2]: largest score in powers of 2, sum of the weights
  KvCache cache;
  int32_t heads, most_pages;
  int32_t block, most;  // block: a power of 2 from 2 to 256
  int32_t partitions, head_blocks;
  float scale;
  int32_t unused = 0;
};

// The gated delta net, one recurrent step per row (ops.h). No sequence may write a slot that another one reads.
struct DeltaNetParams {
  const float* qkv;           // [rows, (2 key_heads + value_heads) * head_dim]
  const float* beta;          // [rows, value_heads]
  const float* alpha;         // [rows, value_heads]
  const float* a;             // [value_heads], -exp(A_log)
  const float* dt_bias;       // [value_heads]
  float* y;                   // [rows, value_heads * head_dim]
  float* memory;              // slot s at memory + s * slot_values: [value_heads, head_dim / 16, head_dim, 16]
  const int32_t* state_from;  // [sequences], -1: zeros
  const int32_t* state_to;    // [sequences]
  const int32_t* first_row;   // [sequences]
  const int32_t* end_row;     // [sequences], behind the last one
  int64_t slot_values;
  int32_t key_heads, value_heads;
  int32_t most_rows;  // of a sequence; those with more are left alone
  float eps;
};

// The same in chunks of tokens (delta_chunk_shape.h), for prompts.
struct DeltaNetChunksParams {
  const float* qkv;  // as in DeltaNetParams, and so on
  const float* beta;
  const float* alpha;
  const float* a;
  const float* dt_bias;
  float* y;
  float* memory;
  const int32_t* state_from;
  const int32_t* state_to;
  const int32_t* first_row;
  const int32_t* end_row;
  const int32_t* first_position;  // [sequences], of the first row in its sequence: chunks end at multiples of 64
  const int32_t* first_chunk;     // [sequences + 1], of the launch
  uint16_t* key_panels;           // f16, [chunks, key_heads, delta_key_panel_values]
  uint16_t* value_panels;         // f16, [chunks, value_heads, kDeltaValuePanelValues]
  float* factors;                 // [chunks, value_heads, kDeltaFactorValues]
  int64_t slot_values;
  int32_t key_heads, value_heads;
  float eps;
  int32_t unused = 0;
};

struct CausalConvParams {
  const float* x;             // [rows, channels]
  const float* weight;        // [taps, channels], the oldest token first
  float* y;                   // [rows, channels], not x
  float* history;             // slot s at history + s * slot_values: [(taps - 1) * dilation, channels]
  const int32_t* state_from;  // [sequences], -1: zeros
  const int32_t* state_to;    // [sequences]
  const int32_t* first_row;   // [sequences]
  const int32_t* end_row;     // [sequences], behind the last one
  int64_t slot_values;
  int32_t channels, taps, dilation;
  int32_t unused = 0;
};

struct RouteParams {
  const float* logits;          // [rows, experts]
  int32_t* expert;              // [rows, used]
  float* weight;                // [rows, used]
  int32_t rows, experts, used;  // experts at most 1024, used at most 32
  int32_t unused = 0;
};

struct MixExpertsParams {
  const float* x;       // [rows * used, features]
  const float* weight;  // [rows, used]
  float* y;             // [rows, features]
  int32_t rows, features, used;
  int32_t unused = 0;
};

// Rows of a table that is packed as a weight matrix is: embeddings, which may be those of the output. Those of a table of f32
// are gather_rows.
struct EmbedParams {
  const uint8_t* table;   // packed (codecs.cuh)
  const int32_t* tokens;  // [rows]
  float* y;               // [rows, features]
  int32_t rows, features;
  int32_t exponent;  // y is 2^exponent, -126 to 126, times what the table says; 0 but for BF16
  int32_t unused = 0;
};

// Where a row's first NaN or +infinity stands. Grid (any, rows), 256 threads.
struct FindFlawsParams {
  const float* logits;  // [rows, n]
  int32_t* first;       // [rows], at least n before (memory set to 0x7f bytes), and after where there is none
  int32_t n;
  int32_t unused = 0;
};

// Grid (any, rows), 256 threads.
struct MaskLogitsParams {
  const float* logits;          // [rows, n]
  float* y;                     // [rows, n], may be logits: they, but -infinity where the bit of the mask is not set
  const uint32_t* masks;        // [masks, words]
  const int32_t* mask_of;       // [rows], -1: none
  int32_t n, words, first_bit;  // column c is bit (c + first_bit) % 32 of word (c + first_bit) / 32
  int32_t unused = 0;
};

// Sums of e^(value - largest) of each chunk of 2048 values, in the order of sampling/row_scan.cpp. Grid (chunks, rows), 512
// threads.
struct SumExpParams {
  const float* logits;   // [rows, n]
  const float* largest;  // of row r at largest[r * stride]
  double* y;             // [rows, chunks]
  int32_t n, stride;
};

// Single values of each row. Grid (rows), 256 threads.
struct PickColumnsParams {
  const float* x;          // [rows, n]
  const int32_t* columns;  // [rows, listed], -1: none
  float* y;                // [rows, listed], 0 where there is none
  int32_t n, listed;
};

// One pass: each chunk of 2048 keys of a row leaves its `kept` largest. The first pass makes the keys, the last reads them.
struct TopKParams {
  const float* logits;   // [rows, n], or nullptr: `keys` are given
  const uint64_t* keys;  // [rows, n]
  uint64_t* kept_keys;   // [rows, chunks, kept], chunks = n / 2048 rounded up; or nullptr: this is the last pass
  float* values;  // last pass, of one chunk: [rows, kept], falling, of equal ones the lower index first; else nullptr
  int32_t* indices;  // [rows, kept]
  int32_t n, kept;   // kept at most 1024; in the last pass at most n
};

constexpr int32_t kMostRanks = 8;

// Ranks with devices that reach each other's memory. A buffer is [2 halves][ranks][slot_values] words, all ones before its first
// use; meetings take turns with the halves.
struct AllReduceParams {
  float* x;                     // [n], in place: the sum over ranks in their order
  uint32_t* slots[kMostRanks];  // this meeting's half of each rank's buffer
  uint32_t* mine;               // slots[rank]
  uint32_t* stop;               // in host memory: not 0: the others will not come
  uint32_t* late;               // in host memory: becomes 1 when they did not
  int64_t n;                    // a multiple of 4, at most slot_values
  int64_t slot_values;
  int64_t patience;  // clock cycles
  int32_t rank, ranks;
};

}  // namespace v100::cuda
