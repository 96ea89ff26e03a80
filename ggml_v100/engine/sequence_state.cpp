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
  return {model_->fingerprint(), build.value(), positions.value(), static_cast<int32_t>(type_k_),
          static_cast<int32_t>(type_v_)};
}

PrefixReuse Engine::reuse_prefix(int32_t sequence, std::span<const int32_t> tokens, int32_t most, int32_t least_chunk) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  for (const int32_t token : tokens) check_token(token);
  if (least_chunk < 0) throw InvalidArgument("least_chunk is " + std::to_string(least_chunk) + ", expected 0 or more");
  if (least_chunk > 0) {
    require_shift();
    memory_.length(sequence);  // throws for an unknown one
    if (most < 0 || static_cast<size_t>(most) > tokens.size())
      throw InvalidArgument("cannot reuse " + std::to_string(most) + " of " + std::to_string(tokens.size()) +
                            " tokens");
    PrefixReuse result;
    if (reuse_chunks(sequence, tokens, most, least_chunk, result)) return result;
  }
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
  ranks_->require_usable();
  prefixes_->load(sequence, state, state_identity(), model_->text().hyperparameters().vocab);
}

}  // namespace v100
