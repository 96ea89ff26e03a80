"""Tests on a real card. They skip without a driver or without a compiler for the kernels.

V100_KERNELS_DIR names a folder of compiled kernels; without it they are compiled here.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

import compile_kernels
from support.cuda_device import Device


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("needs an NVIDIA driver")
    folder = os.environ.get("V100_KERNELS_DIR")
    if folder is None:
        if compile_kernels.find_compiler() is None:
            pytest.skip("needs V100_KERNELS_DIR or a compiler for SM70")
        folder = str(tmp_path_factory.mktemp("kernels"))
        compile_kernels.compile_all(Path(folder), os.cpu_count() or 1)
    return Device(Path(folder) / "kernels.archive")
