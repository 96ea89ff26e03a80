"""The emulated device for the tests of kernels: a unit is compiled when a test first asks for it."""

from __future__ import annotations

from support.cuda_device import Device, read_archive
from support.emulated_cuda.build import ensure_built


class EmulatedDevice(Device):
    is_emulated = True

    def __init__(self) -> None:
        super().__init__(str(ensure_built([]) / "libcuda.so.1"))

    def image(self, unit: str) -> bytes:
        return read_archive(ensure_built([unit]) / "kernels.archive")[unit][0]
