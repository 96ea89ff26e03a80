// Several residual streams in place of one (Zhu et al., "Hyper-Connections", 2024, in a gated low-rank form): a layer reads
// a mixture of the streams and its output is added to each of them, both by gates computed from the streams themselves.
// The norm in front of the mixture takes the place of the layer's own.
#pragma once

#include <string>

#include "model/loader.h"
#include "model/model.h"

namespace v100 {

// n streams of H features, side by side in a row; N = n H.
struct StreamsShape {
  int32_t streams = 0;   // n, >= 2
  int32_t low_rank = 0;  // R, between the two matrices of the gate
  int32_t hidden = 0;    // H

  int32_t width() const { return streams * hidden; }
};

// `hyper_connection.*`. Throws ModelError naming the key.
StreamsShape read_streams_shape(const Metadata& metadata, const Hyperparameters& hp);

struct MixerWeights {
  int32_t streams = 0;
  VectorWeight norm;  // [N], each stream's part in turn
  Linear down;        // [R, N]
  Linear up;          // [N, R]
  Linear inject;      // [n, N]; without weight in a mixer whose output is not added back
};

// `<prefix>norm`, `<prefix>down`, `<prefix>up` and `<prefix>inject`.
MixerWeights load_mixer(const WeightLoader& weights, const std::string& prefix, const StreamsShape& shape);
// In front of an output matrix: without `inject`, and on all ranks, which have rows of that matrix each.
MixerWeights load_output_mixer(const WeightLoader& weights, const std::string& prefix, const StreamsShape& shape);

struct MixedStreams {
  Tensor input;   // [rows, H], of the layer
  Tensor inject;  // [rows, n], for Ops::add_to_streams; empty where the mixer does not inject
};
MixedStreams mix(Ops& ops, Tensor x, float eps, const MixerWeights& w);

}  // namespace v100
