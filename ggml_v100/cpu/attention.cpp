// A unit of work is one kv head of one sequence for a tile of rows: its queries (rows x heads of the group) share
// every key and value that is read. Scores are a dense product with the key tiles, outputs one with the value rows.
// For a few rows over many pages each page is a unit of its own; the pages' results are then merged in order, with the
// same bits.
#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>

#include "cpu/kv_page.h"

namespace v100::cpu {

namespace {

constexpr int32_t kUnitQueries = 48;            // scores of a page: 48 KiB, in L2 with the page's head
constexpr int64_t kParallelProducts = 200'000;  // multiply-adds below which threads cost more than they give (~5 us)

struct Unit {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_head, heads;  // query heads
  RowRange rows;
  RowRange pages;
  int64_t partial;  // index of the first query's partial result when the pages are split, else -1
};

// Results of one page, or of the pages so far.
struct PageResult {
  float maximum, sum;  // sum 0: no key seen
};

class Attention {
 public:
  Attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale, Tensor y,
            const Kernels& kernels)
      : q_(q),
        rows_(rows),
        layer_(layer),
        page_(layer.shape),
        heads_(heads),
        scale_(scale),
        y_(y),
        kernels_(kernels),
        dim_k_(layer.shape.head_dim_k),
        dim_v_(layer.shape.head_dim_v),
        padded_v_(page_.padded_dim_v()) {}

  void run(Arena& arena, ThreadPool& pool);

 private:
  // Per-thread memory of a unit.
  struct Scratch {
    float* q;         // [queries, dim_k]
    float* s;         // [queries, kPageTokens]
    float* o;         // [queries, padded_v] of the pages so far
    float* page_o;    // [queries, padded_v] of the page in hand
    float* keys;      // [dim_k, 64] decoded tile
    float* values;    // [64, padded_v] decoded values
    PageResult* all;  // [queries]
    PageResult* page;
  };

  int64_t scratch_floats() const {
    return int64_t{kUnitQueries} * (dim_k_ + kPageTokens + 2 * padded_v_ + 4) + 64 * (dim_k_ + padded_v_);
  }
  Scratch scratch(float* memory) const;

  RowRange visible_in_page(int32_t row, int32_t page) const {
    const RowRange v = rows_.visible[static_cast<size_t>(row)];
    const RowRange clipped{std::clamp(v.begin - page * kPageTokens, 0, kPageTokens),
                           std::clamp(v.end - page * kPageTokens, 0, kPageTokens)};
    return clipped.begin < clipped.end ? clipped : RowRange{0, 0};
  }
  const std::byte* page_base(const Unit& unit, int32_t page) const {
    const PageId id = rows_.sequences[static_cast<size_t>(unit.sequence)].pages[static_cast<size_t>(page)];
    return layer_.pages + static_cast<size_t>(id) * layer_.page_stride_bytes;
  }

  void plan(int32_t threads, Arena& arena);
  std::span<Unit> split_pages(Arena& arena);
  void run_unit(const Unit& unit, const Scratch& scratch);
  bool attend_page(const Unit& unit, int32_t page, const Scratch& scratch);
  void score_page(const Unit& unit, const std::byte* base, RowRange keys, const Scratch& scratch);
  void weigh_values(const Unit& unit, const std::byte* base, int32_t page, RowRange keys, const Scratch& scratch);
  // Few queries widen quantised keys and values in registers as they meet them; more share a decoded copy.
  bool reads_in_place(const Unit& unit) const {
    return unit.heads * (unit.rows.end - unit.rows.begin) <= kernels_.dense_rows;
  }
  // Values from token `first` of the page on, rows of padded_v elements.
  struct ValueRows {
    const std::byte* rows;
    const uint16_t* scales;
    ElementType element;
    size_t row_bytes;
    int64_t stride;  // row_bytes in the unit of a dense product
    int32_t first;
  };
  ValueRows read_values(const Unit& unit, const std::byte* base, RowRange keys, const Scratch& scratch);
  void add_values(const ValueRows& values, int32_t first_query, int32_t queries, RowRange keys, const Scratch& scratch);
  void write_result(const Unit& unit, int32_t query, const PageResult& result, const float* o);

  Tensor q_;
  const Rows& rows_;
  const KvLayer& layer_;
  KvPage page_;
  int32_t heads_;
  float scale_;
  Tensor y_;
  const Kernels& kernels_;
  int32_t dim_k_, dim_v_, padded_v_;
  std::span<Unit> units_;  // in the arena, like all that a call needs
  int64_t products_ = 0;   // multiply-adds of the whole call
  int64_t partials_ = 0;   // queries x pages of split units
  PageResult* partial_results_ = nullptr;
  float* partial_outputs_ = nullptr;  // [partials, padded_v]
};

Attention::Scratch Attention::scratch(float* memory) const {
  Scratch s{};
  const auto take = [&](int64_t floats) {
    float* p = memory;
    memory += floats;
    return p;
  };
  s.s = take(int64_t{kUnitQueries} * kPageTokens);
  s.o = take(int64_t{kUnitQueries} * padded_v_);
  s.page_o = take(int64_t{kUnitQueries} * padded_v_);
  s.keys = take(int64_t{64} * dim_k_);
  s.values = take(int64_t{64} * padded_v_);
  s.q = take(int64_t{kUnitQueries} * dim_k_);
  s.all = reinterpret_cast<PageResult*>(take(2 * kUnitQueries));
  s.page = reinterpret_cast<PageResult*>(take(2 * kUnitQueries));
  return s;
}

template <class T>
std::span<T> take(Arena& arena, int64_t count) {
  return {reinterpret_cast<T*>(arena.take(static_cast<size_t>(count) * sizeof(T))), static_cast<size_t>(count)};
}

void Attention::plan(int32_t threads, Arena& arena) {
  const int32_t group = layer_.shape.group_of(heads_);
  const int32_t group_part = std::min(group, kUnitQueries);
  const int32_t tile_rows = std::max(1, kUnitQueries / group_part);
  int64_t tiles = 0;
  for (const SequenceRows& sequence : rows_.sequences)
    tiles += (sequence.rows.end - sequence.rows.begin + tile_rows - 1) / tile_rows;
  units_ = take<Unit>(arena, tiles * layer_.shape.kv_heads * ((group + group_part - 1) / group_part));
  size_t n_units = 0;
  for (size_t s = 0; s < rows_.sequences.size(); ++s) {
    const RowRange all = rows_.sequences[s].rows;
    for (int32_t end = all.end; end > all.begin; end -= tile_rows) {  // the last rows see most: they start first
      const RowRange tile{std::max(all.begin, end - tile_rows), end};
      RowRange keys{INT32_MAX, 0};
      for (int32_t r = tile.begin; r < tile.end; ++r) {
        const RowRange v = rows_.visible[static_cast<size_t>(r)];
        if (v.begin >= v.end) continue;
        keys = {std::min(keys.begin, v.begin), std::max(keys.end, v.end)};
        products_ += int64_t{v.end - v.begin} * heads_ * (dim_k_ + dim_v_);
      }
      if (keys.begin >= keys.end) keys = {0, 0};
      const RowRange pages{keys.begin / kPageTokens, (keys.end + kPageTokens - 1) / kPageTokens};
      for (int32_t kv_head = 0; kv_head < layer_.shape.kv_heads; ++kv_head) {
        const RowRange readers = layer_.shape.readers(kv_head, heads_);
        for (int32_t first = readers.begin; first < readers.end; first += group_part)
          units_[n_units++] = {
              static_cast<int32_t>(s), kv_head, first, std::min(group_part, readers.end - first), tile, pages, -1};
      }
    }
  }
  units_ = units_.first(n_units);  // fewer where a rank has part of a group
  if (threads == 1 || products_ < kParallelProducts || static_cast<int64_t>(units_.size()) >= int64_t{4} * threads)
    return;
  for (Unit& unit : units_) {
    const int32_t pages = unit.pages.end - unit.pages.begin;
    if (pages < 2) continue;
    unit.partial = partials_;
    partials_ += int64_t{pages} * unit.heads * (unit.rows.end - unit.rows.begin);
  }
}

void Attention::run(Arena& arena, ThreadPool& pool) {
  plan(pool.active(), arena);
  const bool alone = pool.active() == 1 || products_ < kParallelProducts;
  const int64_t floats = scratch_floats();
  float* memory = arena.create(alone ? 1 : pool.active(), static_cast<int32_t>((floats + 15) / 16 * 16)).data;
  if (alone) {
    for (const Unit& unit : units_) run_unit(unit, scratch(memory));
    return;
  }
  const std::span<const Unit> work = partials_ > 0 ? split_pages(arena) : units_;
  std::atomic<size_t> next{0};
  pool.share([&](int32_t thread) {
    const Scratch mine = scratch(memory + thread * ((floats + 15) / 16 * 16));
    for (size_t i = next++; i < work.size(); i = next++) run_unit(work[i], mine);
  });
  for (const Unit& unit : units_) {
    if (unit.partial < 0) continue;
    const int32_t queries = unit.heads * (unit.rows.end - unit.rows.begin);
    for (int32_t i = 0; i < queries; ++i) {
      PageResult all{0, 0};
      float* o = nullptr;
      for (int64_t at = unit.partial + i; at < unit.partial + int64_t{unit.pages.end - unit.pages.begin} * queries;
           at += queries) {
        const PageResult& page = partial_results_[at];
        float* page_o = partial_outputs_ + at * padded_v_;
        if (page.sum == 0) continue;
        if (o == nullptr)
          all = page, o = page_o;
        else
          kernels_.merge_page(&all.maximum, &all.sum, o, page.maximum, page.sum, page_o, padded_v_);
      }
      write_result(unit, i, all, o);
    }
  }
}

// Units whose pages are shared out become one unit a page; their results are merged afterwards.
std::span<Unit> Attention::split_pages(Arena& arena) {
  partial_results_ = take<PageResult>(arena, partials_).data();
  partial_outputs_ = take<float>(arena, partials_ * padded_v_).data();
  int64_t count = 0;
  for (const Unit& unit : units_) count += unit.partial < 0 ? 1 : unit.pages.end - unit.pages.begin;
  const std::span<Unit> work = take<Unit>(arena, count);
  size_t n_work = 0;
  for (const Unit& unit : units_) {
    if (unit.partial < 0) {
      work[n_work++] = unit;
      continue;
    }
    for (int32_t page = unit.pages.begin; page < unit.pages.end; ++page) {
      Unit& one = work[n_work++] = unit;
      one.pages = {page, page + 1};
      one.partial += int64_t{page - unit.pages.begin} * unit.heads * (unit.rows.end - unit.rows.begin);
    }
  }
  return work;
}

void Attention::run_unit(const Unit& unit, const Scratch& scratch) {
  const int32_t queries = unit.heads * (unit.rows.end - unit.rows.begin);
  for (int32_t i = 0; i < queries; ++i)
    std::memcpy(scratch.q + int64_t{i} * dim_k_,
                q_.row(unit.rows.begin + i / unit.heads) + int64_t{unit.first_head + i % unit.heads} * dim_k_,
                static_cast<size_t>(dim_k_) * sizeof(float));
  std::fill_n(scratch.all, queries, PageResult{0, 0});
  for (int32_t page = unit.pages.begin; page < unit.pages.end; ++page) {
    if (!attend_page(unit, page, scratch)) continue;
    for (int32_t i = 0; i < queries; ++i) {
      const PageResult& one = scratch.page[i];
      if (one.sum == 0) continue;
      float* o = scratch.o + int64_t{i} * padded_v_;
      const float* page_o = scratch.page_o + int64_t{i} * padded_v_;
      PageResult& all = scratch.all[i];
      if (all.sum == 0) {
        all = one;
        std::memcpy(o, page_o, static_cast<size_t>(padded_v_) * sizeof(float));
      } else {
        kernels_.merge_page(&all.maximum, &all.sum, o, one.maximum, one.sum, page_o, padded_v_);
      }
    }
  }
  for (int32_t i = 0; i < queries; ++i) {
    const float* o = scratch.o + int64_t{i} * padded_v_;
    if (unit.partial < 0) {
      write_result(unit, i, scratch.all[i], o);
    } else {
      partial_results_[unit.partial + i] = scratch.all[i];
      std::memcpy(partial_outputs_ + (unit.partial + i) * padded_v_, o, static_cast<size_t>(padded_v_) * sizeof(float));
    }
  }
}

void Attention::write_result(const Unit& unit, int32_t query, const PageResult& result, const float* o) {
  float* y = y_.row(unit.rows.begin + query / unit.heads) + int64_t{unit.first_head + query % unit.heads} * dim_v_;
  if (result.sum == 0)
    std::fill_n(y, dim_v_, 0.0f);
  else
    kernels_.divide(o, result.sum, y, dim_v_);
}

// Maximum, sum and output of every query over one page; false when no row sees any of its keys.
bool Attention::attend_page(const Unit& unit, int32_t page, const Scratch& scratch) {
  RowRange keys{kPageTokens, 0};
  for (int32_t r = unit.rows.begin; r < unit.rows.end; ++r) {
    const RowRange v = visible_in_page(r, page);
    if (v.begin < v.end) keys = {std::min(keys.begin, v.begin), std::max(keys.end, v.end)};
  }
  if (keys.begin >= keys.end) return false;
  const std::byte* base = page_base(unit, page);
  score_page(unit, base, keys, scratch);
  const int32_t queries = unit.heads * (unit.rows.end - unit.rows.begin);
  for (int32_t i = 0; i < queries; ++i) {
    const RowRange v = visible_in_page(unit.rows.begin + i / unit.heads, page);
    PageResult& result = scratch.page[i];
    if (v.begin >= v.end)
      result = {0, 0};
    else
      kernels_.softmax_page(scratch.s + int64_t{i} * kPageTokens, v.begin, v.end, scale_, &result.maximum, &result.sum);
  }
  weigh_values(unit, base, page, keys, scratch);
  return true;
}

void Attention::score_page(const Unit& unit, const std::byte* base, RowRange keys, const Scratch& scratch) {
  const int32_t queries = unit.heads * (unit.rows.end - unit.rows.begin);
  for (int32_t tile = keys.begin / kKeyTileTokens; tile * kKeyTileTokens < keys.end; ++tile) {
    const std::byte* codes = base + page_.key_tile(unit.kv_head, tile);
    const auto* scales = reinterpret_cast<const uint16_t*>(codes + page_.key_tile_scales());
    const int32_t tokens = std::min(kKeyTileTokens, keys.end - tile * kKeyTileTokens);
    const void* w = codes;
    auto element = ElementType::f32;
    switch (layer_.shape.type_k) {
      case QuantType::F16:
        element = ElementType::f16;
        break;
      case QuantType::BF16:
        element = ElementType::bf16;
        break;
      case QuantType::Q8_0:
        if (reads_in_place(unit)) {
          element = ElementType::q8_0_keys;
          break;
        }
        kernels_.decode_keys_q8(reinterpret_cast<const int8_t*>(codes), scales, dim_k_, scratch.keys);
        w = scratch.keys;
        break;
      case QuantType::Q4_0:
        if (reads_in_place(unit)) {
          element = ElementType::q4_0_keys;
          break;
        }
        kernels_.decode_keys_q4(reinterpret_cast<const uint8_t*>(codes), scales, dim_k_, scratch.keys);
        w = scratch.keys;
        break;
      default:
        break;
    }
    kernels_.dense_dot[static_cast<int32_t>(element)]({.w = w,
                                                       .scales = scales,
                                                       .w_stride = kKeyTileTokens,
                                                       .x = scratch.q,
                                                       .x_stride = dim_k_,
                                                       .y = scratch.s + tile * kKeyTileTokens,
                                                       .y_stride = kPageTokens,
                                                       .n_k = dim_k_,
                                                       .rows = queries,
                                                       .panels = (tokens + kPanelColumns - 1) / kPanelColumns,
                                                       .accumulate = false});
  }
}

// page_o = sum over the visible keys, ascending. Queries go in the tiles of the dense product; keys that not all
// queries of a tile see are added row by row before and after the common ones, so that no unseen value is ever touched.
void Attention::weigh_values(const Unit& unit, const std::byte* base, int32_t page, RowRange keys,
                             const Scratch& scratch) {
  const int32_t rows = unit.rows.end - unit.rows.begin;
  std::fill_n(scratch.page_o, int64_t{rows} * unit.heads * padded_v_, 0.0f);
  const int32_t tile_rows = std::max(1, kernels_.dense_rows / unit.heads);
  const int32_t step = traits(layer_.shape.type_v).is_quantized ? kKeyTileTokens : kPageTokens;  // decoded at a time
  for (int32_t start = keys.begin / step * step; start < keys.end; start += step) {
    const ValueRows values =
        read_values(unit, base, {std::max(keys.begin, start), std::min(keys.end, start + step)}, scratch);
    for (int32_t first = 0; first < rows; first += tile_rows) {
      const int32_t count = std::min(tile_rows, rows - first);
      const auto seen = [&](int32_t i) {
        const RowRange v = visible_in_page(unit.rows.begin + first + i, page);
        return RowRange{std::max(v.begin, start), std::min(v.end, start + step)};
      };
      RowRange common{start, start + step};
      for (int32_t i = 0; i < count; ++i)
        common = {std::max(common.begin, seen(i).begin), std::min(common.end, seen(i).end)};
      const bool any_common = common.begin < common.end;
      const auto add = [&](int32_t i, int32_t n, RowRange range) {
        if (range.begin < range.end) add_values(values, (first + i) * unit.heads, n * unit.heads, range, scratch);
      };
      for (int32_t i = 0; i < count; ++i) add(i, 1, {seen(i).begin, any_common ? common.begin : seen(i).end});
      if (!any_common) continue;
      add(0, count, common);
      for (int32_t i = 0; i < count; ++i) add(i, 1, {common.end, seen(i).end});
    }
  }
}

// The value rows of the keys as elements a dense product reads: in place, or decoded.
Attention::ValueRows Attention::read_values(const Unit& unit, const std::byte* base, RowRange keys,
                                            const Scratch& scratch) {
  const std::byte* head = base + page_.values(unit.kv_head);
  const size_t row_bytes = page_.value_row_bytes();
  const std::byte* rows = head + static_cast<size_t>(keys.begin) * row_bytes;
  const QuantType type = layer_.shape.type_v;
  if (!traits(type).is_quantized) {
    const ElementType element = type == QuantType::F16    ? ElementType::f16
                                : type == QuantType::BF16 ? ElementType::bf16
                                                          : ElementType::f32;
    return {rows, nullptr, element, row_bytes, padded_v_, keys.begin};
  }
  const int32_t blocks = dim_v_ / 32;
  const auto* scales = reinterpret_cast<const uint16_t*>(head + page_.value_scales()) + keys.begin * blocks;
  const bool q8 = type == QuantType::Q8_0;
  if (reads_in_place(unit))
    return {rows,
            scales,
            q8 ? ElementType::q8_0_values : ElementType::q4_0_values,
            row_bytes,
            static_cast<int64_t>(row_bytes),
            keys.begin};
  for (int32_t j = 0; j < keys.end - keys.begin; ++j) {
    const std::byte* codes = rows + static_cast<size_t>(j) * row_bytes;
    float* out = scratch.values + int64_t{j} * padded_v_;
    if (q8)
      kernels_.decode_values_q8(reinterpret_cast<const int8_t*>(codes), scales + j * blocks, dim_v_, out);
    else
      kernels_.decode_values_q4(reinterpret_cast<const uint8_t*>(codes), scales + j * blocks, dim_v_, out);
  }
  return {reinterpret_cast<const std::byte*>(scratch.values), nullptr,   ElementType::f32,
          static_cast<size_t>(padded_v_) * sizeof(float),     padded_v_, keys.begin};
}

void Attention::add_values(const ValueRows& values, int32_t first_query, int32_t queries, RowRange keys,
                           const Scratch& scratch) {
  kernels_.dense_dot[static_cast<int32_t>(values.element)](
      {.w = values.rows + static_cast<size_t>(keys.begin - values.first) * values.row_bytes,
       .scales = values.scales == nullptr ? nullptr : values.scales + (keys.begin - values.first) * (dim_v_ / 32),
       .w_stride = values.stride,
       .x = scratch.s + int64_t{first_query} * kPageTokens + keys.begin,
       .x_stride = kPageTokens,
       .y = scratch.page_o + int64_t{first_query} * padded_v_,
       .y_stride = padded_v_,
       .n_k = keys.end - keys.begin,
       .rows = queries,
       .panels = padded_v_ / kPanelColumns,
       .accumulate = true});
}

}  // namespace

void run_attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale, Tensor y,
                   const Kernels& kernels, Arena& arena, ThreadPool& pool) {
  const size_t mark = arena.mark();
  Attention(q, rows, layer, heads, scale, y, kernels).run(arena, pool);
  arena.release(mark);
}

}  // namespace v100::cpu
