// `draft-mtp`, `draft-eagle3`: what goes from token to token on the target's own hidden states, the block of multi-token
// prediction that came with the target, or the EAGLE-3 drafter that was loaded with it.
//
// Its cache and the hidden state it goes on from are part of the target's sequences (TextModel::predict), so that there is
// nothing to keep up with.
#pragma once

#include <memory>
#include <string>

#include "engine/engine.h"
#include "speculative/draft_chain.h"

namespace v100 {

class DraftPrediction final : public Drafter {
 public:
  // name: the type, one of the two. Throws InvalidArgument for a target without what it needs.
  DraftPrediction(std::shared_ptr<Engine> target, std::string_view name, const DraftChainParams& params);
  std::string_view name() const override { return name_; }
  int32_t longest() const override { return chain_.params().n_max; }
  void begin(int32_t sequence, std::span<const int32_t>) override { chain_.begin(sequence); }
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void forget(int32_t sequence) override { chain_.forget(sequence); }

 private:
  std::shared_ptr<Engine> target_;
  std::string name_;
  DraftChain chain_;
};

}  // namespace v100
