// Access to what pages and state slots hold, wherever that lies: bytes out to host memory, bytes in from it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/kv.h"

namespace v100 {

class SequenceBytes {
 public:
  virtual ~SequenceBytes() = default;
  virtual size_t page_bytes() const = 0;         // all layers but those below
  virtual size_t window_page_bytes() const = 0;  // layers that have pages of their own, kept within a window; or 0
  virtual size_t state_bytes() const = 0;        // all records of a slot; 0: sequences have no recurrent state
  virtual void read_page(PageId page, std::byte* to) const = 0;
  virtual void write_page(PageId page, const std::byte* from) const = 0;
  virtual void read_window_page(PageId page, std::byte* to) const = 0;
  virtual void write_window_page(PageId page, const std::byte* from) const = 0;
  virtual void read_state(int32_t slot, std::byte* to) const = 0;
  virtual void write_state(int32_t slot, const std::byte* from) const = 0;
};

}  // namespace v100
