// Ops on the CPU: each operation calls its kernel for rows shared out to threads when there is enough to do.
#include "cpu/backend.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "base/error.h"
#include "base/math.h"
#include "base/thread_pool.h"
#include "cpu/attention.h"
#include "cpu/block_index.h"
#include "cpu/experts.h"
#include "cpu/kernels.h"
#include "cpu/kv_page.h"
#include "cpu/linear.h"
#include "cpu/packed_weight.h"
#include "cpu/recurrent.h"
#include "cpu/sparse_attention.h"
#include "ops/arena.h"
#include "ops/host.h"
#include "ops/routing.h"
#include "ops/row_moves.h"
#include "ops/sparse_attention.h"
#include "ops/streams.h"
#include "quants/decode.h"

namespace v100 {

namespace {

using cpu::Kernels;
using cpu::LinearJob;
using cpu::PackedWeight;

constexpr int64_t kParallelValues = 32 << 10;  // element-wise work below this stays on the calling thread (~2 us)
constexpr size_t kMostWeights = 16;            // of one multi_linear

class CpuOps final : public HostOps {
 public:
  CpuOps(const Kernels& kernels, const ThreadSettings& threads, RankSeat seat)
      : kernels_(kernels), pool_(threads), seat_(seat) {}

  Tensor create(int32_t rows, int32_t features) override {
    seat_.beat();
    return arena_.create(rows, features);
  }

  Tensor embed(std::span<const int32_t> tokens, const EmbeddingTable& table) override {
    Tensor y = create(static_cast<int32_t>(tokens.size()), table.features);
    const int64_t size = row_bytes(traits(table.type), table.features);
    for_rows(y.rows, table.features * 4, [&](int32_t r) {
      decode(table.type, table.rows + tokens[static_cast<size_t>(r)] * size, y.row(r), table.features);
    });
    return y;
  }

  Tensor rms_norm(Tensor x, const VectorWeight& w, float eps) override {
    Tensor y = create(x.rows, x.features);
    for_rows(x.rows, x.features,
             [&](int32_t r) { kernels_.rms_norm(x.row(r), w.data.get(), y.row(r), x.features, eps); });
    return y;
  }

  Tensor add_rms_norm(Tensor x, Tensor a, const VectorWeight& w, float eps) override {
    Tensor y = create(x.rows, x.features);
    for_rows(x.rows, x.features, [&](int32_t r) {
      kernels_.add(x.row(r), a.row(r), x.features);
      kernels_.rms_norm(x.row(r), w.data.get(), y.row(r), x.features, eps);
    });
    return y;
  }

  void add(Tensor x, Tensor a) override {
    for_rows(x.rows, x.features, [&](int32_t r) { kernels_.add(x.row(r), a.row(r), x.features); });
  }

  void add_vector(Tensor x, const VectorWeight& v) override {
    for_rows(x.rows, x.features, [&](int32_t r) { kernels_.add(x.row(r), v.data.get(), x.features); });
  }

  void add_scaled_rows(Tensor x, Tensor a, std::span<const int32_t> indices, std::span<const float> factors) override {
    for_rows(a.rows, a.features, [&](int32_t i) {
      const auto at = static_cast<size_t>(i);
      kernels_.add_scaled(x.row(indices[at]), factors[at], a.row(i), a.features);
    });
  }

  void scale(Tensor x, float factor) override {
    for_rows(x.rows, x.features, [&](int32_t r) { kernels_.scale(x.row(r), factor, x.features); });
  }

  void soft_cap(Tensor x, float cap) override {
    for_rows(x.rows, x.features, [&](int32_t r) { kernels_.soft_cap(x.row(r), cap, x.features); });
  }

  Tensor linear(Tensor x, const Linear& layer) override {
    if (layer.weight == nullptr) return zeros(x.rows, layer.out_features);
    const LinearJob job = whole_job(layer, create(x.rows, layer.weight->out_features));
    cpu::run_linear_jobs({x}, {&job, 1}, kernels_, arena_, pool_);
    return job.y;
  }

  void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) override {
    std::array<LinearJob, kMostWeights> jobs{};
    if (weights.size() > jobs.size())
      throw InvalidArgument("multi_linear of " + std::to_string(weights.size()) + " weights, the limit is " +
                            std::to_string(jobs.size()));
    size_t n_jobs = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (weights[i]->weight == nullptr) {
        outputs[i] = zeros(x.rows, weights[i]->out_features);
        continue;
      }
      outputs[i] = create(x.rows, weights[i]->weight->out_features);
      jobs[n_jobs++] = whole_job(*weights[i], outputs[i]);
    }
    cpu::run_linear_jobs({x}, std::span(jobs).first(n_jobs), kernels_, arena_, pool_);
  }

  Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) override {
    if (gate.weight == nullptr) return zeros(x.rows, gate.out_features);
    Tensor y = create(x.rows, gate.weight->out_features);
    if (packed(gate.weight)->form() == packed(up.weight)->form()) {
      LinearJob job = whole_job(gate, y);
      job.up = packed(up.weight);
      job.up_bias = up.bias.data.get();
      job.activation = activation;
      cpu::run_linear_jobs({x}, {&job, 1}, kernels_, arena_, pool_);
      return y;
    }
    const size_t mark = arena_.mark();  // forms with different column units: one after the other
    const std::array<LinearJob, 2> jobs{whole_job(gate, y), whole_job(up, create(x.rows, y.features))};
    cpu::run_linear_jobs({x}, jobs, kernels_, arena_, pool_);
    combine(y, jobs[1].y, activation);
    arena_.release(mark);
    return y;
  }

  void activate(Tensor x, Tensor up, Activation activation) override { combine(x, up, activation); }

  void rope(Tensor x, int32_t heads, int32_t head_dim, const RopeTable& table, RopeLayout layout) override {
    const auto rotate = layout == RopeLayout::halves ? kernels_.rope_halves : kernels_.rope_interleaved;
    for_rows(x.rows, x.features, [&](int32_t r) {
      const int64_t angles = static_cast<int64_t>(r) * table.pairs;
      for (int32_t h = 0; h < heads; ++h)
        rotate(x.row(r) + h * head_dim, table.cosine + angles, table.sine + angles, table.pairs);
    });
  }

  void norm_rope(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight& w, float eps, const RopeTable& table,
                 RopeLayout layout) override {
    const auto rotate = layout == RopeLayout::halves ? kernels_.rope_halves : kernels_.rope_interleaved;
    for_rows(x.rows, x.features, [&](int32_t r) {
      const int64_t angles = static_cast<int64_t>(r) * table.pairs;
      for (int32_t h = 0; h < heads; ++h) {
        float* head = x.row(r) + h * head_dim;
        kernels_.rms_norm(head, w.data.get(), head, head_dim, eps);
        rotate(head, table.cosine + angles, table.sine + angles, table.pairs);
      }
    });
  }

  void kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) override {
    cpu::append_kv(k, v, rows, layer, kernels_, pool_);
  }

  KeysValues kv_read(RowRange indices, std::span<const PageId> pages, const KvLayer& layer) override {
    const int32_t count = indices.end - indices.begin;
    const KeysValues read{create(count, layer.shape.kv_heads * layer.shape.head_dim_k),
                          create(count, layer.shape.kv_heads * layer.shape.head_dim_v)};
    cpu::read_kv(read, indices, pages, layer, kernels_, pool_);
    return read;
  }

  Tensor attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) override {
    Tensor y = create(q.rows, heads * layer.shape.head_dim_v);
    if (heads == 0) return y;
    cpu::run_attention(q, rows, layer, heads, scale, y, kernels_, arena_, pool_);
    return y;
  }

  void apply_gate(Tensor x, Tensor gate) override {
    if (x.features == 0) return;
    const int32_t width = x.features / gate.features;
    for_rows(x.rows, x.features, [&](int32_t r) {
      if (width == 1) return kernels_.sigmoid_mul(x.row(r), gate.row(r), x.features);
      for (int32_t i = 0; i < gate.features; ++i)
        kernels_.scale(x.row(r) + i * width, sigmoid_f32(gate.row(r)[i]), width);
    });
  }

  Tensor causal_conv_silu(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history) override {
    Tensor y = create(x.rows, x.features);
    cpu::run_causal_conv(x, w, rows, history, y, kernels_, pool_);
    return y;
  }

  Tensor delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                   const StateRecords& memory) override {
    Tensor y = create(qkv.rows, w.value_size());
    cpu::run_delta_net(qkv, beta, alpha, w, eps, rows, memory, y, kernels_, arena_, pool_);
    return y;
  }

  Tensor norm_gate(Tensor x, Tensor gate, const VectorWeight& w, float eps, GateFunction function) override {
    for_rows(x.rows, x.features, [&](int32_t r) {
      for (int32_t at = 0; at < x.features; at += w.size)
        kernels_.rms_norm(x.row(r) + at, w.data.get(), x.row(r) + at, w.size, eps);
      if (function == GateFunction::silu)
        kernels_.silu_mul(gate.row(r), x.row(r), x.row(r), x.features);
      else
        kernels_.sigmoid_mul(x.row(r), gate.row(r), x.features);
    });
    return x;
  }

  Tensor repeat_streams(Tensor x, int32_t streams) override {
    Tensor y = create(x.rows, x.features * streams);
    for_rows(x.rows, y.features, [&](int32_t r) {
      for (int32_t s = 0; s < streams; ++s) std::copy_n(x.row(r), x.features, y.row(r) + s * x.features);
    });
    return y;
  }

  Tensor norm_streams(Tensor x, int32_t streams, const VectorWeight& w, float eps) override {
    Tensor y = create(x.rows, x.features);
    const int32_t n = x.features / streams;
    for_rows(x.rows, x.features, [&](int32_t r) {
      for (int32_t at = 0; at < x.features; at += n)
        kernels_.rms_norm(x.row(r) + at, w.data.get() + at, y.row(r) + at, n, eps);
    });
    return y;
  }

  void scaled_silu(Tensor x, float factor) override {
    for_rows(x.rows, x.features * 4, [&](int32_t r) { kernels_.scaled_silu(x.row(r), factor, x.features); });
  }

  Tensor block_conv(Tensor x, const BlockConv& w, int32_t place, Tensor own, int32_t block_rows) override {
    Tensor y = create(x.rows, x.features);
    const int32_t groups = x.features / w.group;
    for_rows(x.rows, x.features * w.taps, [&](int32_t r) {
      std::fill_n(y.row(r), y.features, 0.0f);
      for (int32_t t = 0; t < std::min(w.taps, r % block_rows + 1); ++t) {
        const int32_t tap = place * w.taps + t;
        for (int32_t g = 0; g < groups; ++g) {
          const int32_t at = g * w.group;
          kernels_.add_shifted(y.row(r) + at, w.base.data.get() + tap * x.features + at, own.row(r)[tap * groups + g],
                               x.row(r - t) + at, w.group);
        }
      }
    });
    return y;
  }

  Tensor mix_streams(Tensor x, Tensor gate, int32_t streams) override {
    Tensor y = create(x.rows, x.features / streams);
    for_rows(x.rows, x.features * 4, [&](int32_t r) {
      std::fill_n(y.row(r), y.features, 0.0f);
      for (int32_t at = 0; at < x.features; at += y.features)
        kernels_.add_gated(y.row(r), gate.row(r) + at, x.row(r) + at, y.features);
      kernels_.scale(y.row(r), 1.0f / static_cast<float>(streams), y.features);
    });
    return y;
  }

  void add_to_streams(Tensor x, Tensor y, Tensor inject) override {
    const float share = 1.0f / static_cast<float>(inject.features);
    for_rows(x.rows, x.features, [&](int32_t r) {
      for (int32_t s = 0; s < inject.features; ++s)
        kernels_.add_scaled(x.row(r) + s * y.features, 2.0f * sigmoid_f32(inject.row(r)[s] * share), y.row(r),
                            y.features);
    });
  }

  Tensor gate_memory(Tensor key, Tensor query, Tensor value) override {
    Tensor y = create(key.rows, key.features);
    for_rows(y.rows, y.features, [&](int32_t r) {
      for (int32_t at = 0; at < y.features; at += value.features) {
        const float dot = kernels_.dot(key.row(r) + at, query.row(r) + at, value.features);
        std::copy_n(value.row(r), value.features, y.row(r) + at);
        kernels_.scale(y.row(r) + at, memory_gate_of(dot, value.features), value.features);
      }
    });
    return y;
  }

  void append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                    const KvLayer& index) override {
    cpu::append_index(keys, w, eps, angles, rows, index, kernels_);
  }

  BlockChoice choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most) override {
    most = room_for_blocks(rows, index.shape.block, most);
    const auto n = static_cast<size_t>(q.rows);
    auto* count = reinterpret_cast<int32_t*>(arena_.take(n * sizeof(int32_t)));
    auto* blocks = reinterpret_cast<int32_t*>(arena_.take(n * static_cast<size_t>(most) * sizeof(int32_t)));
    cpu::choose_blocks(q, rows, index, heads, most, count, blocks, kernels_, arena_, pool_);
    return {q.rows, index.shape.block, most, count, blocks};
  }

  Tensor sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer, int32_t heads,
                          float scale) override {
    Tensor y = create(q.rows, heads * layer.shape.head_dim_v);
    if (heads == 0) return y;
    cpu::run_sparse_attention(q, rows, choice, layer, heads, scale, y, kernels_, arena_, pool_);
    return y;
  }

  Routing route(Tensor logits, int32_t used) override {
    const size_t n = static_cast<size_t>(logits.rows) * static_cast<size_t>(used);
    auto* expert = reinterpret_cast<int32_t*>(arena_.take(n * sizeof(int32_t)));
    auto* weight = reinterpret_cast<float*>(arena_.take(n * sizeof(float)));
    for_rows(logits.rows, logits.features * 4, [&](int32_t r) {
      const auto k = static_cast<size_t>(used), first = static_cast<size_t>(r) * k;
      route_row({logits.row(r), static_cast<size_t>(logits.features)}, {expert + first, k}, {weight + first, k});
    });
    return {logits.rows, used, expert, weight};
  }

  Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                             Activation activation) override {
    Tensor y = create(routing.slots(), gate.out_features);
    const cpu::ExpertSlots slots(routing, gate.experts.size(), routing.used);
    if (form_of(gate) == form_of(up)) {
      run_experts(x, slots, gate, &up, activation, y);
      return y;
    }
    const size_t mark = arena_.mark();
    const Tensor other = create(y.rows, y.features);
    run_experts(x, slots, gate, nullptr, activation, y);
    run_experts(x, slots, up, nullptr, activation, other);
    combine(y, other, activation);
    arena_.release(mark);
    return y;
  }

  Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) override {
    Tensor y = create(routing.slots(), w.out_features);
    run_experts(x, cpu::ExpertSlots(routing, w.experts.size(), 1), w, nullptr, Activation::silu, y);
    return y;
  }

  Tensor mix_experts(Tensor x, const Routing& routing) override {
    Tensor y = create(routing.rows, x.features);
    for_rows(y.rows, x.features * routing.used, [&](int32_t r) {
      std::fill_n(y.row(r), y.features, 0.0f);
      for (int32_t slot = r * routing.used; slot < (r + 1) * routing.used; ++slot)
        kernels_.add_scaled(y.row(r), routing.weight[slot], x.row(slot), x.features);
    });
    return y;
  }

  void place(Tensor x, Tensor y, int32_t first) override {
    for (int32_t r = 0; r < x.rows; ++r) std::copy_n(x.row(r), x.features, y.row(r) + first);
  }

  Tensor gather_rows(Tensor x, std::span<const int32_t> indices) override {
    Tensor y = create(static_cast<int32_t>(indices.size()), x.features);
    for (int32_t r = 0; r < y.rows; ++r) std::copy_n(x.row(indices[static_cast<size_t>(r)]), x.features, y.row(r));
    return y;
  }

  void copy(Tensor x, Tensor to) override { std::copy_n(x.data, x.size(), to.data); }

  Tensor concatenate(Tensor x, Tensor y) override {
    Tensor z = create(x.rows, x.features + y.features);
    concatenate_rows(x, y, z);
    return z;
  }

  Tensor previous_rows(Tensor x, const Rows& rows, const StateRecords& last) override {
    Tensor y = create(x.rows, x.features);
    for (const SequenceRows& sequence : rows.sequences) previous_rows_of(x, sequence, last, y);
    return y;
  }

  void all_reduce(Tensor partial) override { seat_.all_reduce(partial.data, partial.size()); }
  void broadcast(Tensor x, int32_t root) override { seat_.broadcast(root, x.data, x.size()); }

  void set_threads(int32_t n_threads) override { pool_.set_active(n_threads); }

 protected:
  size_t arena_mark() const override { return arena_.mark(); }
  void arena_release(size_t mark) override { arena_.release(mark); }

 private:
  static const PackedWeight* packed(const std::shared_ptr<const LinearWeight>& weight) {
    return static_cast<const PackedWeight*>(weight.get());
  }

  Tensor zeros(int32_t rows, int32_t features) {
    const Tensor y = create(rows, features);
    std::fill_n(y.data, y.size(), 0.0f);
    return y;
  }

  static LinearJob whole_job(const Linear& layer, Tensor y) {
    return {.weight = packed(layer.weight), .bias = layer.bias.data.get(), .rows = {0, y.rows}, .y = y};
  }

  // Of the experts that are here; panels when none is.
  static PackedWeight::Form form_of(const ExpertLinear& w) {
    for (const auto& expert : w.experts)
      if (expert != nullptr) return packed(expert)->form();
    return PackedWeight::Form::panels;
  }

  // y = act(y) * other.
  void combine(Tensor y, Tensor other, Activation activation) {
    const auto kernel = activation == Activation::silu ? kernels_.silu_mul : kernels_.gelu_mul;
    for_rows(y.rows, y.features, [&](int32_t r) { kernel(y.row(r), other.row(r), y.row(r), y.features); });
  }

  // All experts in one call: the rows of each together. y [slots, out].
  void run_experts(Tensor x, const cpu::ExpertSlots& slots, const ExpertLinear& w, const ExpertLinear* up,
                   Activation activation, Tensor y) {
    std::vector<LinearJob> jobs;
    jobs.reserve(std::min(w.experts.size(), slots.slots().size()));
    for (size_t e = 0; e < w.experts.size(); ++e) {
      const RowRange mine = slots.of(e);
      if (mine.begin == mine.end) continue;
      if (w.experts[e] == nullptr) {
        for (int32_t i = mine.begin; i < mine.end; ++i)
          std::fill_n(y.row(slots.slots()[static_cast<size_t>(i)]), y.features, 0.0f);
        continue;
      }
      jobs.push_back({.weight = packed(w.experts[e]),
                      .up = up == nullptr ? nullptr : packed(up->experts[e]),
                      .activation = activation,
                      .rows = mine,
                      .y = y,
                      .y_rows = slots.slots().data()});
    }
    cpu::run_linear_jobs({x, slots.rows()}, jobs, kernels_, arena_, pool_);
  }

  // body(row) for all rows; cost: values touched per row.
  template <class Body>
  void for_rows(int32_t rows, int32_t cost, Body&& body) {
    const auto range = [&](int64_t begin, int64_t end) {
      for (auto r = static_cast<int32_t>(begin); r < end; ++r) body(r);
    };
    if (int64_t{rows} * cost < kParallelValues)
      range(0, rows);
    else
      pool_.parallel_for(rows, std::max<int64_t>(1, rows / (pool_.active() * 4)), range);
  }

  const Kernels& kernels_;
  ThreadPool pool_;
  RankSeat seat_;
  Arena arena_;
};

class CpuBackend final : public HostBackend {
 public:
  explicit CpuBackend(const Kernels& kernels) : kernels_(kernels) {}

  std::string_view name() const override { return kernels_.name; }
  std::shared_ptr<const LinearWeight> pack_linear(QuantType type, int32_t in_features, int32_t out_features,
                                                  const std::byte* rows, ThreadPool& pool, float scale) const override {
    return std::make_shared<PackedWeight>(type, in_features, out_features, rows, scale, pool, memory_);
  }
  size_t packed_bytes(QuantType type, int32_t in_features, int32_t out_features) const override {
    return PackedWeight::bytes(type, in_features, out_features);
  }
  size_t kv_page_bytes(const KvShape& shape) const override { return cpu::KvPage(shape).bytes(); }
  std::unique_ptr<Ops> create_ops(const ThreadSettings& threads, RankSeat seat) const override {
    return std::make_unique<CpuOps>(kernels_, threads, seat);
  }

 private:
  const Kernels& kernels_;
  mutable cpu::WeightMemory memory_;
};

// The kernels this machine can run, best last.
std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> kernels{&cpu::kGenericKernels};
#if defined(__x86_64__)
  const CpuFeatures features = detect_cpu_features();
  if (features.avx2) kernels.push_back(&cpu::kAvx2Kernels);
  if (features.avx512_vnni) kernels.push_back(&cpu::kAvx512Kernels);
#endif
  return kernels;
}

}  // namespace

std::vector<std::string> available_cpu_instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
  return names;
}

std::unique_ptr<Backend> create_cpu_backend(std::string_view instruction_set) {
  std::string names;
  for (const Kernels* kernels : available_kernels()) {
    if (instruction_set == kernels->name) return std::make_unique<CpuBackend>(*kernels);
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw InvalidArgument("CPU instruction set \"" + std::string(instruction_set) +
                        "\" is not available here; expected one of " + names);
}

}  // namespace v100
