// Which pages hold which tokens of which sequence: page lists with reference counts, shared prefixes, copy on write.
//
// Knows nothing of what is in a page; copies one through a callback. A page is written only while exactly one sequence
// holds it. Invariant: reference count of a page = number of page lists it is in.
//
// A sequence may have forgotten the pages before its window: its list has kNoPage in their place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ops/kv.h"

namespace v100 {

inline constexpr PageId kNoPage = -1;

class PagedMemory {
 public:
  using CopyPage = std::function<void(PageId from, PageId to)>;

  // Throws InvalidArgument for negative counts, more than 2^23 - 1 pages and an empty copy_page.
  PagedMemory(int32_t n_pages, int32_t n_sequences, CopyPage copy_page);

  int32_t n_sequences() const;
  int32_t n_pages() const;
  int32_t free_pages() const;
  int32_t length(int32_t sequence) const;                 // tokens
  std::span<const PageId> pages(int32_t sequence) const;  // valid until the sequence changes

  // Pages that append(sequence, n) would take from the free ones (a shared last page counts, it must be copied).
  int32_t pages_needed(int32_t sequence, int32_t n_tokens) const;
  bool can_append(int32_t sequence, int32_t n_tokens) const;
  // Makes room for n more tokens at the end; they are uninitialised. Throws ContextFull when pages lack.
  void append(int32_t sequence, int32_t n_tokens);
  // Keeps the first `length` tokens. Throws InvalidArgument when the sequence is shorter, or has forgotten the page that
  // they end in.
  void truncate(int32_t sequence, int32_t length);
  // destination := first `length` tokens of source, pages shared. destination == source truncates. InvalidArgument as
  // above.
  void fork(int32_t source, int32_t destination, int32_t length);
  void clear(int32_t sequence);
  // Copies the pages of tokens [first, end) that other sequences hold too, so that these tokens may be written. Throws
  // ContextFull when pages lack, InvalidArgument for tokens that the sequence does not have.
  void make_own(int32_t sequence, int32_t first, int32_t end);
  // destination := the first `shared` tokens of source, pages shared, and room on fresh pages for tokens up to `length`,
  // uninitialised; a `shared` below `length` must end at a page border. Pages that only destination held before count as
  // free. Throws ContextFull, and InvalidArgument as above. source may be destination.
  void replace(int32_t source, int32_t destination, int32_t shared, int32_t length);
  // Fresh pages that replace would find.
  int32_t pages_to_replace(int32_t source, int32_t destination, int32_t shared) const;
  // Gives up the pages that end before token `first_needed`.
  void forget(int32_t sequence, int32_t first_needed);
  int32_t first_kept(int32_t sequence) const;  // first token whose page is there
  // The sequence becomes `length` tokens on fresh pages, uninitialised, having forgotten those before `first_needed`.
  // Throws ContextFull; pages that only this sequence held before count as free.
  void begin_at(int32_t sequence, int32_t first_needed, int32_t length);

  // Every method throws InvalidArgument for a sequence outside [0, n_sequences) and for negative counts. A method that
  // throws, also through copy_page, has changed nothing. append and then truncate to the old length keeps every token
  // and the number of the sequence's pages; a shared last page stays replaced by the copy that append made.

 private:
  struct Sequence {
    int32_t length = 0;
    std::vector<PageId> pages;  // ceil(length / kPageTokens) of them
    int32_t first_page = 0;     // kNoPage stands before it
  };

  const Sequence& at(int32_t sequence) const;
  Sequence& at(int32_t sequence);
  bool must_copy_last_page(const Sequence& sequence) const;
  void require_length(int32_t sequence, int32_t length) const;
  void require_pages(int32_t sequence, int32_t needed, int32_t found) const;
  PageId take_page() noexcept;
  void drop_page(PageId page) noexcept;
  void drop_pages(std::vector<PageId>& pages, size_t kept) noexcept;

  CopyPage copy_page_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> references_;  // per page: page lists it is in
  std::vector<PageId> free_;         // min-heap with room for every page: the lowest id is taken first
};

}  // namespace v100
