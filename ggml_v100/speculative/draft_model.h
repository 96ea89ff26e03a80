// `draft-simple`: a smaller model with the same vocabulary says what it would say.
//
// Its engine has the sequences of the target's, by the same numbers. What it holds of them is made equal to the target's
// when it drafts: of accepted drafts everything is there already.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "speculative/draft_chain.h"

namespace v100 {

class DraftModel final : public Drafter {
 public:
  // engine: of the draft model, with at least twice the n_sequences of the target: those from n_sequences on are used for
  // drafts where the model is recurrent. n_vocab: of the target.
  DraftModel(std::shared_ptr<Engine> engine, int32_t n_sequences, int32_t n_vocab, const DraftChainParams& params);
  std::string_view name() const override { return "draft-simple"; }
  int32_t longest() const override { return chain_.params().n_max; }
  void begin(int32_t sequence, std::span<const int32_t> history) override;
  void follow(int32_t sequence, std::span<const int32_t> history) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void forget(int32_t sequence) override;

 private:
  struct Running {  // a draft that goes on
    const DraftRequest* request;
    Draft* draft;
    int32_t sequence;  // of the draft model's engine
    int32_t next;      // token to compute
  };

  bool catch_up(int32_t sequence, std::span<const int32_t> history);
  bool make_room(std::span<const DraftRequest> requests);
  void extend(std::vector<Running>& running);

  std::shared_ptr<Engine> engine_;
  int32_t n_sequences_;
  int32_t n_vocab_;
  DraftChain chain_;
};

}  // namespace v100
