"""Delta net and causal convolution against float64, with state that is carried from one launch to the next."""

from __future__ import annotations

import numpy as np
import pytest

from support.cuda_delta_net import DeltaNet, first_rows
from support.cuda_device import Device


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 6), (3, 3)])
def test_delta_net_matches_float64(device: Device, key_heads: int, value_heads: int, head_dim: int) -> None:
    source = np.random.default_rng(head_dim)
    net = DeltaNet(key_heads, value_heads, head_dim, source)
    counts, values = [1, 5, 35], value_heads * head_dim * head_dim
    inputs = net.inputs(sum(counts), source)
    states = source.standard_normal((4, value_heads, head_dim, head_dim)).astype(np.float32).astype(np.float64)
    records = np.array([net.record(state) for state in states]).astype(np.float32)
    state_from, state_to = [2, -1, 0], [2, 1, 3]
    memory = device.put(records)
    y, after = net.recurrent(device, inputs, memory, counts, state_from, state_to).run(), memory.get()
    for s, rows in enumerate(np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])):
        before = states[state_from[s]] if state_from[s] >= 0 else np.zeros_like(states[0])
        expected, state = net.expected(tuple(values[rows] for values in inputs), before)
        for found, wanted in ((y[rows].reshape(expected.shape), expected), (after[state_to[s]], net.record(state))):
            assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert np.array_equal(after[0], records[0])
    assert after.shape[1] == values


def test_delta_net_has_the_same_bits_however_a_prompt_is_cut(device: Device) -> None:
    source = np.random.default_rng(3)
    net = DeltaNet(2, 4, 128, source)
    inputs = net.inputs(70, source)
    shape = (1, 4 * 128 * 128)
    memory = device.empty(shape)
    whole, state = net.recurrent(device, inputs, memory, [70], [-1], [0]).run(), memory.get()
    memory, cut = device.empty(shape), []
    for begin, end in ((0, 1), (1, 34), (34, 70)):
        part = tuple(values[begin:end] for values in inputs)
        cut.append(net.recurrent(device, part, memory, [end - begin], [0 if begin else -1], [0]).run())
    assert np.array_equal(np.concatenate(cut), whole)
    assert np.array_equal(memory.get(), state)


def test_delta_net_leaves_longer_sequences_to_the_kernels_of_prompts(device: Device) -> None:
    source = np.random.default_rng(6)
    net, counts = DeltaNet(1, 2, 64, source), [9, 12, 10]
    inputs = net.inputs(sum(counts), source)
    memory = device.empty((3, 2 * 64 * 64))
    kept = memory.get()
    y = net.recurrent(device, inputs, memory, counts, [-1] * 3, [0, 1, 2], most_rows=10).run()
    after = memory.get()
    assert np.isnan(y[9:21]).all()
    assert np.isfinite(y[[*range(9), *range(21, 31)]]).all()
    assert np.array_equal(after[1], kept[1], equal_nan=True)
    assert np.isfinite(after[[0, 2]]).all()


@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (2, 1), (4, 1), (3, 3), (9, 1), (11, 2)])
@pytest.mark.parametrize("channels", [1, 300])
def test_causal_conv_matches_float64_and_carries_its_history(
    device: Device, channels: int, taps: int, dilation: int
) -> None:
    source = np.random.default_rng(taps)
    kept, counts = (taps - 1) * dilation, [1, 2, 40]
    weight = source.standard_normal((taps, channels)).astype(np.float32)
    x = source.standard_normal((sum(counts), channels)).astype(np.float32)
    records = source.standard_normal((4, max(kept, 1) * channels)).astype(np.float32)
    state_from, state_to = [2, -1, 0], [2, 1, 0]
    history, y = device.put(records), device.empty(x.shape)
    device.kernel("causal_conv", "causal_conv")(
        (-(-channels // 256), len(counts)), 256, "CausalConvParams", x=device.put(x), weight=device.put(weight), y=y,
        history=history, state_from=device.put(np.array(state_from, np.int32)),
        state_to=device.put(np.array(state_to, np.int32)), first_row=device.put(first_rows(counts)[:-1]),
        end_row=device.put(first_rows(counts)[1:]), slot_values=records.shape[1], channels=channels, taps=taps,
        dilation=dilation,
    )  # fmt: skip
    found, after = y.get(), history.get()
    for s, rows in enumerate(np.split(np.arange(len(x)), np.cumsum(counts)[:-1])):
        old = records[state_from[s], : kept * channels].reshape(kept, channels)
        tokens = np.concatenate((old if state_from[s] >= 0 else np.zeros_like(old), x[rows])).astype(np.float64)
        sums = sum(weight[t] * tokens[t * dilation : t * dilation + len(rows)] for t in range(taps))
        expected = sums / (1 + np.exp(-sums))
        assert np.abs(found[rows] - expected).max() <= 1e-5 * np.abs(expected).max()
        assert np.array_equal(after[state_to[s], : kept * channels], tokens[len(rows) :].astype(np.float32).reshape(-1))
    assert np.array_equal(after[3], records[3])
