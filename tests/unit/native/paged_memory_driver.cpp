// Drives PagedMemory against a plain model: per sequence the list of its tokens, per page an array of tokens.
//
// usage: paged_memory_driver CASE [SEED OPERATIONS]. Exit status 0, or 1 with the first difference on stderr.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "memory/paged_memory.h"

namespace {

using v100::kPageTokens;
using v100::PagedMemory;
using v100::PageId;

void require(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error(what);
}

void require_equal(const std::string& what, int64_t found, int64_t expected) {
  require(found == expected, what + ": found " + std::to_string(found) + ", expected " + std::to_string(expected));
}

struct CopyFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The memory under test, the pages' content (one number per token) and what each sequence ought to hold.
struct World {
  World(int32_t n_pages, int32_t n_sequences)
      : content(static_cast<size_t>(n_pages), std::vector<int64_t>(kPageTokens, -1)),
        expected(static_cast<size_t>(n_sequences)),
        memory(n_pages, n_sequences, [this](PageId from, PageId to) {
          if (copy_fails) throw CopyFailed("copy");
          ++copies;
          content.at(static_cast<size_t>(to)) = content.at(static_cast<size_t>(from));
        }) {}

  std::vector<std::vector<int64_t>> content;
  std::vector<std::vector<int64_t>> expected;
  bool copy_fails = false;
  int copies = 0;
  int64_t next_value = 0;
  PagedMemory memory;

  std::map<PageId, int> references() const {
    std::map<PageId, int> count;
    for (int32_t s = 0; s < memory.n_sequences(); ++s)
      for (const PageId page : memory.pages(s)) ++count[page];
    return count;
  }

  // Pages in the order in which they must be handed out.
  std::vector<PageId> unused() const {
    const auto used = references();
    std::vector<PageId> result;
    for (PageId page = 0; page < memory.n_pages(); ++page)
      if (!used.contains(page)) result.push_back(page);
    return result;
  }

  void append(int32_t s, int32_t n) {
    const std::vector<PageId> before(memory.pages(s).begin(), memory.pages(s).end());
    const std::vector<PageId> free_before = unused();
    const int32_t needed = memory.pages_needed(s, n);
    const bool fits = memory.can_append(s, n);
    require_equal("can_append agrees with pages_needed", fits, needed <= static_cast<int32_t>(free_before.size()));
    try {
      memory.append(s, n);
    } catch (const v100::ContextFull& error) {
      require(!fits, std::string("append refused although pages are there: ") + error.what());
      require_equal("sequence in ContextFull", error.sequence(), s);
      return;
    }
    require(fits, "append succeeded although pages lack");
    require_equal("pages taken", static_cast<int64_t>(free_before.size()) - memory.free_pages(), needed);

    const auto after = memory.pages(s);
    size_t taken = 0;
    for (size_t i = 0; i < after.size(); ++i) {
      const bool kept = i < before.size() && before[i] == after[i];
      if (!kept) require_equal("free pages are taken lowest id first", after[i], free_before.at(taken++));
    }
    require_equal("new pages in the list", static_cast<int64_t>(taken), needed);

    const auto count = references();
    auto& tokens = expected.at(static_cast<size_t>(s));
    for (int32_t i = 0; i < n; ++i) {
      const size_t at = tokens.size();
      const PageId page = after[at / kPageTokens];
      require_equal("holders of a page about to be written", count.at(page), 1);
      content.at(static_cast<size_t>(page))[at % kPageTokens] = next_value;
      tokens.push_back(next_value++);
    }
  }

  void truncate(int32_t s, int32_t length) {
    memory.truncate(s, length);
    expected.at(static_cast<size_t>(s)).resize(static_cast<size_t>(length));
  }

  void fork(int32_t source, int32_t destination, int32_t length) {
    const int copies_before = copies;
    memory.fork(source, destination, length);
    require_equal("fork copies pages", copies - copies_before, 0);
    const auto& from = expected.at(static_cast<size_t>(source));
    expected.at(static_cast<size_t>(destination)) = std::vector<int64_t>(from.begin(), from.begin() + length);
  }

  // Writes tokens that the sequence has already.
  void overwrite(int32_t s, int32_t first, int32_t end) {
    const auto held = references();
    const std::vector<PageId> before(memory.pages(s).begin(), memory.pages(s).end());
    int32_t needed = 0;
    for (int32_t i = first / kPageTokens; i * kPageTokens < end && first < end; ++i)
      needed += held.at(before[static_cast<size_t>(i)]) > 1;
    const int32_t free_before = memory.free_pages();
    try {
      memory.make_own(s, first, end);
    } catch (const v100::ContextFull& error) {
      require(needed > free_before, std::string("make_own refused although pages are there: ") + error.what());
      require_equal("sequence in ContextFull", error.sequence(), s);
      return;
    }
    require(needed <= free_before, "make_own succeeded although pages lack");
    require_equal("pages taken", free_before - memory.free_pages(), needed);
    const auto count = references();
    for (int32_t i = first; i < end; ++i) {
      const PageId page = memory.pages(s)[static_cast<size_t>(i / kPageTokens)];
      require_equal("holders of a page about to be written", count.at(page), 1);
      content.at(static_cast<size_t>(page))[static_cast<size_t>(i % kPageTokens)] = next_value;
      expected.at(static_cast<size_t>(s))[static_cast<size_t>(i)] = next_value++;
    }
  }

  int32_t length(int32_t s) const { return static_cast<int32_t>(expected.at(static_cast<size_t>(s)).size()); }

  void check() const {
    for (int32_t s = 0; s < memory.n_sequences(); ++s) {
      const auto& tokens = expected[static_cast<size_t>(s)];
      const auto pages = memory.pages(s);
      const std::string where = "sequence " + std::to_string(s);
      require_equal(where + " length", memory.length(s), static_cast<int64_t>(tokens.size()));
      require_equal(where + " pages", static_cast<int64_t>(pages.size()),
                    (static_cast<int64_t>(tokens.size()) + kPageTokens - 1) / kPageTokens);
      for (size_t i = 0; i < tokens.size(); ++i) {
        const int64_t found = content[static_cast<size_t>(pages[i / kPageTokens])][i % kPageTokens];
        if (found != tokens[i]) require_equal(where + " token " + std::to_string(i), found, tokens[i]);
      }
    }
    require_equal("free pages", memory.free_pages(), static_cast<int64_t>(unused().size()));
  }
};

template <typename ErrorType>
void require_throws(const std::string& what, const std::function<void()>& action) {
  try {
    action();
  } catch (const ErrorType&) {
    return;
  }
  throw std::logic_error(what + ": nothing thrown");
}

void random_operations(uint32_t seed, int operations) {
  std::mt19937 random(seed);
  auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  const int32_t n = 2 + below(6);
  World world(2 * n + below(6), n);  // tight enough for refusals, roomy enough for sequences of several pages
  int refused = 0;
  int shared = 0;
  for (int i = 0; i < operations; ++i) {
    const int32_t s = below(n);
    switch (below(12)) {
      case 0:
        world.truncate(s, below(world.length(s) + 1));
        break;
      case 1:
        world.truncate(s, world.length(s) / kPageTokens * kPageTokens);
        break;
      case 2:
        world.fork(s, below(n), below(world.length(s) + 1));
        break;
      case 3:
        world.fork(s, below(n), world.length(s));
        break;
      case 4:
        if (below(4) == 0) {
          world.memory.clear(s);
          world.expected[static_cast<size_t>(s)].clear();
        }
        break;
      case 5: {  // a copy that fails changes nothing; nothing is copied where no copy is due
        const int32_t tokens = 1 + below(300);
        const int copies = world.copies;
        world.copy_fails = true;
        try {
          world.append(s, tokens);
        } catch (const CopyFailed&) {
        }
        world.copy_fails = false;
        require_equal("copies", world.copies, copies);
        break;
      }
      case 10: {
        const int32_t first = below(world.length(s) + 1);
        world.overwrite(s, first, first + below(world.length(s) - first + 1));
        break;
      }
      case 11: {  // a copy that fails changes nothing
        const int copies = world.copies;
        world.copy_fails = true;
        try {
          world.overwrite(s, 0, world.length(s));
        } catch (const CopyFailed&) {
        }
        world.copy_fails = false;
        require_equal("copies", world.copies, copies);
        break;
      }
      case 6:
        world.append(s, kPageTokens - world.length(s) % kPageTokens);
        break;
      default: {
        const int32_t tokens = below(2) == 0 ? below(3) : below(700);
        refused += world.memory.can_append(s, tokens) ? 0 : 1;
        world.append(s, tokens);
      }
    }
    for (const auto& [page, count] : world.references()) shared += count > 1;
    world.check();
  }
  require(refused > 0 && world.copies > 0 && shared > 0, "the random walk missed refusals, copies or sharing");
  for (int32_t s = 0; s < n; ++s) world.truncate(s, 0);
  world.check();
  require_equal("free pages after clearing all", world.memory.free_pages(), world.memory.n_pages());
}

void copy_on_write() {
  World world(8, 3);
  world.append(0, 300);
  world.fork(0, 1, 300);
  require_equal("pages that 1 token into a shared last page takes", world.memory.pages_needed(1, 1), 1);
  world.append(1, 1);
  require_equal("copies", world.copies, 1);
  require_equal("first page stays shared", world.memory.pages(1)[0], world.memory.pages(0)[0]);
  world.append(0, 1);  // alone again: written in place
  require_equal("copies", world.copies, 1);
  world.check();
  // A fork that ends inside a full page of the source shares it; so does a truncated sequence.
  world.fork(0, 2, 100);
  world.append(2, 1);
  require_equal("copies", world.copies, 2);
  world.fork(1, 0, 301);
  world.truncate(0, 200);
  world.append(0, 5);
  require_equal("copies", world.copies, 3);
  world.check();
  // A full last page is never written again: the next token goes to a new page.
  world.memory.clear(2);
  world.expected[2].clear();
  world.fork(0, 2, 0);
  world.truncate(1, 256);
  world.fork(1, 2, 256);
  world.append(2, 1);
  require_equal("copies", world.copies, 3);
  world.check();
}

void full() {
  World world(2, 2);
  world.append(0, 300);
  world.fork(0, 1, 300);
  require_equal("free pages", world.memory.free_pages(), 0);
  require_throws<v100::ContextFull>("append to a shared page without a free one", [&] { world.memory.append(1, 1); });
  world.check();
  require(world.memory.can_append(1, 0), "no tokens always fit");
  world.memory.append(1, 0);
  world.memory.clear(1);
  world.expected[1].clear();
  world.append(0, 212);
  require_equal("length of a full pool", world.memory.length(0), 512);
  require_throws<v100::ContextFull>("a full pool", [&] { world.memory.append(0, 1); });
  require_throws<v100::ContextFull>("a count near the int32 limit", [&] { world.memory.append(0, 2147483647); });
  world.check();
  World empty(0, 1);
  require_throws<v100::ContextFull>("no pages at all", [&] { empty.memory.append(0, 1); });
}

void rollback() {
  World world(6, 2);
  world.append(0, 250);
  world.fork(0, 1, 250);
  const int32_t free_before = world.memory.free_pages();
  world.append(1, 600);
  world.truncate(1, 250);
  world.check();
  require_equal("pages of the sequence", static_cast<int64_t>(world.memory.pages(1).size()), 1);
  require_equal("free pages: the shared page stays replaced by its copy", world.memory.free_pages(), free_before - 1);
  world.append(0, 600);
  world.truncate(0, 250);
  require_equal("free pages: a page held alone comes back in place", world.memory.free_pages(), free_before - 1);
  world.check();
}

void forgetting() {
  using v100::InvalidArgument;
  World world(6, 2);
  world.append(0, 1000);
  world.fork(0, 1, 600);
  PagedMemory& m = world.memory;
  m.forget(0, 600);  // two whole pages lie before it, which the fork still holds
  require_equal("first token kept", m.first_kept(0), 512);
  require_equal("free pages while another sequence holds them", m.free_pages(), 2);
  require_equal("forgotten page", m.pages(0)[1], v100::kNoPage);
  m.forget(0, 100);  // cannot come back
  require_equal("first token kept", m.first_kept(0), 512);
  m.clear(1);
  require_equal("free pages", m.free_pages(), 4);
  require_throws<InvalidArgument>("the end of a cut sequence on a forgotten page", [&] { m.truncate(0, 511); });
  require_throws<InvalidArgument>("the end of a fork on a forgotten page", [&] { m.fork(0, 1, 300); });
  require_equal("length after a refusal", m.length(0), 1000);
  m.fork(0, 1, 700);
  require_equal("first token kept by a fork", m.first_kept(1), 512);
  require_equal("free pages after a fork", m.free_pages(), 4);
  m.append(1, 1);  // the shared page that tokens 512 to 700 lie on is copied
  require_equal("copies", world.copies, 1);
  m.truncate(0, 512);  // only forgotten pages are left: the next token begins a new one
  m.append(0, 1);
  require_equal("pages of the cut sequence", static_cast<int64_t>(m.pages(0).size()), 3);
  m.truncate(0, 0);
  require_equal("first token kept by an empty sequence", m.first_kept(0), 0);

  m.begin_at(0, 600, 1200);
  require_equal("length of a sequence that begins at its window", m.length(0), 1200);
  require_equal("first token kept", m.first_kept(0), 512);
  require_equal("free pages", m.free_pages(), 2);
  require_throws<v100::ContextFull>("a window larger than the pool", [&] { m.begin_at(1, 0, 1200); });
  require_equal("length after a refusal", m.length(1), 701);
  m.begin_at(0, 0, 1200);  // its own pages count as free
  require_equal("free pages", m.free_pages(), 0);
  m.clear(0);
  m.clear(1);
  require_equal("free pages", m.free_pages(), 6);
}

void invalid() {
  World world(4, 2);
  world.append(0, 10);
  using v100::InvalidArgument;
  PagedMemory& m = world.memory;
  for (const int32_t s : {-1, 2, 2147483647}) {
    require_throws<InvalidArgument>("length", [&] { m.length(s); });
    require_throws<InvalidArgument>("pages", [&] { m.pages(s); });
    require_throws<InvalidArgument>("pages_needed", [&] { m.pages_needed(s, 1); });
    require_throws<InvalidArgument>("can_append", [&] { m.can_append(s, 1); });
    require_throws<InvalidArgument>("append", [&] { m.append(s, 1); });
    require_throws<InvalidArgument>("truncate", [&] { m.truncate(s, 0); });
    require_throws<InvalidArgument>("fork from", [&] { m.fork(s, 0, 0); });
    require_throws<InvalidArgument>("fork to", [&] { m.fork(0, s, 0); });
    require_throws<InvalidArgument>("clear", [&] { m.clear(s); });
    require_throws<InvalidArgument>("make_own", [&] { m.make_own(s, 0, 0); });
  }
  require_throws<InvalidArgument>("append -1", [&] { m.append(0, -1); });
  require_throws<InvalidArgument>("can_append -1", [&] { m.can_append(0, -1); });
  require_throws<InvalidArgument>("truncate -1", [&] { m.truncate(0, -1); });
  require_throws<InvalidArgument>("truncate 11", [&] { m.truncate(0, 11); });
  require_throws<InvalidArgument>("make_own to 11", [&] { m.make_own(0, 0, 11); });
  require_throws<InvalidArgument>("make_own from -1", [&] { m.make_own(0, -1, 5); });
  require_throws<InvalidArgument>("make_own backwards", [&] { m.make_own(0, 5, 4); });
  require_throws<InvalidArgument>("fork 11", [&] { m.fork(0, 1, 11); });
  require_throws<InvalidArgument>("fork -1", [&] { m.fork(0, 1, -1); });
  require_throws<InvalidArgument>("fork onto itself 11", [&] { m.fork(0, 0, 11); });
  require_throws<InvalidArgument>("-1 pages", [] { PagedMemory(-1, 1, [](PageId, PageId) {}); });
  require_throws<InvalidArgument>("2^23 pages", [] { PagedMemory(1 << 23, 1, [](PageId, PageId) {}); });
  require_throws<InvalidArgument>("-1 sequences", [] { PagedMemory(1, -1, [](PageId, PageId) {}); });
  require_throws<InvalidArgument>("no copy function", [] { PagedMemory(1, 1, nullptr); });
  world.check();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const std::map<std::string, std::function<void()>> cases = {{"copy_on_write", copy_on_write},
                                                              {"full", full},
                                                              {"rollback", rollback},
                                                              {"forgetting", forgetting},
                                                              {"invalid", invalid}};
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
