"""Times what a draw takes of a card beside a copy of the whole row: the largest logits, flaws, sums, single values.

    V100_KERNELS_DIR=DIR PYTHONPATH=tests:scripts/bench:ggml_v100/cuda python scripts/bench/cuda_draws.py

Launches in a graph, as in a step that decodes. "rows to the host" is the copy that they save, into pinned memory.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable

import numpy as np
from cuda_linear import check_written, copy_bandwidth, open_device

from support.cuda_device import Array, Device

CHUNK = 2048
LISTED = 64
REPEATS = 15


def look_up(device: Device, logits: Array, kept: int) -> tuple[Callable[[], None], list[Array]]:
    """The launches of `CudaOps::look_up`, and what they write."""
    rows, n = logits.shape
    top_k = device.kernel("top_k", "top_k")
    flaws, picked = device.empty((rows,), np.int32), device.empty((rows, LISTED))
    columns = device.put(np.random.default_rng(1).integers(0, n, (rows, LISTED)).astype(np.int32))
    values, indices = device.empty((rows, kept)), device.empty((rows, kept), np.int32)
    sums = device.empty((rows, -(-n // CHUNK)), np.float64)
    keys, width = [], n
    while width > CHUNK:
        keys.append(device.empty((rows, -(-width // CHUNK), kept), np.uint64))
        width = -(-width // CHUNK) * kept

    def launch() -> None:
        device.kernel("sampling", "find_flaws")((64, rows), 256, "FindFlawsParams", logits=logits, first=flaws, n=n)
        device.kernel("sampling", "pick_columns")(
            rows, 256, "PickColumnsParams", x=logits, columns=columns, y=picked, n=n, listed=LISTED
        )
        fields: dict[str, Array | int] = {"logits": logits}
        width = n
        for chunk_keys in keys:
            chunks = -(-width // CHUNK)
            top_k((chunks, rows), 512, "TopKParams", kept_keys=chunk_keys, n=width, kept=kept, **fields)
            fields, width = {"keys": chunk_keys}, chunks * kept
        top_k((1, rows), 512, "TopKParams", values=values, indices=indices, n=width, kept=kept, **fields)
        device.kernel("sampling", "sum_exp")(
            (-(-n // CHUNK), rows), 512, "SumExpParams", logits=logits, largest=values, y=sums, n=n, stride=kept
        )

    return launch, [picked, values, indices, sums]


def copy_milliseconds(device: Device, logits: Array) -> float:
    host = ctypes.c_void_p()
    device.call("cuMemAllocHost_v2", ctypes.byref(host), ctypes.c_size_t(logits.bytes))
    return device.milliseconds(
        lambda: device.call("cuMemcpyDtoHAsync_v2", host, ctypes.c_uint64(logits.address), logits.bytes, None), REPEATS
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--kept", nargs="+", type=int, default=[1, 64, 128, 256])
    arguments = parser.parse_args()
    device = open_device()
    print(f"{device.name}, {device.multiprocessors} SMs, copy {copy_bandwidth(device) / 1e9:.0f} GB/s")
    print("rows  kept  look-up us  rows to the host us")
    for rows in arguments.rows:
        source = np.random.default_rng(rows)
        logits = device.put((source.standard_normal((rows, arguments.vocab)) * 4).astype(np.float32))
        copied = copy_milliseconds(device, logits) * 1e3
        for kept in arguments.kept:
            work, written = look_up(device, logits, kept)
            microseconds = device.milliseconds(device.graph(work), REPEATS) * 1e3
            for array in written:
                check_written(array, f"{rows} rows, {kept} kept")
            print(f"{rows:4} {kept:5} {microseconds:11.1f} {copied:20.1f}", flush=True)


if __name__ == "__main__":
    main()
