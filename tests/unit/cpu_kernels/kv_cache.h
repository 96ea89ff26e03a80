// KV caches of both backends side by side, and ubatches of several sequences.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "harness.h"

namespace v100::test {

// Both backends' pages of one layer, and sequences that grow in them.
class Cache {
 public:
  Cache(Pair& pair, const KvShape& shape, int32_t n_pages) : pair_(pair), shape_(shape) {
    fast_stride_ = pair.fast->kv_page_bytes(shape);
    plain_stride_ = pair.plain->kv_page_bytes(shape);
    fast_pages_.resize(fast_stride_ * static_cast<size_t>(n_pages) / sizeof(Line));
    plain_pages_.resize(plain_stride_ * static_cast<size_t>(n_pages) / sizeof(Line) + 1);
  }

  KvLayer fast() { return {reinterpret_cast<std::byte*>(fast_pages_.data()), fast_stride_, shape_}; }
  KvLayer plain() { return {reinterpret_cast<std::byte*>(plain_pages_.data()), plain_stride_, shape_}; }
  size_t fast_stride() const { return fast_stride_; }

  void append(const std::vector<float>& k, const std::vector<float>& v, const Rows& rows) {
    const Ops::Scope fast_scope(*pair_.fast_ops), plain_scope(*pair_.plain_ops);
    pair_.fast_ops->kv_append(copy_to(*pair_.fast_ops, k, rows.count()), copy_to(*pair_.fast_ops, v, rows.count()),
                              rows, fast());
    pair_.plain_ops->kv_append(copy_to(*pair_.plain_ops, k, rows.count()), copy_to(*pair_.plain_ops, v, rows.count()),
                               rows, plain());
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  Pair& pair_;
  KvShape shape_;
  size_t fast_stride_, plain_stride_;
  std::vector<Line> fast_pages_, plain_pages_;
};

// Rows of a ubatch with the storage behind its spans.
struct Batch {
  std::vector<int32_t> tokens, positions, kv_index;
  std::vector<RowRange> visible;
  std::vector<SequenceRows> sequences;

  void add(int32_t first_index, int32_t count, std::span<const PageId> pages, int32_t window) {
    const auto begin = static_cast<int32_t>(tokens.size());
    for (int32_t i = first_index; i < first_index + count; ++i) {
      tokens.push_back(0), positions.push_back(i), kv_index.push_back(i);
      visible.push_back({window > 0 ? std::max(0, i + 1 - window) : 0, i + 1});
    }
    sequences.push_back({{begin, begin + count}, pages});
  }
  Rows rows() const {
    return {.tokens = tokens, .positions = positions, .kv_index = kv_index, .visible = visible, .sequences = sequences};
  }
};

}  // namespace v100::test
