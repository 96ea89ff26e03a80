// Sequences beyond a step: begun as others began, kept in host memory, saved and loaded.
#include <string_view>
#include <utility>

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
  Fnv1a model;
  const uint64_t fingerprints[] = {model_->fingerprint(), control_ != nullptr ? control_->fingerprint() : 0};
  model.add(fingerprints, sizeof fingerprints);
  std::vector<uint64_t> adapters;
  for (const auto& adapter : adapters_) adapters.push_back(adapter->fingerprint());
  return {model.value(),
          build.value(),
          positions.value(),
          static_cast<int32_t>(type_k_),
          static_cast<int32_t>(type_v_),
          std::move(adapters)};
}

void Engine::set_adapters(int32_t sequence, std::span<const float> scales) {
  const std::lock_guard lock(mutex_);
  const int32_t held = memory_.length(sequence);  // throws for an unknown one
  AdapterScales normal = normalised_scales(scales, adapters_.size());
  AdapterScales& current = scales_[static_cast<size_t>(sequence)];
  if (held > 0 && normal != current)
    throw InvalidArgument("sequence " + std::to_string(sequence) + " holds " + std::to_string(held) +
                          " tokens that were computed with other adapters");
  current = std::move(normal);
}

AdapterScales Engine::adapters(int32_t sequence) const {
  const std::lock_guard lock(mutex_);
  memory_.length(sequence);  // throws for an unknown one
  return scales_[static_cast<size_t>(sequence)];
}

PrefixReuse Engine::reuse_prefix(int32_t sequence, std::span<const int32_t> tokens, int32_t most,
                                 std::span<const float> scales, int32_t least_chunk) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  for (const int32_t token : tokens) check_token(token);
  const AdapterScales normal = normalised_scales(scales, adapters_.size());
  if (least_chunk < 0) throw InvalidArgument("least_chunk is " + std::to_string(least_chunk) + ", expected 0 or more");
  if (least_chunk > 0) {
    require_shift();
    memory_.length(sequence);  // throws for an unknown one
    if (most < 0 || static_cast<size_t>(most) > tokens.size())
      throw InvalidArgument("cannot reuse " + std::to_string(most) + " of " + std::to_string(tokens.size()) +
                            " tokens");
    PrefixReuse result;
    // Keys and values that were computed with other adapters are of no use.
    if (normal == scales_[static_cast<size_t>(sequence)] && reuse_chunks(sequence, tokens, most, least_chunk, result))
      return result;
  }
  return prefixes_->reuse(sequence, tokens, most, normal);
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
