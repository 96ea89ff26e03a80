#include "cuda/backend.h"

#include <charconv>
#include <utility>

#include "base/error.h"
#include "cuda/kernel_archive.h"
#include "cuda/kv.h"
#include "cuda/ops.h"
#include "cuda/weight.h"

namespace v100 {

namespace {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int32_t ordinal)
      : launches_(std::make_shared<const cuda::Launches>(ordinal)), packer_(launches_) {}

  std::string_view name() const override { return "cuda"; }
  std::shared_ptr<const float[]> place(std::span<const float> values) const override { return packer_.place(values); }
  std::shared_ptr<const LinearWeight> pack_linear(QuantType type, int32_t in_features, int32_t out_features,
                                                  const std::byte* rows, ThreadPool& pool, float scale) const override {
    return packer_.pack(type, in_features, out_features, rows, pool, scale);
  }
  size_t packed_bytes(QuantType type, int32_t in_features, int32_t out_features) const override {
    return cuda::weight_bytes(type, in_features, out_features);
  }
  size_t kv_page_bytes(const KvShape& shape) const override { return cuda::checked_page_bytes(shape); }
  std::unique_ptr<Ops> create_ops(const ThreadSettings&, RankSeat seat) const override {
    return std::make_unique<cuda::CudaOps>(launches_, seat);
  }

 private:
  std::shared_ptr<const cuda::Launches> launches_;
  mutable cuda::WeightPacker packer_;
};

// What the driver sees, or why it sees nothing.
std::pair<std::vector<std::string>, std::string> look_for_devices() {
  try {
    if (cuda::KernelArchive::of_this_process() == nullptr) return {{}, "this program was built without CUDA kernels"};
    std::vector<std::string> names;
    for (const cuda::DeviceInfo& info : cuda::list_devices(*cuda::Driver::load())) names.push_back(info.device_name());
    return {names, names.empty() ? "the driver sees no CUDA device" : ""};
  } catch (const Error& error) {
    return {{}, error.what()};
  }
}

}  // namespace

std::vector<std::string> available_cuda_devices() { return look_for_devices().first; }

std::string no_cuda_devices_reason() { return look_for_devices().second; }

std::optional<int32_t> cuda_ordinal(std::string_view device) {
  constexpr std::string_view kPrefix = "CUDA";
  if (!device.starts_with(kPrefix)) return std::nullopt;
  int32_t ordinal = -1;
  const char *first = device.data() + kPrefix.size(), *last = device.data() + device.size();
  const auto [end, problem] = std::from_chars(first, last, ordinal);
  if (problem != std::errc() || end != last || ordinal < 0) return std::nullopt;
  return ordinal;
}

std::unique_ptr<Backend> create_cuda_backend(int32_t ordinal) { return std::make_unique<CudaBackend>(ordinal); }

}  // namespace v100
