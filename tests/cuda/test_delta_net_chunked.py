"""The delta net in chunks against the recurrence in float64, and its bits however a prompt is cut.

Tolerance: keys, queries, the state and what is written are rounded to f16 once per product (2^-12 of each, root mean
square), and errors of the state fade as the state is written over. The error of a head's outputs is below 2e-3 of their
size, both as root mean squares; without fading and with keys that are alike it comes to 1.2e-3.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_delta_net import DeltaNet, Inputs
from support.cuda_device import Device

TOLERANCE = 2e-3


def relative(found: NDArray[np.float32], expected: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def part(inputs: Inputs, begin: int, end: int) -> Inputs:
    return tuple(values[begin:end] for values in inputs)


class Problem:
    """Sequences that begin somewhere, with states before their rows."""

    def __init__(
        self, net: DeltaNet, counts: list[int], positions: list[int], source: np.random.Generator
    ) -> None:  # fmt: skip
        self.net, self.counts, self.positions = net, counts, positions
        self.inputs = net.inputs(sum(counts), source)
        shape = (len(counts), net.value_heads, net.head_dim, net.head_dim)
        self.states = source.standard_normal(shape).astype(np.float32).astype(np.float64)

    def run(self, device: Device, which: list[int]) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Outputs and records after the rows of the sequences `which`, in one launch; every second state in place."""
        net, n = self.net, len(which)
        records = [net.record(self.states[s]).astype(np.float32) for s in which]
        memory = device.put(np.concatenate((records, np.full_like(records, np.nan))))
        state_to = [i if i % 2 == 0 else n + i for i in range(n)]
        ends = np.cumsum(self.counts)
        parts = [part(self.inputs, ends[s] - self.counts[s], ends[s]) for s in which]
        counts = [self.counts[s] for s in which]
        y = net.chunked(
            device, tuple(np.concatenate(each) for each in zip(*parts, strict=True)), memory, counts,
            [self.positions[s] for s in which], list(range(n)), state_to,
        ).run()  # fmt: skip
        after = memory.get()
        for i in range(1, n, 2):
            assert np.array_equal(after[i], records[i]), "a state that is only read was written"
        return np.split(y, np.cumsum(counts)[:-1]), [after[i] for i in state_to]

    def expected(self, s: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        end = sum(self.counts[: s + 1])
        return self.net.expected(part(self.inputs, end - self.counts[s], end), self.states[s])

    def check(self, device: Device) -> None:
        outputs, records = self.run(device, list(range(len(self.counts))))
        for s, (y, record) in enumerate(zip(outputs, records, strict=True)):
            expected, state = self.expected(s)
            y = y.reshape(expected.shape)
            for head in range(self.net.value_heads):
                error = relative(y[:, head], expected[:, head])
                assert error <= TOLERANCE, f"sequence {s}, head {head}: error {error:.2e}"
            assert relative(record, self.net.record(state)) <= TOLERANCE


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 6), (1, 5)])
def test_sequences_of_any_length_and_place(device: Device, key_heads: int, value_heads: int, head_dim: int) -> None:
    source = np.random.default_rng(head_dim + value_heads)
    net = DeltaNet(key_heads, value_heads, head_dim, source)
    Problem(net, [1, 64, 5, 131], [0, 128, 62, 37], source).check(device)


def test_a_prompt_that_begins_has_a_state_of_zeros(device: Device) -> None:
    source = np.random.default_rng(2)
    net = DeltaNet(1, 2, 64, source)
    inputs = net.inputs(70, source)
    memory = device.empty((1, 2 * 64 * 64))
    y = net.chunked(device, inputs, memory, [70], [0], [-1], [0]).run()
    expected, state = net.expected(inputs, np.zeros((2, 64, 64)))
    assert relative(y.reshape(expected.shape), expected) <= TOLERANCE
    assert relative(memory.get()[0], net.record(state)) <= TOLERANCE


def test_the_tolerance_sees_one_gate_that_is_different(device: Device) -> None:
    source = np.random.default_rng(4)
    problem = Problem(DeltaNet(1, 1, 64, source), [80], [0], source)
    (y,), _ = problem.run(device, [0])
    assert relative(y, problem.expected(0)[0][:, 0]) <= TOLERANCE
    problem.inputs[1][40] += 0.5
    assert relative(y, problem.expected(0)[0][:, 0]) > TOLERANCE


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_are_the_same_when_a_prompt_is_cut_between_chunks(device: Device, head_dim: int) -> None:
    source = np.random.default_rng(3)
    net = DeltaNet(2, 4, head_dim, source)
    rows, position = 215, 30
    inputs = net.inputs(rows, source)

    def run(cuts: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        memory, outputs = device.empty((1, 4 * head_dim * head_dim)), []
        for begin, end in zip([0, *cuts], [*cuts, rows], strict=True):
            work = net.chunked(
                device, part(inputs, begin, end), memory, [end - begin], [position + begin], [0 if begin else -1], [0]
            )
            outputs.append(work.run())
        return np.concatenate(outputs), memory.get()

    whole, state = run([])
    for cuts in ([34], [98, 162], [34, 98, 162]):
        y, after = run(cuts)
        assert np.array_equal(y, whole), cuts
        assert np.array_equal(after, state), cuts
    y, after = run([1, 50, 214])  # within chunks: other bits, the same values
    assert relative(y, whole.astype(np.float64)) <= TOLERANCE
    assert relative(after, state.astype(np.float64)) <= TOLERANCE


def test_a_sequence_has_the_same_bits_alone_and_among_others(device: Device) -> None:
    source = np.random.default_rng(7)
    problem = Problem(DeltaNet(1, 3, 128, source), [70, 3, 140], [0, 200, 11], source)
    together, states = problem.run(device, [0, 1, 2])
    for s in range(3):
        (alone,), (state,) = problem.run(device, [s])
        assert np.array_equal(alone, together[s]), s
        assert np.array_equal(state, states[s]), s
    again, states_again = problem.run(device, [0, 1, 2])
    assert all(np.array_equal(x, y) for x, y in zip(together + states, again + states_again, strict=True))


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e6, 1e12])
def test_values_of_any_size(device: Device, size: float) -> None:
    source = np.random.default_rng(9)
    net = DeltaNet(1, 1, 64, source)
    problem = Problem(net, [100], [0], source)
    problem.inputs[0][:, 2 * 64 :] *= size
    problem.states *= size
    problem.check(device)


def test_a_large_value_does_not_hide_a_small_one(device: Device) -> None:
    source = np.random.default_rng(10)
    net = DeltaNet(1, 1, 64, source)
    problem = Problem(net, [100], [0], source)
    sizes = 10.0 ** np.linspace(-2, 2, 64)
    problem.inputs[0][:, 2 * 64 :] *= sizes.astype(np.float32)
    problem.states *= sizes
    (y,), _ = problem.run(device, [0])
    expected, _ = problem.expected(0)
    errors = np.linalg.norm(y - expected[:, 0], axis=0) / np.linalg.norm(expected[:, 0], axis=0)
    assert errors.max() <= 1.5 * TOLERANCE, errors  # of one column each, not of a head


@pytest.mark.parametrize("fading", [0.0, 60.0])
def test_gates_at_their_ends(device: Device, fading: float) -> None:
    """Memories that keep everything, and some that forget it within a token: no overflow, no NaN."""
    source = np.random.default_rng(11)
    net = DeltaNet(1, 2, 64, source)
    net.a = np.array([-fading, -1e-3], np.float32)
    problem = Problem(net, [130], [0], source)
    problem.inputs[1][::3] = 40  # strengths of one
    problem.inputs[1][1::3] = -120  # and of zero
    problem.check(device)


def alike_keys(net: DeltaNet, rows: int, source: np.random.Generator) -> Inputs:
    """Keys that have much in common, strong writes, memories that hardly fade."""
    net.a = -np.exp(source.uniform(-8, -6, net.value_heads)).astype(np.float32)
    qkv, beta, alpha = net.inputs(rows, source)
    width = 2 * net.key_heads * net.head_dim
    qkv[:, :width] += source.standard_normal(width).astype(np.float32)
    return qkv / (1 + np.exp(-qkv)), 2 * beta + 2, alpha


def test_errors_do_not_grow_with_the_length(device: Device) -> None:
    source = np.random.default_rng(12)
    net = DeltaNet(1, 1, 64, source)
    rows = 1500
    problem = Problem(net, [rows], [0], source)
    problem.inputs = alike_keys(net, rows, source)
    (y,), _ = problem.run(device, [0])
    expected, _ = problem.expected(0)
    for begin in range(0, rows, 500):
        window = slice(begin, begin + 500)
        assert relative(y[window], expected[window, 0]) <= TOLERANCE, begin
