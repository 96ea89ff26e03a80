// One rank after the other, then the drafter, which every rank knows and one has.
#include "engine/rank_models.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "model/architectures.h"
#include "model/drafted_model.h"

namespace v100 {

namespace {

// As a whole on one rank.
void add_drafter(const ModelFiles& files, const Placement& placement, const Backend& backend, ThreadPool& pool,
                 LoadFor purpose, std::vector<RankModel>& ranks) {
  const int32_t home = placement.rank_of_drafter();
  RankModel& host = ranks[static_cast<size_t>(home)];
  // Its blocks are numbered like the model's layers, but not shared out with them.
  PlacementParams alone;
  alone.devices = {placement.devices()[static_cast<size_t>(home)]};
  const Placement one_rank(alone);
  Shard whole(one_rank, 0);
  const WeightLoader weights(files.drafter, backend, pool, files.check_values, false, whole, purpose);
  const Metadata metadata(files.drafter, {});
  const auto beside = [&](const auto& drafter) {
    for (size_t r = 0; r < ranks.size(); ++r)
      ranks[r].text =
          std::make_unique<DraftedModel>(std::move(ranks[r].text), drafter, home, static_cast<int32_t>(r) == home);
  };
  const std::string architecture = metadata.require_string("general.architecture");
  if (architecture == "dflash")
    beside(std::make_shared<const DFlash>(metadata, weights));
  else if (architecture == "eagle3")
    beside(std::make_shared<const Eagle3>(metadata, weights));
  else
    throw ModelError("architecture '" + architecture + "' is not that of a drafter (dflash, eagle3)");
  host.packed_bytes += weights.packed_bytes();
  host.vector_bytes += weights.vector_bytes();
}

}  // namespace

std::vector<RankModel> load_ranks(const ModelFiles& files, const Metadata& metadata, const Placement& placement,
                                  const std::vector<const Backend*>& backends, ThreadPool& pool, LoadFor purpose) {
  std::vector<RankModel> ranks;
  for (int32_t r = 0; r < placement.ranks(); ++r) {
    Shard shard(placement, r);
    const WeightLoader weights(files.model, *backends[static_cast<size_t>(r)], pool, files.check_values, files.load_mtp,
                               shard, purpose);
    RankModel& rank = ranks.emplace_back();
    rank.text = load_architecture(metadata, weights);
    rank.origins = weights.origins();
    rank.packed_bytes = weights.packed_bytes();
    rank.vector_bytes = weights.vector_bytes();
  }
  if (files.drafter != nullptr)
    add_drafter(files, placement, *backends[static_cast<size_t>(placement.rank_of_drafter())], pool, purpose, ranks);
  return ranks;
}

}  // namespace v100
