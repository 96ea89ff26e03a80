// The encoders' searches: the vectors of every instruction set find what the generic ones find, bit for bit.
#include "harness.h"
#include "quants/encode_search.h"

namespace v100::test {

namespace {

const EncodeSearches& searches_of(std::string_view instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == "avx512") return kAvx512Searches;
  if (instruction_set == "avx2") return kAvx2Searches;
#endif
  return instruction_set == "generic" ? kGenericSearches : encode_searches();
}

struct Found {
  std::vector<float> numbers;  // scales, then mins
  std::vector<uint8_t> levels;
};

template <class Search>
Found found_by(const SubBlocks& blocks, Search search) {
  const auto count = static_cast<size_t>(blocks.count);
  Found found{std::vector<float>(2 * count), std::vector<uint8_t>(count * static_cast<size_t>(blocks.n))};
  search(found.numbers.data(), found.numbers.data() + count, found.levels.data());
  return found;
}

}  // namespace

void test_encoder_searches(Pair& pair, Failures& failures) {
  Random random(12);
  const EncodeSearches& fast = searches_of(pair.fast->name());
  constexpr AsymmetricSteps kSteps[] = {
      {.first = -1.0f, .step = 0.1f, .last = 20, .absolute_error = false, .saturate = false},
      {.first = -0.5f, .step = 0.1f, .last = 15, .absolute_error = true, .saturate = false},
      {.first = -0.9f, .step = 0.05f, .last = 36, .absolute_error = false, .saturate = true}};
  for (const Inputs kind :
       {Inputs::ordinary, Inputs::constant, Inputs::alternating, Inputs::sparse, Inputs::tiny, Inputs::huge})
    for (const int n : {16, 32})
      for (const int count : {1, 3, 4, 8, 15, 16, 17, 50}) {
        const std::vector<float> values = random_inputs(count, n, random, kind);
        std::vector<float> weights = random_inputs(count, n, random);
        for (float& w : weights) w = w * w;
        const SubBlocks blocks{values.data(), weights.data(), n, count};
        const std::string what = " of " + std::to_string(count) + " x " + std::to_string(n);
        const auto compare = [&](const char* name, auto run) {
          const Found mine = found_by(blocks, [&](auto... out) { run(fast, out...); });
          const Found generic = found_by(blocks, [&](auto... out) { run(kGenericSearches, out...); });
          failures.expect_same(mine.numbers, generic.numbers, name + what);
          failures.expect(mine.levels == generic.levels, name + (what + ": levels differ"));
        };
        for (const int max_level : {4, 8, 32})
          compare("symmetric", [&](const EncodeSearches& s, float* scales, float*, uint8_t* levels) {
            s.symmetric(blocks, max_level, scales, levels);
          });
        for (const AsymmetricSteps& steps : kSteps)
          for (const int max_level : {3, 15, 31})
            compare("asymmetric", [&](const EncodeSearches& s, float* scales, float* mins, uint8_t* levels) {
              s.asymmetric(blocks, max_level, steps, scales, mins, levels);
            });
        compare("three_bit", [&](const EncodeSearches& s, float* scales, float*, uint8_t* levels) {
          s.three_bit(blocks, scales, levels);
        });
        compare("non_linear",
                [&](const EncodeSearches& s, float* scales, float*, uint8_t*) { s.non_linear(blocks, scales); });
      }
}

}  // namespace v100::test
