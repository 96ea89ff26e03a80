// Scoring is a dense product of the queries of some rows with the key tiles of a page, which the rows share; then each row
// picks its blocks by the bits of its scores. Rows that see no more blocks than they may choose are not scored at all.
#include "cpu/block_index.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cpu/kv_page.h"

namespace v100::cpu {

namespace {

constexpr int32_t kTileQueries = 48;
constexpr int64_t kScoreBytes = 16 << 20;  // scores of the rows in hand
constexpr int32_t kPagesOfJob = 16;
constexpr int64_t kParallelProducts = 200'000;  // multiply-adds below which threads cost more than they give (~5 us)

const std::byte* page_at(const KvLayer& layer, const SequenceRows& sequence, int32_t page) {
  return layer.pages + static_cast<size_t>(sequence.pages[static_cast<size_t>(page)]) * layer.page_stride_bytes;
}

// The `most` largest of the scores, none of them negative, ascending; of equal ones the first. There are more than that.
//
// Numbers >= 0 have the order of their bits: three passes over 11, 11 and 10 bits find the bits of the least score chosen.
void pick(std::span<const float> scores, int32_t most, int32_t* chosen) {
  uint32_t least = 0;   // bits of the least score chosen, as far as known
  int32_t left = most;  // to choose among the scores that begin with these bits
  for (const auto& [shift, width] : {std::pair{21, 11}, {10, 11}, {0, 10}}) {
    std::array<int32_t, 2048> counts{};
    for (const float score : scores) {
      const auto bits = std::bit_cast<uint32_t>(score);
      if (shift + width >= 32 || bits >> (shift + width) == least >> (shift + width))
        ++counts[bits >> shift & ((1u << width) - 1)];
    }
    uint32_t digit = (1u << width) - 1;
    for (; counts[digit] < left; --digit) left -= counts[digit];
    least |= digit << shift;
  }
  for (size_t b = 0; b < scores.size(); ++b) {
    const auto bits = std::bit_cast<uint32_t>(scores[b]);
    if (bits > least || (bits == least && left-- > 0)) *chosen++ = static_cast<int32_t>(b);
  }
}

// Scores of some rows of one sequence.
class BlockScores {
 public:
  BlockScores(Tensor q, const Rows& rows, const SequenceRows& sequence, const KvLayer& index, int32_t heads,
              const Kernels& kernels)
      : q_(q),
        rows_(rows),
        sequence_(sequence),
        index_(index),
        page_(index.shape),
        heads_(heads),
        kernels_(kernels),
        tile_rows_(std::max(1, kTileQueries / heads)),
        tiles_of_page_((index.shape.keys() + kKeyTileTokens - 1) / kKeyTileTokens) {}

  int32_t complete(int32_t row) const { return rows_.visible[static_cast<size_t>(row)].end / index_.shape.block; }
  int32_t tile_rows() const { return tile_rows_; }
  int64_t scratch_floats() const { return int64_t{std::max(tile_rows_, 1) * heads_} * kKeyTileTokens; }

  // scores[(row - rows.begin) * stride + block] for the complete blocks of each row, and some more.
  void run(RowRange rows, float* scores, int64_t stride, Arena& arena, ThreadPool& pool) const;

 private:
  void score_page(RowRange tile, int32_t page, float* scores, int64_t stride, float* scratch) const;

  Tensor q_;
  const Rows& rows_;
  const SequenceRows& sequence_;
  const KvLayer& index_;
  KvPage page_;
  int32_t heads_;
  const Kernels& kernels_;
  int32_t tile_rows_, tiles_of_page_;
};

void BlockScores::run(RowRange rows, float* scores, int64_t stride, Arena& arena, ThreadPool& pool) const {
  const int32_t keys = index_.shape.keys();
  const int32_t tiles = (rows.end - rows.begin + tile_rows_ - 1) / tile_rows_;
  const int32_t pages = (complete(rows.end - 1) + keys - 1) / keys;
  const int32_t jobs_of_tile = (pages + kPagesOfJob - 1) / kPagesOfJob;
  const auto job = [&](int64_t number, float* scratch) {
    const int32_t begin = rows.begin + static_cast<int32_t>(number / jobs_of_tile) * tile_rows_;
    const RowRange tile{begin, std::min(rows.end, begin + tile_rows_)};
    const auto first = static_cast<int32_t>(number % jobs_of_tile) * kPagesOfJob;
    const int32_t seen = (complete(tile.end - 1) + keys - 1) / keys;
    for (int32_t page = first; page < std::min(seen, first + kPagesOfJob); ++page)
      score_page(tile, page, scores + int64_t{begin - rows.begin} * stride, stride, scratch);
  };
  const int64_t jobs = int64_t{tiles} * jobs_of_tile;
  const int64_t products = int64_t{rows.end - rows.begin} * complete(rows.end - 1) * heads_ * index_.shape.head_dim_k;
  const bool alone = products < kParallelProducts || pool.active() == 1;
  const int64_t floats = scratch_floats();
  float* scratch = arena.create(alone ? 1 : pool.active(), static_cast<int32_t>(floats)).data;
  if (alone) {
    for (int64_t i = 0; i < jobs; ++i) job(i, scratch);
    return;
  }
  std::atomic<int64_t> next{0};
  pool.share([&](int32_t thread) {
    for (int64_t i = next++; i < jobs; i = next++) job(i, scratch + thread * floats);
  });
}

void BlockScores::score_page(RowRange tile, int32_t page, float* scores, int64_t stride, float* scratch) const {
  const std::byte* base = page_at(index_, sequence_, page);
  const int32_t keys = index_.shape.keys(), dim = index_.shape.head_dim_k, count = tile.end - tile.begin;
  for (int32_t t = 0; t < tiles_of_page_; ++t) {
    const std::byte* codes = base + page_.key_tile(0, t);
    kernels_.dense_dot[static_cast<int32_t>(page_.key_element())](
        {.w = codes,
         .scales = reinterpret_cast<const uint16_t*>(codes + page_.key_tile_scales()),
         .w_stride = kKeyTileTokens,
         .x = q_.row(tile.begin),
         .x_stride = dim,
         .y = scratch,
         .y_stride = kKeyTileTokens,
         .n_k = dim,
         .rows = count * heads_,
         .panels = kKeyTileTokens / kPanelColumns,
         .accumulate = false});
    const int32_t columns = std::min(kKeyTileTokens, keys - t * kKeyTileTokens);
    for (int32_t r = 0; r < count; ++r) {
      float* out = scores + r * stride + page * keys + t * kKeyTileTokens;
      std::fill_n(out, columns, 0.0f);
      for (int32_t h = 0; h < heads_; ++h) {
        const float* dots = scratch + (r * heads_ + h) * kKeyTileTokens;
        for (int32_t b = 0; b < columns; ++b) out[b] += dots[b] > 0 ? dots[b] : 0.0f;
      }
    }
  }
}

}  // namespace

void append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                  const KvLayer& index, const Kernels& kernels) {
  const KvPage layout(index.shape);
  const int32_t block = index.shape.block, n = keys.features;
  std::vector<float> mean(static_cast<size_t>(n)), key(static_cast<size_t>(n));
  int64_t completed = 0;  // blocks, which are the rows of angles
  for (const SequenceRows& sequence : rows.sequences)
    for (int32_t r = sequence.rows.begin; r < sequence.rows.end; ++r) {
      const int32_t token = rows.kv_index[static_cast<size_t>(r)], last = token % kPageTokens;
      const PageId id = sequence.pages[static_cast<size_t>(token / kPageTokens)];
      std::byte* page = index.pages + static_cast<size_t>(id) * index.page_stride_bytes;
      layout.put_value(page, 0, last, keys.row(r), kernels);
      if ((token + 1) % block != 0) continue;
      layout.get_value(page, 0, last + 1 - block, mean.data(), kernels);
      for (int32_t i = last + 2 - block; i <= last; ++i) {
        layout.get_value(page, 0, i, key.data(), kernels);
        kernels.add(mean.data(), key.data(), n);
      }
      kernels.scale(mean.data(), 1.0f / static_cast<float>(block), n);
      kernels.rms_norm(mean.data(), w.data.get(), mean.data(), n, eps);
      const int64_t angle = completed++ * angles.pairs;
      kernels.rope_halves(mean.data(), angles.cosine + angle, angles.sine + angle, angles.pairs);
      layout.put_key(page, 0, last / block, mean.data(), kernels);
    }
}

void choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most, int32_t* count,
                   int32_t* blocks, const Kernels& kernels, Arena& arena, ThreadPool& pool) {
  for (const SequenceRows& sequence : rows.sequences) {
    const BlockScores scorer(q, rows, sequence, index, heads, kernels);
    int32_t row = sequence.rows.begin;
    for (; row < sequence.rows.end && scorer.complete(row) <= most; ++row) {
      count[row] = scorer.complete(row);
      std::iota(blocks + int64_t{row} * most, blocks + int64_t{row} * most + count[row], 0);
    }
    if (row == sequence.rows.end) continue;
    const int32_t keys = index.shape.keys();
    const int64_t stride = int64_t{(scorer.complete(sequence.rows.end - 1) + keys - 1) / keys} * keys;
    const auto rows_at_once = static_cast<int32_t>(
        std::max<int64_t>(1, kScoreBytes / (stride * int64_t{sizeof(float)} * scorer.tile_rows())) *
        scorer.tile_rows());
    for (int32_t begin = row; begin < sequence.rows.end; begin += rows_at_once) {
      const size_t mark = arena.mark();
      const RowRange some{begin, std::min(sequence.rows.end, begin + rows_at_once)};
      auto* scores =
          reinterpret_cast<float*>(arena.take(static_cast<size_t>((some.end - some.begin) * stride) * sizeof(float)));
      scorer.run(some, scores, stride, arena, pool);
      pool.parallel_for(some.end - some.begin, 4, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; ++i) {
          const int32_t r = begin + static_cast<int32_t>(i);
          count[r] = most;
          pick({scores + i * stride, static_cast<size_t>(scorer.complete(r))}, most, blocks + int64_t{r} * most);
        }
      });
      arena.release(mark);
    }
  }
}

}  // namespace v100::cpu
