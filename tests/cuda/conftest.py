"""Tests of the kernels: on the machine's card, or without a driver on the emulated device.

V100_KERNELS_DIR names a folder of kernels that were compiled for the card; without it they are compiled here.
EMULATED_CUDA=1 takes the emulated device on a machine with a driver, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import compile_kernels
from support.cuda_device import Card, Device, takes_emulated_device


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    if takes_emulated_device():
        from support.emulated_cuda import NoCompilerError
        from support.emulated_cuda.device import EmulatedDevice

        try:
            return EmulatedDevice()
        except NoCompilerError as error:
            pytest.skip(f"needs an NVIDIA driver, or for the emulated device: {error}")
    kernels = os.environ.get("V100_KERNELS_DIR")
    if kernels is None:
        if compile_kernels.find_compiler() is None:
            pytest.skip("needs V100_KERNELS_DIR or a compiler for SM70")
        kernels = str(tmp_path_factory.mktemp("kernels"))
        compile_kernels.compile_all(Path(kernels), os.cpu_count() or 1)
    return Card(Path(kernels) / "kernels.archive")


@pytest.fixture(scope="module", autouse=True)
def current_device(device: Device) -> None:
    """Files of other tests may have run in this process before."""
    device.make_current()
