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

  Tensor create(int32_t rows, int32_t features) override { return inner_->create(rows, features); }
  Tensor embed(std::span<const int32_t> tokens, const EmbeddingTable& table) override {
    return inner_->embed(tokens, table);
  }
  Tensor rms_norm(Tensor x, const VectorWeight& w, float eps) override { return inner_->rms_norm(x, w, eps); }
  Tensor add_rms_norm(Tensor x, Tensor a, const VectorWeight& w, float eps) override {
    return inner_->add_rms_norm(x, a, w, eps);
  }
  void add(Tensor x, Tensor a) override { inner_->add(x, a); }
  void rope(Tensor x, int32_t heads, int32_t head_dim, const RopeTable& table, RopeLayout layout) override {
    inner_->rope(x, heads, head_dim, table, layout);
  }
  void kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) override {
    inner_->kv_append(k, v, rows, layer);
  }
  Tensor attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) override {
    return inner_->attention(q, rows, layer, heads, scale);
  }
  Tensor gather_rows(Tensor x, std::span<const int32_t> indices) override { return inner_->gather_rows(x, indices); }
  void all_reduce(Tensor partial) override { inner_->all_reduce(partial); }
  void tap(std::string_view name, int32_t layer, Tensor value) override { inner_->tap(name, layer, value); }
  void read(Tensor x, std::span<float> destination) override { inner_->read(x, destination); }
  void set_threads(int32_t n_threads) override { inner_->set_threads(n_threads); }
  size_t arena_mark() const override { return inner_->arena_mark(); }
  void arena_release(size_t mark) override { inner_->arena_release(mark); }

 private:
  void observe(Tensor x, std::span<const Linear* const> weights) {
    if (x.rows < kLeastObservedRows) return;
    host_.resize(static_cast<size_t>(x.size()));
    inner_->read(x, host_);
    for (const Linear* w : weights)
      if (!w->name.empty()) add_rows(statistics_[w->name], x.rows, x.features);
  }

  void add_rows(InputSums& sums, int32_t rows, int32_t features) const {
    sums.features = features;
    sums.squares.resize(static_cast<size_t>(features));
    sums.n_rows.resize(1);
    const float* x = host_.data();
    for (int32_t r = 0; r < rows; ++r, x += features)
      for (int32_t c = 0; c < features; ++c) sums.squares[static_cast<size_t>(c)] += static_cast<double>(x[c]) * x[c];
    sums.n_rows[0] += rows;
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
