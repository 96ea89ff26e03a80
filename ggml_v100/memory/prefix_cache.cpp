// The tree, its order of use, and what makes room.
#include "memory/prefix_cache.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"

namespace v100 {

namespace {

constexpr size_t kNewestKept = 8;
constexpr int64_t kAllocationBytes = 32;  // what an allocator adds to a small block, about

int32_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t n = std::min(a.size(), b.size());
  const auto end = a.begin() + static_cast<ptrdiff_t>(n);
  return static_cast<int32_t>(std::mismatch(a.begin(), end, b.begin()).first - a.begin());
}

std::span<const int32_t> page_chunk(std::span<const int32_t> tokens, size_t page) {
  const size_t begin = page * kPageTokens;
  return tokens.subspan(begin, std::min(tokens.size() - begin, size_t{kPageTokens}));
}

size_t page_count(std::span<const int32_t> tokens) { return (tokens.size() + kPageTokens - 1) / kPageTokens; }

// Buffers come in whole pages of the system.
int64_t allocated(size_t bytes) {
  constexpr size_t kSystemPage = 4096;
  return static_cast<int64_t>((bytes + kSystemPage - 1) / kSystemPage * kSystemPage);
}

// A copy is not worth failing a request for: where the host has no memory, nothing is kept.
std::optional<Buffer> allocate(int64_t bytes) {
  try {
    return Buffer(static_cast<size_t>(bytes));
  } catch (const OutOfMemory&) {
    return std::nullopt;
  }
}

}  // namespace

struct PrefixCache::Node {
  struct State {
    int32_t offset;  // tokens of the node before it, 1 to kPageTokens
    Buffer bytes;
  };

  Node* parent = nullptr;
  int32_t start = 0;  // position of the first token
  std::vector<int32_t> tokens;
  Buffer page;
  int32_t page_tokens = 0;    // of the page's copy, 0: none
  std::vector<State> states;  // ascending offsets
  std::vector<std::unique_ptr<Node>> children;
  std::list<Node*>::iterator place;
  uint64_t touched = 0;

  bool is_empty() const { return page_tokens == 0 && states.empty() && children.empty(); }
};

struct PrefixCache::Spot {
  int32_t position;
  Node* node;
};

PrefixCache::PrefixCache(int64_t budget_bytes, int32_t n_checkpoints, size_t page_bytes, size_t state_bytes)
    : budget_(budget_bytes),
      n_checkpoints_(n_checkpoints),
      page_bytes_(allocated(page_bytes)),
      state_bytes_(allocated(state_bytes)),
      node_bytes_(static_cast<int64_t>(sizeof(Node) + kPageTokens * sizeof(int32_t) + sizeof(void*) * 5) +
                  3 * kAllocationBytes),
      root_(roots_.emplace(AdapterScales{}, std::make_unique<Node>()).first->second.get()) {
  if (budget_ < -1)
    throw InvalidArgument("budget of the prefix cache is " + std::to_string(budget_) + " bytes; expected -1 or more");
  if (n_checkpoints_ < 0)
    throw InvalidArgument("number of checkpoints is " + std::to_string(n_checkpoints_) + "; expected 0 or more");
  usage_.budget = budget_;
}

PrefixCache::~PrefixCache() = default;

void PrefixCache::begin() {
  ++operation_;
  std::erase_if(roots_, [](const auto& tree) { return !tree.first.empty() && tree.second->children.empty(); });
  select({});
}

void PrefixCache::select(const AdapterScales& scales) {
  std::unique_ptr<Node>& root = roots_[scales];
  if (root == nullptr) root = std::make_unique<Node>();
  root_ = root.get();
}

PrefixCache::Found PrefixCache::find(std::span<const int32_t> tokens) {
  Found found;
  std::vector<Node*> used;  // parents before children
  Node* node = root_;
  for (size_t i = 0; i < page_count(tokens) && node != nullptr; ++i) {
    const auto chunk = page_chunk(tokens, i);
    const auto start = static_cast<int32_t>(i) * kPageTokens;
    Page page;
    Node *holder = nullptr, *next = nullptr;
    const size_t n_before = found.checkpoints.size();
    for (const auto& child : node->children) {
      const int32_t common = common_prefix(child->tokens, chunk);
      if (common == 0) continue;
      found.known = std::max(found.known, start + common);
      if (common == kPageTokens) next = child.get();
      if (std::min(common, child->page_tokens) > page.n_tokens) {
        page = {child->page.data(), std::min(common, child->page_tokens)};
        holder = child.get();
      }
      bool has_checkpoint = false;
      for (const Node::State& state : child->states)
        if (state.offset <= common) {
          found.checkpoints.push_back({start + state.offset, state.bytes.data()});
          has_checkpoint = true;
        }
      if (has_checkpoint || child.get() == next) used.push_back(child.get());
    }
    if (holder != nullptr) used.push_back(holder);
    // Siblings that begin alike may each have a checkpoint at the same place: the same state.
    const auto added = found.checkpoints.begin() + static_cast<ptrdiff_t>(n_before);
    std::sort(added, found.checkpoints.end(), [](auto& a, auto& b) { return a.position < b.position; });
    const auto twice =
        std::unique(added, found.checkpoints.end(), [](auto& a, auto& b) { return a.position == b.position; });
    found.checkpoints.erase(twice, found.checkpoints.end());
    found.pages.push_back(page);
    node = next;
  }
  for (auto last = used.rbegin(); last != used.rend(); ++last) touch(**last);
  return found;
}

bool PrefixCache::keep_pages(std::span<const int32_t> tokens, int32_t first_page, const FillPage& fill) {
  touch_path(deepest(tokens).first);
  Node* node = root_;
  bool complete = true;
  for (size_t i = 0; i < page_count(tokens); ++i) {
    const auto chunk = page_chunk(tokens, i);
    const auto n_tokens = static_cast<int32_t>(chunk.size());
    const auto page = static_cast<int32_t>(i);
    Node* child = child_of(*node, chunk);
    const bool is_lacking = page >= first_page && (child == nullptr || child->page_tokens < n_tokens);
    const bool needs_buffer = is_lacking && (child == nullptr || child->page.size() == 0);
    const int64_t bytes = (child == nullptr ? node_bytes_ : 0) + (needs_buffer ? page_bytes_ : 0);
    std::optional<Buffer> buffer;
    complete = bytes == 0 || make_room(bytes);
    if (complete && needs_buffer) complete = (buffer = allocate(page_bytes_)).has_value();
    if (!complete) break;
    if (is_lacking) {
      if (!needs_buffer) child->page_tokens = 0;  // while the copy of fewer tokens is written over
      fill(page, needs_buffer ? buffer->data() : child->page.data());
    }
    node = extend(*node, child, chunk);
    if (!is_lacking) continue;
    node->page_tokens = n_tokens;
    if (!needs_buffer) continue;
    node->page = std::move(*buffer);
    usage_.kv_bytes += page_bytes_;
    usage_.used += page_bytes_;
  }
  prune(node, nullptr);
  return complete;
}

bool PrefixCache::has_state(std::span<const int32_t> tokens) const {
  const std::vector<Spot> all = spots(tokens);
  return !all.empty() && all.back().position == static_cast<int32_t>(tokens.size());
}

bool PrefixCache::keep_state(std::span<const int32_t> tokens, const FillState& fill, const std::byte* pinned) {
  if (n_checkpoints_ == 0 || state_bytes_ == 0 || tokens.empty()) return false;
  std::vector<Spot> path = spots(tokens);
  for (const Spot& spot : path) touch_path(spot.node);
  const auto position = static_cast<int32_t>(tokens.size());
  if (!path.empty() && path.back().position == position) return true;

  const auto [known, depth] = deepest(tokens);
  touch_path(known);
  const int64_t bytes = static_cast<int64_t>(page_count(tokens) - depth) * node_bytes_ + state_bytes_;
  auto n_most = static_cast<size_t>(n_checkpoints_);
  const size_t n_pinned = std::erase_if(path, [&](const Spot& spot) { return state_at(spot) == pinned; });
  // Nothing is given up for a state that does not fit even so.
  if (n_most <= n_pinned || !can_make_room(bytes - static_cast<int64_t>(path.size()) * state_bytes_)) return false;
  n_most -= n_pinned;
  std::vector<int32_t> positions;
  for (const Spot& spot : path) positions.push_back(spot.position);
  positions.push_back(position);
  while (positions.size() > 1 && (positions.size() > n_most || !can_make_room(bytes))) {
    const auto victim = static_cast<ptrdiff_t>(checkpoint_to_drop(positions));
    drop_state(path[static_cast<size_t>(victim)]);
    prune(path[static_cast<size_t>(victim)].node, known);
    path.erase(path.begin() + victim);
    positions.erase(positions.begin() + victim);
  }
  std::optional<Buffer> state;
  if (make_room(bytes)) state = allocate(state_bytes_);
  if (!state) {
    prune(known, nullptr);
    return false;
  }
  fill(state->data());
  Node* node = root_;
  for (size_t i = 0; i < page_count(tokens); ++i)
    node = extend(*node, child_of(*node, page_chunk(tokens, i)), page_chunk(tokens, i));
  const int32_t offset = position - node->start;
  const auto after =
      std::find_if(node->states.begin(), node->states.end(), [&](const Node::State& s) { return s.offset > offset; });
  node->states.insert(after, {offset, std::move(*state)});
  usage_.checkpoint_bytes += state_bytes_;
  usage_.used += state_bytes_;
  ++usage_.n_checkpoints;
  return true;
}

CacheUsage PrefixCache::usage() const { return usage_; }

// The child whose tokens begin with the chunk or are its beginning: at most one, see the header.
PrefixCache::Node* PrefixCache::child_of(const Node& parent, std::span<const int32_t> chunk) const {
  for (const auto& child : parent.children)
    if (static_cast<size_t>(common_prefix(child->tokens, chunk)) == std::min(child->tokens.size(), chunk.size()))
      return child.get();
  return nullptr;
}

// The last node on the way of `tokens`, perhaps the root, and how many it is away from the root.
std::pair<PrefixCache::Node*, size_t> PrefixCache::deepest(std::span<const int32_t> tokens) const {
  Node* node = root_;
  for (size_t i = 0; i < page_count(tokens); ++i) {
    Node* child = child_of(*node, page_chunk(tokens, i));
    if (child == nullptr) return {node, i};
    node = child;
  }
  return {node, page_count(tokens)};
}

// child_of(parent, chunk) holding the whole chunk; created when there was none, for which the caller has made room.
PrefixCache::Node* PrefixCache::extend(Node& parent, Node* child, std::span<const int32_t> chunk) {
  if (child != nullptr) {
    if (child->tokens.size() < chunk.size()) child->tokens.assign(chunk.begin(), chunk.end());
    return child;
  }
  auto created = std::make_unique<Node>();
  created->parent = &parent;
  created->start = parent.start + static_cast<int32_t>(parent.tokens.size());
  created->tokens.reserve(kPageTokens);
  created->tokens.assign(chunk.begin(), chunk.end());
  created->touched = operation_;
  parent.children.reserve(parent.children.size() + 1);
  const auto behind_parent = parent.parent == nullptr ? recent_.begin() : std::next(parent.place);
  created->place = recent_.insert(behind_parent, created.get());
  ++usage_.n_nodes;
  usage_.used += node_bytes_;
  return parent.children.emplace_back(std::move(created)).get();
}

// Checkpoints on the way of `tokens`, ascending, each position once.
std::vector<PrefixCache::Spot> PrefixCache::spots(std::span<const int32_t> tokens) const {
  std::vector<Spot> result;
  Node* node = root_;
  for (size_t i = 0; i < page_count(tokens) && node != nullptr; ++i) {
    const auto chunk = page_chunk(tokens, i);
    Node* next = nullptr;
    const auto n_before = static_cast<ptrdiff_t>(result.size());
    for (const auto& child : node->children) {
      const int32_t common = common_prefix(child->tokens, chunk);
      if (common == kPageTokens) next = child.get();
      for (const Node::State& state : child->states)
        if (state.offset <= common) result.push_back({child->start + state.offset, child.get()});
    }
    std::sort(result.begin() + n_before, result.end(), [](auto& a, auto& b) { return a.position < b.position; });
    result.erase(
        std::unique(result.begin() + n_before, result.end(), [](auto& a, auto& b) { return a.position == b.position; }),
        result.end());
    node = next;
  }
  return result;
}

void PrefixCache::touch(Node& node) {
  node.touched = operation_;
  recent_.splice(recent_.begin(), recent_, node.place);
}

void PrefixCache::touch_path(Node* node) {
  for (; node->parent != nullptr; node = node->parent) touch(*node);
}

const std::byte* PrefixCache::state_at(const Spot& spot) {
  for (const Node::State& state : spot.node->states)
    if (spot.node->start + state.offset == spot.position) return state.bytes.data();
  return nullptr;
}

void PrefixCache::drop_state(const Spot& spot) {
  std::erase_if(spot.node->states, [&](const Node::State& s) { return spot.node->start + s.offset == spot.position; });
  usage_.checkpoint_bytes -= state_bytes_;
  usage_.used -= state_bytes_;
  --usage_.n_checkpoints;
}

// Removes the node and its ancestors as far as they hold nothing, but not `kept`.
void PrefixCache::prune(Node* node, const Node* kept) {
  while (node->parent != nullptr && node != kept && node->is_empty()) {
    Node* parent = node->parent;
    remove(*node);
    node = parent;
  }
}

void PrefixCache::remove(Node& leaf) {
  usage_.used -= bytes_of(leaf);
  usage_.kv_bytes -= leaf.page.size() > 0 ? page_bytes_ : 0;
  usage_.checkpoint_bytes -= static_cast<int64_t>(leaf.states.size()) * state_bytes_;
  usage_.n_checkpoints -= static_cast<int64_t>(leaf.states.size());
  --usage_.n_nodes;
  recent_.erase(leaf.place);
  std::vector<std::unique_ptr<Node>>& siblings = leaf.parent->children;
  siblings.erase(std::find_if(siblings.begin(), siblings.end(), [&](auto& node) { return node.get() == &leaf; }));
}

int64_t PrefixCache::bytes_of(const Node& node) const {
  return node_bytes_ + (node.page.size() > 0 ? page_bytes_ : 0) +
         static_cast<int64_t>(node.states.size()) * state_bytes_;
}

bool PrefixCache::can_make_room(int64_t bytes) const {
  if (budget_ < 0) return true;
  int64_t excess = usage_.used + bytes - budget_;
  for (auto oldest = recent_.rbegin(); excess > 0; ++oldest) {
    if (oldest == recent_.rend() || (*oldest)->touched == operation_) return false;
    excess -= bytes_of(**oldest);
  }
  return true;
}

bool PrefixCache::make_room(int64_t bytes) {
  if (!can_make_room(bytes)) return false;
  while (budget_ >= 0 && usage_.used + bytes > budget_) {
    remove(*recent_.back());
    ++usage_.n_evicted;
  }
  return true;
}

size_t checkpoint_to_drop(std::span<const int32_t> positions) {
  const size_t n_old = positions.size() - std::min(positions.size(), kNewestKept);
  const auto octave = [&](size_t i) { return std::bit_width(static_cast<uint32_t>(positions.back() - positions[i])); };
  const auto is_first = [&](size_t i) { return i == 0 || octave(i - 1) != octave(i); };
  const auto is_last = [&](size_t i) { return octave(i + 1) != octave(i); };
  for (size_t i = 0; i < n_old; ++i)
    if (!is_first(i) && !is_last(i)) return i;
  for (size_t i = 0; i < n_old; ++i)
    if (!is_first(i)) return i;
  return 0;
}

}  // namespace v100
