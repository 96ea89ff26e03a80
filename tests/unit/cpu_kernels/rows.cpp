// Norms, additions, rotary positions, embeddings and copies against the reference; and the errors of the backend's
// doors.
#include "base/error.h"
#include "harness.h"

namespace v100::test {

void test_rows(Pair& pair, Failures& failures) {
  Random random(8);
  std::vector<int32_t> sizes;
  for (int32_t n = 1; n <= 40; ++n) sizes.push_back(n);
  for (const int32_t n : {576, 577, 1000, 2048}) sizes.push_back(n);
  for (const int32_t n : sizes)
    for (const int32_t m : {1, 3, 70}) {
      const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
      const std::string what = " [" + std::to_string(m) + ", " + std::to_string(n) + "]";
      const std::vector<float> x = random_inputs(m, n, random), a = random_inputs(m, n, random);
      const VectorWeight w = vector_weight(random_inputs(1, n, random));
      Tensor fx = copy_to(*pair.fast_ops, x, m), px = copy_to(*pair.plain_ops, x, m);
      Tensor fa = copy_to(*pair.fast_ops, a, m), pa = copy_to(*pair.plain_ops, a, m);
      failures.expect_same(values_of(pair.fast_ops->rms_norm(fx, w, 1e-5f)),
                           values_of(pair.plain_ops->rms_norm(px, w, 1e-5f)), "rms_norm" + what);
      failures.expect_same(values_of(pair.fast_ops->add_rms_norm(fx, fa, w, 1e-6f)),
                           values_of(pair.plain_ops->add_rms_norm(px, pa, w, 1e-6f)), "add_rms_norm" + what);
      failures.expect_same(values_of(fx), values_of(px), "add_rms_norm x" + what);
      pair.fast_ops->add(fx, fa), pair.plain_ops->add(px, pa);
      failures.expect_same(values_of(fx), values_of(px), "add" + what);
      pair.fast_ops->scale(fx, 1.7f), pair.plain_ops->scale(px, 1.7f);
      failures.expect_same(values_of(fx), values_of(px), "scale" + what);
      for (const float cap : {0.5f, 30.0f}) {
        pair.fast_ops->soft_cap(fa, cap), pair.plain_ops->soft_cap(pa, cap);
        failures.expect_same(values_of(fa), values_of(pa), "soft_cap" + what);
      }
      pair.fast_ops->add_vector(fx, w), pair.plain_ops->add_vector(px, w);
      failures.expect_same(values_of(fx), values_of(px), "add_vector" + what);
      for (const Activation activation : {Activation::silu, Activation::gelu}) {
        pair.fast_ops->activate(fx, fa, activation), pair.plain_ops->activate(px, pa, activation);
        failures.expect_same(values_of(fx), values_of(px), "activate" + what);
      }
      std::vector<int32_t> some;
      for (int32_t row = m - 1; row >= 0; row -= 2) some.push_back(row);
      const std::vector<float> factors = random_inputs(1, static_cast<int32_t>(some.size()), random);
      const Tensor fs = pair.fast_ops->gather_rows(fa, some), ps = pair.plain_ops->gather_rows(pa, some);
      pair.fast_ops->add_scaled_rows(fx, fs, some, factors), pair.plain_ops->add_scaled_rows(px, ps, some, factors);
      failures.expect_same(values_of(fx), values_of(px), "add_scaled_rows" + what);
      const std::vector<int32_t> picks{m - 1, 0, m / 2};
      failures.expect_same(values_of(pair.fast_ops->gather_rows(fx, picks)),
                           values_of(pair.plain_ops->gather_rows(px, picks)), "gather_rows" + what);
      std::vector<float> host(static_cast<size_t>(fx.size()));
      pair.fast_ops->read(fx, host);
      failures.expect_same(host, values_of(px), "read" + what);
    }
  // Rotary positions, whole and partial heads.
  for (int32_t pairs = 1; pairs <= 40; ++pairs)
    for (const int32_t rest : {0, 3})
      for (const RopeLayout layout : {RopeLayout::halves, RopeLayout::interleaved}) {
        const int32_t m = pairs % 3 + 1, heads = 3, dim = 2 * pairs + rest;
        const std::vector<float> x = random_inputs(m, heads * dim, random);
        const std::vector<float> cosine = random_inputs(m, pairs, random), sine = random_inputs(m, pairs, random);
        const RopeTable table{cosine.data(), sine.data(), pairs};
        const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
        Tensor fx = copy_to(*pair.fast_ops, x, m), px = copy_to(*pair.plain_ops, x, m);
        pair.fast_ops->rope(fx, heads, dim, table, layout);
        pair.plain_ops->rope(px, heads, dim, table, layout);
        failures.expect_same(values_of(fx), values_of(px), "rope of " + std::to_string(pairs) + " pairs");
        const VectorWeight norm = vector_weight(random_inputs(1, dim, random));
        pair.fast_ops->norm_rope(fx, heads, dim, norm, 1e-6f, table, layout);
        pair.plain_ops->norm_rope(px, heads, dim, norm, 1e-6f, table, layout);
        failures.expect_same(values_of(fx), values_of(px), "norm_rope of " + std::to_string(pairs) + " pairs");
      }
  // Embeddings.
  for (const QuantType type : {QuantType::F32, QuantType::F16, QuantType::Q8_0, QuantType::Q6_K}) {
    const auto rows = random_rows(type, 256, 50, random);
    const EmbeddingTable table{nullptr, rows.data(), type, 50, 256};
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 60; ++i) tokens.push_back(i * 7 % 50);
    const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
    failures.expect_same(values_of(pair.fast_ops->embed(tokens, table)),
                         values_of(pair.plain_ops->embed(tokens, table)), "embed " + std::string(traits(type).name));
  }
  // The whole range of the exponential, through silu: gated_linear of one-column identity weights.
  std::vector<float> one{1.0f};
  Linear fast_one{
      pair.fast->pack_linear(QuantType::F32, 1, 1, reinterpret_cast<const std::byte*>(one.data()), pair.pool), {}};
  Linear plain_one{
      pair.plain->pack_linear(QuantType::F32, 1, 1, reinterpret_cast<const std::byte*>(one.data()), pair.pool), {}};
  std::vector<float> points;
  for (float x = -100.0f; x < 100.0f; x += 0.03125f) points.push_back(x + 0.001f * normal(random));
  for (const float x : {0.0f, -0.0f, 87.0f, -87.0f, 88.0f, -88.0f, 1e-30f, -1e-40f, 1e30f, -1e30f}) points.push_back(x);
  const auto m = static_cast<int32_t>(points.size());
  for (const Activation activation : {Activation::silu, Activation::gelu}) {
    const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
    failures.expect_same(
        values_of(pair.fast_ops->gated_linear(copy_to(*pair.fast_ops, points, m), fast_one, fast_one, activation)),
        values_of(pair.plain_ops->gated_linear(copy_to(*pair.plain_ops, points, m), plain_one, plain_one, activation)),
        "activation");
  }
}

namespace {

template <class Body>
void expect_refused(Failures& failures, const std::string& what, Body&& body) {
  try {
    body();
    failures.fail(what + " was accepted");
  } catch (const InvalidArgument&) {
  }
}

}  // namespace

void test_errors(Pair& pair, Failures& failures) {
  expect_refused(failures, "an unknown instruction set", [] { create_cpu_backend("mmx"); });
  expect_refused(failures, "a KV type without a cache format", [&] {
    pair.fast->kv_page_bytes(
        {.type_k = QuantType::Q4_K, .type_v = QuantType::F16, .kv_heads = 1, .head_dim_k = 256, .head_dim_v = 64});
  });
  expect_refused(failures, "q8_0 heads of 40 features", [&] {
    pair.fast->kv_page_bytes(
        {.type_k = QuantType::Q8_0, .type_v = QuantType::F16, .kv_heads = 1, .head_dim_k = 40, .head_dim_v = 64});
  });
  expect_refused(failures, "heads of 4096 features", [&] {
    pair.fast->kv_page_bytes(
        {.type_k = QuantType::F16, .type_v = QuantType::F16, .kv_heads = 1, .head_dim_k = 4096, .head_dim_v = 64});
  });
  expect_refused(failures, "an integer weight matrix", [&] {
    const std::vector<std::byte> rows(64);
    pair.fast->pack_linear(QuantType::I8, 16, 4, rows.data(), pair.pool);
  });
  expect_refused(failures, "zero threads", [&] { pair.fast_ops->set_threads(0); });
  failures.expect(pair.fast->kv_page_bytes({.kv_heads = 3, .head_dim_k = 5, .head_dim_v = 7}) % 64 == 0,
                  "page bytes are not a multiple of 64");
}

}  // namespace v100::test
