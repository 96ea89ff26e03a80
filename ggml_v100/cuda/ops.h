// Ops on a CUDA device: each operation fills in the parameters of its kernels and writes the launches down (recorder.h).
// Tensors, pages, states and vectors are device addresses that the host never reads through.
//
// One file per subject: ops.cpp (memory, row-wise operations, meeting points), ops_linear.cpp, ops_attention.cpp, ops_sparse.cpp,
// ops_recurrent.cpp, ops_experts.cpp, ops_streams.cpp, ops_look_up.cpp.
#pragma once

#include <algorithm>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "cuda/arena.h"
#include "cuda/inputs.h"
#include "cuda/kernels/params.h"
#include "cuda/launches.h"
#include "cuda/peer_sums.h"
#include "cuda/recorder.h"
#include "cuda/row_tables.h"
#include "cuda/slabs.h"
#include "cuda/staging.h"
#include "cuda/weight.h"
#include "ops/ops.h"

namespace v100::cuda {

struct PromptTile;  // kernels/linear_prompt_shape.h

class CudaOps final : public Ops {
 public:
  CudaOps(std::shared_ptr<const Launches> launches, RankSeat seat);
  ~CudaOps() override;

  Tensor create(int32_t rows, int32_t features) override;
  Tensor embed(std::span<const int32_t> tokens, const EmbeddingTable& table) override;
  Tensor rms_norm(Tensor x, const VectorWeight& w, float eps) override;
  Tensor add_rms_norm(Tensor x, Tensor a, const VectorWeight& w, float eps) override;
  void add(Tensor x, Tensor a) override;
  void add_vector(Tensor x, const VectorWeight& v) override;
  void add_scaled_rows(Tensor x, Tensor a, std::span<const int32_t> indices, std::span<const float> factors) override;
  void scale(Tensor x, float factor) override;
  void soft_cap(Tensor x, float cap) override;
  void activate(Tensor x, Tensor up, Activation activation) override;
  void rope(Tensor x, int32_t heads, int32_t head_dim, const RopeTable& table, RopeLayout layout) override;
  void norm_rope(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight& w, float eps, const RopeTable& table,
                 RopeLayout layout) override;
  void apply_gate(Tensor x, Tensor gate) override;
  Tensor norm_gate(Tensor x, Tensor gate, const VectorWeight& w, float eps, GateFunction function) override;
  void place(Tensor x, Tensor y, int32_t first) override;
  Tensor gather_rows(Tensor x, std::span<const int32_t> indices) override;
  void copy(Tensor x, Tensor to) override;
  Tensor concatenate(Tensor x, Tensor y) override;

  Tensor linear(Tensor x, const Linear& w) override;
  void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) override;
  void add_linear(Tensor x, Tensor y, const Linear& w) override;
  Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) override;

  void kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) override;
  void rotate_and_append(Tensor q, Tensor k, Tensor v, int32_t heads, const Rotation& rotation, const Rows& rows,
                         const KvLayer& layer) override;
  KeysValues kv_read(RowRange indices, std::span<const PageId> pages, const KvLayer& layer) override;
  Tensor attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) override;
  Tensor gated_attention(Tensor q, Tensor gate, const Rows& rows, const KvLayer& layer, int32_t heads,
                         float scale) override;
  void append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                    const KvLayer& index) override;
  BlockChoice choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most) override;
  Tensor sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer, int32_t heads,
                          float scale) override;

  Tensor causal_conv_silu(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history) override;
  Tensor delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                   const StateRecords& memory) override;
  Tensor previous_rows(Tensor x, const Rows& rows, const StateRecords& last) override;

  Routing route(Tensor logits, int32_t used) override;
  Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                             Activation activation) override;
  Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) override;
  Tensor mix_experts(Tensor x, const Routing& routing) override;

  Tensor block_conv(Tensor x, const BlockConv& w, int32_t place, Tensor own, int32_t block_rows) override;
  Tensor repeat_streams(Tensor x, int32_t streams) override;
  Tensor norm_streams(Tensor x, int32_t streams, const VectorWeight& w, float eps) override;
  void scaled_silu(Tensor x, float factor) override;
  Tensor mix_streams(Tensor x, Tensor gate, int32_t streams) override;
  void add_to_streams(Tensor x, Tensor y, Tensor inject) override;
  Tensor gate_memory(Tensor key, Tensor query, Tensor value) override;

  void all_reduce(Tensor partial) override;
  void broadcast(Tensor x, int32_t root) override;
  void enter(const Rows& rows) override;
  void submit() override { start(); }
  void abandon() override;

  void read(Tensor x, std::span<float> destination) override;
  Tensor on_host(Tensor x) override;
  std::optional<RowAnswer> look_up(Tensor x, const RowQuery& query) override;
  RopeTable place_angles(const RopeTable& table) override;
  std::shared_ptr<std::byte[]> allocate(size_t bytes) override;
  std::shared_ptr<std::byte[]> allocate_on_host(size_t bytes) override;
  void copy_bytes(const std::byte* from, std::byte* to, size_t bytes) override;
  void read_bytes(const std::byte* from, std::byte* host, size_t bytes) override;
  void write_bytes(const std::byte* host, std::byte* to, size_t bytes) override;
  // Calls may come from any thread, one at a time: the device is made current where the driver is called.
  void set_threads(int32_t) override {}

 protected:
  size_t arena_mark() const override { return arena_.mark(); }
  void arena_release(size_t mark) override;

 private:
  // --- writing down ---
  template <class Params>
  void launch(std::string_view unit, std::string_view name, Grid grid, uint32_t threads, const Params& params,
              uint32_t shared_bytes = 0) {
    recorder_.launch(launches_->kernel(unit, name, shared_bytes), grid, threads, params, shared_bytes);
  }
  // Element-wise kernels: blocks for n values that walk on by strides.
  Grid flat_grid(int64_t n) const;
  template <class Params>
  void launch_flat(std::string_view unit, std::string_view name, int64_t n, const Params& params) {
    launch(unit, name, flat_grid(n), kThreads, params);
  }
  // Starts what was written down. Throws what failed, also what failed at the end of a Scope.
  void start();
  // For the stream, after start(). Throws what failed on the device.
  void wait();
  // As start(), then forgets the inputs.
  void restart_inputs();

  // --- memory ---
  template <class Value>
  Value* take(size_t count) {
    return reinterpret_cast<Value*>(arena_.take(count * sizeof(Value)));
  }
  Tensor zeros(int32_t rows, int32_t features);
  // It stays until nothing uses it any more, also after its last owner let it go.
  std::shared_ptr<std::byte[]> kept(std::shared_ptr<std::byte> memory);
  // Host data for the operations that follow: fill(piece, first, count) as in Staging. Kept until the inputs are forgotten,
  // or in the arena if there are too many.
  CUdeviceptr bring(size_t bytes, size_t unit, const Staging::Fill& fill, bool* is_in_arena = nullptr);
  template <class Value>
  const Value* bring(std::span<const Value> values, bool* is_in_arena = nullptr) {
    const auto fill = [values](std::byte* piece, size_t first, size_t count) {
      std::copy_n(reinterpret_cast<const std::byte*>(values.data()) + first, count, piece);
    };
    return reinterpret_cast<const Value*>(bring(values.size_bytes(), sizeof(Value), fill, is_in_arena));
  }
  RowTables tables(const Rows& rows);
  // Pinned, until the next call.
  float* host_copy_of(Tensor x);
  float* host_room(size_t values);

  // --- linear ---
  struct Job {
    const Linear* layer;
    Tensor y;
    bool adds = false;
  };
  void run_linear(Tensor x, std::span<const Job> jobs);
  // All of one codec; with an activation job 0 is the gate of job 1.
  void run_records(Tensor x, const Codec& codec, std::span<const Job> jobs, std::optional<Activation> activation);
  void run_floats(Tensor x, std::span<const Job> jobs);
  static LinearParams linear_params(std::span<const Job> jobs, int32_t in_features, bool is_gated);
  struct Panel {
    const uint16_t* values;
    const float* row_scale;
    int32_t rows, tiles;
  };
  Panel make_panel(Tensor x);  // or the one that x was left as
  // For an operation that leaves its result x as a panel, too; nothing where no streaming kernel would read it.
  std::optional<PanelOutput> output_panel(Tensor x);
  // One row goes through kernels that take it as it is (linear_row.cu).
  static bool is_row(Tensor x) { return x.rows == 1 && x.features % 32 == 0 && x.features <= kMostRowFeatures; }
  // The launch that made a row: where it is the last one written down, the product behind it does its work, too.
  struct RowWork {
    std::variant<RmsNormParams, NormGateParams> params;
    Recorder::Mark before, after;
  };
  // Writes down a launch whose result x is a row, and what it is.
  template <class Params>
  void launch_row_work(std::string_view name, Grid grid, uint32_t threads, const Params& params, Tensor x) {
    const Recorder::Mark before = recorder_.mark();
    launch("rows", name, grid, threads, params);
    know(x).work = RowWork{params, before, recorder_.mark()};
  }
  // What is known of the tensor that an operation left last, for the product of it.
  struct KnownInput {
    CUdeviceptr begin, end;  // of the tensor
    Tensor x;
    std::optional<Panel> panel;
    std::optional<RowWork> work;
    const float* largest = nullptr;  // [parts], as RowLinearParams::largest
    int32_t parts = 0;
    size_t mark = 0;  // of the arena, behind all this
    bool is(Tensor other) const { return x.data == other.data && x.rows == other.rows && x.features == other.features; }
  };
  KnownInput& know(Tensor x);
  // Of one row.
  void run_row(Tensor x, const Codec& codec, std::span<const Job> jobs);
  using RowParams = std::variant<RowLinearParams, NormLinearParams, NormGateLinearParams>;
  struct RowLaunch {
    const Codec* codec;
    RowParams params;
    Recorder::Mark before, after;
  };
  void launch_row(const Codec& codec, const RowParams& params);
  // Whether the last launch made x, a row; then it makes its convolution, too. `conv` needs no job.
  bool convolves(Tensor x, const RowConv& conv);
  // Whether the work of that launch can be done by the launch of these jobs.
  bool merges(const RowWork& work, std::span<const Job> jobs) const;
  // For an operation that changes memory: what is known of it is not true any more.
  void changes(const void* memory, size_t bytes);
  void changes(Tensor x) { changes(x.data, static_cast<size_t>(x.size()) * sizeof(float)); }
  // Of `items` panels, by the tile of a kernel of prompts, of which they have `rows` rows, or by the streaming kernel for
  // `rows` rows.
  void launch_records(const Codec& codec, const LinearParams& params, bool is_gated, const PromptTile* tile,
                      int32_t rows, int32_t items);

  // --- experts ---
  struct Groups {  // slots by expert, in items of at most item_rows
    const int32_t* expert = nullptr;
    int32_t slots = 0, item_rows = 0, most_items = 0;
    const int32_t* order = nullptr;
    const ExpertItem* items = nullptr;
    size_t mark = 0;  // of the arena, behind them
  };
  struct ExpertTable {
    std::vector<std::shared_ptr<const LinearWeight>> experts;
    std::shared_ptr<std::byte[]> memory;
  };
  // One entry per expert, on the device.
  const ExpertWeight* expert_table(const ExpertLinear& w);
  Groups group_slots(const int32_t* expert, int32_t slots, int32_t experts, int32_t item_rows);
  void run_experts(Tensor x, const Routing& routing, const ExpertLinear& w, const ExpertLinear* up,
                   std::optional<Activation> activation, int32_t slots_per_row, Tensor y);
  void run_expert_records(Tensor x, const Groups& groups, std::span<const ExpertLinear* const> weights,
                          std::optional<Activation> activation, int32_t slots_per_row, const PromptTile* tile,
                          Tensor y);
  void run_expert_floats(Tensor x, const Groups& groups, const ExpertLinear& w, int32_t slots_per_row, Tensor y);

  void rotate(const NormRopeParams& params);

  // Of the sequences that have chunks in the tables.
  void delta_net_in_chunks(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const RowTables& tables,
                           const StateRecords& memory, Tensor y);

  // --- attention ---
  void append_rows(Tensor k, Tensor v, const RowTables& tables, const KvCache& cache);  // k without data: only v
  Tensor attend(Tensor q, Tensor gate, const Rows& rows, const KvLayer& layer, int32_t heads, float scale);
  // Where what is attended to goes: y times its gate, if it has one, and its panel, if one is to be left.
  struct Attended {
    Tensor y, gate;
    std::optional<PanelOutput> out;
  };
  void attend_decode(Tensor q, const Rows& rows, RowRange part, const RowTables& tables, const KvCache& cache,
                     int32_t heads, float scale, const Attended& to);
  void attend_prompt(Tensor q, const Rows& rows, RowRange part, const RowTables& tables, const KvCache& cache,
                     int32_t heads, float scale, Tensor y);
  // Of the tables' first rows, as if only the rows of `part` were there.
  const int32_t* first_rows_of(const Rows& rows, RowRange part, const RowTables& tables);

  static constexpr uint32_t kThreads = 256;

  std::shared_ptr<const Launches> launches_;
  RankSeat seat_;
  DeviceArena arena_;
  Inputs inputs_;
  Staging staging_;
  Recorder recorder_;
  PeerSums peer_sums_;
  struct Unused {
    std::mutex mutex;
    std::vector<std::shared_ptr<std::byte>> memory;
  };
  const std::shared_ptr<Unused> unused_ = std::make_shared<Unused>();  // memory that nobody owns any more
  DeviceMemory row_counters_;                                          // [kMostStreamedRows], zeros between launches
  PinnedMemory host_;
  struct KnownTables {
    std::vector<int32_t> contents;
    CUdeviceptr address;
  };
  std::list<KnownTables> known_tables_;  // since the inputs were forgotten
  std::vector<int32_t> contents_;        // scratch
  std::optional<KnownInput> known_input_;
  std::optional<RowLaunch> row_launch_;                                 // the last one
  Groups groups_;                                                       // the last ones
  std::unordered_map<const LinearWeight*, ExpertTable> expert_tables_;  // by the first expert that is here
  std::exception_ptr failure_;                                          // of work that the end of a Scope started
};

NormRopeParams norm_rope_params(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight* norm, float eps,
                                const RopeTable& table, RopeLayout layout);

// Rows of a ubatch that stream the weights, each with the bits that it has alone; more go through the kernels of prompts.
constexpr int32_t kMostStreamedRows = 64;

// A block per row and column.
inline Grid rows_grid(int32_t rows, int32_t columns) {
  return {static_cast<uint32_t>(rows), static_cast<uint32_t>(columns)};
}
// A warp per item, in blocks of 256 threads.
inline Grid warps_grid(int64_t items) {
  constexpr int64_t kWarps = 256 / 32;
  return {static_cast<uint32_t>((items + kWarps - 1) / kWarps)};
}

// Rows that are computed at once where one takes so many bytes of scratch, of which there are `most`; one row at least.
inline int32_t rows_at_once(size_t bytes_of_one, size_t most = size_t{64} << 20) {
  return static_cast<int32_t>(std::clamp<size_t>(most / std::max<size_t>(1, bytes_of_one), 1, 1 << 20));
}
// Scratch of the rows from `first` on, for kernels that number rows from the ubatch's first.
inline float* from_first_row(float* scratch, int32_t first, size_t values_of_one) {
  return reinterpret_cast<float*>(address_of(scratch) - static_cast<size_t>(first) * values_of_one * sizeof(float));
}
inline CUdeviceptr address_of(Tensor x) { return address_of(static_cast<const void*>(x.data)); }

}  // namespace v100::cuda
