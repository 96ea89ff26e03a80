// Base of decorators of Ops: hands every call on to `inner`. A decorator overrides what it adds something to. add_linear is
// not handed on: its linear is one that a decorator may override.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "ops/ops.h"

namespace v100 {

class ForwardingOps : public Ops {
 public:
  explicit ForwardingOps(std::unique_ptr<Ops> inner) : inner_(std::move(inner)) {}

  Tensor linear(Tensor x, const Linear& w) override { return inner_->linear(x, w); }
  void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) override {
    inner_->multi_linear(x, weights, outputs);
  }
  Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) override {
    return inner_->gated_linear(x, gate, up, activation);
  }
  Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                             Activation activation) override {
    return inner_->gated_expert_linear(x, routing, gate, up, activation);
  }
  Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) override {
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
  void add_vector(Tensor x, const VectorWeight& v) override { inner_->add_vector(x, v); }
  void add_scaled_rows(Tensor x, Tensor a, std::span<const int32_t> indices, std::span<const float> factors) override {
    inner_->add_scaled_rows(x, a, indices, factors);
  }
  void activate(Tensor x, Tensor up, Activation activation) override { inner_->activate(x, up, activation); }
  void enter(const Rows& rows) override { inner_->enter(rows); }
  void narrow(std::span<const int32_t> rows) override { inner_->narrow(rows); }
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
  Tensor norm_gate(Tensor x, Tensor gate, const VectorWeight& w, float eps, GateFunction function) override {
    return inner_->norm_gate(x, gate, w, eps, function);
  }
  Tensor block_conv(Tensor x, const BlockConv& w, int32_t place, Tensor own, int32_t block_rows) override {
    return inner_->block_conv(x, w, place, own, block_rows);
  }
  Tensor repeat_streams(Tensor x, int32_t streams) override { return inner_->repeat_streams(x, streams); }
  Tensor norm_streams(Tensor x, int32_t streams, const VectorWeight& w, float eps) override {
    return inner_->norm_streams(x, streams, w, eps);
  }
  void scaled_silu(Tensor x, float factor) override { inner_->scaled_silu(x, factor); }
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
  void rotate_and_append(Tensor q, Tensor k, Tensor v, int32_t heads, const Rotation& rotation, const Rows& rows,
                         const KvLayer& layer) override {
    inner_->rotate_and_append(q, k, v, heads, rotation, rows, layer);
  }
  KeysValues kv_read(RowRange indices, std::span<const PageId> pages, const KvLayer& layer) override {
    return inner_->kv_read(indices, pages, layer);
  }
  Tensor attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) override {
    return inner_->attention(q, rows, layer, heads, scale);
  }
  Tensor gated_attention(Tensor q, Tensor gate, const Rows& rows, const KvLayer& layer, int32_t heads,
                         float scale) override {
    return inner_->gated_attention(q, gate, rows, layer, heads, scale);
  }
  void place(Tensor x, Tensor y, int32_t first) override { inner_->place(x, y, first); }
  Tensor gather_rows(Tensor x, std::span<const int32_t> indices) override { return inner_->gather_rows(x, indices); }
  void copy(Tensor x, Tensor to) override { inner_->copy(x, to); }
  Tensor concatenate(Tensor x, Tensor y) override { return inner_->concatenate(x, y); }
  Tensor previous_rows(Tensor x, const Rows& rows, const StateRecords& last) override {
    return inner_->previous_rows(x, rows, last);
  }
  void submit() override { inner_->submit(); }
  void abandon() override { inner_->abandon(); }
  void all_reduce(Tensor partial) override { inner_->all_reduce(partial); }
  void broadcast(Tensor x, int32_t root) override { inner_->broadcast(x, root); }
  void tap(std::string_view name, int32_t layer, Tensor value) override { inner_->tap(name, layer, value); }
  void read(Tensor x, std::span<float> destination) override { inner_->read(x, destination); }
  Tensor on_host(Tensor x) override { return inner_->on_host(x); }
  std::optional<RowAnswer> look_up(Tensor x, const RowQuery& query) override { return inner_->look_up(x, query); }
  RopeTable place_angles(const RopeTable& table) override { return inner_->place_angles(table); }
  std::shared_ptr<std::byte[]> allocate(size_t bytes) override { return inner_->allocate(bytes); }
  std::shared_ptr<std::byte[]> allocate_on_host(size_t bytes) override { return inner_->allocate_on_host(bytes); }
  void copy_bytes(const std::byte* from, std::byte* to, size_t bytes) override { inner_->copy_bytes(from, to, bytes); }
  void read_bytes(const std::byte* from, std::byte* host, size_t bytes) override {
    inner_->read_bytes(from, host, bytes);
  }
  void write_bytes(const std::byte* host, std::byte* to, size_t bytes) override {
    inner_->write_bytes(host, to, bytes);
  }
  void set_threads(int32_t n_threads) override { inner_->set_threads(n_threads); }
  size_t arena_mark() const override { return inner_->arena_mark(); }
  void arena_release(size_t mark) override { inner_->arena_release(mark); }

 protected:
  Ops& inner() const { return *inner_; }

 private:
  std::unique_ptr<Ops> inner_;
};

}  // namespace v100
