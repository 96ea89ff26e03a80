// Memory of the operations, what is row-wise or element-wise, and the meeting points of ranks.
#include "cuda/ops.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "quants/decode.h"

namespace v100::cuda {

namespace {

constexpr size_t kInputBytes = size_t{8} << 20;
constexpr size_t kStagingPiece = size_t{4} << 20, kStagingPieces = 4;

}  // namespace

CudaOps::CudaOps(std::shared_ptr<const Launches> launches, RankSeat seat)
    : launches_(std::move(launches)),
      seat_(seat),
      arena_(launches_->device()),
      inputs_(launches_->device(), kInputBytes),
      staging_(launches_->device(), kStagingPiece, kStagingPieces),
      recorder_(launches_->device()),
      peer_sums_(launches_, seat),
      row_counters_(launches_->device(), kMostStreamedRows * sizeof(uint32_t)) {
  const Device::Guard guard(launches_->device());
  recorder_.stream().fill(row_counters_.address(), 0, row_counters_.bytes());
}

CudaOps::~CudaOps() {
  const Device::Guard guard(launches_->device());
  (void)launches_->device().api().cuStreamSynchronize(
      recorder_.stream().handle());  // nothing reads our memory any more
}

// --- writing down ---

Grid CudaOps::flat_grid(int64_t n) const {
  const int64_t most = int64_t{launches_->device().info().multiprocessors} * 8;
  return {static_cast<uint32_t>(std::min(most, (n + kThreads - 1) / kThreads))};
}

void CudaOps::start() {
  if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  const Device::Guard guard(launches_->device());
  inputs_.send(recorder_.stream());
  recorder_.run([this] { peer_sums_.meet_before_start(); });
}

void CudaOps::abandon() {
  recorder_.drop();
  peer_sums_.forget_pending();
}

void CudaOps::restart_inputs() {
  start();
  const Device::Guard guard(launches_->device());
  inputs_.restart();
  known_tables_.clear();
}

void CudaOps::enter(const Rows&) { restart_inputs(); }

void CudaOps::arena_release(size_t mark) {
  arena_.release(mark);
  if (groups_.mark > mark) groups_ = {};
  if (known_input_ && known_input_->mark > mark) known_input_.reset();
  if (mark > 0) return;
  try {  // a pass has ended; this is called by destructors
    restart_inputs();
  } catch (const Interrupted&) {  // of a failure elsewhere, which is known
  } catch (...) {
    failure_ = std::current_exception();
  }
}

// --- memory ---

Tensor CudaOps::create(int32_t rows, int32_t features) {
  seat_.beat();
  return {take<float>(static_cast<size_t>(rows) * static_cast<size_t>(features)), rows, features};
}

Tensor CudaOps::zeros(int32_t rows, int32_t features) {
  const Tensor y = create(rows, features);
  recorder_.fill(address_of(y), 0, static_cast<size_t>(y.size()) * sizeof(float));
  return y;
}

CUdeviceptr CudaOps::bring(size_t bytes, size_t unit, const Staging::Fill& fill, bool* is_in_arena) {
  if (const auto place = inputs_.take(bytes)) {
    fill(place->host, 0, bytes);
    return place->device;
  }
  if (is_in_arena != nullptr) *is_in_arena = true;
  const CUdeviceptr address = arena_.take(bytes);
  start();  // what was written down may use this part of the arena
  const Device::Guard guard(launches_->device());
  staging_.upload(recorder_.stream(), address, bytes, unit, fill);
  return address;
}

RowTables CudaOps::tables(const Rows& rows) {
  write_row_tables(rows, contents_);
  for (const KnownTables& known : known_tables_)
    if (known.contents == contents_) return row_tables_at(rows, known.address);
  bool is_in_arena = false;
  const CUdeviceptr address = address_of(bring(std::span<const int32_t>(contents_), &is_in_arena));
  if (!is_in_arena) known_tables_.push_back({contents_, address});
  return row_tables_at(rows, address);
}

Tensor CudaOps::embed(std::span<const int32_t> tokens, const EmbeddingTable& table) {
  const Tensor y = create(static_cast<int32_t>(tokens.size()), table.features);
  const int64_t row_size = row_bytes(traits(table.type), table.features);
  const size_t row = static_cast<size_t>(table.features) * sizeof(float);
  const auto fill = [&](std::byte* piece, size_t first, size_t count) {
    for (size_t r = 0; r < count / row; ++r)
      decode(table.type, table.rows + tokens[first / row + r] * row_size, reinterpret_cast<float*>(piece + r * row),
             table.features);
  };
  const size_t bytes = tokens.size() * row;
  if (bytes <= kInputBytes / 4) {
    recorder_.copy(address_of(y), bring(bytes, row, fill), bytes);
  } else {
    start();
    const Device::Guard guard(launches_->device());
    staging_.upload(recorder_.stream(), address_of(y), bytes, row, fill);
  }
  return y;
}

RopeTable CudaOps::place_angles(const RopeTable& table) {
  const size_t count = static_cast<size_t>(table.rows) * static_cast<size_t>(table.pairs);
  return {bring(std::span(table.cosine, count)), bring(std::span(table.sine, count)), table.pairs, table.rows};
}

std::shared_ptr<std::byte[]> CudaOps::allocate(size_t bytes) {
  auto memory = allocate_on(launches_, bytes);
  const Device::Guard guard(launches_->device());
  recorder_.stream().fill(address_of(memory.get()), 0, bytes);
  return kept(std::move(memory));
}

std::shared_ptr<std::byte[]> CudaOps::allocate_on_host(size_t bytes) {
  auto memory = allocate_pinned(launches_, bytes);
  if (bytes > 0) std::memset(memory.get(), 0, bytes);
  return kept(std::move(memory));
}

std::shared_ptr<std::byte[]> CudaOps::kept(std::shared_ptr<std::byte> memory) {
  // What was written down may use memory whose last owner lets it go: it stays until the stream was waited for.
  std::byte* address = memory.get();
  return {address, [memory = std::move(memory), unused = unused_](std::byte*) {
            const std::lock_guard lock(unused->mutex);
            unused->memory.push_back(memory);
          }};
}

void CudaOps::wait() {
  recorder_.stream().synchronize();
  peer_sums_.check();
  if (!recorder_.is_empty()) return;
  std::vector<std::shared_ptr<std::byte>> unused;
  {
    const std::lock_guard lock(unused_->mutex);
    unused.swap(unused_->memory);
  }
}

void CudaOps::copy_bytes(const std::byte* from, std::byte* to, size_t bytes) {
  changes(to, bytes);
  recorder_.copy(address_of(to), address_of(from), bytes);
}

void CudaOps::read_bytes(const std::byte* from, std::byte* host, size_t bytes) {
  start();
  const Device::Guard guard(launches_->device());
  staging_.download(recorder_.stream(), host, address_of(from), bytes);
  wait();
}

void CudaOps::write_bytes(const std::byte* host, std::byte* to, size_t bytes) {
  changes(to, bytes);
  start();
  const Device::Guard guard(launches_->device());
  staging_.upload(recorder_.stream(), address_of(to), host, bytes);
}

void CudaOps::read(Tensor x, std::span<float> destination) {
  read_bytes(reinterpret_cast<const std::byte*>(x.data), reinterpret_cast<std::byte*>(destination.data()),
             static_cast<size_t>(x.size()) * sizeof(float));
}

float* CudaOps::host_room(size_t values) {
  if (host_.bytes() < values * sizeof(float)) {
    const Device& device = launches_->device();
    const Device::Guard guard(device);
    recorder_.stream().synchronize();  // a copy out of it may be under way
    host_ = PinnedMemory(device, std::max(values * sizeof(float), 2 * host_.bytes()));
  }
  return reinterpret_cast<float*>(host_.data());
}

float* CudaOps::host_copy_of(Tensor x) {
  start();
  float* host = host_room(static_cast<size_t>(x.size()));
  const Device::Guard guard(launches_->device());
  if (x.size() > 0) recorder_.stream().copy_to_host(host, address_of(x), static_cast<size_t>(x.size()) * sizeof(float));
  wait();
  return host;
}

Tensor CudaOps::on_host(Tensor x) { return {host_copy_of(x), x.rows, x.features}; }

// --- row-wise and element-wise ---

Tensor CudaOps::rms_norm(Tensor x, const VectorWeight& w, float eps) { return add_rms_norm(x, {}, w, eps); }

Tensor CudaOps::add_rms_norm(Tensor x, Tensor a, const VectorWeight& w, float eps) {
  if (a.data != nullptr) changes(x);
  const Tensor y = create(x.rows, x.features);
  const RmsNormParams norm{.x = x.data,
                           .added = a.data,
                           .weight = w.data.get(),
                           .y = y.data,
                           .rows = x.rows,
                           .features = x.features,
                           .eps = eps};
  if (is_row(y))
    launch_row_work("rms_norm", {1}, kNormThreads, norm, y);
  else if (const auto out = output_panel(y))
    launch("rows_panel", "rms_norm_panel", {static_cast<uint32_t>(x.rows)}, kNormThreads,
           RmsNormPanelParams{norm, *out});
  else
    launch("rows", "rms_norm", {static_cast<uint32_t>(x.rows)}, kNormThreads, norm);
  return y;
}

void CudaOps::add(Tensor x, Tensor a) {
  changes(x);
  launch_flat("rows", "add", x.size(), AddParams{.x = x.data, .added = a.data, .n = x.size()});
}

void CudaOps::add_vector(Tensor x, const VectorWeight& v) {
  changes(x);
  launch("rows", "add_vector", rows_grid(x.rows, wide_blocks(x.features)), kThreads,
         AddVectorParams{.x = x.data, .vector = v.data.get(), .rows = x.rows, .features = x.features});
}

void CudaOps::add_scaled_rows(Tensor x, Tensor a, std::span<const int32_t> indices, std::span<const float> factors) {
  changes(x);
  launch("rows", "add_scaled_rows", rows_grid(a.rows, wide_blocks(a.features)), kThreads,
         AddScaledRowsParams{.x = x.data,
                             .added = a.data,
                             .indices = bring(indices),
                             .factors = bring(factors),
                             .rows = a.rows,
                             .features = a.features});
}

void CudaOps::scale(Tensor x, float factor) {
  changes(x);
  launch_flat("rows", "scale", x.size(), ScaleParams{.x = x.data, .n = x.size(), .factor = factor});
}

void CudaOps::soft_cap(Tensor x, float cap) {
  changes(x);
  launch_flat("rows", "soft_cap", x.size(), ScaleParams{.x = x.data, .n = x.size(), .factor = cap});
}

void CudaOps::activate(Tensor x, Tensor up, Activation activation) {
  const GatedParams params{
      .gate = x.data, .up = up.data, .y = x.data, .n = x.size(), .activation = static_cast<int32_t>(activation)};
  if (is_row(x)) {
    const int32_t parts = wide_blocks(x.features);
    auto* largest = take<float>(static_cast<size_t>(parts));
    launch("rows", "gated_largest", {static_cast<uint32_t>(parts)}, kThreads, GatedLargestParams{params, largest});
    KnownInput& known = know(x);
    known.largest = largest, known.parts = parts;
  } else if (const auto out = output_panel(x))
    launch("rows_panel", "gated_panel", {static_cast<uint32_t>(x.rows)}, kRowThreads,
           GatedPanelParams{params, *out, x.features});
  else
    launch_flat("rows", "gated", x.size(), params);
}

// --- rotations ---

NormRopeParams norm_rope_params(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight* norm, float eps,
                                const RopeTable& table, RopeLayout layout) {
  return {.x = x.data,
          .weight = norm != nullptr ? norm->data.get() : nullptr,
          .cosine = table.cosine,
          .sine = table.sine,
          .rows = x.rows,
          .heads = heads,
          .head_dim = head_dim,
          .pairs = table.pairs,
          .halves = layout == RopeLayout::halves ? 1 : 0,
          .eps = eps};
}

void CudaOps::rotate(const NormRopeParams& params) {
  const int64_t heads = int64_t{params.rows} * params.heads;
  changes(params.x, static_cast<size_t>(heads) * static_cast<size_t>(params.head_dim) * sizeof(float));
  launch("rows", "norm_rope", warps_grid(heads), kThreads, params);
}

void CudaOps::rope(Tensor x, int32_t heads, int32_t head_dim, const RopeTable& table, RopeLayout layout) {
  rotate(norm_rope_params(x, heads, head_dim, nullptr, 0.0f, table, layout));
}

void CudaOps::norm_rope(Tensor x, int32_t heads, int32_t head_dim, const VectorWeight& w, float eps,
                        const RopeTable& table, RopeLayout layout) {
  rotate(norm_rope_params(x, heads, head_dim, &w, eps, table, layout));
}

// --- gates ---

void CudaOps::apply_gate(Tensor x, Tensor gate) {
  if (x.features == 0) return;
  const ApplyGateParams params{
      .x = x.data, .gate = gate.data, .rows = x.rows, .features = x.features, .gates = gate.features};
  if (const auto out = output_panel(x))
    launch("rows_panel", "apply_gate_panel", {static_cast<uint32_t>(x.rows)}, kRowThreads,
           ApplyGatePanelParams{params, *out});
  else
    launch_flat("rows", "apply_gate", x.size(), params);
}

Tensor CudaOps::norm_gate(Tensor x, Tensor gate, const VectorWeight& w, float eps, GateFunction function) {
  const int32_t heads = x.features / w.size;
  const Tensor y = is_row(x) ? create(1, x.features) : x;
  const NormGateParams params{.x = x.data,
                              .gate = gate.data,
                              .weight = w.data.get(),
                              .y = y.data,
                              .rows = x.rows,
                              .heads = heads,
                              .head_dim = w.size,
                              .function = static_cast<int32_t>(function),
                              .eps = eps};
  if (is_row(x))
    launch_row_work("norm_gate", warps_grid(heads), kThreads, params, y);
  else if (const auto out = output_panel(y))
    launch("rows_panel", "norm_gate_panel", {static_cast<uint32_t>(x.rows)}, kRowThreads,
           NormGatePanelParams{params, *out});
  else
    launch("rows", "norm_gate", warps_grid(int64_t{x.rows} * heads), kThreads, params);
  return y;
}

// --- moves ---

void CudaOps::place(Tensor x, Tensor y, int32_t first) {
  changes(y);
  launch("row_moves", "copy_columns", rows_grid(x.rows, wide_blocks(x.features)), kThreads,
         CopyColumnsParams{.x = x.data,
                           .y = y.data + first,
                           .from_stride = x.features,
                           .to_stride = y.features,
                           .rows = x.rows,
                           .columns = x.features});
}

Tensor CudaOps::gather_rows(Tensor x, std::span<const int32_t> indices) {
  const Tensor y = create(static_cast<int32_t>(indices.size()), x.features);
  launch("rows", "gather_rows", {static_cast<uint32_t>(y.rows)}, kThreads,
         GatherRowsParams{.x = x.data, .indices = bring(indices), .y = y.data, .rows = y.rows, .features = x.features});
  return y;
}

void CudaOps::copy(Tensor x, Tensor to) {
  changes(to);
  recorder_.copy(address_of(to), address_of(x), static_cast<size_t>(x.size()) * sizeof(float));
}

Tensor CudaOps::concatenate(Tensor x, Tensor y) {
  const Tensor z = create(x.rows, x.features + y.features);
  place(x, z, 0);
  place(y, z, x.features);
  return z;
}

// --- meeting points ---

void CudaOps::all_reduce(Tensor partial) {
  if (seat_.is_alone()) return;
  changes(partial);
  seat_.beat();
  if (partial.size() % 4 == 0) {
    if (peer_sums_.must_meet()) start();
    const Device::Guard guard(launches_->device());
    if (peer_sums_.is_ready(recorder_)) return peer_sums_.sum(recorder_, partial);
  }
  float* host = host_copy_of(partial);
  seat_.all_reduce(host, partial.size());
  const Device::Guard guard(launches_->device());
  if (partial.size() > 0)  // the next copy into the same memory is behind this one in the stream
    recorder_.stream().copy_to_device(address_of(partial), host, static_cast<size_t>(partial.size()) * sizeof(float));
}

void CudaOps::broadcast(Tensor x, int32_t root) {
  if (seat_.is_alone()) return;
  changes(x);
  const bool gives = seat_.is_rank(root);
  if (!gives) start();
  float* host = gives ? host_copy_of(x) : host_room(static_cast<size_t>(x.size()));
  const Device::Guard guard(launches_->device());
  if (!gives) recorder_.stream().synchronize();  // an upload out of it may be under way
  seat_.broadcast(root, host, x.size());
  if (!gives && x.size() > 0)
    recorder_.stream().copy_to_device(address_of(x), host, static_cast<size_t>(x.size()) * sizeof(float));
}

}  // namespace v100::cuda
