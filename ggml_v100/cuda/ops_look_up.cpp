// Parts of rows for the host: the largest values, single ones, and whether there are flaws.
#include "base/error.h"
#include "cuda/ops.h"

namespace v100::cuda {

namespace {

constexpr int32_t kChunk = 2048;      // values of a block of top_k
constexpr uint32_t kFlawBlocks = 64;  // of a row
constexpr uint8_t kNoFlaw = 0x7f;     // byte of a column that no row has
constexpr uint32_t kSortingThreads = 512;

int32_t chunks_of(int32_t n) { return (n + kChunk - 1) / kChunk; }

}  // namespace

std::optional<RowAnswer> CudaOps::look_up(Tensor x, const RowQuery& query) {
  const auto rows = static_cast<size_t>(x.rows), largest = static_cast<size_t>(query.largest),
             listed = static_cast<size_t>(query.listed);
  RowAnswer answer;
  if (rows == 0) return answer;
  // One copy brings all of it: values, their columns, single values, flaws.
  const size_t n_largest = rows * largest, n_listed = rows * listed;
  const Tensor all = create(1, static_cast<int32_t>(2 * n_largest + n_listed + rows));
  float* values = all.data;
  auto* columns = reinterpret_cast<int32_t*>(values + n_largest);
  float* single = values + 2 * n_largest;
  auto* flaws = reinterpret_cast<int32_t*>(single + n_listed);

  recorder_.fill(address_of(flaws), kNoFlaw, rows * sizeof(int32_t));
  const auto row_count = static_cast<uint32_t>(rows);
  launch("sampling", "find_flaws", {std::min(kFlawBlocks, static_cast<uint32_t>(wide_blocks(x.features))), row_count},
         kThreads, FindFlawsParams{.logits = x.data, .first = flaws, .n = x.features});
  if (listed > 0)
    launch("sampling", "pick_columns", {row_count}, kThreads,
           PickColumnsParams{
               .x = x.data, .columns = bring(query.columns), .y = single, .n = x.features, .listed = query.listed});

  TopKParams pass{.logits = x.data,
                  .keys = nullptr,
                  .kept_keys = nullptr,
                  .values = nullptr,
                  .indices = nullptr,
                  .n = x.features,
                  .kept = query.largest};
  for (int32_t chunks = chunks_of(pass.n);; chunks = chunks_of(pass.n)) {
    if (chunks == 1) {
      pass.values = values, pass.indices = columns;
    } else {
      pass.kept_keys = take<uint64_t>(rows * static_cast<size_t>(chunks) * largest);
    }
    launch("top_k", "top_k", {static_cast<uint32_t>(chunks), row_count}, kSortingThreads, pass);
    if (chunks == 1) break;
    pass.logits = nullptr, pass.keys = pass.kept_keys, pass.kept_keys = nullptr;
    pass.n = chunks * query.largest;
  }

  const float* host = host_copy_of(all);
  answer.values.assign(host, host + n_largest);
  const auto* host_columns = reinterpret_cast<const int32_t*>(host + n_largest);
  answer.columns.assign(host_columns, host_columns + n_largest);
  answer.listed.assign(host + 2 * n_largest, host + 2 * n_largest + n_listed);
  const auto* host_flaws = reinterpret_cast<const int32_t*>(host + 2 * n_largest + n_listed);
  for (size_t row = 0; row < rows; ++row) answer.is_flawed.push_back(host_flaws[row] < x.features ? 1 : 0);
  return answer;
}

}  // namespace v100::cuda
