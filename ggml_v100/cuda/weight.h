// A linear layer's weights on a device, and the packing that brings them there.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/thread_pool.h"
#include "cuda/slabs.h"
#include "ops/ops.h"

namespace v100::cuda {

// A type whose blocks the kernels read (kernels/codecs.cuh).
struct Codec {
  QuantType type;
  std::string_view name;  // of the codec: kernel repack_NAME
  std::string_view unit;  // of the kernel units: linear_UNIT
};

// nullptr: the type has none.
const Codec* find_codec(QuantType type);

// How a matrix of a type lies on the device.
enum class WeightForm {
  records,    // as in the file, its blocks rearranged
  converted,  // records of F16: BF16, and types without a codec
  floats,     // f32 [out, in]: F32, and plain types whose rows are no whole blocks
};
WeightForm weight_form(QuantType type, int32_t in_features);
// Bytes of it there.
size_t weight_bytes(QuantType type, int32_t in_features, int32_t out_features);

class DeviceWeight final : public LinearWeight {
 public:
  DeviceWeight(QuantType type, int32_t in_features, int32_t out_features, float scale, const Codec* codec,
               float stored_scale, std::shared_ptr<const std::byte> data, size_t bytes)
      : LinearWeight(type, in_features, out_features, scale),
        codec_(codec),
        product_scale_(scale * stored_scale),
        data_(std::move(data)),
        bytes_(bytes) {}
  size_t bytes() const override { return bytes_; }

  const Codec* codec() const { return codec_; }  // nullptr: floats
  CUdeviceptr address() const { return address_of(data_.get()); }
  // What the product of the stored values is multiplied by: LinearWeight::scale times the power of two of converted ones.
  float product_scale() const { return product_scale_; }
  int32_t tiles() const { return (out_features + 31) / 32; }

 private:
  const Codec* codec_;
  float product_scale_;
  std::shared_ptr<const std::byte> data_;
  size_t bytes_;
};

inline const DeviceWeight& device_weight(const LinearWeight& weight) {
  return static_cast<const DeviceWeight&>(weight);
}

// Brings weights of one device there, a piece of the file being read while the one before is on its way.
class WeightPacker {
 public:
  explicit WeightPacker(std::shared_ptr<const Launches> launches);

  // As Backend::pack_linear.
  std::shared_ptr<const DeviceWeight> pack(QuantType type, int32_t in_features, int32_t out_features,
                                           const std::byte* rows, ThreadPool& pool, float scale);
  std::shared_ptr<const float[]> place(std::span<const float> values);

 private:
  // Host memory that a piece is gathered in, and device memory where it waits for being rearranged.
  struct Piece {
    PinnedMemory host;
    DeviceMemory device;
    Event used;
    bool is_used = false;
  };
  Piece& next_piece(size_t bytes);
  // source(first row, rows, to): the matrix in the file layout of the type `repacked_from`, whose blocks have the size of
  // the codec's.
  template <class Source>
  void send_records(const Codec& codec, std::string_view repacked_from, int32_t exponent, int32_t in_features,
                    int32_t out_features, CUdeviceptr to, const Source& source);
  template <class Source>
  void send_floats(int32_t in_features, int32_t out_features, CUdeviceptr to, const Source& source);

  std::shared_ptr<const Launches> launches_;
  std::mutex mutex_;  // models may be loaded from several threads
  Stream stream_;
  Slabs slabs_;
  std::array<std::unique_ptr<Piece>, 2> pieces_;
  size_t turn_ = 0;
};

}  // namespace v100::cuda
