// `draft-dflash`, `draft-dspark`: the DFlash, DFlash2 or DSpark drafter that was loaded with the target, a whole draft in
// one pass.
//
// Its cache is part of the target's sequences (model/drafted_model.h), so that there is nothing to keep up with. A draft is
// one walk through the lattice of candidates, from left to right: the best after the one before, or, of DFlash2 at a
// temperature, drawn in proportion to exp(score / temperature). It ends before a row that the drafter is not sure enough of:
// by what its head of confidence says, of those without by the share of the best candidate.
#pragma once

#include <memory>
#include <string>

#include "engine/engine.h"
#include "speculative/draft_chain.h"

namespace v100 {

class DraftDFlash final : public Drafter {
 public:
  // name: the type, one of the two. params.n_max beyond the drafter's block is cut to it. Throws InvalidArgument for a target
  // without such a drafter or with a ubatch that its block does not fit into, and for a p_min that DSpark has no head for.
  DraftDFlash(std::shared_ptr<Engine> target, std::string_view name, const DraftChainParams& params);
  std::string_view name() const override { return name_; }
  int32_t longest() const override { return params_.n_max; }
  void begin(int32_t sequence, std::span<const int32_t>) override { numbers_.forget(sequence); }
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void forget(int32_t sequence) override { numbers_.forget(sequence); }

 private:
  Draft walk(const DraftRequest& request, const DraftLattice& lattice);

  std::shared_ptr<Engine> target_;
  std::string name_;
  DraftChainParams params_;
  int32_t block_rows_ = 0;
  bool draws_ = false;
  DraftNumbers numbers_{0x9e3779b9u};
};

}  // namespace v100
