// One head, one chunk at a time. With c_i the sum of the chunk's log decays up to and including token i, the writes d_i of
// the tokens solve a triangular system: d_i = b_i (v_i - exp(c_i) S0^T k_i - sum over j < i of exp(c_i - c_j) (k_i . k_j) d_j).
// Exponents are differences c_i - c_j <= 0 for j <= i, never exp(-c_j) alone, which overflows.
#include "ops/delta_net_chunked.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/delta_net.h"

namespace v100 {

namespace {

class Matrix {
 public:
  Matrix(int32_t rows, int32_t columns)
      : rows_(rows), columns_(columns), values_(static_cast<size_t>(rows) * static_cast<size_t>(columns), 0.0f) {}

  int32_t rows() const { return rows_; }
  int32_t columns() const { return columns_; }
  float* row(int32_t i) { return &values_[static_cast<size_t>(i) * static_cast<size_t>(columns_)]; }
  const float* row(int32_t i) const { return &values_[static_cast<size_t>(i) * static_cast<size_t>(columns_)]; }

 private:
  int32_t rows_, columns_;
  std::vector<float> values_;
};

float dot(const float* x, const float* y, int32_t n) {
  float sum = 0;
  for (int32_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

void add_scaled(float* y, float factor, const float* x, int32_t n) {
  for (int32_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// One chunk of one head.
struct Chunk {
  Matrix k, q, v;              // [tokens, head_dim]; k and q normalised, q scaled
  std::vector<double> decays;  // c: sums of the log decays
  std::vector<float> beta;

  int32_t tokens() const { return k.rows(); }
  int32_t head_dim() const { return k.columns(); }
  float decay(int32_t from, int32_t to) const {
    return static_cast<float>(std::exp(decays[static_cast<size_t>(to)] - decays[static_cast<size_t>(from)]));
  }
  float decay_from_start(int32_t to) const { return static_cast<float>(std::exp(decays[static_cast<size_t>(to)])); }
};

Chunk read_chunk(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, int32_t head, RowRange rows) {
  const int32_t n = w.head_dim, tokens = rows.end - rows.begin, key = head % w.key_heads * n;
  const auto h = static_cast<size_t>(head);
  Chunk chunk{Matrix(tokens, n), Matrix(tokens, n), Matrix(tokens, n), {}, {}};
  double decay = 0;
  for (int32_t i = 0; i < tokens; ++i) {
    const float *q = qkv.row(rows.begin + i) + key, *k = q + w.key_size();
    normalise_delta_head(q, k, n, eps, chunk.q.row(i), chunk.k.row(i));
    std::copy_n(qkv.row(rows.begin + i) + 2 * w.key_size() + head * n, n, chunk.v.row(i));
    decay += delta_log_decay(alpha.row(rows.begin + i)[head], w.a.data[h], w.dt_bias.data[h]);
    chunk.decays.push_back(decay);
    chunk.beta.push_back(
        delta_gate(beta.row(rows.begin + i)[head], alpha.row(rows.begin + i)[head], w.a.data[h], w.dt_bias.data[h])
            .beta);
  }
  return chunk;
}

// X of (I + A) X = B by forward substitution, in place of B. A_ij = beta_i decay(j -> i) (k_i . k_j) for j < i, else 0.
void solve(const Chunk& chunk, const Matrix& a, Matrix& b) {
  for (int32_t i = 0; i < chunk.tokens(); ++i)
    for (int32_t j = 0; j < i; ++j) add_scaled(b.row(i), -a.row(i)[j], b.row(j), b.columns());
}

// The chunk's outputs; memory [head_dim, head_dim] goes from its state before the chunk to that after it.
Matrix run_chunk(const Chunk& chunk, Matrix& memory) {
  const int32_t tokens = chunk.tokens(), n = chunk.head_dim();
  // Independent of the memory: all chunks could do this at once.
  Matrix a(tokens, tokens), scores(tokens, tokens), u(tokens, n), keys(tokens, n);
  for (int32_t i = 0; i < tokens; ++i) {
    const float beta = chunk.beta[static_cast<size_t>(i)];
    for (int32_t j = 0; j < i; ++j) a.row(i)[j] = beta * chunk.decay(j, i) * dot(chunk.k.row(i), chunk.k.row(j), n);
    for (int32_t j = 0; j <= i; ++j) scores.row(i)[j] = chunk.decay(j, i) * dot(chunk.q.row(i), chunk.k.row(j), n);
    add_scaled(u.row(i), beta, chunk.v.row(i), n);
    add_scaled(keys.row(i), beta * chunk.decay_from_start(i), chunk.k.row(i), n);
  }
  solve(chunk, a, u);     // what the tokens would write into an empty memory
  solve(chunk, a, keys);  // what of the memory they write over

  Matrix written = u, y(tokens, n);
  for (int32_t t = 0; t < tokens; ++t)
    for (int32_t i = 0; i < n; ++i) add_scaled(written.row(t), -keys.row(t)[i], memory.row(i), n);
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t i = 0; i < n; ++i)
      add_scaled(y.row(t), chunk.decay_from_start(t) * chunk.q.row(t)[i], memory.row(i), n);
    for (int32_t j = 0; j <= t; ++j) add_scaled(y.row(t), scores.row(t)[j], written.row(j), n);
  }
  const int32_t last = tokens - 1;
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t j = 0; j < n; ++j) memory.row(i)[j] *= chunk.decay_from_start(last);
    for (int32_t t = 0; t < tokens; ++t)
      add_scaled(memory.row(i), chunk.decay(t, last) * chunk.k.row(t)[i], written.row(t), n);
  }
  return y;
}

}  // namespace

void delta_net_chunked_sequence(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps,
                                const SequenceRows& sequence, const StateRecords& memory, Tensor y, int32_t chunk) {
  const int32_t n = w.head_dim;
  for (int32_t head = 0; head < w.value_heads; ++head) {
    const int64_t part = int64_t{head} * n * n;
    Matrix state(n, n);
    if (const float* old = memory.at(sequence.state_from))
      for (int32_t i = 0; i < n; ++i)
        for (int32_t j = 0; j < n; ++j) state.row(i)[j] = old[part + w.at(i, j)];
    for (int32_t begin = sequence.rows.begin; begin < sequence.rows.end; begin += chunk) {
      const RowRange rows{begin, std::min(begin + chunk, sequence.rows.end)};
      const Matrix out = run_chunk(read_chunk(qkv, beta, alpha, w, eps, head, rows), state);
      for (int32_t t = 0; t < out.rows(); ++t) std::copy_n(out.row(t), n, y.row(begin + t) + head * n);
    }
    float* record = memory.at(sequence.state_to);
    for (int32_t i = 0; i < n; ++i)
      for (int32_t j = 0; j < n; ++j) record[part + w.at(i, j)] = state.row(i)[j];
  }
}

}  // namespace v100
