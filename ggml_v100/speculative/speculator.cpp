// Making of drafters, their order, and what they are told.
#include "speculative/speculator.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "speculative/draft_dflash.h"
#include "speculative/draft_model.h"
#include "speculative/draft_prediction.h"
#include "speculative/ngram_cache.h"
#include "speculative/ngram_map.h"

namespace v100 {

namespace {

// Those without a model come first: what they guess costs nothing.
constexpr std::array<std::string_view, 10> kPrecedence{"ngram-simple", "ngram-map-k",  "ngram-map-k4v", "ngram-mod",
                                                       "ngram-cache",  "draft-simple", "draft-eagle3",  "draft-mtp",
                                                       "draft-dflash", "draft-dspark"};

class Stopwatch {
 public:
  explicit Stopwatch(double& total_ms) : total_ms_(total_ms), start_(std::chrono::steady_clock::now()) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    total_ms_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  double& total_ms_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

std::span<const std::string_view> speculation_types() { return kPrecedence; }

Speculator::Speculator(std::shared_ptr<Engine> target, const SpeculationParams& params, std::shared_ptr<Engine> draft)
    : target_(std::move(target)), winner_(static_cast<size_t>(target_->n_seq_max()), -1) {
  check_draft_chain(params.chain);
  const auto asked_for = [&](std::string_view name) {
    return std::find(params.types.begin(), params.types.end(), name) != params.types.end();
  };
  for (const std::string& type : params.types)
    if (type != "none" && std::find(kPrecedence.begin(), kPrecedence.end(), type) == kPrecedence.end())
      throw InvalidArgument("'" + type + "' is not a type of speculation");
  if (asked_for("none")) return;
  for (const std::string_view type : kPrecedence) {
    if (!asked_for(type)) continue;
    if (type == "ngram-simple")
      add(std::make_unique<NgramSimple>(params.simple));
    else if (type == "ngram-map-k")
      add(std::make_unique<NgramMap>(params.map_k, params.map_k_min_hits, false));
    else if (type == "ngram-map-k4v")
      add(std::make_unique<NgramMap>(params.map_k4v, params.map_k4v_min_hits, true));
    else if (type == "ngram-mod")
      add(std::make_unique<NgramMod>(params.mod));
    else if (type == "ngram-cache")
      add(std::make_unique<NgramCache>(params.lookup_static, params.lookup_dynamic));
    else if (type == "draft-simple" && draft != nullptr)
      add(std::make_unique<DraftModel>(draft, target_->n_seq_max(), target_->model().text().hyperparameters().vocab,
                                       params.chain));
    else if (type == "draft-mtp" || type == "draft-eagle3")
      add(std::make_unique<DraftPrediction>(target_, type, params.chain));
    else if (type == "draft-dflash" || type == "draft-dspark")
      add(std::make_unique<DraftDFlash>(target_, type, params.chain));
    else
      throw InvalidArgument(std::string(type) + " needs a draft model");
  }
}

Speculator::~Speculator() = default;

void Speculator::add(std::unique_ptr<Drafter> drafter) {
  Active active{std::move(drafter), {}};
  active.statistics.name = active.drafter->name();
  active_.push_back(std::move(active));
}

std::vector<std::string> Speculator::names() const {
  std::vector<std::string> names;
  for (const Active& active : active_) names.push_back(active.statistics.name);
  return names;
}

int32_t Speculator::longest() const {
  int32_t longest = 0;
  for (const Active& active : active_) longest = std::max(longest, active.drafter->longest());
  return longest;
}

void Speculator::begin(int32_t sequence) {
  const auto history = target_->view_tokens(sequence);
  winner_[static_cast<size_t>(sequence)] = -1;
  for (Active& active : active_) {
    const Stopwatch watch(active.statistics.begin_ms);
    ++active.statistics.n_begins;
    active.drafter->begin(sequence, history);
  }
}

void Speculator::follow(int32_t sequence) {
  const auto history = target_->view_tokens(sequence);
  for (Active& active : active_) active.drafter->follow(sequence, history);
}

void Speculator::forget(int32_t sequence) {
  target_->view_tokens(sequence);  // throws for an unknown one
  winner_[static_cast<size_t>(sequence)] = -1;
  for (Active& active : active_) active.drafter->forget(sequence);
}

std::vector<Draft> Speculator::draft(std::span<const DraftOrder> orders) {
  const int32_t n_vocab = target_->model().text().hyperparameters().vocab;
  std::vector<Draft> drafts(orders.size());
  std::vector<size_t> open;  // orders without a draft yet
  for (size_t i = 0; i < orders.size(); ++i) {
    target_->view_tokens(orders[i].sequence);  // throws for an unknown one
    winner_[static_cast<size_t>(orders[i].sequence)] = -1;
    if (orders[i].most > 0) open.push_back(i);
  }
  for (size_t a = 0; a < active_.size() && !open.empty(); ++a) {
    Active& active = active_[a];
    const Stopwatch watch(active.statistics.draft_ms);
    ++active.statistics.n_draft_calls;
    std::vector<DraftRequest> requests;
    for (const size_t i : open)
      requests.push_back({orders[i].sequence, target_->view_tokens(orders[i].sequence), orders[i].last, orders[i].most,
                          orders[i].temperature, orders[i].seed});
    std::vector<Draft> found(open.size());
    active.drafter->draft(requests, found);
    std::vector<size_t> still_open;
    for (size_t j = 0; j < open.size(); ++j) {
      Draft& draft = found[j];
      const auto unknown = std::find_if(draft.tokens.begin(), draft.tokens.end(),
                                        [n_vocab](int32_t token) { return token < 0 || token >= n_vocab; });
      const auto count = std::min<size_t>(static_cast<size_t>(unknown - draft.tokens.begin()),
                                          static_cast<size_t>(orders[open[j]].most));
      draft.tokens.resize(count);
      if (!draft.proposals.empty()) draft.proposals.resize(count);
      if (draft.tokens.empty()) {
        still_open.push_back(open[j]);
        continue;
      }
      winner_[static_cast<size_t>(orders[open[j]].sequence)] = static_cast<int32_t>(a);
      drafts[open[j]] = std::move(draft);
    }
    open = std::move(still_open);
  }
  return drafts;
}

void Speculator::accept(int32_t sequence, int32_t n_verified, int32_t n_accepted) {
  target_->view_tokens(sequence);  // throws for an unknown one
  if (n_accepted < 0 || n_accepted > n_verified)
    throw InvalidArgument(std::to_string(n_accepted) + " of " + std::to_string(n_verified) +
                          " drafted tokens cannot stand");
  const int32_t winner = winner_[static_cast<size_t>(sequence)];
  if (winner < 0) throw InvalidArgument("sequence " + std::to_string(sequence) + " has no draft");
  for (size_t a = 0; a < active_.size(); ++a) {
    DrafterStatistics& statistics = active_[a].statistics;
    const Stopwatch watch(statistics.accept_ms);
    const bool is_other = static_cast<int32_t>(a) != winner;
    active_[a].drafter->accept(sequence, n_accepted, is_other);
    ++statistics.n_accept_calls;
    if (is_other) continue;
    ++statistics.n_drafts;
    statistics.n_accepted_drafts += n_accepted > 0;
    statistics.n_tokens += n_verified;
    statistics.n_accepted_tokens += n_accepted;
    if (statistics.accepted_at.size() < static_cast<size_t>(n_verified))
      statistics.accepted_at.resize(static_cast<size_t>(n_verified));
    for (int32_t i = 0; i < n_accepted; ++i) ++statistics.accepted_at[static_cast<size_t>(i)];
  }
  winner_[static_cast<size_t>(sequence)] = -1;
}

void Speculator::save() {
  for (Active& active : active_) active.drafter->save();
}

std::vector<DrafterStatistics> Speculator::statistics() const {
  std::vector<DrafterStatistics> all;
  for (const Active& active : active_) all.push_back(active.statistics);
  return all;
}

}  // namespace v100
