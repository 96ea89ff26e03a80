// KV pages and attention against the reference, bit for bit: page borders, several sequences, windows, groups, KV
// types.
#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "kv_cache.h"

namespace v100::test {

namespace {

struct Case {
  int32_t kv_heads, group, dim_k, dim_v;
  int32_t window;
  int32_t missing = 0, skew = 0;  // query heads of the groups that are on other ranks; those before the first here

  int32_t heads() const { return kv_heads * group - missing; }
};

// Tokens of the three sequences in each ubatch.
using Step = std::array<int32_t, 3>;
constexpr Step kShortSteps[] = {{1, 40, 0}, {250, 1, 3}, {8, 0, 60}, {1, 1, 1}};
constexpr Step kLongSteps[] = {{1, 40, 0}, {250, 1, 3}, {1, 0, 260}, {5, 1, 1}, {300, 0, 0}, {2, 215, 0}, {1, 1, 1}};

void run_case(Pair& pair, Failures& failures, const Case& c, QuantType type_k, QuantType type_v, Random& random,
              std::span<const Step> steps = kShortSteps) {
  const KvShape shape{.type_k = type_k,
                      .type_v = type_v,
                      .kv_heads = c.kv_heads,
                      .head_dim_k = c.dim_k,
                      .head_dim_v = c.dim_v,
                      .group = c.group,
                      .skew = c.skew};
  constexpr int32_t kPages = 12;
  Cache cache(pair, shape, kPages);
  std::vector<PageId> ids(kPages);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  // Three sequences with their own pages; ubatches of (tokens of sequence 0, 1, 2).
  const std::span<const PageId> pages[3] = {{ids.data(), 5}, {ids.data() + 5, 3}, {ids.data() + 8, 4}};
  int32_t length[3] = {};
  for (const Step& step : steps) {
    Batch batch;
    for (int32_t s = 0; s < 3; ++s) {
      const int32_t count = step[static_cast<size_t>(s)];
      if (count == 0) continue;
      batch.add(length[s], count, pages[s], c.window);
      length[s] += count;
    }
    const Rows rows = batch.rows();
    const int32_t m = rows.count(), heads = c.heads();
    cache.append(random_inputs(m, c.kv_heads * c.dim_k, random), random_inputs(m, c.kv_heads * c.dim_v, random), rows);
    const std::vector<float> q = random_inputs(m, heads * c.dim_k, random);
    const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
    const float scale = 0.3f;
    Tensor found = pair.fast_ops->attention(copy_to(*pair.fast_ops, q, m), rows, cache.fast(), heads, scale);
    Tensor expected = pair.plain_ops->attention(copy_to(*pair.plain_ops, q, m), rows, cache.plain(), heads, scale);
    if (!failures.expect_same(values_of(found), values_of(expected),
                              "attention " + std::string(traits(type_k).name) + "/" + std::string(traits(type_v).name) +
                                  " kv_heads=" + std::to_string(c.kv_heads) + " group=" + std::to_string(c.group) +
                                  " skew=" + std::to_string(c.skew) + " dims=" + std::to_string(c.dim_k) + "/" +
                                  std::to_string(c.dim_v) + " window=" + std::to_string(c.window) +
                                  " rows=" + std::to_string(m) + " y/row=" + std::to_string(heads * c.dim_v)))
      return;
  }
}

}  // namespace

void test_attention(Pair& pair, Failures& failures) {
  Random random(6);
  constexpr QuantType kTypes[] = {QuantType::F32, QuantType::F16, QuantType::BF16, QuantType::Q8_0, QuantType::Q4_0};
  for (const QuantType type_k : kTypes)
    for (const QuantType type_v : kTypes) run_case(pair, failures, {1, 2, 32, 32, 0}, type_k, type_v, random);
  run_case(pair, failures, {3, 3, 64, 64, 0}, QuantType::F16, QuantType::F16, random, kLongSteps);
  run_case(pair, failures, {3, 3, 64, 64, 100}, QuantType::F16, QuantType::F16, random);
  run_case(pair, failures, {1, 5, 64, 32, 300}, QuantType::Q8_0, QuantType::Q8_0, random);
  run_case(pair, failures, {2, 1, 8, 8, 0}, QuantType::F16, QuantType::F16, random, kLongSteps);
  run_case(pair, failures, {2, 7, 5, 19, 7}, QuantType::F32, QuantType::BF16, random);
  run_case(pair, failures, {1, 60, 16, 24, 0}, QuantType::F16, QuantType::F32, random);
  run_case(pair, failures, {1, 2, 96, 128, 33}, QuantType::Q4_0, QuantType::Q8_0, random);
  // Parts of groups: the ranks of a split that keeps a kv head twice.
  for (const int32_t skew : {0, 2, 4})
    run_case(pair, failures, {2, 6, 32, 32, 0, 4, skew}, QuantType::F16, QuantType::Q8_0, random, kLongSteps);
  run_case(pair, failures, {3, 60, 16, 16, 50, 70, 31}, QuantType::F32, QuantType::F32, random);
}

// Cells that a row does not see may hold anything: infinities and NaNs there must not reach the result.
void test_attention_unseen_keys(Pair& pair, Failures& failures) {
  Random random(7);
  const KvShape shape{
      .type_k = QuantType::F16, .type_v = QuantType::F16, .kv_heads = 2, .head_dim_k = 16, .head_dim_v = 16};
  Cache cache(pair, shape, 2);
  const PageId pages[] = {1, 0};
  Batch all;
  all.add(0, 512, pages, 0);
  std::vector<float> k = random_inputs(512, 32, random), v = random_inputs(512, 32, random);
  const int32_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300};
  for (const int32_t length : lengths)
    for (const int32_t window : {0, 3, 20, 70}) {
      std::vector<float> poisoned_k = k, poisoned_v = v;
      const int32_t begin = window > 0 ? std::max(0, length - window) : 0;
      for (int32_t i = 0; i < 512; ++i)
        if (i < begin || i >= length)
          for (int32_t d = 0; d < 32; ++d) {
            const auto at = static_cast<size_t>(i * 32 + d);
            poisoned_k[at] =
                d % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
            poisoned_v[at] = std::numeric_limits<float>::quiet_NaN();
          }
      cache.append(poisoned_k, poisoned_v, all.rows());
      Batch one;
      one.add(length - 1, 1, pages, window);
      const std::vector<float> q = random_inputs(1, 64, random);
      const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
      Tensor found = pair.fast_ops->attention(copy_to(*pair.fast_ops, q, 1), one.rows(), cache.fast(), 4, 0.25f);
      Tensor expected = pair.plain_ops->attention(copy_to(*pair.plain_ops, q, 1), one.rows(), cache.plain(), 4, 0.25f);
      failures.expect_same(values_of(found), values_of(expected), "unseen keys, length " + std::to_string(length));
      failures.expect(found.data[0] == found.data[0], "an unseen value made a NaN");
    }
  // A row that sees nothing gives zeros.
  Batch none;
  none.add(7, 1, pages, 0);
  none.visible[0] = {5, 5};
  const Ops::Scope scope(*pair.fast_ops);
  Tensor y = pair.fast_ops->attention(copy_to(*pair.fast_ops, random_inputs(1, 64, random), 1), none.rows(),
                                      cache.fast(), 4, 1.0f);
  for (int64_t i = 0; i < y.size(); ++i) failures.expect(y.data[i] == 0.0f, "a row without keys is not zero");
}

}  // namespace v100::test
