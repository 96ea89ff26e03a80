#include "cuda/row_tables.h"

#include <algorithm>
#include <cstring>

#include "cuda/kernels/delta_chunk_shape.h"

namespace v100::cuda {

namespace {

struct Counts {
  size_t rows, sequences, pages;
};

bool is_prompt(const SequenceRows& sequence) { return sequence.rows.size() > kMostDecodeRows; }

// Of the sequence's first row in the ubatch, in its sequence.
int32_t first_position(const Rows& rows, const SequenceRows& sequence) {
  const auto first = static_cast<size_t>(sequence.rows.begin);
  return first < rows.kv_index.size() ? rows.kv_index[first] : 0;
}

int32_t chunks_of(const Rows& rows, const SequenceRows& sequence) {
  return is_prompt(sequence) ? delta_chunks(first_position(rows, sequence), sequence.rows.size()) : 0;
}

// Pages in steps, so that a growing sequence has tables of one size for a while: recorded work depends on it.
Counts counts_of(const Rows& rows) {
  constexpr size_t kStep = 16;
  size_t pages = 1, n_rows = rows.tokens.size();
  for (const SequenceRows& sequence : rows.sequences) {
    pages = std::max(pages, sequence.pages.size());
    n_rows = std::max(n_rows, static_cast<size_t>(sequence.rows.end));
  }
  return {n_rows, rows.sequences.size(), (pages + kStep - 1) / kStep * kStep};
}

}  // namespace

std::vector<RowRun> runs_of(const Rows& rows) {
  std::vector<RowRun> runs;
  for (const SequenceRows& sequence : rows.sequences) {
    if (runs.empty() || runs.back().is_prompt != is_prompt(sequence))
      runs.push_back({sequence.rows, is_prompt(sequence)});
    else
      runs.back().rows.end = sequence.rows.end;
  }
  return runs;
}

RowRange common(RowRange a, RowRange b) {
  const int32_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

int32_t most_rows(const Rows& rows, RowRange part) {
  int32_t most = 0;
  for (const SequenceRows& sequence : rows.sequences) most = std::max(most, common(sequence.rows, part).size());
  return most;
}

void write_row_tables(const Rows& rows, std::vector<int32_t>& contents) {
  const auto [n, sequences, pages] = counts_of(rows);
  contents.assign(4 * n + 6 * sequences + 2 + sequences * pages, 0);
  int32_t* at = contents.data();
  static_assert(sizeof(RowRange) == 2 * sizeof(int32_t));
  if (rows.visible.size() >= n && n > 0) std::memcpy(at, rows.visible.data(), n * sizeof(RowRange));
  at += 2 * n;
  if (rows.kv_index.size() >= n) std::copy_n(rows.kv_index.begin(), n, at);
  at += n;
  std::fill_n(at, n, -1);
  for (size_t s = 0; s < sequences; ++s)
    std::fill(at + rows.sequences[s].rows.begin, at + rows.sequences[s].rows.end, static_cast<int32_t>(s));
  at += n;
  for (size_t s = 0; s < sequences; ++s) *at++ = rows.sequences[s].rows.begin;
  *at++ = static_cast<int32_t>(n);
  for (const SequenceRows& sequence : rows.sequences) *at++ = sequence.rows.end;
  for (const SequenceRows& sequence : rows.sequences) *at++ = sequence.state_from;
  for (const SequenceRows& sequence : rows.sequences) *at++ = sequence.state_to;
  for (const SequenceRows& sequence : rows.sequences) *at++ = first_position(rows, sequence);
  for (const SequenceRows& sequence : rows.sequences) at[1] = at[0] + chunks_of(rows, sequence), ++at;
  ++at;
  for (const SequenceRows& sequence : rows.sequences) {
    std::copy(sequence.pages.begin(), sequence.pages.end(), at);
    at += pages;
  }
}

RowTables row_tables_at(const Rows& rows, CUdeviceptr address) {
  const auto [n, sequences, pages] = counts_of(rows);
  const auto* at = reinterpret_cast<const int32_t*>(address);
  RowTables tables;
  tables.rows = static_cast<int32_t>(n);
  tables.sequences = static_cast<int32_t>(sequences);
  tables.most_pages = static_cast<int32_t>(pages);
  tables.visible = at;
  tables.kv_index = at + 2 * n;
  tables.sequence = at + 3 * n;
  tables.first_row = at + 4 * n;
  tables.end_row = tables.first_row + sequences + 1;
  tables.state_from = tables.end_row + sequences;
  tables.state_to = tables.state_from + sequences;
  tables.first_position = tables.state_to + sequences;
  tables.first_chunk = tables.first_position + sequences;
  tables.page_table = tables.first_chunk + sequences + 1;
  for (const SequenceRows& sequence : rows.sequences) tables.chunks += chunks_of(rows, sequence);
  return tables;
}

}  // namespace v100::cuda
