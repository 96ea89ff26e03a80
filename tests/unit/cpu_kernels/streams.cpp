// Operations on residual streams against the reference, bit for bit.
#include <cmath>

#include "harness.h"

namespace v100::test {

void test_streams(Pair& pair, Failures& failures) {
  Random random(12);
  Ops &fast = *pair.fast_ops, &plain = *pair.plain_ops;
  for (const int32_t streams : {2, 3, 4, 7})
    for (const int32_t n : {1, 15, 16, 17, 40, 320, 2560})
      for (const int32_t m : {1, 3, 33}) {
        const Ops::Scope fast_scope(fast), plain_scope(plain);
        const std::string what =
            " [" + std::to_string(m) + ", " + std::to_string(streams) + " x " + std::to_string(n) + "]";
        const auto same = [&](Tensor found, Tensor expected, const char* operation) {
          failures.expect_same(values_of(found), values_of(expected), operation + what);
        };
        const int32_t wide = streams * n;
        const std::vector<float> row = random_inputs(m, n, random), wide_1 = random_inputs(m, wide, random),
                                 wide_2 = random_inputs(m, wide, random), inject = random_inputs(m, streams, random);
        const VectorWeight norm = vector_weight(random_inputs(1, wide, random));
        const Tensor fr = copy_to(fast, row, m), pr = copy_to(plain, row, m);
        const Tensor fx = copy_to(fast, wide_1, m), px = copy_to(plain, wide_1, m);
        const Tensor fg = copy_to(fast, wide_2, m), pg = copy_to(plain, wide_2, m);
        same(fast.repeat_streams(fr, streams), plain.repeat_streams(pr, streams), "repeat_streams");
        same(fast.norm_streams(fx, streams, norm, 1e-6f), plain.norm_streams(px, streams, norm, 1e-6f), "norm_streams");
        same(fast.mix_streams(fx, fg, streams), plain.mix_streams(px, pg, streams), "mix_streams");
        same(fast.gate_memory(fx, fg, fr), plain.gate_memory(px, pg, pr), "gate_memory");
        fast.add_to_streams(fx, fr, copy_to(fast, inject, m)), plain.add_to_streams(px, pr, copy_to(plain, inject, m));
        same(fx, px, "add_to_streams");
        fast.scaled_silu(fg, 1.0f / 3), plain.scaled_silu(pg, 1.0f / 3);
        same(fg, pg, "scaled_silu");
      }
  // A gate of nothing is one half, and small products count as 1e-6.
  for (const float key : {0.0f, 1e-30f, -1e-30f}) {
    const Ops::Scope fast_scope(fast), plain_scope(plain);
    const Tensor found = fast.gate_memory(copy_to(fast, {key, 0}, 1), copy_to(fast, {1, 1}, 1), copy_to(fast, {2}, 1));
    const Tensor expected =
        plain.gate_memory(copy_to(plain, {key, 0}, 1), copy_to(plain, {1, 1}, 1), copy_to(plain, {2}, 1));
    failures.expect_same(values_of(found), values_of(expected), "gate_memory of almost nothing");
    failures.expect(found.data[1] == 1.0f, "gate_memory of nothing");
    failures.expect(key == 0 || std::signbit(key) == (found.data[0] < 1.0f), "gate_memory keeps the sign");
  }
}

void test_block_conv(Pair& pair, Failures& failures) {
  Random random(13);
  Ops &fast = *pair.fast_ops, &plain = *pair.plain_ops;
  for (const int32_t taps : {1, 2, 4})
    for (const int32_t group : {1, 7, 16, 40})
      for (const int32_t block_rows : {1, 3, 8}) {
        const int32_t n = 6 * group, m = 3 * block_rows;
        const BlockConv w{vector_weight(random_inputs(1, 2 * taps * n, random)), taps, group};
        const std::vector<float> x = random_inputs(m, n, random), own = random_inputs(m, w.own_size(n), random);
        for (const int32_t place : {0, 1}) {
          const Ops::Scope fast_scope(fast), plain_scope(plain);
          const Tensor found = fast.block_conv(copy_to(fast, x, m), w, place, copy_to(fast, own, m), block_rows);
          const Tensor expected = plain.block_conv(copy_to(plain, x, m), w, place, copy_to(plain, own, m), block_rows);
          failures.expect_same(values_of(found), values_of(expected),
                               "block_conv of " + std::to_string(taps) + " taps, groups of " + std::to_string(group) +
                                   ", blocks of " + std::to_string(block_rows));
          // A block does not know of the one before it.
          const std::vector<float> second(x.begin() + block_rows * n, x.begin() + 2 * block_rows * n);
          const std::vector<float> second_own(own.begin() + block_rows * w.own_size(n),
                                              own.begin() + 2 * block_rows * w.own_size(n));
          const Tensor alone = fast.block_conv(copy_to(fast, second, block_rows), w, place,
                                               copy_to(fast, second_own, block_rows), block_rows);
          failures.expect_same(values_of(alone), values_of({found.row(block_rows), block_rows, n}),
                               "block_conv of a block alone");
        }
      }
}

}  // namespace v100::test
