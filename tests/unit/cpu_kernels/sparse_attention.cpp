// The indexer's cache, the choice of blocks and attention to them, against the reference: page borders, sizes of blocks,
// several sequences, KV types, ties. Where the budget takes in everything the result is that of attention.
#include <array>
#include <numeric>

#include "kv_cache.h"

namespace v100::test {

namespace {

struct Case {
  int32_t block, most, index_heads, index_dim;
  int32_t kv_heads, group, dim_k, dim_v;
  QuantType type_k, type_v;
  bool few_values = false;        // queries and keys of -1, 0, 1: many scores are equal
  int32_t missing = 0, skew = 0;  // query heads of the groups that are on other ranks; those before the first here
};

// Tokens of the three sequences in each ubatch. They end inside and at the end of blocks and pages, and the last is long.
using Step = std::array<int32_t, 3>;
constexpr Step kSteps[] = {{1, 40, 0},  {250, 1, 3}, {1, 0, 60},  {2, 0, 1},
                           {1, 1, 200}, {1, 0, 0},   {520, 1, 1}, {1, 1, 1}};
constexpr Step kFewSteps[] = {{1, 70, 3}, {300, 1, 1}, {1, 1, 1}};

std::vector<float> inputs(int32_t rows, int32_t features, Random& random, bool few_values) {
  std::vector<float> x = random_inputs(rows, features, random);
  if (few_values)
    for (float& value : x) value = value > 0.5f ? 1.0f : value < -0.5f ? -1.0f : 0.0f;
  return x;
}

std::span<const int32_t> integers(const int32_t* data, int64_t count) { return {data, static_cast<size_t>(count)}; }

// Chosen blocks are in range, ascending, and as many as there can be.
bool is_sound(const BlockChoice& choice, const Rows& rows) {
  for (int32_t r = 0; r < choice.rows; ++r) {
    const int32_t complete = rows.visible[static_cast<size_t>(r)].end / choice.block;
    if (choice.count[r] != std::min(complete, choice.most)) return false;
    const std::span<const int32_t> blocks = integers(choice.blocks + int64_t{r} * choice.most, choice.count[r]);
    for (size_t i = 0; i < blocks.size(); ++i)
      if (blocks[i] < 0 || blocks[i] >= complete || (i > 0 && blocks[i] <= blocks[i - 1])) return false;
  }
  return true;
}

bool same_choice(const BlockChoice& found, const BlockChoice& expected) {
  if (found.most != expected.most) return false;
  for (int32_t r = 0; r < expected.rows; ++r) {
    const int64_t first = int64_t{r} * expected.most;
    if (!std::ranges::equal(integers(found.blocks + first, found.count[r]),
                            integers(expected.blocks + first, expected.count[r])))
      return false;
  }
  return true;
}

void run_case(Pair& pair, Failures& failures, const Case& c, Random& random, std::span<const Step> steps = kFewSteps) {
  const std::string what = "block=" + std::to_string(c.block) + " most=" + std::to_string(c.most) +
                           " index=" + std::to_string(c.index_heads) + "x" + std::to_string(c.index_dim) +
                           " heads=" + std::to_string(c.kv_heads) + "x" + std::to_string(c.group) +
                           " dims=" + std::to_string(c.dim_k) + "/" + std::to_string(c.dim_v) + " " +
                           std::string(traits(c.type_k).name) + "/" + std::string(traits(c.type_v).name) + " ";
  constexpr int32_t kPages = 12;
  Cache cache(pair,
              {.type_k = c.type_k,
               .type_v = c.type_v,
               .kv_heads = c.kv_heads,
               .head_dim_k = c.dim_k,
               .head_dim_v = c.dim_v,
               .group = c.group,
               .skew = c.skew},
              kPages);
  Cache index(pair,
              {.type_k = c.type_k,
               .type_v = c.type_k,
               .kv_heads = 1,
               .head_dim_k = c.index_dim,
               .head_dim_v = c.index_dim,
               .block = c.block},
              kPages);
  std::vector<PageId> ids(kPages);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  const std::span<const PageId> pages[3] = {{ids.data(), 5}, {ids.data() + 5, 3}, {ids.data() + 8, 4}};
  const VectorWeight norm = vector_weight(random_inputs(1, c.index_dim, random));
  const int32_t pairs = c.index_dim / 4;  // part of a head
  int32_t length[3] = {};
  for (const Step& step : steps) {
    Batch batch;
    int32_t completed = 0;
    for (size_t s = 0; s < 3; ++s) {
      if (step[s] == 0) continue;
      batch.add(length[s], step[s], pages[s], 0);
      completed += (length[s] + step[s]) / c.block - length[s] / c.block;
      length[s] += step[s];
    }
    const Rows rows = batch.rows();
    const int32_t m = rows.count(), heads = c.kv_heads * c.group - c.missing;
    cache.append(random_inputs(m, c.kv_heads * c.dim_k, random), random_inputs(m, c.kv_heads * c.dim_v, random), rows);
    const std::vector<float> keys = inputs(m, c.index_dim, random, c.few_values),
                             index_q = inputs(m, c.index_heads * c.index_dim, random, c.few_values),
                             q = random_inputs(m, heads * c.dim_k, random),
                             cosine = inputs(completed, pairs, random, c.few_values),
                             sine = inputs(completed, pairs, random, c.few_values);
    const RopeTable angles{cosine.data(), sine.data(), pairs};

    Ops &fast = *pair.fast_ops, &plain = *pair.plain_ops;
    const Ops::Scope fast_scope(fast), plain_scope(plain);
    fast.append_index(copy_to(fast, keys, m), norm, 1e-6f, angles, rows, index.fast());
    plain.append_index(copy_to(plain, keys, m), norm, 1e-6f, angles, rows, index.plain());
    const auto choose = [&](Ops& ops, const KvLayer& layer, int32_t most) {
      return ops.choose_blocks(copy_to(ops, index_q, m), rows, layer, c.index_heads, most);
    };
    const BlockChoice found = choose(fast, index.fast(), c.most), expected = choose(plain, index.plain(), c.most);
    failures.expect(is_sound(expected, rows), what + "the reference's choice is unsound");
    if (!is_sound(found, rows) || !same_choice(found, expected)) {
      failures.fail(what + "chosen blocks differ, rows=" + std::to_string(m));
      return;
    }
    constexpr float kScale = 0.3f;
    const Tensor fq = copy_to(fast, q, m), pq = copy_to(plain, q, m);
    if (!failures.expect_same(values_of(fast.sparse_attention(fq, rows, found, cache.fast(), heads, kScale)),
                              values_of(plain.sparse_attention(pq, rows, expected, cache.plain(), heads, kScale)),
                              what + "attention"))
      return;
    constexpr int32_t kAll = 1 << 12;
    const Tensor dense = fast.attention(fq, rows, cache.fast(), heads, kScale);
    failures.expect_same(
        values_of(fast.sparse_attention(fq, rows, choose(fast, index.fast(), kAll), cache.fast(), heads, kScale)),
        values_of(dense), what + "attention to everything");
    failures.expect_same(
        values_of(plain.sparse_attention(pq, rows, choose(plain, index.plain(), kAll), cache.plain(), heads, kScale)),
        values_of(dense), what + "reference attention to everything");
  }
}

}  // namespace

void test_sparse_attention(Pair& pair, Failures& failures) {
  Random random(11);
  constexpr auto F32 = QuantType::F32, F16 = QuantType::F16, BF16 = QuantType::BF16, Q8_0 = QuantType::Q8_0,
                 Q4_0 = QuantType::Q4_0;
  run_case(pair, failures, {4, 8, 4, 32, 2, 3, 32, 32, F16, F16}, random, kSteps);
  run_case(pair, failures, {4, 20, 4, 32, 2, 3, 32, 64, Q8_0, Q8_0}, random, kSteps);
  run_case(pair, failures, {2, 3, 1, 16, 1, 2, 16, 16, F32, F16}, random);
  run_case(pair, failures, {8, 5, 3, 20, 3, 1, 24, 8, F32, F32}, random);
  run_case(pair, failures, {32, 1, 4, 32, 1, 13, 64, 64, BF16, Q4_0}, random);
  run_case(pair, failures, {256, 1, 60, 32, 2, 2, 32, 32, Q4_0, BF16}, random, kSteps);
  run_case(pair, failures, {4, 7, 2, 64, 1, 4, 32, 40, Q8_0, F32}, random);
  run_case(pair, failures, {4, 9, 2, 8, 2, 2, 16, 16, F16, F16, true}, random, kSteps);
  // Parts of groups: the ranks of a split that keeps a kv head twice.
  for (const int32_t skew : {0, 2, 4})
    run_case(pair, failures, {4, 8, 4, 32, 2, 6, 32, 32, F16, Q8_0, false, 4, skew}, random, kSteps);
}

}  // namespace v100::test
