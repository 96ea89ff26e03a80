// Memory layouts shared by the packing code and the kernels of every instruction set.
//
// A panel is 16 output columns (rows of W), K-major: one vector lane per column. Each output element is summed by one
// lane in order of k, so the bits do not depend on the number of rows, threads or the vector width.
//
// Quantised panels are a sequence of cells; a cell's size is a multiple of 64 bytes. Codes are unsigned 8-bit numbers
// q + bias in turns of 4 values of k by 16 columns (64 bytes: byte 4 * column + k % 4), the order of a 4-way byte dot
// product. Per block of 32 values of k ("group" g = k / 4, 0..7):
//   8-bit codes  512 bytes: group 0..7
//   nibbles      256 bytes: vector v = 0..3 holds group v in the low and group v + 4 in the high nibbles
//   bit plane     64 bytes: bit g of a byte is the highest bit of the code of group g
//   crumbs       128 bytes: bits 2 (g % 4) and up of plane g / 4 are two bits of the code of group g (its bits 4 and 5
//                in q6_K, its lowest in q2_K and q3_K)
// Columns past out_features are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace v100::cpu {

inline constexpr int32_t kPanelColumns = 16;
inline constexpr int32_t kBlockValues = 32;  // values of an activation block

// The kinds of quantised panels, in the order of the kernel tables. The bias is what the codes have been raised by.
enum class PanelKind : int32_t { q8_0, q4_0, q4_1, q5_0, q5_1, q4_K, q6_K };
inline constexpr int32_t kPanelKinds = 7;

// f16 vectors of 16 columns take 32 bytes. d: scale, m: minimum.
struct PanelFormat {
  int32_t cell_values;  // values of k per cell
  int32_t cell_bytes;
  int32_t bias;
};

inline constexpr PanelFormat kPanelFormats[kPanelKinds] = {
    {64, 64 + 2 * 512, 128},        // q8_0: d[block 0], d[block 1], codes of both blocks
    {64, 64 + 2 * 256, 8},          // q4_0: d[0], d[1], nibbles of both
    {32, 64 + 256, 0},              // q4_1: d, m, nibbles
    {64, 64 + 2 * (64 + 256), 16},  // q5_0: d[0], d[1], then per block bit plane, nibbles
    {32, 64 + 64 + 256, 0},         // q5_1: d, m, bit plane, nibbles
    {256, 64 + 192 + 8 * 256, 0},   // q4_K: d, dmin, packed scale bytes 0..11 [12][16 columns], nibbles of 8 blocks
    {256, 64 + 256 + 8 * (128 + 256),
     32},  // q6_K: d, unused 32 bytes, scales i8 [16][16 columns], 8 x (crumbs, nibbles)
};

inline constexpr const PanelFormat& panel_format(PanelKind kind) { return kPanelFormats[static_cast<int32_t>(kind)]; }

// The kinds of coded panels: types without an integer path, whose values are worked out in registers as
// scale * q (- minimum), in the order of operations of quants/decode. Cells as above; codes may be table indices.
enum class CodedKind : int32_t { q2_K, q3_K, q5_K, iq4_nl, iq4_xs, mxfp4 };
inline constexpr int32_t kCodedKinds = 6;

inline constexpr PanelFormat kCodedFormats[kCodedKinds] = {
    {256, 64 + 256 + 8 * 128, 0},         // q2_K: d, dmin, scale bytes [16][16 columns], crumbs of 8 blocks
    {256, 64 + 256 + 8 * (64 + 128), 0},  // q3_K: d, unused 32, scales i8 [16][16], 8 x (bit plane, crumbs)
    {256, 64 + 256 + 8 * (64 + 256),
     0},                           // q5_K: d, dmin, scales u8 [8][16], minimums u8 [8][16], 8 x (bit plane, nibbles)
    {64, 64 + 2 * 256, 0},         // iq4_nl: d[block 0], d[block 1], nibbles of both
    {256, 64 + 128 + 8 * 256, 0},  // iq4_xs: d, unused 32, scales i8 [8][16], nibbles of 8 blocks
    {64, 64 + 2 * 256, 0},         // mxfp4: scales as bf16 [block 0], [block 1], nibbles of both
};

// Bytes of one panel of n_values of k; a half-used last cell counts whole.
inline constexpr int64_t cells_bytes(const PanelFormat& f, int32_t n_values) {
  return int64_t{(n_values + f.cell_values - 1) / f.cell_values} * f.cell_bytes;
}

// 32 rounded activations of one row. The blocks of a tile of R rows are stored [block][row].
struct ActivationBlock {
  int8_t p[32];
  float scale;              // dx
  float sum;                // S = dx * sum of p
  int32_t bias_sum;         // -bias * sum of p; of the first 16 for q6_K
  int32_t bias_sum_second;  // -bias * sum of the last 16, q6_K only
};
static_assert(sizeof(ActivationBlock) == 48);

// Dense panels (f32, f16, bf16): four panels side by side, [k][64 columns] (fewer in the last group), so that one
// sequential stream feeds four independent sums.
inline constexpr int32_t kGroupPanels = 4;
inline constexpr int32_t kGroupColumns = kGroupPanels * kPanelColumns;

}  // namespace v100::cpu
