#include "engine/row_look_up.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "engine/rank.h"

namespace v100 {

namespace {

// In powers of two: devices replay work whose sizes repeat.
int32_t in_steps(size_t n) { return n == 0 ? 0 : static_cast<int32_t>(std::bit_ceil(n)); }

// What a device would answer, of rows in host memory.
RowAnswer look_up_on_host(Tensor x, const RowQuery& query) {
  RowAnswer answer;
  std::vector<Candidate> chosen;
  for (int32_t r = 0; r < x.rows; ++r) {
    const std::span<const float> row(x.row(r), static_cast<size_t>(x.features));
    select_first_of_untrusted(row, static_cast<size_t>(query.largest), chosen);
    for (const Candidate& c : chosen) answer.values.push_back(c.logit), answer.columns.push_back(c.token);
    for (int32_t i = 0; i < query.listed; ++i) {
      const int32_t column =
          query.columns[static_cast<size_t>(r) * static_cast<size_t>(query.listed) + static_cast<size_t>(i)];
      answer.listed.push_back(column < 0 ? 0.0f : row[static_cast<size_t>(column)]);
    }
    answer.is_flawed.push_back(
        std::ranges::any_of(row, [](float v) { return std::isnan(v) || (std::isinf(v) && v > 0); }));
  }
  return answer;
}

}  // namespace

RowLookUp::RowLookUp(std::span<const RowNeeds* const> needs, int32_t vocab, size_t n_ranks)
    : vocab_(vocab), shares_(n_ranks) {
  size_t listed = 0;
  for (const RowNeeds* need : needs) {
    needs_.push_back(need != nullptr ? *need : RowNeeds{});
    largest_ = std::max(largest_, in_steps(static_cast<size_t>(needs_.back().largest)));
    listed = std::max(listed, needs_.back().tokens.size());
  }
  listed_ = in_steps(listed);
}

void RowLookUp::ask(size_t rank, Ops& ops, Tensor logits, int32_t first) {
  Share& share = shares_[rank];
  share.logits = logits;
  share.first = first;
  share.largest = std::min(largest_, logits.features);
  if (logits.features == 0) return;
  std::vector<int32_t> columns;
  for (const RowNeeds& need : needs_)
    for (size_t i = 0; i < static_cast<size_t>(listed_); ++i) {
      const int32_t column = i < need.tokens.size() ? need.tokens[i] - first : -1;
      columns.push_back(column < logits.features ? std::max(column, -1) : -1);
    }
  const RowQuery query{share.largest, listed_, columns};
  std::optional<RowAnswer> answer = ops.look_up(logits, query);
  share.answer = answer ? std::move(*answer) : look_up_on_host(ops.on_host(logits), query);
}

bool RowLookUp::has_whole_rows() {
  for (size_t row = 0; row < needs_.size(); ++row) {
    const bool is_flawed = std::ranges::any_of(
        shares_, [&](const Share& share) { return share.logits.features > 0 && share.answer.is_flawed[row] != 0; });
    if (needs_[row].largest == 0 || is_flawed) whole_rows_.push_back(static_cast<int32_t>(row));
  }
  whole_.resize(whole_rows_.size() * static_cast<size_t>(vocab_));
  return !whole_rows_.empty();
}

void RowLookUp::read_whole_rows(size_t rank, Ops& ops) {
  const Share& share = shares_[rank];
  for (size_t i = 0; i < whole_rows_.size() && share.logits.features > 0; ++i)
    read_part(ops, {share.logits.row(whole_rows_[i]), 1, share.logits.features}, share.first,
              std::span(whole_).subspan(i * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_)), vocab_);
}

// The largest of all ranks, and each token's value from the rank that has it.
void RowLookUp::gather(size_t row) {
  std::vector<Candidate>& candidates = candidates_[row];
  std::vector<Candidate>& listed = listed_of_[row];
  const RowNeeds& need = needs_[row];
  for (const Share& share : shares_) {
    if (share.logits.features == 0) continue;
    const auto count = static_cast<size_t>(share.largest);
    for (size_t i = row * count; i < (row + 1) * count; ++i)
      candidates.push_back({share.first + share.answer.columns[i], share.answer.values[i]});
    for (size_t i = 0; i < need.tokens.size(); ++i) {
      const int32_t column = need.tokens[i] - share.first;
      if (column < 0 || column >= share.logits.features) continue;
      listed.push_back({need.tokens[i], share.answer.listed[row * static_cast<size_t>(listed_) + i]});
    }
  }
  std::ranges::sort(candidates, comes_before);
  if (candidates.size() > static_cast<size_t>(need.largest)) candidates.resize(static_cast<size_t>(need.largest));
}

std::span<const LogitsRow> RowLookUp::put_together() {
  candidates_.resize(needs_.size());
  listed_of_.resize(needs_.size());
  size_t n_whole = 0;
  for (size_t row = 0; row < needs_.size(); ++row) {
    const auto vocab = static_cast<size_t>(vocab_);
    if (n_whole < whole_rows_.size() && whole_rows_[n_whole] == static_cast<int32_t>(row)) {
      rows_.emplace_back(std::span<const float>(whole_).subspan(n_whole++ * vocab, vocab));
      continue;
    }
    gather(row);
    rows_.emplace_back(vocab, candidates_[row], listed_of_[row]);
  }
  return rows_;
}

}  // namespace v100
