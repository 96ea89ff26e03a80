"""Runs compiled kernels through the driver alone, the machine's or the emulated one: ctypes on libcuda.so.1 and numpy.

Parameter structs are read from `ggml_v100/cuda/kernels/params.h`: a test and a kernel cannot disagree about a layout.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KERNELS = Path(__file__).resolve().parents[2] / "ggml_v100/cuda/kernels"
POISON = 0xFF  # bytes of fresh memory: NaN in f32 and f16
CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSORS = 75, 76, 16
MAX_DYNAMIC_SHARED_BYTES = 8
SHARED_WITHOUT_OPT_IN = 48 << 10

SCALARS: dict[str, Any] = {
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
}


@cache
def parameter_structs() -> dict[str, type[ctypes.Structure]]:
    """The structs of params.h by name; a pointer is a 64-bit address."""
    text = re.sub(r"//[^\n]*", "", (KERNELS / "params.h").read_text())
    constants = {name: int(value) for name, value in re.findall(r"constexpr int32_t (\w+) = (\d+);", text)}
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for type_name, declared in re.findall(r"(?:const )?(\w+\*?)\s+([\w\s,\[\]]+)(?: = 0)?;", body):
            for field in declared.split(","):
                match = re.fullmatch(r"\s*(\w+)(?:\[(\w+)\])?\s*", field)
                assert match, f"params.h, {name}: '{field}' is not a field that this reader knows"
                kind = ctypes.c_uint64 if type_name.endswith("*") else SCALARS.get(type_name) or structs[type_name]
                count = match[2] and (constants.get(match[2]) or int(match[2]))
                fields.append((match[1], kind * count if count else kind))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


def read_archive(path: Path) -> dict[str, tuple[bytes, bytes]]:
    """(cubin, PTX) of every unit of a kernels.archive."""
    raw = path.read_bytes()
    assert raw[:8] == b"V100KRN1", path
    at = 8

    def number() -> int:
        nonlocal at
        at += 4
        return struct.unpack_from("<I", raw, at - 4)[0]

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return raw[at - count : at]

    def data() -> bytes:
        size = number()
        unpacked = zlib.decompress(take(number()), wbits=-15)
        assert len(unpacked) == size
        return unpacked

    take(number()), take(number())  # key, compiler
    return {take(number()).decode(): (data(), data()) for _ in range(number())}


def takes_emulated_device() -> bool:
    """Whether tests run on the emulated device: without a driver, or where EMULATED_CUDA=1 asks for it."""
    if os.environ.get("EMULATED_CUDA", "0") != "0":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


class CudaError(Exception):
    """A driver call failed."""


class Array:
    """Memory of the device. `shape` and `dtype` are those of the numpy array it came from or goes to."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: Any) -> None:
        self.device, self.shape, self.dtype = device, shape, np.dtype(dtype)
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self.address = 0
        address = ctypes.c_uint64()
        device.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(self.bytes, 1)))
        self.address = address.value

    def __del__(self) -> None:
        if self.address != 0:
            self.device.library.cuMemFree_v2(ctypes.c_uint64(self.address))

    def get(self) -> NDArray[Any]:
        """A copy on the host, after everything before it is done."""
        values = np.empty(self.shape, self.dtype)
        self.device.synchronize()
        pointer = values.ctypes.data_as(ctypes.c_void_p)
        self.device.call("cuMemcpyDtoH_v2", pointer, ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes))
        return values

    def fill(self, byte: int) -> None:
        size = ctypes.c_size_t(self.bytes)
        self.device.call("cuMemsetD8_v2", ctypes.c_uint64(self.address), ctypes.c_ubyte(byte), size)


class Device:
    """Device 0 with its primary context. What compiled kernels it takes is up to the classes below it."""

    is_emulated = False  # slow: tests may leave out combinations of what they cover singly

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.call("cuInit", 0)
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._handle, self._context = handle, context
        self.make_current()
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 255, handle)
        self.name = name.value.decode()
        self.capability = (self.attribute(CAPABILITY_MAJOR), self.attribute(CAPABILITY_MINOR))
        self.multiprocessors = self.attribute(MULTIPROCESSORS)
        self.stream: ctypes.c_void_p | None = None  # of the launches; None is the default stream
        self._modules: dict[str, ctypes.c_void_p] = {}

    def make_current(self) -> None:
        """In this thread: engines that were opened since have left the context of theirs, which may be gone."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.library, function)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise CudaError(f"{function}: {(text.value or b'?').decode()} ({status})")

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, self._handle)
        return value.value

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Poisoned: what a kernel does not write is NaN or -1."""
        array = Array(self, shape, dtype)
        array.fill(POISON)
        return array

    def put(self, values: NDArray[Any]) -> Array:
        values = np.ascontiguousarray(values)
        array = Array(self, values.shape, values.dtype)
        pointer = values.ctypes.data_as(ctypes.c_void_p)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(array.address), pointer, ctypes.c_size_t(array.bytes))
        return array

    def image(self, unit: str) -> bytes:
        """What the driver loads as the unit's module."""
        raise NotImplementedError

    def kernel(self, unit: str, name: str) -> Callable[..., None]:
        """launch(grid, threads, Params, shared_bytes=0, **fields): fields are numbers or Arrays."""
        if unit not in self._modules:
            module = ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), self.image(unit))
            self._modules[unit] = module
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self._modules[unit], name.encode())

        def launch(
            grid: int | tuple[int, ...], threads: int, params: str, shared_bytes: int = 0, **fields: Any
        ) -> None:
            struct_type = parameter_structs()[params]
            unknown = fields.keys() - {field for field, _ in struct_type._fields_}  # type: ignore[misc]
            assert not unknown, (params, unknown)
            values = struct_type()
            for field, value in fields.items():
                setattr(values, field, value.address if isinstance(value, Array) else value)
            x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(values))
            if shared_bytes > SHARED_WITHOUT_OPT_IN:
                self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            self.call("cuLaunchKernel", function, x, y, z, threads, 1, 1, shared_bytes, self.stream, arguments, None)

        return launch

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` launches and returns the replay: timing that leaves out the host's time per launch."""
        work()  # loads modules, which must not happen while recording
        stream, graph, replayed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        self.call("cuStreamBeginCapture_v2", stream, 2)
        self.stream = stream
        try:
            work()
        finally:
            self.stream = None
            self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(replayed), graph, ctypes.c_uint64(0))
        return lambda: self.call("cuGraphLaunch", replayed, None)

    def milliseconds(self, work: Callable[[], None], repeats: int = 20) -> float:
        """Median time of `work` on the device."""
        begin, end, elapsed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        for event in (begin, end):
            self.call("cuEventCreate", ctypes.byref(event), 0)
        times = []
        work()
        for _ in range(repeats):
            self.call("cuEventRecord", begin, None)
            work()
            self.call("cuEventRecord", end, None)
            self.call("cuEventSynchronize", end)
            self.call("cuEventElapsedTime", ctypes.byref(elapsed), begin, end)
            times.append(elapsed.value)
        return float(np.median(times))


def wide_grid(rows: int, features: int) -> tuple[int, int]:
    """Grid of the kernels whose threads have four features of a row (wide_blocks of params.h)."""
    return rows, -(-features // 1024)


class Card(Device):
    """The machine's card with the kernels of an archive."""

    def __init__(self, archive: Path) -> None:
        super().__init__("libcuda.so.1")
        self._archive = read_archive(archive)

    def image(self, unit: str) -> bytes:
        cubin, ptx = self._archive[unit]
        return cubin if self.capability[0] == 7 else ptx + b"\0"


def struct_of(name: str, **fields: Any) -> ctypes.Structure:
    """One of params.h; fields are numbers, Arrays or structs."""
    values = {field: value.address if isinstance(value, Array) else value for field, value in fields.items()}
    return parameter_structs()[name](**values)


def linear_job(**fields: Any) -> ctypes.Structure:
    """A LinearJob; fields are numbers or Arrays."""
    return struct_of("LinearJob", **fields)
