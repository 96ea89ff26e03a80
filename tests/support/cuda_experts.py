"""Groups the slots of a routing and runs the kernels of experts as the launcher does, for tests and timings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.cuda_device import Array, Device, linear_job, parameter_structs
from support.cuda_linear import ROW_TILES, Weight, pack

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


def group_slots(device: Device, expert: NDArray[np.int32], experts: int, rows_of_item: int) -> Groups:
    slots = expert.size
    items = device.empty((most_expert_items(slots, experts, rows_of_item),), ITEM)
    groups = Groups(device.empty((slots,), np.int32), items, slots, rows_of_item)
    device.kernel("routing", "group_slots")(
        experts // 8 + 1, THREADS, "GroupSlotsParams", expert=device.put(expert.ravel()), order=groups.order,
        items=items, slots=slots, experts=experts, rows_of_item=rows_of_item, most_items=groups.most_items,
    )  # fmt: skip
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


def run_experts(
    device: Device, x: Array, groups: Groups, stacks: Sequence[Stack], slots_per_row: int, activation: int | None = None
) -> Array:
    """[slots, out_features]: one stack, or with an activation the gate and up."""
    first = stacks[0]
    y = device.empty((groups.slots, first.out_features))
    if first.type_name == "F32":
        assert activation is None, "f32 matrices have no gated kernel"
        features = {8: 4, 16: 16}[groups.rows_of_item]
        device.kernel("linear_f32", f"rows{groups.rows_of_item}")(
            (-(-first.out_features // features), groups.most_items), THREADS, "LinearF32Params", x=x, jobs=1,
            in_features=first.in_features, slots_per_row=slots_per_row, items=groups.items, order=groups.order,
            job=_jobs(stacks, y),
        )  # fmt: skip
        return y
    tiles = ROW_TILES[groups.rows_of_item]
    panel = device.empty((groups.most_items, first.in_features * groups.rows_of_item), np.uint16)
    row_scale = device.empty((groups.slots,))
    device.kernel("panel", "expert_panel")(
        (groups.rows_of_item, groups.most_items), THREADS, "ExpertPanelParams", x=x, items=groups.items,
        order=groups.order, panel=panel, row_scale=row_scale, features=first.in_features, tiles=tiles,
        slots_per_row=slots_per_row,
    )  # fmt: skip
    gated = activation is not None
    columns = 2 if gated or groups.rows_of_item > 8 else 1
    of_features = -(-first.out_features // 32)
    device.kernel(f"linear_{first.type_name.lower()}", f"{'gated_' if gated else ''}rows{groups.rows_of_item}")(
        (of_features if gated else -(-of_features // columns), groups.most_items), THREADS, "LinearParams",
        panel=panel, row_scale=row_scale, in_features=first.in_features, jobs=len(stacks), tiles=of_features,
        activation=activation or 0, items=groups.items, order=groups.order, job=_jobs(stacks, y),
    )  # fmt: skip
    device.synchronize()  # the panel is freed here
    return y
