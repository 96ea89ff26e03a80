// Quoting of names in messages.
#include "gguf/message.h"

#include <cstddef>

namespace v100 {

std::string quoted(std::string_view name) {
  constexpr size_t kLongest = 96;
  constexpr char kHex[] = "0123456789abcdef";
  std::string text = "'";
  for (const char c : name.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F) {
      if (c == '\\' || c == '\'') text += '\\';
      text += c;
    } else {
      text += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  text += '\'';
  if (name.size() > kLongest) text += "... (" + std::to_string(name.size()) + " bytes)";
  return text;
}

}  // namespace v100
