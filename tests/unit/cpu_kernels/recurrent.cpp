// Recurrent layers against the reference, bit for bit: gates, causal convolution and the gated delta net, with several
// sequences, records in other slots and in place, and prompts cut anywhere.
#include <algorithm>

#include "harness.h"

namespace v100::test {

namespace {

// Lengths of a sequence's parts, one ubatch after the other; 0: the sequence is not in that ubatch.
using Parts = std::vector<int32_t>;

// A ubatch of some sequences' next rows, with the storage behind its spans.
struct Batch {
  std::vector<int32_t> tokens;
  std::vector<SequenceRows> sequences;

  void add(int32_t count, int32_t from, int32_t to) {
    const auto begin = static_cast<int32_t>(tokens.size());
    tokens.resize(tokens.size() + static_cast<size_t>(count));
    sequences.push_back(
        {.rows = {begin, begin + count}, .pages = {}, .tokens = {}, .state_from = from, .state_to = to});
  }
  Rows rows() const {
    return {.tokens = tokens, .positions = {}, .kv_index = {}, .visible = {}, .sequences = sequences};
  }
};

// Where a sequence's state goes: into the slot it came from, or to and fro between two.
enum class Slots { in_place, alternating };

// What one side has computed: the rows of every sequence in order, and all records.
struct Results {
  std::vector<std::vector<float>> rows;  // of each sequence
  std::vector<float> records;
};

int32_t total(const Parts& parts) {
  int32_t sum = 0;
  for (const int32_t count : parts) sum += count;
  return sum;
}

// Runs sequences part by part. inputs[s]: all rows of sequence s; run(x rows of the ubatch, batch, records) gives y.
template <class Run>
Results run_parts(const std::vector<std::vector<float>>& inputs, const std::vector<Parts>& parts, int32_t features,
                  int64_t record, Slots slots, Run&& run) {
  const size_t n = inputs.size();
  Results results{std::vector<std::vector<float>>(n), std::vector<float>(2 * n * static_cast<size_t>(record), 7.5f)};
  const StateRecords records{results.records.data(), record};
  std::vector<int32_t> done(n), slot(n, -1);
  for (size_t step = 0; step < parts[0].size(); ++step) {
    Batch batch;
    std::vector<float> x;
    std::vector<size_t> members;
    for (size_t s = 0; s < n; ++s) {
      const int32_t count = parts[s][step];
      if (count == 0) continue;
      const auto first = static_cast<int32_t>(2 * s);
      const int32_t to = slots == Slots::alternating && slot[s] == first ? first + 1 : first;
      batch.add(count, slot[s], to);
      const auto begin = inputs[s].begin() + int64_t{done[s]} * features;
      x.insert(x.end(), begin, begin + int64_t{count} * features);
      done[s] += count, slot[s] = to;
      members.push_back(s);
    }
    const std::vector<float> y = run(x, batch.rows(), records);
    const size_t width = y.size() / batch.tokens.size();
    for (size_t i = 0; i < members.size(); ++i) {
      const RowRange range = batch.sequences[i].rows;
      std::vector<float>& mine = results.rows[members[i]];
      mine.insert(mine.end(), y.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(range.begin) * width),
                  y.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(range.end) * width));
    }
  }
  return results;
}

void expect_same_results(Failures& failures, const Results& found, const Results& expected, const std::string& what) {
  for (size_t s = 0; s < expected.rows.size(); ++s)
    failures.expect_same(found.rows[s], expected.rows[s], what + ", sequence " + std::to_string(s));
  failures.expect_same(found.records, expected.records, what + ", records");
}

// run(ops, inputs, parts, slots): the same on both sides, and on the fast one whether a prompt is cut or not.
template <class Run>
void check_parts(Pair& pair, Failures& failures, const std::vector<std::vector<float>>& inputs,
                 const std::vector<Parts>& parts, int64_t record, Slots slots, const std::string& what, Run&& run) {
  expect_same_results(failures, run(*pair.fast_ops, inputs, parts, slots), run(*pair.plain_ops, inputs, parts, slots),
                      what);
  const Results cut = run(*pair.fast_ops, inputs, parts, Slots::in_place);
  for (size_t s = 0; s < inputs.size(); ++s) {
    const Results whole = run(*pair.fast_ops, {inputs[s]}, {{total(parts[s])}}, Slots::in_place);
    failures.expect_same(cut.rows[s], whole.rows[0], what + ", cut");
    const size_t n = static_cast<size_t>(record);
    failures.expect_same(std::span(cut.records).subspan(2 * s * n, n), std::span(whole.records).first(n),
                         what + ", record after cuts");
  }
}

std::vector<float> values_at(Tensor x) { return {x.data, x.data + x.size()}; }

const std::vector<Parts> kSteps{{1, 63, 1, 0, 2}, {3, 0, 65, 1, 1}, {0, 64, 2, 200, 1}};

void check_conv(Pair& pair, Failures& failures, int32_t channels, int32_t taps, int32_t dilation, Slots slots,
                Random& random) {
  const std::vector<float> weights = random_inputs(taps, channels, random);
  const ConvWeight w{vector_weight(weights).data, taps, channels, dilation};
  const int64_t record = std::max<int64_t>(1, int64_t{w.history()} * channels);
  const std::string what = "causal_conv_silu of " + std::to_string(channels) + " channels, " + std::to_string(taps) +
                           " taps " + std::to_string(dilation) + " apart";
  std::vector<std::vector<float>> inputs;
  for (const Parts& parts : kSteps) inputs.push_back(random_inputs(total(parts), channels, random));
  const auto run = [&](Ops& ops, const std::vector<std::vector<float>>& x, const std::vector<Parts>& parts, Slots s) {
    return run_parts(x, parts, channels, record, s,
                     [&](const std::vector<float>& values, const Rows& rows, const StateRecords& records) {
                       const Ops::Scope scope(ops);
                       return values_at(ops.causal_conv_silu(copy_to(ops, values, rows.count()), w, rows, records));
                     });
  };
  check_parts(pair, failures, inputs, kSteps, record, slots, what, run);
}

void check_delta_net(Pair& pair, Failures& failures, int32_t key_heads, int32_t value_heads, int32_t head_dim,
                     const std::vector<Parts>& steps, Slots slots, Random& random) {
  std::vector<float> a = random_inputs(1, value_heads, random), dt_bias = random_inputs(1, value_heads, random);
  for (float& value : a) value = -0.3f * value * value;
  const DeltaNet w{key_heads, value_heads, head_dim, vector_weight(a), vector_weight(dt_bias)};
  const int32_t width = 2 * w.key_size() + w.value_size(), features = width + 2 * value_heads;
  const int64_t record = int64_t{w.value_size()} * head_dim;
  const std::string what = "delta_net of " + std::to_string(key_heads) + "/" + std::to_string(value_heads) +
                           " heads of " + std::to_string(head_dim);
  std::vector<std::vector<float>> inputs;
  for (const Parts& parts : steps) inputs.push_back(random_inputs(total(parts), features, random));
  const auto run = [&](Ops& ops, const std::vector<std::vector<float>>& x, const std::vector<Parts>& parts, Slots s) {
    return run_parts(x, parts, features, record, s,
                     [&](const std::vector<float>& values, const Rows& rows, const StateRecords& records) {
                       const Ops::Scope scope(ops);
                       const int32_t m = rows.count();
                       const Tensor qkv = ops.create(m, width), beta = ops.create(m, value_heads),
                                    alpha = ops.create(m, value_heads);
                       const float* from = values.data();
                       for (int32_t r = 0; r < m; ++r)
                         for (const Tensor part : {qkv, beta, alpha}) {
                           std::copy_n(from, part.features, part.row(r));
                           from += part.features;
                         }
                       return values_at(ops.delta_net(qkv, beta, alpha, w, 1e-6f, rows, records));
                     });
  };
  check_parts(pair, failures, inputs, steps, record, slots, what, run);
}

}  // namespace

void test_gates(Pair& pair, Failures& failures) {
  Random random(31);
  for (const int32_t n : {1, 5, 16, 33, 128, 576})
    for (const int32_t heads : {1, 3, 8})
      for (const int32_t m : {1, 3, 70}) {
        const std::string what =
            " [" + std::to_string(m) + ", " + std::to_string(heads) + " * " + std::to_string(n) + "]";
        const std::vector<float> x = random_inputs(m, heads * n, random),
                                 z = random_inputs(m, heads * n, random, n % 2 == 0 ? Inputs::ordinary : Inputs::huge);
        for (const int32_t gates : {heads * n, heads, 1}) {
          const std::vector<float> gate(z.begin(), z.begin() + m * gates);
          const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
          const Tensor found = copy_to(*pair.fast_ops, x, m), expected = copy_to(*pair.plain_ops, x, m);
          pair.fast_ops->apply_gate(found, copy_to(*pair.fast_ops, gate, m));
          pair.plain_ops->apply_gate(expected, copy_to(*pair.plain_ops, gate, m));
          failures.expect_same(values_of(found), values_of(expected), "apply_gate of " + std::to_string(gates) + what);
        }
        const VectorWeight w = vector_weight(random_inputs(1, n, random));
        for (const GateFunction function : {GateFunction::silu, GateFunction::sigmoid}) {
          const Ops::Scope fast_scope(*pair.fast_ops), plain_scope(*pair.plain_ops);
          const Tensor found = copy_to(*pair.fast_ops, x, m), expected = copy_to(*pair.plain_ops, x, m);
          pair.fast_ops->norm_gate(found, copy_to(*pair.fast_ops, z, m), w, 1e-6f, function);
          pair.plain_ops->norm_gate(expected, copy_to(*pair.plain_ops, z, m), w, 1e-6f, function);
          failures.expect_same(values_of(found), values_of(expected), "norm_gate" + what);
        }
      }
}

void test_causal_conv(Pair& pair, Failures& failures) {
  Random random(32);
  for (const int32_t channels : {1, 15, 16, 40, 513, 1100})
    for (const int32_t taps : {1, 2, 4})
      check_conv(pair, failures, channels, taps, 1, taps == 2 ? Slots::in_place : Slots::alternating, random);
  check_conv(pair, failures, 70, 4, 3, Slots::in_place, random);
  check_conv(pair, failures, 70, 3, 2, Slots::alternating, random);
}

void test_delta_net(Pair& pair, Failures& failures) {
  Random random(33);
  const std::vector<Parts> few{{1, 2, 0, 3}, {0, 3, 1, 1}};
  for (int32_t head_dim = 16; head_dim <= 256; head_dim += 16)
    check_delta_net(pair, failures, 1, 2, head_dim, few, head_dim % 32 == 0 ? Slots::in_place : Slots::alternating,
                    random);
  check_delta_net(pair, failures, 1, 1, 16, kSteps, Slots::in_place, random);
  check_delta_net(pair, failures, 3, 3, 48, kSteps, Slots::alternating, random);
  check_delta_net(pair, failures, 1, 3, 64, kSteps, Slots::alternating, random);
  check_delta_net(pair, failures, 2, 4, 128, {{1, 63, 1, 1, 2}, {3, 0, 1, 0, 70}}, Slots::in_place, random);
}

}  // namespace v100::test
