// Shared parts of the CPU backend tests: random data, bitwise comparison, and the two backends side by side.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/thread_pool.h"
#include "cpu/backend.h"
#include "ops/reference.h"
#include "quants/types.h"

namespace v100::test {

// A backend under test and the reference, each with its own Ops.
struct Pair {
  explicit Pair(std::string_view instruction_set, int32_t threads)
      : fast(create_cpu_backend(instruction_set)),
        plain(create_reference_backend()),
        fast_ops(fast->create_ops({.count = threads})),
        plain_ops(plain->create_ops({.count = 1})),
        pool(threads) {}
  std::unique_ptr<Backend> fast, plain;
  std::unique_ptr<Ops> fast_ops, plain_ops;
  ThreadPool pool;
};

class Failures {
 public:
  // Compares bit for bit (any two NaNs are equal) and reports the first difference.
  bool expect_same(std::span<const float> found, std::span<const float> expected, const std::string& what) {
    if (found.size() != expected.size()) return fail(what + ": sizes differ");
    for (size_t i = 0; i < found.size(); ++i) {
      const bool both_nan = found[i] != found[i] && expected[i] != expected[i];
      if (!both_nan && std::memcmp(&found[i], &expected[i], sizeof(float)) != 0)
        return fail(what + ": element " + std::to_string(i) + " is " + hex(found[i]) + ", expected " +
                    hex(expected[i]));
    }
    return true;
  }
  void expect(bool condition, const std::string& what) {
    if (!condition) fail(what);
  }
  bool fail(const std::string& message) {
    if (++count_ <= 10) std::fprintf(stderr, "FAIL %s\n", message.c_str());
    return false;
  }
  int count() const { return count_; }

 private:
  static std::string hex(float value) {
    char text[64];
    std::snprintf(text, sizeof text, "%a (%.9g)", static_cast<double>(value), static_cast<double>(value));
    return text;
  }
  int count_ = 0;
};

inline std::span<const float> values_of(Tensor x) { return {x.data, static_cast<size_t>(x.size())}; }

using Random = std::mt19937;

inline float normal(Random& random) { return std::normal_distribution<float>()(random); }

inline Tensor copy_to(Ops& ops, const std::vector<float>& values, int32_t rows) {
  Tensor x = ops.create(rows, static_cast<int32_t>(values.size()) / rows);
  std::copy(values.begin(), values.end(), x.data);
  return x;
}

inline VectorWeight vector_weight(const std::vector<float>& values) {
  std::shared_ptr<float[]> data(new float[values.size()]);
  std::copy(values.begin(), values.end(), data.get());
  return {data, static_cast<int32_t>(values.size())};
}

enum class Scales { ordinary, subnormal, large, zero };
enum class Codes { random, lowest, highest };

// Offsets of the f16 fields of a block type, so that random blocks have finite scales.
std::vector<int32_t> half_fields(QuantType type);

// Random rows of a type in file layout.
std::vector<std::byte> random_rows(QuantType type, int32_t features, int32_t rows, Random& random,
                                   Scales scales = Scales::ordinary, Codes codes = Codes::random);

enum class Inputs { ordinary, constant, alternating, sparse, tiny, huge };
std::vector<float> random_inputs(int32_t rows, int32_t features, Random& random, Inputs kind = Inputs::ordinary);

// The sections of the test program.
void test_rows(Pair& pair, Failures& failures);
void test_linear_shapes(Pair& pair, Failures& failures);
void test_linear_extremes(Pair& pair, Failures& failures);
void test_linear_combinations(Pair& pair, Failures& failures);
void test_linear_real_sizes(Pair& pair, Failures& failures);
void test_linear_accuracy(Pair& pair, Failures& failures);
void test_attention(Pair& pair, Failures& failures);
void test_attention_unseen_keys(Pair& pair, Failures& failures);
void test_sparse_attention(Pair& pair, Failures& failures);
void test_streams(Pair& pair, Failures& failures);
void test_block_conv(Pair& pair, Failures& failures);
void test_experts(Pair& pair, Failures& failures);
void test_routing(Pair& pair, Failures& failures);
void test_gates(Pair& pair, Failures& failures);
void test_causal_conv(Pair& pair, Failures& failures);
void test_delta_net(Pair& pair, Failures& failures);
void test_encoder_searches(Pair& pair, Failures& failures);
void test_errors(Pair& pair, Failures& failures);
void test_negative_control(Pair& pair, Failures& failures);

}  // namespace v100::test
