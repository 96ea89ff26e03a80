// `draft-mtp`: the block of multi-token prediction that came with the target, on the target's own hidden states.
//
// Its cache and the hidden state it goes on from are part of the target's sequences (TextModel::predict), so that there is
// nothing to keep up with.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "speculative/draft_chain.h"

namespace v100 {

class DraftMtp final : public Drafter {
 public:
  // Throws InvalidArgument for a target without such a block.
  DraftMtp(std::shared_ptr<Engine> target, const DraftChainParams& params);
  std::string_view name() const override { return "draft-mtp"; }
  int32_t longest() const override { return chain_.params().n_max; }
  void begin(int32_t sequence, std::span<const int32_t>) override { chain_.begin(sequence); }
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void forget(int32_t sequence) override { chain_.forget(sequence); }

 private:
  std::shared_ptr<Engine> target_;
  DraftChain chain_;
};

}  // namespace v100
