// The observing decorator of Ops. Inputs are copied to the host first, so that it serves every device.
#include "ops/observed.h"

#include <array>
#include <span>
#include <string_view>
#include <utility>

namespace v100 {

namespace {

class ObservedOps final : public Ops {
 public:
  ObservedOps(std::unique_ptr<Ops> inner, InputStatistics& statistics)
      : inner_(std::move(inner)), statistics_(statistics) {}

  Tensor linear(Tensor x, const Linear& w) override {
    observe(x, std::array{&w});
    return inner_->linear(x, w);
  }
  void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) override {
    observe(x, weights);
    inner_->multi_linear(x, weights, outputs);
  }
  Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) override {
    observe(x, std::array{&gate, &up});
    return inner_->gated_linear(x, gate, up, activation);
  }
  Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                             Activation activation) override {
    observe(x, routing, routing.used, std::array{&gate, &up});
    return inner_->gated_expert_linear(x, routing, gate, up, activation);
  }
  Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) override {
    observe(x, routing, 1, std::array{&w});
    return inner_->expert_linear(x, routing, w);
  }

  Tensor create(int32_t rows, int32_t features) override { return inner_->create(rows, features); }
  Tensor embed(std::span<const int32_t> tokens, const EmbeddingTable& table) override {
    return inner_->embed(tokens, table);
  }
  Tensor rms_norm(Tensor x, const VectorWeight& w, float eps) override { return inner_->rms_norm(x, w, eps); }
  Tensor add_rms_norm(Tensor x, Tensor a, const VectorWeight& w, float eps) override {
    return inner_->add_rms_norm(x, a, w, eps);
  }
  void add(Tensor x, Tensor a) override { inner_->add(x, a); }
  void scale(Tensor x, float factor) override { inner_->scale(x, factor); }
  void soft_cap(Tensor x, float cap) override { inner_->soft_cap(x, cap); }
  void norm_rope(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight& w, float eps, const RopeTable& table,
                 RopeLayout layout) override {
    inner_->norm_rope(x, heads, head_dim, w, eps, table, layout);
  }
  void apply_gate(Tensor x, Tensor gate) override { inner_->apply_gate(x, gate); }
  Tensor causal_conv_silu(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history) override {
    return inner_->causal_conv_silu(x, w, rows, history);
  }
  Tensor delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                   const StateRecords& memory) override {
    return inner_->delta_net(qkv, beta, alpha, w, eps, rows, memory);
  }
  void norm_gate(Tensor x, Tensor gate, const VectorWeight& w, float eps, GateFunction function) override {
    inner_->norm_gate(x, gate, w, eps, function);
  }
  Tensor repeat_streams(Tensor x, int32_t streams) override { return inner_->repeat_streams(x, streams); }
  Tensor norm_streams(Tensor x, int32_t streams, const VectorWeight& w, float eps) override {
    return inner_->norm_streams(x, streams, w, eps);
  }
  void scaled_silu(Tensor x, float factor) override { inner_->scaled_silu(x, factor); }
  Tensor block_conv(Tensor x, const BlockConv& w, int32_t place, Tensor own, int32_t block_rows) override {
    return inner_->block_conv(x, w, place, own, block_rows);
  }
  Tensor mix_streams(Tensor x, Tensor gate, int32_t streams) override { return inner_->mix_streams(x, gate, streams); }
  void add_to_streams(Tensor x, Tensor y, Tensor inject) override { inner_->add_to_streams(x, y, inject); }
  Tensor gate_memory(Tensor key, Tensor query, Tensor value) override { return inner_->gate_memory(key, query, value); }
  void append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                    const KvLayer& index) override {
    inner_->append_index(keys, w, eps, angles, rows, index);
  }
  BlockChoice choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most) override {
    return inner_->choose_blocks(q, rows, index, heads, most);
  }
  Tensor sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer, int32_t heads,
                          float scale) override {
    return inner_->sparse_attention(q, rows, choice, layer, heads, scale);
  }
  Routing route(Tensor logits, int32_t used) override { return inner_->route(logits, used); }
  Tensor mix_experts(Tensor x, const Routing& routing) override { return inner_->mix_experts(x, routing); }
  void rope(Tensor x, int32_t heads, int32_t head_dim, const RopeTable& table, RopeLayout layout) override {
    inner_->rope(x, heads, head_dim, table, layout);
  }
  void kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) override {
    inner_->kv_append(k, v, rows, layer);
  }
  KeysValues kv_read(RowRange indices, std::span<const PageId> pages, const KvLayer& layer) override {
    return inner_->kv_read(indices, pages, layer);
  }
  Tensor attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) override {
    return inner_->attention(q, rows, layer, heads, scale);
  }
  void place(Tensor x, Tensor y, int32_t first) override { inner_->place(x, y, first); }
  Tensor gather_rows(Tensor x, std::span<const int32_t> indices) override { return inner_->gather_rows(x, indices); }
  void all_reduce(Tensor partial) override { inner_->all_reduce(partial); }
  void broadcast(Tensor x, int32_t root) override { inner_->broadcast(x, root); }
  void tap(std::string_view name, int32_t layer, Tensor value) override { inner_->tap(name, layer, value); }
  void read(Tensor x, std::span<float> destination) override { inner_->read(x, destination); }
  void set_threads(int32_t n_threads) override { inner_->set_threads(n_threads); }
  size_t arena_mark() const override { return inner_->arena_mark(); }
  void arena_release(size_t mark) override { inner_->arena_release(mark); }

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
    for (const ExpertLinear* w : weights) {
      if (w->name.empty()) continue;
      InputSums& sums = sums_of(w->name, static_cast<int32_t>(w->experts.size()), x.features);
      for (int32_t slot = 0; slot < routing.slots(); ++slot) add_row(sums, routing.expert[slot], slot / slots_per_row);
    }
  }

  void read_input(Tensor x) {
    host_.resize(static_cast<size_t>(x.size()));
    inner_->read(x, host_);
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

  std::unique_ptr<Ops> inner_;
  InputStatistics& statistics_;
  std::vector<float> host_;  // the input being observed
};

}  // namespace

std::unique_ptr<Ops> observe_inputs(std::unique_ptr<Ops> inner, InputStatistics& statistics) {
  return std::make_unique<ObservedOps>(std::move(inner), statistics);
}

}  // namespace v100
