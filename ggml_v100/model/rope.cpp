// Rotary angles in f64, rounded to f32 once: positions of 500K times a frequency of 1 keep full precision.
#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace v100 {

namespace {

int32_t RopePosition::* channel_of(int32_t pair, const std::array<int32_t, 4>& sections) {
  const int32_t period = sections[0] + sections[1] + sections[2] + sections[3];
  if (period == 0) return &RopePosition::time;
  constexpr int32_t RopePosition::* kInTurn[] = {&RopePosition::time, &RopePosition::height, &RopePosition::width};
  const auto k = pair % period, turn = k % 3;
  return k < 3 * sections[static_cast<size_t>(turn)] ? kInTurn[turn] : &RopePosition::extra;
}

}  // namespace

RopeAngles rope_angles(const RopeHyperparameters& rope, const RopeSettings& settings, std::span<const float> divisors) {
  const std::string type = settings.scaling_type.value_or(rope.scaling_type);
  if (type != "none" && type != "linear" && type != "yarn" && type != "longrope")
    throw InvalidArgument("rope scaling type '" + type + "' is not one of none, linear, yarn, longrope");
  const int32_t n = rope.dimension;
  const double base = settings.freq_base.value_or(rope.freq_base);
  if (!(base > 0) || !std::isfinite(base)) throw InvalidArgument("rope frequency base must be a positive number");
  double scale = settings.freq_scale.value_or(rope.factor > 0 ? 1.0 / rope.factor : 1.0);
  if (type == "none") scale = 1.0;
  if (!(scale > 0) || !std::isfinite(scale)) throw InvalidArgument("rope frequency scale must be a positive number");
  const int32_t context = settings.original_context.value_or(rope.original_context);
  if (context < 1) throw InvalidArgument("original context length must be positive");
  const double ext_factor = settings.yarn_ext_factor.value_or(type == "yarn" ? 1.0 : 0.0);
  const double beta_fast = settings.yarn_beta_fast.value_or(32.0), beta_slow = settings.yarn_beta_slow.value_or(1.0);
  if (!(beta_fast > 0) || !(beta_slow > 0)) throw InvalidArgument("YaRN betas must be positive");

  double magnitude = settings.yarn_attn_factor.value_or(1.0) * rope.attn_factor;
  // The rotation itself contributes 1 + 0.1 ln(1/s); attn_factor is defined so that the net magnitude of plain YaRN is
  // that value once, which is what remains here.
  if (ext_factor != 0.0) magnitude *= scale < 1.0 ? 1.0 + 0.1 * std::log(1.0 / scale) : 1.0;

  const auto correction_pair = [&](double rotations) {
    return n * std::log(context / (2.0 * std::numbers::pi * rotations)) / (2.0 * std::log(base));
  };
  const double low = std::max(0.0, std::floor(correction_pair(beta_fast)));
  const double high = std::min(n - 1.0, std::ceil(correction_pair(beta_slow)));

  RopeAngles angles;
  angles.magnitude = magnitude;
  for (int32_t p = 0; p < n / 2; ++p) {
    const double divisor = divisors.empty() ? 1.0 : divisors[static_cast<size_t>(p)];
    const double theta = std::pow(base, -2.0 * p / n) / divisor;
    const double ramp = (1.0 - std::clamp((p - low) / std::max(0.001, high - low), 0.0, 1.0)) * ext_factor;
    angles.frequency.push_back(scale * theta * (1.0 - ramp) + theta * ramp);
    angles.channel.push_back(channel_of(p, rope.sections));
  }
  return angles;
}

RopeTable RopeTableBuffer::fill(const RopeAngles& angles, std::span<const RopePosition> positions) {
  const size_t pairs = angles.frequency.size();
  cosine_.resize(positions.size() * pairs);
  sine_.resize(positions.size() * pairs);
  for (size_t r = 0; r < positions.size(); ++r)
    for (size_t p = 0; p < pairs; ++p) {
      const double angle = positions[r].*angles.channel[p] * angles.frequency[p];
      cosine_[r * pairs + p] = static_cast<float>(angles.magnitude * std::cos(angle));
      sine_[r * pairs + p] = static_cast<float>(angles.magnitude * std::sin(angle));
    }
  return {cosine_.data(), sine_.data(), static_cast<int32_t>(pairs), static_cast<int32_t>(positions.size())};
}

}  // namespace v100
