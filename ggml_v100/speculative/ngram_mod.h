// `ngram-mod`: one hash pool for all sequences, from the hash of an n-gram to the token that followed it last.
//
// What one conversation has seen serves the others. Nothing is compared: a collision is a bad guess.
#pragma once

#include <map>

#include "speculative/drafter.h"

namespace v100 {

struct NgramModParams {
  int32_t n_match;  // 1..1024, tokens of an n-gram
  int32_t n_min;    // 0..1024, fewer tokens are not worth a draft
  int32_t n_max;    // 0..1024
};

class NgramMod final : public Drafter {
 public:
  // Throws InvalidArgument.
  explicit NgramMod(NgramModParams params);
  std::string_view name() const override { return "ngram-mod"; }
  int32_t longest() const override { return params_.n_max; }
  void begin(int32_t sequence, std::span<const int32_t> history) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void accept(int32_t sequence, int32_t n_accepted, bool is_other) override;
  void forget(int32_t sequence) override { sequences_.erase(sequence); }

 private:
  struct Sequence {
    size_t inserted = 0;  // tokens of the history whose n-grams are in the pool
    size_t n_drafted = 0;
    int32_t n_bad_rounds = 0;
  };

  size_t slot_of(std::span<const int32_t> ngram) const;
  void insert(Sequence& sequence, std::span<const int32_t> history);
  void clear();

  NgramModParams params_;
  std::vector<int32_t> pool_;  // -1: empty
  size_t n_used_ = 0;
  std::map<int32_t, Sequence> sequences_;
};

}  // namespace v100
