// Loops that are unrolled at compile time, so that arrays indexed by the counter live in registers.
#pragma once

#include <utility>

namespace v100::cpu {

namespace {

template <int... I, class Body>
[[gnu::always_inline]] inline void unroll_sequence(std::integer_sequence<int, I...>, Body&& body) {
  (body(std::integral_constant<int, I>{}), ...);
}

// body(integral_constant 0), ..., body(integral_constant N - 1).
template <int N, class Body>
[[gnu::always_inline]] inline void unroll(Body&& body) {
  unroll_sequence(std::make_integer_sequence<int, N>{}, body);
}

}  // namespace

}  // namespace v100::cpu

#define V100_INLINE_LAMBDA __attribute__((always_inline))
