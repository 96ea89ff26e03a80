// Mixture of experts against the reference, bit for bit: the choice of experts, products by experts of equal and of
// different forms, and their sum.
#include <algorithm>
#include <cmath>
#include <limits>

#include "harness.h"

namespace v100::test {

namespace {

struct Stack {
  ExpertLinear fast, plain;
};

Stack make_stack(Pair& pair, QuantType type, int32_t k, int32_t n, int32_t experts, Random& random) {
  Stack stack;
  stack.fast.in_features = stack.plain.in_features = k;
  stack.fast.out_features = stack.plain.out_features = n;
  for (int32_t e = 0; e < experts; ++e) {
    const auto rows = random_rows(type, k, n, random);
    const float scale = e % 3 == 0 ? 1.0f : 0.3f + 0.1f * static_cast<float>(e);
    stack.fast.experts.push_back(pair.fast->pack_linear(type, k, n, rows.data(), pair.pool, scale));
    stack.plain.experts.push_back(pair.plain->pack_linear(type, k, n, rows.data(), pair.pool, scale));
  }
  return stack;
}

void expect_same_routing(Failures& failures, const Routing& found, const Routing& expected, const std::string& what) {
  const auto slots = static_cast<size_t>(expected.slots());
  failures.expect(found.rows == expected.rows && found.used == expected.used, what + ": shapes differ");
  failures.expect(std::equal(found.expert, found.expert + slots, expected.expert), what + ": experts differ");
  failures.expect_same({found.weight, slots}, {expected.weight, slots}, what + " weights");
}

// Every choice by its definition: the largest logits in falling order, of equal ones the lower id first.
void expect_top(Failures& failures, Tensor logits, const Routing& routing, const std::string& what) {
  for (int32_t r = 0; r < routing.rows; ++r) {
    const float* row = logits.row(r);
    std::vector<bool> taken(static_cast<size_t>(logits.features));
    float total = 0;
    for (int32_t j = 0; j < routing.used; ++j) {
      const int32_t slot = r * routing.used + j, e = routing.expert[slot];
      if (e < 0 || e >= logits.features || taken[static_cast<size_t>(e)]) {
        failures.fail(what + ": expert " + std::to_string(e) + " is unknown or chosen twice");
        return;
      }
      taken[static_cast<size_t>(e)] = true;
      for (int32_t other = 0; other < logits.features; ++other)
        if (!taken[static_cast<size_t>(other)] && (row[other] > row[e] || (row[other] == row[e] && other < e)))
          failures.fail(what + ": expert " + std::to_string(other) + " was passed over for " + std::to_string(e));
      total += routing.weight[slot];
    }
    failures.expect(std::fabs(total - 1.0f) < 1e-5f, what + ": weights do not sum to 1");
  }
}

// The experts of other ranks: their matrices are not here.
void drop_experts(Stack& stack, int32_t first_kept) {
  for (int32_t e = 0; e < first_kept; ++e) stack.fast.experts[static_cast<size_t>(e)] = nullptr;
  for (int32_t e = 0; e < first_kept; ++e) stack.plain.experts[static_cast<size_t>(e)] = nullptr;
}

void expect_zeros_of_dropped(Failures& failures, Tensor y, const Routing& routing, int32_t first_kept,
                             const std::string& what) {
  for (int32_t slot = 0; slot < y.rows; ++slot) {
    const bool zeros = std::all_of(y.row(slot), y.row(slot) + y.features, [](float value) { return value == 0; });
    failures.expect(zeros == (routing.expert[slot] < first_kept), what + ": zeros in the wrong slots");
  }
}

void check_mixture(Pair& pair, Failures& failures, QuantType gate_type, QuantType up_type, QuantType down_type,
                   int32_t experts, int32_t used, int32_t rows, Random& random, int32_t first_kept = 0) {
  constexpr int32_t hidden = 256, ffn = 256;
  const std::string what = std::string(traits(gate_type).name) + "/" + std::string(traits(up_type).name) + "/" +
                           std::string(traits(down_type).name) + ", " + std::to_string(used) + " of " +
                           std::to_string(experts) + " experts, " + std::to_string(rows) + " rows";
  Stack gate = make_stack(pair, gate_type, hidden, ffn, experts, random);
  Stack up = make_stack(pair, up_type, hidden, ffn, experts, random);
  Stack down = make_stack(pair, down_type, ffn, hidden - 3, experts, random);
  for (Stack* stack : {&gate, &up, &down}) drop_experts(*stack, first_kept);
  const std::vector<float> inputs = random_inputs(rows, hidden, random);
  const std::vector<float> logits = random_inputs(rows, experts, random);
  const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
  const auto run = [&](Ops& ops, ExpertLinear Stack::* side) {
    const Tensor x = copy_to(ops, inputs, rows), scores = copy_to(ops, logits, rows);
    const Routing routing = ops.route(scores, used);
    const Tensor f = ops.gated_expert_linear(x, routing, gate.*side, up.*side, Activation::silu);
    const Tensor d = ops.expert_linear(f, routing, down.*side);
    expect_top(failures, scores, routing, what);
    return std::tuple{routing, f, d, ops.mix_experts(d, routing)};
  };
  const auto [routing, f, d, y] = run(*pair.fast_ops, &Stack::fast);
  const auto [plain_routing, plain_f, plain_d, plain_y] = run(*pair.plain_ops, &Stack::plain);
  expect_same_routing(failures, routing, plain_routing, "route " + what);
  failures.expect_same(values_of(f), values_of(plain_f), "gated_expert_linear " + what);
  failures.expect_same(values_of(d), values_of(plain_d), "expert_linear " + what);
  failures.expect_same(values_of(y), values_of(plain_y), "mix_experts " + what);
  expect_zeros_of_dropped(failures, f, routing, first_kept, "gated_expert_linear " + what);
  expect_zeros_of_dropped(failures, d, routing, first_kept, "expert_linear " + what);
}

}  // namespace

void test_experts(Pair& pair, Failures& failures) {
  Random random(21);
  constexpr QuantType types[] = {QuantType::F32,  QuantType::F16,  QuantType::Q8_0, QuantType::Q4_K,
                                 QuantType::Q6_K, QuantType::Q5_K, QuantType::TQ2_0};
  for (size_t i = 0; i < std::size(types); ++i)
    for (const int32_t rows : {1, 2, 9, 40})
      check_mixture(pair, failures, types[i], types[(i + static_cast<size_t>(rows)) % std::size(types)],
                    types[(i + 1) % std::size(types)], 6, rows % 3 + 1, rows, random);
  check_mixture(pair, failures, QuantType::F32, QuantType::F32, QuantType::F32, 1, 1, 5, random);
  check_mixture(pair, failures, QuantType::Q8_0, QuantType::Q8_0, QuantType::Q8_0, 4, 4, 5, random);
  check_mixture(pair, failures, QuantType::Q4_K, QuantType::Q4_K, QuantType::Q6_K, 512, 10, 3, random);
  for (const int32_t rows : {1, 40}) {
    check_mixture(pair, failures, QuantType::Q4_K, QuantType::Q4_K, QuantType::F16, 6, 3, rows, random, 2);
    check_mixture(pair, failures, QuantType::F16, QuantType::Q8_0, QuantType::Q8_0, 6, 3, rows, random, 5);
    check_mixture(pair, failures, QuantType::Q8_0, QuantType::Q8_0, QuantType::Q8_0, 6, 3, rows, random, 6);
  }
}

void test_routing(Pair& pair, Failures& failures) {
  Random random(22);
  for (const int32_t experts : {1, 2, 3, 8, 15, 16, 17, 60, 128, 512})
    for (const int32_t used : {1, 2, 8, 10})
      for (const int32_t rows : {1, 5, 300}) {
        if (used > experts) continue;
        std::vector<float> logits = random_inputs(rows, experts, random);
        for (float& logit : logits) logit = std::round(logit * 4) * 2;  // many are equal
        const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
        const std::string what = std::to_string(used) + " of " + std::to_string(experts);
        const Tensor fast = copy_to(*pair.fast_ops, logits, rows), plain = copy_to(*pair.plain_ops, logits, rows);
        const Routing found = pair.fast_ops->route(fast, used);
        expect_same_routing(failures, found, pair.plain_ops->route(plain, used), what);
        expect_top(failures, fast, found, what);
      }
  // Whatever a broken file makes of the logits, experts stay known and are chosen once.
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> wild{kNan, kNan, kNan,  kNan,   kNan, 1.0f, -kInfinity, kInfinity,  kInfinity,  kInfinity,
                                0.0f, kNan, 3e38f, -3e38f, 1.0f, kNan, -kInfinity, -kInfinity, -kInfinity, -kInfinity};
  for (const int32_t used : {1, 2, 4}) {
    const Ops::Scope scope(*pair.fast_ops);
    const Routing routing = pair.fast_ops->route(copy_to(*pair.fast_ops, wild, 5), used);
    for (int32_t slot = 0; slot < routing.slots(); ++slot) {
      failures.expect(routing.expert[slot] >= 0 && routing.expert[slot] < 4, "an unknown expert was chosen");
      for (int32_t other = slot / used * used; other < slot; ++other)
        failures.expect(routing.expert[other] != routing.expert[slot], "an expert was chosen twice");
    }
    failures.expect(routing.expert[used] == 3, "NaN or -inf was preferred to inf");
  }
}

}  // namespace v100::test
