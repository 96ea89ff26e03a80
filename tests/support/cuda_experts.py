"""Groups the slots of a routing and runs the kernels of experts as the launcher does, for tests and timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.cuda_device import Array, Device, linear_job, parameter_structs
from support.cuda_linear import PROMPT_TILES, ROW_THREADS, Weight, pack

THREADS = 256
ITEM = np.dtype([("expert", np.int32), ("first", np.int32), ("rows", np.int32)])


def most_expert_items(slots: int, experts: int, rows_of_item: int) -> int:
    """As in params.h."""
    return min(slots, (slots + min(slots, experts) * (rows_of_item - 1)) // rows_of_item)


class Groups(NamedTuple):
    """The slots of a routing by expert, in items of at most `rows_of_item`."""

    order: Array
    items: Array
    slots: int
    rows_of_item: int

    @property
    def most_items(self) -> int:
        return self.items.shape[0]


def prepare_groups(
    device: Device, expert: NDArray[np.int32], experts: int, rows_of_item: int
) -> tuple[Groups, Callable[[], None]]:
    """The groups, and the launch that fills them."""
    slots = expert.size
    items = device.empty((most_expert_items(slots, experts, rows_of_item),), ITEM)
    groups = Groups(device.empty((slots,), np.int32), items, slots, rows_of_item)
    chosen, kernel = device.put(expert.ravel()), device.kernel("routing", "group_slots")

    def launch() -> None:
        kernel(
            experts // 8 + 1, THREADS, "GroupSlotsParams", expert=chosen, order=groups.order, items=items, slots=slots,
            experts=experts, rows_of_item=rows_of_item, most_items=groups.most_items,
        )  # fmt: skip

    return groups, launch


def group_slots(device: Device, expert: NDArray[np.int32], experts: int, rows_of_item: int) -> Groups:
    groups, launch = prepare_groups(device, expert, experts, rows_of_item)
    launch()
    device.synchronize()  # the routing is freed here
    return groups


class Stack(NamedTuple):
    """A matrix per expert; None where another rank has it."""

    weights: tuple[Weight | None, ...]
    table: Array  # of ExpertWeight
    type_name: str
    out_features: int
    in_features: int


def stack_of(device: Device, weights: Sequence[Weight | None], scales: Sequence[float] | None = None) -> Stack:
    struct = parameter_structs()["ExpertWeight"]
    table = (struct * len(weights))()
    for e, weight in enumerate(weights):
        table[e].weight = weight.packed.address if weight else 0
        table[e].scale = scales[e] if scales else 1.0
    raw = np.frombuffer(bytes(table), np.uint8)
    first = next(weight for weight in weights if weight)
    return Stack(tuple(weights), device.put(raw), first.type_name, first.out_features, first.in_features)


def pack_stack(
    device: Device, type_name: str, matrices: Sequence[NDArray[np.uint8] | None], features: int, **options: Any
) -> Stack:
    """Matrices of file rows; F32 stays as it is."""
    weights = []
    for rows in matrices:
        if rows is None:
            weights.append(None)
        elif type_name == "F32":
            weights.append(Weight("F32", device.put(rows), len(rows), features))
        else:
            weights.append(pack(device, type_name, rows, features))
    return stack_of(device, weights, **options)


def _jobs(stacks: Sequence[Stack], y: Array) -> Any:
    # The up of a gate has no output of its own. A job's own scale is not used.
    structs = parameter_structs()["LinearParams"]().job
    for i, stack in enumerate(stacks):
        fields = {"out_features": stack.out_features, "experts": stack.table}
        structs[i] = linear_job(y=y if i == 0 else 0, scale=float("nan"), **fields)
    return structs


def prepare_experts(
    device: Device,
    x: Array,
    groups: Groups,
    stacks: Sequence[Stack],
    slots_per_row: int,
    activation: int | None = None,
    tile: str | None = None,
) -> tuple[Array, Callable[[], None]]:
    """[slots, out_features] of one stack, or with an activation of the gate and up, and the launches that fill it.

    `tile` (wide or narrow) takes the kernels of prompts.
    """
    first, rows_of_item, most_items = stacks[0], groups.rows_of_item, groups.most_items
    y = device.empty((groups.slots, first.out_features))
    shared: dict[str, Any] = {"items": groups.items, "order": groups.order}
    if first.type_name == "F32":
        assert activation is None, "f32 matrices have no gated kernel"
        features = {8: 4, 16: 16}[rows_of_item]
        floats = device.kernel("linear_f32", f"rows{rows_of_item}")
        return y, lambda: floats(
            (-(-first.out_features // features), most_items), THREADS, "LinearF32Params", x=x, jobs=1,
            in_features=first.in_features, slots_per_row=slots_per_row, job=_jobs(stacks, y), **shared,
        )  # fmt: skip
    shared["panel"] = device.empty((most_items, first.in_features * rows_of_item), np.uint16)
    shared["row_scale"] = device.empty((groups.slots,))
    gated = activation is not None
    gather = device.kernel("panel", "expert_panel")
    tiles, prefix = -(-first.out_features // 32), "gated_" if gated else ""
    if tile is None:
        columns = 2 if gated or rows_of_item > 8 else 1
        multiply = device.kernel(f"linear_{first.type_name.lower()}", f"{prefix}rows{rows_of_item}")
        blocks, threads = tiles if gated else -(-tiles // columns), THREADS
    else:
        rows, features, threads = PROMPT_TILES[tile]
        assert rows == rows_of_item, (tile, rows_of_item)
        multiply = device.kernel(f"linear_prompt_{first.type_name.lower()}", prefix + tile)
        blocks = -(-tiles // (features // (64 if gated else 32)))

    def launch() -> None:
        gather(
            (rows_of_item, most_items), ROW_THREADS, "ExpertPanelParams", x=x, features=first.in_features,
            tiles=rows_of_item // 8, slots_per_row=slots_per_row, **shared,
        )  # fmt: skip
        multiply(
            (blocks, most_items), threads, "LinearParams", tiles=tiles, in_features=first.in_features,
            jobs=len(stacks), activation=activation or 0, job=_jobs(stacks, y), **shared,
        )  # fmt: skip

    return y, launch


def run_experts(
    device: Device,
    x: Array,
    groups: Groups,
    stacks: Sequence[Stack],
    slots_per_row: int,
    activation: int | None = None,
    tile: str | None = None,
) -> Array:
    y, launch = prepare_experts(device, x, groups, stacks, slots_per_row, activation, tile)
    launch()
    device.synchronize()  # the panel is freed here
    return y
