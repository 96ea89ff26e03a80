// Sharing out of linear layers. A unit of work is a range of column units of one job times a range of rows; within it
// rows go in tiles (outer loop: the tile's activations stay in L1) over the columns (inner loop: the range's weights
// stay in L2). Any split gives the same bits, because each output element is summed by one lane in order of k.
#include "cpu/linear.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"

namespace v100::cpu {

namespace {

constexpr int64_t kLeastUnitBytes = 8 << 10;   // a unit costs ~0.1 us to take; 8 KiB take ~0.4 us to read
constexpr int64_t kMostUnitBytes = 256 << 10;  // fits L2 beside a tile of activations
constexpr int32_t kUnitsPerThread = 4;
constexpr int64_t kParallelValues = 16 << 10;  // fewer values than this are rounded by the calling thread
constexpr int32_t kChunkBlocks = 16;           // expanded at a time: 12 KiB, in L1 beside a tile's activations
constexpr int32_t kSharedRows = 96;            // rows that share an expanded chunk; their activations stay in L2
constexpr int32_t kScratchValues = 96 * 16;    // of a unit: shared rows of a panel, or a dense tile of four panels

// Rows [0, rows) in `count` tiles of nearly equal height.
struct Tiles {
  int32_t rows, count;
  Tiles(int32_t rows, int32_t height) : rows(rows), count((rows + height - 1) / height) {}
  int32_t begin(int32_t tile) const { return static_cast<int32_t>(int64_t{rows} * tile / count); }
};

const PackedWeight& packed(const Linear& layer) { return static_cast<const PackedWeight&>(*layer.weight); }

// The input rounded for the kinds of panels in use. Kinds of equal bias and group share a set.
class RoundedInput {
 public:
  RoundedInput(Tensor x, std::span<const LinearJob> jobs, const Kernels& kernels, Arena& arena, ThreadPool& pool)
      : tiles_(x.rows, kernels.quant->tile_rows), blocks_(x.features / kBlockValues) {
    for (const LinearJob& job : jobs)
      for (const Linear* layer : {job.layer, job.up})
        if (layer != nullptr && packed(*layer).form() == PackedWeight::Form::panels)
          add(packed(*layer).kind(), x, kernels, arena, pool);
  }

  const Tiles& tiles() const { return tiles_; }
  int32_t blocks() const { return blocks_; }
  const ActivationBlock* tile(PanelKind kind, int32_t index) const {
    return sets_[static_cast<size_t>(kind)] + int64_t{tiles_.begin(index)} * blocks_;
  }

 private:
  void add(PanelKind kind, Tensor x, const Kernels& kernels, Arena& arena, ThreadPool& pool) {
    const ActivationBlock*& set = sets_[static_cast<size_t>(kind)];
    for (size_t k = 0; k < kPanelKinds && set == nullptr; ++k)
      if (kPanelFormats[k].bias == panel_format(kind).bias && kPanelFormats[k].group == panel_format(kind).group)
        set = sets_[k];
    if (set == nullptr) set = round(kind, x, kernels, arena, pool);
  }

  const ActivationBlock* round(PanelKind kind, Tensor x, const Kernels& kernels, Arena& arena, ThreadPool& pool) const {
    const size_t count = static_cast<size_t>(x.rows) * static_cast<size_t>(blocks_);
    auto* set = reinterpret_cast<ActivationBlock*>(arena.take(count * sizeof(ActivationBlock)));
    const auto round_tiles = [&](int64_t begin, int64_t end) {
      for (auto t = static_cast<int32_t>(begin); t < end; ++t) {
        const int32_t row = tiles_.begin(t);
        kernels.quantize(x.row(row), x.features, tiles_.begin(t + 1) - row, blocks_, kind,
                         set + int64_t{row} * blocks_);
      }
    };
    if (x.size() < kParallelValues)
      round_tiles(0, tiles_.count);
    else
      pool.parallel_for(tiles_.count, 1, round_tiles);
    return set;
  }

  Tiles tiles_;
  int32_t blocks_;
  std::array<const ActivationBlock*, kPanelKinds> sets_{};
};

struct Context {
  Tensor x;
  const RoundedInput& rounded;
  const Kernels& kernels;
};

void add_bias(const VectorWeight& bias, int32_t column, int32_t columns, float* values, int32_t rows, int32_t stride) {
  if (!bias) return;
  for (int32_t r = 0; r < rows; ++r)
    for (int32_t c = 0; c < columns; ++c) values[r * stride + c] += bias.data[column + c];
}

void copy_columns(const float* values, int32_t stride, int32_t rows, int32_t columns, float* y, int64_t y_stride) {
  for (int32_t r = 0; r < rows; ++r)
    std::memcpy(y + r * y_stride, values + r * stride, static_cast<size_t>(columns) * sizeof(float));
}

// Runs product(layer, target, target_stride) for `rows` rows of a unit of at most `width` columns, directly into y
// where no tail, bias or gate is in the way.
template <class Product>
void finish_unit(const LinearJob& job, int32_t row, int32_t rows, int32_t column, int32_t width, const Kernels& kernels,
                 Product&& product) {
  const int32_t columns = std::min(width, job.y.features - column);
  float* y = job.y.row(row) + column;
  // Many rows of y lie apart by a multiple of 4 KiB, as a rule: sums that are read again would fight for few sets of L1.
  if (columns == width && job.up == nullptr && rows <= kernels.quant->dot_rows) {
    product(*job.layer, y, static_cast<int64_t>(job.y.features));
    if (job.layer->bias) add_bias(job.layer->bias, column, columns, y, rows, job.y.features);
    return;
  }
  alignas(64) float first[kScratchValues];
  product(*job.layer, first, int64_t{width});
  add_bias(job.layer->bias, column, columns, first, rows, width);
  if (job.up != nullptr) {
    alignas(64) float second[kScratchValues];
    product(*job.up, second, int64_t{width});
    add_bias(job.up->bias, column, columns, second, rows, width);
    const auto combine = job.activation == Activation::silu ? kernels.silu_mul : kernels.gelu_mul;
    combine(first, second, first, int64_t{rows} * width);
  }
  copy_columns(first, width, rows, columns, y, job.y.features);
}

// One panel by the rows of some tiles: few rows unpack its codes in registers, more share chunks expanded in L1.
void multiply_panel(const Context& c, const PackedWeight& w, int32_t panel, RowRange tiles, float* y, int64_t stride) {
  const QuantKernels& quant = *c.kernels.quant;
  const auto kind = static_cast<int32_t>(w.kind());
  const Tiles& all = c.rounded.tiles();
  const int32_t first_row = all.begin(tiles.begin), rows = all.begin(tiles.end) - first_row;
  const int32_t blocks = c.rounded.blocks();
  if (rows <= quant.dot_rows && quant.dot[kind] != nullptr)
    return quant.dot[kind](w.panel(panel), blocks, c.rounded.tile(w.kind(), tiles.begin), rows, y, stride);
  alignas(64) ExpandedBlock chunk[kChunkBlocks];
  for (int32_t first = 0; first < blocks; first += kChunkBlocks) {
    const int32_t count = std::min(kChunkBlocks, blocks - first);
    quant.expand[kind](w.panel(panel), first, count, chunk);
    for (int32_t t = tiles.begin; t < tiles.end; ++t) {
      const int32_t row = all.begin(t), height = all.begin(t + 1) - row;
      quant.dot_expanded[kind](chunk, count, c.rounded.tile(w.kind(), t) + int64_t{first} * height, height,
                               y + (row - first_row) * stride, stride, first > 0);
    }
  }
}

void run_panels(const Context& c, const LinearJob& job, RowRange units, RowRange tiles) {
  const Tiles& all = c.rounded.tiles();
  const int32_t step = kSharedRows / c.kernels.quant->tile_rows;
  for (int32_t t = tiles.begin; t < tiles.end; t += step) {
    const RowRange shared{t, std::min(t + step, tiles.end)};
    const int32_t row = all.begin(shared.begin), rows = all.begin(shared.end) - row;
    for (int32_t p = units.begin; p < units.end; ++p)
      finish_unit(job, row, rows, p * kPanelColumns, kPanelColumns, c.kernels,
                  [&](const Linear& layer, float* target, int64_t stride) {
                    multiply_panel(c, packed(layer), p, shared, target, stride);
                  });
  }
}

void run_dense(const Context& c, const LinearJob& job, RowRange units, RowRange tiles, const Tiles& all) {
  for (int32_t t = tiles.begin; t < tiles.end; ++t) {
    const int32_t row = all.begin(t), rows = all.begin(t + 1) - row;
    for (int32_t g = units.begin; g < units.end; ++g) {
      const int32_t panels = packed(*job.layer).group_panels(g);
      finish_unit(job, row, rows, g * kGroupColumns, panels * kPanelColumns, c.kernels,
                  [&](const Linear& layer, float* target, int64_t stride) {
                    const PackedWeight& w = packed(layer);
                    c.kernels.dense_dot[static_cast<int32_t>(w.element())]({.w = w.group(g),
                                                                            .w_stride = panels * kPanelColumns,
                                                                            .x = c.x.row(row),
                                                                            .x_stride = c.x.features,
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

// How one job is cut: `column_chunks` ranges of units by `row_chunks` ranges of tiles.
struct Cut {
  Tiles tiles;
  int32_t column_chunks, row_chunks;
  int32_t count() const { return column_chunks * row_chunks; }
};

Cut cut_job(const LinearJob& job, Tensor x, int64_t all_bytes, const Kernels& kernels, int32_t threads) {
  const PackedWeight& w = packed(*job.layer);
  const int32_t height = w.form() == PackedWeight::Form::panels ? kernels.quant->tile_rows : kernels.dense_rows;
  Cut cut{Tiles(x.rows, height), 1, 1};
  if (threads == 1 && all_bytes <= kMostUnitBytes) return cut;
  const int64_t unit_bytes = w.unit_bytes() * (job.up != nullptr ? 2 : 1);
  const int64_t least = x.rows > cut.tiles.rows / 2 && x.rows >= height ? unit_bytes : kLeastUnitBytes;
  const int64_t bytes =
      std::clamp(all_bytes / (threads * kUnitsPerThread), std::min(least, kMostUnitBytes), kMostUnitBytes);
  const int32_t units = w.column_units();
  const auto per_chunk = static_cast<int32_t>(std::clamp<int64_t>(bytes / std::max<int64_t>(unit_bytes, 1), 1, units));
  cut.column_chunks = (units + per_chunk - 1) / per_chunk;
  if (threads > 1 && cut.column_chunks < threads * kUnitsPerThread)
    cut.row_chunks = std::min(cut.tiles.count, (threads * kUnitsPerThread + cut.column_chunks - 1) / cut.column_chunks);
  return cut;
}

void run_unit(const Context& c, const LinearJob& job, const Cut& cut, int32_t index) {
  const auto part = [](int32_t total, int32_t i, int32_t n) { return static_cast<int32_t>(int64_t{total} * i / n); };
  const int32_t column = index / cut.row_chunks, row = index % cut.row_chunks;
  const int32_t columns = packed(*job.layer).column_units();
  const RowRange units{part(columns, column, cut.column_chunks), part(columns, column + 1, cut.column_chunks)};
  const RowRange tiles{part(cut.tiles.count, row, cut.row_chunks), part(cut.tiles.count, row + 1, cut.row_chunks)};
  switch (packed(*job.layer).form()) {
    case PackedWeight::Form::panels:
      return run_panels(c, job, units, tiles);
    case PackedWeight::Form::dense:
      return run_dense(c, job, units, tiles, cut.tiles);
  }
}

}  // namespace

void run_linear_jobs(Tensor x, std::span<const LinearJob> jobs, const Kernels& kernels, Arena& arena,
                     ThreadPool& pool) {
  constexpr size_t kMostJobs = 16;
  if (x.rows == 0) return;
  if (jobs.size() > kMostJobs) {
    run_linear_jobs(x, jobs.first(kMostJobs), kernels, arena, pool);
    return run_linear_jobs(x, jobs.subspan(kMostJobs), kernels, arena, pool);
  }
  const size_t mark = arena.mark();
  const RoundedInput rounded(x, jobs, kernels, arena, pool);
  const Context context{x, rounded, kernels};
  int64_t all_bytes = 0;
  for (const LinearJob& job : jobs)
    all_bytes += packed(*job.layer).unit_bytes() * packed(*job.layer).column_units() * (job.up != nullptr ? 2 : 1);
  const int32_t threads = pool.active();
  std::array<int32_t, kMostJobs + 1> first{};  // first[i]: units of the jobs before i
  std::array<Cut, kMostJobs> cuts = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Cut, kMostJobs>{
        (I < jobs.size() ? cut_job(jobs[I], x, all_bytes, kernels, threads) : Cut{Tiles(0, 1), 0, 0})...};
  }(std::make_index_sequence<kMostJobs>{});
  for (size_t i = 0; i < jobs.size(); ++i) first[i + 1] = first[i] + cuts[i].count();
  pool.parallel_for(first[jobs.size()], 1, [&](int64_t begin, int64_t end) {
    size_t job = 0;
    for (auto unit = static_cast<int32_t>(begin); unit < end; ++unit) {
      while (unit >= first[job + 1]) ++job;
      run_unit(context, jobs[job], cuts[job], unit - first[job]);
    }
  });
  arena.release(mark);
}

}  // namespace v100::cpu
