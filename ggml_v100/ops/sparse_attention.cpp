// Sparse attention over pages of the reference: every key is decoded by itself.
#include "ops/sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/math.h"
#include "ops/reference_blocks.h"
#include "quants/decode.h"

namespace v100 {

std::vector<int32_t> best_blocks(std::span<const float> scores, int32_t most) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(
      order, [&](int32_t a, int32_t b) { return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)]; });
  order.resize(std::min(order.size(), static_cast<size_t>(most)));
  std::ranges::sort(order);
  return order;
}

void store_index_key(const SequenceRows& sequence, const KvLayer& index, int32_t token, const float* key) {
  const PageLayout page(index.shape);
  encode_kv(index.shape.type_v, key, page_of(index, sequence, token) + page.v_offset(0, token % kPageTokens),
            index.shape.head_dim_v);
}

void store_block_key(const SequenceRows& sequence, const KvLayer& index, int32_t last, const float* key) {
  const PageLayout page(index.shape);
  encode_kv(index.shape.type_k, key,
            page_of(index, sequence, last) + page.k_offset(0, last % kPageTokens / index.shape.block),
            index.shape.head_dim_k);
}

void mean_index_key(const SequenceRows& sequence, const KvLayer& index, int32_t last, float* mean) {
  const PageLayout page(index.shape);
  const int32_t block = index.shape.block, n = index.shape.head_dim_v;
  std::vector<float> key(static_cast<size_t>(n));
  for (int32_t token = last + 1 - block; token <= last; ++token) {
    decode(index.shape.type_v, page_of(index, sequence, token) + page.v_offset(0, token % kPageTokens), key.data(), n);
    for (int32_t d = 0; d < n; ++d)
      mean[d] = token == last + 1 - block ? key[static_cast<size_t>(d)] : mean[d] + key[static_cast<size_t>(d)];
  }
  for (int32_t d = 0; d < n; ++d) mean[d] *= 1.0f / static_cast<float>(block);
}

std::vector<float> score_blocks(const float* q, const SequenceRows& sequence, const KvLayer& index, int32_t heads,
                                int32_t count) {
  const PageLayout page(index.shape);
  const int32_t n = index.shape.head_dim_k, block = index.shape.block;
  std::vector<float> scores, key(static_cast<size_t>(n));
  for (int32_t b = 0; b < count; ++b) {
    const int32_t token = b * block;
    decode(index.shape.type_k, page_of(index, sequence, token) + page.k_offset(0, token % kPageTokens / block),
           key.data(), n);
    float score = 0;
    for (int32_t h = 0; h < heads; ++h) {
      float dot = 0;
      for (int32_t d = 0; d < n; ++d) dot = std::fma(q[h * n + d], key[static_cast<size_t>(d)], dot);
      score += dot > 0 ? dot : 0.0f;
    }
    scores.push_back(score);
  }
  return scores;
}

void attend_keys(const float* q, const SequenceRows& sequence, std::span<const int32_t> keys, const KvLayer& layer,
                 int32_t kv_head, float scale, float* y) {
  const PageLayout layout(layer.shape);
  const int32_t dim_k = layer.shape.head_dim_k, dim_v = layer.shape.head_dim_v;
  std::vector<float> key(static_cast<size_t>(dim_k)), value(static_cast<size_t>(dim_v)),
      output(static_cast<size_t>(dim_v));
  float max_all = 0, sum_all = 0;
  std::fill_n(y, dim_v, 0.0f);
  for (size_t first = 0, end = 0; first < keys.size(); first = end) {
    const int32_t page = keys[first] / kPageTokens;
    while (end < keys.size() && keys[end] / kPageTokens == page) ++end;
    const std::span<const int32_t> mine = keys.subspan(first, end - first);
    const std::byte* base = page_of(layer, sequence, page * kPageTokens);

    float score[kPageTokens];
    float max_page = -std::numeric_limits<float>::infinity();
    for (const int32_t index : mine) {
      const int32_t j = index % kPageTokens;
      decode(layer.shape.type_k, base + layout.k_offset(kv_head, j), key.data(), dim_k);
      float dot = 0;
      for (int32_t d = 0; d < dim_k; ++d) dot = std::fma(q[d], key[static_cast<size_t>(d)], dot);
      score[j] = scale * dot;
      max_page = std::max(max_page, score[j]);
    }
    float partial[16] = {};
    std::fill(output.begin(), output.end(), 0.0f);
    for (const int32_t index : mine) {
      const int32_t j = index % kPageTokens;
      const float p = exp_f32(score[j] - max_page);
      partial[j % 16] += p;
      decode(layer.shape.type_v, base + layout.v_offset(kv_head, j), value.data(), dim_v);
      for (int32_t d = 0; d < dim_v; ++d)
        output[static_cast<size_t>(d)] = std::fma(p, value[static_cast<size_t>(d)], output[static_cast<size_t>(d)]);
    }
    const float sum_page = sum_of_16(partial);
    if (first == 0) {
      max_all = max_page, sum_all = sum_page;
      std::copy(output.begin(), output.end(), y);
      continue;
    }
    const float max_new = std::max(max_all, max_page);
    const float a = exp_f32(max_all - max_new), b = exp_f32(max_page - max_new);
    sum_all = std::fma(sum_all, a, sum_page * b);
    for (int32_t d = 0; d < dim_v; ++d) y[d] = std::fma(y[d], a, output[static_cast<size_t>(d)] * b);
    max_all = max_new;
  }
  if (!keys.empty())
    for (int32_t d = 0; d < dim_v; ++d) y[d] /= sum_all;
}

}  // namespace v100
