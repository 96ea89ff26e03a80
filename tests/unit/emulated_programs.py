"""Programs that test_emulated_cuda.py runs in processes of their own, since a fault or a setting is a process's.

    python -m unit.emulated_programs mistake|refused|streams FOLDER ...

Each prints what it found as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from ctypes import c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.cuda_device import Array, CudaError, Device, read_archive

UNIT = "emulated_kernels"


class Params(ctypes.Structure):
    """TestParams of emulated_kernels.cu."""

    _fields_ = [(name, c_uint64) for name in "abcy"] + [("n", ctypes.c_int32), ("what", ctypes.c_int32)]


class ProbeDevice(Device):
    """An emulated device with the kernels of emulated_kernels.cu."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / "libcuda.so.1"))
        self._module = c_void_p()
        image = read_archive(folder / "kernels.archive")[UNIT][0]
        self.call("cuModuleLoadData", ctypes.byref(self._module), image)

    def launch(self, name: str, grid: int, threads: int, shared_bytes: int = 0, **fields: Any) -> None:
        function = c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        values = Params(**{key: value.address if isinstance(value, Array) else value for key, value in fields.items()})
        arguments = (c_void_p * 1)(ctypes.addressof(values))
        self.call("cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, shared_bytes, self.stream, arguments, None)


def mistake(device: ProbeDevice, what: int) -> list[str]:
    """The errors of what waits after a kernel's mistake."""
    a, y = device.put(np.zeros(64, np.uint32)), device.empty((65,), np.uint32)
    size = {6: 128, 7: 260, 8: 256 + 1024, 12: 8, 13: 32}.get(what, 0)
    device.launch("mistakes", 2, 64, 125 if what == 6 else 128, a=a, y=y, n=size, what=what)
    found = []
    waits: list[tuple[Any, ...]] = [("cuStreamSynchronize", None), ("cuCtxSynchronize",)]
    if what == 7:  # seen when the memory is given back
        waits.insert(0, ("cuMemFree_v2", c_uint64(y.address)))
    for wait in waits:
        try:
            device.call(*wait)
        except CudaError as error:
            found.append(str(error))
    return found


def refused(device: ProbeDevice) -> dict[str, int | None]:
    """Error numbers of calls, None for those that succeed."""
    found: dict[str, int | None] = {}

    def note(name: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
            found[name] = None
        except CudaError as error:
            found[name] = int(str(error).rsplit("(", 1)[1].rstrip(")"))

    def launch(threads: int, shared_bytes: int, name: str = "mistakes") -> Callable[[], None]:
        return lambda: device.launch(name, 1, threads, shared_bytes, a=array, y=array, what=99)

    array, host = device.empty((64,), np.uint32), (ctypes.c_uint8 * 512)()
    address, total, count = c_uint64(), c_size_t(), ctypes.c_int()
    device.call("cuDeviceGetCount", ctypes.byref(count))
    device.call("cuMemGetInfo_v2", ctypes.byref(c_size_t()), ctypes.byref(total))
    found |= {"devices": count.value, "bytes": total.value}
    rest = total.value - array.bytes
    note("a copy that is too long", device.call, "cuMemcpyDtoH_v2", host, c_uint64(array.address), c_size_t(257))
    note("a copy from elsewhere", device.call, "cuMemcpyDtoH_v2", host, c_uint64(4096), c_size_t(8))
    note("too many threads", launch(96, 128))
    note("shared memory without opt-in", launch(64, (48 << 10) + 1))
    note("shared memory within", launch(64, 48 << 10))
    note("no such kernel", launch(64, 0, "mistake"))
    note("too much memory", device.call, "cuMemAlloc_v2", ctypes.byref(address), c_size_t(rest + 1))
    note("all memory", device.call, "cuMemAlloc_v2", ctypes.byref(address), c_size_t(rest))
    note("free", device.call, "cuMemFree_v2", address)
    note("free again", device.call, "cuMemFree_v2", address)
    stream, graph = c_void_p(), c_void_p()
    device.call("cuStreamCreate", ctypes.byref(stream), 1)
    device.call("cuStreamBeginCapture_v2", stream, 1)
    note("memory while a graph is recorded", device.call, "cuMemAlloc_v2", ctypes.byref(address), c_size_t(8))
    device.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    other = c_void_p()
    device.call("cuDevicePrimaryCtxRetain", ctypes.byref(other), 1)
    device.call("cuCtxPushCurrent_v2", other)
    note("a kernel of another device", launch(64, 128))
    return found


def streams(device: ProbeDevice) -> dict[str, list[int]]:
    """What is copied back from a second stream before and after it is waited for, and by a graph."""
    first, second, event, graph, replay = (c_void_p() for _ in range(5))
    for stream in (first, second):
        device.call("cuStreamCreate", ctypes.byref(stream), 1)
    device.call("cuEventCreate", ctypes.byref(event), 2)
    a, y = device.put(np.zeros(32, np.uint32)), device.empty((5, 32), np.uint32)
    size, found = c_size_t(128), {}

    def host(values: NDArray[np.uint32]) -> c_void_p:
        return values.ctypes.data_as(c_void_p)

    def send(stream: c_void_p, values: NDArray[np.uint32]) -> None:  # and what lanes tell each other about it
        device.call("cuMemcpyHtoDAsync_v2", c_uint64(a.address), host(values), size, stream)
        device.stream = stream
        device.launch("exchanges", 1, 32, a=a, y=y)

    def receive(stream: c_void_p, values: NDArray[np.uint32]) -> None:
        device.call("cuMemcpyDtoHAsync_v2", host(values), c_uint64(y.address), size, stream)

    source, result = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    send(first, source)
    device.call("cuEventRecord", event, first)
    device.call("cuStreamWaitEvent", second, event, 0)
    receive(second, result)
    found["before waiting"] = result.tolist()
    device.call("cuStreamSynchronize", second)
    found["after waiting"] = result.tolist()

    result[:] = 0
    device.call("cuStreamBeginCapture_v2", first, 1)
    send(first, source)
    receive(first, result)
    device.call("cuStreamEndCapture", first, ctypes.byref(graph))
    device.call("cuGraphInstantiateWithFlags", ctypes.byref(replay), graph, c_uint64(0))
    device.call("cuStreamSynchronize", first)
    found["recorded"] = result.tolist()
    source += 100
    device.call("cuGraphLaunch", replay, first)
    device.call("cuStreamSynchronize", first)
    found["replayed"] = result.tolist()
    return found


PROGRAMS: dict[str, Callable[..., Any]] = {"mistake": mistake, "refused": refused, "streams": streams}

if __name__ == "__main__":
    program, of_kernels, *numbers = sys.argv[1:]
    print(json.dumps(PROGRAMS[program](ProbeDevice(Path(of_kernels)), *map(int, numbers))))
