// Units of work. Convolution: the rows of one sequence in a range of channels, so that the history may be replaced in
// place. Delta net: the rows of one sequence in some columns of one value head; what the columns of a head share
// (normalised keys and queries, gates) is computed first, row by row.
#include "cpu/recurrent.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/delta_net.h"

namespace v100::cpu {

namespace {

constexpr int32_t kConvChannels = 512;     // of a unit: 2 KiB of each tap's row
constexpr int64_t kParallelConv = 4096;    // channels times rows below this stay on the calling thread (~1 us)
constexpr int64_t kParallelHeads = 64;     // key heads times rows to normalise, likewise
constexpr int64_t kParallelMemory = 8192;  // elements of memory times tokens, likewise
constexpr int32_t kUnitsPerThread = 8;
// Memory of a layer (f32 values, 512 KiB) from which on one token's update goes past the caches: the other layers'
// memories and weights would displace it before it is read again. Saves reading what is overwritten.
constexpr int64_t kRecordPastCaches = 128 << 10;

bool is_aligned(const float* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

// Runs body(unit) for all units, on the calling thread alone when `parallel` is false.
template <class Body>
void for_units(ThreadPool& pool, int64_t units, bool parallel, Body&& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) body(unit);
  };
  if (parallel)
    pool.parallel_for(units, std::max<int64_t>(1, units / (pool.active() * kUnitsPerThread)), range);
  else
    range(0, units);
}

// The channels [begin, begin + n) of one sequence.
class ConvUnit {
 public:
  ConvUnit(Tensor x, const ConvWeight& w, const SequenceRows& sequence, const StateRecords& history)
      : x_(x), w_(w), sequence_(sequence), old_(history.at(sequence.state_from)), new_(history.at(sequence.state_to)) {}

  void run(int32_t begin, int32_t n, Tensor y, const Kernels& kernels) {
    if (old_ == nullptr) zeros_.assign(static_cast<size_t>(begin + n), 0.0f);
    std::vector<const float*> tokens(static_cast<size_t>(w_.taps));
    const ConvTaps taps{w_.data.get(), w_.channels, tokens.data(), w_.taps};
    for (int32_t r = 0; r < n_rows(); ++r) {
      for (int32_t t = 0; t < w_.taps; ++t) tokens[static_cast<size_t>(t)] = token(r - (w_.taps - 1 - t) * w_.dilation);
      kernels.conv_silu(taps, begin, n, y.row(sequence_.rows.begin + r));
    }
    // Record row i takes a later token than it held: ascending, nothing is overwritten before it was read.
    for (int32_t i = 0; i < w_.history(); ++i)
      std::memmove(new_ + int64_t{i} * w_.channels + begin, token(n_rows() - w_.history() + i) + begin,
                   static_cast<size_t>(n) * sizeof(float));
  }

 private:
  int32_t n_rows() const { return sequence_.rows.end - sequence_.rows.begin; }
  // Of the ubatch, or before it for negative i.
  const float* token(int32_t i) const {
    if (i >= 0) return x_.row(sequence_.rows.begin + i);
    return old_ == nullptr ? zeros_.data() : old_ + int64_t{w_.history() + i} * w_.channels;
  }

  Tensor x_;
  const ConvWeight& w_;
  const SequenceRows& sequence_;
  const float* old_;
  float* new_;
  std::vector<float> zeros_;  // a token before the sequence
};

// What all columns of a head share, per row.
struct DeltaKeys {
  Tensor k, q;            // [rows, key_size], normalised
  DeltaFactors* factors;  // [rows, value_heads]
};

DeltaKeys prepare_keys(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Kernels& kernels,
                       Arena& arena, ThreadPool& pool) {
  const auto n_factors = static_cast<size_t>(qkv.rows) * static_cast<size_t>(w.value_heads);
  const DeltaKeys keys{arena.create(qkv.rows, w.key_size()), arena.create(qkv.rows, w.key_size()),
                       reinterpret_cast<DeltaFactors*>(arena.take(n_factors * sizeof(DeltaFactors)))};
  for_units(pool, qkv.rows, int64_t{qkv.rows} * w.key_heads >= kParallelHeads, [&](int64_t unit) {
    const auto row = static_cast<int32_t>(unit);
    DeltaFactors* factors = keys.factors + unit * w.value_heads;
    for (int32_t key_head = 0; key_head < w.key_heads; ++key_head) {
      const int32_t at = key_head * w.head_dim;
      const float* q = qkv.row(row) + at;
      const float kq =
          kernels.normalise_head(q, q + w.key_size(), w.head_dim, eps, keys.q.row(row) + at, keys.k.row(row) + at);
      for (int32_t h = key_head; h < w.value_heads; h += w.key_heads) {
        const DeltaGate gate = delta_gate(beta.row(row)[h], alpha.row(row)[h], w.a.data[h], w.dt_bias.data[h]);
        factors[h] = {kq, gate.decay, gate.beta};
      }
    }
  });
  return keys;
}

}  // namespace

void run_causal_conv(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history, Tensor y,
                     const Kernels& kernels, ThreadPool& pool) {
  const int32_t parts = (w.channels + kConvChannels - 1) / kConvChannels;
  for_units(pool, static_cast<int64_t>(rows.sequences.size()) * parts, x.size() >= kParallelConv, [&](int64_t unit) {
    const int32_t begin = static_cast<int32_t>(unit % parts) * kConvChannels;
    ConvUnit(x, w, rows.sequences[static_cast<size_t>(unit / parts)], history)
        .run(begin, std::min(kConvChannels, w.channels - begin), y, kernels);
  });
}

void run_delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                   const StateRecords& memory, Tensor y, const Kernels& kernels, Arena& arena, ThreadPool& pool) {
  const size_t mark = arena.mark();
  const DeltaKeys keys = prepare_keys(qkv, beta, alpha, w, eps, kernels, arena, pool);
  const int32_t n = w.head_dim, head_panels = n / kPanelColumns;
  const int32_t parts = (head_panels + kernels.delta_panels - 1) / kernels.delta_panels;
  const int64_t record = int64_t{w.value_size()} * n;
  const int64_t units = static_cast<int64_t>(rows.sequences.size()) * w.value_heads * parts;
  for_units(pool, units, qkv.rows * record >= kParallelMemory, [&](int64_t unit) {
    const auto head = static_cast<int32_t>(unit / parts % w.value_heads);
    const SequenceRows& sequence = rows.sequences[static_cast<size_t>(unit / parts / w.value_heads)];
    const int32_t row = sequence.rows.begin, key = head % w.key_heads * n;
    const float* from = memory.at(sequence.state_from);
    float* to = memory.at(sequence.state_to);
    const bool past_caches = record >= kRecordPastCaches && is_aligned(to);
    const auto run = [&](int32_t panel, int32_t panels) {
      const int32_t value = head * n + panel * kPanelColumns;  // first value feature
      kernels.delta_rule({.k = keys.k.row(row) + key,
                          .q = keys.q.row(row) + key,
                          .key_stride = keys.k.features,
                          .factors = keys.factors + int64_t{row} * w.value_heads + head,
                          .factor_stride = w.value_heads,
                          .v = qkv.row(row) + 2 * w.key_size() + value,
                          .v_stride = qkv.features,
                          .y = y.row(row) + value,
                          .y_stride = y.features,
                          .from = from == nullptr ? nullptr : from + int64_t{value} * n,
                          .to = to + int64_t{value} * n,
                          .head_dim = n,
                          .panels = panels,
                          .tokens = sequence.rows.end - row,
                          .past_caches = past_caches});
    };
    const auto first = static_cast<int32_t>(unit % parts) * kernels.delta_panels;
    if (first + kernels.delta_panels <= head_panels) return run(first, kernels.delta_panels);
    for (int32_t panel = first; panel < head_panels; ++panel) run(panel, 1);
  });
  arena.release(mark);
}

}  // namespace v100::cpu
