// Reference operations: each is the contract of ops/ops.h written down once more, in scalar loops.
#include "ops/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "base/thread_pool.h"
#include "ops/arena.h"
#include "ops/causal_conv.h"
#include "ops/delta_net.h"
#include "ops/host.h"
#include "ops/reference_blocks.h"
#include "ops/routing.h"
#include "ops/row_moves.h"
#include "ops/sparse_attention.h"
#include "ops/streams.h"
#include "quants/decode.h"

namespace v100 {

namespace {

// Weights unpacked to the plainest form: integer codes with group scales, or f32 values.
class ReferenceWeight final : public LinearWeight {
 public:
  ReferenceWeight(QuantType type, int32_t in_features, int32_t out_features, const std::byte* rows, float scale)
      : LinearWeight(type, in_features, out_features, scale) {
    const int64_t row_size = row_bytes(traits(type), in_features);
    if (has_integer_path(type)) {
      integer = unpack_integer_rows(type, rows, in_features, out_features);
    } else {
      values.resize(static_cast<size_t>(in_features) * out_features);
      for (int64_t n = 0; n < out_features; ++n)
        decode(type, rows + n * row_size, &values[static_cast<size_t>(n * in_features)], in_features);
    }
  }
  size_t bytes() const override {
    return values.size() * sizeof(float) + integer.codes.size() +
           (integer.scales.size() + integer.minimums.size()) * sizeof(float);
  }

  IntegerRows integer;        // when has_integer_path(type)
  std::vector<float> values;  // else [out, in]
};

float dot_integer(const IntegerRows& w, int64_t n, int32_t in_features, const QuantizedRow& x) {
  float y = 0;
  const int32_t groups = in_features / w.group;
  for (int32_t g = 0; g < groups; ++g) {
    const int8_t* q = &w.codes[static_cast<size_t>(n * in_features + g * w.group)];
    const int8_t* p = &x.codes[static_cast<size_t>(g * w.group)];
    int32_t sum = 0;
    for (int32_t i = 0; i < w.group; ++i) sum += q[i] * p[i];
    const size_t block = static_cast<size_t>(g * w.group / 32);
    const size_t group = static_cast<size_t>(n * groups + g);
    y = std::fma(w.scales[group] * x.scale[block], static_cast<float>(sum), y);
    if (!w.minimums.empty()) y = std::fma(w.minimums[group], x.sum[static_cast<size_t>(g)], y);
  }
  return y;
}

class ReferenceOps final : public HostOps {
 public:
  ReferenceOps(const ThreadSettings& threads, RankSeat seat) : pool_(threads), seat_(seat) {}

  Tensor create(int32_t rows, int32_t features) override {
    seat_.beat();
    return arena_.create(rows, features);
  }

  Tensor embed(std::span<const int32_t> tokens, const EmbeddingTable& table) override {
    Tensor y = create(static_cast<int32_t>(tokens.size()), table.features);
    const int64_t size = row_bytes(traits(table.type), table.features);
    for (int32_t r = 0; r < y.rows; ++r)
      decode(table.type, table.rows + tokens[static_cast<size_t>(r)] * size, y.row(r), table.features);
    return y;
  }

  Tensor rms_norm(Tensor x, const VectorWeight& w, float eps) override {
    Tensor y = create(x.rows, x.features);
    for (int32_t r = 0; r < x.rows; ++r) {
      float partial[16] = {};
      for (int32_t i = 0; i < x.features; ++i) partial[i % 16] = std::fma(x.row(r)[i], x.row(r)[i], partial[i % 16]);
      const float scale = 1.0f / std::sqrt(sum_of_16(partial) / static_cast<float>(x.features) + eps);
      for (int32_t i = 0; i < x.features; ++i) y.row(r)[i] = (x.row(r)[i] * scale) * w.data[i];
    }
    return y;
  }

  Tensor add_rms_norm(Tensor x, Tensor a, const VectorWeight& w, float eps) override {
    add(x, a);
    return rms_norm(x, w, eps);
  }

  void add(Tensor x, Tensor a) override {
    for (int64_t i = 0; i < x.size(); ++i) x.data[i] += a.data[i];
  }

  void add_vector(Tensor x, const VectorWeight& v) override {
    for (int32_t r = 0; r < x.rows; ++r)
      for (int32_t i = 0; i < x.features; ++i) x.row(r)[i] += v.data[i];
  }

  void add_scaled_rows(Tensor x, Tensor a, std::span<const int32_t> indices, std::span<const float> factors) override {
    for (int32_t r = 0; r < a.rows; ++r) {
      float* to = x.row(indices[static_cast<size_t>(r)]);
      for (int32_t i = 0; i < a.features; ++i) to[i] = std::fma(factors[static_cast<size_t>(r)], a.row(r)[i], to[i]);
    }
  }

  void scale(Tensor x, float factor) override {
    for (int64_t i = 0; i < x.size(); ++i) x.data[i] *= factor;
  }

  void soft_cap(Tensor x, float cap) override {
    for (int64_t i = 0; i < x.size(); ++i) {
      const float u = x.data[i] / cap;
      x.data[i] = cap * (1.0f - 2.0f / (1.0f + exp_f32(u + u)));
    }
  }

  Tensor linear(Tensor x, const Linear& layer) override {
    if (layer.weight == nullptr) {
      const Tensor zeros = create(x.rows, layer.out_features);
      std::fill_n(zeros.data, zeros.size(), 0.0f);
      return zeros;
    }
    const auto& w = static_cast<const ReferenceWeight&>(*layer.weight);
    Tensor y = create(x.rows, w.out_features);
    pool_.parallel_for(x.rows, 1, [&](int64_t begin, int64_t end) {
      for (int32_t r = static_cast<int32_t>(begin); r < end; ++r) linear_row(x.row(r), w, layer.bias, y.row(r));
    });
    return y;
  }

  void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) override {
    for (size_t i = 0; i < weights.size(); ++i) outputs[i] = linear(x, *weights[i]);
  }

  Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) override {
    Tensor g = linear(x, gate);
    activate(g, linear(x, up), activation);
    return g;
  }

  void activate(Tensor x, Tensor up, Activation activation) override {
    for (int64_t i = 0; i < x.size(); ++i)
      x.data[i] = (activation == Activation::silu ? silu_f32(x.data[i]) : gelu_f32(x.data[i])) * up.data[i];
  }

  void rope(Tensor x, int32_t heads, int32_t head_dim, const RopeTable& table, RopeLayout layout) override {
    for (int32_t r = 0; r < x.rows; ++r)
      for (int32_t h = 0; h < heads; ++h)
        for (int32_t p = 0; p < table.pairs; ++p) {
          float* head = x.row(r) + h * head_dim;
          float& x0 = layout == RopeLayout::interleaved ? head[2 * p] : head[p];
          float& x1 = layout == RopeLayout::interleaved ? head[2 * p + 1] : head[p + table.pairs];
          const float c = table.cosine[static_cast<int64_t>(r) * table.pairs + p];
          const float s = table.sine[static_cast<int64_t>(r) * table.pairs + p];
          const float a = x0, b = x1;
          x0 = std::fma(a, c, -(b * s));
          x1 = std::fma(a, s, b * c);
        }
  }

  void norm_rope(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight& w, float eps, const RopeTable& table,
                 RopeLayout layout) override {
    const Scope scope(*this);
    const Tensor normed = rms_norm({x.data, x.rows * heads, head_dim}, w, eps);
    std::copy_n(normed.data, normed.size(), x.data);
    rope(x, heads, head_dim, table, layout);
  }

  void kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) override {
    const PageLayout page(layer.shape);
    for (const SequenceRows& sequence : rows.sequences)
      for (int32_t r = sequence.rows.begin; r < sequence.rows.end; ++r) {
        const int32_t index = rows.kv_index[static_cast<size_t>(r)];
        std::byte* base = page_of(layer, sequence, index);
        for (int32_t h = 0; h < layer.shape.kv_heads; ++h) {
          encode_kv(layer.shape.type_k, k.row(r) + h * layer.shape.head_dim_k,
                    base + page.k_offset(h, index % kPageTokens), layer.shape.head_dim_k);
          encode_kv(layer.shape.type_v, v.row(r) + h * layer.shape.head_dim_v,
                    base + page.v_offset(h, index % kPageTokens), layer.shape.head_dim_v);
        }
      }
  }

  KeysValues kv_read(RowRange indices, std::span<const PageId> pages, const KvLayer& layer) override {
    const PageLayout page(layer.shape);
    const KvShape& shape = layer.shape;
    const int32_t count = indices.end - indices.begin, dim_k = shape.head_dim_k, dim_v = shape.head_dim_v;
    const KeysValues read{create(count, shape.kv_heads * dim_k), create(count, shape.kv_heads * dim_v)};
    for (int32_t r = 0; r < count; ++r) {
      const int32_t index = indices.begin + r;
      const std::byte* base =
          layer.pages + static_cast<size_t>(pages[static_cast<size_t>(index / kPageTokens)]) * layer.page_stride_bytes;
      for (int32_t h = 0; h < shape.kv_heads; ++h) {
        decode(shape.type_k, base + page.k_offset(h, index % kPageTokens), read.k.row(r) + h * dim_k, dim_k);
        decode(shape.type_v, base + page.v_offset(h, index % kPageTokens), read.v.row(r) + h * dim_v, dim_v);
      }
    }
    return read;
  }

  Tensor attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) override {
    return attend_rows(q, rows, layer, heads, scale, [&](int32_t r) {
      const RowRange visible = rows.visible[static_cast<size_t>(r)];
      std::vector<int32_t> keys;
      for (int32_t j = visible.begin; j < visible.end; ++j) keys.push_back(j);
      return keys;
    });
  }

  void apply_gate(Tensor x, Tensor gate) override {
    if (x.features == 0) return;
    const int32_t width = x.features / gate.features;
    for (int32_t r = 0; r < x.rows; ++r)
      for (int32_t i = 0; i < x.features; ++i) x.row(r)[i] *= sigmoid_f32(gate.row(r)[i / width]);
  }

  Tensor causal_conv_silu(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history) override {
    Tensor y = create(x.rows, x.features);
    for (const SequenceRows& sequence : rows.sequences) causal_conv_silu_sequence(x, w, sequence, history, y);
    return y;
  }

  Tensor delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                   const StateRecords& memory) override {
    Tensor y = create(qkv.rows, w.value_size());
    for (const SequenceRows& sequence : rows.sequences) {
      DeltaNetMemory state(w, memory, sequence);
      for (int32_t r = sequence.rows.begin; r < sequence.rows.end; ++r)
        state.step(qkv.row(r), beta.row(r), alpha.row(r), eps, y.row(r));
      state.store(memory, sequence);
    }
    return y;
  }

  Tensor norm_gate(Tensor x, Tensor gate, const VectorWeight& w, float eps, GateFunction function) override {
    const Scope scope(*this);
    const Tensor normed = rms_norm({x.data, x.rows * (x.features / w.size), w.size}, w, eps);
    for (int64_t i = 0; i < x.size(); ++i)
      x.data[i] =
          normed.data[i] * (function == GateFunction::silu ? silu_f32(gate.data[i]) : sigmoid_f32(gate.data[i]));
    return x;
  }

  Tensor block_conv(Tensor x, const BlockConv& w, int32_t place, Tensor own, int32_t block_rows) override {
    Tensor y = create(x.rows, x.features);
    const int32_t groups = x.features / w.group;
    for (int32_t r = 0; r < x.rows; ++r)
      for (int32_t c = 0; c < x.features; ++c) {
        float sum = 0;
        for (int32_t t = 0; t < std::min(w.taps, r % block_rows + 1); ++t) {
          const int32_t tap = place * w.taps + t;
          const float factor = w.base.data[tap * x.features + c] + own.row(r)[tap * groups + c / w.group];
          sum = std::fma(factor, x.row(r - t)[c], sum);
        }
        y.row(r)[c] = sum;
      }
    return y;
  }

  Tensor repeat_streams(Tensor x, int32_t streams) override {
    Tensor y = create(x.rows, x.features * streams);
    for (int32_t r = 0; r < x.rows; ++r)
      for (int32_t s = 0; s < streams; ++s) std::copy_n(x.row(r), x.features, y.row(r) + s * x.features);
    return y;
  }

  Tensor norm_streams(Tensor x, int32_t streams, const VectorWeight& w, float eps) override {
    const int32_t n = x.features / streams;
    Tensor y = create(x.rows, x.features);
    for (int32_t r = 0; r < x.rows; ++r)
      for (int32_t at = 0; at < x.features; at += n) {
        const Scope scope(*this);
        const VectorWeight part{{w.data, w.data.get() + at}, n};
        std::copy_n(rms_norm({x.row(r) + at, 1, n}, part, eps).data, n, y.row(r) + at);
      }
    return y;
  }

  void scaled_silu(Tensor x, float factor) override {
    for (int64_t i = 0; i < x.size(); ++i) x.data[i] = silu_f32(x.data[i] * factor);
  }

  Tensor mix_streams(Tensor x, Tensor gate, int32_t streams) override {
    Tensor y = create(x.rows, x.features / streams);
    mix_streams_into(y, x, gate);
    return y;
  }

  void add_to_streams(Tensor x, Tensor y, Tensor inject) override { add_to_streams_in_place(x, y, inject); }

  Tensor gate_memory(Tensor key, Tensor query, Tensor value) override {
    Tensor y = create(key.rows, key.features);
    for (int32_t r = 0; r < y.rows; ++r)
      for (int32_t at = 0; at < y.features; at += value.features) {
        const float gate = memory_gate(key.row(r) + at, query.row(r) + at, value.features);
        for (int32_t i = 0; i < value.features; ++i) y.row(r)[at + i] = gate * value.row(r)[i];
      }
    return y;
  }

  void append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                    const KvLayer& index) override {
    const Scope scope(*this);
    const int32_t pairs = angles.pairs;
    const Tensor key = create(1, keys.features);
    int32_t block = 0;  // row of angles
    for (const SequenceRows& sequence : rows.sequences)
      for (int32_t r = sequence.rows.begin; r < sequence.rows.end; ++r) {
        const int32_t token = rows.kv_index[static_cast<size_t>(r)];
        store_index_key(sequence, index, token, keys.row(r));
        if ((token + 1) % index.shape.block != 0) continue;
        mean_index_key(sequence, index, token, key.data);
        const RopeTable own{angles.cosine + block * pairs, angles.sine + block * pairs, pairs};
        norm_rope(key, 1, key.features, w, eps, own, RopeLayout::halves);
        store_block_key(sequence, index, token, key.data);
        ++block;
      }
  }

  BlockChoice choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most) override {
    most = room_for_blocks(rows, index.shape.block, most);
    const auto n = static_cast<size_t>(q.rows);
    auto* count = reinterpret_cast<int32_t*>(arena_.take(n * sizeof(int32_t)));
    auto* blocks = reinterpret_cast<int32_t*>(arena_.take(n * static_cast<size_t>(most) * sizeof(int32_t)));
    for (const SequenceRows& sequence : rows.sequences)
      for (int32_t r = sequence.rows.begin; r < sequence.rows.end; ++r) {
        const std::vector<float> scores =
            score_blocks(q.row(r), sequence, index, heads, complete_blocks(rows, r, index.shape.block));
        const std::vector<int32_t> best = best_blocks(scores, most);
        count[r] = static_cast<int32_t>(best.size());
        std::ranges::copy(best, blocks + int64_t{r} * most);
      }
    return {q.rows, index.shape.block, most, count, blocks};
  }

  Tensor sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer, int32_t heads,
                          float scale) override {
    return attend_rows(q, rows, layer, heads, scale, [&](int32_t r) {
      std::vector<int32_t> keys;
      for (int32_t i = 0; i < choice.count[r]; ++i)
        for (int32_t j = 0; j < choice.block; ++j)
          keys.push_back(choice.blocks[int64_t{r} * choice.most + i] * choice.block + j);
      const int32_t end = rows.visible[static_cast<size_t>(r)].end;
      for (int32_t j = complete_blocks(rows, r, choice.block) * choice.block; j < end; ++j) keys.push_back(j);
      return keys;
    });
  }

  Routing route(Tensor logits, int32_t used) override {
    const auto n = static_cast<size_t>(logits.rows) * static_cast<size_t>(used), k = static_cast<size_t>(used);
    auto* expert = reinterpret_cast<int32_t*>(arena_.take(n * sizeof(int32_t)));
    auto* weight = reinterpret_cast<float*>(arena_.take(n * sizeof(float)));
    for (int32_t r = 0; r < logits.rows; ++r)
      route_row({logits.row(r), static_cast<size_t>(logits.features)}, {expert + r * used, k}, {weight + r * used, k});
    return {logits.rows, used, expert, weight};
  }

  Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                             Activation activation) override {
    Tensor y = create(routing.slots(), gate.out_features);
    std::fill_n(y.data, y.size(), 0.0f);
    for (int32_t slot = 0; slot < y.rows; ++slot) {
      const Scope scope(*this);
      const auto e = static_cast<size_t>(routing.expert[slot]);
      if (gate.experts[e] == nullptr) continue;
      const Tensor row{x.row(slot / routing.used), 1, x.features};
      const Tensor one = gated_linear(row, {gate.experts[e], {}}, {up.experts[e], {}}, activation);
      std::copy_n(one.data, y.features, y.row(slot));
    }
    return y;
  }

  Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) override {
    Tensor y = create(routing.slots(), w.out_features);
    std::fill_n(y.data, y.size(), 0.0f);
    for (int32_t slot = 0; slot < y.rows; ++slot) {
      const Scope scope(*this);
      const auto& expert = w.experts[static_cast<size_t>(routing.expert[slot])];
      if (expert == nullptr) continue;
      const Tensor one = linear({x.row(slot), 1, x.features}, {expert, {}});
      std::copy_n(one.data, y.features, y.row(slot));
    }
    return y;
  }

  Tensor mix_experts(Tensor x, const Routing& routing) override {
    Tensor y = create(routing.rows, x.features);
    std::fill_n(y.data, y.size(), 0.0f);
    for (int32_t slot = 0; slot < routing.slots(); ++slot)
      for (int32_t i = 0; i < x.features; ++i) {
        float& sum = y.row(slot / routing.used)[i];
        sum = std::fma(routing.weight[slot], x.row(slot)[i], sum);
      }
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
  static void linear_row(const float* x, const ReferenceWeight& w, const VectorWeight& bias, float* y) {
    const bool integer = has_integer_path(w.type);
    const QuantizedRow quantized = integer ? quantize_row(x, w.in_features, w.integer.group) : QuantizedRow{};
    for (int32_t n = 0; n < w.out_features; ++n) {
      float sum = 0;
      if (integer) {
        sum = dot_integer(w.integer, n, w.in_features, quantized);
      } else {
        const float* row = &w.values[static_cast<size_t>(n) * static_cast<size_t>(w.in_features)];
        for (int32_t k = 0; k < w.in_features; ++k) sum = std::fma(row[k], x[k], sum);
      }
      sum *= w.scale;
      y[n] = bias ? sum + bias.data[n] : sum;
    }
  }

  // keys_of(row): the kv indices that the row sees, ascending.
  template <class KeysOf>
  Tensor attend_rows(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale, KeysOf&& keys_of) {
    Tensor y = create(q.rows, heads * layer.shape.head_dim_v);
    if (heads == 0) return y;
    const int32_t group = layer.shape.group_of(heads), skew = layer.shape.skew;
    for (const SequenceRows& sequence : rows.sequences) {
      const int32_t first = sequence.rows.begin;
      pool_.parallel_for(sequence.rows.end - first, 1, [&](int64_t begin, int64_t end) {
        for (int32_t r = first + static_cast<int32_t>(begin); r < first + end; ++r) {
          const std::vector<int32_t> keys = keys_of(r);
          for (int32_t h = 0; h < heads; ++h)
            attend_keys(q.row(r) + h * layer.shape.head_dim_k, sequence, keys, layer, (h + skew) / group, scale,
                        y.row(r) + h * layer.shape.head_dim_v);
        }
      });
    }
    return y;
  }

  ThreadPool pool_;
  RankSeat seat_;
  Arena arena_;
};

class ReferenceBackend final : public HostBackend {
 public:
  std::string_view name() const override { return "reference"; }
  std::shared_ptr<const LinearWeight> pack_linear(QuantType type, int32_t in_features, int32_t out_features,
                                                  const std::byte* rows, ThreadPool&, float scale) const override {
    return std::make_shared<ReferenceWeight>(type, in_features, out_features, rows, scale);
  }
  size_t kv_page_bytes(const KvShape& shape) const override { return PageLayout(shape).bytes(); }
  std::unique_ptr<Ops> create_ops(const ThreadSettings& threads, RankSeat seat) const override {
    return std::make_unique<ReferenceOps>(threads, seat);
  }
};

}  // namespace

std::unique_ptr<Backend> create_reference_backend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace v100
