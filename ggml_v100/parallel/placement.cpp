// Reading of placements, and what a rank learns from one.
#include "parallel/placement.h"

#include <algorithm>
#include <charconv>
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

// Layer of a tensor named "blk.<layer>.*"; nothing for others.
std::optional<int32_t> layer_of(std::string_view tensor) {
  constexpr std::string_view kPrefix = "blk.";
  int32_t layer = 0;
  if (!tensor.starts_with(kPrefix)) return std::nullopt;
  const char* first = tensor.data() + kPrefix.size();
  if (std::from_chars(first, tensor.data() + tensor.size(), layer).ptr == first || layer < 0) return std::nullopt;
  return layer;
}

std::string share_text(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", share);
  return text;
}

}  // namespace

struct Placement::Rule {
  std::regex pattern;
  std::string device;
  std::optional<int32_t> rank;  // none: there is one rank, or no tensor is for the host
  std::string text;

  bool matches(std::string_view tensor) const { return std::regex_search(tensor.begin(), tensor.end(), pattern); }
};

std::vector<std::string> available_devices() {
  std::vector<std::string> names = cpu_devices();
  for (std::string& name : available_cuda_devices()) names.push_back(std::move(name));
  return names;
}

bool is_cpu(std::string_view device) { return device.starts_with(kHostDevice); }

Placement::Placement(PlacementParams params, const PlacedModel& model)
    : mode_(split_mode(params.split_mode, params.devices.size())),
      devices_(checked_devices(std::move(params.devices))) {
  if (mode_ == SplitMode::none &&
      (params.main_device < 0 || params.main_device >= static_cast<int32_t>(devices_.size())))
    throw InvalidArgument("main device is " + std::to_string(params.main_device) + ", expected 0 to " +
                          std::to_string(devices_.size() - 1));
  std::vector<double> device_shares = checked_shares(std::move(params.shares), devices_.size());
  if (mode_ == SplitMode::none) {
    devices_ = {devices_[static_cast<size_t>(params.main_device)]};
    device_shares = {1.0};
  }
  const int32_t units = model.layers + 1;
  const int32_t on_devices = std::clamp(params.device_layers.value_or(units), 0, units);
  host_layers_ = std::min(model.layers, units - on_devices);
  if (on_devices == 0) {
    devices_ = {kHostDevice};
    device_shares = {1.0};
  }
  shares_ = device_shares;
  add_rules(std::move(params.overrides));
  const bool has_host = std::find(devices_.begin(), devices_.end(), kHostDevice) != devices_.end();
  if (!has_host && (host_layers_ > 0 || sends_to_host(model))) {
    devices_.insert(devices_.begin(), kHostDevice);
    shares_.insert(shares_.begin(), 0.0);
  }
  if (devices_.size() > static_cast<size_t>(kMostRanks))
    throw InvalidArgument(std::to_string(devices_.size()) + " devices, the host one of them, expected at most " +
                          std::to_string(kMostRanks));
  if (devices_.size() == 1)
    mode_ = SplitMode::none;
  else if (mode_ == SplitMode::none)
    mode_ = SplitMode::layer;
  if (devices_.size() == 1) return;
  for (Rule& rule : rules_) {
    const auto rank = std::find(devices_.begin(), devices_.end(), rule.device);
    if (rank != devices_.end()) rule.rank = static_cast<int32_t>(rank - devices_.begin());
  }
  find_homes(model, device_shares);
  apply_overrides(model);
}

Placement::~Placement() = default;
Placement::Placement(Placement&&) noexcept = default;

void Placement::add_rules(std::vector<TensorOverride> overrides) {
  for (TensorOverride& override : overrides) {
    Rule rule;
    if (override.device != kHostDevice &&
        std::find(devices_.begin(), devices_.end(), override.device) == devices_.end())
      throw InvalidArgument("tensor override '" + override.pattern + "': device '" + override.device +
                            "' is not one of " + kHostDevice + ", " + joined(devices_));
    try {
      rule.pattern = std::regex(override.pattern);
    } catch (const std::regex_error& error) {
      throw InvalidArgument("tensor override '" + override.pattern + "': not a regular expression: " + error.what());
    }
    rule.text = override.pattern + "=" + override.device;
    rule.device = std::move(override.device);
    rules_.push_back(std::move(rule));
  }
}

bool Placement::sends_to_host(const PlacedModel& model) const {
  for (const std::string& tensor : model.tensors) {
    const auto rule = std::find_if(rules_.begin(), rules_.end(), [&](const Rule& r) { return r.matches(tensor); });
    if (rule != rules_.end() && rule->device == kHostDevice) return true;
  }
  return false;
}

// The first layers are the host's. The output matrix goes with the last layer, or, where no layer is left for the devices,
// to the last of them.
void Placement::find_homes(const PlacedModel& model, const std::vector<double>& device_shares) {
  const auto host = static_cast<int32_t>(std::find(devices_.begin(), devices_.end(), kHostDevice) - devices_.begin());
  homes_.assign(static_cast<size_t>(host_layers_), host);
  const int32_t on_devices = model.layers - host_layers_;
  if (mode_ == SplitMode::tensor) {
    homes_.resize(static_cast<size_t>(model.layers));
  } else {
    const auto first_device = static_cast<int32_t>(shares_.size() - device_shares.size());
    const std::vector<RowRange> layers = split_layers(device_shares, on_devices);
    for (size_t d = 0; d < layers.size(); ++d) {
      const int32_t rank = first_device + static_cast<int32_t>(d);
      homes_.insert(homes_.end(), static_cast<size_t>(layers[d].size()), rank);
      if (device_shares[d] > 0 && (layers[d].size() > 0 || on_devices == 0)) output_home_ = rank;
    }
  }
  homes_.insert(homes_.end(), static_cast<size_t>(model.further_blocks), at(homes_, model.layers));
}

void Placement::apply_overrides(const PlacedModel& model) {
  std::vector<std::vector<std::optional<int32_t>>> ranks_of_layer(homes_.size());
  if (!rules_.empty()) {
    for (const std::string& tensor : model.tensors) {
      const std::optional<int32_t> layer = layer_of(tensor);
      if (!layer || static_cast<size_t>(*layer) >= homes_.size()) continue;
      const std::optional<int32_t> override = override_of(tensor);
      ranks_of_layer[static_cast<size_t>(*layer)].push_back(override ? override : home_of(*layer));
    }
  }
  alone_ = homes_;
  for (size_t layer = 0; layer < homes_.size(); ++layer) {
    const auto& ranks = ranks_of_layer[layer];
    if (ranks.empty()) continue;
    const bool is_one =
        std::all_of(ranks.begin(), ranks.end(), [&](const auto& rank) { return rank == ranks.front(); });
    alone_[layer] = is_one ? ranks.front() : std::nullopt;
    if (is_one) homes_[layer] = ranks.front();
  }
}

std::optional<int32_t> Placement::at(const LayerRanks& ranks, int32_t layer) {
  return ranks.empty() ? std::nullopt : ranks[std::min(static_cast<size_t>(layer), ranks.size() - 1)];
}

int32_t Placement::rank_of_drafter() const {
  if (output_home_) return *output_home_;
  const auto first = std::find_if(shares_.begin(), shares_.end(), [](double share) { return share > 0; });
  return first == shares_.end() ? 0 : static_cast<int32_t>(first - shares_.begin());
}

bool Placement::has_shared_layers() const {
  return std::find(alone_.begin(), alone_.end(), std::nullopt) != alone_.end();
}

std::optional<int32_t> Placement::override_of(std::string_view tensor) const {
  for (const Rule& rule : rules_)
    if (rule.matches(tensor)) return rule.rank;
  return std::nullopt;
}

std::string Placement::text() const {
  std::string text = mode_ == SplitMode::none ? "none" : mode_ == SplitMode::layer ? "layer" : "tensor";
  for (size_t r = 0; r < devices_.size(); ++r) {
    text += " " + devices_[r] + ":";
    if (mode_ == SplitMode::layer)  // shares may be bytes that were free at the moment
      text += std::to_string(std::count(homes_.begin(), homes_.end(), static_cast<int32_t>(r)));
    else
      text += share_text(shares_[r]);
  }
  if (host_layers_ > 0) text += " host:" + std::to_string(host_layers_);
  for (const Rule& rule : rules_)
    if (rule.rank) text += " " + rule.text;
  return text;
}

Shard::Shard(const Placement& placement, int32_t rank)
    : placement_(placement), rank_(rank), splitter_(placement.shares()) {}

std::vector<Shard::Stage> Shard::stages(int32_t layers) const {
  std::vector<Stage> stages;
  for (int32_t layer = 0; layer < layers; ++layer) {
    const int32_t rank = rank_of(layer);
    if (stages.empty() || stages.back().rank != rank) stages.push_back({{layer, layer}, rank});
    stages.back().layers.end = layer + 1;
  }
  return stages;
}

bool Shard::has_layer(int32_t layer) const { return is_partial(layer) || rank_of(layer) == rank_; }

std::optional<int32_t> Shard::owner(int32_t layer, const std::vector<std::string>& tensors) const {
  const auto rank_of = [&](const std::string& tensor) {
    const std::optional<int32_t> rank = placement_.override_of(tensor);
    return rank ? rank : placement_.home_of(layer);
  };
  const std::optional<int32_t> rank = rank_of(tensors.front());
  for (const std::string& tensor : tensors)
    if (rank_of(tensor) != rank)
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
  std::optional<int32_t> rank = placement_.override_of(tensor);
  if (!rank) rank = placement_.home_of_output();
  if (rank) return *rank == rank_ ? RowRange{0, rows} : RowRange{};
  return cut_items(splitter_, SplitKind::vocabulary, rows, kVocabularyRows, 1.0)[static_cast<size_t>(rank_)];
}

}  // namespace v100
