// The observing decorator of Ops. Inputs are copied to the host first, so that it serves every device.
#include "ops/observed.h"

#include <array>
#include <span>
#include <utility>

#include "ops/forwarding.h"

namespace v100 {

namespace {

class ObservedOps final : public ForwardingOps {
 public:
  ObservedOps(std::unique_ptr<Ops> inner, InputStatistics& statistics)
      : ForwardingOps(std::move(inner)), statistics_(statistics) {}

  Tensor linear(Tensor x, const Linear& w) override {
    observe(x, std::array{&w});
    return inner().linear(x, w);
  }
  void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) override {
    observe(x, weights);
    inner().multi_linear(x, weights, outputs);
  }
  Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) override {
    observe(x, std::array{&gate, &up});
    return inner().gated_linear(x, gate, up, activation);
  }
  Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                             Activation activation) override {
    observe(x, routing, routing.used, std::array{&gate, &up});
    return inner().gated_expert_linear(x, routing, gate, up, activation);
  }
  Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) override {
    observe(x, routing, 1, std::array{&w});
    return inner().expert_linear(x, routing, w);
  }

 private:
  void observe(Tensor x, std::span<const Linear* const> weights) {
    if (x.rows < kLeastObservedRows) return;
    read_input(x);
    for (const Linear* w : weights) {
      if (w->name.empty()) continue;
      InputSums& sums = sums_of(w->name, 1, x.features);
      for (int32_t r = 0; r < x.rows; ++r) add_row(sums, 0, r);
    }
  }

  // Slot s of the routing reads row s / slots_per_row.
  void observe(Tensor x, const Routing& routing, int32_t slots_per_row, std::span<const ExpertLinear* const> weights) {
    if (routing.rows < kLeastObservedRows) return;
    read_input(x);
    std::vector<int32_t> expert(static_cast<size_t>(routing.slots()));  // of each slot
    inner().read_bytes(reinterpret_cast<const std::byte*>(routing.expert), reinterpret_cast<std::byte*>(expert.data()),
                       expert.size() * sizeof(int32_t));
    for (const ExpertLinear* w : weights) {
      if (w->name.empty()) continue;
      InputSums& sums = sums_of(w->name, static_cast<int32_t>(w->experts.size()), x.features);
      for (int32_t slot = 0; slot < routing.slots(); ++slot)
        add_row(sums, expert[static_cast<size_t>(slot)], slot / slots_per_row);
    }
  }

  void read_input(Tensor x) {
    host_.resize(static_cast<size_t>(x.size()));
    inner().read(x, host_);
  }

  InputSums& sums_of(const std::string& name, int32_t matrices, int32_t features) {
    InputSums& sums = statistics_[name];
    sums.matrices = matrices;
    sums.features = features;
    sums.squares.resize(static_cast<size_t>(matrices) * static_cast<size_t>(features));
    sums.n_rows.resize(static_cast<size_t>(matrices));
    return sums;
  }

  void add_row(InputSums& sums, int32_t matrix, int32_t row) const {
    const auto n = static_cast<size_t>(sums.features);
    const float* x = host_.data() + static_cast<size_t>(row) * n;
    double* squares = sums.squares.data() + static_cast<size_t>(matrix) * n;
    for (size_t c = 0; c < n; ++c) squares[c] += static_cast<double>(x[c]) * x[c];
    ++sums.n_rows[static_cast<size_t>(matrix)];
  }

  InputStatistics& statistics_;
  std::vector<float> host_;  // the input being observed
};

}  // namespace

std::unique_ptr<Ops> observe_inputs(std::unique_ptr<Ops> inner, InputStatistics& statistics) {
  return std::make_unique<ObservedOps>(std::move(inner), statistics);
}

}  // namespace v100
