// Packing of one file block into a panel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/panel.h"

namespace v100::cpu {

// Writes block number `index` of a row as column c of the panel, which was zero-filled. block_values: of the file type.
void put_block(PanelKind kind, std::byte* panel, int32_t c, int32_t index, const std::byte* block,
               int32_t block_values);

}  // namespace v100::cpu
