// How a sequence begins as another one began: prefixes found in live sequences and in host memory, and kept there when a
// sequence gives them up. Also the whole state of a sequence as bytes.
//
// Keys and values of a token depend on the tokens before it only, so any beginning of a sequence's pages may be reused,
// unless tokens were moved to other positions (mark_moved): these have seen tokens that are no longer there. They depend
// on the adapters too: what was computed with other scales is another beginning.
// A recurrent state is that of one length: a sequence with one can begin where a live sequence ends, or at a checkpoint,
// as far as pages cover it. Layers with a sliding window may have pages of their own, of which a sequence forgets what is
// behind the window: it can begin where the window is still there, or at a checkpoint, which then holds a window's pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "memory/paged_memory.h"
#include "memory/prefix_cache.h"
#include "memory/sequence_bytes.h"
#include "memory/state_pool.h"

namespace v100 {

struct PrefixReuse {
  int32_t length = 0;   // tokens that the sequence begins with now
  int32_t matched = 0;  // tokens of the longest beginning that is known, usable or not
  // Where the last of them came from: "nothing", "own" (the sequence held it), "other" (another live one), "host".
  std::string_view source = "nothing";
  int32_t checkpoint = -1;  // position of the checkpoint that gave the recurrent state; -1: none was needed
  // Why not more: "" (all there is), "prompt" (no more was asked for), "no checkpoint" (known, but no state at a later
  // place), "no page" (in host memory, without free pages to go to), "not cached".
  std::string_view limit;
  int32_t moved = 0;  // tokens at its end that stood elsewhere in the sequence: not what a cold run gives
};

// What the bytes of a saved sequence depend on.
struct StateIdentity {
  uint64_t model = 0;      // weights, their types and packed layout
  uint64_t build = 0;      // of the code that computed
  uint64_t positions = 0;  // rotary angles
  int32_t type_k = 0;
  int32_t type_v = 0;
  std::vector<uint64_t> adapters{};  // fingerprints of those that are loaded
};

class PrefixMemory {
 public:
  // Those before the budget outlive this object. window_pages: of layers that see `window` tokens, the row's own
  // included, and of which sequences have as many as in `pages`; nullptr: there are none. tokens, scales: of each sequence.
  PrefixMemory(PagedMemory& pages, PagedMemory* window_pages, int32_t window, StatePool& states,
               std::vector<std::vector<int32_t>>& tokens, std::vector<AdapterScales>& scales,
               const SequenceBytes& bytes, int64_t budget_bytes, int32_t n_checkpoints);

  // The sequence becomes the longest reusable beginning of `tokens` that was computed with these scales, at most `most`
  // long, and has these scales. What it held and would lose is kept in host memory first. Throws InvalidArgument for an unknown sequence and a `most` outside [0, tokens].
  PrefixReuse reuse(int32_t sequence, std::span<const int32_t> tokens, int32_t most, const AdapterScales& scales = {});
  // The length that reuse() would give.
  int32_t reusable(int32_t sequence, std::span<const int32_t> tokens, int32_t most, const AdapterScales& scales);
  // What the sequence holds is kept in host memory, because it is about to lose its tokens from `first_lost` on.
  void keep_lost(int32_t sequence, int32_t first_lost);
  // Keeps a copy of the state at the end of the sequence, or of the window's pages; nothing to do for models without
  // either, or where one is kept already.
  void checkpoint(int32_t sequence);
  // Empties the sequence; what it held is kept in host memory.
  void release(int32_t sequence);
  CacheUsage usage() const { return cache_.usage(); }

  // Tokens of a sequence from `first` on were moved: they are neither reused nor kept.
  void mark_moved(int32_t sequence, int32_t first);
  // The sequence was cut to `length`; destination became the first `length` tokens of source.
  void was_cut(int32_t sequence, int32_t length) noexcept;
  void was_forked(int32_t source, int32_t destination, int32_t length) noexcept;

  // Tokens, pages, state and the checkpoints on the way, with their identity and a checksum. load replaces the sequence
  // and gives the checkpoints to host memory as far as the budget allows; it throws InvalidArgument with the reason, or
  // ContextFull, and leaves the sequence empty.
  std::vector<std::byte> save(int32_t sequence, const StateIdentity& identity);
  void load(int32_t sequence, std::span<const std::byte> saved, const StateIdentity& identity, int32_t vocab);

 private:
  struct Plan;
  static constexpr int32_t kNothingMoved = std::numeric_limits<int32_t>::max();

  // Of what the next token needs beside the pages of all tokens: recurrent state, then the window's pages. 0: nothing.
  size_t end_bytes() const;
  void read_end(int32_t sequence, std::byte* to) const;
  void write_window(int32_t sequence, int32_t length, const std::byte* from);
  int32_t first_seen(int32_t length) const;  // by the window of the token after `length`
  int32_t usable(int32_t sequence, int32_t common, int32_t limit) const;
  Plan plan(int32_t sequence, std::span<const int32_t> tokens, int32_t most, const AdapterScales& scales,
            const PrefixCache::Found& found) const;
  void keep(int32_t sequence, int32_t first_lost, const std::byte* pinned);
  void clear(int32_t sequence);

  PagedMemory& pages_;
  PagedMemory* window_pages_;
  int32_t window_;
  StatePool& states_;
  std::vector<std::vector<int32_t>>& tokens_;
  std::vector<AdapterScales>& scales_;
  const SequenceBytes& bytes_;
  PrefixCache cache_;
  std::vector<int32_t> moved_from_;  // of each sequence: the first moved token, kNothingMoved for none
};

}  // namespace v100
