// Prints what parallel/split.h answers, for test_split.py. Shares come as "1,1,0.5"; a range is printed as begin:end.
#include "parallel/split.h"

#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"

namespace {

using namespace v100;

std::vector<double> numbers(const char* text) {
  std::vector<double> values;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) values.push_back(std::stod(word));
  return values;
}

void print(RowRange range) { std::printf("%d:%d ", range.begin, range.end); }

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const auto number = [&](int i) { return i < argc ? std::stoi(argv[i]) : 0; };
  if (what == "items") {  // shares items per_unit times
    Splitter splitter(numbers(argv[2]));
    for (int i = 0; i < number(5); ++i, std::puts(""))
      for (const RowRange range : cut_items(splitter, SplitKind::feed_forward, number(3), number(4), 1.0)) print(range);
  } else if (what == "weighted") {  // shares, then one item size per cut of 4 items
    Splitter splitter(numbers(argv[2]));
    for (const double bytes : numbers(argv[3])) {
      for (const RowRange range : splitter.cut(SplitKind::attention, 4, bytes)) print(range);
      std::puts("");
    }
  } else if (what == "heads") {  // shares heads kv_heads head_columns block times
    Splitter splitter(numbers(argv[2]));
    for (int i = 0; i < number(7); ++i, std::puts(""))
      for (const HeadShare& share : split_heads(splitter, number(3), number(4), number(5), number(6), 1.0)) {
        print(share.heads);
        print(share.kv_heads);
        std::printf("%d %d ", share.group, share.skew());
      }
  } else if (what == "values") {  // first_key end_key key_heads value_heads
    for (const RowRange range : value_heads_of({number(2), number(3)}, number(4), number(5))) print(range);
  } else if (what == "unit") {  // items columns block
    std::printf("%d", items_per_unit(number(2), number(3), number(4)));
  } else if (what == "layers") {  // shares layers
    for (const RowRange range : split_layers(numbers(argv[2]), number(3))) print(range);
  } else {
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const v100::InvalidArgument& error) {
    std::puts(error.what());
    return 3;
  }
}
