// `ngram-cache`: counts of what followed n-grams of one to four tokens: in the sequence itself, and in two files of counts
// from elsewhere.
#pragma once

#include <array>
#include <map>
#include <string>
#include <unordered_map>

#include "speculative/drafter.h"

namespace v100 {

inline constexpr int32_t kCacheNgram = 4;

// -1 where it is shorter.
struct CachedNgram {
  std::array<int32_t, kCacheNgram> tokens{-1, -1, -1, -1};

  bool operator==(const CachedNgram&) const = default;
};

struct CachedNgramHash {
  size_t operator()(const CachedNgram& ngram) const noexcept;
};

using FollowerCounts = std::unordered_map<int32_t, int32_t>;  // token -> times
using NgramCounts = std::unordered_map<CachedNgram, FollowerCounts, CachedNgramHash>;

// A lookup file, llama.cpp's format: records of four tokens, the number of followers, and (token, count) for each, all
// native int32. Throws InvalidArgument naming the file, for one that cannot be read, ends within a record or has a
// negative count.
NgramCounts read_lookup_file(const std::string& path);
// Throws Error.
void write_lookup_file(const std::string& path, const NgramCounts& counts);

class NgramCache final : public Drafter {
 public:
  // Paths of lookup files; empty: none. The static one counts n-grams of two tokens. The dynamic one, which may not exist
  // yet, takes in the counts of sequences once they are gone, and is written by save().
  NgramCache(const std::string& static_path, const std::string& dynamic_path);
  std::string_view name() const override { return "ngram-cache"; }
  int32_t longest() const override { return 8; }
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void forget(int32_t sequence) override;
  void save() override;

 private:
  struct Context {
    std::vector<int32_t> seen;
    NgramCounts counts;
  };

  void follow_history(Context& context, const DraftRequest& request);
  void learn(Context& context);
  int32_t next(const NgramCounts& context, std::span<const int32_t> text) const;

  std::string dynamic_path_;
  NgramCounts static_, dynamic_;
  std::map<int32_t, Context> contexts_;  // of each sequence
};

}  // namespace v100
