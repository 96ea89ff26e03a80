// Work in order on a device, and marks in it.
#pragma once

#include <cstddef>

#include "cuda/device.h"

namespace v100::cuda {

class Stream;

class Event {
 public:
  explicit Event(const Device& device, bool has_time = false);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const Stream& stream);
  void synchronize() const;  // waits on the host; throws what failed on the device before the mark
  bool is_done() const;
  // Both with has_time, both done.
  float milliseconds_since(const Event& begin) const;
  CUevent handle() const { return event_; }

 private:
  const Device& device_;
  CUevent event_ = nullptr;
};

class Stream {
 public:
  explicit Stream(const Device& device);  // does not wait for the default stream
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const Device& device() const { return device_; }
  CUstream handle() const { return stream_; }

  void synchronize() const;  // waits on the host; throws what failed on the device
  void wait(const Event& event) const;

  // Host memory must stay as it is until the copy is done; pinned memory makes the call return at once.
  void copy_to_device(CUdeviceptr to, const void* from, size_t bytes) const;
  void copy_to_host(void* to, CUdeviceptr from, size_t bytes) const;
  void copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) const;
  void fill(CUdeviceptr to, unsigned char value, size_t bytes) const;

 private:
  const Device& device_;
  CUstream stream_ = nullptr;
};

}  // namespace v100::cuda
