// Types that no kernel reads become F16 times a power of two for the whole matrix, which brings the largest value to
// 2^14..2^15, as bf16_exponent of kernels/params.h says of BF16: nothing overflows, and what is far smaller keeps its bits.
#include "cuda/weight.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/half.h"
#include "cuda/kernels/params.h"
#include "quants/decode.h"

namespace v100::cuda {

namespace {

constexpr std::array kCodecs{
    Codec{QuantType::F16, "F16", "f16"},
    Codec{QuantType::Q8_0, "Q8_0", "q8_0"},
    Codec{QuantType::Q4_0, "Q4_0", "q4_0"},
    Codec{QuantType::Q4_1, "Q4_1", "q4_1"},
    Codec{QuantType::Q5_0, "Q5_0", "q5_0"},
    Codec{QuantType::Q5_1, "Q5_1", "q5_1"},
    Codec{QuantType::Q2_K, "Q2_K", "q2_k"},
    Codec{QuantType::Q3_K, "Q3_K", "q3_k"},
    Codec{QuantType::Q4_K, "Q4_K", "q4_k"},
    Codec{QuantType::Q5_K, "Q5_K", "q5_k"},
    Codec{QuantType::Q6_K, "Q6_K", "q6_k"},
    Codec{QuantType::IQ4_NL, "IQ4_NL", "iq4_nl"},
    Codec{QuantType::IQ4_XS, "IQ4_XS", "iq4_xs"},
    Codec{QuantType::MXFP4, "MXFP4", "mxfp4"},
    Codec{QuantType::NVFP4, "NVFP4", "nvfp4"},
    Codec{QuantType::Q1_0, "Q1_0", "q1_0"},
    Codec{QuantType::Q2_0, "Q2_0", "q2_0"},
    Codec{QuantType::TQ2_0, "TQ2_0", "tq2_0"},
    Codec{QuantType::IQ1_S, "IQ1_S", "iq1_s"},
    Codec{QuantType::IQ1_M, "IQ1_M", "iq1_m"},
    Codec{QuantType::IQ2_XXS, "IQ2_XXS", "iq2_xxs"},
    Codec{QuantType::IQ2_XS, "IQ2_XS", "iq2_xs"},
    Codec{QuantType::IQ2_S, "IQ2_S", "iq2_s"},
    Codec{QuantType::IQ3_XXS, "IQ3_XXS", "iq3_xxs"},
    Codec{QuantType::IQ3_S, "IQ3_S", "iq3_s"},
};
constexpr int32_t kTileRows = 32;
constexpr int32_t kF16Block = 32;  // values of a record of F16 in a row
constexpr size_t kPieceBytes = size_t{8} << 20;
constexpr uint32_t kRepackThreads = 256;

// Values of a block as the kernels see it.
int32_t block_values(const Codec& codec) {
  return codec.type == QuantType::F16 ? kF16Block : traits(codec.type).block_values;
}

size_t record_bytes(const Codec& codec, int32_t in_features, int32_t out_features) {
  const int64_t rows = (int64_t{out_features} + kTileRows - 1) / kTileRows * kTileRows;
  return static_cast<size_t>(rows * row_bytes(traits(codec.type), in_features));
}

// The largest of what most_of(begin, end) finds in each chunk, by all threads; >= 0.
template <class Value, class MostOf>
Value largest_in_parallel(ThreadPool& pool, int64_t count, int64_t chunk, const MostOf& most_of) {
  std::atomic<Value> largest{};
  pool.parallel_for(count, chunk, [&](int64_t begin, int64_t end) {
    const Value mine = most_of(begin, end);
    Value known = largest.load();
    while (mine > known && !largest.compare_exchange_weak(known, mine)) {
    }
  });
  return largest.load();
}

// The power of two that values of BF16 are stored times, as an exponent.
int32_t bf16_exponent_of(int64_t count, const std::byte* values, ThreadPool& pool) {
  constexpr int64_t kChunk = 1 << 20;
  constexpr uint32_t kInfinity = 0x7f80;
  return bf16_exponent(largest_in_parallel<uint32_t>(pool, count, kChunk, [&](int64_t begin, int64_t end) {
    uint32_t mine = 0;
    for (int64_t i = begin; i < end; ++i) {
      uint16_t bits;
      std::memcpy(&bits, values + i * 2, sizeof bits);
      const uint32_t magnitude = bits & 0x7fffu;
      mine = std::max(mine, magnitude < kInfinity ? magnitude : 0);
    }
    return mine;
  }));
}

// The same of values that are decoded first.
int32_t stored_exponent(QuantType type, int64_t row_size, int32_t in_features, int32_t out_features,
                        const std::byte* rows, ThreadPool& pool) {
  const float largest = largest_in_parallel<float>(pool, out_features, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(in_features));
    float mine = 0.0f;
    for (int64_t r = begin; r < end; ++r) {
      decode(type, rows + r * row_size, values.data(), in_features);
      for (const float value : values)
        if (std::isfinite(value)) mine = std::max(mine, std::fabs(value));
    }
    return mine;
  });
  return largest > 0.0f ? std::clamp(14 - std::ilogb(largest), -126, 126) : 0;
}

}  // namespace

const Codec* find_codec(QuantType type) {
  const auto found = std::find_if(kCodecs.begin(), kCodecs.end(), [&](const Codec& c) { return c.type == type; });
  return found == kCodecs.end() ? nullptr : &*found;
}

WeightForm weight_form(QuantType type, int32_t in_features) {
  if (type == QuantType::F32 || in_features % kF16Block != 0) return WeightForm::floats;
  return find_codec(type) != nullptr ? WeightForm::records : WeightForm::converted;
}

size_t weight_bytes(QuantType type, int32_t in_features, int32_t out_features) {
  switch (weight_form(type, in_features)) {
    case WeightForm::records:
      return record_bytes(*find_codec(type), in_features, out_features);
    case WeightForm::converted:
      return record_bytes(*find_codec(QuantType::F16), in_features, out_features);
    case WeightForm::floats:
      break;
  }
  return static_cast<size_t>(in_features) * static_cast<size_t>(out_features) * sizeof(float);
}

WeightPacker::WeightPacker(std::shared_ptr<const Launches> launches)
    : launches_(std::move(launches)), stream_(launches_->device()), slabs_(launches_) {}

WeightPacker::Piece& WeightPacker::next_piece(size_t bytes) {
  std::unique_ptr<Piece>& piece = pieces_[turn_];
  turn_ = 1 - turn_;
  if (piece != nullptr && piece->is_used) piece->used.synchronize();
  if (piece == nullptr || piece->host.bytes() < bytes) {
    const Device& device = launches_->device();
    bytes = std::max(bytes, kPieceBytes);
    piece.reset();
    piece.reset(new Piece{PinnedMemory(device, bytes), DeviceMemory(device, bytes), Event(device)});
  }
  return *piece;
}

template <class Source>
void WeightPacker::send_records(const Codec& codec, std::string_view repacked_from, int32_t exponent,
                                int32_t in_features, int32_t out_features, CUdeviceptr to, const Source& source) {
  const auto row_size = static_cast<size_t>(row_bytes(traits(codec.type), in_features));
  const size_t whole_tiles = static_cast<size_t>(out_features / kTileRows * kTileRows) * row_size;
  // The rest of the last tile is rows of zeros.
  stream_.fill(to + whole_tiles, 0, record_bytes(codec, in_features, out_features) - whole_tiles);
  const Kernel& repack = launches_->kernel("repack", "repack_" + std::string(repacked_from));
  const auto tiles = static_cast<int32_t>(std::max<size_t>(1, kPieceBytes / (row_size * kTileRows)));
  const int32_t blocks = in_features / block_values(codec), most = tiles * kTileRows;
  for (int32_t first = 0; first < out_features; first += most) {
    const int32_t rows = std::min(most, out_features - first);
    const size_t bytes = static_cast<size_t>(rows) * row_size;
    Piece& piece = next_piece(bytes);
    source(first, rows, piece.host.data());
    stream_.copy_to_device(piece.device.address(), piece.host.data(), bytes);
    RepackParams params{};
    params.rows = reinterpret_cast<const uint8_t*>(piece.device.address());
    params.packed = reinterpret_cast<uint8_t*>(to + static_cast<size_t>(first) * row_size);
    params.out_features = rows;
    params.blocks = blocks;
    params.exponent = exponent;
    const auto items = static_cast<uint64_t>(rows) * static_cast<uint64_t>(blocks);
    repack.launch(stream_, {static_cast<uint32_t>((items + kRepackThreads - 1) / kRepackThreads)}, kRepackThreads,
                  params);
    piece.used.record(stream_);
    piece.is_used = true;
  }
}

template <class Source>
void WeightPacker::send_floats(int32_t in_features, int32_t out_features, CUdeviceptr to, const Source& source) {
  const size_t row_size = static_cast<size_t>(in_features) * sizeof(float);
  const auto most = static_cast<int32_t>(std::max<size_t>(1, kPieceBytes / row_size));
  for (int32_t first = 0; first < out_features; first += most) {
    const int32_t rows = std::min(most, out_features - first);
    const size_t bytes = static_cast<size_t>(rows) * row_size;
    Piece& piece = next_piece(bytes);
    source(first, rows, piece.host.data());
    stream_.copy_to_device(to + static_cast<size_t>(first) * row_size, piece.host.data(), bytes);
    piece.used.record(stream_);
    piece.is_used = true;
  }
}

std::shared_ptr<const DeviceWeight> WeightPacker::pack(QuantType type, int32_t in_features, int32_t out_features,
                                                       const std::byte* rows, ThreadPool& pool, float scale) {
  const std::lock_guard lock(mutex_);
  const Device::Guard guard(launches_->device());
  const int64_t row_size = row_bytes(traits(type), in_features);
  const WeightForm form = weight_form(type, in_features);
  const size_t bytes = weight_bytes(type, in_features, out_features);
  const auto data = slabs_.allocate(bytes);
  const Codec* codec = nullptr;
  const auto in_parallel = [&pool](int32_t count, const auto& body) {
    pool.parallel_for(count, std::max<int64_t>(1, count / (pool.active() * 4)), [&](int64_t begin, int64_t end) {
      body(static_cast<int32_t>(begin), static_cast<int32_t>(end));
    });
  };
  const auto file_rows = [&](int32_t first, int32_t count, std::byte* to) {
    in_parallel(count, [&](int32_t begin, int32_t end) {
      std::memcpy(to + begin * row_size, rows + (first + begin) * row_size,
                  static_cast<size_t>((end - begin) * row_size));
    });
  };
  int32_t exponent = 0;  // values are stored times 2^exponent
  switch (form) {
    case WeightForm::records:
      codec = find_codec(type);
      send_records(*codec, codec->name, 0, in_features, out_features, address_of(data.get()), file_rows);
      break;
    case WeightForm::converted:
      codec = find_codec(QuantType::F16);
      if (type == QuantType::BF16) {
        exponent = bf16_exponent_of(int64_t{in_features} * out_features, rows, pool);
        send_records(*codec, "BF16", exponent, in_features, out_features, address_of(data.get()), file_rows);
        break;
      }
      exponent = stored_exponent(type, row_size, in_features, out_features, rows, pool);
      send_records(*codec, codec->name, 0, in_features, out_features, address_of(data.get()),
                   [&](int32_t first, int32_t count, std::byte* to) {
                     const float factor = std::ldexp(1.0f, exponent);
                     in_parallel(count, [&](int32_t begin, int32_t end) {
                       std::vector<float> values(static_cast<size_t>(in_features));
                       std::vector<uint16_t> halves(values.size());
                       for (int32_t r = begin; r < end; ++r) {
                         decode(type, rows + (first + r) * row_size, values.data(), in_features);
                         std::transform(values.begin(), values.end(), halves.begin(),
                                        [factor](float value) { return f16_from_f32(value * factor); });
                         std::memcpy(to + static_cast<size_t>(r) * halves.size() * 2, halves.data(), halves.size() * 2);
                       }
                     });
                   });
      break;
    case WeightForm::floats:
      send_floats(in_features, out_features, address_of(data.get()), [&](int32_t first, int32_t count, std::byte* to) {
        in_parallel(count, [&](int32_t begin, int32_t end) {
          for (int32_t r = begin; r < end; ++r)
            decode(type, rows + (first + r) * row_size, reinterpret_cast<float*>(to) + int64_t{r} * in_features,
                   in_features);
        });
      });
      break;
  }
  stream_.synchronize();
  return std::make_shared<DeviceWeight>(type, in_features, out_features, scale, codec, std::ldexp(1.0f, -exponent),
                                        data, bytes);
}

std::shared_ptr<const float[]> WeightPacker::place(std::span<const float> values) {
  const std::lock_guard lock(mutex_);
  const Device::Guard guard(launches_->device());
  const auto data = slabs_.allocate(values.size_bytes());
  send_floats(1, static_cast<int32_t>(values.size()), address_of(data.get()),
              [values](int32_t first, int32_t count, std::byte* to) {
                std::memcpy(to, values.data() + first, static_cast<size_t>(count) * sizeof(float));
              });
  stream_.synchronize();
  return {data, reinterpret_cast<const float*>(data.get())};
}

}  // namespace v100::cuda
