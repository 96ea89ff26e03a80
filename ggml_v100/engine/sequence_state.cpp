// Sequences beyond a step: begun as others began, kept in host memory, saved and loaded.
#include <string_view>

#include "base/hash.h"
#include "engine/engine.h"

namespace v100 {

StateIdentity Engine::state_identity() const {
  Fnv1a build, positions;
  build.add(std::string_view(V100_BUILD));
  for (const RopeAngles& angles : ropes_) {
    positions.add(angles.frequency.data(), angles.frequency.size() * sizeof(double));
    positions.add(&angles.magnitude, sizeof angles.magnitude);
  }
  StateIdentity identity{model_->fingerprint(), build.value(), positions.value(), -1, -1};
  if (!kv_shapes_.empty()) {
    identity.type_k = static_cast<int32_t>(kv_shapes_[0].type_k);
    identity.type_v = static_cast<int32_t>(kv_shapes_[0].type_v);
  }
  return identity;
}

PrefixReuse Engine::reuse_prefix(int32_t sequence, std::span<const int32_t> tokens, int32_t most) {
  const std::lock_guard lock(mutex_);
  for (const int32_t token : tokens) check_token(token);
  return prefixes_->reuse(sequence, tokens, most);
}

void Engine::checkpoint(int32_t sequence) {
  const std::lock_guard lock(mutex_);
  prefixes_->checkpoint(sequence);
}

void Engine::release(int32_t sequence) {
  const std::lock_guard lock(mutex_);
  prefixes_->release(sequence);
}

CacheUsage Engine::cache_usage() const {
  const std::lock_guard lock(mutex_);
  return prefixes_->usage();
}

std::vector<std::byte> Engine::save_sequence(int32_t sequence) const {
  const std::lock_guard lock(mutex_);
  return prefixes_->save(sequence, state_identity());
}

void Engine::load_sequence(int32_t sequence, std::span<const std::byte> state) {
  const std::lock_guard lock(mutex_);
  prefixes_->load(sequence, state, state_identity(), model_->text().hyperparameters().vocab);
}

}  // namespace v100
