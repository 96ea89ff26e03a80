// Rows that see everything take the dense way, whose bits are the same. The others go one row and kv head at a time: the
// heads of the group share the keys and values of the chosen blocks, which are read in place in panels of 16 tokens.
// With few rows each page is a piece of work of its own, and the pages' results are merged in order.
//
// Inside a page the scores of unseen tokens are -infinity, so that exp gives 0 and adding it changes no bit.
#include "cpu/sparse_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kv_page.h"

namespace v100::cpu {

namespace {

constexpr int32_t kPiecesPerThread = 4;  // with fewer (row, kv head) pairs than this the pages are shared out

// Tokens of one page that a row sees: runs, ascending, apart from each other.
struct SeenPage {
  int32_t page;
  std::span<const RowRange> runs;
};

// Results of one page, or of the pages so far.
struct PageResult {
  float maximum = 0, sum = 0;  // sum 0: nothing yet
};

class SparseAttention {
 public:
  SparseAttention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer, int32_t heads,
                  float scale, Tensor y, const Kernels& kernels)
      : q_(q),
        rows_(rows),
        choice_(choice),
        layer_(layer),
        page_(layer.shape),
        heads_(heads),
        group_(layer.shape.group_of(heads)),
        scale_(scale),
        y_(y),
        kernels_(kernels),
        padded_v_(page_.padded_dim_v()) {}

  void run(const SequenceRows& sequence, RowRange rows, Arena& arena, ThreadPool& pool);

 private:
  // Memory of one piece of work: [group] queries.
  struct Scratch {
    float* scores;    // [group, kPageTokens]
    float* page_o;    // [group, padded_v]
    float* o;         // [group, padded_v] of the pages so far
    PageResult* all;  // [group]
  };
  int64_t scratch_floats() const { return (int64_t{group_} * (kPageTokens + 2 * padded_v_ + 2) + 15) / 16 * 16; }
  Scratch scratch(float* memory) const {
    float* page_o = memory + int64_t{group_} * kPageTokens;
    float* o = page_o + int64_t{group_} * padded_v_;
    return {memory, page_o, o, reinterpret_cast<PageResult*>(o + int64_t{group_} * padded_v_)};
  }

  std::vector<SeenPage> seen_pages(int32_t row, std::vector<RowRange>& runs) const;
  void whole_row(const SequenceRows& sequence, int32_t row, int32_t kv_head, const Scratch& scratch);
  void row_by_pages(const SequenceRows& sequence, int32_t row, Arena& arena, ThreadPool& pool);
  // Maximum and sum of every query over one page, the output in scratch.page_o.
  void attend_page(const SequenceRows& sequence, int32_t row, int32_t kv_head, const SeenPage& seen,
                   PageResult* results, float* scores, float* page_o) const;
  void score_panels(const std::byte* base, int32_t row, int32_t kv_head, RowRange panels, float* scores) const;
  void add_values(const std::byte* base, int32_t kv_head, RowRange tokens, const float* scores, float* page_o) const;
  void merge(PageResult& all, float* o, const PageResult& page, const float* page_o) const;
  void write(int32_t row, int32_t head, const PageResult& all, const float* o);

  Tensor q_;
  const Rows& rows_;
  const BlockChoice& choice_;
  const KvLayer& layer_;
  KvPage page_;
  int32_t heads_, group_;  // at most that many query heads read a kv head
  float scale_;
  Tensor y_;
  const Kernels& kernels_;
  int32_t padded_v_;
};

void SparseAttention::run(const SequenceRows& sequence, RowRange rows, Arena& arena, ThreadPool& pool) {
  const int32_t kv_heads = layer_.shape.kv_heads;
  const int64_t pieces = int64_t{rows.end - rows.begin} * kv_heads;
  if (pool.active() > 1 && pieces < int64_t{kPiecesPerThread} * pool.active()) {
    for (int32_t row = rows.begin; row < rows.end; ++row) row_by_pages(sequence, row, arena, pool);
    return;
  }
  const int64_t floats = scratch_floats();
  float* memory = arena.create(pool.active(), static_cast<int32_t>(floats)).data;
  std::atomic<int64_t> next{0};
  auto work = [&](int32_t thread) {
    const Scratch mine = scratch(memory + thread * floats);
    for (int64_t i = next++; i < pieces; i = next++)
      whole_row(sequence, rows.begin + static_cast<int32_t>(i / kv_heads), static_cast<int32_t>(i % kv_heads), mine);
  };
  if (pool.active() == 1)
    work(0);
  else
    pool.share(work);
}

std::vector<SeenPage> SparseAttention::seen_pages(int32_t row, std::vector<RowRange>& runs) const {
  const int32_t block = choice_.block, end = rows_.visible[static_cast<size_t>(row)].end;
  const int32_t* chosen = choice_.blocks + int64_t{row} * choice_.most;
  runs.clear();
  const auto add = [&](RowRange tokens) {
    const bool continues = !runs.empty() && runs.back().end == tokens.begin && tokens.begin % kPageTokens != 0;
    if (continues)
      runs.back().end = tokens.end;
    else
      runs.push_back(tokens);
  };
  for (int32_t i = 0; i < choice_.count[row]; ++i) add({chosen[i] * block, (chosen[i] + 1) * block});
  if (end % block != 0) add({end / block * block, end});
  std::vector<SeenPage> pages;
  for (size_t first = 0, last = 0; first < runs.size(); first = last) {
    const int32_t page = runs[first].begin / kPageTokens;
    while (last < runs.size() && runs[last].begin / kPageTokens == page) ++last;
    for (size_t i = first; i < last; ++i)
      runs[i] = {runs[i].begin - page * kPageTokens, runs[i].end - page * kPageTokens};
    pages.push_back({page, {runs.data() + first, last - first}});
  }
  return pages;
}

void SparseAttention::whole_row(const SequenceRows& sequence, int32_t row, int32_t kv_head, const Scratch& scratch) {
  std::vector<RowRange> runs;
  const RowRange heads = layer_.shape.readers(kv_head, heads_);
  std::vector<PageResult> results(static_cast<size_t>(heads.size()));
  std::fill_n(scratch.all, heads.size(), PageResult{});
  for (const SeenPage& seen : seen_pages(row, runs)) {
    attend_page(sequence, row, kv_head, seen, results.data(), scratch.scores, scratch.page_o);
    for (int32_t i = 0; i < heads.size(); ++i)
      merge(scratch.all[i], scratch.o + int64_t{i} * padded_v_, results[static_cast<size_t>(i)],
            scratch.page_o + int64_t{i} * padded_v_);
  }
  for (int32_t i = 0; i < heads.size(); ++i)
    write(row, heads.begin + i, scratch.all[i], scratch.o + int64_t{i} * padded_v_);
}

void SparseAttention::row_by_pages(const SequenceRows& sequence, int32_t row, Arena& arena, ThreadPool& pool) {
  const size_t mark = arena.mark();
  std::vector<RowRange> runs;
  const std::vector<SeenPage> pages = seen_pages(row, runs);
  const int32_t kv_heads = layer_.shape.kv_heads;
  const auto n_pages = static_cast<int64_t>(pages.size()), pieces = n_pages * kv_heads;
  std::vector<PageResult> results(static_cast<size_t>(n_pages * heads_));  // [pages, heads], as the outputs
  auto* outputs = reinterpret_cast<float*>(
      arena.take(static_cast<size_t>(n_pages * heads_ * padded_v_) * sizeof(float)));  // [pages, heads, padded_v]
  float* scores = arena.create(pool.active(), group_ * kPageTokens).data;
  std::atomic<int64_t> next{0};
  pool.share([&](int32_t thread) {
    for (int64_t i = next++; i < pieces; i = next++) {
      const auto kv_head = static_cast<int32_t>(i % kv_heads);
      const int64_t first = i / kv_heads * heads_ + layer_.shape.readers(kv_head, heads_).begin;
      attend_page(sequence, row, kv_head, pages[static_cast<size_t>(i / kv_heads)], results.data() + first,
                  scores + int64_t{thread} * group_ * kPageTokens, outputs + first * padded_v_);
    }
  });
  for (int32_t h = 0; h < heads_; ++h) {
    PageResult all;
    float* o = outputs + int64_t{h} * padded_v_;  // the first page's, which takes the others
    for (int64_t i = h; i < n_pages * heads_; i += heads_)
      merge(all, o, results[static_cast<size_t>(i)], outputs + i * padded_v_);
    write(row, h, all, o);
  }
  arena.release(mark);
}

void SparseAttention::attend_page(const SequenceRows& sequence, int32_t row, int32_t kv_head, const SeenPage& seen,
                                  PageResult* results, float* scores, float* page_o) const {
  const PageId id = sequence.pages[static_cast<size_t>(seen.page)];
  const std::byte* base = layer_.pages + static_cast<size_t>(id) * layer_.page_stride_bytes;
  const int32_t begin = seen.runs.front().begin, end = seen.runs.back().end;

  // Scores of the panels that runs touch, neighbours together.
  RowRange panels{0, 0};
  for (const RowRange& run : seen.runs) {
    const RowRange touched{run.begin / kPanelColumns, (run.end + kPanelColumns - 1) / kPanelColumns};
    if (touched.begin > panels.end) {
      score_panels(base, row, kv_head, panels, scores);
      panels = touched;
    } else {
      if (panels.begin == panels.end) panels.begin = touched.begin;
      panels.end = std::max(panels.end, touched.end);
    }
  }
  score_panels(base, row, kv_head, panels, scores);

  const int32_t heads = layer_.shape.readers(kv_head, heads_).size();
  for (int32_t i = 0; i < heads; ++i) {
    float* s = scores + int64_t{i} * kPageTokens;
    for (size_t run = 1; run < seen.runs.size(); ++run)
      std::fill(s + seen.runs[run - 1].end, s + seen.runs[run].begin, -std::numeric_limits<float>::infinity());
    kernels_.softmax_page(s, begin, end, scale_, &results[i].maximum, &results[i].sum);
  }
  std::fill_n(page_o, int64_t{heads} * padded_v_, 0.0f);
  for (const RowRange& run : seen.runs) add_values(base, kv_head, run, scores, page_o);
}

void SparseAttention::score_panels(const std::byte* base, int32_t row, int32_t kv_head, RowRange panels,
                                   float* scores) const {
  constexpr int32_t kTilePanels = kKeyTileTokens / kPanelColumns;
  const int32_t dim = layer_.shape.head_dim_k;
  const RowRange heads = layer_.shape.readers(kv_head, heads_);
  for (int32_t first = panels.begin, end = 0; first < panels.end; first = end) {
    const int32_t tile = first / kTilePanels;
    end = std::min(panels.end, (tile + 1) * kTilePanels);
    const int32_t column = first % kTilePanels * kPanelColumns;
    const std::byte* codes = base + page_.key_tile(kv_head, tile);
    kernels_.dense_dot[static_cast<int32_t>(page_.key_element())](
        {.w = codes + static_cast<size_t>(column) * page_.key_column_bytes(),
         .scales = reinterpret_cast<const uint16_t*>(codes + page_.key_tile_scales()) + column,
         .w_stride = kKeyTileTokens,
         .x = q_.row(row) + int64_t{heads.begin} * dim,
         .x_stride = dim,
         .y = scores + first * kPanelColumns,
         .y_stride = kPageTokens,
         .n_k = dim,
         .rows = heads.size(),
         .panels = end - first,
         .accumulate = false});
  }
}

void SparseAttention::add_values(const std::byte* base, int32_t kv_head, RowRange tokens, const float* scores,
                                 float* page_o) const {
  const std::byte* head = base + page_.values(kv_head);
  const int32_t blocks = layer_.shape.head_dim_v / 32;
  const bool quantised = traits(layer_.shape.type_v).is_quantized;
  kernels_.dense_dot[static_cast<int32_t>(page_.value_element())](
      {.w = head + static_cast<size_t>(tokens.begin) * page_.value_row_bytes(),
       .scales = reinterpret_cast<const uint16_t*>(head + page_.value_scales()) + tokens.begin * blocks,
       .w_stride = quantised ? static_cast<int64_t>(page_.value_row_bytes()) : padded_v_,
       .x = scores + tokens.begin,
       .x_stride = kPageTokens,
       .y = page_o,
       .y_stride = padded_v_,
       .n_k = tokens.end - tokens.begin,
       .rows = layer_.shape.readers(kv_head, heads_).size(),
       .panels = padded_v_ / kPanelColumns,
       .accumulate = true});
}

void SparseAttention::merge(PageResult& all, float* o, const PageResult& page, const float* page_o) const {
  if (all.sum != 0) {
    kernels_.merge_page(&all.maximum, &all.sum, o, page.maximum, page.sum, page_o, padded_v_);
    return;
  }
  all = page;
  if (o != page_o) std::memcpy(o, page_o, static_cast<size_t>(padded_v_) * sizeof(float));
}

void SparseAttention::write(int32_t row, int32_t head, const PageResult& all, const float* o) {
  const int32_t dim = layer_.shape.head_dim_v;
  float* y = y_.row(row) + int64_t{head} * dim;
  if (all.sum == 0)
    std::fill_n(y, dim, 0.0f);
  else
    kernels_.divide(o, all.sum, y, dim);
}

}  // namespace

void run_sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer, int32_t heads,
                          float scale, Tensor y, const Kernels& kernels, Arena& arena, ThreadPool& pool) {
  const size_t mark = arena.mark();
  // Of a sequence the first rows may see all their blocks, and then the others do not.
  std::vector<SequenceRows> dense, sparse;
  for (const SequenceRows& sequence : rows.sequences) {
    SequenceRows all = sequence, some = sequence;
    while (some.rows.begin < some.rows.end &&
           choice.count[some.rows.begin] == rows.visible[static_cast<size_t>(some.rows.begin)].end / choice.block)
      ++some.rows.begin;
    all.rows.end = some.rows.begin;
    if (all.rows.begin < all.rows.end) dense.push_back(all);
    if (some.rows.begin < some.rows.end) sparse.push_back(some);
  }
  if (!dense.empty()) {
    Rows dense_rows = rows;
    dense_rows.sequences = dense;
    run_attention(q, dense_rows, layer, heads, scale, y, kernels, arena, pool);
  }
  SparseAttention attention(q, rows, choice, layer, heads, scale, y, kernels);
  for (const SequenceRows& sequence : sparse) attention.run(sequence, sequence.rows, arena, pool);
  arena.release(mark);
}

}  // namespace v100::cpu
