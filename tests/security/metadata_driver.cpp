// Looks metadata up as the model loader does, to be compiled with sanitizers.
//
//   metadata_driver FILE [key=int:V|float:V|bool:V|str:V]... -- [KIND:KEY]...
//
// Overrides come first, look-ups after "--". KIND is int, float, bool, string, array_size, ints<N>, require_int,
// require_float, require_string or has. One line per look-up: the value, "absent", or "ModelError: ...".
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "gguf/metadata.h"

namespace {

std::string text(int64_t value) { return std::to_string(value); }
std::string text(uint64_t value) { return std::to_string(value); }
std::string text(double value) { return std::to_string(value); }
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(const std::string& value) { return value; }
std::string text(const std::vector<int64_t>& values) {
  std::string joined;
  for (const int64_t value : values) joined += (joined.empty() ? "" : " ") + std::to_string(value);
  return joined;
}
template <class T>
std::string text(const std::optional<T>& value) {
  return value ? text(*value) : "absent";
}

std::string look_up(const v100::Metadata& metadata, const std::string& kind, const std::string& key) {
  if (kind == "int") return text(metadata.find_int(key));
  if (kind == "float") return text(metadata.find_float(key));
  if (kind == "bool") return text(metadata.find_bool(key));
  if (kind == "string") return text(metadata.find_string(key));
  if (kind == "array_size") return text(metadata.find_array_size(key));
  if (kind == "require_int") return text(metadata.require_int(key));
  if (kind == "require_float") return text(metadata.require_float(key));
  if (kind == "require_string") return text(metadata.require_string(key));
  if (kind == "has") return text(metadata.has(key));
  if (kind.starts_with("ints")) return text(metadata.find_ints(key, std::stoi(kind.substr(4))));
  throw std::runtime_error("unknown kind of look-up: " + kind);
}

v100::MetadataOverride parse_override(const std::string& typed) {
  const size_t colon = typed.find(':');
  const std::string type = typed.substr(0, colon), value = typed.substr(colon + 1);
  if (type == "int") return static_cast<int64_t>(std::stoll(value));
  if (type == "float") return std::stod(value);
  if (type == "bool") return value == "true";
  if (type == "str") return value;
  throw std::runtime_error("unknown type of override: " + type);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 2) throw std::runtime_error("usage: metadata_driver FILE [OVERRIDE]... -- [KIND:KEY]...");
    v100::MetadataOverrides overrides;
    int at = 2;
    for (; at < argc && std::string(argv[at]) != "--"; ++at) {
      const std::string argument = argv[at];
      const size_t equals = argument.find('=');
      overrides[argument.substr(0, equals)] = parse_override(argument.substr(equals + 1));
    }
    const v100::Metadata metadata(v100::GgufFile::open(argv[1]), overrides);
    for (++at; at < argc; ++at) {
      const std::string query = argv[at];
      const size_t colon = query.find(':');
      try {
        std::puts(look_up(metadata, query.substr(0, colon), query.substr(colon + 1)).c_str());
      } catch (const v100::ModelError& error) {
        std::printf("ModelError: %s\n", error.what());
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "metadata_driver: %s\n", error.what());
    return 1;
  }
  return 0;
}
