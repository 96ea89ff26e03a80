// Gated delta net in plain loops: the gates, which every backend computes with this code, and the recurrence of ops.h.
#pragma once

#include <span>
#include <vector>

#include "ops/ops.h"

namespace v100 {

// What a token does to the memory of a value head: it keeps `decay` of it and writes with strength `beta`.
struct DeltaGate {
  float decay;  // exp(a * softplus(alpha + dt_bias)), 0..1
  float beta;   // sigmoid of the projection
};

// a * softplus(alpha + dt_bias), softplus(x) = log(1 + e^x).
double delta_log_decay(float alpha, float a, float dt_bias);

// In f64, rounded once.
DeltaGate delta_gate(float beta, float alpha, float a, float dt_bias);

// One head [n]: k and q as the recurrence wants them (lengths 1 and 1 / sqrt(n)); gives kq.
float normalise_delta_head(const float* q, const float* k, int32_t n, float eps, float* qn, float* kn);

// The memories of one sequence, one after the other as in the record.
class DeltaNetMemory {
 public:
  DeltaNetMemory(const DeltaNet& w, const StateRecords& memory, const SequenceRows& sequence);
  // One token: qkv [2 key_size + value_size], beta and alpha [value_heads] -> y [value_size].
  void step(const float* qkv, const float* beta, const float* alpha, float eps, float* y);
  void store(const StateRecords& memory, const SequenceRows& sequence) const;

 private:
  void step_head(int32_t head, const float* q, const float* k, const float* v, DeltaGate gate, float eps, float* y);

  const DeltaNet& w_;
  std::vector<float> values_;
};

}  // namespace v100
