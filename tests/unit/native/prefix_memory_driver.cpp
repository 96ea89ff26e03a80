// Drives PrefixMemory, with the pages, states and host memory under it, against a plain model: per sequence the list of
// its tokens, for host memory the set of beginnings that ought to be there.
//
// Every token of a page holds a hash of all tokens up to it, a state the hash of all its tokens, so bytes in a wrong place
// are found. Seeds: even ones have a recurrent state, those above 6 sliding windows, multiples of 3 memory for everything.
// usage: prefix_memory_driver CASE [SEED OPERATIONS]. Exit status 0, or 1 with the first difference on stderr.
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "memory/prefix_memory.h"

namespace {

using v100::kPageTokens;
using v100::PagedMemory;
using v100::PageId;
using v100::PrefixCache;
using v100::PrefixMemory;
using v100::PrefixReuse;
using v100::StateIdentity;
using v100::StatePool;
using Tokens = std::vector<int32_t>;

constexpr int32_t kVocab = 4;
const StateIdentity kIdentity{11, 12, 13, 1, 2, {21, 22}};

// What tokens are computed with: nothing, or adapters.
const std::vector<v100::AdapterScales> kScales{{}, {0.0f, 1.0f}, {0.5f, 1.0f}};

void require(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error(what);
}

void require_equal(const std::string& what, int64_t found, int64_t expected) {
  require(found == expected, what + ": found " + std::to_string(found) + ", expected " + std::to_string(expected));
}

template <typename ErrorType>
std::string require_throws(const std::string& what, const std::function<void()>& action) {
  try {
    action();
  } catch (const ErrorType& error) {
    return error.what();
  }
  throw std::logic_error(what + ": nothing thrown");
}

struct ReadFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct WriteFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Hash of the first i tokens at [i], computed with kScales[scales].
std::vector<uint64_t> prefix_hashes(const Tokens& tokens, size_t scales) {
  std::vector<uint64_t> hashes{0x243F6A8885A308D3ull + (scales << 32)};
  hashes.reserve(tokens.size() + 1);
  for (const int32_t token : tokens) {
    uint64_t h = (hashes.back() ^ static_cast<uint64_t>(token + 1)) * 0x9E3779B97F4A7C15ull;
    hashes.push_back(h ^ (h >> 29));
  }
  return hashes;
}

int32_t common_prefix(const Tokens& a, const Tokens& b) {
  size_t n = 0;
  while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
  return static_cast<int32_t>(n);
}

// Pages and slots as plain arrays. The nth access from now fails where that is asked for.
class Bytes : public v100::SequenceBytes {
 public:
  Bytes(int32_t n_pages, int32_t n_window_pages, int32_t n_slots, bool is_recurrent)
      : pages(static_cast<size_t>(n_pages), std::vector<uint64_t>(kPageTokens, 0)),
        window_pages(static_cast<size_t>(n_window_pages), std::vector<uint64_t>(kPageTokens, 0)),
        states(static_cast<size_t>(n_slots), std::vector<uint64_t>(is_recurrent ? 600 : 0, 0)) {}
  size_t page_bytes() const override { return kPageTokens * sizeof(uint64_t); }
  size_t state_bytes() const override { return states.at(0).size() * sizeof(uint64_t); }
  void read_page(PageId page, std::byte* to) const override {
    fail<ReadFailed>();
    std::memcpy(to, pages.at(static_cast<size_t>(page)).data(), page_bytes());
  }
  void write_page(PageId page, const std::byte* from) const override {
    fail<WriteFailed>();
    std::memcpy(pages.at(static_cast<size_t>(page)).data(), from, page_bytes());
  }
  size_t window_page_bytes() const override { return window_pages.empty() ? 0 : page_bytes(); }
  void read_window_page(PageId page, std::byte* to) const override {
    fail<ReadFailed>();
    std::memcpy(to, window_pages.at(static_cast<size_t>(page)).data(), page_bytes());
  }
  void write_window_page(PageId page, const std::byte* from) const override {
    fail<WriteFailed>();
    std::memcpy(window_pages.at(static_cast<size_t>(page)).data(), from, page_bytes());
  }
  void read_state(int32_t slot, std::byte* to) const override {
    fail<ReadFailed>();
    std::memcpy(to, states.at(static_cast<size_t>(slot)).data(), state_bytes());
  }
  void write_state(int32_t slot, const std::byte* from) const override {
    fail<ReadFailed>();  // as reading does: before anything has changed
    std::memcpy(states.at(static_cast<size_t>(slot)).data(), from, state_bytes());
  }

  mutable std::vector<std::vector<uint64_t>> pages, window_pages, states;
  mutable int accesses_to_failure = -1;

 private:
  template <typename Failure>
  void fail() const {
    if (accesses_to_failure >= 0 && accesses_to_failure-- == 0) throw Failure("access");
  }
};

// What host memory ought to hold while nothing is ever dropped: beginnings, by their hashes.
struct HostModel {
  std::unordered_set<uint64_t> spelt;    // all that the tree knows
  std::unordered_set<uint64_t> covered;  // whose last token's page is kept
  std::unordered_set<uint64_t> states;

  bool is_kept = false;  // only what is compared is worth its time

  void spell(const std::vector<uint64_t>& hashes) { spelt.insert(hashes.begin() + 1, hashes.end()); }
  void keep(const Tokens& tokens, size_t scales, int32_t first_lost, bool has_end) {
    if (!is_kept) return;
    const auto hashes = prefix_hashes(tokens, scales);
    spell(hashes);
    for (size_t p = static_cast<size_t>(first_lost / kPageTokens) * kPageTokens + 1; p < hashes.size(); ++p)
      covered.insert(hashes[p]);
    if (has_end) states.insert(hashes.back());
  }
  void checkpoint(const Tokens& tokens, size_t scales) {
    if (!is_kept) return;
    const auto hashes = prefix_hashes(tokens, scales);
    spell(hashes);
    states.insert(hashes.back());
  }
};

struct World {
  // window 0: no layers with one.
  World(int32_t n_pages, int32_t n_sequences, bool is_recurrent, int32_t window, int64_t budget, int32_t n_checkpoints)
      : bytes(n_pages, window == 0 ? 0 : n_pages + n_sequences * (window / kPageTokens + 2), 2 * n_sequences,
              is_recurrent),
        pages(n_pages, n_sequences,
              [this](PageId from, PageId to) {
                bytes.pages.at(static_cast<size_t>(to)) = bytes.pages.at(static_cast<size_t>(from));
              }),
        windows(static_cast<int32_t>(bytes.window_pages.size()), n_sequences,
                [this](PageId from, PageId to) {
                  bytes.window_pages.at(static_cast<size_t>(to)) = bytes.window_pages.at(static_cast<size_t>(from));
                }),
        window(window),
        states(n_sequences),
        tokens(static_cast<size_t>(n_sequences)),
        scales(static_cast<size_t>(n_sequences)),
        expected_scales(static_cast<size_t>(n_sequences)),
        expected(static_cast<size_t>(n_sequences)),
        recurrent(is_recurrent),
        memory(pages, window == 0 ? nullptr : &windows, window, states, tokens, scales, bytes, budget, n_checkpoints) {
    host.is_kept = budget < 0;
  }

  Bytes bytes;
  PagedMemory pages, windows;
  int32_t window;
  StatePool states;
  std::vector<Tokens> tokens;
  std::vector<v100::AdapterScales> scales;
  std::vector<size_t> expected_scales;  // index into kScales
  std::vector<Tokens> expected;
  bool recurrent;
  PrefixMemory memory;
  HostModel host;

  size_t& scales_of(int32_t s) { return expected_scales.at(static_cast<size_t>(s)); }
  size_t scales_of(int32_t s) const { return expected_scales.at(static_cast<size_t>(s)); }
  Tokens& held(int32_t s) { return expected.at(static_cast<size_t>(s)); }
  int32_t n() const { return pages.n_sequences(); }
  bool has_end() const { return recurrent || window > 0; }
  int32_t first_seen(int32_t length) const { return std::max(0, length + 1 - window); }
  // Whether what follows the first `length` tokens can be computed from what the live sequence holds.
  bool is_usable(int32_t s, int32_t length) const {
    if (recurrent && length != pages.length(s)) return false;
    return window == 0 || windows.first_kept(s) <= first_seen(length);
  }

  // As a step does.
  void append(int32_t s, const Tokens& added) {
    if (window > 0) windows.forget(s, first_seen(pages.length(s)));
    try {
      pages.append(s, static_cast<int32_t>(added.size()));
    } catch (const v100::ContextFull&) {
      return;
    }
    if (window > 0) windows.append(s, static_cast<int32_t>(added.size()));  // there is always room, see the engine
    Tokens& all = held(s);
    const size_t before = all.size();
    all.insert(all.end(), added.begin(), added.end());
    tokens[static_cast<size_t>(s)] = all;
    const auto hashes = prefix_hashes(all, scales_of(s));
    for (size_t i = before; i < all.size(); ++i)
      bytes.pages[static_cast<size_t>(pages.pages(s)[i / kPageTokens])][i % kPageTokens] = hashes[i + 1];
    for (size_t i = before; i < all.size() && window > 0; ++i)
      bytes.window_pages[static_cast<size_t>(windows.pages(s)[i / kPageTokens])][i % kPageTokens] = ~hashes[i + 1];
    if (recurrent && !added.empty()) {
      auto& state = bytes.states[static_cast<size_t>(states.begin(s))];
      state.front() = state.back() = hashes.back();
      states.commit(s);
    }
  }
  void clear(int32_t s) {
    pages.clear(s);
    windows.clear(s);
    states.clear(s);
    tokens[static_cast<size_t>(s)].clear();
    held(s).clear();
  }
  void truncate(int32_t s, int32_t length) {
    if (length != 0 && !is_usable(s, length)) return;
    pages.truncate(s, length);
    if (window > 0) windows.truncate(s, length);
    tokens[static_cast<size_t>(s)].resize(static_cast<size_t>(length));
    held(s).resize(static_cast<size_t>(length));
    if (length == 0) states.clear(s);
  }
  void fork(int32_t from, int32_t to, int32_t length) {
    if (!is_usable(from, length)) length = static_cast<int32_t>(held(from).size());
    pages.fork(from, to, length);
    if (window > 0) windows.fork(from, to, length);
    const Tokens shared(held(from).begin(), held(from).begin() + length);
    held(to) = tokens[static_cast<size_t>(to)] = shared;
    scales[static_cast<size_t>(to)] = scales[static_cast<size_t>(from)];
    scales_of(to) = scales_of(from);
    length > 0 ? states.fork(from, to) : states.clear(to);
  }
  void checkpoint(int32_t s) {
    memory.checkpoint(s);
    if (has_end() && !held(s).empty()) host.checkpoint(held(s), scales_of(s));
  }
  void release(int32_t s) {
    memory.release(s);
    if (!held(s).empty()) host.keep(held(s), scales_of(s), 0, has_end());
    held(s).clear();
  }

  // The longest usable and the longest known beginning as they ought to be when pages are there and nothing is dropped.
  std::pair<int32_t, int32_t> best(const Tokens& prompt, int32_t most, size_t with) const {
    const auto hashes = prefix_hashes(prompt, with);
    int32_t covered = 0, known = 0;
    for (int32_t s = 0; s < n(); ++s) covered = std::max(covered, common_with(s, prompt, with));
    known = covered;
    int32_t host_covered = covered / kPageTokens * kPageTokens;
    const auto n_tokens = static_cast<int32_t>(prompt.size());
    while (host_covered < n_tokens && host.covered.contains(hashes[static_cast<size_t>(host_covered) + 1]))
      ++host_covered;
    while (known < n_tokens && host.spelt.contains(hashes[static_cast<size_t>(known) + 1])) ++known;
    covered = std::min(std::max(covered, host_covered), most);
    if (!has_end()) return {covered, known};
    int32_t usable = 0;
    for (int32_t p = 1; p <= covered; ++p)
      if (host.states.contains(hashes[static_cast<size_t>(p)])) usable = p;
    return {std::max(usable, best_live(prompt, most, with)), known};
  }
  int32_t common_with(int32_t s, const Tokens& prompt, size_t with) const {
    return scales_of(s) == with ? common_prefix(expected[static_cast<size_t>(s)], prompt) : 0;
  }
  int32_t best_live(const Tokens& prompt, int32_t most, size_t with) const {
    int32_t best = 0;
    for (int32_t s = 0; s < n(); ++s) {
      const int32_t common = std::min(common_with(s, prompt, with), most);
      if (is_usable(s, common)) best = std::max(best, common);
    }
    return best;
  }

  PrefixReuse reuse(int32_t s, const Tokens& prompt, int32_t most, size_t with, bool is_exact) {
    const int32_t live = best_live(prompt, most, with);
    const auto [best, known] = is_exact ? this->best(prompt, most, with) : std::pair{live, 0};
    const Tokens before = held(s);
    const int32_t own = common_with(s, prompt, with);
    const PrefixReuse reuse = memory.reuse(s, prompt, most, kScales[with]);
    const std::string what = "reuse of " + std::to_string(prompt.size()) + " tokens";
    require(reuse.length >= live && reuse.length <= most, what + ": length " + std::to_string(reuse.length));
    require(reuse.matched >= reuse.length, what + ": matched less than reused");
    require_equal(what + ": source is nothing", reuse.source == "nothing", reuse.length == 0);
    if (reuse.limit == "") require_equal(what + ": all", reuse.length, static_cast<int64_t>(prompt.size()));
    if (reuse.limit == "prompt") require_equal(what + ": most", reuse.length, most);
    if (reuse.checkpoint >= 0) require_equal(what + ": checkpoint", reuse.checkpoint, reuse.length);
    require(has_end() || reuse.limit != "no checkpoint", what + ": no checkpoint without a state");
    if (is_exact && reuse.limit != "no page") require_equal(what + ": best", reuse.length, best);
    if (is_exact) require_equal(what + ": matched", reuse.matched, known);
    const int32_t kept = std::min(reuse.length, own);
    if (kept < static_cast<int32_t>(before.size())) host.keep(before, scales_of(s), kept, has_end());
    scales_of(s) = with;
    held(s).assign(prompt.begin(), prompt.begin() + reuse.length);
    return reuse;
  }

  void check(int32_t s) const {
    const Tokens& all = expected[static_cast<size_t>(s)];
    const std::string where = "sequence " + std::to_string(s);
    require_equal(where + " length", pages.length(s), static_cast<int64_t>(all.size()));
    require(tokens[static_cast<size_t>(s)] == all, where + ": other tokens");
    require(scales[static_cast<size_t>(s)] == kScales[scales_of(s)], where + ": other scales");
    const auto hashes = prefix_hashes(all, scales_of(s));
    const auto list = pages.pages(s);
    for (size_t i = 0; i < all.size(); ++i)
      if (bytes.pages[static_cast<size_t>(list[i / kPageTokens])][i % kPageTokens] != hashes[i + 1])
        throw std::logic_error(where + ": wrong page bytes at token " + std::to_string(i));
    if (window > 0) {
      require_equal(where + " length of windows", windows.length(s), static_cast<int64_t>(all.size()));
      require(windows.first_kept(s) <= first_seen(windows.length(s)), where + ": its window is gone");
      const auto window_list = windows.pages(s);
      for (auto i = static_cast<size_t>(windows.first_kept(s)); i < all.size(); ++i) {
        const PageId page = window_list[i / kPageTokens];
        // What is behind the window may be on a page that begins within it, but need not have come along.
        if (static_cast<int32_t>(i) < first_seen(windows.length(s)) / kPageTokens * kPageTokens) continue;
        if (bytes.window_pages.at(static_cast<size_t>(page))[i % kPageTokens] != ~hashes[i + 1])
          throw std::logic_error(where + ": wrong window bytes at token " + std::to_string(i));
      }
    }
    require_equal(where + " has a state", states.slot(s) >= 0, recurrent && !all.empty());
    require_equal(where + " writes a state", states.written(s), -1);
    if (states.slot(s) < 0) return;
    const auto& state = bytes.states[static_cast<size_t>(states.slot(s))];
    require(state.front() == hashes.back() && state.back() == hashes.back(), where + ": wrong state");
  }
  void check_all() const {
    std::set<PageId> used;
    for (int32_t s = 0; s < n(); ++s) {
      check(s);
      used.insert(pages.pages(s).begin(), pages.pages(s).end());
    }
    require_equal("free pages", pages.free_pages(), pages.n_pages() - static_cast<int64_t>(used.size()));
    used.clear();
    for (int32_t s = 0; s < n() && window > 0; ++s)
      for (const PageId page : windows.pages(s))
        if (page != v100::kNoPage) used.insert(page);
    require_equal("free pages of windows", windows.free_pages(), windows.n_pages() - static_cast<int64_t>(used.size()));
  }
  // Of one place: the recurrent state, and as many pages as the tokens that a window leaves to look back at may touch.
  int64_t end_bytes() const {
    int32_t most = 0;
    for (int32_t first = 0; first < kPageTokens && window > 1; ++first)
      most = std::max(most, (first + window - 2) / kPageTokens + 1);
    return static_cast<int64_t>(bytes.state_bytes() + static_cast<size_t>(most) * bytes.window_page_bytes());
  }
  void check_usage(int64_t budget) const {
    const v100::CacheUsage usage = memory.usage();
    require_equal("budget", usage.budget, budget);
    require(budget < 0 || usage.used <= budget,
            "the budget of " + std::to_string(budget) + " bytes is exceeded: " + std::to_string(usage.used));
    const int64_t of_nodes = usage.used - usage.kv_bytes - usage.checkpoint_bytes;
    require(usage.n_nodes >= 0 && usage.n_checkpoints >= 0 && usage.kv_bytes >= 0, "negative usage");
    require(usage.n_nodes == 0 ? usage.used == 0 : of_nodes % usage.n_nodes == 0, "nodes of different size");
    require_equal("bytes of checkpoints", usage.checkpoint_bytes,
                  usage.n_checkpoints * ((end_bytes() + 4095) / 4096 * 4096));
  }
};

struct Counts {
  int from_host = 0, from_other = 0, from_checkpoint = 0, no_page = 0, evicted = 0, failed = 0, refused = 0;
};

void random_operations(uint32_t seed, int operations) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int32_t>(random() % static_cast<uint64_t>(n)); };
  const bool is_recurrent = seed % 2 == 0;
  const bool is_exact = seed % 3 == 0;
  const bool is_windowed = seed > 6;
  const int32_t n = 2 + below(4);
  const int64_t budget = is_exact ? -1 : (seed % 3 == 1 ? 3 : 40) * 8192 + below(9000);
  World world(2 * n + below(6), n, is_recurrent, is_windowed ? 1 + below(700) : 0, budget,
              is_exact ? 1 << 20 : 1 + below(12));
  std::vector<Tokens> texts(8);  // what prompts are cut from
  std::vector<std::byte> saved;
  Tokens saved_tokens;
  size_t saved_scales = 0;
  Counts counts;
  const auto random_tokens = [&](int32_t count) {
    Tokens result;
    for (int32_t i = 0; i < count; ++i) result.push_back(below(kVocab));
    return result;
  };
  for (int i = 0; i < operations; ++i) {
    const int32_t s = below(n);
    switch (below(16)) {
      case 0:
        world.truncate(s, below(static_cast<int64_t>(world.held(s).size()) + 1));
        break;
      case 1:
        world.fork(s, below(n), below(static_cast<int64_t>(world.held(s).size()) + 1));
        break;
      case 2:
        if (below(4) == 0) world.clear(s);
        break;
      case 3:
        world.release(s);
        break;
      case 4:
      case 5:
        world.checkpoint(s);
        break;
      case 6:
        world.append(s, random_tokens(kPageTokens - static_cast<int32_t>(world.held(s).size()) % kPageTokens));
        break;
      case 7:
        world.append(s, random_tokens(below(2) == 0 ? below(3) : below(500)));
        break;
      case 8:
        saved = world.memory.save(s, kIdentity);
        saved_tokens = world.held(s);
        saved_scales = saved_tokens.empty() ? 0 : world.scales_of(s);
        break;
      case 9: {
        if (saved.empty()) break;
        std::vector<std::byte> state = saved;
        const int damage = below(4);
        if (damage == 0) state[static_cast<size_t>(below(static_cast<int64_t>(state.size())))] ^= std::byte{0x10};
        if (damage == 1) state.resize(static_cast<size_t>(below(static_cast<int64_t>(state.size()))));
        world.held(s).clear();
        try {
          world.memory.load(s, state, kIdentity, kVocab);
          require(damage > 1, "a damaged state was loaded");
          world.held(s) = saved_tokens;
          world.scales_of(s) = saved_scales;
        } catch (const v100::ContextFull&) {
          ++counts.refused;
        } catch (const v100::InvalidArgument&) {
          require(damage <= 1, "a sound state was refused");
          ++counts.refused;
        }
        break;
      }
      default: {
        Tokens& text = texts[static_cast<size_t>(below(8))];
        Tokens prompt = below(3) == 0 ? world.held(below(n)) : text;
        if (below(3) > 0) prompt.resize(static_cast<size_t>(below(static_cast<int64_t>(prompt.size()) + 1)));
        const Tokens tail = random_tokens(below(300));
        prompt.insert(prompt.end(), tail.begin(), tail.end());
        prompt.resize(std::min(prompt.size(), size_t{1500}));
        text = prompt;
        const auto all = static_cast<int32_t>(prompt.size());
        const int32_t most = below(3) > 0 ? std::max(0, all - 1) : below(int64_t{all} + 1);
        const Tokens before = world.held(s);
        const size_t with = below(6) > 0 ? 0 : static_cast<size_t>(1 + below(2));
        if (!is_exact && below(8) == 0) world.bytes.accesses_to_failure = below(4);
        try {
          const PrefixReuse reuse = world.reuse(s, prompt, most, with, is_exact);
          counts.from_host += reuse.source == "host";
          counts.from_other += reuse.source == "other";
          counts.from_checkpoint += reuse.checkpoint >= 0;
          counts.no_page += reuse.limit == "no page";
        } catch (const ReadFailed&) {
          ++counts.failed;
          world.held(s) = before;
        } catch (const WriteFailed&) {
          ++counts.failed;
          world.held(s).clear();
          world.scales_of(s) = with;
        }
        world.bytes.accesses_to_failure = -1;
        world.check(s);
        if (below(4) > 0)
          world.append(s, Tokens(prompt.begin() + static_cast<ptrdiff_t>(std::min(world.held(s).size(), prompt.size())),
                                 prompt.end()));
      }
    }
    world.check(s);
    world.check_usage(budget);
    if (i % 16 == 0) world.check_all();
  }
  world.check_all();
  const v100::CacheUsage usage = world.memory.usage();
  require(counts.from_other > 0 && counts.refused > 0, "the random walk missed other sequences or refusals");
  require(seed % 3 == 1 || counts.from_host > 0, "the random walk missed host memory");
  require(is_exact ? counts.no_page > 0 : usage.n_evicted > 0 && counts.failed > 0,
          "the random walk missed full pools, evictions or failures");
  require(!(is_recurrent || is_windowed) || seed % 3 == 1 || counts.from_checkpoint > 0,
          "the random walk missed checkpoints");
  for (int32_t s = 0; s < n; ++s) world.clear(s);
  require_equal("free pages after clearing all", world.pages.free_pages(), world.pages.n_pages());
  require_equal("free windows after clearing all", world.windows.free_pages(), world.windows.n_pages());
  for (int32_t s = 0; s < n; ++s) require_equal("free states after clearing all", world.states.begin(s), s);
}

// ---- PrefixCache alone

Tokens numbered(int32_t n, int32_t tag = 0) {
  Tokens result;
  for (int32_t i = 0; i < n; ++i) result.push_back(1000 * tag + i);
  return result;
}

const PrefixCache::FillPage kFillPage = [](int32_t page, std::byte* to) { *to = static_cast<std::byte>(page); };
const PrefixCache::FillState kFillState = [](std::byte* to) { *to = std::byte{1}; };

std::vector<int32_t> positions_of(PrefixCache& cache, const Tokens& tokens) {
  std::vector<int32_t> result;
  for (const auto& checkpoint : cache.find(tokens).checkpoints) result.push_back(checkpoint.position);
  return result;
}

void least_recently_used_goes_first() {
  constexpr int64_t kEntry = 8192 + 2048;  // a page of 8192 bytes and its node, generously
  PrefixCache cache(3 * kEntry, 4, 8192, 0);
  const auto keep = [&](int32_t tag) {
    cache.begin();
    return cache.keep_pages(numbered(256, tag), 0, kFillPage);
  };
  const auto holds = [&](int32_t tag) {
    cache.begin();
    return cache.find(numbered(256, tag)).known == 256;
  };
  for (const int32_t tag : {1, 2, 3}) require(keep(tag), "room for three");
  require(holds(1), "the first is there");  // and used now: the second is the oldest
  require(keep(4), "room is made");
  require(holds(1) && !holds(2) && holds(3) && holds(4), "the least recently used is gone");
  require_equal("nodes dropped", cache.usage().n_evicted, 1);
  // A sequence does not push out its own beginning: it stays, what finds no room is not kept.
  cache.begin();
  require(!cache.keep_pages(numbered(5 * 256, 5), 0, kFillPage), "five pages do not fit");
  cache.begin();
  require_equal("pages kept", cache.find(numbered(5 * 256, 5)).known, 3 * 256);
}

void too_large_an_entry_drops_nothing() {
  PrefixCache cache(30000, 4, 8192, 100000);
  cache.begin();
  require(cache.keep_pages(numbered(256, 1), 0, kFillPage), "a page fits");
  cache.begin();
  require(!cache.keep_state(numbered(200, 2), kFillState), "a state of 100000 bytes does not");
  require_equal("nodes", cache.usage().n_nodes, 1);
  require_equal("nodes dropped", cache.usage().n_evicted, 0);
  PrefixCache off(0, 4, 8192, 100);
  require(!off.keep_pages(numbered(256), 0, kFillPage) && !off.keep_state(numbered(9), kFillState),
          "budget 0 keeps nothing");
  require_equal("used", off.usage().used, 0);
}

void states_stand_without_pages() {
  PrefixCache cache(-1, 8, 8192, 100);
  const Tokens tokens = numbered(600);
  cache.begin();
  for (const int32_t n : {100, 300, 600})
    require(cache.keep_state(Tokens(tokens.begin(), tokens.begin() + n), kFillState), "kept");
  require_equal("bytes of pages", cache.usage().kv_bytes, 0);
  require(positions_of(cache, tokens) == std::vector<int32_t>{100, 300, 600}, "checkpoints of the whole");
  Tokens edited = tokens;
  edited[350] = -1;
  require(positions_of(cache, edited) == std::vector<int32_t>{100, 300}, "checkpoints before an edit");
  require_equal("known before an edit", cache.find(edited).known, 350);
  // A page that comes later covers them; a longer one replaces it in place.
  cache.begin();
  require(cache.keep_pages(Tokens(tokens.begin(), tokens.begin() + 400), 1, kFillPage), "kept");
  require_equal("page 0", cache.find(tokens).pages[0].n_tokens, 0);
  require_equal("page 1", cache.find(tokens).pages[1].n_tokens, 144);
  cache.begin();
  require(cache.keep_pages(tokens, 1, kFillPage), "kept");
  require_equal("page 1", cache.find(tokens).pages[1].n_tokens, 256);
  require_equal("page 2", cache.find(tokens).pages[2].n_tokens, 88);
  require_equal("nodes", cache.usage().n_nodes, 3);
}

void a_failing_fill_leaves_the_tree_whole() {
  PrefixCache cache(-1, 8, 8192, 100);
  const Tokens tokens = numbered(700);
  for (int32_t failing = 0; failing < 3; ++failing) {
    cache.begin();
    require_throws<ReadFailed>("page", [&] {
      cache.keep_pages(tokens, 0, [&](int32_t page, std::byte*) {
        if (page == failing) throw ReadFailed("page");
      });
    });
    require_equal("known", cache.find(tokens).known, 256 * failing);
  }
  cache.begin();
  require_throws<ReadFailed>("state", [&] { cache.keep_state(tokens, [](std::byte*) { throw ReadFailed("state"); }); });
  require(!cache.has_state(tokens), "a state that failed");
  cache.begin();
  require(cache.keep_pages(tokens, 0, kFillPage) && cache.keep_state(tokens, kFillState), "kept afterwards");
  require(cache.has_state(tokens), "the state");
  require_equal("nodes", cache.usage().n_nodes, 3);
}

void checkpoints_of_a_path_are_thinned_by_distance() {
  constexpr int32_t kStep = 64, kLast = 40000;
  for (const int32_t most : {1, 2, 9, 24, 32}) {
    PrefixCache cache(-1, most, 0, 100);
    Tokens tokens;
    for (int32_t position = kStep; position <= kLast; position += kStep) {
      while (static_cast<int32_t>(tokens.size()) < position) tokens.push_back(static_cast<int32_t>(tokens.size()) % 7);
      cache.begin();
      require(cache.keep_state(tokens, kFillState), "kept");
      if (position % (40 * kStep) != 0) continue;
      const std::vector<int32_t> found = positions_of(cache, tokens);
      require_equal("checkpoints", static_cast<int64_t>(found.size()), most);
      require_equal("in all", cache.usage().n_checkpoints, most);
      for (int32_t i = 0; i < std::min(8, most); ++i)
        require_equal("the newest", found[found.size() - 1 - static_cast<size_t>(i)], position - i * kStep);
      if (most < 24) continue;
      require_equal("the earliest stays", found.front(), kStep);
      // An edit at any place finds a checkpoint that costs at most about as much again as the edit is old.
      for (size_t i = 1; i < found.size(); ++i)
        require(found[i] - found[i - 1] <= 2 * std::max(position - found[i], kStep) + kStep,
                "between " + std::to_string(found[i - 1]) + " and " + std::to_string(found[i]) + " of " +
                    std::to_string(position));
    }
  }
}

void a_small_budget_thins_the_path_rather_than_refusing_the_newest() {
  PrefixCache cache(6 * 4096 + 3000, 32, 0, 4096);  // about five states
  Tokens tokens;
  for (int32_t i = 0; i < 30; ++i) {
    for (int32_t j = 0; j < 5; ++j) tokens.push_back(j);
    cache.begin();
    require(cache.keep_state(tokens, kFillState), "the newest is kept");
    require(cache.usage().used <= cache.usage().budget, "within the budget");
  }
  require(cache.usage().n_checkpoints >= 4, "several");
}

void invalid_arguments() {
  World world(4, 2, true, 0, 100000, 4);
  world.append(0, numbered(3));
  using v100::InvalidArgument;
  const Tokens three = numbered(3);
  for (const int32_t s : {-1, 2, 2147483647}) {
    require_throws<InvalidArgument>("reuse", [&] { world.memory.reuse(s, three, 1); });
    require_throws<InvalidArgument>("checkpoint", [&] { world.memory.checkpoint(s); });
    require_throws<InvalidArgument>("release", [&] { world.memory.release(s); });
    require_throws<InvalidArgument>("save", [&] { world.memory.save(s, kIdentity); });
    require_throws<InvalidArgument>("load", [&] { world.memory.load(s, {}, kIdentity, kVocab); });
  }
  require_throws<InvalidArgument>("most -1", [&] { world.memory.reuse(0, three, -1); });
  require_throws<InvalidArgument>("most 4", [&] { world.memory.reuse(0, three, 4); });
  require_throws<InvalidArgument>("budget -2", [] { PrefixCache(-2, 1, 1, 1); });
  require_throws<InvalidArgument>("-1 checkpoints", [] { PrefixCache(1, -1, 1, 1); });
  world.check_all();

  const std::vector<std::byte> saved = world.memory.save(0, kIdentity);
  const auto reason = [&](const StateIdentity& identity, int32_t vocab) {
    return require_throws<InvalidArgument>("load", [&] { world.memory.load(1, saved, identity, vocab); });
  };
  const auto names = [&](const std::string& text, const std::string& word) {
    require(text.find(word) != std::string::npos, "'" + text + "' does not say '" + word + "'");
  };
  names(reason({0, 12, 13, 1, 2}, kVocab), "another model");
  names(reason({11, 0, 13, 1, 2}, kVocab), "another build");
  names(reason({11, 12, 0, 1, 2}, kVocab), "rope");
  names(reason({11, 12, 13, 0, 2}, kVocab), "KV cache types");
  names(reason({11, 12, 13, 1, 0}, kVocab), "KV cache types");
  names(reason(kIdentity, 2), "vocabulary of 2");
  world.scales[0] = kScales[2];
  const std::vector<std::byte> adapted = world.memory.save(0, kIdentity);
  const auto load_adapted = [&](std::vector<uint64_t> loaded) {
    world.memory.load(1, adapted, {11, 12, 13, 1, 2, std::move(loaded)}, kVocab);
  };
  for (const std::vector<uint64_t>& others : {std::vector<uint64_t>{}, {21}, {21, 21}, {22, 23}})
    names(require_throws<InvalidArgument>("load", [&] { load_adapted(others); }), "LoRA adapter that is not loaded");
  load_adapted({22, 23, 21});
  require(world.scales[1] == v100::AdapterScales{1.0f, 0.0f, 0.5f}, "the scales of a saved sequence");
  world.memory.reuse(1, three, 2);
  world.scales[0].clear();
  world.memory.load(1, saved, kIdentity, kVocab);
  world.held(1) = world.held(0);
  world.check_all();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const std::map<std::string, std::function<void()>> cases = {
      {"least_recently_used", least_recently_used_goes_first},
      {"too_large", too_large_an_entry_drops_nothing},
      {"states_without_pages", states_stand_without_pages},
      {"failing_fill", a_failing_fill_leaves_the_tree_whole},
      {"thinning", checkpoints_of_a_path_are_thinned_by_distance},
      {"small_budget", a_small_budget_thins_the_path_rather_than_refusing_the_newest},
      {"invalid", invalid_arguments}};
  try {
    if (name == "random" && argc == 4) {
      random_operations(static_cast<uint32_t>(std::stoul(argv[2])), std::stoi(argv[3]));
    } else if (cases.contains(name)) {
      cases.at(name)();
    } else {
      std::fprintf(stderr, "unknown case '%s'\n", name.c_str());
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
    return 1;
  }
  return 0;
}
