// Operations that are made of others where a device has nothing better.
#include "ops/ops.h"

namespace v100 {

void Ops::add_linear(Tensor x, Tensor y, const Linear& w) { add(x, linear(y, w)); }

void Ops::rotate_and_append(Tensor q, Tensor k, Tensor v, int32_t heads, const Rotation& rotation, const Rows& rows,
                            const KvLayer& layer) {
  const auto rotate = [&](Tensor x, int32_t n_heads, const VectorWeight* norm) {
    const int32_t head_dim = layer.shape.head_dim_k;
    if (norm != nullptr)
      norm_rope(x, n_heads, head_dim, *norm, rotation.eps, rotation.table, rotation.layout);
    else
      rope(x, n_heads, head_dim, rotation.table, rotation.layout);
  };
  if (heads > 0) rotate(q, heads, rotation.q_norm);
  rotate(k, layer.shape.kv_heads, rotation.k_norm);
  kv_append(k, v, rows, layer);
}

Tensor Ops::gated_attention(Tensor q, Tensor gate, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) {
  const Tensor y = attention(q, rows, layer, heads, scale);
  apply_gate(y, gate);
  return y;
}

std::optional<RowAnswer> Ops::look_up(Tensor, const RowQuery&) { return {}; }

}  // namespace v100
