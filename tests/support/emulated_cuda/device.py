"""The emulated device for the tests of kernels: a unit is compiled when a test first asks for it."""

from __future__ import annotations

import pytest

from support.cuda_device import Device, read_archive
from support.emulated_cuda.build import ensure_built


class EmulatedDevice(Device):
    is_emulated = True

    def __init__(self) -> None:
        # The driver counts its devices once in a process; models that are tested in it later want two.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EMULATED_CUDA_DEVICES", "2")
            super().__init__(str(ensure_built([]) / "libcuda.so.1"))

    def image(self, unit: str) -> bytes:
        return read_archive(ensure_built([unit]) / "kernels.archive")[unit][0]
