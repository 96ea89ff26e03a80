// The loop of the streaming kernels: a warp multiplies tiles of 32 output features with up to 64 rows, over its part of K.
#pragma once

#include "codebook_codecs.cuh"
#include "linear_shape.h"

namespace v100::cuda {

constexpr int kParts = kLinearThreads / kWarp;  // of K: 8

// The units [begin, end) of a warp's part of K: whole blocks, as even as they go.
template <class Codec>
__device__ __forceinline__ void part_of(int blocks, int part, int& begin, int& end) {
  begin = blocks * part / kParts * Codec::kUnits;
  end = blocks * (part + 1) / kParts * Codec::kUnits;
}

// Of 32 weights.
template <class Codec>
constexpr int kBytesOfUnit = Codec::kBytes / Codec::kUnits;
// Units of a round, where two rounds take turns: as many as wanted, if a block has them.
template <class Codec>
constexpr int stage_of(int wanted) {
  constexpr int kMost = Codec::kUnits == 1 ? 4 : Codec::kUnits / 2;
  return wanted < kMost ? wanted : kMost;
}

// Where a lane gets activations from: octet(i, t) are the 8 values of octet i of k of its row (row_of_a) in tile t of rows.
template <int kTiles>
struct PanelRows {
  static constexpr int kOctet = kTiles * kTileRows * 8;  // 8 values of all rows
  const uint16_t* x;                                     // of the panel, at the lane's row

  // Lanes of rows that are not there read the last one: what they make of it is not stored, and a line is read for less.
  __device__ __forceinline__ PanelRows(const uint16_t* panel, int rows)
      : x(panel + (kTiles == 1 ? min(row_of_a(lane_id()), rows - 1) : row_of_a(lane_id())) * 8) {}
  __device__ __forceinline__ uint4 octet(int i, int t) const { return cached_16(x + i * kOctet + t * (kTileRows * 8)); }
  __device__ __forceinline__ void advance(int octets) { x += octets * kOctet; }
  __device__ __forceinline__ void advance_far(int octets) { x += static_cast<int64_t>(octets) * kOctet; }
};

// kTiles times 8 rows. kStage units of each tile are loaded together: one group of loads per round, because SM70 has six
// scoreboards, and a wait on one that activations and weights to come share waits for both. For few rows two rounds take
// turns, one on its way while the other is computed. From 32 rows on registers are short and half a unit's products take longer
// than a load: the next unit comes into the registers of the one just decoded.
//
// kEarly: both rounds that take turns are asked for at the beginning, for a caller that has something to do meanwhile. Where
// there is nothing to do that loop is faster for 8 rows of types with heads, and slower for all else (measured).
template <class Codec, int kTiles, int kColumns, int kStage, bool kEarly>
class TileStream {
 public:
  // Asks for what comes first of the units [begin, end) of K of the tiles whose records begin there. There is one at least.
  __device__ __forceinline__ void begin(const uint8_t* const (&records)[kColumns], int begin, int end) {
    rest_ = end - begin - kLoop;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      at_[c] = records[c] + static_cast<int64_t>(begin / Codec::kUnits) * (32 * Codec::kBytes) + Codec::kHeadBytes +
               Codec::kLaneBytes * lane_id();
    load_headers();
    load(even_, rest_ + kLoop);
    if constexpr (kTakeTurns && kEarly) load_odd(rest_ + kLoop);
  }

  // Adds the products of these units with their activations, x at the first one.
  template <class Rows>
  __device__ __forceinline__ void run(Rows x, float (&sums)[kColumns][kTiles][8]) {
    if constexpr (kTakeTurns) {
#pragma unroll 1
      for (;;) {
        if (!kEarly) load_odd(rest_ + kLoop);
        compute<0>(even_, rest_, x, sums);
        advance(Codec::kUnits > 1 && (rest_ & (Codec::kUnits - 1)) == 0);
        if (rest_ > 0) load(even_, rest_);
        if (has_odd(rest_ + kLoop)) compute<kStage>(odd_, rest_, x, sums);
        if (rest_ <= 0) break;
        if (kEarly) load_odd(rest_);
        rest_ -= kLoop;
      }
    } else {
#pragma unroll 1
      for (;; --rest_) {
        compute<0>(even_, rest_, x, sums);
        if (rest_ <= 0) break;
      }
    }
  }

 private:
  static constexpr bool kTakeTurns = kTiles < 4;
  static constexpr bool kPrefetches = Codec::kUnits > 1 && kColumns > 1 && kTiles > 1;  // measured: it pays for these
  static_assert(Codec::kUnits == 1 || Codec::kUnits % (2 * kStage) == 0,
                "two rounds lie within a block, or blocks are units");
  static_assert(kTakeTurns || kStage == 1, "the next unit takes the place of this one");
  static_assert((Codec::kUnits & (Codec::kUnits - 1)) == 0, "an index in a block is made of low bits");
  static constexpr int kLoop = kTakeTurns ? 2 * kStage : 1;  // units of an iteration; a block's are whole iterations

  struct Round {
    typename Codec::Unit unit[kColumns][kStage];
  };

  __device__ __forceinline__ void load_headers() {  // of the block whose first unit was loaded last
#pragma unroll
    for (int c = 0; c < kColumns; ++c) header_[c] = Codec::load_header(at_[c] - Codec::kHeadBytes, lane_id());
  }
  __device__ __forceinline__ void load(Round& round, int left) {  // `left` units to be loaded, these among them
    const bool has_more = kPrefetches && left > 1;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kStage; ++i)
        if (Codec::kUnits > 1 || i == 0 || i < left)
          round.unit[c][i] = Codec::load_unit(at_[c] + i * Codec::kUnitBytes, lane_id());
      // The unit after it, or the next block's head: no register is taken, and it has a round more to come.
      if (has_more) prefetch(at_[c] + (lane_id() * (Codec::kUnitBytes / 32 - Codec::kLaneBytes) + Codec::kUnitBytes));
    }
  }
  // Of the iteration that begins with `left` units.
  __device__ __forceinline__ static bool has_odd(int left) { return Codec::kUnits > 1 || left > kStage; }
  __device__ __forceinline__ void load_odd(int left) {
    advance(false);
    if (has_odd(left)) load(odd_, left - kStage);
  }
  // To the next round's bytes. The step is chosen, because a branch around the head costs more than two additions per tile.
  __device__ __forceinline__ void advance(bool begins_block) {
    const uint32_t step = kStage * Codec::kUnitBytes + (begins_block ? Codec::kHeadBytes : 0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) at_[c] += step;
  }

  // The units `offset` and on of the iteration that `rest` units follow. Parts end with a block, so the inverse of the index
  // in the block is in the low bits: one counter, where first, end and index took three registers.
  template <int offset, class Rows>
  __device__ __forceinline__ void compute(Round& round, int rest, Rows& x, float (&sums)[kColumns][kTiles][8]) {
    const int first_index = Codec::kUnits > 1 ? (~rest & (Codec::kUnits - kLoop)) + offset : 0;
#pragma unroll
    for (int i = 0; i < kStage; ++i) {
      if (Codec::kUnits == 1 && i > 0 && offset + i - kLoop >= rest) break;
      const int index = Codec::kUnits > 1 ? first_index + i : 0;
      for_each<2>([&]<int g>() {
        uint32_t w[kColumns][8];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) Codec::template decode<g>(header_[c], round.unit[c][i], index, w[c]);
        if (g == 1) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) Codec::end_unit(header_[c], index);
        }
        if (!kTakeTurns && g == 1) {
          const bool ends_block = Codec::kUnits > 1 && index == Codec::kUnits - 1;
          advance(ends_block);
          if (rest > 0) {
            load(round, rest);
            if (ends_block) load_headers();
          }
        }
        // The header has said what it had to: the next block's takes its place. The round to come is that block's first.
        if (kTakeTurns && Codec::kUnits > 1 && g == 1 && i == kStage - 1 && index == Codec::kUnits - 1 && rest > 0)
          load_headers();
#pragma unroll
        for (int p = 0; p < 2 * kTiles; ++p) {
          // From 32 rows on the two octets of a tile of rows follow each other: fewer registers go to memory so.
          const int t = kTakeTurns ? p % kTiles : p / 2, o = kTakeTurns ? p / kTiles : p % 2;
          const uint4 a = x.octet(4 * i + 2 * g + o, t);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int turn = kTiles > 1 && kColumns > 1 ? t + c : -1;
            mma_8x32x4(sums[c][t], a.x, a.y, w[c][4 * o], w[c][4 * o + 1], turn);
            mma_8x32x4(sums[c][t], a.z, a.w, w[c][4 * o + 2], w[c][4 * o + 3], turn);
          }
        }
      });
    }
    x.advance(kStage * (kUnitValues / 8));
  }

  const uint8_t* at_[kColumns];  // what was loaded last
  typename Codec::Header header_[kColumns];
  Round even_, odd_;
  int rest_;  // units behind this iteration's
};

// All of it: the sums of a warp's tiles over its part of K, which has `blocks` blocks.
template <class Codec, int kTiles, int kColumns, int kStage>
__device__ __forceinline__ void stream_tiles(const uint16_t* panel, const uint8_t* const (&records)[kColumns], int rows,
                                             int blocks, int part, float (&sums)[kColumns][kTiles][8]) {
  int begin, end;
  part_of<Codec>(blocks, part, begin, end);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[c][t][i] = 0.0f;
  if (begin == end) return;
  PanelRows<kTiles> x(panel, rows);
  x.advance_far(begin * (kUnitValues / 8));
  TileStream<Codec, kTiles, kColumns, kStage, (Codec::kUnits > 1 && kTiles == 1)> stream;
  stream.begin(records, begin, end);
  stream.run(x, sums);
}

}  // namespace v100::cuda
