"""Times linear layers on the machine's card: up to 64 rows against its copy bandwidth, measured in the same run.

    V100_KERNELS_DIR=DIR PYTHONPATH=tests:ggml_v100/cuda python scripts/bench/cuda_linear.py \\
        [--types Q8_0] [--rows 1 8] [--together 8]

On cards newer than the V100 the tensor instruction is emulated and its time says nothing: compile with
`compile_kernels.py --bench` there, which leaves it out, and read the figures as those of the loads alone.

More rows go through both tiles of the prompt kernels. Their rate `as a V100` is that of 80 such SMs at 1.53 GHz: how
fast a V100 would feed its tensor cores, if its SMs did everything else in as many clocks.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from compile_kernels import MAGIC, sources_key
from support.cuda_device import Array, Card, Device
from support.cuda_linear import (
    PROMPT_TILES,
    Job,
    Weight,
    make_panel,
    row_blocks,
    run_linear,
    run_linear_prompt,
    run_linear_row,
)
from support.random_blocks import RARE_TYPES, TYPES, block_size

SHAPES = ((17408, 5120), (5120, 17408), (248320, 5120))  # out, in: up, down and LM head of a 27B model
COPIES_BYTES = 1 << 31  # of weights, all different addresses: no cache holds them
REPEATS = 15
MOST_STREAMED_ROWS = 64
CLOCK_RATE = 13  # device attribute, kHz
V100_CLOCKS = 80 * 1.53e9  # of all SMs together, per second


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
    noise = device.put(np.random.default_rng(0).integers(0, 256, min(n_bytes, 1 << 26), dtype=np.uint8))
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


Launches = list[list[Job]]


def time_launches(device: Device, launches: Launches, launch: Callable[[list[Job]], None]) -> float:
    """Seconds for each matrix."""

    def work() -> None:
        for jobs in launches:
            launch(jobs)

    return device.milliseconds(device.graph(work), REPEATS) * 1e-3 / sum(map(len, launches))


def rate_line(launches: Launches, seconds: float, bandwidth: float) -> str:
    rate = launches[0][0].weight.packed.bytes / seconds
    return f"{seconds * 1e6:7.1f} us {rate / 1e9:7.0f} GB/s {rate / bandwidth:7.1%} of copy"


def streaming_line(device: Device, launches: Launches, x: Array, bandwidth: float) -> str:
    panel = make_panel(device, x)
    seconds = time_launches(device, launches, lambda jobs: run_linear(device, panel, jobs))
    return rate_line(launches, seconds, bandwidth)


def row_line(device: Device, launches: Launches, x: Array, bandwidth: float) -> str:
    """One row from f32, by linear_row.cu."""
    fields = {"x": x, "largest": 0, "parts": 0}

    def launch(jobs: list[Job]) -> None:
        blocks = row_blocks(sum(job.weight.tiles for job in jobs), device.multiprocessors)
        run_linear_row(device, "plain", jobs, blocks, fields, "RowLinearParams")

    return rate_line(launches, time_launches(device, launches, launch), bandwidth) + " (row)"


def prompt_line(device: Device, launches: Launches, x: Array, tile: str) -> str:
    panel = make_panel(device, x, prompt=True)
    seconds = time_launches(device, launches, lambda jobs: run_linear_prompt(device, panel, jobs, tile))
    weight = launches[0][0].weight
    rate = 2 * x.shape[0] * weight.out_features * weight.in_features / seconds
    as_v100 = rate * V100_CLOCKS / (device.multiprocessors * device.attribute(CLOCK_RATE) * 1e3)
    return f"{seconds * 1e6:7.1f} us {rate / 1e12:7.1f} TFLOP/s {as_v100 / 1e12:5.1f} as a V100 ({tile})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_0", "Q4_K", "Q6_K"], choices=TYPES + RARE_TYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--together", type=int, default=1, help="matrices of a launch, at most 8")
    arguments = parser.parse_args()
    device = open_device()
    bandwidth = copy_bandwidth(device)
    print(f"{device.name}, {device.multiprocessors} SMs, copy {bandwidth / 1e9:.0f} GB/s")
    source = np.random.default_rng(1)
    for type_name in arguments.types:
        for out_features, in_features in SHAPES:
            first = random_weight(device, type_name, out_features, in_features)
            count = max(1, min(16, COPIES_BYTES // first.packed.bytes))
            weights = [first] + [random_weight(device, type_name, out_features, in_features) for _ in range(count - 1)]
            for rows in arguments.rows:
                x = source.standard_normal((rows, in_features)).astype(np.float32)
                y = device.empty((rows, out_features))
                n = arguments.together
                launches = [[Job(weight, y) for weight in weights[i : i + n]] for i in range(0, len(weights), n)]
                head = f"{type_name:7} {f'{out_features}x{in_features}':13} {rows:5}"
                if rows == 1:
                    print(head, row_line(device, launches, device.put(x), bandwidth), flush=True)
                if rows <= MOST_STREAMED_ROWS:
                    print(head, streaming_line(device, launches, device.put(x), bandwidth), flush=True)
                    continue
                for tile in PROMPT_TILES:
                    print(head, prompt_line(device, launches, device.put(x), tile), flush=True)


if __name__ == "__main__":
    main()
