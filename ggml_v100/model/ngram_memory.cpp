// Hashing, reading and injecting of n-gram memory.
#include "model/ngram_memory.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/mapped_file.h"
#include "model/parts.h"

namespace v100 {

namespace {

// The first n elements of an array of integers >= least.
std::vector<uint64_t> require_array(const Metadata& metadata, const std::string& key, int32_t n, int64_t least) {
  const std::optional<std::vector<int64_t>> elements = metadata.find_ints(key, n);
  if (!elements) throw ModelError(key + " is missing");
  if (!metadata.is_array(key)) throw ModelError(key + " is not an array");
  std::vector<uint64_t> values;
  for (const int64_t value : *elements) {
    if (value < least)
      throw ModelError(key + " has " + std::to_string(value) + ", expected at least " + std::to_string(least));
    values.push_back(static_cast<uint64_t>(value));
  }
  return values;
}

}  // namespace

NgramMemoryHyperparameters read_ngram_memory_hyperparameters(const Metadata& metadata, const Hyperparameters& hp) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  const Keys keys(metadata);
  NgramMemoryHyperparameters memory;
  const uint64_t layers = metadata.find_array_size(keys.full("ple.layers")).value_or(0);
  if (layers == 0) return memory;
  if (layers > 1)
    throw ModelError(keys.full("ple.layers") + " has " + std::to_string(layers) + " layers, at most 1 is supported");
  memory.layer = keys.per_layer("ple.layers", 1, {}, 0, hp.layers - 1)[0];
  NgramHash& hash = memory.hash;
  hash.ngram_size = keys.required("ple.ngram_size", 2, 8);
  hash.heads = keys.required("ple.heads_per_ngram", 1, 64);
  if (hash.hashes() > 64)
    throw ModelError(keys.full("ple.heads_per_ngram") + " is " + std::to_string(hash.heads) + ", which makes " +
                     std::to_string(hash.hashes()) + " hashes of a token; at most 64 are supported");
  hash.eos = keys.required("ple.eos_token_id", 0, hp.vocab - 1);
  hash.multipliers = require_array(metadata, keys.full("ple.layer_multipliers"), hash.ngram_size, 0);
  hash.offsets = require_array(metadata, keys.full("ple.head_offsets"), hash.hashes(), 0);
  hash.sizes = require_array(metadata, keys.full("ple.head_vocab_sizes"), hash.hashes(), 1);
  for (size_t i = 0; i < hash.sizes.size(); ++i)
    if (hash.sizes[i] > kMostRows || hash.offsets[i] > kMostRows - hash.sizes[i])
      throw ModelError(keys.full("ple.head_offsets") + " and head_vocab_sizes reach row " +
                       std::to_string(hash.offsets[i]) + " + " + std::to_string(hash.sizes[i]) +
                       ", beyond the limit of " + std::to_string(kMostRows));
  memory.taps = keys.required("ple.conv_kernel", 2, 64);
  memory.row_features = keys.required("embedding_length_per_layer_input", 1, 1 << 16);
  return memory;
}

NgramMemoryWeights load_ngram_memory(const WeightLoader& weights, const NgramMemoryHyperparameters& memory,
                                     const StreamsShape& streams) {
  const std::string prefix = block_prefix(memory.layer) + "ple_";
  uint64_t rows = 0;
  for (size_t i = 0; i < memory.hash.sizes.size(); ++i)
    rows = std::max(rows, memory.hash.offsets[i] + memory.hash.sizes[i]);
  NgramMemoryWeights w;
  w.hash = memory.hash;
  w.table = weights.lazy_table("per_layer_token_embd", memory.row_features, static_cast<int64_t>(rows));
  w.key = weights.linear(prefix + "key", memory.features(), streams.width());
  w.value = weights.linear(prefix + "value", memory.features(), streams.hidden);
  w.key_norm = weights.vector(prefix + "norm_key.weight", streams.width());
  w.query_norm = weights.vector(prefix + "norm_query.weight", streams.width());
  w.value_norm = weights.vector(prefix + "norm_conv.weight", streams.width());
  w.conv =
      weights.convolution(prefix + "conv1d", memory.taps, streams.width(), std::array{RowRange{0, streams.width()}});
  w.conv.dilation = memory.hash.ngram_size;
  return w;
}

StateShape ngram_memory_state(const NgramMemoryHyperparameters& memory, const StreamsShape& streams) {
  return {int64_t{memory.taps - 1} * memory.hash.ngram_size * streams.width()};
}

std::vector<int32_t> ngram_rows(const Rows& rows, const NgramMemoryWeights& w) {
  const auto hashes = static_cast<size_t>(w.hash.hashes());
  std::vector<int32_t> table_rows(static_cast<size_t>(rows.count()) * hashes);
  for (const SequenceRows& sequence : rows.sequences)
    for (int32_t r = sequence.rows.begin; r < sequence.rows.end; ++r)
      w.hash.rows_of(sequence.tokens, rows.kv_index[static_cast<size_t>(r)],
                     &table_rows[static_cast<size_t>(r) * hashes]);
  const int64_t bytes = row_bytes(traits(w.table.type), w.table.features);
  for (const int32_t row : table_rows) will_read({w.table.rows + row * bytes, static_cast<size_t>(bytes)});
  return table_rows;
}

void recall(Ops& ops, Tensor x, std::span<const int32_t> table_rows, const Rows& rows, const NgramMemoryState& state,
            float eps, const NgramMemoryWeights& w) {
  const int32_t streams = w.key_norm.size / w.value.weight->out_features;
  Tensor e = ops.embed(table_rows, w.table);  // [rows * hashes, E / hashes]
  e = {e.data, rows.count(), e.features * w.hash.hashes()};
  const Tensor key = ops.norm_streams(ops.linear(e, w.key), streams, w.key_norm, eps);  // [rows, N]
  const Tensor query = ops.norm_streams(x, streams, w.query_norm, eps);                 // [rows, N]
  const Tensor value = ops.gate_memory(key, query, ops.linear(e, w.value));             // [rows, N]
  const Tensor n = ops.norm_streams(value, streams, w.value_norm, eps);
  if (state.kept_rows > 0) state.kept->keep(ops, {n}, state.kept_rows);
  ops.add(value, ops.causal_conv_silu(n, w.conv, rows, state.history));
  ops.add(x, value);
}

void replay_ngram_memory(Ops& ops, const Rows& rows, const NgramMemoryState& state, const NgramMemoryWeights& w) {
  ops.causal_conv_silu((*state.kept)[0], w.conv, rows, state.history);
}

}  // namespace v100
