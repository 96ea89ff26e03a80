// Loads a model for measure and adds up what an engine would allocate.
#include "engine/memory_needs.h"

#include <algorithm>

#include "base/thread_pool.h"
#include "engine/pool_sizes.h"
#include "engine/rank.h"
#include "engine/rank_models.h"
#include "memory/state_pool.h"

namespace v100 {

namespace {

// The widest moments of a forward pass: a layer's attention, or its feed-forward, beside the residual stream and its norm;
// after the layers the logits. Values of f32, and a quarter more for what operations need inside. On CPUs ubatches of 512
// rows took 0.8 to 0.9 times as much (shapes of Qwen3.8-27B, Qwen3.5-35B-A3B, SmolLM2).
size_t compute_bytes(const TextModel& text, int64_t n_ubatch, int64_t n_outputs) {
  const Hyperparameters& hp = text.hyperparameters();
  int64_t widest = 0;
  for (size_t layer = 0; layer < hp.heads.size(); ++layer) {
    const int64_t attention = int64_t{hp.heads[layer]} * (hp.head_dim_k + hp.head_dim_v) * 2 +
                              int64_t{hp.kv_heads[layer]} * (hp.head_dim_k + hp.head_dim_v);
    const int64_t expert = hp.experts > 0 && hp.expert_ffn[layer] > 0 ? hp.expert_ffn[layer] : hp.ffn[layer];
    int64_t feed_forward = 3 * expert;
    if (hp.experts > 0)
      feed_forward = hp.experts_used * (3 * expert + 2 * int64_t{hp.hidden}) + int64_t{3} * hp.shared_expert_ffn;
    widest = std::max({widest, attention, feed_forward});
  }
  for (const StateShape& shape : text.state_shapes()) {
    // A delta net's convolution has as many channels as its projections have values; its record holds some rows of them.
    widest = std::max(widest, std::min<int64_t>(shape.values, int64_t{8} * hp.hidden));
  }
  const int64_t values =
      n_ubatch * (widest + 6 * int64_t{hp.hidden}) + n_outputs * (int64_t{text.vocabulary().size()} + hp.hidden);
  return static_cast<size_t>(values + values / 4) * sizeof(float);
}

}  // namespace

MemoryNeeds::MemoryNeeds(const ModelParams& params)
    : params_(params),
      file_(open_files(params)),
      drafter_(open_drafter(params)),
      metadata_(file_, params.kv_overrides),
      hyperparameters_(read_hyperparameters(metadata_)) {}

const Backend& MemoryNeeds::backend(const std::string& device) {
  std::unique_ptr<Backend>& backend = backends_[device];
  if (backend == nullptr) backend = create_backend(device, params_.isa);
  return *backend;
}

std::vector<RankNeeds> MemoryNeeds::of(const PlacementParams& asked, const EngineParams& engine) {
  ModelParams params = params_;
  params.placement = asked;
  const Placement placement = place(params, *file_, metadata_);
  ThreadPool pool(1);
  std::vector<const Backend*> backends;
  for (const std::string& device : placement.devices()) backends.push_back(&backend(device));
  const ModelFiles files{file_, drafter_, params.load_mtp, false};
  const std::vector<RankModel> ranks = load_ranks(files, metadata_, placement, backends, pool, LoadFor::measure);
  std::vector<const TextModel*> all;
  for (const RankModel& rank : ranks) all.push_back(rank.text.get());
  const int32_t n_pages = pool_pages(rounded_context(*all[0], engine.n_ctx), engine.n_seq_max);
  const int32_t window = kept_window(all, engine.swa_full);
  const int32_t n_window_pages = window_pool_pages(window, n_pages, engine.n_seq_max);
  const StatePool states(engine.n_seq_max);
  std::vector<RankNeeds> needs;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const TextModel& text = *all[rank];
    const std::vector<KvShape> shapes = typed_shapes(text, cache_type("type_k", engine.type_k),
                                                     cache_type("type_v", engine.type_v), n_window_pages > 0);
    RankNeeds& need = needs.emplace_back();
    need.device = placement.devices()[rank];
    need.weights = ranks[rank].packed_bytes + ranks[rank].vector_bytes;
    const RankSizes sizes = rank_sizes(text, *backends[rank], shapes);
    need.kv =
        static_cast<size_t>(n_pages) * sizes.page_bytes + static_cast<size_t>(n_window_pages) * sizes.window_page_bytes;
    need.states = static_cast<size_t>(states.n_slots()) * sizes.state_bytes;
    const bool is_idle = need.weights == 0;
    if (!is_idle) need.compute = compute_bytes(text, std::min(engine.n_ubatch, engine.n_batch), engine.n_seq_max);
  }
  return needs;
}

}  // namespace v100
