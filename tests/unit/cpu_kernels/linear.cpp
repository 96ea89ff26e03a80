// Linear layers against the reference, bit for bit: all tails, extremes, combinations, and real sizes.
#include <array>
#include <cmath>

#include "harness.h"
#include "quants/decode.h"

namespace v100::test {

namespace {

constexpr QuantType kTypes[] = {
    QuantType::Q8_0,  QuantType::Q4_0,  QuantType::Q4_1,    QuantType::Q5_0,   QuantType::Q5_1,   QuantType::Q2_K,
    QuantType::Q3_K,  QuantType::Q4_K,  QuantType::Q5_K,    QuantType::Q6_K,   QuantType::IQ4_NL, QuantType::IQ4_XS,
    QuantType::MXFP4, QuantType::NVFP4, QuantType::Q1_0,    QuantType::Q2_0,   QuantType::TQ1_0,  QuantType::TQ2_0,
    QuantType::IQ1_S, QuantType::IQ1_M, QuantType::IQ2_XXS, QuantType::IQ2_XS, QuantType::IQ2_S,  QuantType::IQ3_XXS,
    QuantType::IQ3_S, QuantType::F32,   QuantType::F16,     QuantType::BF16,   QuantType::F64,    QuantType::Q8_1};

std::string describe(QuantType type, int32_t k, int32_t n, int32_t m) {
  return std::string(traits(type).name) + " K=" + std::to_string(k) + " N=" + std::to_string(n) +
         " M=" + std::to_string(m);
}

struct Layer {
  Linear fast, plain;
};

Layer make_layer(Pair& pair, QuantType type, int32_t k, int32_t n, const std::vector<std::byte>& rows,
                 const std::vector<float>& bias = {}, float scale = 1.0f) {
  Layer layer;
  layer.fast.weight = pair.fast->pack_linear(type, k, n, rows.data(), pair.pool, scale);
  layer.plain.weight = pair.plain->pack_linear(type, k, n, rows.data(), pair.pool, scale);
  if (!bias.empty()) layer.fast.bias = layer.plain.bias = vector_weight(bias);
  return layer;
}

bool same_product(Pair& pair, Failures& failures, const Layer& layer, const std::vector<float>& inputs, int32_t m,
                  const std::string& what) {
  const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
  Tensor found = pair.fast_ops->linear(copy_to(*pair.fast_ops, inputs, m), layer.fast);
  Tensor expected = pair.plain_ops->linear(copy_to(*pair.plain_ops, inputs, m), layer.plain);
  return failures.expect_same(values_of(found), values_of(expected), what);
}

void check(Pair& pair, Failures& failures, QuantType type, int32_t k, int32_t n, int32_t m, Random& random,
           Scales scales = Scales::ordinary, Codes codes = Codes::random, Inputs inputs = Inputs::ordinary) {
  const Layer layer = make_layer(pair, type, k, n, random_rows(type, k, n, random, scales, codes));
  same_product(pair, failures, layer, random_inputs(m, k, random, inputs), m, describe(type, k, n, m));
}

template <class Body>
void for_all_types(Body&& body) {
  for (const QuantType type : kTypes) body(type);
}

}  // namespace

void test_linear_shapes(Pair& pair, Failures& failures) {
  Random random(1);
  for_all_types([&](QuantType type) {
    const int32_t block = traits(type).block_values;
    const auto size = [&](int32_t blocks) { return block == 1 ? 7 * blocks + 1 : block * blocks; };
    for (int32_t n = 1; n <= 40; ++n)
      for (const int32_t m : {1, 2, 5}) check(pair, failures, type, size(1 + n % 3), n, m, random);
    for (const int32_t n : {1, 16, 17, 31, 64, 65, 100})
      for (const int32_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 24, 25})
        check(pair, failures, type, size(1 + (n + m) % 4), n, m, random);
    for (const int32_t m : {64, 65, 97}) check(pair, failures, type, size(2), 35, m, random);
  });
}

void test_linear_extremes(Pair& pair, Failures& failures) {
  Random random(2);
  for_all_types([&](QuantType type) {
    const int32_t k = traits(type).block_values * 3;
    for (const Scales scales : {Scales::ordinary, Scales::subnormal, Scales::large, Scales::zero})
      for (const Codes codes : {Codes::random, Codes::lowest, Codes::highest})
        for (const Inputs inputs :
             {Inputs::ordinary, Inputs::constant, Inputs::alternating, Inputs::sparse, Inputs::tiny, Inputs::huge})
          for (const int32_t m : {1, 3, 5}) check(pair, failures, type, k, 18, m, random, scales, codes, inputs);
  });
}

void test_linear_combinations(Pair& pair, Failures& failures) {
  Random random(3);
  constexpr int32_t k = 512;
  constexpr std::array<QuantType, 12> types{QuantType::Q4_K,  QuantType::Q6_K, QuantType::F16,    QuantType::Q4_1,
                                            QuantType::Q8_0,  QuantType::Q5_K, QuantType::IQ4_XS, QuantType::F32,
                                            QuantType::IQ2_S, QuantType::Q2_K, QuantType::Q4_0,   QuantType::Q5_0};
  for (const int32_t m : {1, 4, 14, 70}) {
    const std::vector<float> inputs = random_inputs(m, k, random);
    // multi_linear: all types at once, some with bias, some with a scale of their own.
    std::vector<Layer> layers;
    for (size_t i = 0; i < types.size(); ++i) {
      const auto n = static_cast<int32_t>(9 + 16 * i);
      layers.push_back(make_layer(pair, types[i], k, n, random_rows(types[i], k, n, random),
                                  i % 2 == 0 ? random_inputs(1, n, random) : std::vector<float>{},
                                  i % 3 == 0 ? 0.37f : 1.0f));
    }
    std::vector<const Linear*> fast, plain;
    for (const Layer& layer : layers) fast.push_back(&layer.fast), plain.push_back(&layer.plain);
    {
      const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
      std::vector<Tensor> found(types.size()), expected(types.size());
      pair.fast_ops->multi_linear(copy_to(*pair.fast_ops, inputs, m), fast, found);
      pair.plain_ops->multi_linear(copy_to(*pair.plain_ops, inputs, m), plain, expected);
      for (size_t i = 0; i < types.size(); ++i)
        failures.expect_same(values_of(found[i]), values_of(expected[i]),
                             "multi_linear " + describe(types[i], k, found[i].features, m));
    }
    // gated_linear: pairs of equal and of different forms.
    for (size_t i = 0; i < types.size(); ++i)
      for (const size_t j : {i, (i + 1) % types.size(), (i + 2) % types.size()})
        for (const Activation activation : {Activation::silu, Activation::gelu}) {
          const int32_t n = 37;
          const Layer gate =
              make_layer(pair, types[i], k, n, random_rows(types[i], k, n, random), random_inputs(1, n, random), -1.7f);
          const Layer up = make_layer(pair, types[j], k, n, random_rows(types[j], k, n, random), {}, 0.21f);
          const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
          Tensor found =
              pair.fast_ops->gated_linear(copy_to(*pair.fast_ops, inputs, m), gate.fast, up.fast, activation);
          Tensor expected =
              pair.plain_ops->gated_linear(copy_to(*pair.plain_ops, inputs, m), gate.plain, up.plain, activation);
          failures.expect_same(
              values_of(found), values_of(expected),
              "gated_linear " + describe(types[i], k, n, m) + " with " + std::string(traits(types[j]).name));
        }
  }
}

void test_linear_real_sizes(Pair& pair, Failures& failures) {
  Random random(4);
  for (const int32_t m : {1, 4, 150}) {
    check(pair, failures, QuantType::Q4_1, 576, 1536, m, random);
    check(pair, failures, QuantType::Q4_1, 1536, 576, m, random);
    check(pair, failures, QuantType::Q8_0, 576, 192, m, random);
    check(pair, failures, QuantType::Q4_K, 2048, 256, m, random);
    check(pair, failures, QuantType::Q6_K, 2048, 128, m, random);
    check(pair, failures, QuantType::F16, 576, 320, m, random);
    check(pair, failures, QuantType::IQ4_XS, 2048, 128, m, random);
    check(pair, failures, QuantType::IQ3_S, 1792, 64, m, random);
  }
}

// Against decoded weights and unrounded activations in f64: no type loses more than its activations' 8 bits do.
void test_linear_accuracy(Pair& pair, Failures& failures) {
  Random random(6);
  for (const QuantType type : kTypes) {
    constexpr int32_t k = 2048, n = 20, m = 3;
    const auto rows = random_rows(type, k, n, random);
    const std::vector<float> inputs = random_inputs(m, k, random);
    std::vector<float> weights(size_t{k} * n);
    decode(type, rows.data(), weights.data(), int64_t{k} * n);
    const Linear layer{pair.fast->pack_linear(type, k, n, rows.data(), pair.pool), {}};
    const Ops::Scope scope(*pair.fast_ops);
    const Tensor y = pair.fast_ops->linear(copy_to(*pair.fast_ops, inputs, m), layer);
    for (int32_t r = 0; r < m; ++r)
      for (int32_t c = 0; c < n; ++c) {
        double sum = 0, magnitude = 0;
        for (int32_t i = 0; i < k; ++i) {
          const double term =
              static_cast<double>(weights[static_cast<size_t>(c * k + i)]) * inputs[static_cast<size_t>(r * k + i)];
          sum += term, magnitude += std::fabs(term);
        }
        const double error = std::fabs(y.row(r)[c] - sum) / magnitude;
        failures.expect(error < 1e-3, describe(type, k, n, m) + ": relative error " + std::to_string(error));
      }
  }
}

void test_negative_control(Pair& pair, Failures& failures) {
  Random random(5);
  for_all_types([&](QuantType type) {
    const int32_t k = traits(type).block_values == 1 ? 40 : traits(type).block_values * 2, n = 20;
    auto rows = random_rows(type, k, n, random);
    Layer layer = make_layer(pair, type, k, n, rows);
    // Flip a bit of the last row's last block, in its codes.
    const auto at = rows.size() - static_cast<size_t>(traits(type).block_bytes) +
                    static_cast<size_t>(traits(type).block_bytes == 210 ? 20 : traits(type).block_bytes / 2);
    rows[at] ^= std::byte{1};
    layer.plain.weight = pair.plain->pack_linear(type, k, n, rows.data(), pair.pool);
    std::vector<float> inputs = random_inputs(3, k, random);
    const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
    Tensor found = pair.fast_ops->linear(copy_to(*pair.fast_ops, inputs, 3), layer.fast);
    Tensor expected = pair.plain_ops->linear(copy_to(*pair.plain_ops, inputs, 3), layer.plain);
    bool differs = false;
    for (int64_t i = 0; i < found.size(); ++i) differs = differs || found.data[i] != expected.data[i];
    failures.expect(differs, "a changed weight of type " + std::string(traits(type).name) + " went unnoticed");
  });
}

}  // namespace v100::test
