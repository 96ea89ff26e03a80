// Mixtures of experts.
#include "cuda/ops.h"

namespace v100::cuda {

Routing CudaOps::route(Tensor logits, int32_t used) {
  constexpr int32_t kWarps = 4;
  seat_.beat();
  const size_t n = static_cast<size_t>(logits.rows) * static_cast<size_t>(used);
  auto* expert = take<int32_t>(n);
  auto* weight = take<float>(n);
  launch("routing", "route", {static_cast<uint32_t>((logits.rows + kWarps - 1) / kWarps)}, kWarps * 32,
         RouteParams{.logits = logits.data,
                     .expert = expert,
                     .weight = weight,
                     .rows = logits.rows,
                     .experts = logits.features,
                     .used = used});
  return {logits.rows, used, expert, weight};
}

Tensor CudaOps::gated_expert_linear(Tensor, const Routing&, const ExpertLinear&, const ExpertLinear&, Activation) {
  throw_missing("gated_expert_linear");
}

Tensor CudaOps::expert_linear(Tensor, const Routing&, const ExpertLinear&) { throw_missing("expert_linear"); }

Tensor CudaOps::mix_experts(Tensor x, const Routing& routing) {
  const Tensor y = create(routing.rows, x.features);
  launch_flat("routing", "mix_experts", y.size(),
              MixExpertsParams{.x = x.data,
                               .weight = routing.weight,
                               .y = y.data,
                               .rows = y.rows,
                               .features = y.features,
                               .used = routing.used});
  return y;
}

}  // namespace v100::cuda
