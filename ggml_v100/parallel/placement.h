// On which devices a model runs and what part of it each gets: the user's words, checked once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/split.h"

namespace v100 {

enum class SplitMode {
  none,    // one device has it all
  layer,   // whole layers, one device after the other
  tensor,  // a part of every layer, all devices at once
};

inline constexpr const char* kHostDevice = "CPU";
// Whether a device computes on the processors of the host. Several such ranks stand in for other devices in tests.
bool is_cpu(std::string_view device);

// Tensors whose name has a match of `pattern` (a regular expression, ECMAScript) lie on `device`.
struct TensorOverride {
  std::string pattern;
  std::string device;
};

struct PlacementParams {
  std::vector<std::string> devices;  // empty: the CPU
  std::string split_mode = "none";   // none, layer, tensor
  std::vector<double> shares;        // of the devices in order; what is missing is 0; empty: equal
  int32_t main_device = 0;           // index into devices, of mode none
  std::vector<TensorOverride> overrides;
  // So many of the last layers lie on the devices, where the output matrix counts as one more layer, the last; the layers
  // before them lie on the host. Nothing: all.
  std::optional<int32_t> device_layers{};
};

// What a placement is made for: a model's layers, and the names of its tensors.
struct PlacedModel {
  int32_t layers = 0;
  int32_t further_blocks = 0;  // after the layers, of multi-token prediction: they go with the last layer
  std::vector<std::string> tensors;
};

// Names of the devices of this machine: CPU, CPU0 .. CPU7 (a CPU may be several ranks), then CUDA0 and on. Asks the driver.
std::vector<std::string> available_devices();

// The host is a rank of its own, the first, if layers or tensors are left to it beside other devices.
//
// Layers are computed in stages (Shard::stages): a layer all of whose tensors lie on one rank by that rank alone. Layers
// that are divided, and those of which single tensors lie elsewhere, are computed by all ranks at once, whose products are
// summed up.
class Placement {
 public:
  // model: may be empty where there is one device only. Throws InvalidArgument naming the device, mode, share or pattern
  // that cannot be.
  explicit Placement(PlacementParams params, const PlacedModel& model = {});
  ~Placement();
  Placement(Placement&&) noexcept;

  SplitMode mode() const { return mode_; }
  int32_t ranks() const { return static_cast<int32_t>(devices_.size()); }
  const std::vector<std::string>& devices() const { return devices_; }  // of the ranks
  const std::vector<double>& shares() const { return shares_; }         // of the ranks, their sum is not 0
  // The rank a tensor is sent to as a whole; nothing for those that no override names, or that stay on the only rank.
  std::optional<int32_t> override_of(std::string_view tensor) const;

  // Of the layer's tensors without an override of their own, and of the output matrix: the rank that has them whole;
  // nothing: they are divided. Further blocks are numbered after the layers.
  std::optional<int32_t> home_of(int32_t layer) const { return at(homes_, layer); }
  std::optional<int32_t> home_of_output() const { return output_home_; }
  // The rank for a drafter of whole blocks, which is not shared out: where the output matrix is, or the first one with a
  // share.
  int32_t rank_of_drafter() const;
  // The rank that computes the layer alone; nothing: all ranks at once.
  std::optional<int32_t> rank_of(int32_t layer) const { return at(alone_, layer); }
  // Whether there are layers that all ranks compute at once.
  bool has_shared_layers() const;
  // "tensor CPU0:1 CPU1:1": two placements with the same text cut a model alike.
  std::string text() const;

 private:
  struct Rule;
  using LayerRanks = std::vector<std::optional<int32_t>>;

  static std::optional<int32_t> at(const LayerRanks& ranks, int32_t layer);
  void add_rules(std::vector<TensorOverride> overrides);
  bool sends_to_host(const PlacedModel& model) const;
  void find_homes(const PlacedModel& model, const std::vector<double>& device_shares);
  void apply_overrides(const PlacedModel& model);

  SplitMode mode_;
  std::vector<std::string> devices_;
  std::vector<double> shares_;
  int32_t host_layers_ = 0;  // the first ones
  std::vector<Rule> rules_;
  LayerRanks homes_, alone_;  // of each layer and further block; empty for one rank
  std::optional<int32_t> output_home_;
};

// One rank's view of a placement while it loads a model. Every rank asks the same questions in the same order.
class Shard {
 public:
  Shard(const Placement& placement, int32_t rank);

  int32_t rank() const { return rank_; }
  bool is_first() const { return rank_ == 0; }
  bool is_last() const { return rank_ + 1 == placement_.ranks(); }
  bool is_whole() const { return placement_.ranks() == 1; }

  // The layers in the order in which ranks compute them.
  struct Stage {
    RowRange layers;
    int32_t rank;  // -1: every rank
  };
  std::vector<Stage> stages(int32_t layers) const;
  // The rank that computes a layer or further block alone; -1: every rank.
  int32_t rank_of(int32_t layer) const { return is_whole() ? 0 : placement_.rank_of(layer).value_or(-1); }
  // Whether this rank computes in the layer.
  bool has_layer(int32_t layer) const;
  // Whether a rank's products in the layer are summands of which others have the rest.
  bool is_partial(int32_t layer) const { return rank_of(layer) < 0; }

  // This rank's of `items`; see cut_items. tensors: names of what is cut, for overrides.
  RowRange items(SplitKind kind, int32_t layer, int32_t items, int32_t per_unit, double item_bytes,
                 const std::vector<std::string>& tensors);
  // This rank's heads; see split_heads.
  HeadShare heads(int32_t layer, int32_t heads, int32_t kv_heads, int32_t head_columns, int32_t block,
                  double group_bytes, const std::vector<std::string>& tensors);
  // This rank's rows of the output matrix.
  RowRange vocabulary(int32_t rows, const std::string& tensor);

 private:
  // The rank that has all of a layer or of these tensors, if one has.
  std::optional<int32_t> owner(int32_t layer, const std::vector<std::string>& tensors) const;

  const Placement& placement_;
  int32_t rank_;
  Splitter splitter_;
};

}  // namespace v100
