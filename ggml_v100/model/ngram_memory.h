// A memory of n-grams (Cheng et al., "Conditional Memory via Scalable Lookup", 2026, called Engram): the last few tokens,
// hashed, name rows of a very large table, which are read where they lie in the file and added to the residual streams
// through a gate and a short convolution.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/hyper_connections.h"
#include "model/keys.h"
#include "model/ngram_hash.h"

namespace v100 {

// `ple.*`.
struct NgramMemoryHyperparameters {
  int32_t layer = -1;  // whose streams it is added to; -1: the model has none
  NgramHash hash;
  int32_t row_features = 0;
  int32_t taps = 0;  // of the convolution, which steps ngram_size tokens at a time

  int32_t features() const { return hash.hashes() * row_features; }
};

// Throws ModelError naming the key.
NgramMemoryHyperparameters read_ngram_memory_hyperparameters(const Metadata& metadata, const Hyperparameters& hp);

// N and H as in StreamsShape, E the features of all rows of a token.
struct NgramMemoryWeights {
  NgramHash hash;
  EmbeddingTable table;                           // [rows, E / hashes]
  Linear key, value;                              // [N, E], [H, E]
  VectorWeight key_norm, query_norm, value_norm;  // [N]
  ConvWeight conv;                                // [taps, N]
};

NgramMemoryWeights load_ngram_memory(const WeightLoader& weights, const NgramMemoryHyperparameters& memory,
                                     const StreamsShape& streams);

// The convolution's history.
StateShape ngram_memory_state(const NgramMemoryHyperparameters& memory, const StreamsShape& streams);

// Table rows of all tokens of a ubatch, [rows, hashes]. Asks the system to start reading them.
std::vector<int32_t> ngram_rows(const Rows& rows, const NgramMemoryWeights& w);

struct NgramMemoryState {
  StateRecords history;
  KeptInputs* kept = nullptr;  // as in DeltaNetState
  int32_t kept_rows = 0;
};

// Adds what the table has for the rows to their streams x [rows, N].
void recall(Ops& ops, Tensor x, std::span<const int32_t> table_rows, const Rows& rows, const NgramMemoryState& state,
            float eps, const NgramMemoryWeights& w);
// TextModel::replay.
void replay_ngram_memory(Ops& ops, const Rows& rows, const NgramMemoryState& state, const NgramMemoryWeights& w);

}  // namespace v100
