"""Packs weights and runs `linear.cu` and `linear_prompt.cu` as the launcher does, for tests and timings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.cuda_device import Array, Device, linear_job, parameter_structs, struct_of
from support.random_blocks import block_size

THREADS = 256
NORM_THREADS, ROW_THREADS = 256, 512  # of params.h
ROW_TILES = {8: 1, 16: 2, 32: 4, 64: 8}  # by the most rows of a kernel
PROMPT_ROWS = 128  # kPromptRows
PROMPT_TILES = {"wide": (128, 256, 256), "narrow": (64, 128, 128)}  # rows, columns, threads: linear_prompt_shape.h


class Weight(NamedTuple):
    type_name: str
    packed: Array
    out_features: int
    in_features: int

    @property
    def tiles(self) -> int:
        return -(-self.out_features // 32)


def pack(device: Device, type_name: str, rows: NDArray[np.uint8], features: int) -> Weight:
    """Repacks a matrix of file rows on the device."""
    values, size = block_size(type_name)
    blocks, out_features = features // values, len(rows)
    packed = device.empty((-(-out_features // 32) * blocks * 32 * size,), np.uint8)
    packed.fill(0)
    repack = device.kernel("repack", f"repack_{type_name}")
    grid = -(-out_features * blocks // THREADS)
    source = device.put(rows)
    repack(grid, THREADS, "RepackParams", rows=source, packed=packed, out_features=out_features, blocks=blocks)
    device.synchronize()
    return Weight(type_name, packed, out_features, features)


class Panel(NamedTuple):
    values: Array
    row_scale: Array
    rows: int
    most_rows: int  # of the kernel that reads it: 8, 16, 32, 64; for prompts those that it has


def make_panel(device: Device, x: Array, prompt: bool = False) -> Panel:
    """The panel for the streaming kernel of as many rows, or for the kernels of prompts."""
    rows, features = x.shape
    most_rows = -(-rows // PROMPT_ROWS) * PROMPT_ROWS if prompt else next(m for m in ROW_TILES if rows <= m)
    tiles = most_rows // 8
    panel = Panel(device.empty((features * tiles * 8,), np.uint16), device.empty((rows,)), rows, most_rows)
    launch = device.kernel("panel", "panel")
    fields: dict[str, Any] = {"x": x, "panel": panel.values, "row_scale": panel.row_scale}
    launch(rows, ROW_THREADS, "PanelParams", rows=rows, features=features, tiles=tiles, **fields)
    return panel


class Job(NamedTuple):
    weight: Weight
    y: Array
    bias: Array | None = None
    scale: float = 1.0
    adds: bool = False


def run_linear(device: Device, panel: Panel, jobs: Sequence[Job], activation: int | None = None) -> None:
    """One launch of a streaming kernel: every job, or with an activation job 0 as the gate of job 1."""
    gated = activation is not None
    tiles = launch_tiles(jobs, gated)
    grid = tiles if gated or panel.most_rows == 8 else -(-tiles // 2)  # linear_shape.h
    name = f"{'gated_' if gated else ''}rows{panel.most_rows}"
    launch = device.kernel(f"linear_{jobs[0].weight.type_name.lower()}", name)
    launch(grid, THREADS, "LinearParams", **linear_fields(panel, jobs, activation))


def row_blocks(tiles: int, multiprocessors: int) -> int:
    """linear_row_blocks of linear_shape.h."""
    most = 2 * multiprocessors
    return -(-tiles // -(-tiles // most))


def run_linear_row(
    device: Device, kernel: str, jobs: Sequence[Job], blocks: int, fields: dict[str, Any], struct: str
) -> None:
    """One launch of a kernel of linear_row.cu; `fields` are those of its parameters beside `linear`."""
    linear = struct_of("LinearParams", **linear_fields(None, jobs, None))
    launch = device.kernel(f"linear_row_{jobs[0].weight.type_name.lower()}", kernel)
    launch(blocks, THREADS, struct, 2 * jobs[0].weight.in_features, **fields, linear=linear)


def run_linear_prompt(
    device: Device, panel: Panel, jobs: Sequence[Job], tile: str, activation: int | None = None
) -> None:
    """The same with a kernel of prompts; `tile` is wide or narrow."""
    gated = activation is not None
    rows, columns, threads = PROMPT_TILES[tile]
    grid = -(-panel.rows // rows) * -(-launch_tiles(jobs, gated) // (columns // (64 if gated else 32)))
    launch = device.kernel(f"linear_prompt_{jobs[0].weight.type_name.lower()}", f"{'gated_' if gated else ''}{tile}")
    launch(grid, threads, "LinearParams", **linear_fields(panel, jobs, activation))


def launch_tiles(jobs: Sequence[Job], gated: bool) -> int:
    return jobs[0].weight.tiles if gated else sum(job.weight.tiles for job in jobs)


def linear_fields(panel: Panel | None, jobs: Sequence[Job], activation: int | None) -> dict[str, Any]:
    """The fields of LinearParams; without a panel for one row."""
    gated = activation is not None
    structs, first = parameter_structs()["LinearParams"]().job, 0
    for i, job in enumerate(jobs):
        bias = job.bias if job.bias is not None else 0
        structs[i] = linear_job(
            weight=job.weight.packed, bias=bias, y=job.y, out_features=job.weight.out_features,
            first_tile=first, scale=job.scale, adds=int(job.adds),
        )  # fmt: skip
        first += 0 if gated else job.weight.tiles
    input_fields: dict[str, Any] = {"rows": 1}
    if panel is not None:
        input_fields = {"panel": panel.values, "row_scale": panel.row_scale, "rows": panel.rows}
    return {
        **input_fields, "in_features": jobs[0].weight.in_features, "jobs": len(jobs),
        "tiles": launch_tiles(jobs, gated), "activation": activation or 0, "job": structs,
    }  # fmt: skip
