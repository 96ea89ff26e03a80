// Look-up of `<architecture>.*` keys.
#include "model/keys.h"

#include <cmath>

#include "base/error.h"

namespace v100 {

int32_t Keys::check(const std::string& name, int64_t value, int64_t low, int64_t high) const {
  if (value < low || value > high)
    throw ModelError(full(name) + " is " + std::to_string(value) + ", expected " + std::to_string(low) + " to " +
                     std::to_string(high));
  return static_cast<int32_t>(value);
}

int32_t Keys::required(const std::string& name, int64_t low, int64_t high) const {
  return check(name, metadata_.require_int(full(name)), low, high);
}

int32_t Keys::optional(const std::string& name, int64_t missing, int64_t low, int64_t high) const {
  return check(name, metadata_.find_int(full(name)).value_or(missing), low, high);
}

std::vector<int32_t> Keys::per_layer(const std::string& name, int32_t layers, const std::vector<int32_t>& missing,
                                     int64_t low, int64_t high) const {
  const auto values = metadata_.find_ints(full(name), layers);
  if (!values) return missing;
  std::vector<int32_t> checked;
  for (const int64_t value : *values) checked.push_back(check(name, value, low, high));
  return checked;
}

double Keys::real(const std::string& name, double missing) const {
  const double value = metadata_.find_float(full(name)).value_or(missing);
  if (!std::isfinite(value)) throw ModelError(full(name) + " is not a finite number");
  return value;
}

double Keys::required_real(const std::string& name) const {
  metadata_.require_float(full(name));
  return real(name, 0);
}

}  // namespace v100
