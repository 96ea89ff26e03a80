// The operations a forward pass is written in, and their numerics contract. Models call these and nothing else.
//
// Tensors are f32, row-major [rows, features]. Results come from the arena of the Ops and live until the enclosing Scope
// ends. All operations are row-wise: a row's result never depends on the other rows of the ubatch (batch invariance), on
// the number of threads or on the chunking of a prompt.
//
// On CPUs the contract is exact: the reference and every instruction set give the same bits. "fma" below is a fused f32
// multiply-add with one rounding; sums run in the stated order; nothing else is contracted or reassociated.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_settings.h"
#include "ops/kv.h"
#include "ops/state.h"
#include "parallel/collective.h"
#include "quants/types.h"
#include "tensor/tensor.h"

namespace v100 {

class ThreadPool;

// A linear layer's weight matrix W [out_features, in_features] in a backend's own layout. Immutable.
class LinearWeight {
 public:
  LinearWeight(QuantType type, int32_t in_features, int32_t out_features, float scale)
      : type(type), in_features(in_features), out_features(out_features), scale(scale) {}
  virtual ~LinearWeight() = default;
  virtual size_t bytes() const = 0;  // of the packed form

  const QuantType type;
  const int32_t in_features;   // a multiple of the type's block
  const int32_t out_features;  // any number >= 1
  const float scale;           // multiplies each element of W x: one for the matrix, beside the scales of its type
};

// A vector of f32 in the backend's memory (norm weights, biases), made by Backend::place.
struct VectorWeight {
  std::shared_ptr<const float[]> data;
  int32_t size = 0;
  explicit operator bool() const { return size > 0; }
};

// What a matrix is of the file's tensor: which rows and columns of it, one range after the other. Its address names the
// matrix among all of a rank, so that changes to it (ops/adapted.h) can be found.
struct WeightOrigin {
  std::string tensor;  // name in the file
  std::vector<RowRange> rows, columns;
  RowRange experts;           // of a stack of matrices, those that are here
  int32_t stack = 0;          // matrices of the stack; 0: the tensor is one matrix
  bool is_looked_up = false;  // row by row, as embeddings are, instead of being multiplied
};

// Rows of token embeddings, decoded on demand from the file's mapping (which the owner keeps alive).
struct EmbeddingTable {
  std::shared_ptr<const void> owner;
  const std::byte* rows = nullptr;
  QuantType type = QuantType::F32;
  int32_t vocab = 0;
  int32_t features = 0;
  std::shared_ptr<const WeightOrigin> origin{};
};

// y = W x + bias. Without a weight: a matrix whose rows or columns all lie on other ranks. Its product is zeros,
// [rows, out_features], where out_features is 0 if it is the rows that are elsewhere.
struct Linear {
  std::shared_ptr<const LinearWeight> weight;
  VectorWeight bias;         // [out_features], or empty
  std::string name{};        // of the tensor in the file; empty for the further parts of a fused one
  int32_t out_features = 0;  // of one without a weight
  std::shared_ptr<const WeightOrigin> origin{};
};

// One matrix per expert, all of one type and shape. Expert e of a row's input gives W[e] x; one that is not here (nullptr)
// gives zeros: it belongs to another rank, and the ranks' results are summed.
struct ExpertLinear {
  std::vector<std::shared_ptr<const LinearWeight>> experts;
  int32_t in_features = 0;
  int32_t out_features = 0;
  std::string name;  // of the stack in the file; empty for the further parts of a fused one
  std::shared_ptr<const WeightOrigin> origin{};
};

// Which experts the rows of a ubatch go to: slot r * used + j is the choice j of row r. In the arena, like a tensor.
struct Routing {
  int32_t rows = 0;
  int32_t used = 0;                 // experts per row
  const int32_t* expert = nullptr;  // [rows, used]
  const float* weight = nullptr;    // [rows, used], falling in a row

  int32_t slots() const { return rows * used; }
};

struct KeysValues {
  Tensor k, v;
};

enum class Activation { silu, gelu };  // silu_f32, gelu_f32 of base/math.h

// Depthwise convolution over the tokens of a sequence: tap t of channel c at data[t * channels + c], the oldest token first.
// Tap t reads the token (taps - 1 - t) * dilation before the row's own.
struct ConvWeight {
  std::shared_ptr<const float[]> data;  // [taps, channels]
  int32_t taps = 0;
  int32_t channels = 0;
  int32_t dilation = 1;

  int32_t history() const { return (taps - 1) * dilation; }  // tokens of the state record, [history, channels]
};

// Convolution over the rows of a block of drafted tokens, with coefficients of two kinds: one per tap and feature, and one
// that each row makes for itself per tap and group of adjacent features. Both for two places, before and after a layer.
struct BlockConv {
  VectorWeight base;  // [2, taps, features]
  int32_t taps = 0;
  int32_t group = 0;  // features that share a row's own coefficient; a divisor of features

  explicit operator bool() const { return taps > 0; }
  // Of a row's own coefficients, [2, taps, groups].
  int32_t own_size(int32_t features) const { return 2 * taps * (features / group); }
};

// Gated delta net. Value head h reads key head h % key_heads. Record of the state: M[i][j] of key feature i and
// value feature j at [head][j / 16][i][j % 16], so that 16 columns, which belong to each other in every step, are one stretch.
struct DeltaNet {
  int32_t key_heads = 0;
  int32_t value_heads = 0;
  int32_t head_dim = 0;  // of keys and values, a multiple of 16
  VectorWeight a;        // [value_heads], -exp(A_log)
  VectorWeight dt_bias;  // [value_heads]

  // Where M[i][j] lies in a head's part of the record.
  int64_t at(int32_t i, int32_t j) const { return (int64_t{j / 16} * head_dim + i) * 16 + j % 16; }
  int32_t key_size() const { return key_heads * head_dim; }
  int32_t value_size() const { return value_heads * head_dim; }
};

// The blocks of adjacent tokens that each row of a ubatch attends to (sparse attention). In the arena, like a tensor.
struct BlockChoice {
  int32_t rows = 0;
  int32_t block = 0;                // tokens of a block; block b is tokens [b * block, (b + 1) * block) of the sequence
  int32_t most = 0;                 // blocks that a row has room for
  const int32_t* count = nullptr;   // [rows]
  const int32_t* blocks = nullptr;  // [rows, most], the first count[row] of a row in use, ascending
};

enum class GateFunction { silu, sigmoid };  // silu_f32, sigmoid_f32 of base/math.h

enum class RopeLayout {
  interleaved,  // pair p = (2p, 2p + 1)              "NORM"
  halves,       // pair p = (p, p + rotated / 2)      "NEOX"
};

// Angles of a ubatch: cosine and sine, magnitude included, [rows, pairs] each. Built once per ubatch by model/rope in host
// memory, then brought to where operations read it (Ops::place_angles).
struct RopeTable {
  const float* cosine = nullptr;
  const float* sine = nullptr;
  int32_t pairs = 0;  // rotated features of a head / 2; the features after them are left alone
  int32_t rows = 0;
};

// How queries and keys are turned before they meet: a norm of each head where there is one, then rope.
// What the host wants to see of each row of a tensor that it does not want whole.
struct RowQuery {
  int32_t largest = 0;               // the row's largest values: so many, 1 to 1024, not more than it has
  int32_t listed = 0;                // single ones
  std::span<const int32_t> columns;  // [rows, listed], -1: none
  // Masks of 32-bit words one after the other, and which one a row has, -1: none; no entries: no row has one. A value whose
  // bit is not set counts as -infinity; column c is bit (c + first_bit) % 32 of word (c + first_bit) / 32.
  std::span<const uint32_t> masks;
  std::span<const int32_t> mask_of;
  int32_t mask_words = 0, first_bit = 0;
  bool wants_sums = false;  // of e^(value - largest); of rows without a mask
};
struct RowAnswer {
  std::vector<float>
      values;  // [rows, largest], falling, of equal ones that of the lower column first; NaN is below all
  std::vector<int32_t> columns;    // [rows, largest]
  std::vector<float> listed;       // [rows, listed], 0 where there is none
  std::vector<double> sums;        // [rows], as sum_exp of sampling/row_scan.h adds them up, bit for bit; or none
  std::vector<uint8_t> is_flawed;  // [rows]: it has NaN or +infinity
};

struct Rotation {
  RopeTable table;
  RopeLayout layout = RopeLayout::halves;
  const VectorWeight* q_norm = nullptr;  // [head_dim] each
  const VectorWeight* k_norm = nullptr;
  float eps = 0.0f;
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Frees, when it ends, every tensor created while it lived.
  class Scope {
   public:
    explicit Scope(Ops& ops) : ops_(ops), mark_(ops.arena_mark()) {}
    ~Scope() { ops_.arena_release(mark_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Ops& ops_;
    size_t mark_;
  };

  // Uninitialised tensor [rows, features].
  virtual Tensor create(int32_t rows, int32_t features) = 0;

  // [tokens, features]: row i is table row tokens[i] decoded to f32. Ids are valid (checked at the door).
  virtual Tensor embed(std::span<const int32_t> tokens, const EmbeddingTable& table) = 0;

  // y = (x * s) * w with s = 1 / sqrt(m / n + eps), m = sum of x_i^2 in 16 interleaved fma partial sums (base/math.h).
  virtual Tensor rms_norm(Tensor x, const VectorWeight& w, float eps) = 0;
  // x += a in place, then rms_norm(x).
  virtual Tensor add_rms_norm(Tensor x, Tensor a, const VectorWeight& w, float eps) = 0;
  // x += a in place.
  virtual void add(Tensor x, Tensor a) = 0;
  // Each row of x [rows, features] += v [features], in place.
  virtual void add_vector(Tensor x, const VectorWeight& v) = 0;
  // In place on the given rows of x, each at most once: x[indices[i]] = fma(factors[i], a[i], x[indices[i]]).
  virtual void add_scaled_rows(Tensor x, Tensor a, std::span<const int32_t> indices,
                               std::span<const float> factors) = 0;
  // x *= factor in place.
  virtual void scale(Tensor x, float factor) = 0;
  // In place: x = cap * tanh(x / cap), with tanh(u) = 1 - 2 / (1 + exp_f32(2 u)).
  virtual void soft_cap(Tensor x, float cap) = 0;

  // y [rows, out] = W x, times the weight's scale (rounded), plus the bias if there is one (rounded).
  //
  // Quantised types: each 32 values of x become int8 p_i = round_half_even(x_i * (127 / max|x|)), 0 where 127 / max|x|
  // is not finite, with scale dx = max|x| / 127. A group is 32 values of a row, 16 for the types marked *; the activation
  // block stays 32. y starts at 0; per group, in order of k:
  //   y = fma(scale * dx, float(sum q_i * p_i), y)   and, for types with a minimum,   y = fma(minimum, Sg, y)
  // with exact integer sums and Sg = dx * float(sum p_i) of the group. (scale, minimum, q) per type:
  //   Q8_0 (d, -, q)   Q4_0 (d, -, q - 8)   Q5_0 (d, -, q - 16)   Q4_1, Q5_1 (d, m, q)
  //   Q2_K* (d * sc, -(dmin * mn), q)   Q3_K* (d * (sc - 32), -, q - 4)   Q4_K, Q5_K (d * sc, -(dmin * mn), q)
  //   Q6_K* (d * sc, -, q - 32)   IQ4_NL (d, -, level)   IQ4_XS (d * (sc - 32), -, level)
  //   MXFP4, NVFP4* (half the block's or group's scale, -, twice the E2M1 value)
  //   Q1_0 (d, -, 1 or -1)   Q2_0, TQ1_0, TQ2_0 (d, -, q - 1)   With s' = d * (2 s + 1) and codebook values G:
  //   IQ2_XXS, IQ2_XS*, IQ2_S* (s' * 1/8, -, +-G)   IQ3_XXS (s' * 1/4, -, +-G)   IQ3_S (s', -, +-G)
  //   IQ1_S, IQ1_M* (s' * 1/8, -, 8 G + 1 or 8 G - 1)
  // F32, F16, BF16, F64 (and Q8_1, Q8_K, which files do not use for weights): W decoded to f32; y starts at 0;
  // y = fma(w_k, x_k, y) for ascending k with unrounded x.
  virtual Tensor linear(Tensor x, const Linear& w) = 0;
  // Several weights of the same input; outputs[i] = linear(x, *weights[i]).
  virtual void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) = 0;
  // act(linear(x, gate)) * linear(x, up).
  virtual Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) = 0;
  // x += linear(y, w) in place, perhaps in one step.
  virtual void add_linear(Tensor x, Tensor y, const Linear& w);
  // x = act(x) * up in place: what gated_linear makes of its two products.
  virtual void activate(Tensor x, Tensor up, Activation activation) = 0;

  // In place on x [rows, heads * head_dim]: (x0, x1) = (fma(x0, c, -(x1 * s)), fma(x0, s, x1 * c)) for the pairs of each head.
  virtual void rope(Tensor x, int32_t heads, int32_t head_dim, const RopeTable& table, RopeLayout layout) = 0;

  // In place: each head becomes rms_norm(head, w [head_dim], eps), then rope.
  virtual void norm_rope(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight& w, float eps,
                         const RopeTable& table, RopeLayout layout) = 0;

  // Writes k [rows, kv_heads * head_dim_k] and v of each row at its kv_index. Stored values: rounded to nearest even for
  // f16/bf16. Q8_0: per 32 features of a head p_i and dx of linear's activation rule, dx stored as f16.
  // Q4_0: per 32, m = the value of largest magnitude (first of equals), d = m / -8, q = min(15, trunc(fma(x, 1 / d, 8.5)))
  // (d = 0: q = 8), d stored as f16. Q5_0: the same with -16, 31 and 16.5. Q4_1, Q5_1: d = (max - min) / 15 or 31,
  // q = min(15 or 31, trunc(fma(x - min, 1 / d, 0.5))) (d = 0: q = 0), d and m = min stored as f16.
  // Reading back: f32(d) * q (q - 8 for Q4_0, q - 16 for Q5_0), fma(q, f32(d), f32(m)).
  virtual void kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) = 0;

  // rope, or norm_rope, of q [rows, heads * head_dim] and of k in place, then kv_append of k and v. One step on devices.
  virtual void rotate_and_append(Tensor q, Tensor k, Tensor v, int32_t heads, const Rotation& rotation,
                                 const Rows& rows, const KvLayer& layer);

  // What kv_append stored at the given indices of a sequence, read back: k [indices, kv_heads * head_dim_k] and v. Storing
  // it again changes no bit.
  virtual KeysValues kv_read(RowRange indices, std::span<const PageId> pages, const KvLayer& layer) = 0;

  // Attention of q [rows, heads * head_dim_k] -> [rows, heads * head_dim_v]; which kv head a head reads: KvShape.
  // The keys a row sees are taken page by page (pages are aligned to absolute kv indices); per page, in order of j:
  //   s_j = scale * (fma sum over d of q_d * k_jd, ascending, from 0);  m = max s_j;  p_j = exp_f32(s_j - m)
  //   l = sum of p_j in 16 interleaved partial sums (lane = index within page % 16);  o_d = fma sum over j of p_j * v_jd, from 0
  // Pages are merged in order with M = max(m1, m2), a = exp_f32(m1 - M), b = exp_f32(m2 - M):
  //   l = fma(l1, a, l2 * b), o = fma(o1, a, o2 * b).       The result is o / l. A row that sees no key gives zeros.
  virtual Tensor attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) = 0;

  // In place: x [rows, features] *= sigmoid_f32(gate [rows, gates]); a gate covers features / gates adjacent features.
  virtual void apply_gate(Tensor x, Tensor gate) = 0;
  // attention, then apply_gate of its result. One step on devices.
  virtual Tensor gated_attention(Tensor q, Tensor gate, const Rows& rows, const KvLayer& layer, int32_t heads,
                                 float scale);

  // y = silu_f32(s) with s = fma over taps (w_t, x_t, s) in order of t, from 0, of each channel of x [rows, channels].
  // Tokens before the ubatch come from the record, zeros where the sequence begins. Writes the last history() tokens.
  virtual Tensor causal_conv_silu(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history) = 0;

  // Gated delta rule (Yang et al. 2024, "Gated Delta Networks"), token after token of each sequence.
  // qkv [rows, 2 key_size + value_size]; beta, alpha [rows, value_heads] -> o [rows, value_size]. Per row and value head:
  //   A = float(exp(a * softplus(alpha + dt_bias))), b = float(1 / (1 + exp(-beta))), both in f64;
  //   k = k * s with s = 1 / sqrt(m + eps), m = sum of k_i^2 in 16 interleaved fma partial sums; q likewise, then
  //   q = q * r with r = 1 / sqrt(float(head_dim));  kq = sum of k_i * q_i in 16 interleaved fma partial sums
  //   p_j = sum over i of fma(M[i][j], k_i), t_j = sum over i of fma(M[i][j], q_i), each in two partial sums from 0, even i
  //   and odd i, added at the end;  d_j = b * fma(-A, p_j, v_j);  o_j = fma(kq, d_j, A * t_j)
  //   M[i][j] = fma(k_i, d_j, A * M[i][j])
  // A prompt may be cut anywhere: the bits are the same. On a device: between chunks (delta_net_chunked.h).
  virtual Tensor delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                           const StateRecords& memory) = 0;

  // Each head [head_dim] of x [rows, heads * head_dim] as rms_norm(head, w, eps) * function(gate). The result may be x itself.
  virtual Tensor norm_gate(Tensor x, Tensor gate, const VectorWeight& w, float eps, GateFunction function) = 0;

  // Blocks of block_rows rows each; own [rows, own_size]. y_r [features], from 0, over the taps t in order that stay in r's
  // block:   y_rc = fma(base[place][t][c] + own_r[place][t][c / group], x_(r - t)c, y_rc)
  virtual Tensor block_conv(Tensor x, const BlockConv& w, int32_t place, Tensor own, int32_t block_rows) = 0;

  // Residual streams (Zhu et al. 2024, "Hyper-Connections"): a row holds `streams` of them side by side.
  //
  // [rows, streams * features]: the row, streams times.
  virtual Tensor repeat_streams(Tensor x, int32_t streams) = 0;
  // rms_norm of each stream by itself, with its part of w [streams * features].
  virtual Tensor norm_streams(Tensor x, int32_t streams, const VectorWeight& w, float eps) = 0;
  // In place: x = silu_f32(x * factor).
  virtual void scaled_silu(Tensor x, float factor) = 0;
  // [rows, features]: y starts at 0; y = fma(sigmoid_f32(gate_s), x_s, y) for the streams s in order; then y *= 1 / streams.
  virtual Tensor mix_streams(Tensor x, Tensor gate, int32_t streams) = 0;
  // In place on x: x_s = fma(2 * sigmoid_f32(inject_s * (1 / streams)), y, x_s); y [rows, features], inject [rows, streams].
  virtual void add_to_streams(Tensor x, Tensor y, Tensor inject) = 0;
  // What is read from a memory table, gated for each stream: [rows, streams * features] from key and query, of that shape,
  // and value [rows, features].   a = (sum of key_i * query_i in 16 interleaved fma partial sums) / sqrt(features),
  // u = sqrt(max(|a|, 1e-6)) with the sign of a (0 for a = 0),  y_s = sigmoid_f32(u) * value
  virtual Tensor gate_memory(Tensor key, Tensor query, Tensor value) = 0;

  // Sparse attention: an indexer chooses blocks of tokens by a key for each block.
  //
  // Writes the rows' index keys [rows, head_dim], V of the index cache; then, as K, the key of each block whose last token
  // is one of the rows: s = k_0 + k_1 + ... of its tokens' stored keys in order, s * (1 / block), then norm_rope as one
  // head (halves). `angles` has one row for each such block, in the order of the rows.
  virtual void append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                            const KvLayer& index) = 0;
  // The `most` best of the complete blocks that each row sees (its view begins at 0), of equal ones the lower, from q
  // [rows, heads * head_dim]: score = sum over heads, in order, from 0, of max(dot, 0), dot = fma sum over d of q_d * k_d,
  // ascending, from 0. A NaN dot counts as 0.
  virtual BlockChoice choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most) = 0;
  // attention, where a row sees only the tokens of its blocks and those after its last complete block. Pages of which it
  // sees nothing take no part.
  virtual Tensor sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer,
                                  int32_t heads, float scale) = 0;

  // Chooses `used` experts for each row of router logits [rows, experts], the largest first, of equal ones the lower id.
  //   p_e = exp_f32(logit_e - max), P = sum of p_e over all experts in 16 interleaved partial sums, q_j = p_(e_j) / P,
  //   weight_j = q_j / max(q_0 + q_1 + ..., 2^-14).         The weights of a row are 1 together unless all are tiny.
  virtual Routing route(Tensor logits, int32_t used) = 0;
  // [slots, out]: gated_linear of the slot's row of x [rows, in] by the slot's expert. An expert's weights are read once
  // for all of its rows.
  virtual Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                                     Activation activation) = 0;
  // [slots, out]: linear of row `slot` of x [slots, in] by the slot's expert.
  virtual Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) = 0;
  // [rows, features] from x [slots, features]: y starts at 0; y = fma(weight_j, x_j, y) for the slots of the row in order.
  virtual Tensor mix_experts(Tensor x, const Routing& routing) = 0;

  // Columns [first, first + features) of y, a tensor with as many rows, become x.
  virtual void place(Tensor x, Tensor y, int32_t first) = 0;

  // Copies of the given rows, [indices, features].
  virtual Tensor gather_rows(Tensor x, std::span<const int32_t> indices) = 0;
  // to, a tensor of the same shape that outlives the arena, becomes a copy of x.
  virtual void copy(Tensor x, Tensor to) = 0;
  // Rows of x beside those of y: [rows, features of x + features of y].
  virtual Tensor concatenate(Tensor x, Tensor y) = 0;
  // [rows, features]: of each row, the row before it in its sequence. That of a first row comes from the record, zeros where
  // the sequence begins. Writes the last row of each sequence, unless its state_to is -1.
  virtual Tensor previous_rows(Tensor x, const Rows& rows, const StateRecords& last) = 0;

  // Starts what was called so far: nothing of it may wait for a later call, since other ranks may wait for it.
  virtual void submit() {}
  // Forgets what was called and not started: the work has failed here or on another rank.
  virtual void abandon() {}

  // The meeting points of ranks; nothing to do for one.
  // Sum over ranks, in place: in f32 and in their order, the same bits on all.
  virtual void all_reduce(Tensor partial) = 0;
  // The root's x on every rank, in place.
  virtual void broadcast(Tensor x, int32_t root) = 0;

  // Which rows of which sequences the following operations compute: those of a ubatch, then, of them, the given ones.
  // Only operations that treat sequences differently (ops/adapted.h) need to know.
  virtual void enter(const Rows& rows) { (void)rows; }
  virtual void narrow(std::span<const int32_t> rows) { (void)rows; }

  // A named intermediate for comparing engines; free when no tap is installed.
  virtual void tap(std::string_view name, int32_t layer, Tensor value) { (void)name, (void)layer, (void)value; }

  // Host copy of a tensor's rows, after all operations on it have finished.
  virtual void read(Tensor x, std::span<float> destination) = 0;
  // x in host memory, after all operations on it have finished, until the next call; x itself where that is host memory.
  virtual Tensor on_host(Tensor x) = 0;
  // A part of x in host memory, after all operations on it have finished. Nothing where x itself is there.
  virtual std::optional<RowAnswer> look_up(Tensor x, const RowQuery& query);
  // A table in host memory for rope and norm_rope. In the arena, like a tensor.
  virtual RopeTable place_angles(const RopeTable& table) = 0;

  // Memory of the device that outlives the arena: pages, states, kept inputs. Zero-filled, aligned to 256 bytes. The
  // following three act in order with the operations; when read_bytes returns, the bytes are there, and when write_bytes
  // returns, `from` may change.
  virtual std::shared_ptr<std::byte[]> allocate(size_t bytes) = 0;  // throws OutOfMemory
  // The same in memory of the host that the operations reach like their own, only slower.
  virtual std::shared_ptr<std::byte[]> allocate_on_host(size_t bytes) { return allocate(bytes); }
  virtual void copy_bytes(const std::byte* from, std::byte* to, size_t bytes) = 0;
  virtual void read_bytes(const std::byte* from, std::byte* host, size_t bytes) = 0;
  virtual void write_bytes(const std::byte* host, std::byte* to, size_t bytes) = 0;

  // Threads for the following operations, 1..n given at creation.
  virtual void set_threads(int32_t n_threads) = 0;

  // The stack of tensors, for Scope.
  virtual size_t arena_mark() const = 0;
  virtual void arena_release(size_t mark) = 0;
};

// What a kind of device offers: packing of weights and the layout of KV pages. Stateless, shared by all engines of a model.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;  // "reference", "generic", "avx2", "avx512", "cuda"

  // A copy of the values in the device's memory, for VectorWeight and ConvWeight. Throws OutOfMemory.
  virtual std::shared_ptr<const float[]> place(std::span<const float> values) const = 0;

  // rows: out_features rows of in_features values in file layout; scale: LinearWeight::scale. The pool's active threads share
  // the work.
  virtual std::shared_ptr<const LinearWeight> pack_linear(QuantType type, int32_t in_features, int32_t out_features,
                                                          const std::byte* rows, ThreadPool& pool,
                                                          float scale = 1.0f) const = 0;
  // LinearWeight::bytes() of what pack_linear would make, without making it. As in the file, unless a backend pads.
  virtual size_t packed_bytes(QuantType type, int32_t in_features, int32_t out_features) const {
    return static_cast<size_t>(row_bytes(traits(type), in_features) * out_features);
  }
  // Bytes of one page of one layer (K and V), a multiple of 64. Throws InvalidArgument for an unsupported shape or type.
  virtual size_t kv_page_bytes(const KvShape& shape) const = 0;
  // threads.count is the most that set_threads may ask for. seat: where these operations meet those of other ranks.
  // Throws InvalidArgument for settings the system refuses.
  virtual std::unique_ptr<Ops> create_ops(const ThreadSettings& threads, RankSeat seat = {}) const = 0;
};

}  // namespace v100
