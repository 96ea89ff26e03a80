// The recurrence of the gated delta net, one token and head at a time.
#include "ops/delta_net.h"

#include <algorithm>
#include <cmath>

#include "base/math.h"

namespace v100 {

namespace {

float dot_16(const float* x, const float* y, int32_t n) {
  float partial[16] = {};
  for (int32_t i = 0; i < n; ++i) partial[i % 16] = std::fma(x[i], y[i], partial[i % 16]);
  return sum_of_16(partial);
}

}  // namespace

double delta_log_decay(float alpha, float a, float dt_bias) {
  const double x = double{alpha} + double{dt_bias};
  return double{a} * (x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)));
}

DeltaGate delta_gate(float beta, float alpha, float a, float dt_bias) {
  return {static_cast<float>(std::exp(delta_log_decay(alpha, a, dt_bias))),
          static_cast<float>(1 / (1 + std::exp(-double{beta})))};
}

float normalise_delta_head(const float* q, const float* k, int32_t n, float eps, float* qn, float* kn) {
  const float k_scale = 1.0f / std::sqrt(dot_16(k, k, n) + eps), q_scale = 1.0f / std::sqrt(dot_16(q, q, n) + eps);
  const float r = 1.0f / std::sqrt(static_cast<float>(n));
  for (int32_t i = 0; i < n; ++i) {
    kn[i] = k[i] * k_scale;
    qn[i] = (q[i] * q_scale) * r;
  }
  return dot_16(kn, qn, n);
}

DeltaNetMemory::DeltaNetMemory(const DeltaNet& w, const StateRecords& memory, const SequenceRows& sequence)
    : w_(w), values_(static_cast<size_t>(w.value_size()) * static_cast<size_t>(w.head_dim), 0.0f) {
  if (const float* old = memory.at(sequence.state_from)) std::copy_n(old, values_.size(), values_.begin());
}

void DeltaNetMemory::store(const StateRecords& memory, const SequenceRows& sequence) const {
  std::copy(values_.begin(), values_.end(), memory.at(sequence.state_to));
}

void DeltaNetMemory::step(const float* qkv, const float* beta, const float* alpha, float eps, float* y) {
  const float *q = qkv, *k = q + w_.key_size(), *v = k + w_.key_size();
  for (int32_t h = 0; h < w_.value_heads; ++h) {
    const int32_t key = h % w_.key_heads * w_.head_dim, value = h * w_.head_dim;
    step_head(h, q + key, k + key, v + value, delta_gate(beta[h], alpha[h], w_.a.data[h], w_.dt_bias.data[h]), eps,
              y + value);
  }
}

void DeltaNetMemory::step_head(int32_t head, const float* q, const float* k, const float* v, DeltaGate gate, float eps,
                               float* y) {
  const int32_t n = w_.head_dim;
  std::vector<float> kn(static_cast<size_t>(n)), qn(static_cast<size_t>(n));
  const float kq = normalise_delta_head(q, k, n, eps, qn.data(), kn.data());
  float* m = &values_[static_cast<size_t>(head) * static_cast<size_t>(n) * static_cast<size_t>(n)];
  for (int32_t j = 0; j < n; ++j) {
    float p[2] = {}, t[2] = {};
    for (int32_t i = 0; i < n; ++i) {
      p[i % 2] = std::fma(m[w_.at(i, j)], kn[static_cast<size_t>(i)], p[i % 2]);
      t[i % 2] = std::fma(m[w_.at(i, j)], qn[static_cast<size_t>(i)], t[i % 2]);
    }
    const float d = gate.beta * std::fma(-gate.decay, p[0] + p[1], v[j]);
    y[j] = std::fma(kq, d, gate.decay * (t[0] + t[1]));
    for (int32_t i = 0; i < n; ++i)
      m[w_.at(i, j)] = std::fma(kn[static_cast<size_t>(i)], d, gate.decay * m[w_.at(i, j)]);
  }
}

}  // namespace v100
