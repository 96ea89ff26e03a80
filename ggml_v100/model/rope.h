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

// Where a row stands. Text stands at its index in the sequence in three channels; a patch of an image at the image's index
// in time and at its own row and column. The fourth channel is 0 for both.
struct RopePosition {
  int32_t time = 0, height = 0, width = 0, extra = 0;
};

inline RopePosition text_position(int32_t index) { return {index, index, index, 0}; }

// Angle of pair p: frequency[p] times the position in channel[p]. Cosine and sine are multiplied by magnitude.
struct RopeAngles {
  std::vector<double> frequency;
  std::vector<int32_t RopePosition::*> channel;
  double magnitude = 1.0;
};

// divisors: one factor per pair (rope_freqs, rope_factors_*), or empty. Throws InvalidArgument for settings out of range.
//   theta_p = base^(-2p / n) / divisor_p, interpolated = s theta_p; YaRN mixes both by a ramp over p between the pairs that
//   turn beta_fast and beta_slow times within the original context (Peng et al., "YaRN", 2023, section 3.2).
// Without sections every pair turns with time. With them the channels take turns, time, height, width, until a channel has
// had its number of pairs; what is left over goes to `extra`, and the pattern repeats after as many pairs as there are in all
// sections (the interleaved form of M-RoPE: Bai et al., "Qwen3-VL Technical Report", 2025).
RopeAngles rope_angles(const RopeHyperparameters& rope, const RopeSettings& settings, std::span<const float> divisors);

// Cosine and sine of a ubatch, kept between ubatches for their memory.
class RopeTableBuffer {
 public:
  RopeTable fill(const RopeAngles& angles, std::span<const RopePosition> positions);

 private:
  std::vector<float> cosine_, sine_;
};

}  // namespace v100
