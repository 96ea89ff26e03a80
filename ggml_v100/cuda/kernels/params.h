// Parameters of the kernels: plain structs that the launcher fills and the kernel reads, one per kernel, passed by value.
// Included by host and device code, so both see one layout. Pointers are device addresses; strides are in elements.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

namespace v100::cuda {

struct RmsNormParams {
  const float* x;       // [rows, features]; with `added`, the sum is written back here
  const float* added;   // [rows, features] or nullptr: x += added before the norm
  const float* weight;  // [features]
  float* y;             // [rows, features], may be x where nothing is added
  int32_t rows, features;
  float eps;
};

struct AddParams {
  float* x;            // [n], in place
  const float* added;  // [n]
  int64_t n;
};

struct ScaleParams {
  float* x;  // [n], in place
  int64_t n;
  float factor;  // of scale; the cap of soft_cap
};

// y = act(gate) * up.
struct GatedParams {
  const float* gate;  // [n]
  const float* up;    // [n]
  float* y;           // [n], may be gate or up
  int64_t n;
  int32_t activation;  // 0 silu, 1 gelu: the order of v100::Activation
};

// x *= sigmoid(gate); a gate covers features / gates adjacent features.
struct ApplyGateParams {
  float* x;           // [rows, features], in place
  const float* gate;  // [rows, gates]
  int32_t rows, features, gates;
};

// Each head of x: rms_norm where weight is not nullptr, then the rotation.
struct NormRopeParams {
  float* x;             // [rows, heads * head_dim], in place
  const float* weight;  // [head_dim] or nullptr
  const float* cosine;  // [rows, pairs]
  const float* sine;    // [rows, pairs]
  int32_t rows, heads, head_dim, pairs;
  int32_t halves;  // 1: pair p = (p, p + pairs), 0: (2p, 2p + 1)
  float eps;
};

// Each head of x: rms_norm, then times function(gate).
struct NormGateParams {
  float* x;             // [rows, heads * head_dim], in place
  const float* gate;    // [rows, heads * head_dim]
  const float* weight;  // [head_dim]
  int32_t rows, heads, head_dim;
  int32_t function;  // 0 silu, 1 sigmoid: the order of v100::GateFunction
  float eps;
};

struct GatherRowsParams {
  const float* x;          // [*, features]
  const int32_t* indices;  // [rows]
  float* y;                // [rows, features]
  int32_t rows, features;
};

}  // namespace v100::cuda
