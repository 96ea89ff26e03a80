// Mixtures of experts. What was routed where only the device knows: launches are as large as any routing may need.
#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "cuda/kernels/linear_prompt_shape.h"
#include "cuda/ops.h"

namespace v100::cuda {

namespace {

constexpr int32_t kMostExperts = 1024, kMostUsed = 32;
constexpr size_t kMostPanelBytes = size_t{64} << 20;

// Rows of an item: twice what an expert has of them on average, up to `most`.
int32_t rows_of_item(int32_t slots, int32_t experts, int32_t most) {
  int32_t rows = 8;
  while (rows < most && int64_t{rows} * experts < 2 * int64_t{slots}) rows *= 2;
  return rows;
}

// The tile of the kernels of prompts, whose rows an item has then, where they are faster: an expert has to fill it. nullptr:
// the streaming kernels, always for up to 64 rows. What a ubatch takes does not depend on the pieces it goes in.
const PromptTile* prompt_tile(const Routing& routing, int32_t experts) {
  const int64_t slots = routing.slots();
  if (routing.rows <= kMostStreamedRows || slots <= int64_t{48} * experts) return nullptr;
  return slots <= int64_t{192} * experts ? &kNarrowTile : &kWideTile;
}

// Of the first expert that is here; nothing where none is.
const DeviceWeight* any_weight(const ExpertLinear& w) {
  for (const auto& expert : w.experts)
    if (expert != nullptr) return &device_weight(*expert);
  return nullptr;
}

}  // namespace

Routing CudaOps::route(Tensor logits, int32_t used) {
  constexpr int32_t kWarps = 4;
  if (logits.features > kMostExperts || used > kMostUsed)
    throw InvalidArgument(std::to_string(used) + " of " + std::to_string(logits.features) +
                          " experts cannot be chosen on a CUDA device; expected at most " + std::to_string(kMostUsed) +
                          " of " + std::to_string(kMostExperts));
  seat_.beat();
  const size_t n = static_cast<size_t>(logits.rows) * static_cast<size_t>(used);
  auto* expert = take<int32_t>(n);
  auto* weight = take<float>(n);
  launch("routing", "route", {static_cast<uint32_t>((logits.rows + kWarps - 1) / kWarps)}, kWarps * 32,
         RouteParams{.logits = logits.data,
                     .expert = expert,
                     .weight = weight,
                     .rows = logits.rows,
                     .experts = logits.features,
                     .used = used});
  return {logits.rows, used, expert, weight};
}

const ExpertWeight* CudaOps::expert_table(const ExpertLinear& w) {
  const LinearWeight* key = any_weight(w);
  const auto known = expert_tables_.find(key);
  if (known != expert_tables_.end() && known->second.experts == w.experts)
    return reinterpret_cast<const ExpertWeight*>(known->second.memory.get());
  std::vector<ExpertWeight> table;
  for (const auto& expert : w.experts) {
    if (expert == nullptr) {
      table.push_back({nullptr, 0.0f});
      continue;
    }
    const DeviceWeight& weight = device_weight(*expert);
    table.push_back({reinterpret_cast<const uint8_t*>(weight.address()), weight.product_scale()});
  }
  const size_t bytes = table.size() * sizeof(ExpertWeight);
  auto memory = allocate(bytes);
  {
    const Device::Guard guard(launches_->device());  // in front of what was written down, which does not know it yet
    staging_.upload(recorder_.stream(), address_of(memory.get()), table.data(), bytes);
  }
  const auto made = expert_tables_.insert_or_assign(key, ExpertTable{w.experts, std::move(memory)}).first;
  return reinterpret_cast<const ExpertWeight*>(made->second.memory.get());
}

CudaOps::Groups CudaOps::group_slots(const int32_t* expert, int32_t slots, int32_t experts, int32_t item_rows) {
  if (groups_.expert == expert && groups_.slots == slots && groups_.item_rows == item_rows) return groups_;
  Groups groups{expert, slots, item_rows, most_expert_items(slots, experts, item_rows), nullptr, nullptr, 0};
  auto* order = take<int32_t>(static_cast<size_t>(slots));
  auto* items = take<ExpertItem>(static_cast<size_t>(groups.most_items));
  groups.order = order, groups.items = items;
  groups.mark = arena_.mark();
  launch("routing", "group_slots", {static_cast<uint32_t>(experts / 8 + 1)}, kThreads,
         GroupSlotsParams{.expert = expert,
                          .order = order,
                          .items = items,
                          .slots = slots,
                          .experts = experts,
                          .rows_of_item = item_rows,
                          .most_items = groups.most_items});
  groups_ = groups;
  return groups;
}

void CudaOps::run_expert_records(Tensor x, const Groups& groups, std::span<const ExpertLinear* const> weights,
                                 std::optional<Activation> activation, int32_t slots_per_row, const PromptTile* tile,
                                 Tensor y) {
  const Codec& codec = *any_weight(*weights[0])->codec();
  const int32_t tiles = groups.item_rows / 8;
  auto* panel = take<uint16_t>(static_cast<size_t>(groups.most_items) * static_cast<size_t>(groups.item_rows) *
                               static_cast<size_t>(x.features));
  auto* row_scale = take<float>(static_cast<size_t>(groups.slots));
  launch("panel", "expert_panel", rows_grid(groups.item_rows, groups.most_items), kRowThreads,
         ExpertPanelParams{.x = x.data,
                           .items = groups.items,
                           .order = groups.order,
                           .panel = panel,
                           .row_scale = row_scale,
                           .features = x.features,
                           .tiles = tiles,
                           .slots_per_row = slots_per_row});
  LinearParams params{};
  params.panel = panel;
  params.row_scale = row_scale;
  params.in_features = x.features;
  params.jobs = static_cast<int32_t>(weights.size());
  params.tiles = (y.features + 31) / 32;
  params.activation = activation ? static_cast<int32_t>(*activation) : 0;
  params.items = groups.items;
  params.order = groups.order;
  for (size_t i = 0; i < weights.size(); ++i) {
    params.job[i].y = i == 0 ? y.data : nullptr;
    params.job[i].out_features = y.features;
    params.job[i].experts = expert_table(*weights[i]);
  }
  launch_records(codec, params, activation.has_value(), tile, groups.item_rows, groups.most_items);
}

void CudaOps::run_expert_floats(Tensor x, const Groups& groups, const ExpertLinear& w, int32_t slots_per_row,
                                Tensor y) {
  const int32_t features = groups.item_rows == 8 ? 4 : 16;  // of a block
  LinearF32Params params{};
  params.x = x.data;
  params.in_features = x.features;
  params.jobs = 1;
  params.slots_per_row = slots_per_row;
  params.items = groups.items;
  params.order = groups.order;
  params.job[0].y = y.data;
  params.job[0].out_features = y.features;
  params.job[0].experts = expert_table(w);
  launch("linear_f32", "rows" + std::to_string(groups.item_rows),
         rows_grid((y.features + features - 1) / features, groups.most_items), kThreads, params);
}

// slots_per_row: of x. Rows of the routing go in pieces, so that panels stay small; a slot's bits do not depend on them.
void CudaOps::run_experts(Tensor x, const Routing& routing, const ExpertLinear& w, const ExpertLinear* up,
                          std::optional<Activation> activation, int32_t slots_per_row, Tensor y) {
  const DeviceWeight* weight = any_weight(w);
  if (weight == nullptr) {
    recorder_.fill(address_of(y), 0, static_cast<size_t>(y.size()) * sizeof(float));
    return;
  }
  const auto experts = static_cast<int32_t>(w.experts.size());
  const bool is_packed = weight->codec() != nullptr;
  const PromptTile* tile = is_packed ? prompt_tile(routing, experts) : nullptr;
  const int32_t item_rows = tile != nullptr ? tile->rows : rows_of_item(routing.slots(), experts, is_packed ? 64 : 16);
  int32_t piece_rows = routing.rows;
  const auto panel_bytes = [&](int32_t rows) {
    return static_cast<size_t>(most_expert_items(rows * routing.used, experts, item_rows)) *
           static_cast<size_t>(item_rows) * static_cast<size_t>(x.features) * sizeof(uint16_t);
  };
  while (is_packed && piece_rows > item_rows && panel_bytes(piece_rows) > kMostPanelBytes)
    piece_rows = (piece_rows + 1) / 2;
  for (int32_t first = 0; first < routing.rows; first += piece_rows) {
    const int32_t rows = std::min(piece_rows, routing.rows - first), first_slot = first * routing.used;
    const Tensor piece_x{x.row(first_slot / slots_per_row), rows * routing.used / slots_per_row, x.features};
    const Tensor piece_y{y.row(first_slot), rows * routing.used, y.features};
    const Groups groups = group_slots(routing.expert + first_slot, rows * routing.used, experts, item_rows);
    const size_t mark = arena_.mark();
    if (!is_packed) {
      run_expert_floats(piece_x, groups, w, slots_per_row, piece_y);
    } else if (up != nullptr) {
      run_expert_records(piece_x, groups, std::array{&w, up}, activation, slots_per_row, tile, piece_y);
    } else {
      run_expert_records(piece_x, groups, std::array{&w}, std::nullopt, slots_per_row, tile, piece_y);
    }
    arena_.release(mark);
  }
}

Tensor CudaOps::gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                                    Activation activation) {
  const Tensor y = create(routing.slots(), gate.out_features);
  const DeviceWeight *one = any_weight(gate), *other = any_weight(up);
  const bool is_fused =
      one == nullptr || (one->codec() != nullptr && other != nullptr && one->codec() == other->codec());
  if (is_fused) {
    run_experts(x, routing, gate, &up, activation, routing.used, y);
    return y;
  }
  const Tensor up_y = create(y.rows, y.features);
  run_experts(x, routing, gate, nullptr, std::nullopt, routing.used, y);
  run_experts(x, routing, up, nullptr, std::nullopt, routing.used, up_y);
  activate(y, up_y, activation);
  return y;
}

Tensor CudaOps::expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) {
  const Tensor y = create(routing.slots(), w.out_features);
  run_experts(x, routing, w, nullptr, std::nullopt, 1, y);
  return y;
}

Tensor CudaOps::mix_experts(Tensor x, const Routing& routing) {
  const Tensor y = create(routing.rows, x.features);
  launch_flat("routing", "mix_experts", y.size(),
              MixExpertsParams{.x = x.data,
                               .weight = routing.weight,
                               .y = y.data,
                               .rows = y.rows,
                               .features = y.features,
                               .used = routing.used});
  return y;
}

}  // namespace v100::cuda
