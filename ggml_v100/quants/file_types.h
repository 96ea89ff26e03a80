// `general.file_type`: what a file's mixture of tensor types is called.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "quants/types.h"

namespace v100 {

// "Q4_K - Medium"; "unknown, may not work" for ids that are unknown or retired.
std::string_view file_type_label(int64_t file_type);

// The id of the mixture named after the most frequent type (of equally frequent ones, that whose last tensor comes
// first); 0 (all F32) when no mixture is.
int32_t guess_file_type(std::span<const QuantType> tensor_types);

// Label of a model: of `file_type` when the file has that key, else of the guess, prefixed "(guessed) ".
std::string describe_file_type(std::optional<int64_t> file_type, std::span<const QuantType> tensor_types);

}  // namespace v100
