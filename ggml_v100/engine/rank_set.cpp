// Sharing out of threads, pages and logits over ranks.
#include "engine/rank_set.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/pool_sizes.h"

namespace v100 {

namespace {

// Threads begin where those of the ranks before end, so that lists of processors are shared out like the threads.
ThreadSettings settings_of_rank(ThreadSettings settings, int32_t count, int32_t first) {
  settings.count = count;
  if (!settings.cpus.empty())
    std::rotate(settings.cpus.begin(), settings.cpus.begin() + first % static_cast<int32_t>(settings.cpus.size()),
                settings.cpus.end());
  return settings;
}

}  // namespace

// CPU ranks that compute at the same time share the threads, the first ones getting what is left over. Where all have whole
// layers they compute one after the other, each with all threads. A rank on another device only starts work there.
int32_t RankSet::threads_of(int32_t rank, int32_t n_threads) const {
  const Placement& placement = model_->placement();
  const std::vector<std::string>& devices = placement.devices();
  if (!is_cpu(devices[static_cast<size_t>(rank)])) return 1;
  if (!placement.has_shared_layers()) return n_threads;
  const auto n = static_cast<int32_t>(std::count_if(devices.begin(), devices.end(), is_cpu));
  const auto index = static_cast<int32_t>(std::count_if(devices.begin(), devices.begin() + rank, is_cpu));
  return std::max(1, n_threads / n + (index < n_threads % n ? 1 : 0));
}

RankSet::RankSet(std::shared_ptr<const LoadedModel> model, const RankSetParams& params)
    : model_(std::move(model)),
      adapters_(params.adapters),
      control_(params.control),
      n_threads_(params.n_threads),
      n_threads_batch_(params.n_threads_batch) {
  const Placement& placement = model_->placement();
  const int32_t n = placement.ranks();
  if (n > 1) {
    if (params.importance != nullptr) throw InvalidArgument("importance is collected on one device, not on several");
    threads_ = std::make_unique<RankThreads>(placement.devices());
  }
  int32_t first_thread = 0;
  for (int32_t r = 0; r < n; ++r) {
    const int32_t count = std::max(threads_of(r, n_threads_), threads_of(r, n_threads_batch_));
    RankSeat seat;
    if (n > 1) seat = RankSeat(threads_->group(), r);
    std::unique_ptr<Ops> ops =
        model_->backend(r).create_ops(settings_of_rank(params.threads, count, first_thread), seat);
    if (placement.has_shared_layers() && is_cpu(placement.devices()[static_cast<size_t>(r)])) first_thread += count;
    if (!adapters_.empty()) {
      std::vector<const LowRankParts*> parts;
      for (const auto& adapter : adapters_) parts.push_back(&adapter->parts(r));
      ops = adapt(std::move(ops), std::move(parts));
    }
    if (params.importance != nullptr) ops = observe_inputs(std::move(ops), *params.importance);
    std::vector<KvShape> shapes =
        typed_shapes(model_->text(r), params.type_k, params.type_v, params.n_window_pages > 0);
    std::vector<VectorWeight> directions;
    if (control_ != nullptr)
      for (const std::vector<float>& direction : control_->directions())
        directions.push_back({model_->backend(r).place(direction), static_cast<int32_t>(direction.size())});
    ranks_.push_back(std::make_unique<Rank>(model_->text(r), model_->backend(r), std::move(ops), std::move(shapes),
                                            params.n_pages, params.n_window_pages, params.n_state_slots,
                                            std::move(directions), params.kv_on_host));
    page_bytes_ += ranks_.back()->page_bytes();
    window_page_bytes_ += ranks_.back()->window_page_bytes();
    state_bytes_ += ranks_.back()->state_bytes();
  }
  passes_ = std::vector<Pass>(ranks_.size());
  for (const std::string& device : placement.devices())
    logits_are_elsewhere_ = logits_are_elsewhere_ || !is_cpu(device);
}

RankSet::~RankSet() = default;

void RankSet::copy_page(PageId from, PageId to) const {
  for (const auto& rank : ranks_) rank->ops().copy_bytes(rank->page(from), rank->page(to), rank->page_bytes());
}

void RankSet::copy_window_page(PageId from, PageId to) const {
  for (const auto& rank : ranks_)
    rank->ops().copy_bytes(rank->window_page(from), rank->window_page(to), rank->window_page_bytes());
}

void RankSet::read_page(PageId page, std::byte* to) const {
  for (const auto& rank : ranks_) {
    rank->ops().read_bytes(rank->page(page), to, rank->page_bytes());
    to += rank->page_bytes();
  }
}

void RankSet::write_page(PageId page, const std::byte* from) const {
  for (const auto& rank : ranks_) {
    rank->ops().write_bytes(from, rank->page(page), rank->page_bytes());
    from += rank->page_bytes();
  }
}

void RankSet::read_window_page(PageId page, std::byte* to) const {
  for (const auto& rank : ranks_) {
    rank->ops().read_bytes(rank->window_page(page), to, rank->window_page_bytes());
    to += rank->window_page_bytes();
  }
}

void RankSet::write_window_page(PageId page, const std::byte* from) const {
  for (const auto& rank : ranks_) {
    rank->ops().write_bytes(from, rank->window_page(page), rank->window_page_bytes());
    from += rank->window_page_bytes();
  }
}

void RankSet::read_state(int32_t slot, std::byte* to) const {
  for (const auto& rank : ranks_) {
    rank->ops().read_bytes(rank->state(slot), to, rank->state_bytes());
    to += rank->state_bytes();
  }
}

void RankSet::write_state(int32_t slot, const std::byte* from) const {
  for (const auto& rank : ranks_) {
    rank->ops().write_bytes(from, rank->state(slot), rank->state_bytes());
    from += rank->state_bytes();
  }
}

template <class Work>
void RankSet::on_all(Work&& work) {
  if (size() == 1)
    work(0);
  else
    threads_->run([this, work](int32_t r) {
      Ops& ops = ranks_[static_cast<size_t>(r)]->ops();
      try {
        work(r);
        ops.submit();
      } catch (...) {
        ops.abandon();
        throw;
      }
    });
}

Tensor RankSet::forward(const Ubatch& ubatch, bool is_decode) {
  on_all([this, ubatch, is_decode](int32_t r) {
    const Rank& rank = *ranks_[static_cast<size_t>(r)];
    rank.ops().set_threads(threads_of(r, is_decode ? n_threads_ : n_threads_batch_));
    Pass& pass = passes_[static_cast<size_t>(r)];
    pass.scope.reset();
    pass.scope.emplace(rank.ops());
    pass.hidden = rank.forward(ubatch);
    pass.is_prediction = false;
  });
  return passes_[0].hidden;
}

void RankSet::predict(const Ubatch& ubatch, std::span<const int32_t> before) {
  on_all([this, ubatch, before](int32_t r) {
    const Rank& rank = *ranks_[static_cast<size_t>(r)];
    rank.ops().set_threads(threads_of(r, n_threads_));
    Pass& pass = passes_[static_cast<size_t>(r)];
    pass.scope.reset();
    pass.scope.emplace(rank.ops());
    pass.hidden = rank.predict(ubatch, before);
    pass.is_prediction = true;
  });
}

Tensor RankSet::head(int32_t rank) const {
  const Rank& one = *ranks_[static_cast<size_t>(rank)];
  const Pass& pass = passes_[static_cast<size_t>(rank)];
  return pass.is_prediction ? one.text().predicted_head(one.ops(), pass.hidden)
                            : one.text().head(one.ops(), pass.hidden);
}

void RankSet::replay(const Ubatch& ubatch) {
  on_all([this, ubatch](int32_t r) {
    const Rank& rank = *ranks_[static_cast<size_t>(r)];
    rank.ops().set_threads(threads_of(r, n_threads_));
    const Ops::Scope scope(rank.ops());
    rank.replay(ubatch);
  });
}

void RankSet::on_each(const std::function<void(const Rank&)>& work) {
  on_all([this, work](int32_t r) {
    const Rank& rank = *ranks_[static_cast<size_t>(r)];
    rank.ops().set_threads(threads_of(r, n_threads_batch_));
    work(rank);
  });
}

Tensor RankSet::logits() {
  const TextModel& text = model_->text();
  const auto vocab =
      static_cast<size_t>(passes_[0].is_prediction ? text.predicted_width() : text.hyperparameters().vocab);
  const auto rows = static_cast<size_t>(passes_[0].hidden.rows);
  if (size() == 1) return ops().on_host(head(0));
  logits_.resize(std::max(logits_.size(), rows * vocab));
  on_all([this, vocab](int32_t r) {
    const Rank& rank = *ranks_[static_cast<size_t>(r)];
    read_part(rank.ops(), head(r), rank.text().vocabulary().begin, logits_, static_cast<int32_t>(vocab));
  });
  return {logits_.data(), static_cast<int32_t>(rows), static_cast<int32_t>(vocab)};
}

std::span<const LogitsRow> RankSet::logits_rows(std::span<const RowNeeds* const> needs) {
  const auto look_up =
      std::make_shared<RowLookUp>(needs, model_->text().hyperparameters().vocab, static_cast<size_t>(size()));
  on_all([this, look_up](int32_t r) {
    const Rank& rank = *ranks_[static_cast<size_t>(r)];
    look_up->ask(static_cast<size_t>(r), rank.ops(), head(r), rank.text().vocabulary().begin);
  });
  if (look_up->has_whole_rows())
    on_all([this, look_up](int32_t r) {
      look_up->read_whole_rows(static_cast<size_t>(r), ranks_[static_cast<size_t>(r)]->ops());
    });
  look_up_ = look_up;
  return look_up->put_together();
}

void RankSet::inject(InjectedFault fault, std::optional<double> stall_seconds) {
  if (threads_ == nullptr) throw InvalidArgument("faults are injected into one of several ranks");
  if (fault.rank < 0 || fault.rank >= size())
    throw InvalidArgument("rank is " + std::to_string(fault.rank) + ", expected 0 to " + std::to_string(size() - 1));
  if (stall_seconds) threads_->set_stall_limit(std::chrono::duration<double>(*stall_seconds));
  threads_->group().inject(fault);
}

}  // namespace v100
