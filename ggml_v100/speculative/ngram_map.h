// `ngram-map-k` and `ngram-map-k4v`: n-grams of a sequence in a hash table, which learn how well they predict.
//
// k: what followed the n-gram last time it was found, as many tokens as stood when it was used last.
// k4v: up to four different continuations of a key are counted; the most frequent is drafted when it leads clearly.
#pragma once

#include <array>
#include <map>

#include "speculative/ngram_simple.h"

namespace v100 {

class NgramMap final : public Drafter {
 public:
  // min_hits: times that a key must have been met. Throws InvalidArgument for sizes outside 1..1024 and hits below 1.
  NgramMap(NgramSizes sizes, int32_t min_hits, bool counts_values);
  std::string_view name() const override { return counts_values_ ? "ngram-map-k4v" : "ngram-map-k"; }
  int32_t longest() const override { return sizes_.m; }
  void begin(int32_t sequence, std::span<const int32_t> history) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void accept(int32_t sequence, int32_t n_accepted, bool is_other) override;
  void forget(int32_t sequence) override { maps_.erase(sequence); }

 private:
  struct Value {
    int32_t at = 0;  // where the continuation begins
    int32_t count = 0;
    int32_t n_accepted = 0;  // tokens that stood when it was drafted last
  };
  struct Key {
    int32_t at = 0;          // where its n-gram begins
    int32_t count = 0;       // lookups that found it
    int32_t scanned_to = 0;  // occurrences that begin before are counted
    std::array<Value, 4> values;
    int32_t n_values = 0;
  };
  struct Map {
    std::vector<int32_t> buckets;  // hash -> where an n-gram begins; 0: empty, so that place 0 is never found
    int32_t hashed_to = 0;         // n-grams that begin up to here are in the buckets
    int32_t prompt_length = 0;     // at the last begin()
    std::vector<Key> keys;
    int32_t drafted_key = -1, drafted_value = 0;  // of the present round
  };

  bool is_at(std::span<const int32_t> ngram, std::span<const int32_t> history, int32_t at) const;
  int32_t find(const Map& map, std::span<const int32_t> ngram, std::span<const int32_t> history) const;
  void hash_new(Map& map, std::span<const int32_t> history) const;
  void count_values(Key& key, std::span<const int32_t> history) const;
  void drop_from(Map& map, int32_t at) const;
  void draft_one(const DraftRequest& request, Draft& draft);

  NgramSizes sizes_;
  int32_t min_hits_;
  bool counts_values_;
  std::map<int32_t, Map> maps_;  // of each sequence
};

}  // namespace v100
