// Beginnings of token sequences in host memory: copies of KV pages and checkpoints of recurrent state, in a prefix tree for
// each set of adapters that tokens were computed with, all with one budget.
//
// A node is at most kPageTokens tokens from a page border on. A full node may have children, a partial one is a leaf; no
// node is the beginning of a sibling. A node may hold a copy of its page, checkpoints after any of its tokens, both or
// neither. Bytes go in and out; what they mean is the owner's affair.
//
// Room is made before it is taken, by dropping the least recently used leaves, so `used` never exceeds the budget. What
// an operation has touched since begin() it does not drop itself: what find() returned stays valid until the next begin().
// Keeping is best effort: what finds no room is not kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ops/kv.h"
#include "tensor/buffer.h"

namespace v100 {

// The scale of each of an engine's LoRA adapters, as tokens were computed with them; empty: without any. Never all zeros.
using AdapterScales = std::vector<float>;

struct CacheUsage {    // bytes unless said otherwise
  int64_t budget = 0;  // -1: no limit
  int64_t used = 0;    // pages, checkpoints and the nodes themselves
  int64_t kv_bytes = 0;
  int64_t checkpoint_bytes = 0;
  int64_t n_nodes = 0;
  int64_t n_checkpoints = 0;
  int64_t n_evicted = 0;  // nodes dropped to make room, ever
};

class PrefixCache {
 public:
  using FillPage = std::function<void(int32_t page, std::byte* to)>;  // writes page_bytes
  using FillState = std::function<void(std::byte* to)>;               // writes state_bytes

  struct Page {
    const std::byte* bytes = nullptr;  // none when n_tokens is 0
    int32_t n_tokens = 0;              // so many of the page's tokens, from its start on, are those asked for
  };
  struct Checkpoint {
    int32_t position = 0;  // tokens before it
    const std::byte* state = nullptr;
  };
  struct Found {
    int32_t known = 0;                    // tokens that the tree spells, whatever is kept of them
    std::vector<Page> pages;              // by page number, as far as known
    std::vector<Checkpoint> checkpoints;  // ascending positions, each at most once
  };

  // budget_bytes: 0 keeps nothing, -1 knows no limit. n_checkpoints: at most so many on the path of a sequence.
  // Throws InvalidArgument for a budget below -1 and a negative count.
  PrefixCache(int64_t budget_bytes, int32_t n_checkpoints, size_t page_bytes, size_t state_bytes);
  ~PrefixCache();

  // Starts an operation of the owner: what earlier ones touched may be dropped from here on.
  void begin();
  // The tree that the following calls work on: one for each way in which the tokens were computed. After begin() it is
  // that of the model alone.
  void select(const AdapterScales& scales);

  Found find(std::span<const int32_t> tokens);

  // Copies the pages of `tokens` from number first_page on, where they are not kept yet. False when some found no room:
  // those before it are kept.
  bool keep_pages(std::span<const int32_t> tokens, int32_t first_page, const FillPage& fill);
  // Keeps the state after `tokens`. False when it found no room, for which `pinned`, a state of find(), is not dropped.
  bool keep_state(std::span<const int32_t> tokens, const FillState& fill, const std::byte* pinned = nullptr);
  bool has_state(std::span<const int32_t> tokens) const;

  CacheUsage usage() const;

 private:
  struct Node;
  struct Spot;  // a checkpoint and the node that holds it

  Node* child_of(const Node& parent, std::span<const int32_t> chunk) const;
  Node* extend(Node& parent, Node* child, std::span<const int32_t> chunk);
  std::pair<Node*, size_t> deepest(std::span<const int32_t> tokens) const;
  std::vector<Spot> spots(std::span<const int32_t> tokens) const;
  void touch(Node& node);
  void touch_path(Node* node);
  static const std::byte* state_at(const Spot& spot);
  void drop_state(const Spot& spot);
  void prune(Node* node, const Node* kept);
  void remove(Node& leaf);
  int64_t bytes_of(const Node& node) const;
  bool can_make_room(int64_t bytes) const;
  bool make_room(int64_t bytes);

  int64_t budget_;
  int32_t n_checkpoints_;
  int64_t page_bytes_, state_bytes_;  // as allocated
  int64_t node_bytes_;
  uint64_t operation_ = 1;
  CacheUsage usage_;
  std::map<AdapterScales, std::unique_ptr<Node>> roots_;
  Node* root_;               // the selected one
  std::list<Node*> recent_;  // newest use first; ancestors stand before their descendants
};

// Which of the checkpoints (ascending positions, two at least) is the least useful. The newest eight stay, and of every
// octave of distance from the newest the first and the last, so an edit at any depth finds a checkpoint not much further
// back; the others go oldest first, then the seconds of the octaves, then their firsts.
size_t checkpoint_to_drop(std::span<const int32_t> positions);

}  // namespace v100
