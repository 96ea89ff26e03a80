// Lays out pages and states of a rank.
#include "engine/rank.h"

namespace v100 {

namespace {

constexpr int64_t kRecordAlignment = 16;  // values: a cache line

int64_t aligned(const StateShape& shape) {
  return (shape.values + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
}

}  // namespace

RankSizes rank_sizes(const TextModel& text, const Backend& backend, std::span<const KvShape> shapes) {
  RankSizes sizes;
  for (const KvShape& shape : shapes)
    (shape.is_windowed ? sizes.window_page_bytes : sizes.page_bytes) += backend.kv_page_bytes(shape);
  for (const StateShape& shape : text.state_shapes())
    sizes.state_bytes += static_cast<size_t>(aligned(shape)) * sizeof(float);
  return sizes;
}

void read_part(Ops& ops, Tensor part, int32_t first, std::span<float> all, int32_t width) {
  if (part.features == width) return ops.read(part, all);
  const auto columns = static_cast<size_t>(part.features);
  for (int32_t i = 0; i < part.rows && columns > 0; ++i)
    ops.read({part.row(i), 1, part.features},
             all.subspan(static_cast<size_t>(i) * static_cast<size_t>(width) + static_cast<size_t>(first), columns));
}

Rank::Rank(const TextModel& text, const Backend& backend, std::unique_ptr<Ops> ops, std::vector<KvShape> shapes,
           int32_t n_pages, int32_t n_window_pages, int32_t n_state_slots, std::vector<VectorWeight> directions,
           bool kv_on_host)
    : text_(text), ops_(std::move(ops)), directions_(std::move(directions)) {
  std::vector<size_t> layer_offset;
  for (const KvShape& shape : shapes) {
    size_t& page_bytes = shape.is_windowed ? window_page_bytes_ : page_bytes_;
    layer_offset.push_back(page_bytes);
    page_bytes += backend.kv_page_bytes(shape);
  }
  const auto allocate_pages = [&](int32_t n, size_t bytes_of_one) {
    const size_t bytes = static_cast<size_t>(n) * bytes_of_one;
    return kv_on_host ? ops_->allocate_on_host(bytes) : ops_->allocate(bytes);
  };
  kv_ = allocate_pages(n_pages, page_bytes_);
  window_kv_ = allocate_pages(n_window_pages, window_page_bytes_);
  for (size_t layer = 0; layer < shapes.size(); ++layer) {
    const bool is_windowed = shapes[layer].is_windowed;
    kv_layers_.push_back({(is_windowed ? window_kv_ : kv_).get() + layer_offset[layer],
                          is_windowed ? window_page_bytes_ : page_bytes_, shapes[layer]});
  }

  std::vector<int64_t> record_offset;
  for (const StateShape& shape : text.state_shapes()) {
    record_offset.push_back(state_values_);
    state_values_ += aligned(shape);
  }
  states_ = ops_->allocate(static_cast<size_t>(n_state_slots) * state_bytes());
  for (const int64_t offset : record_offset)
    records_.push_back({reinterpret_cast<float*>(states_.get()) + offset, state_values_});
  kept_ = std::vector<KeptInputs>(records_.size());
}

ForwardState Rank::state_of(const Ubatch& ubatch) const {
  ropes_.clear(), block_ropes_.clear();
  for (const RopeTable& table : ubatch.ropes) ropes_.push_back(ops_->place_angles(table));
  for (const RopeTable& table : ubatch.block_ropes) block_ropes_.push_back(ops_->place_angles(table));
  return {kv_layers_, records_, ropes_, block_ropes_, directions_, ubatch.windowed, kept_, ubatch.kept_rows};
}

Tensor Rank::forward(const Ubatch& ubatch) const {
  ops_->enter(ubatch.rows);
  return text_.forward(*ops_, ubatch.rows, state_of(ubatch), ubatch.outputs);
}

Tensor Rank::block_states(const Ubatch& ubatch, int32_t block_rows) const {
  ops_->enter(ubatch.rows);
  return text_.block_states(*ops_, ubatch.rows, block_rows, state_of(ubatch));
}

Tensor Rank::predict(const Ubatch& ubatch, std::span<const int32_t> before) const {
  ops_->enter(ubatch.rows);
  const Tensor last = before.empty() ? Tensor{} : ops_->gather_rows(predicted_[0], before);
  const Tensor hidden = text_.predict(*ops_, ubatch.rows, state_of(ubatch), last);
  predicted_.keep(*ops_, {hidden}, hidden.rows);
  return hidden;
}

void Rank::replay(const Ubatch& ubatch) const { text_.replay(*ops_, ubatch.rows, state_of(ubatch)); }

}  // namespace v100
