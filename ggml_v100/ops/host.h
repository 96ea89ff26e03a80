// What operations and backends on host memory share: tensors, pages and states are ordinary memory there.
#pragma once

#include "ops/ops.h"

namespace v100 {

class HostOps : public Ops {
 public:
  void read(Tensor x, std::span<float> destination) final;
  Tensor on_host(Tensor x) final { return x; }
  RopeTable place_angles(const RopeTable& table) final { return table; }
  std::shared_ptr<std::byte[]> allocate(size_t bytes) final;  // touched lazily
  void copy_bytes(const std::byte* from, std::byte* to, size_t bytes) final;
  void read_bytes(const std::byte* from, std::byte* host, size_t bytes) final { copy_bytes(from, host, bytes); }
  void write_bytes(const std::byte* host, std::byte* to, size_t bytes) final { copy_bytes(host, to, bytes); }
};

class HostBackend : public Backend {
 public:
  std::shared_ptr<const float[]> place(std::span<const float> values) const final;
};

}  // namespace v100
