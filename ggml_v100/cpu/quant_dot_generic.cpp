// Integer dot products of quantised panels in plain C++.
//
// What      y[row][16] = panel [K, 16] . row of rounded activations, for R = 1..4 rows in one pass over the panel
// Layout    panel.h; a block is unpacked to 16-bit codes in the order of its turns, [8 groups][16 columns x 4 values]
// Numerics  as the vector versions. Codes below 64 are summed in 16 bits over at most half a block of 6-bit codes
//           (63 * 127 * 4 = 32004) or a block of 5-bit codes (31 * 127 * 8 = 31496); 8-bit codes in 32 bits
// Bound     multiplies of 16-bit lanes that the compiler finds (SSE2, NEON, VSX)
#include "base/half.h"
#include "cpu/kernels.h"
#include "cpu/lanes_generic.h"

namespace v100::cpu {

namespace {

constexpr int kTileRows = 4;

// A block of 32 values of 16 columns, unpacked.
struct PanelBlock {
  int16_t codes[8][64];
  float scale[2][16];  // [1]: of the last 16 values, q6_K
  float minimum[16];
};

inline int32_t byte_of(const std::byte* p) { return static_cast<int32_t>(*p); }

inline void read_halves(const std::byte* p, float* values) {
  for (int c = 0; c < 16; ++c)
    values[c] = f32_from_f16(static_cast<uint16_t>(byte_of(p + 2 * c) | byte_of(p + 2 * c + 1) << 8));
}

inline void read_codes(const std::byte* p, PanelBlock& b) {
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 64; ++i) b.codes[g][i] = static_cast<int16_t>(p[64 * g + i]);
}

inline void read_nibbles(const std::byte* p, PanelBlock& b) {
  for (int g = 0; g < 4; ++g)
    for (int i = 0; i < 64; ++i) {
      const auto packed = static_cast<uint8_t>(p[64 * g + i]);
      b.codes[g][i] = static_cast<int16_t>(packed & 15);
      b.codes[g + 4][i] = static_cast<int16_t>(packed >> 4);
    }
}

inline void add_bit_plane(const std::byte* p, PanelBlock& b) {
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 64; ++i)
      b.codes[g][i] = static_cast<int16_t>(b.codes[g][i] | (static_cast<uint8_t>(p[i]) >> g & 1) << 4);
}

inline void add_crumbs(const std::byte* p, PanelBlock& b) {
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 64; ++i)
      b.codes[g][i] =
          static_cast<int16_t>(b.codes[g][i] | (static_cast<uint8_t>(p[g / 4 * 64 + i]) >> (g % 4 * 2) & 3) << 4);
}

struct Q8_0 {
  using Sum = int32_t;
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false;
  static void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block / 2) * 1088;
    read_halves(cell + block % 2 * 32, b.scale[0]);
    read_codes(cell + 64 + block % 2 * 512, b);
  }
};

struct Q4_0 {
  using Sum = int16_t;
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false;
  static void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block / 2) * 576;
    read_halves(cell + block % 2 * 32, b.scale[0]);
    read_nibbles(cell + 64 + block % 2 * 256, b);
  }
};

struct Q4_1 {
  using Sum = int16_t;
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false;
  static void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block) * 320;
    read_halves(cell, b.scale[0]);
    read_halves(cell + 32, b.minimum);
    read_nibbles(cell + 64, b);
  }
};

struct Q5_0 {
  using Sum = int16_t;
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = false;
  static void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block / 2) * 704;
    read_halves(cell + block % 2 * 32, b.scale[0]);
    read_nibbles(cell + 64 + block % 2 * 320 + 64, b);
    add_bit_plane(cell + 64 + block % 2 * 320, b);
  }
};

struct Q5_1 {
  using Sum = int16_t;
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false;
  static void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block) * 384;
    read_halves(cell, b.scale[0]);
    read_halves(cell + 32, b.minimum);
    read_nibbles(cell + 128, b);
    add_bit_plane(cell + 64, b);
  }
};

struct Q4_K {
  using Sum = int16_t;
  static constexpr bool kBias = false, kMinimum = true, kTwoScales = false;
  static void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block / 8) * 2304;
    const int32_t j = block % 8;
    float d[16], dmin[16];
    read_halves(cell, d);
    read_halves(cell + 32, dmin);
    for (int c = 0; c < 16; ++c) {
      const auto packed = [&](int32_t i) { return byte_of(cell + 64 + 16 * i + c); };
      const int32_t scale = j < 4 ? packed(j) & 63 : (packed(j + 4) & 15) | (packed(j - 4) >> 6) << 4;
      const int32_t minimum = j < 4 ? packed(j + 4) & 63 : packed(j + 4) >> 4 | (packed(j) >> 6) << 4;
      b.scale[0][c] = d[c] * static_cast<float>(scale);
      b.minimum[c] = -(dmin[c] * static_cast<float>(minimum));
    }
    read_nibbles(cell + 256 + j * 256, b);
  }
};

struct Q6_K {
  using Sum = int16_t;
  static constexpr bool kBias = true, kMinimum = false, kTwoScales = true;
  static void read(const std::byte* panel, int32_t block, PanelBlock& b) {
    const std::byte* cell = panel + static_cast<int64_t>(block / 8) * 3392;
    const int32_t j = block % 8;
    float d[16];
    read_halves(cell, d);
    for (int half = 0; half < 2; ++half)
      for (int c = 0; c < 16; ++c)
        b.scale[half][c] = d[c] * static_cast<float>(static_cast<int8_t>(byte_of(cell + 64 + 32 * j + 16 * half + c)));
    read_nibbles(cell + 320 + j * 384 + 128, b);
    add_crumbs(cell + 320 + j * 384, b);
  }
};

// totals[column] += codes . activations of groups [first, first + count); pattern: a group's 4 activations twice.
template <class Sum>
inline void add_groups(const int16_t (*codes)[64], const int16_t (*pattern)[8], int first, int count, int32_t* totals) {
  Sum sums[64] = {};
  for (int g = first; g < first + count; ++g)
    for (int i = 0; i < 64; i += 8)
      for (int j = 0; j < 8; ++j)
        sums[i + j] = static_cast<Sum>(sums[i + j] + static_cast<int16_t>(codes[g][i + j] * pattern[g][j]));
  for (int c = 0; c < 16; ++c)
    for (int t = 0; t < 4; ++t) totals[c] += sums[4 * c + t];
}

template <class Codec>
void dot_tile(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, int32_t rows, float* y,
              int64_t y_stride) {
  constexpr int kParts = Codec::kTwoScales ? 2 : 1;
  constexpr int kGroups = 8 / kParts;
  float sums[kTileRows][16] = {};
  PanelBlock b;
  for (int32_t block = 0; block < n_blocks; ++block, tile += rows) {
    Codec::read(panel, block, b);
    for (int32_t r = 0; r < rows; ++r) {
      const ActivationBlock& row = tile[r];
      int16_t pattern[8][8];
      for (int g = 0; g < 8; ++g)
        for (int j = 0; j < 8; ++j) pattern[g][j] = row.p[4 * g + j % 4];
      for (int part = 0; part < kParts; ++part) {
        int32_t totals[16];
        for (int c = 0; c < 16; ++c) totals[c] = !Codec::kBias ? 0 : part == 0 ? row.bias_sum : row.bias_sum_second;
        add_groups<typename Codec::Sum>(b.codes, pattern, part * kGroups, kGroups, totals);
        float scales[16], values[16];
        for (int c = 0; c < 16; ++c)
          scales[c] = b.scale[part][c] * row.scale, values[c] = static_cast<float>(totals[c]);
        fuse_16(scales, values, sums[r]);
      }
      if constexpr (Codec::kMinimum) {
        const Lanes block_sum = splat(row.sum);
        fuse_16(b.minimum, block_sum.v, sums[r]);
      }
    }
  }
  for (int32_t r = 0; r < rows; ++r)
    for (int c = 0; c < 16; ++c) y[r * y_stride + c] = sums[r][c];
}

}  // namespace

// In the order of PanelKind.
constinit const QuantKernels kGenericQuantKernels{
    .tile_rows = kTileRows,
    .dot = {dot_tile<Q8_0>, dot_tile<Q4_0>, dot_tile<Q4_1>, dot_tile<Q5_0>, dot_tile<Q5_1>, dot_tile<Q4_K>,
            dot_tile<Q6_K>},
};

}  // namespace v100::cpu
