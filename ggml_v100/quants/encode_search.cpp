// Chooses the searches for this processor; the positive search, whose steps build on one another, in scalar code.
#include "quants/encode_search.h"

#include <algorithm>

#include "base/cpu_features.h"

namespace v100 {

const EncodeSearches& encode_searches() {
  static const EncodeSearches& chosen = []() -> const EncodeSearches& {
#if defined(__x86_64__)
    const CpuFeatures features = detect_cpu_features();
    if (features.avx512_vnni) return kAvx512Searches;
    if (features.avx2) return kAvx2Searches;
#endif
    return kGenericSearches;
  }();
  return chosen;
}

float search_positive(int n, int max_level, const float* values, const float* weights, uint8_t* levels) {
  const float largest = std::max(0.0f, *std::max_element(values, values + n));
  if (largest < 1e-15f) {
    std::fill_n(levels, n, uint8_t{0});
    return 0.0f;
  }
  const auto error_of = [&](float scale, auto level) {
    float error = 0;
    for (int i = 0; i < n; ++i) {
      const float difference = values[i] - scale * static_cast<float>(level(i));
      error += weights[i] * difference * difference;
    }
    return error;
  };

  float best_inverse = static_cast<float>(max_level) / largest;
  for (int i = 0; i < n; ++i) levels[i] = static_cast<uint8_t>(nearest_int(best_inverse * values[i]));
  float best_error = error_of(1.0f / best_inverse, [&](int i) { return levels[i]; });
  for (int k = -4; k <= 4; ++k) {
    if (k == 0) continue;
    const float inverse = (static_cast<float>(max_level) + 0.1f * static_cast<float>(k)) / largest;
    const float error =
        error_of(1.0f / inverse, [&](int i) { return std::min(max_level, nearest_int(inverse * values[i])); });
    if (error < best_error) {
      best_error = error;
      best_inverse = inverse;
    }
  }

  float products = 0, squares = 0;  // sums of w x l and w l l: the best scale is their quotient
  for (int i = 0; i < n; ++i) {
    const int level = std::min(max_level, nearest_int(best_inverse * values[i]));
    levels[i] = static_cast<uint8_t>(level);
    const auto l = static_cast<float>(level);
    products += weights[i] * values[i] * l;
    squares += weights[i] * l * l;
  }
  for (int sweep = 0; sweep < 5; ++sweep) {
    bool changed = false;
    for (int i = 0; i < n; ++i) {
      const float w = weights[i], old = levels[i];
      float p = products - w * values[i] * old, s = squares - w * old * old;  // without value i
      if (!(p > 0 && s > 0)) continue;
      const int level = std::min(max_level, nearest_int(values[i] * s / p));
      if (level == levels[i]) continue;
      const auto l = static_cast<float>(level);
      p += w * values[i] * l;
      s += w * l * l;
      if (p * p * squares > products * products * s) {
        levels[i] = static_cast<uint8_t>(level);
        products = p;
        squares = s;
        changed = true;
      }
    }
    if (!changed) break;
  }
  return products / squares;
}

}  // namespace v100
