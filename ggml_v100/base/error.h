// The engine's typed errors. Each maps to one Python class and one HTTP status (pyllama/errors.py, server/errors.py).
// A message says where, what was found, what was expected; never an address or a secret.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace v100 {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class GgufError : public Error {  // the file is not a valid GGUF file
 public:
  using Error::Error;
};

class ModelError : public Error {  // a valid file that is not a usable model
 public:
  using Error::Error;
};

class DeviceError : public Error {  // a device or its driver failed
 public:
  using Error::Error;
};

class OutOfMemory : public Error {
 public:
  using Error::Error;
};

class ContextFull : public Error {  // no KV pages are left for a sequence
 public:
  ContextFull(const std::string& message, int32_t sequence) : Error(message), sequence_(sequence) {}
  int32_t sequence() const noexcept { return sequence_; }

 private:
  int32_t sequence_;
};

class InvalidArgument : public Error {  // a value of the caller is out of range
 public:
  using Error::Error;
};

}  // namespace v100
