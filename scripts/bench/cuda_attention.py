"""Times decode attention over KV pages on the machine's card against its copy bandwidth, measured in the same run.

    V100_KERNELS_DIR=DIR PYTHONPATH=tests:scripts/bench:ggml_v100/cuda python scripts/bench/cuda_attention.py

A time is that of the partitions and of their merging, in a graph, over as many layers as are needed for the pages to
come from memory and not from a cache. Bytes are those of the pages that the rows see; partial sums are not counted.
On cards newer than the V100 the tensor instruction is emulated and its time says nothing: compile with
`compile_kernels.py --bench` there, which leaves it out, and read the figures as those of the loads alone.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from cuda_linear import check_written, copy, copy_bandwidth, open_device

from support.cuda_device import Array, Device
from support.cuda_kv import PAGE_GAP, PAGE_TOKENS, THREADS, TYPES, Cache, combine, partition_of, shared_bytes

LAYERS_BYTES = 1 << 31  # of pages, all different addresses
MOST_LAYERS = 64
REPEATS = 15
BLOCK_ROWS = (8, 16, 24, 32, 48, 64)  # the kernels' rows


class Shape(NamedTuple):
    """Attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {"27B": Shape(24, 4, 256), "27B/4": Shape(6, 1, 256), "8B": Shape(32, 8, 128)}  # 27B/4: a rank of four


def kernel_rows(rows: int) -> int:
    """The kernel for `rows` rows of a kv head: as few blocks as can be, and of those the smallest."""
    blocks = -(-rows // BLOCK_ROWS[-1])
    return min(size for size in BLOCK_ROWS if size * blocks >= rows)


def noisy_cache(device: Device, shape: Shape, depth: int, kind: str, noise: Array) -> Cache:
    """A cache of one sequence whose pages hold finite noise in the layout of any type."""
    source = np.random.default_rng(0)
    group = shape.heads // shape.kv_heads
    cache = Cache(device, [depth], shape.kv_heads, shape.head_dim, (kind, kind), source, group)
    for at in range(0, cache.pages.bytes, noise.bytes):
        copy(device, cache.pages.address + at, noise.address, min(noise.bytes, cache.pages.bytes - at))
    device.synchronize()
    return cache


class Decode:
    """Launches of one shape, depth and number of rows."""

    def __init__(self, device: Device, shape: Shape, depth: int, rows: int) -> None:
        self.device, self.shape, self.rows = device, shape, rows
        self.block_rows = kernel_rows(rows * shape.heads // shape.kv_heads)
        self.row_blocks = -(-rows * shape.heads // shape.kv_heads // self.block_rows)
        self.partitions = partition_of(depth - 1) + 1
        source = np.random.default_rng(1)
        q = source.standard_normal((rows, shape.heads, shape.head_dim)).astype(np.float32)
        visible = np.array([(0, depth - rows + 1 + i) for i in range(rows)], np.int32)
        items = (rows, shape.heads, self.partitions)
        self.arrays = {
            "q": device.put(q), "visible": device.put(visible), "first_row": device.put(np.array([0, rows], np.int32)),
            "y": device.empty(q.shape), "part_y": device.empty((*items, shape.head_dim)),
            "part_weight": device.empty((*items, 2)),
        }  # fmt: skip

    def run(self, cache: Cache, page_table: Array) -> None:
        fields = dict(
            self.arrays, cache=cache.struct, page_table=page_table, most_pages=cache.most_pages, heads=self.shape.heads,
            partitions=self.partitions, row_blocks=self.row_blocks, scale=self.shape.head_dim**-0.5,
        )  # fmt: skip
        unit = f"attention_decode_{self.shape.head_dim}"
        self.device.kernel(unit, f"attention_decode_{self.block_rows}")(
            (self.shape.kv_heads * self.row_blocks, self.partitions, 1), THREADS, "AttentionParams",
            shared_bytes(self.shape.head_dim, self.block_rows), **fields,
        )  # fmt: skip
        parts = {name: self.arrays[name] for name in ("visible", "y", "part_y", "part_weight")}
        combine(self.device, self.shape.head_dim, self.rows, self.shape.heads, partitions=self.partitions, **parts)


def time_layers(device: Device, decode: Decode, caches: list[Cache], repeats: int) -> float:
    """Seconds of one layer."""
    tables = [device.put(cache.page_table) for cache in caches]

    def work() -> None:
        for cache, table in zip(caches, tables, strict=True):
            decode.run(cache, table)

    return device.milliseconds(device.graph(work), repeats) * 1e-3 / len(caches)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--types", nargs="+", default=["q8_0", "f16", "q4_0"], choices=TYPES)
    parser.add_argument("--depths", nargs="+", type=int, default=[1024, 16384, 131072, 262144])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--bytes", type=int, default=LAYERS_BYTES, help="of the pages that are gone through")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    device = open_device()
    bandwidth = copy_bandwidth(device)
    print(f"{device.name}, {device.multiprocessors} SMs, copy {bandwidth / 1e9:.0f} GB/s")
    print("shape  type   depth  rows  block       us    GB/s  of copy")
    noise = device.put(np.random.default_rng(0).integers(0, 100, 1 << 24, dtype=np.uint8))
    for kind in arguments.types:
        for name in arguments.shapes:
            shape = SHAPES[name]
            for depth in arguments.depths:
                caches = [noisy_cache(device, shape, depth, kind, noise)]
                n_bytes = -(-depth // PAGE_TOKENS) * (caches[0].page_bytes - PAGE_GAP)
                while len(caches) < MOST_LAYERS and len(caches) * n_bytes < arguments.bytes:
                    caches.append(noisy_cache(device, shape, depth, kind, noise))
                for rows in arguments.rows:
                    decode = Decode(device, shape, depth, rows)
                    seconds = time_layers(device, decode, caches, arguments.repeats)
                    for array in ("part_weight", "part_y", "y"):
                        check_written(decode.arrays[array], f"{name} {kind} {depth} {rows}: {array}")
                    rate = n_bytes / seconds
                    print(
                        f"{name:6} {kind:5} {depth:6} {rows:5} {decode.row_blocks:3}x{decode.block_rows:2}"
                        f" {seconds * 1e6:8.1f} {rate / 1e9:7.0f} {rate / bandwidth:7.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
