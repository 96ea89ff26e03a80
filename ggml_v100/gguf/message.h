// Text of error messages: names from a file may hold any bytes and any length, a message may not.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace v100 {

// 'name' in quotes: printable ASCII as it is, other bytes as \xNN, cut after 96 bytes.
std::string quoted(std::string_view name);

namespace message_parts {
inline std::string text_of(std::string_view part) { return std::string(part); }
template <std::integral T>
std::string text_of(T number) {
  return std::to_string(number);
}
}  // namespace message_parts

// The parts, texts and integers, one after the other.
template <class... Parts>
std::string message(const Parts&... parts) {
  return (std::string() + ... + message_parts::text_of(parts));
}

}  // namespace v100
