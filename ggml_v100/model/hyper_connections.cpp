// Loading and computing of the mixers of residual streams.
#include "model/hyper_connections.h"

#include <array>

#include "base/error.h"
#include "model/keys.h"

namespace v100 {

StreamsShape read_streams_shape(const Metadata& metadata, const Hyperparameters& hp) {
  constexpr int32_t kWidest = 1 << 20;
  const Keys keys(metadata);
  StreamsShape shape;
  shape.hidden = hp.hidden;
  shape.streams = keys.required("hyper_connection.count", 2, 64);
  shape.low_rank = keys.required("hyper_connection.low_rank", 1, kWidest);
  return shape;
}

namespace {

// All but `inject`; the matrices on all ranks, or where the layer of `prefix` is.
MixerWeights load_without_inject(const WeightLoader& weights, const std::string& prefix, const StreamsShape& shape,
                                 bool on_all_ranks) {
  const auto matrix = [&](const char* name, int32_t in_features, int32_t out_features) {
    return on_all_ranks
               ? weights.linear_rows(prefix + name, in_features, out_features, std::array{RowRange{0, out_features}})
               : weights.linear(prefix + name, in_features, out_features);
  };
  MixerWeights w;
  w.streams = shape.streams;
  w.norm = weights.vector(prefix + "norm.weight", shape.width());
  w.down = matrix("down", shape.width(), shape.low_rank);
  w.up = matrix("up", shape.low_rank, shape.width());
  return w;
}

}  // namespace

MixerWeights load_mixer(const WeightLoader& weights, const std::string& prefix, const StreamsShape& shape) {
  MixerWeights w = load_without_inject(weights, prefix, shape, false);
  w.inject = weights.linear(prefix + "inject", shape.width(), shape.streams);
  return w;
}

MixerWeights load_output_mixer(const WeightLoader& weights, const std::string& prefix, const StreamsShape& shape) {
  return load_without_inject(weights, prefix, shape, true);
}

MixedStreams mix(Ops& ops, Tensor x, float eps, const MixerWeights& w) {
  const Tensor n = ops.norm_streams(x, w.streams, w.norm, eps);  // [rows, N]
  const Tensor low = ops.linear(n, w.down);                      // [rows, R]
  ops.scaled_silu(low, 1.0f / static_cast<float>(w.streams));
  const Tensor gate = ops.linear(low, w.up);  // [rows, N]
  MixedStreams mixed;
  mixed.input = ops.mix_streams(n, gate, w.streams);            // [rows, H]
  if (w.inject.weight) mixed.inject = ops.linear(n, w.inject);  // [rows, n]
  return mixed;
}

}  // namespace v100
