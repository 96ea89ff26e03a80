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
};

// Names of the devices of this machine: CPU, CPU0 .. CPU7 (a CPU may be several ranks), then CUDA0 and on. Asks the driver.
std::vector<std::string> available_devices();

class Placement {
 public:
  // Throws InvalidArgument naming the device, mode, share or pattern that cannot be.
  explicit Placement(PlacementParams params);
  ~Placement();
  Placement(Placement&&) noexcept;

  SplitMode mode() const { return mode_; }
  int32_t ranks() const { return static_cast<int32_t>(devices_.size()); }
  const std::vector<std::string>& devices() const { return devices_; }  // of the ranks
  const std::vector<double>& shares() const { return shares_; }         // of the ranks, their sum is not 0
  // The rank a tensor is sent to as a whole; nothing for those that no override names, or that go to host memory, where
  // every CPU rank works.
  std::optional<int32_t> override_of(std::string_view tensor) const;
  // "tensor CPU0:1 CPU1:1": two placements with the same text cut a model alike.
  std::string text() const;

 private:
  struct Rule;

  SplitMode mode_;
  std::vector<std::string> devices_;
  std::vector<double> shares_;
  std::vector<Rule> rules_;
};

// One rank's view of a placement while it loads a model. Every rank asks the same questions in the same order.
class Shard {
 public:
  Shard(const Placement& placement, int32_t rank);

  int32_t rank() const { return rank_; }
  bool is_first() const { return rank_ == 0; }
  bool is_last() const { return rank_ + 1 == placement_.ranks(); }
  bool is_whole() const { return placement_.ranks() == 1; }

  // The layers in the order in which ranks compute them: in mode layer one stage per rank that has any, else one for all.
  struct Stage {
    RowRange layers;
    int32_t rank;  // -1: every rank
  };
  std::vector<Stage> stages(int32_t layers);
  // Whether this rank computes in the layer. Layers past the last one (multi-token prediction) belong to the last stage.
  bool has_layer(int32_t layer) const;

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
  std::vector<RowRange> layers_;  // of each rank, mode layer
};

}  // namespace v100
