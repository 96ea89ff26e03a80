// Rotary position angles: scaling (linear, YaRN, longrope), frequency factors, and the tables a ubatch is rotated with.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/hyperparameters.h"
#include "ops/ops.h"

namespace v100 {

// The user's settings; what is not given comes from the file.
struct RopeSettings {
  std::optional<std::string> scaling_type;  // none, linear, yarn, longrope
  std::optional<double> freq_base;
  std::optional<double> freq_scale;  // 1 / factor
  std::optional<int32_t> original_context;
  std::optional<double> yarn_ext_factor;
  std::optional<double> yarn_attn_factor;
  std::optional<double> yarn_beta_fast;
  std::optional<double> yarn_beta_slow;
};

// Angle of pair p at position t: t * frequency[p]. Cosine and sine are multiplied by magnitude.
struct RopeAngles {
  std::vector<double> frequency;
  double magnitude = 1.0;
};

// divisors: one factor per pair (rope_freqs, rope_factors_*), or empty. Throws InvalidArgument for settings out of range.
//   theta_p = base^(-2p / n) / divisor_p, interpolated = s theta_p; YaRN mixes both by a ramp over p between the pairs that
//   turn beta_fast and beta_slow times within the original context (Peng et al., "YaRN", 2023, section 3.2).
RopeAngles rope_angles(const RopeHyperparameters& rope, const RopeSettings& settings, std::span<const float> divisors);

// Cosine and sine of a ubatch, kept between ubatches for their memory.
class RopeTableBuffer {
 public:
  RopeTable fill(const RopeAngles& angles, std::span<const int32_t> positions);

 private:
  std::vector<float> cosine_, sine_;
};

}  // namespace v100
