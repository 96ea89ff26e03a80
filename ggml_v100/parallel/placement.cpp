// Reading of placements, and what a rank learns from one.
#include "parallel/placement.h"

#include <algorithm>
#include <cstdio>
#include <regex>
#include <utility>

#include "base/error.h"
#include "cuda/backend.h"

namespace v100 {

namespace {

constexpr int32_t kVocabularyRows = 32;  // the unit in which the output matrix is cut

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

SplitMode split_mode(const std::string& name, size_t n_devices) {
  if (name == "none") return SplitMode::none;
  if (name == "layer") return SplitMode::layer;
  if (name == "tensor") return SplitMode::tensor;
  if (name != "row") throw InvalidArgument("split mode '" + name + "' is unknown; expected none, layer or tensor");
  if (n_devices > 1)
    throw InvalidArgument(
        "split mode 'row' is not supported; 'tensor' divides every layer over the devices, 'layer' "
        "gives each device whole layers");
  return SplitMode::none;
}

std::vector<std::string> cpu_devices() {
  std::vector<std::string> names{"CPU"};
  for (int32_t i = 0; i < kMostRanks; ++i) names.push_back("CPU" + std::to_string(i));
  return names;
}

std::vector<std::string> checked_devices(std::vector<std::string> names) {
  if (names.empty()) return {"CPU"};
  // The driver is asked only for those who name a device of it.
  const bool has_cuda =
      std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("CUDA"); });
  const std::vector<std::string> known = has_cuda ? available_devices() : cpu_devices();
  for (size_t i = 0; i < names.size(); ++i) {
    const bool is_known = std::find(known.begin(), known.end(), names[i]) != known.end();
    if (!is_known && names[i].starts_with("CUDA"))
      if (const std::string reason = no_cuda_devices_reason(); !reason.empty())
        throw InvalidArgument("device '" + names[i] + "' cannot be used: " + reason);
    if (!is_known) throw InvalidArgument("device '" + names[i] + "' is not there; expected one of " + joined(known));
    const auto first = names.begin() + static_cast<ptrdiff_t>(i);
    if (std::find(names.begin(), first, names[i]) != first)
      throw InvalidArgument("device '" + names[i] + "' is named twice");
  }
  if (names.size() > static_cast<size_t>(kMostRanks))
    throw InvalidArgument(std::to_string(names.size()) + " devices, expected at most " + std::to_string(kMostRanks));
  return names;
}

std::vector<double> checked_shares(std::vector<double> shares, size_t n_devices) {
  if (shares.empty()) return std::vector<double>(n_devices, 1.0);
  for (size_t i = n_devices; i < shares.size(); ++i)
    if (shares[i] != 0)
      throw InvalidArgument("the tensor split has a share for device " + std::to_string(i + 1) + " of " +
                            std::to_string(n_devices));
  shares.resize(n_devices, 0.0);
  (void)Splitter(shares);  // checks the values
  return shares;
}

std::string share_text(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", share);
  return text;
}

}  // namespace

struct Placement::Rule {
  std::regex pattern;
  std::optional<int32_t> rank;  // none: host memory
  std::string text;
};

std::vector<std::string> available_devices() {
  std::vector<std::string> names = cpu_devices();
  for (std::string& name : available_cuda_devices()) names.push_back(std::move(name));
  return names;
}

Placement::Placement(PlacementParams params)
    : mode_(split_mode(params.split_mode, params.devices.size())),
      devices_(checked_devices(std::move(params.devices))) {
  if (mode_ == SplitMode::none &&
      (params.main_device < 0 || params.main_device >= static_cast<int32_t>(devices_.size())))
    throw InvalidArgument("main device is " + std::to_string(params.main_device) + ", expected 0 to " +
                          std::to_string(devices_.size() - 1));
  shares_ = checked_shares(std::move(params.shares), devices_.size());
  if (mode_ == SplitMode::none) {
    devices_ = {devices_[static_cast<size_t>(params.main_device)]};
    shares_ = {1.0};
  }
  if (devices_.size() == 1) mode_ = SplitMode::none;
  for (TensorOverride& override : params.overrides) {
    Rule rule;
    const auto rank = std::find(devices_.begin(), devices_.end(), override.device);
    if (rank != devices_.end() && devices_.size() > 1)
      rule.rank = static_cast<int32_t>(rank - devices_.begin());
    else if (rank == devices_.end() && override.device != "CPU")
      throw InvalidArgument("tensor override '" + override.pattern + "': device '" + override.device +
                            "' is not one of CPU, " + joined(devices_));
    if (rule.rank && mode_ == SplitMode::layer)
      throw InvalidArgument("tensor override '" + override.pattern + "': device '" + override.device +
                            "' is one of several that have whole layers; single tensors are sent to a device in split "
                            "mode 'tensor'");
    try {
      rule.pattern = std::regex(override.pattern);
    } catch (const std::regex_error& error) {
      throw InvalidArgument("tensor override '" + override.pattern + "': not a regular expression: " + error.what());
    }
    rule.text = override.pattern + "=" + override.device;
    rules_.push_back(std::move(rule));
  }
}

Placement::~Placement() = default;
Placement::Placement(Placement&&) noexcept = default;

std::optional<int32_t> Placement::override_of(std::string_view tensor) const {
  for (const Rule& rule : rules_)
    if (std::regex_search(tensor.begin(), tensor.end(), rule.pattern)) return rule.rank;
  return std::nullopt;
}

std::string Placement::text() const {
  std::string text = mode_ == SplitMode::none ? "none" : mode_ == SplitMode::layer ? "layer" : "tensor";
  for (size_t r = 0; r < devices_.size(); ++r) text += " " + devices_[r] + ":" + share_text(shares_[r]);
  for (const Rule& rule : rules_)
    if (rule.rank) text += " " + rule.text;
  return text;
}

Shard::Shard(const Placement& placement, int32_t rank)
    : placement_(placement), rank_(rank), splitter_(placement.shares()) {}

std::vector<Shard::Stage> Shard::stages(int32_t layers) {
  if (placement_.mode() != SplitMode::layer) return {{{0, layers}, -1}};
  layers_ = split_layers(placement_.shares(), layers);
  std::vector<Stage> stages;
  for (int32_t r = 0; r < placement_.ranks(); ++r)
    if (layers_[static_cast<size_t>(r)].size() > 0) stages.push_back({layers_[static_cast<size_t>(r)], r});
  layers_[static_cast<size_t>(stages.back().rank)].end = INT32_MAX;
  return stages;
}

bool Shard::has_layer(int32_t layer) const {
  if (placement_.mode() != SplitMode::layer) return true;
  const RowRange mine = layers_[static_cast<size_t>(rank_)];
  return layer >= mine.begin && layer < mine.end;
}

std::optional<int32_t> Shard::owner(int32_t layer, const std::vector<std::string>& tensors) const {
  if (placement_.mode() == SplitMode::layer)
    for (size_t r = 0; r < layers_.size(); ++r)
      if (layer >= layers_[r].begin && layer < layers_[r].end) return static_cast<int32_t>(r);
  const std::optional<int32_t> rank = placement_.override_of(tensors.front());
  for (const std::string& tensor : tensors)
    if (placement_.override_of(tensor) != rank)
      throw InvalidArgument("the tensor overrides part " + tensors.front() + " from " + tensor +
                            "; tensors that are computed together lie on one device");
  return rank;
}

RowRange Shard::items(SplitKind kind, int32_t layer, int32_t items, int32_t per_unit, double item_bytes,
                      const std::vector<std::string>& tensors) {
  if (const auto rank = owner(layer, tensors)) return *rank == rank_ ? RowRange{0, items} : RowRange{};
  return cut_items(splitter_, kind, items, per_unit, item_bytes)[static_cast<size_t>(rank_)];
}

HeadShare Shard::heads(int32_t layer, int32_t heads, int32_t kv_heads, int32_t head_columns, int32_t block,
                       double group_bytes, const std::vector<std::string>& tensors) {
  if (const auto rank = owner(layer, tensors))
    return *rank == rank_ ? HeadShare{{0, heads}, {0, kv_heads}, heads / kv_heads}
                          : HeadShare{{}, {}, heads / kv_heads};
  return split_heads(splitter_, heads, kv_heads, head_columns, block, group_bytes)[static_cast<size_t>(rank_)];
}

RowRange Shard::vocabulary(int32_t rows, const std::string& tensor) {
  if (const auto rank = placement_.override_of(tensor)) return *rank == rank_ ? RowRange{0, rows} : RowRange{};
  if (placement_.mode() != SplitMode::layer)
    return cut_items(splitter_, SplitKind::vocabulary, rows, kVocabularyRows, 1.0)[static_cast<size_t>(rank_)];
  const RowRange mine = layers_[static_cast<size_t>(rank_)];
  return mine.end == INT32_MAX ? RowRange{0, rows} : RowRange{};
}

}  // namespace v100
