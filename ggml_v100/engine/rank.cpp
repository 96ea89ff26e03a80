// Lays out pages and states of a rank.
#include "engine/rank.h"

namespace v100 {

namespace {

constexpr int64_t kRecordAlignment = 16;  // values: a cache line

}  // namespace

Rank::Rank(const TextModel& text, const Backend& backend, std::unique_ptr<Ops> ops, std::vector<KvShape> shapes,
           int32_t n_pages, int32_t n_state_slots)
    : text_(text), ops_(std::move(ops)) {
  std::vector<size_t> layer_offset;
  for (const KvShape& shape : shapes) {
    layer_offset.push_back(page_bytes_);
    page_bytes_ += backend.kv_page_bytes(shape);
  }
  kv_ = Buffer(static_cast<size_t>(n_pages) * page_bytes_);
  for (size_t layer = 0; layer < shapes.size(); ++layer)
    kv_layers_.push_back({kv_.data() + layer_offset[layer], page_bytes_, shapes[layer]});

  std::vector<int64_t> record_offset;
  for (const StateShape& shape : text.state_shapes()) {
    record_offset.push_back(state_values_);
    state_values_ += (shape.values + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
  }
  states_ = Buffer(static_cast<size_t>(n_state_slots) * state_bytes());
  for (const int64_t offset : record_offset)
    records_.push_back({reinterpret_cast<float*>(states_.data()) + offset, state_values_});
}

Tensor Rank::forward(const Ubatch& ubatch) const {
  const ForwardState state{kv_layers_, records_, ubatch.ropes, ubatch.block_ropes, ubatch.windowed};
  return text_.forward(*ops_, ubatch.rows, state, ubatch.outputs);
}

}  // namespace v100
