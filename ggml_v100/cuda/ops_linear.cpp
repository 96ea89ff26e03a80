// Linear layers: the input becomes a panel once, then all weights of one type are one launch.
//
// Up to 64 rows stream the weights, with the same bits for any number of them; more rows are tiles of a product, whose bits
// do not depend on the number of rows either but differ from those of streaming by the rounding of sums.
#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"
#include "cuda/kernels/linear_prompt_shape.h"
#include "cuda/kernels/linear_shape.h"
#include "cuda/ops.h"

namespace v100::cuda {

namespace {

constexpr int32_t kTileRows = 8;
constexpr int32_t kPanelStep = 32;  // features of a record

// 8-row tiles of the panel: those of the smallest streaming kernel that takes the rows, or of the kernels of prompts.
int32_t panel_tiles(int32_t rows) {
  if (rows > kMostStreamedRows) return (rows + kPromptRows - 1) / kPromptRows * (kPromptRows / kTileRows);
  return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
}

LinearJob job_of(const Linear& layer, float* y, int32_t first_tile, bool adds) {
  const DeviceWeight& weight = device_weight(*layer.weight);
  return {.weight = reinterpret_cast<const uint8_t*>(weight.address()),
          .bias = layer.bias.data.get(),
          .y = y,
          .out_features = weight.out_features,
          .first_tile = first_tile,
          .scale = weight.product_scale(),
          .adds = adds ? 1 : 0,
          .experts = nullptr};
}

}  // namespace

void CudaOps::changes(const void* memory, size_t bytes) {
  const CUdeviceptr begin = address_of(memory);
  if (known_input_ && begin < known_input_->end && begin + bytes > known_input_->begin) known_input_.reset();
}

CudaOps::KnownInput& CudaOps::know(Tensor x) {
  const CUdeviceptr begin = address_of(x);
  known_input_.emplace();
  known_input_->begin = begin;
  known_input_->end = begin + static_cast<size_t>(x.size()) * sizeof(float);
  known_input_->x = x;
  known_input_->mark = arena_.mark();
  return *known_input_;
}

std::optional<PanelOutput> CudaOps::output_panel(Tensor x) {
  changes(x);
  if (x.rows == 0 || x.rows > kMostStreamedRows || x.features % kPanelStep != 0 || is_row(x)) return std::nullopt;
  const int32_t tiles = panel_tiles(x.rows);
  const auto padded = static_cast<size_t>(tiles * kTileRows);
  auto* values = take<uint16_t>(padded * static_cast<size_t>(x.features));
  auto* row_scale = take<float>(padded);
  know(x).panel = Panel{values, row_scale, x.rows, tiles};
  return PanelOutput{values, row_scale, tiles};
}

CudaOps::Panel CudaOps::make_panel(Tensor x) {
  if (known_input_ && known_input_->is(x) && known_input_->panel) return *known_input_->panel;
  const int32_t tiles = panel_tiles(x.rows);
  const auto padded = static_cast<size_t>(tiles * kTileRows);
  auto* values = take<uint16_t>(padded * static_cast<size_t>(x.features));
  auto* row_scale = take<float>(padded);
  launch("panel", "panel", {static_cast<uint32_t>(x.rows)}, kRowThreads,
         PanelParams{.x = x.data,
                     .panel = values,
                     .row_scale = row_scale,
                     .rows = x.rows,
                     .features = x.features,
                     .tiles = tiles});
  return {values, row_scale, x.rows, tiles};
}

void CudaOps::launch_records(const Codec& codec, const LinearParams& params, bool is_gated, const PromptTile* tile,
                             int32_t rows, int32_t items) {
  const std::string prefix = is_gated ? "gated_" : "";
  if (tile != nullptr) {
    launch("linear_prompt_" + std::string(codec.unit), prefix + (tile->rows == kWideTile.rows ? "wide" : "narrow"),
           rows_grid(prompt_blocks(*tile, rows, params.tiles, is_gated), items), static_cast<uint32_t>(tile->threads),
           params);
    return;
  }
  const int32_t block_tiles = is_gated ? 1 : linear_tiles(rows);
  launch("linear_" + std::string(codec.unit), prefix + "rows" + std::to_string(rows),
         rows_grid((params.tiles + block_tiles - 1) / block_tiles, items), kLinearThreads, params);
}

LinearParams CudaOps::linear_params(std::span<const Job> jobs, int32_t in_features, bool is_gated) {
  LinearParams params{};
  params.in_features = in_features;
  params.jobs = static_cast<int32_t>(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    params.job[i] = job_of(*jobs[i].layer, jobs[i].y.data, is_gated ? 0 : params.tiles, jobs[i].adds);
    if (!is_gated || i == 0) params.tiles += device_weight(*jobs[i].layer->weight).tiles();
  }
  return params;
}

void CudaOps::launch_row(const Codec& codec, const RowParams& params) {
  const Recorder::Mark before = recorder_.mark();
  const std::string unit = "linear_row_" + std::string(codec.unit);
  std::visit(
      [&](const auto& p) {
        using Params = std::decay_t<decltype(p)>;
        const std::string_view name = std::is_same_v<Params, NormLinearParams>       ? "after_norm"
                                      : std::is_same_v<Params, NormGateLinearParams> ? "after_norm_gate"
                                                                                     : "plain";
        const int32_t blocks = linear_row_blocks(p.linear.tiles, launches_->device().info().multiprocessors);
        launch(unit, name, {static_cast<uint32_t>(blocks)}, kLinearThreads, p,
               static_cast<uint32_t>(p.linear.in_features) * uint32_t{sizeof(uint16_t)});
      },
      params);
  row_launch_ = RowLaunch{&codec, params, before, recorder_.mark()};
}

void CudaOps::run_row(Tensor x, const Codec& codec, std::span<const Job> jobs) {
  for (size_t begin = 0; begin < jobs.size(); begin += kMostLinearJobs) {
    const auto part = jobs.subspan(begin, std::min<size_t>(kMostLinearJobs, jobs.size() - begin));
    LinearParams linear = linear_params(part, x.features, false);
    linear.rows = 1;
    const bool is_known = known_input_ && known_input_->is(x);
    if (!is_known || !known_input_->work || !merges(*known_input_->work, part)) {
      launch_row(codec, RowLinearParams{.x = x.data,
                                        .largest = is_known ? known_input_->largest : nullptr,
                                        .linear = linear,
                                        .conv = {},
                                        .parts = is_known ? known_input_->parts : 0});
      continue;
    }
    const RowWork& work = *known_input_->work;
    recorder_.take_back(work.before);
    if (const auto* norm = std::get_if<RmsNormParams>(&work.params))
      launch_row(codec, NormLinearParams{*norm, reinterpret_cast<uint32_t*>(row_counters_.address()), linear, {}});
    else
      launch_row(codec, NormGateLinearParams{std::get<NormGateParams>(work.params), linear, {}});
  }
}

bool CudaOps::convolves(Tensor x, const RowConv& conv) {
  if (!row_launch_ || recorder_.mark() != row_launch_->after) return false;
  RowLaunch known = *row_launch_;
  const bool is_made = std::visit(
      [&](auto& params) {
        for (int32_t job = 0; job < params.linear.jobs; ++job) {
          if (params.linear.job[job].y != x.data || params.linear.job[job].out_features != x.features) continue;
          params.conv = conv;
          params.conv.job = job;
          return true;
        }
        return false;
      },
      known.params);
  if (!is_made) return false;
  recorder_.take_back(known.before);
  launch_row(*known.codec, known.params);
  return true;
}

bool CudaOps::merges(const RowWork& work, std::span<const Job> jobs) const {
  if (recorder_.mark() != work.after) return false;
  // A block may write its outputs before another one has read what it makes its row of.
  const auto writes = [&](const float* from, int32_t features) {
    return from != nullptr && std::ranges::any_of(jobs, [&](const Job& job) {
             return job.y.data < from + features && from < job.y.data + job.y.size();
           });
  };
  if (const auto* norm = std::get_if<RmsNormParams>(&work.params))
    return norm->features <= kMostHeldFeatures && !writes(norm->x, norm->features) &&
           !writes(norm->added, norm->features);
  const auto& gate = std::get<NormGateParams>(work.params);
  const int32_t features = gate.heads * gate.head_dim;
  return gate.head_dim == kHeldHead && features <= kMostHeldFeatures && !writes(gate.x, features) &&
         !writes(gate.gate, features);
}

void CudaOps::run_records(Tensor x, const Codec& codec, std::span<const Job> jobs,
                          std::optional<Activation> activation) {
  const bool is_gated = activation.has_value();
  if (!is_gated && is_row(x)) return run_row(x, codec, jobs);
  const size_t mark = arena_.mark();
  const Panel panel = make_panel(x);
  for (size_t begin = 0; begin < jobs.size(); begin += kMostLinearJobs) {
    const auto part = jobs.subspan(begin, std::min<size_t>(kMostLinearJobs, jobs.size() - begin));
    LinearParams params = linear_params(part, x.features, is_gated);
    params.panel = panel.values;
    params.row_scale = panel.row_scale;
    params.rows = panel.rows;
    params.activation = activation ? static_cast<int32_t>(*activation) : 0;
    if (panel.rows <= kMostStreamedRows) {
      launch_records(codec, params, is_gated, nullptr, panel.tiles * kTileRows, 1);
      continue;
    }
    const int32_t multiprocessors = launches_->device().info().multiprocessors;
    const bool is_wide = prompt_is_wide(panel.rows, params.tiles, is_gated, multiprocessors);
    launch_records(codec, params, is_gated, is_wide ? &kWideTile : &kNarrowTile, panel.rows, 1);
  }
  arena_.release(mark);
}

void CudaOps::run_floats(Tensor x, std::span<const Job> jobs) {
  const bool is_few = x.rows <= kMostStreamedRows;
  const int32_t features = is_few ? 4 : 16, rows = is_few ? 8 : 16;  // of a block
  for (size_t begin = 0; begin < jobs.size(); begin += kMostLinearJobs) {
    const auto part = jobs.subspan(begin, std::min<size_t>(kMostLinearJobs, jobs.size() - begin));
    LinearF32Params params{};
    params.x = x.data;
    params.rows = x.rows;
    params.in_features = x.features;
    params.jobs = static_cast<int32_t>(part.size());
    int32_t tiles = 0;
    for (size_t i = 0; i < part.size(); ++i) {
      params.job[i] = job_of(*part[i].layer, part[i].y.data, tiles, part[i].adds);
      tiles += (params.job[i].out_features + features - 1) / features;
    }
    launch("linear_f32", is_few ? "rows8" : "rows16", rows_grid(tiles, (x.rows + rows - 1) / rows), kThreads, params);
  }
}

void CudaOps::run_linear(Tensor x, std::span<const Job> jobs) {
  std::vector<Job> same;
  std::vector<const Codec*> done;
  for (const Job& job : jobs) {
    const Codec* codec = device_weight(*job.layer->weight).codec();
    if (std::find(done.begin(), done.end(), codec) != done.end()) continue;
    done.push_back(codec);
    same.clear();
    for (const Job& other : jobs)
      if (device_weight(*other.layer->weight).codec() == codec) same.push_back(other);
    if (codec == nullptr)
      run_floats(x, same);
    else
      run_records(x, *codec, same, std::nullopt);
  }
}

Tensor CudaOps::linear(Tensor x, const Linear& w) {
  if (w.weight == nullptr) return zeros(x.rows, w.out_features);
  const Job job{&w, create(x.rows, w.weight->out_features)};
  run_linear(x, {&job, 1});
  return job.y;
}

void CudaOps::add_linear(Tensor x, Tensor y, const Linear& w) {
  if (w.weight == nullptr) return Ops::add_linear(x, y, w);
  changes(x);
  const Job job{&w, x, true};
  run_linear(y, {&job, 1});
}

void CudaOps::multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) {
  std::vector<Job> jobs;
  jobs.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i]->weight == nullptr) {
      outputs[i] = zeros(x.rows, weights[i]->out_features);
      continue;
    }
    outputs[i] = create(x.rows, weights[i]->weight->out_features);
    jobs.push_back({weights[i], outputs[i]});
  }
  run_linear(x, jobs);
}

Tensor CudaOps::gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) {
  if (gate.weight == nullptr) return zeros(x.rows, gate.out_features);
  const Tensor y = create(x.rows, gate.weight->out_features);
  const Codec* codec = device_weight(*gate.weight).codec();
  // For a few rows both products are tiles of one launch: those of the gated kernels are twice as large, and where there are
  // few of them the last ones have the card to themselves (docs/kernels.md).
  if (x.rows > kTileRows && codec != nullptr && codec == device_weight(*up.weight).codec()) {
    run_records(x, *codec, std::array{Job{&gate, y}, Job{&up, {}}}, activation);
    return y;
  }
  const size_t mark = arena_.mark();
  const Tensor other = create(x.rows, y.features);
  run_linear(x, std::array{Job{&gate, y}, Job{&up, other}});
  activate(y, other, activation);
  const bool is_known = known_input_ && known_input_->mark > mark;  // what is known of y lies behind `other`
  if (!is_known) arena_.release(mark);
  return y;
}

}  // namespace v100::cuda
