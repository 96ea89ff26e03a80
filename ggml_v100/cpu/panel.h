// Memory layouts shared by the packing code and the kernels of every instruction set.
//
// A panel is 16 output columns (rows of W), K-major: one vector lane per column. Each output element is summed by one
// lane in order of k, so the bits do not depend on the number of rows, threads or the vector width.
//
// Quantised panels are a sequence of cells. Codes are unsigned 8-bit numbers q + bias (or table indices) in turns of 4
// values of k by 16 columns (64 bytes: byte 4 * column + k % 4), the order of a 4-way byte dot product. Per block of 32
// values of k there are 8 turns, g = 0..7:
//   bytes        512 bytes: turn 0..7
//   nibbles      256 bytes: vector v = 0..3 holds turn v in the low and turn v + 4 in the high nibbles
//   bit plane     64 bytes: bit g of a byte is one bit of the code of turn g
//   crumbs       128 bytes: bits 2 (g % 4) and up of plane g / 4 are two bits of the code of turn g
// A byte of each column takes 16 bytes, an f16 number of each column 32.
//   six-bit pairs  12 x 16 bytes: numbers a_j and b_j of 6 bits for j = 0..7; their low nibbles are byte j (a in its low
//                  half), their upper two bits nibble j % 2 of byte 8 + j / 2 (a in its low half)
// The codebook formats keep the bytes of the file, transposed: byte i of a block of each column at 16 i; but d comes first
// as f16 numbers.
// Columns past out_features are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace v100::cpu {

inline constexpr int32_t kPanelColumns = 16;
inline constexpr int32_t kBlockValues = 32;  // values of an activation block

// The kinds of quantised panels, in the order of the kernel tables.
// clang-format off
enum class PanelKind : int32_t {
  // Codes are unpacked in registers.
  q8_0, q4_0, q4_1, q5_0, q5_1, q2_K, q3_K, q4_K, q5_K, q6_K, iq4_nl, iq4_xs, mxfp4, nvfp4, q1_0, q2_0, tq2_0,
  // Panels are expanded in memory first.
  tq1_0, iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s,
};
// clang-format on
inline constexpr int32_t kPanelKinds = 25;

struct PanelFormat {
  int32_t cell_values;  // values of k per cell
  int32_t cell_bytes;
  int32_t group;         // values of k per scale: 32 or 16
  int32_t largest_code;  // 15, 31, 63 or 255: what sums of products may be held in
  int32_t bias;          // what the codes have been raised by
  bool has_minimum;
};

inline constexpr PanelFormat kPanelFormats[kPanelKinds] = {
    {64, 64 + 2 * 512, 32, 255, 128, false},             // q8_0: d[block 0], d[block 1], bytes of both blocks
    {64, 64 + 2 * 256, 32, 15, 8, false},                // q4_0: d[2], nibbles of both
    {32, 64 + 256, 32, 15, 0, true},                     // q4_1: d, m, nibbles
    {64, 64 + 2 * (64 + 256), 32, 31, 16, false},        // q5_0: d[2], then per block bit plane (bit 4), nibbles
    {32, 64 + 64 + 256, 32, 31, 0, true},                // q5_1: d, m, bit plane, nibbles
    {256, 64 + 256 + 8 * 128, 16, 15, 0, true},          // q2_K: d, dmin, scale bytes [16], crumbs of 8 blocks
    {256, 64 + 192 + 8 * (64 + 128), 16, 15, 4, false},  // q3_K: d, 32 unused, six-bit pairs (scales 2 j, 2 j + 1),
                                                         // 8 x (bit plane (bit 2), crumbs)
    {256, 64 + 192 + 8 * 256, 32, 15, 0, true},          // q4_K: d, dmin, six-bit pairs (scale, minimum), nibbles of 8
    {256, 64 + 192 + 8 * (64 + 256), 32, 31, 0, true},   // q5_K: same, 8 x (bit plane, nibbles)
    {256, 64 + 256 + 8 * (128 + 256), 16, 63, 32, false},  // q6_K: d, 32 unused, scales i8 [16], 8 x (crumbs, nibbles)
    {64, 64 + 2 * 256, 32, 255, 128, false},               // iq4_nl: d[2], nibbles of both: indices of levels
    {256, 32 + 32 + 64 + 8 * 256, 32, 255, 128, false},  // iq4_xs: d, upper scale bits [2], scale nibbles [4], nibbles
    {128, 64 + 4 * 256, 32, 31, 12, false},              // mxfp4: e[4], nibbles of 4 blocks: indices of levels
    {64, 64 + 2 * 256, 16, 31, 12, false},               // nvfp4: s[4], nibbles of 2 blocks: indices of levels
    {256, 64 + 8 * 64, 32, 15, 1, false},                // q1_0: d[2], bit planes of 8 blocks (bit 1)
    {128, 64 + 4 * 128, 32, 15, 1, false},               // q2_0: d[2], crumbs of 4 blocks
    {512, 64 + 16 * 128, 32, 15, 1, false},              // tq2_0: d[2], crumbs of 16 blocks
    {256, 32 + 13 * 64, 32, 15, 1, false},               // tq1_0: d, the block's bytes 0..51 in turns
    {256, 16 * 50, 32, 31, 9, false},                    // iq1_s: transposed, like most below; codes are of 8 q
    {256, 16 * 56, 16, 31, 9, false},                    // iq1_m: d, upper scale bits [2], scale nibbles [4] (scales in
                                                         // pairs), bytes 0..47 transposed
    {256, 16 * 66, 32, 255, 128, false},                 // iq2_xxs
    {256, 16 * 74, 16, 255, 128, false},                 // iq2_xs
    {256, 16 * 82, 16, 255, 128, false},                 // iq2_s
    {256, 16 * 98, 32, 255, 128, false},                 // iq3_xxs
    {256, 16 * 110, 32, 255, 128, false},                // iq3_s
};

inline constexpr const PanelFormat& panel_format(PanelKind kind) { return kPanelFormats[static_cast<int32_t>(kind)]; }

// Bytes of one panel of n_values of k; a part-used last cell counts whole.
inline constexpr int64_t panel_bytes(const PanelFormat& f, int32_t n_values) {
  return int64_t{(n_values + f.cell_values - 1) / f.cell_values} * f.cell_bytes;
}

// A block of 32 values of a panel, unpacked. [1]: of the last 16 values where the group is 16, else unused.
struct ExpandedBlock {
  float scale[2][kPanelColumns];
  float minimum[2][kPanelColumns];
  uint8_t codes[8][4 * kPanelColumns];
};
static_assert(sizeof(ExpandedBlock) == 768);

// 32 rounded activations of one row. The blocks of a tile of R rows are stored [block][row]. A sum is of the whole block,
// or of each half where the group is 16.
struct ActivationBlock {
  int8_t p[32];
  float scale;  // dx
  union {
    float sum[2];         // kinds with a minimum: Sg = dx * sum of p
    int32_t bias_sum[2];  // kinds with a bias: -bias * sum of p
  };
};
static_assert(sizeof(ActivationBlock) == 44);

// Dense panels (f32, f16, bf16): four panels side by side, [k][64 columns] (fewer in the last group), so that one
// sequential stream feeds four independent sums.
inline constexpr int32_t kGroupPanels = 4;
inline constexpr int32_t kGroupColumns = kGroupPanels * kPanelColumns;

}  // namespace v100::cpu
