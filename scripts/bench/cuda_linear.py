"""Times the weight-streaming kernels on the machine's card against its copy bandwidth, measured in the same run.

    V100_KERNELS_DIR=DIR PYTHONPATH=tests:ggml_v100/cuda python scripts/bench/cuda_linear.py [--types Q8_0] [--rows 1 8]

On cards newer than the V100 the tensor instruction is emulated and its time says nothing: compile with
`compile_kernels.py --bench` there, which leaves it out, and read the figures as those of the loads alone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import struct
from pathlib import Path

import numpy as np

from compile_kernels import MAGIC, sources_key
from support.cuda_device import Array, Card, Device
from support.cuda_linear import Job, Panel, Weight, make_panel, run_linear
from support.random_blocks import TYPES, block_size

SHAPES = ((17408, 5120), (5120, 17408), (248320, 5120))  # out, in: up, down and LM head of a 27B model
COPIES_BYTES = 1 << 31  # of weights, all different addresses: no cache holds them
REPEATS = 15


def open_device() -> Device:
    """The card with the kernels of V100_KERNELS_DIR; exits where those were compiled from other sources.

    The fields of their parameters may then lie elsewhere, and such kernels are fast because they read little.
    """
    path = Path(os.environ["V100_KERNELS_DIR"]) / "kernels.archive"
    (length,) = struct.unpack_from("<I", path.read_bytes(), len(MAGIC))
    key = path.read_bytes()[len(MAGIC) + 4 :][:length].decode()
    if key != sources_key():
        raise SystemExit(f"{path} has kernels of sources {key}, the sources here are {sources_key()}")
    return Card(path)


def check_written(array: Array, what: str) -> None:
    """Exits where a kernel that was timed left some of its output as it was."""
    if (array.get().view(np.uint32) == 0xFFFFFFFF).any():
        raise SystemExit(f"{what}: some of it was not written, the time is that of something else")


def random_weight(device: Device, type_name: str, out_features: int, in_features: int) -> Weight:
    values, size = block_size(type_name)
    n_bytes = -(-out_features // 32) * 32 * (in_features // values) * size
    packed = device.empty((n_bytes,), np.uint8)
    noise = device.put(np.random.default_rng(0).integers(0, 100, min(n_bytes, 1 << 26), dtype=np.uint8))
    for at in range(0, n_bytes, noise.bytes):
        copy(device, packed.address + at, noise.address, min(noise.bytes, n_bytes - at))
    device.synchronize()
    return Weight(type_name, packed, out_features, in_features)


def copy(device: Device, to: int, source: int, n_bytes: int) -> None:
    device.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(n_bytes), None)


def copy_bandwidth(device: Device) -> float:
    """Bytes read and written per second of a large copy on the device."""
    a, b = (device.empty((1 << 30,), np.uint8) for _ in range(2))
    return 2 * a.bytes / (device.milliseconds(lambda: copy(device, b.address, a.address, a.bytes)) * 1e-3)


def time_linear(device: Device, weights: list[Weight], panel: Panel, y: Array) -> float:
    """Seconds of one launch."""

    def work() -> None:
        for weight in weights:
            run_linear(device, panel, [Job(weight, y)])

    return device.milliseconds(device.graph(work), REPEATS) * 1e-3 / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_0", "Q4_K", "Q6_K"], choices=TYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    arguments = parser.parse_args()
    device = open_device()
    bandwidth = copy_bandwidth(device)
    print(f"{device.name}, {device.multiprocessors} SMs, copy {bandwidth / 1e9:.0f} GB/s")
    print("type    shape           rows      us    GB/s  of copy")
    source = np.random.default_rng(1)
    for type_name in arguments.types:
        for out_features, in_features in SHAPES:
            first = random_weight(device, type_name, out_features, in_features)
            count = max(1, min(16, COPIES_BYTES // first.packed.bytes))
            weights = [first] + [random_weight(device, type_name, out_features, in_features) for _ in range(count - 1)]
            for rows in arguments.rows:
                x = source.standard_normal((rows, in_features)).astype(np.float32)
                panel = make_panel(device, device.put(x))
                seconds = time_linear(device, weights, panel, device.empty((rows, out_features)))
                rate = first.packed.bytes / seconds
                shape = f"{out_features}x{in_features}"
                print(
                    f"{type_name:7} {shape:15} {rows:4} {seconds * 1e6:7.1f} {rate / 1e9:7.0f} {rate / bandwidth:7.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
