#include "cuda/peer_sums.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "cuda/backend.h"
#include "cuda/slabs.h"

namespace v100::cuda {

namespace {

constexpr CUresult kPeerAccessAlreadyEnabled = 704;
constexpr int64_t kSlotValues = int64_t{1} << 18;  // of one launch: 1 MiB
constexpr uint32_t kThreads = 128, kMostBlocks = 80;
constexpr int64_t kPatience = int64_t{1} << 35;  // cycles: some 20 seconds

}  // namespace

PeerSums::PeerSums(std::shared_ptr<const Launches> launches, RankSeat seat)
    : launches_(std::move(launches)), seat_(seat) {
  if (seat_.is_alone()) return;
  const auto& names = seat_.group()->names();
  is_possible_ =
      static_cast<int32_t>(names.size()) <= kMostRanks &&
      std::all_of(names.begin(), names.end(), [](const auto& name) { return cuda_ordinal(name).has_value(); });
}

bool PeerSums::must_meet() const { return is_possible_ && (!is_prepared_ || failures_ != seat_.group()->failures()); }

bool PeerSums::is_ready(const Recorder& recorder) {
  if (must_meet()) prepare(recorder.stream());
  return reaches_all_;
}

void PeerSums::prepare(const Stream& stream) {
  const Device& device = launches_->device();
  const auto& names = seat_.group()->names();
  const size_t ranks = names.size(), half = ranks * static_cast<size_t>(kSlotValues) * sizeof(uint32_t);
  const int64_t failures = seat_.group()->failures();
  // Sums of before a failure end, by the alarm or by themselves. Then nobody sends any more, and buffers can be cleared.
  stream.synchronize();
  float arrived = 0.0f;
  seat_.all_reduce(&arrived, 1);
  bool reaches = true;
  if (signals_ == nullptr) {
    struct Pinned {
      std::shared_ptr<const Launches> launches;
      PinnedMemory memory;
    };
    const auto pinned = std::make_shared<Pinned>(Pinned{launches_, PinnedMemory(device, sizeof(Signals))});
    signals_ = {pinned, new (pinned->memory.data()) Signals};
    seat_.group()->add_alarm({signals_, &signals_->stop});
    for (size_t r = 0; r < ranks; ++r) {
      if (static_cast<int32_t>(r) == seat_.rank()) continue;
      const int32_t ordinal = *cuda_ordinal(names[r]);
      const auto& known = device.info().peers;
      if (std::find(known.begin(), known.end(), ordinal) == known.end()) {
        reaches = false;
        continue;
      }
      peers_.push_back(std::make_unique<const Device>(Driver::load(), ordinal));
      device.make_current();  // not that of the peer
      const CUresult result = device.api().cuCtxEnablePeerAccess(peers_.back()->context(), 0);
      if (result != kPeerAccessAlreadyEnabled) device.check(result, "reaching the memory of " + names[r]);
    }
    if (reaches) buffer_ = DeviceMemory(device, 2 * half);
  } else {
    reaches = reaches_all_;
  }
  if (reaches) {
    stream.fill(buffer_.address(), 0xff, 2 * half);
    stream.synchronize();
  }
  signals_->stop = 0, signals_->late = 0;
  turn_ = 0;
  // Each rank tells the others its address, in 16-bit pieces that a sum of floats keeps exact. 0: it does not reach them all.
  constexpr size_t kPieces = 4;
  std::vector<float> told(ranks * kPieces, 0.0f);
  const CUdeviceptr address = reaches ? buffer_.address() : 0;
  for (size_t i = 0; i < kPieces; ++i)
    told[static_cast<size_t>(seat_.rank()) * kPieces + i] = static_cast<float>(address >> 16 * i & 0xffffu);
  seat_.all_reduce(told.data(), static_cast<int64_t>(told.size()));
  buffers_.assign(ranks, 0);
  for (size_t r = 0; r < ranks; ++r)
    for (size_t i = 0; i < kPieces; ++i) buffers_[r] |= static_cast<CUdeviceptr>(told[r * kPieces + i]) << 16 * i;
  reaches_all_ = std::find(buffers_.begin(), buffers_.end(), CUdeviceptr{0}) == buffers_.end();
  failures_ = failures;
  is_prepared_ = true;
}

void PeerSums::sum(Recorder& recorder, Tensor x) {
  const Kernel& kernel = launches_->kernel("all_reduce", "all_reduce");
  const size_t half = buffers_.size() * static_cast<size_t>(kSlotValues) * sizeof(uint32_t);
  for (int64_t first = 0; first < x.size(); first += kSlotValues) {
    AllReduceParams params{};
    params.x = x.data + first;
    params.n = std::min(kSlotValues, x.size() - first);
    for (size_t r = 0; r < buffers_.size(); ++r)
      params.slots[r] = reinterpret_cast<uint32_t*>(buffers_[r] + static_cast<size_t>(turn_ % 2) * half);
    params.mine = params.slots[seat_.rank()];
    params.stop = reinterpret_cast<uint32_t*>(&signals_->stop);
    params.late = reinterpret_cast<uint32_t*>(&signals_->late);
    params.slot_values = kSlotValues;
    params.patience = kPatience;
    params.rank = seat_.rank();
    params.ranks = static_cast<int32_t>(buffers_.size());
    const auto blocks = static_cast<uint32_t>((params.n / 4 + kThreads - 1) / kThreads);
    recorder.launch(kernel, {std::min(blocks, kMostBlocks)}, kThreads, params);
    ++turn_;
  }
}

void PeerSums::check() const {
  if (signals_ != nullptr && signals_->late.load() != 0) throw DeviceError("the other devices did not come to a sum");
}

}  // namespace v100::cuda
