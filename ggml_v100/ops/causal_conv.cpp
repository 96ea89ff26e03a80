// Causal convolution over the tokens of a sequence, the record's and the ubatch's in one array.
#include "ops/causal_conv.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/math.h"

namespace v100 {

void causal_conv_silu_sequence(Tensor x, const ConvWeight& w, const SequenceRows& sequence, const StateRecords& history,
                               Tensor y) {
  const auto n = static_cast<size_t>(w.channels), n_history = static_cast<size_t>(w.history()) * n;
  const auto [begin, end] = sequence.rows;
  std::vector<float> tokens(n_history + static_cast<size_t>(end - begin) * n, 0.0f);
  if (const float* old = history.at(sequence.state_from)) std::copy_n(old, n_history, tokens.begin());
  std::copy_n(x.row(begin), static_cast<size_t>(end - begin) * n, tokens.begin() + static_cast<ptrdiff_t>(n_history));
  for (int32_t r = begin; r < end; ++r)
    for (size_t c = 0; c < n; ++c) {
      float s = 0;
      for (int32_t t = 0; t < w.taps; ++t)
        s = std::fma(w.data[static_cast<size_t>(t) * n + c],
                     tokens[static_cast<size_t>(r - begin + t * w.dilation) * n + c], s);
      y.row(r)[c] = silu_f32(s);
    }
  std::copy_n(tokens.end() - static_cast<ptrdiff_t>(n_history), n_history, history.at(sequence.state_to));
}

}  // namespace v100
