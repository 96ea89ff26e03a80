// Page lists of sequences: every operation first does what can fail (checks, allocation, the copy), then commits.
#include "memory/paged_memory.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"

namespace v100 {

namespace {

int32_t pages_for(int64_t tokens) { return static_cast<int32_t>((tokens + kPageTokens - 1) / kPageTokens); }

void require_count(const char* name, int32_t value) {
  if (value < 0) throw InvalidArgument(std::string(name) + " is " + std::to_string(value) + "; expected 0 or more");
}

}  // namespace

PagedMemory::PagedMemory(int32_t n_pages, int32_t n_sequences, CopyPage copy_page) : copy_page_(std::move(copy_page)) {
  require_count("number of KV pages", n_pages);
  require_count("number of sequences", n_sequences);
  constexpr int32_t kMostPages = std::numeric_limits<int32_t>::max() / kPageTokens;  // lengths are int32
  if (n_pages > kMostPages)
    throw InvalidArgument("number of KV pages is " + std::to_string(n_pages) + "; expected at most " +
                          std::to_string(kMostPages));
  if (!copy_page_) throw InvalidArgument("paged memory needs a function that copies a page; found none");
  sequences_.resize(static_cast<size_t>(n_sequences));
  references_.assign(static_cast<size_t>(n_pages), 0);
  free_.resize(static_cast<size_t>(n_pages));
  std::iota(free_.begin(), free_.end(), 0);  // ascending order is a min-heap
}

int32_t PagedMemory::n_sequences() const { return static_cast<int32_t>(sequences_.size()); }

int32_t PagedMemory::n_pages() const { return static_cast<int32_t>(references_.size()); }

int32_t PagedMemory::free_pages() const { return static_cast<int32_t>(free_.size()); }

int32_t PagedMemory::length(int32_t sequence) const { return at(sequence).length; }

std::span<const PageId> PagedMemory::pages(int32_t sequence) const { return at(sequence).pages; }

int32_t PagedMemory::pages_needed(int32_t sequence, int32_t n_tokens) const {
  const Sequence& s = at(sequence);
  require_count("number of tokens to append", n_tokens);
  if (n_tokens == 0) return 0;
  const int32_t added = pages_for(int64_t{s.length} + n_tokens) - static_cast<int32_t>(s.pages.size());
  return added + (must_copy_last_page(s) ? 1 : 0);
}

bool PagedMemory::can_append(int32_t sequence, int32_t n_tokens) const {
  return pages_needed(sequence, n_tokens) <= free_pages();
}

void PagedMemory::append(int32_t sequence, int32_t n_tokens) {
  const int32_t needed = pages_needed(sequence, n_tokens);
  if (needed > free_pages())
    throw ContextFull("sequence " + std::to_string(sequence) + " holds " + std::to_string(length(sequence)) +
                          " tokens; " + std::to_string(n_tokens) + " more need " + std::to_string(needed) +
                          " pages of " + std::to_string(kPageTokens) + " tokens, " + std::to_string(free_pages()) +
                          " of " + std::to_string(n_pages()) + " are free",
                      sequence);
  if (n_tokens == 0) return;

  Sequence& s = at(sequence);
  const size_t n_pages_after = static_cast<size_t>(pages_for(int64_t{s.length} + n_tokens));
  s.pages.reserve(n_pages_after);
  if (must_copy_last_page(s)) {
    const PageId shared = s.pages.back();
    copy_page_(shared, free_.front());
    s.pages.back() = take_page();
    --references_[static_cast<size_t>(shared)];  // others hold it: it cannot become free
  }
  while (s.pages.size() < n_pages_after) s.pages.push_back(take_page());
  s.length += n_tokens;
}

void PagedMemory::truncate(int32_t sequence, int32_t length) {
  require_length(sequence, length);
  Sequence& s = at(sequence);
  drop_pages(s.pages, static_cast<size_t>(pages_for(length)));
  s.length = length;
  s.first_page = std::min(s.first_page, pages_for(length));
}

void PagedMemory::fork(int32_t source, int32_t destination, int32_t length) {
  replace(source, destination, length, length);
}

void PagedMemory::replace(int32_t source, int32_t destination, int32_t shared, int32_t length) {
  require_length(source, shared);
  Sequence& to = at(destination);
  if (length < shared || (length > shared && shared % kPageTokens != 0))
    throw InvalidArgument("sequence " + std::to_string(destination) + " cannot share " + std::to_string(shared) +
                          " tokens and have fresh pages up to " + std::to_string(length));
  const auto n_shared = static_cast<size_t>(pages_for(shared)), n_pages_after = static_cast<size_t>(pages_for(length));
  require_pages(destination, static_cast<int32_t>(n_pages_after - n_shared),
                pages_to_replace(source, destination, shared));
  const Sequence& from = at(source);
  std::vector<PageId> after;
  after.reserve(n_pages_after);
  after.assign(from.pages.begin(), from.pages.begin() + static_cast<ptrdiff_t>(n_shared));
  const int32_t first_page = std::min(from.first_page, static_cast<int32_t>(n_shared));
  for (const PageId page : after)
    if (page != kNoPage) ++references_[static_cast<size_t>(page)];
  drop_pages(to.pages, 0);  // after counting: pages that both lists hold never become free
  while (after.size() < n_pages_after) after.push_back(take_page());
  to.pages = std::move(after);
  to.length = length;
  to.first_page = first_page;
}

void PagedMemory::make_own(int32_t sequence, int32_t first, int32_t end) {
  Sequence& s = at(sequence);
  if (first < 0 || end > s.length || first > end)
    throw InvalidArgument("sequence " + std::to_string(sequence) + " holds " + std::to_string(s.length) +
                          " tokens; it has no tokens " + std::to_string(first) + " to " + std::to_string(end));
  std::vector<size_t> shared;
  for (size_t i = static_cast<size_t>(first / kPageTokens); i < static_cast<size_t>(pages_for(end)); ++i)
    if (first < end && references_[static_cast<size_t>(s.pages[i])] > 1) shared.push_back(i);
  if (shared.size() > free_.size())
    throw ContextFull("sequence " + std::to_string(sequence) + " shares " + std::to_string(shared.size()) +
                          " pages that are to be written, " + std::to_string(free_pages()) + " of " +
                          std::to_string(n_pages()) + " are free",
                      sequence);
  std::vector<PageId> copies;
  copies.reserve(shared.size());
  try {
    for (const size_t i : shared) {
      copies.push_back(take_page());
      copy_page_(s.pages[i], copies.back());
    }
  } catch (...) {
    drop_pages(copies, 0);
    throw;
  }
  for (size_t i = 0; i < shared.size(); ++i) {
    --references_[static_cast<size_t>(s.pages[shared[i]])];  // others hold it: it cannot become free
    s.pages[shared[i]] = copies[i];
  }
}

int32_t PagedMemory::pages_to_replace(int32_t source, int32_t destination, int32_t shared) const {
  require_length(source, shared);
  const std::vector<PageId>& held = at(destination).pages;
  const size_t n_kept = source == destination ? static_cast<size_t>(pages_for(shared)) : 0;
  const auto is_sole = [&](PageId page) { return page != kNoPage && references_[static_cast<size_t>(page)] == 1; };
  return free_pages() +
         static_cast<int32_t>(std::count_if(held.begin() + static_cast<ptrdiff_t>(n_kept), held.end(), is_sole));
}

void PagedMemory::forget(int32_t sequence, int32_t first_needed) {
  Sequence& s = at(sequence);
  const int32_t end = std::min(first_needed, s.length) / kPageTokens;
  for (; s.first_page < end; ++s.first_page)
    drop_page(std::exchange(s.pages[static_cast<size_t>(s.first_page)], kNoPage));
}

int32_t PagedMemory::first_kept(int32_t sequence) const { return at(sequence).first_page * kPageTokens; }

void PagedMemory::begin_at(int32_t sequence, int32_t first_needed, int32_t length) {
  Sequence& s = at(sequence);
  require_count("length", length);
  const int32_t first_page = std::clamp(first_needed, 0, length) / kPageTokens;
  const int32_t n_fresh = pages_for(length) - first_page;
  require_pages(sequence, n_fresh, pages_to_replace(sequence, sequence, 0));
  std::vector<PageId> after;
  after.reserve(static_cast<size_t>(first_page + n_fresh));
  after.assign(static_cast<size_t>(first_page), kNoPage);
  drop_pages(s.pages, 0);
  for (int32_t i = 0; i < n_fresh; ++i) after.push_back(take_page());
  s.pages = std::move(after);
  s.length = length;
  s.first_page = first_page;
}

void PagedMemory::clear(int32_t sequence) { truncate(sequence, 0); }

const PagedMemory::Sequence& PagedMemory::at(int32_t sequence) const {
  if (sequence < 0 || sequence >= n_sequences())
    throw InvalidArgument("sequence " + std::to_string(sequence) + " is unknown; expected 0 to " +
                          std::to_string(n_sequences() - 1));
  return sequences_[static_cast<size_t>(sequence)];
}

PagedMemory::Sequence& PagedMemory::at(int32_t sequence) {
  return const_cast<Sequence&>(std::as_const(*this).at(sequence));
}

// A full page is never written again, so only a partly filled one must be held alone.
bool PagedMemory::must_copy_last_page(const Sequence& sequence) const {
  return sequence.length % kPageTokens != 0 && references_[static_cast<size_t>(sequence.pages.back())] > 1;
}

void PagedMemory::require_length(int32_t sequence, int32_t length) const {
  const Sequence& s = at(sequence);
  require_count("length to keep", length);
  if (length > s.length)
    throw InvalidArgument("sequence " + std::to_string(sequence) + " holds " + std::to_string(s.length) +
                          " tokens; cannot keep the first " + std::to_string(length));
  if (length % kPageTokens != 0 && length / kPageTokens < s.first_page)
    throw InvalidArgument("sequence " + std::to_string(sequence) + " has forgotten its first " +
                          std::to_string(s.first_page * kPageTokens) + " tokens; cannot keep the first " +
                          std::to_string(length));
}

void PagedMemory::require_pages(int32_t sequence, int32_t needed, int32_t found) const {
  if (needed > found)
    throw ContextFull("sequence " + std::to_string(sequence) + " needs " + std::to_string(needed) + " pages of " +
                          std::to_string(kPageTokens) + " tokens, " + std::to_string(found) + " of " +
                          std::to_string(n_pages()) + " are free",
                      sequence);
}

PageId PagedMemory::take_page() noexcept {
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const PageId page = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagedMemory::drop_pages(std::vector<PageId>& pages, size_t kept) noexcept {
  while (pages.size() > kept) {
    drop_page(pages.back());
    pages.pop_back();
  }
}

void PagedMemory::drop_page(PageId page) noexcept {
  if (page == kNoPage || --references_[static_cast<size_t>(page)] > 0) return;
  free_.push_back(page);  // the constructor made room: does not allocate
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

}  // namespace v100
