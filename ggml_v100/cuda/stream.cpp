#include "cuda/stream.h"

namespace v100::cuda {

namespace {
constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
}  // namespace

Event::Event(const Device& device, bool has_time) : device_(device) {
  const Device::Guard guard(device);
  device.check(device.api().cuEventCreate(&event_, has_time ? 0 : kDisableTiming), "making an event");
}

Event::~Event() {
  const Device::Guard guard(device_);
  (void)device_.api().cuEventDestroy(event_);
}

void Event::record(const Stream& stream) {
  device_.check(device_.api().cuEventRecord(event_, stream.handle()), "recording an event");
}

void Event::synchronize() const { device_.check(device_.api().cuEventSynchronize(event_), "waiting for an event"); }

bool Event::is_done() const {
  const CUresult result = device_.api().cuEventQuery(event_);
  if (result == kCudaNotReady) return false;
  device_.check(result, "asking for an event");
  return true;
}

float Event::milliseconds_since(const Event& begin) const {
  float milliseconds = 0;
  device_.check(device_.api().cuEventElapsedTime(&milliseconds, begin.event_, event_), "timing");
  return milliseconds;
}

Stream::Stream(const Device& device) : device_(device) {
  const Device::Guard guard(device);
  device.check(device.api().cuStreamCreate(&stream_, kNonBlocking), "making a stream");
}

Stream::~Stream() {
  const Device::Guard guard(device_);
  (void)device_.api().cuStreamDestroy(stream_);
}

void Stream::synchronize() const { device_.check(device_.api().cuStreamSynchronize(stream_), "waiting for a stream"); }

void Stream::wait(const Event& event) const {
  device_.check(device_.api().cuStreamWaitEvent(stream_, event.handle(), 0), "waiting for an event in a stream");
}

void Stream::copy_to_device(CUdeviceptr to, const void* from, size_t bytes) const {
  device_.check(device_.api().cuMemcpyHtoDAsync(to, from, bytes, stream_), "copying to the device");
}

void Stream::copy_to_host(void* to, CUdeviceptr from, size_t bytes) const {
  device_.check(device_.api().cuMemcpyDtoHAsync(to, from, bytes, stream_), "copying to the host");
}

void Stream::copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) const {
  device_.check(device_.api().cuMemcpyDtoDAsync(to, from, bytes, stream_), "copying on the device");
}

void Stream::fill(CUdeviceptr to, unsigned char value, size_t bytes) const {
  device_.check(device_.api().cuMemsetD8Async(to, value, bytes, stream_), "filling memory");
}

}  // namespace v100::cuda
