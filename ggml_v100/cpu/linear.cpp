// Sharing out of linear layers. A unit of work is a range of column units of one job times a range of its rows; within it
// rows go in tiles (outer loop: the tile's activations stay in L1) over the columns (inner loop: the range's weights
// stay in L2). Any split gives the same bits, because each output element is summed by one lane in order of k.
#include "cpu/linear.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace v100::cpu {

namespace {

constexpr int64_t kLeastUnitBytes = 8 << 10;   // a unit costs ~0.1 us to take; 8 KiB take ~0.4 us to read
constexpr int64_t kMostUnitBytes = 256 << 10;  // fits L2 beside a tile of activations
constexpr int32_t kUnitsPerThread = 4;
constexpr int64_t kParallelValues = 16 << 10;  // fewer values than this are rounded by the calling thread
constexpr int32_t kChunkBlocks = 16;           // expanded at a time: 12 KiB, in L1 beside a tile's activations
constexpr int32_t kSharedRows = 96;            // rows that share an expanded chunk; their activations stay in L2
constexpr int32_t kScratchValues = 96 * 16;    // of a unit: shared rows of a panel, or a dense tile of four panels

// Rows [first, first + rows) in `count` tiles of nearly equal height.
struct Tiles {
  int32_t first, rows, count;
  Tiles(RowRange range, int32_t height)
      : first(range.begin), rows(range.end - range.begin), count((rows + height - 1) / height) {}
  int32_t begin(int32_t tile) const { return first + static_cast<int32_t>(int64_t{rows} * tile / count); }
};

// body(i) for i in [0, count), shared out when there are many values.
template <class Body>
void for_each(int32_t count, int64_t values, ThreadPool& pool, Body&& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<int32_t>(begin); i < end; ++i) body(i);
  };
  if (values < kParallelValues)
    range(0, count);
  else
    pool.parallel_for(count, std::max(1, count / (pool.active() * kUnitsPerThread)), range);
}

// The input as the kernels read it: rounded for the kinds of panels in use (kinds of equal bias and group share a set),
// and as floats, row after row, for dense weights.
class PreparedInput {
 public:
  PreparedInput(const LinearInput& input, std::span<const LinearJob> jobs, const Kernels& kernels, Arena& arena,
                ThreadPool& pool)
      : blocks_(input.x.features / kBlockValues), input_(input), kernels_(kernels), arena_(arena), pool_(pool) {
    for (const LinearJob& job : jobs)
      for (const PackedWeight* w : {job.weight, job.up}) {
        if (w == nullptr) continue;
        if (w->form() == PackedWeight::Form::dense)
          add_floats();
        else if (set_of(w->kind()) == nullptr)
          sets_[static_cast<size_t>(w->kind())] = round(w->kind(), jobs);
      }
  }

  int32_t blocks() const { return blocks_; }
  // The tile that begins with the row.
  const ActivationBlock* tile(PanelKind kind, int32_t row) const { return set_of(kind) + int64_t{row} * blocks_; }
  Tensor floats() const { return floats_; }

 private:
  const ActivationBlock* set_of(PanelKind kind) const {
    const PanelFormat& wanted = panel_format(kind);
    for (size_t k = 0; k < kPanelKinds; ++k)
      if (sets_[k] != nullptr && kPanelFormats[k].bias == wanted.bias && kPanelFormats[k].group == wanted.group)
        return sets_[k];
    return nullptr;
  }

  void add_floats() {
    if (floats_.data != nullptr) return;
    floats_ = input_.x;
    if (input_.order.empty()) return;
    floats_ = arena_.create(input_.rows(), input_.x.features);
    for_each(floats_.rows, floats_.size(), pool_,
             [&](int32_t i) { std::copy_n(input_.row(i), floats_.features, floats_.row(i)); });
  }

  ActivationBlock* take(int32_t rows) const {
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(blocks_);
    return reinterpret_cast<ActivationBlock*>(arena_.take(count * sizeof(ActivationBlock)));
  }

  const ActivationBlock* round(PanelKind kind, std::span<const LinearJob> jobs) {
    ActivationBlock* set = take(input_.rows());
    const Tensor& x = input_.x;
    const int64_t values = int64_t{input_.rows()} * x.features;
    const bool repeated = input_.rows() > x.rows;
    const ActivationBlock* own = nullptr;  // the rows of x, each by itself
    if (repeated) {
      ActivationBlock* rows = take(x.rows);
      for_each(x.rows, x.size(), pool_,
               [&](int32_t r) { kernels_.quantize(x.row(r), blocks_, kind, rows + int64_t{r} * blocks_, 1); });
      own = rows;
    }
    const std::vector<RowRange> tiles = tiles_of(jobs);
    for_each(static_cast<int32_t>(tiles.size()), values, pool_, [&](int32_t t) {
      const auto [begin, end] = tiles[static_cast<size_t>(t)];
      for (int32_t i = begin; i < end; ++i) {
        ActivationBlock* target = set + int64_t{begin} * blocks_ + (i - begin);
        if (!repeated) {
          kernels_.quantize(input_.row(i), blocks_, kind, target, end - begin);
        } else {
          const ActivationBlock* row = own + int64_t{input_.order[static_cast<size_t>(i)]} * blocks_;
          for (int32_t block = 0; block < blocks_; ++block) target[block * (end - begin)] = row[block];
        }
      }
    });
    return set;
  }

  std::vector<RowRange> tiles_of(std::span<const LinearJob> jobs) const {
    std::vector<RowRange> ranges;
    for (const LinearJob& job : jobs) {
      if (!ranges.empty() && job.rows.begin < ranges.back().end) continue;  // the same rows as the job before
      const Tiles tiles(job.rows, kernels_.quant->tile_rows);
      for (int32_t t = 0; t < tiles.count; ++t) ranges.push_back({tiles.begin(t), tiles.begin(t + 1)});
    }
    return ranges;
  }

  int32_t blocks_;
  std::array<const ActivationBlock*, kPanelKinds> sets_{};
  Tensor floats_{};
  const LinearInput& input_;
  const Kernels& kernels_;
  Arena& arena_;
  ThreadPool& pool_;
};

struct Context {
  const PreparedInput& input;
  const Kernels& kernels;
};

void scale_and_add_bias(const PackedWeight& weight, const float* bias, int32_t column, int32_t columns, float* values,
                        int32_t rows, int32_t stride) {
  if (weight.scale != 1.0f)
    for (int32_t r = 0; r < rows; ++r)
      for (int32_t c = 0; c < columns; ++c) values[r * stride + c] *= weight.scale;
  if (bias == nullptr) return;
  for (int32_t r = 0; r < rows; ++r)
    for (int32_t c = 0; c < columns; ++c) values[r * stride + c] += bias[column + c];
}

// Runs product(weight, target, target_stride) for `rows` rows of a unit of at most `width` columns, directly into y
// where no tail, bias, gate or order is in the way.
template <class Product>
void finish_unit(const LinearJob& job, int32_t row, int32_t rows, int32_t column, int32_t width, const Kernels& kernels,
                 Product&& product) {
  const int32_t columns = std::min(width, job.y.features - column);
  const bool adjacent = job.y_rows == nullptr || rows == 1;
  // Many rows of y lie apart by a multiple of 4 KiB, as a rule: sums that are read again would fight for few sets of L1.
  if (columns == width && job.up == nullptr && adjacent && rows <= kernels.quant->dot_rows) {
    float* y = job.target(row) + column;
    product(*job.weight, y, static_cast<int64_t>(job.y.features));
    scale_and_add_bias(*job.weight, job.bias, column, columns, y, rows, job.y.features);
    return;
  }
  alignas(64) float first[kScratchValues];
  product(*job.weight, first, int64_t{width});
  scale_and_add_bias(*job.weight, job.bias, column, columns, first, rows, width);
  if (job.up != nullptr) {
    alignas(64) float second[kScratchValues];
    product(*job.up, second, int64_t{width});
    scale_and_add_bias(*job.up, job.up_bias, column, columns, second, rows, width);
    const auto combine = job.activation == Activation::silu ? kernels.silu_mul : kernels.gelu_mul;
    combine(first, second, first, int64_t{rows} * width);
  }
  for (int32_t r = 0; r < rows; ++r)
    std::memcpy(job.target(row + r) + column, first + r * width, static_cast<size_t>(columns) * sizeof(float));
}

// One panel by the rows of some tiles: few rows unpack its codes in registers, more share chunks expanded in L1.
void multiply_panel(const Context& c, const PackedWeight& w, int32_t panel, const Tiles& all, RowRange tiles, float* y,
                    int64_t stride) {
  const QuantKernels& quant = *c.kernels.quant;
  const auto kind = static_cast<int32_t>(w.kind());
  const int32_t first_row = all.begin(tiles.begin), rows = all.begin(tiles.end) - first_row;
  const int32_t blocks = c.input.blocks();
  if (rows <= quant.dot_rows && quant.dot[kind] != nullptr)
    return quant.dot[kind](w.panel(panel), blocks, c.input.tile(w.kind(), first_row), rows, y, stride);
  alignas(64) ExpandedBlock chunk[kChunkBlocks];
  for (int32_t first = 0; first < blocks; first += kChunkBlocks) {
    const int32_t count = std::min(kChunkBlocks, blocks - first);
    quant.expand[kind](w.panel(panel), first, count, chunk);
    for (int32_t t = tiles.begin; t < tiles.end; ++t) {
      const int32_t row = all.begin(t), height = all.begin(t + 1) - row;
      quant.dot_expanded[kind](chunk, count, c.input.tile(w.kind(), row) + int64_t{first} * height, height,
                               y + (row - first_row) * stride, stride, first > 0);
    }
  }
}

void run_panels(const Context& c, const LinearJob& job, RowRange units, RowRange tiles, const Tiles& all) {
  const int32_t step = kSharedRows / c.kernels.quant->tile_rows;
  for (int32_t t = tiles.begin; t < tiles.end; t += step) {
    const RowRange shared{t, std::min(t + step, tiles.end)};
    const int32_t row = all.begin(shared.begin), rows = all.begin(shared.end) - row;
    for (int32_t p = units.begin; p < units.end; ++p)
      finish_unit(job, row, rows, p * kPanelColumns, kPanelColumns, c.kernels,
                  [&](const PackedWeight& w, float* target, int64_t stride) {
                    multiply_panel(c, w, p, all, shared, target, stride);
                  });
  }
}

void run_dense(const Context& c, const LinearJob& job, RowRange units, RowRange tiles, const Tiles& all) {
  const Tensor x = c.input.floats();
  for (int32_t t = tiles.begin; t < tiles.end; ++t) {
    const int32_t row = all.begin(t), rows = all.begin(t + 1) - row;
    for (int32_t g = units.begin; g < units.end; ++g) {
      const int32_t panels = job.weight->group_panels(g);
      finish_unit(job, row, rows, g * kGroupColumns, panels * kPanelColumns, c.kernels,
                  [&](const PackedWeight& w, float* target, int64_t stride) {
                    c.kernels.dense_dot[static_cast<int32_t>(w.element())]({.w = w.group(g),
                                                                            .w_stride = panels * kPanelColumns,
                                                                            .x = x.row(row),
                                                                            .x_stride = x.features,
                                                                            .y = target,
                                                                            .y_stride = stride,
                                                                            .n_k = w.in_features,
                                                                            .rows = rows,
                                                                            .panels = panels,
                                                                            .accumulate = false});
                  });
    }
  }
}

int64_t bytes_of(const LinearJob& job) {
  return job.weight->unit_bytes() * job.weight->column_units() * (job.up != nullptr ? 2 : 1);
}

// How one job is cut: `column_chunks` ranges of units by `row_chunks` ranges of tiles.
struct Cut {
  Tiles tiles;
  int32_t column_chunks = 1, row_chunks = 1;
  int32_t first = 0;  // units of work of the jobs before
};

Cut cut_job(const LinearJob& job, int64_t all_bytes, size_t n_jobs, const Kernels& kernels, int32_t threads) {
  const PackedWeight& w = *job.weight;
  const int32_t height = w.form() == PackedWeight::Form::panels ? kernels.quant->tile_rows : kernels.dense_rows;
  Cut cut{Tiles(job.rows, height)};
  if (threads == 1 && all_bytes <= kMostUnitBytes) return cut;
  const int64_t unit_bytes = w.unit_bytes() * (job.up != nullptr ? 2 : 1);
  const int64_t least = cut.tiles.rows >= height ? unit_bytes : kLeastUnitBytes;
  const int64_t bytes =
      std::clamp(all_bytes / (threads * kUnitsPerThread), std::min(least, kMostUnitBytes), kMostUnitBytes);
  const int32_t units = w.column_units();
  const auto per_chunk = static_cast<int32_t>(std::clamp<int64_t>(bytes / std::max<int64_t>(unit_bytes, 1), 1, units));
  cut.column_chunks = (units + per_chunk - 1) / per_chunk;
  if (threads == 1) return cut;
  // Enough chunks of each of a few jobs; many jobs share out well by their number.
  const int32_t wanted =
      std::min(threads * kUnitsPerThread, threads * 4 * kUnitsPerThread / static_cast<int32_t>(n_jobs));
  if (cut.column_chunks < wanted)
    cut.row_chunks = std::min(cut.tiles.count, (wanted + cut.column_chunks - 1) / cut.column_chunks);
  return cut;
}

void run_unit(const Context& c, const LinearJob& job, const Cut& cut, int32_t index) {
  const auto part = [](int32_t total, int32_t i, int32_t n) { return static_cast<int32_t>(int64_t{total} * i / n); };
  const int32_t column = index / cut.row_chunks, row = index % cut.row_chunks;
  const int32_t columns = job.weight->column_units();
  const RowRange units{part(columns, column, cut.column_chunks), part(columns, column + 1, cut.column_chunks)};
  const RowRange tiles{part(cut.tiles.count, row, cut.row_chunks), part(cut.tiles.count, row + 1, cut.row_chunks)};
  switch (job.weight->form()) {
    case PackedWeight::Form::panels:
      return run_panels(c, job, units, tiles, cut.tiles);
    case PackedWeight::Form::dense:
      return run_dense(c, job, units, tiles, cut.tiles);
  }
}

}  // namespace

void run_linear_jobs(const LinearInput& input, std::span<const LinearJob> jobs, const Kernels& kernels, Arena& arena,
                     ThreadPool& pool) {
  if (input.rows() == 0 || jobs.empty()) return;
  const size_t mark = arena.mark();
  const PreparedInput prepared(input, jobs, kernels, arena, pool);
  const Context context{prepared, kernels};
  int64_t all_bytes = 0;
  for (const LinearJob& job : jobs) all_bytes += bytes_of(job);
  std::vector<Cut> cuts;
  cuts.reserve(jobs.size());
  int32_t units = 0;
  for (const LinearJob& job : jobs) {
    cuts.push_back(cut_job(job, all_bytes, jobs.size(), kernels, pool.active()));
    cuts.back().first = units;
    units += cuts.back().column_chunks * cuts.back().row_chunks;
  }
  pool.parallel_for(units, 1, [&](int64_t begin, int64_t end) {
    const auto after = std::upper_bound(cuts.begin(), cuts.end(), begin,
                                        [](int64_t unit, const Cut& cut) { return unit < cut.first; });
    auto job = static_cast<size_t>(after - cuts.begin()) - 1;
    for (auto unit = static_cast<int32_t>(begin); unit < end; ++unit) {
      while (job + 1 < cuts.size() && unit >= cuts[job + 1].first) ++job;
      run_unit(context, jobs[job], cuts[job], unit - cuts[job].first);
    }
  });
  arena.release(mark);
}

}  // namespace v100::cpu
