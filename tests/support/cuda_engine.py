"""Models on a CUDA device inside tests: the machine's card, or without a driver the emulated device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from support.cuda_device import takes_emulated_device

OF_DRAWS = ("sampling", "top_k")
"""Kernel units that an engine needs for tokens that it draws itself."""


@contextmanager
def cuda_devices(units: Sequence[str], **settings: str) -> Iterator[bool]:
    """Within it the engine finds CUDA0 and on; true for the emulated device, which has the given kernel units only,
    and those of draws.

    settings: environment of the emulated device. EMULATED_CUDA=1 takes it on a machine with a driver, too.
    """
    environment: dict[str, str] = {}
    emulated = takes_emulated_device()
    if emulated:
        from support.emulated_cuda import NoCompilerError, ensure_built

        try:
            folder = ensure_built([*units, *OF_DRAWS])
        except NoCompilerError as error:
            pytest.skip(f"needs an NVIDIA driver, or for the emulated device: {error}")
        environment = {"V100_CUDA_DRIVER": str(folder / "libcuda.so.1"), "V100_KERNELS_DIR": str(folder), **settings}
    elif "V100_KERNELS_DIR" not in os.environ:
        from pyllama._engine import backend_info

        if backend_info()["cuda"] == "built without CUDA kernels":
            pytest.skip("needs V100_KERNELS_DIR or an engine with kernels")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield emulated
