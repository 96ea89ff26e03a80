// Linear layers: the input becomes a panel once, then all weights of one type are one launch.
#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"
#include "cuda/ops.h"

namespace v100::cuda {

namespace {

constexpr int32_t kMostRows = 64;  // of a streaming kernel
constexpr int32_t kTileRows = 8;

// 8-row tiles of the smallest streaming kernel that takes the rows.
int32_t tiles_for(int32_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8; }

LinearJob job_of(const Linear& layer, float* y, int32_t first_tile) {
  const DeviceWeight& weight = device_weight(*layer.weight);
  return {.weight = reinterpret_cast<const uint8_t*>(weight.address()),
          .bias = layer.bias.data.get(),
          .y = y,
          .out_features = weight.out_features,
          .first_tile = first_tile,
          .scale = weight.product_scale(),
          .adds = 0,
          .experts = nullptr};
}

}  // namespace

CudaOps::Panel CudaOps::make_panel(Tensor x, int32_t first, int32_t rows) {
  const int32_t tiles = tiles_for(rows);
  const auto padded = static_cast<size_t>(tiles * kTileRows);
  auto* values = take<uint16_t>(padded * static_cast<size_t>(x.features));
  auto* row_scale = take<float>(padded);
  launch("panel", "panel", {static_cast<uint32_t>(padded)}, kThreads,
         PanelParams{.x = x.row(first),
                     .panel = values,
                     .row_scale = row_scale,
                     .rows = rows,
                     .features = x.features,
                     .tiles = tiles});
  return {values, row_scale, rows, tiles};
}

// More than 64 rows go in pieces, which have the bits of 64 rows.
void CudaOps::run_records(Tensor x, std::span<const Job> jobs) {
  const std::string unit = "linear_" + std::string(device_weight(*jobs[0].layer->weight).codec()->unit);
  for (int32_t first = 0; first < x.rows; first += kMostRows) {
    const size_t mark = arena_.mark();
    const Panel panel = make_panel(x, first, std::min(kMostRows, x.rows - first));
    const std::string kernel = "rows" + std::to_string(panel.tiles * kTileRows);
    const int32_t columns = panel.tiles > 1 ? 2 : 1;  // tiles of a block
    for (size_t begin = 0; begin < jobs.size(); begin += kMostLinearJobs) {
      const auto part = jobs.subspan(begin, std::min<size_t>(kMostLinearJobs, jobs.size() - begin));
      LinearParams params{};
      params.panel = panel.values;
      params.row_scale = panel.row_scale;
      params.rows = panel.rows;
      params.in_features = x.features;
      params.jobs = static_cast<int32_t>(part.size());
      for (size_t i = 0; i < part.size(); ++i) {
        params.job[i] = job_of(*part[i].layer, part[i].y.row(first), params.tiles);
        params.tiles += device_weight(*part[i].layer->weight).tiles();
      }
      launch(unit, kernel, {static_cast<uint32_t>((params.tiles + columns - 1) / columns)},
             static_cast<uint32_t>(columns) * kThreads, params);
    }
    arena_.release(mark);
  }
}

void CudaOps::run_linear(Tensor x, std::span<const Job> jobs) {
  std::vector<Job> same;
  std::vector<const Codec*> done;
  for (const Job& job : jobs) {
    const Codec* codec = device_weight(*job.layer->weight).codec();
    if (codec == nullptr) throw_missing("linear of F32 weights");
    if (std::find(done.begin(), done.end(), codec) != done.end()) continue;
    done.push_back(codec);
    same.clear();
    for (const Job& other : jobs)
      if (device_weight(*other.layer->weight).codec() == codec) same.push_back(other);
    run_records(x, same);
  }
}

Tensor CudaOps::linear(Tensor x, const Linear& w) {
  if (w.weight == nullptr) return zeros(x.rows, w.out_features);
  const Job job{&w, create(x.rows, w.weight->out_features)};
  run_linear(x, {&job, 1});
  return job.y;
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
  if (codec == nullptr || codec != device_weight(*up.weight).codec()) {
    const size_t mark = arena_.mark();
    const std::array<Job, 2> jobs{Job{&gate, y}, Job{&up, create(x.rows, y.features)}};
    run_linear(x, jobs);
    activate(y, jobs[1].y, activation);
    arena_.release(mark);
    return y;
  }
  for (int32_t first = 0; first < x.rows; first += kMostRows) {
    const size_t mark = arena_.mark();
    const Panel panel = make_panel(x, first, std::min(kMostRows, x.rows - first));
    LinearParams params{};
    params.panel = panel.values;
    params.row_scale = panel.row_scale;
    params.rows = panel.rows;
    params.in_features = x.features;
    params.jobs = 2;
    params.tiles = device_weight(*gate.weight).tiles();
    params.activation = static_cast<int32_t>(activation);
    params.job[0] = job_of(gate, y.row(first), 0);
    params.job[1] = job_of(up, nullptr, 0);
    launch("linear_" + std::string(codec->unit), "gated_rows" + std::to_string(panel.tiles * kTileRows),
           {static_cast<uint32_t>(params.tiles)}, 2 * kThreads, params);
    arena_.release(mark);
  }
  return y;
}

}  // namespace v100::cuda
