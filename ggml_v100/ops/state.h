// Recurrent state: what a layer carries from one token to the next beside the KV pages.
//
// A model has a list of records (histories of convolutions, memories of delta nets). A slot holds one of each; sequences
// own slots (memory/state_pool.h). A record is read at SequenceRows::state_from and written at state_to.
#pragma once

#include <cstdint>

#include "ops/kv.h"

namespace v100 {

struct StateShape {
  int64_t values = 0;  // f32
};

// One record in every slot: that of slot s begins at base + s * stride.
struct StateRecords {
  float* base = nullptr;
  int64_t stride = 0;  // values

  // nullptr for slot -1.
  float* at(int32_t slot) const { return slot < 0 ? nullptr : base + slot * stride; }
};

}  // namespace v100
