"""Times a mixture of experts on the machine's card: grouping, gate and up, down, and the sum of what they made.

    V100_KERNELS_DIR=DIR PYTHONPATH=tests:scripts/bench python scripts/bench/cuda_experts.py [--types Q8_0] [--rows 1]

Bytes are the matrices of the experts in use, once; the copy bandwidth is measured in the same run. As in cuda_linear.py
the figures are those of the loads alone where the kernels were compiled with --bench. Several layers, whose weights lie
elsewhere, are recorded and replayed together.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cuda_linear import copy_bandwidth, random_weight
from numpy.typing import NDArray

from support.cuda_device import Array, Card, Device
from support.cuda_experts import Stack, prepare_experts, prepare_groups, stack_of
from support.cuda_linear import Weight
from support.random_blocks import TYPES

EXPERTS, USED, HIDDEN, INNER = 128, 8, 2048, 768  # of a layer of a 30B model with 3B in use
LAYERS = 4
REPEATS = 10


class Part(Array):
    """Bytes of another array, which must live as long."""

    def __init__(self, whole: Array, at: int, n_bytes: int) -> None:
        self.device, self.shape, self.dtype, self.bytes = whole.device, (n_bytes,), whole.dtype, n_bytes
        self.address = whole.address + at

    def __del__(self) -> None:
        """It is not this one's to free."""


def random_stack(device: Device, type_name: str, out_features: int, in_features: int) -> tuple[Stack, Array]:
    """Experts side by side, and the memory that they are in."""
    memory = random_weight(device, type_name, EXPERTS * out_features, in_features).packed
    size = memory.bytes // EXPERTS
    parts = [Part(memory, e * size, size) for e in range(EXPERTS)]
    return stack_of(device, [Weight(type_name, part, out_features, in_features) for part in parts]), memory


def kernel_for(slots: int) -> tuple[int, str | None]:
    """Rows of an item, and the tile of the kernels of prompts or None for those that stream (docs/kernels.md)."""
    if slots > 48 * EXPERTS:
        return (64, "narrow") if slots <= 192 * EXPERTS else (128, "wide")
    return next((size for size in (8, 16, 32) if size * EXPERTS >= 2 * slots), 64), None


def routing(rows: int, source: np.random.Generator) -> NDArray[np.int32]:
    return np.argsort(source.random((rows, EXPERTS)), axis=1)[:, :USED].astype(np.int32)


def mixture(
    device: Device, layer: tuple[Stack, Stack, Stack], expert: NDArray[np.int32], x: Array
) -> tuple[Callable[[], None], list[Callable[[], None]]]:
    """All launches of a layer, and each step of it."""
    rows = len(expert)
    gate, up, down = layer
    rows_of_item, tile = kernel_for(expert.size)
    groups, group = prepare_groups(device, expert, EXPERTS, rows_of_item)
    acts, inner = prepare_experts(device, x, groups, [gate, up], USED, activation=0, tile=tile)
    made, outer = prepare_experts(device, acts, groups, [down], 1, tile=tile)
    y, weight = device.empty((rows, HIDDEN)), device.put(np.full((rows, USED), 1 / USED, np.float32))
    mix = device.kernel("routing", "mix_experts")

    def sum_up() -> None:
        blocks = min(rows * HIDDEN // 256, 2048)
        mix(blocks, 256, "MixExpertsParams", x=made, weight=weight, y=y, rows=rows, features=HIDDEN, used=USED)

    steps = [group, inner, outer, sum_up]

    def whole() -> None:
        for step in steps:
            step()

    return whole, steps


def seconds(device: Device, works: list[Callable[[], None]]) -> float:
    """Of one of them."""

    def work() -> None:
        for one in works:
            one()

    return device.milliseconds(device.graph(work), REPEATS) * 1e-3 / len(works)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K"], choices=TYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512, 2048])
    arguments = parser.parse_args()
    device = Card(Path(os.environ["V100_KERNELS_DIR"]) / "kernels.archive")
    bandwidth = copy_bandwidth(device)
    print(f"{device.name}, {device.multiprocessors} SMs, copy {bandwidth / 1e9:.0f} GB/s")
    print("type     rows  experts   R       us    GB/s  of copy  TFLOP/s  group  gate+up  down   sum, us")
    source = np.random.default_rng(1)
    for type_name in arguments.types:
        layers, memory = [], []
        for _ in range(LAYERS):
            stacks = []
            for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
                stack, data = random_stack(device, type_name, *shape)
                stacks.append(stack)
                memory.append(data)
            layers.append((stacks[0], stacks[1], stacks[2]))
        of_expert = sum(data.bytes for data in memory[:3]) / EXPERTS
        for rows in arguments.rows:
            chosen = [routing(rows, source) for _ in layers]
            x = device.put(source.standard_normal((rows, HIDDEN)).astype(np.float32))
            made = [mixture(device, layer, expert, x) for layer, expert in zip(layers, chosen, strict=True)]

            total = seconds(device, [whole for whole, _ in made])
            parts = " ".join(f"{seconds(device, [steps[i] for _, steps in made]) * 1e6:7.1f}" for i in range(4))
            in_use = float(np.mean([len(np.unique(expert)) for expert in chosen]))
            rate, operations = in_use * of_expert / total, 2 * 3 * rows * USED * HIDDEN * INNER
            print(
                f"{type_name:7} {rows:5} {in_use:8.0f} {kernel_for(rows * USED)[0]:3} {total * 1e6:8.1f} "
                f"{rate / 1e9:7.0f} {rate / bandwidth:8.1%} {operations / total / 1e12:8.1f} {parts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
