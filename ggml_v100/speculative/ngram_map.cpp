// Lookup by hash, and by walking back over what is not hashed yet.
#include "speculative/ngram_map.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace v100 {

namespace {

constexpr uint32_t kBuckets = 262144;
constexpr int32_t kMostCounted = 16380;

uint32_t bucket_of(std::span<const int32_t> ngram) {
  uint32_t hash = 0;
  for (const int32_t token : ngram) hash = hash * 2654435761u + static_cast<uint32_t>(token);
  return hash % kBuckets;
}

}  // namespace

NgramMap::NgramMap(NgramSizes sizes, int32_t min_hits, bool counts_values)
    : sizes_(sizes), min_hits_(min_hits), counts_values_(counts_values) {
  check_ngram_sizes(name(), sizes);
  if (min_hits < 1)
    throw InvalidArgument(std::string(name()) + ": min hits is " + std::to_string(min_hits) + ", expected 1 or more");
}

bool NgramMap::is_at(std::span<const int32_t> ngram, std::span<const int32_t> history, int32_t at) const {
  return at >= 0 && static_cast<size_t>(at) + ngram.size() <= history.size() &&
         std::equal(ngram.begin(), ngram.end(), history.begin() + at);
}

void NgramMap::drop_from(Map& map, int32_t at) const {
  for (int32_t& bucket : map.buckets)
    if (bucket >= at) bucket = 0;
  std::erase_if(map.keys, [at](const Key& key) { return key.at >= at; });
  for (Key& key : map.keys) {
    key.scanned_to = std::min(key.scanned_to, at);
    int32_t kept = 0;
    for (int32_t i = 0; i < key.n_values; ++i)
      if (key.values[static_cast<size_t>(i)].at < at)
        key.values[static_cast<size_t>(kept++)] = key.values[static_cast<size_t>(i)];
    key.n_values = kept;
  }
  map.hashed_to = std::min(map.hashed_to, std::max(0, at - 1));
}

// Beginnings that no longer hold are dropped: a prompt may differ from what was there from about its last end on.
void NgramMap::begin(int32_t sequence, std::span<const int32_t> history) {
  Map& map = maps_[sequence];
  map.buckets.resize(kBuckets);
  map.drafted_key = -1;
  const auto length = static_cast<int32_t>(history.size());
  if (length < map.hashed_to + sizes_.n)
    drop_from(map, std::max(0, std::min(map.prompt_length, length - sizes_.n - sizes_.m)));
  map.prompt_length = length;
}

// Where the n-gram occurs with a whole draft behind it; -1: nowhere.
int32_t NgramMap::find(const Map& map, std::span<const int32_t> ngram, std::span<const int32_t> history) const {
  const int32_t last = static_cast<int32_t>(history.size()) - sizes_.n - sizes_.m - 1;
  const int32_t hashed = map.buckets[bucket_of(ngram)];
  if (hashed > 0 && hashed < last && is_at(ngram, history, hashed)) return hashed;
  const int32_t lowest = std::max(1, map.hashed_to + 1);
  const auto walk = [&](int32_t from, int32_t to) {
    for (int32_t at = from; at >= std::max(to, lowest); --at)
      if (is_at(ngram, history, at)) return at;
    return -1;
  };
  const int32_t in_prompt = walk(std::min(last, map.prompt_length - sizes_.n - sizes_.m - 1), 1);
  return in_prompt >= 0 ? in_prompt : walk(last, map.prompt_length + 1);
}

void NgramMap::hash_new(Map& map, std::span<const int32_t> history) const {
  const int32_t last = static_cast<int32_t>(history.size()) - sizes_.n - sizes_.m - 1;
  for (int32_t at = map.hashed_to + 1; at <= last; ++at) {
    int32_t& bucket = map.buckets[bucket_of(history.subspan(static_cast<size_t>(at), static_cast<size_t>(sizes_.n)))];
    if (bucket == 0) bucket = at;
  }
  map.hashed_to = std::max(map.hashed_to, last);
}

void NgramMap::count_values(Key& key, std::span<const int32_t> history) const {
  const auto [n, m] = sizes_;
  const auto ngram = history.subspan(static_cast<size_t>(key.at), static_cast<size_t>(n));
  const int32_t last = static_cast<int32_t>(history.size()) - n - m;
  for (int32_t at = std::max(key.scanned_to, 0); at <= last; ++at) {
    if (!is_at(ngram, history, at)) continue;
    const auto continuation = history.subspan(static_cast<size_t>(at + n), static_cast<size_t>(m));
    Value* value = nullptr;
    for (int32_t i = 0; i < key.n_values && value == nullptr; ++i)
      if (is_at(continuation, history, key.values[static_cast<size_t>(i)].at))
        value = &key.values[static_cast<size_t>(i)];
    if (value == nullptr && key.n_values < static_cast<int32_t>(key.values.size())) {
      value = &key.values[static_cast<size_t>(key.n_values++)];
      *value = {at + n, 0, m};
    }
    if (value != nullptr) value->count = std::min(value->count + 1, kMostCounted);
  }
  key.scanned_to = std::max(key.scanned_to, last + 1);
}

void NgramMap::draft_one(const DraftRequest& request, Draft& draft) {
  const auto [n, m] = sizes_;
  const auto history = request.history;
  Map& map = maps_[request.sequence];
  map.buckets.resize(kBuckets);
  map.drafted_key = -1;
  const auto length = static_cast<int32_t>(history.size());
  if (length < map.hashed_to + n) drop_from(map, std::max(0, length - n - m));  // cut since
  if (length < 2 * n + m) return;
  const std::vector<int32_t> ngram = last_ngram(request, n);
  const int32_t at = find(map, ngram, history);
  hash_new(map, history);
  if (at < 0) return;

  auto key = std::find_if(map.keys.begin(), map.keys.end(), [&](const Key& k) { return is_at(ngram, history, k.at); });
  if (key == map.keys.end()) {
    Key fresh;
    fresh.at = at;
    if (!counts_values_) {
      fresh.values[0] = {at + n, 1, m};
      fresh.n_values = 1;
    }
    key = map.keys.insert(map.keys.end(), fresh);
  }
  key->count = std::min(key->count + 1, kMostCounted);
  if (key->count < min_hits_) return;

  int32_t best = 0, begin = at + n;
  if (counts_values_) {
    count_values(*key, history);
    if (key->n_values == 0) return;
    int32_t others = 0;
    for (int32_t i = 0; i < key->n_values; ++i) {
      others += key->values[static_cast<size_t>(i)].count;
      if (key->values[static_cast<size_t>(i)].count > key->values[static_cast<size_t>(best)].count) best = i;
    }
    const Value& value = key->values[static_cast<size_t>(best)];
    others -= value.count;
    if (others > 0 && value.count < 2 * others) return;
    begin = value.at;
  }
  const int32_t count = std::min({m, key->values[static_cast<size_t>(best)].n_accepted, length - begin});
  if (count <= 0) return;
  draft.tokens.assign(history.begin() + begin, history.begin() + begin + count);
  map.drafted_key = static_cast<int32_t>(key - map.keys.begin());
  map.drafted_value = best;
}

void NgramMap::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  for (size_t i = 0; i < requests.size(); ++i) draft_one(requests[i], drafts[i]);
}

void NgramMap::accept(int32_t sequence, int32_t n_accepted, bool is_other) {
  const auto found = maps_.find(sequence);
  if (is_other || found == maps_.end() || found->second.drafted_key < 0) return;
  Map& map = found->second;
  map.keys[static_cast<size_t>(map.drafted_key)].values[static_cast<size_t>(map.drafted_value)].n_accepted = n_accepted;
  map.drafted_key = -1;
}

}  // namespace v100
