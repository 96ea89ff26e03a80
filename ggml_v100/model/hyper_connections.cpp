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

MixerWeights load_mixer(const WeightLoader& weights, const std::string& prefix, const StreamsShape& shape) {
  MixerWeights w;
  w.streams = shape.streams;
  w.norm = weights.vector(prefix + "norm.weight", shape.width());
  w.down = weights.linear(prefix + "down", shape.width(), shape.low_rank);
  w.up = weights.linear(prefix + "up", shape.low_rank, shape.width());
  w.inject = weights.linear(prefix + "inject", shape.width(), shape.streams);
  return w;
}

MixerWeights load_output_mixer(const WeightLoader& weights, const std::string& prefix, const StreamsShape& shape) {
  MixerWeights w;
  w.streams = shape.streams;
  w.norm = weights.vector(prefix + "norm.weight", shape.width());
  w.down = weights.linear_rows(prefix + "down", shape.width(), shape.low_rank, std::array{RowRange{0, shape.low_rank}});
  w.up = weights.linear_rows(prefix + "up", shape.low_rank, shape.width(), std::array{RowRange{0, shape.width()}});
  return w;
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
