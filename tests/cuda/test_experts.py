"""Experts on the device: the grouping of slots, and the streaming kernels over its items, against float64 and against
the dense kernels, whose bits they must have.

The tolerance is that of test_linear.py, whose kernels these are.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Array, Device
from support.cuda_experts import Groups, Stack, group_slots, most_expert_items, pack_stack, run_experts
from support.cuda_linear import PROMPT_TILES, Job, make_panel, run_linear, run_linear_prompt
from support.random_blocks import TYPES, block_size, random_rows


def routing(rows: int, used: int, experts: int, source: np.random.Generator) -> NDArray[np.int32]:
    """Each row's experts are different, and some are chosen far more often than others."""
    liking = np.log(source.random(experts)) * 3
    scores = liking + source.gumbel(size=(rows, experts))
    return np.argsort(-scores, axis=1)[:, :used].astype(np.int32)


def assert_grouped(groups: Groups, expert: NDArray[np.int32], experts: int) -> None:
    order, items = groups.order.get(), groups.items.get()
    assert np.array_equal(order, np.argsort(expert.ravel(), kind="stable"))
    expected = []
    counts = np.bincount(expert.ravel(), minlength=experts)
    for e, first in enumerate(np.cumsum(counts) - counts):
        for at in range(0, counts[e], groups.rows_of_item):
            expected.append((e, first + at, min(groups.rows_of_item, counts[e] - at)))
    assert [tuple(item) for item in items[: len(expected)].tolist()] == expected
    assert not items["rows"][len(expected) :].any()


@pytest.mark.parametrize("rows_of_item", [8, 64])
@pytest.mark.parametrize(
    ("rows", "used", "experts"), [(1, 1, 1), (1, 8, 128), (7, 2, 4), (64, 8, 31), (129, 10, 512), (3, 32, 1024)]
)
def test_slots_are_grouped_by_expert_in_their_order(
    device: Device, rows: int, used: int, experts: int, rows_of_item: int
) -> None:
    expert = routing(rows, used, experts, np.random.default_rng(rows))
    assert_grouped(group_slots(device, expert, experts, rows_of_item), expert, experts)


@pytest.mark.parametrize(("rows", "experts"), [(70, 1), (513, 40)])
def test_slots_of_one_expert_alone_are_grouped(device: Device, rows: int, experts: int) -> None:
    expert = np.full((rows, 1), experts - 1, np.int32)
    assert_grouped(group_slots(device, expert, experts, 16), expert, experts)


def test_there_are_never_more_items_than_a_launch_has_room_for() -> None:
    source = np.random.default_rng(5)
    for _ in range(300):
        slots, experts = int(source.integers(1, 300)), int(source.integers(1, 40))
        rows_of_item = int(source.choice([8, 16, 32, 64]))
        counts = np.bincount(source.integers(0, source.integers(1, experts + 1), slots), minlength=experts)
        needed = int((-(-counts // rows_of_item)).sum())
        assert needed <= most_expert_items(slots, experts, rows_of_item) <= slots


def random_stack(
    device: Device,
    type_name: str,
    experts: int,
    out_features: int,
    in_features: int,
    source: np.random.Generator,
    absent: tuple[int, ...] = (),
) -> tuple[Stack, NDArray[np.float64]]:
    """A stack with a scale per expert, and [experts, out, in] of what it holds: zeros for those that are elsewhere."""
    made = [random_rows(type_name, out_features, in_features, source) for _ in range(experts)]
    scales = source.uniform(0.5, 2, experts).astype(np.float32)
    wide = np.stack([decoded for _, decoded in made]) * scales[:, None, None]
    wide[list(absent)] = 0
    matrices = [None if e in absent else rows for e, (rows, _) in enumerate(made)]
    return pack_stack(device, type_name, matrices, in_features, scales=scales.tolist()), wide


def assert_close(
    y: NDArray[np.float32], x: NDArray[np.float32], expert: NDArray[np.int32], weights: NDArray[np.float64]
) -> None:
    """y [slots, out] from the slots' rows x [slots, in]."""
    for slot, e in enumerate(expert.ravel()):
        if not weights[e].any():
            assert not y[slot].any(), f"slot {slot}: expert {e} is elsewhere"
            continue
        wide = x[slot].astype(np.float64)
        error = np.abs(y[slot] - weights[e] @ wide)
        scale = np.sqrt(np.maximum(weights[e] ** 2, (weights[e] ** 2).mean()) @ wide**2)
        off = np.linalg.norm(error) / np.linalg.norm(scale)
        assert off <= 2e-3, f"slot {slot}, expert {e}: relative error {off:.2e}"
        assert (error / scale).max() <= 1e-2, f"slot {slot}, expert {e}"


@pytest.mark.parametrize("rows_of_item", [8, 16, 32, 64])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K", "MXFP4"])
def test_products_of_experts_match_float64(device: Device, type_name: str, rows_of_item: int) -> None:
    experts, used, features = 9, 3, 3 * block_size(type_name)[0]
    source = np.random.default_rng(rows_of_item)
    stack, weights = random_stack(device, type_name, experts, 200, features, source, absent=(2, 8))
    for rows in (1, 5, 70):
        expert = routing(rows, used, experts, source)
        x = (source.standard_normal((rows, features)) * 10.0 ** source.uniform(-6, 6, (rows, 1))).astype(np.float32)
        groups = group_slots(device, expert, experts, rows_of_item)
        y = run_experts(device, device.put(x), groups, [stack], used).get()
        assert_close(y, np.repeat(x, used, axis=0), expert, weights)


def test_a_wrong_expert_is_seen(device: Device) -> None:
    source = np.random.default_rng(2)
    stack, weights = random_stack(device, "Q8_0", 4, 32, 64, source)
    expert, x = routing(6, 2, 4, source), source.standard_normal((6, 64)).astype(np.float32)
    y = run_experts(device, device.put(x), group_slots(device, expert, 4, 8), [stack], 2).get()
    with pytest.raises(AssertionError):
        assert_close(y, np.repeat(x, 2, axis=0), (expert + 1) % 4, weights)


def dense_products(
    device: Device, stacks: list[Stack], x: NDArray[np.float32], expert: NDArray[np.int32], activation: int | None
) -> NDArray[np.float32]:
    """Slot by slot with the dense kernels; x [slots, in]."""
    slots = expert.size
    y = np.zeros((slots, stacks[0].out_features), np.float32)
    for slot, e in enumerate(expert.ravel()):
        outputs = [device.empty((1, stack.out_features)) for stack in stacks]
        weights = [stack.weights[e] for stack in stacks]
        if weights[0] is None:
            continue
        panel = make_panel(device, device.put(x[slot : slot + 1]))
        jobs = [Job(weight, output) for weight, output in zip(weights, outputs, strict=True) if weight]
        run_linear(device, panel, jobs, activation)
        y[slot] = outputs[0].get()[0]
    return y


@pytest.mark.parametrize("type_name", TYPES)
def test_a_slot_has_the_bits_of_the_dense_kernel_however_many_share_its_expert(device: Device, type_name: str) -> None:
    experts, used = 5, 2
    features = 320 if block_size(type_name)[0] == 32 else 768
    source = np.random.default_rng(7)
    matrices = [random_rows(type_name, 40, features, source)[0] for _ in range(2 * experts)]
    gate = pack_stack(device, type_name, [None, *matrices[1:experts]], features)
    up = pack_stack(device, type_name, [None, *matrices[experts + 1 :]], features)
    x = (source.standard_normal((80, features)) * 0.1).astype(np.float32)
    expert = routing(80, used, experts, source)
    expert[:70, 0] = 3  # more than any item holds
    wide_x = np.repeat(x, used, axis=0)
    few = [*range(6), 159]
    for stacks, activation in (([gate], None), ([gate, up], 0), ([gate, up], 1)):
        expected = dense_products(device, stacks, wide_x[few], expert.ravel()[few], activation)
        several = []
        for rows_of_item in (8, 16, 32, 64):
            groups = group_slots(device, expert, experts, rows_of_item)
            several.append(run_experts(device, device.put(x), groups, stacks, used, activation).get())
            assert np.array_equal(several[-1][few].view(np.uint32), expected.view(np.uint32)), rows_of_item
            assert np.array_equal(several[-1].view(np.uint32), several[0].view(np.uint32)), rows_of_item
        alone = group_slots(device, expert[:3], experts, 8)
        y = run_experts(device, device.put(x[:3]), alone, stacks, used, activation).get()
        assert np.array_equal(y.view(np.uint32), several[0][: 3 * used].view(np.uint32))


@pytest.mark.parametrize("tile", PROMPT_TILES)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K", "NVFP4"])
def test_prompts_of_experts_have_the_bits_of_prompts_of_one_matrix(device: Device, type_name: str, tile: str) -> None:
    experts, used, features, out_features = 4, 2, 3 * block_size(type_name)[0], 145
    source = np.random.default_rng(12)
    matrices = [random_rows(type_name, out_features, features, source)[0] for _ in range(2 * experts)]
    gate = pack_stack(device, type_name, [*matrices[: experts - 1], None], features, scales=[1.0, 0.5, 2.0, 1.0])
    up = pack_stack(device, type_name, [*matrices[experts:-1], None], features)
    x = (source.standard_normal((150, features)) * 0.1).astype(np.float32)
    expert = routing(150, used, experts, source)
    expert[:140, 0] = 2  # which fills more than a tile
    expert[:70, 1] = 3  # elsewhere
    expert[140:] = [0, 1]
    groups = group_slots(device, expert, experts, PROMPT_TILES[tile][0])
    for stacks, activation in (([gate], None), ([gate, up], 0)):
        y = run_experts(device, device.put(x), groups, stacks, used, activation, tile).get()
        for e in range(experts):
            slots = np.flatnonzero(expert.ravel() == e)
            assert len(slots), "every expert has some"
            weights = [stack.weights[e] for stack in stacks]
            if weights[0] is None:
                assert not y[slots].any()
                continue
            outputs = [device.empty((len(slots), out_features)) for _ in stacks]
            scales = ((1.0, 0.5, 2.0)[e], 1.0)
            jobs = [Job(w, to, scale=s) for w, to, s in zip(weights, outputs, scales, strict=False) if w]
            panel = make_panel(device, device.put(x[slots // used]), prompt=True)
            run_linear_prompt(device, panel, jobs, tile, activation)
            assert np.array_equal(y[slots].view(np.uint32), outputs[0].get().view(np.uint32)), (e, activation)


@pytest.mark.parametrize(("rows", "rows_of_item"), [(1, 8), (8, 8), (40, 32)])
def test_a_mixture_is_gate_up_and_down_of_the_chosen_experts(device: Device, rows: int, rows_of_item: int) -> None:
    experts, used, features, inner = 16, 4, 256, 96
    source = np.random.default_rng(rows)
    gate, _ = random_stack(device, "Q8_0", experts, inner, features, source, absent=(5,))
    up, _ = random_stack(device, "Q8_0", experts, inner, features, source, absent=(5,))
    down, weights = random_stack(device, "Q8_0", experts, features, inner, source, absent=(5,))
    expert = routing(rows, used, experts, source)
    x = (source.standard_normal((rows, features)) * 0.1).astype(np.float32)
    groups = group_slots(device, expert, experts, rows_of_item)

    def mixture() -> tuple[Array, Array, Array]:
        act = run_experts(device, device.put(x), groups, [gate, up], used, activation=0)
        made = run_experts(device, act, groups, [down], 1)
        y = device.empty((rows, features))
        weight = np.full((rows, used), 1 / used, np.float32)
        device.kernel("routing", "mix_experts")(
            8, 256, "MixExpertsParams", x=made, weight=device.put(weight), y=y, rows=rows, features=features, used=used
        )
        return act, made, y

    act, made, y = (array.get() for array in mixture())
    assert_close(made, act, expert, weights)
    assert np.allclose(y, made.reshape(rows, used, features).mean(axis=1), rtol=1e-4, atol=1e-6 * np.abs(made).max())
    for one, again in zip((act, made, y), mixture(), strict=True):
        assert np.array_equal(one.view(np.uint32), again.get().view(np.uint32))
