// The kernels of one instruction set as a table of functions. Everything above (packing, threads, pages) is common.
//
// The files that define the tables are compiled with the flags of their instruction set and must not emit any function
// that other files could share: the linker might keep the copy that older processors cannot run. They use this header,
// panel.h and their own unnamed namespaces only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/panel.h"

namespace v100::cpu {

// What a dense product reads. The quantised ones are parts of a KV page (kv_page.h): codes with their scales apart, widened
// in registers. Keys: 64 columns, scales [k / 32][64]. Values: scales [k][columns / 32].
enum class ElementType : int32_t { f32, f16, bf16, q8_0_keys, q4_0_keys, q8_0_values, q4_0_values };
inline constexpr int32_t kElementTypes = 7;

// Operands of a dense product y[rows][16 * panels] = fma over k ascending (w[k][column], x[row][k], y). Strides in
// elements. y is read first when accumulate, else starts at 0. All 16 * panels columns of w and y exist.
struct DenseProduct {
  const void* w;                     // [n_k, w_stride]
  const uint16_t* scales = nullptr;  // of quantised elements
  int64_t w_stride;
  const float* x;  // [rows, x_stride]
  int64_t x_stride;
  float* y;  // [rows, y_stride]
  int64_t y_stride;
  int32_t n_k;
  int32_t rows;
  int32_t panels;
  bool accumulate;
};

// Integer dot products of quantised panels. Few rows unpack the codes in registers (dot); more rows share blocks that
// are expanded in memory first, as does any number of rows of a kind without `dot`.
struct QuantKernels {
  int32_t dot_rows;   // most rows of dot
  int32_t tile_rows;  // most rows of dot_expanded
  // y[row][16] = panel . tile. nullptr for kinds that are always expanded.
  void (*dot[kPanelKinds])(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, int32_t rows,
                           float* y, int64_t y_stride);
  // first_block and n_blocks: multiples of 8, except at the end of the panel.
  void (*expand[kPanelKinds])(const std::byte* panel, int32_t first_block, int32_t n_blocks, ExpandedBlock* blocks);
  // The same as dot; y is read first when accumulate, else starts at 0.
  void (*dot_expanded[kPanelKinds])(const ExpandedBlock* blocks, int32_t n_blocks, const ActivationBlock* tile,
                                    int32_t rows, float* y, int64_t y_stride, bool accumulate);
};

// The tokens under a convolution's taps: row t of tokens is multiplied with row t of w. All channels' first element.
struct ConvTaps {
  const float* w;  // [count, w_stride]
  int64_t w_stride;
  const float* const* tokens;  // [count]
  int32_t count;
};

// What a token is to the memory of a value head (ops.h, delta_net).
struct DeltaFactors {
  float kq;     // normalised key . normalised query
  float decay;  // A
  float beta;   // b
};

// The delta rule for 16 * panels columns (value features) of one head over consecutive tokens. Strides are from token to
// token, in elements; pointers are to the first token's first feature, or first column.
struct DeltaColumns {
  const float* k;  // [tokens, head_dim], normalised
  const float* q;
  int64_t key_stride;
  const DeltaFactors* factors;
  int64_t factor_stride;
  const float* v;  // [tokens, 16 * panels]
  int64_t v_stride;
  float* y;  // [tokens, 16 * panels]
  int64_t y_stride;
  const float* from;  // memory [panels, head_dim, 16] before the tokens; nullptr: zeros
  float* to;          // after them; may be from
  int32_t head_dim;
  int32_t panels;    // 1 or delta_panels
  int32_t tokens;    // at least 1
  bool past_caches;  // the memory after one token will not be read soon; `to` is aligned to 64 bytes
};

struct Kernels {
  const char* name;

  const QuantKernels* quant;

  // Rows of a tile that dense_dot keeps in registers.
  int32_t dense_rows;

  // Rounds n_blocks * 32 values of one row into blocks[0], blocks[stride], ...: its place in a tile of `stride` rows.
  void (*quantize)(const float* x, int32_t n_blocks, PanelKind kind, ActivationBlock* blocks, int32_t stride);
  void (*dense_dot[kElementTypes])(const DenseProduct& product);

  void (*add)(float* x, const float* a, int64_t n);                                       // x += a
  void (*add_scaled)(float* x, float factor, const float* a, int64_t n);                  // x = fma(factor, a, x)
  void (*add_shifted)(float* y, const float* a, float shift, const float* x, int64_t n);  // y = fma(a + shift, x, y)
  void (*scale)(float* x, float factor, int64_t n);                                       // x *= factor
  void (*scaled_silu)(float* x, float factor, int64_t n);                                 // x = silu(x * factor)
  void (*add_gated)(float* y, const float* gate, const float* x, int64_t n);         // y = fma(sigmoid(gate), x, y)
  float (*dot)(const float* x, const float* y, int32_t n);                           // in 16 interleaved sums
  void (*soft_cap)(float* x, float cap, int64_t n);                                  // x = cap * tanh(x / cap)
  void (*rms_norm)(const float* x, const float* w, float* y, int32_t n, float eps);  // one row, y may be x
  void (*silu_mul)(const float* gate, const float* up, float* y, int64_t n);         // y = silu(gate) * up
  void (*gelu_mul)(const float* gate, const float* up, float* y, int64_t n);
  // One head in place; cosine and sine [pairs].
  void (*rope_halves)(float* head, const float* cosine, const float* sine, int32_t pairs);
  void (*rope_interleaved)(float* head, const float* cosine, const float* sine, int32_t pairs);

  // Channels [channel, channel + n): y = silu(sum over the taps).
  void (*conv_silu)(const ConvTaps& taps, int32_t channel, int32_t n, float* y);
  void (*sigmoid_mul)(float* x, const float* gate, int64_t n);  // x *= sigmoid(gate)
  // One head of n = 16 i features: qn and kn as the delta rule wants them; gives kn . qn.
  float (*normalise_head)(const float* q, const float* k, int32_t n, float eps, float* qn, float* kn);
  int32_t delta_panels;  // columns / 16 that delta_rule likes best
  void (*delta_rule)(const DeltaColumns& columns);

  void (*to_f16)(const float* x, uint16_t* y, int64_t n);

  // Scores of a page in place: s[j] -> p[j] for j in [begin, end); writes the page's maximum and sum.
  void (*softmax_page)(float* s, int32_t begin, int32_t end, float scale, float* maximum, float* sum);
  // (m1, l1, o1[n]) <- merged with (m2, l2, o2).
  void (*merge_page)(float* m1, float* l1, float* o1, float m2, float l2, const float* o2, int32_t n);
  // y = x / divisor.
  void (*divide)(const float* x, float divisor, float* y, int32_t n);
  // 64 keys (or one row of values) of a quantised cache to f32; see kv_page.h for the layouts.
  // keys: codes [rows][stride], scales [rows / 32][64]; out [rows][64].
  void (*decode_keys_q8)(const int8_t* codes, const uint16_t* scales, int32_t rows, float* out);
  void (*decode_keys_q4)(const uint8_t* codes, const uint16_t* scales, int32_t rows, float* out);
  // values: one token's features, blocks of 32 as in the file format but scales apart; out [features].
  void (*decode_values_q8)(const int8_t* codes, const uint16_t* scales, int32_t features, float* out);
  void (*decode_values_q4)(const uint8_t* codes, const uint16_t* scales, int32_t features, float* out);
};

// Each table is a file of its own, compiled with its instruction set's flags.
extern const QuantKernels kGenericQuantKernels;
extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const QuantKernels kAvx2QuantKernels, kAvx512QuantKernels;
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#endif

}  // namespace v100::cpu
