"""Attention of the card over its own pages against float64 over the rounded keys and values.

Tolerance: queries are rounded to f16, scaled codes and weights as well (2^-11 each), sums are f32. A score of size s is
off by s * 2^-11 at most, so a weight by as much; the error of an output is measured against the root of the sum of its
squared products, below 3e-3 over a row.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Device
from support.cuda_kv import Cache, Rows, attend, rounded
from support.cuda_linear import THREADS
from support.cuda_panel import LeftPanel, panel_of

BLOCK_ROWS = (8, 16, 24, 32, 48, 64)
KINDS = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "f16"), ("f16", "q4_0")]


class Problem:
    """Sequences with keys and values, and query rows at the end of each."""

    def __init__(
        self, device: Device, lengths: list[int], counts: list[int], heads: int, kv_heads: int, head_dim: int,
        kinds: tuple[str, str] = ("f16", "f16"), window: int | None = None, group: int | None = None, skew: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        source = np.random.default_rng(seed)
        self.scale, self.group, self.skew = head_dim**-0.5, group or heads // kv_heads, skew
        self.cache = Cache(device, lengths, kv_heads, head_dim, kinds, source, self.group, skew)
        self.k, self.v = [], []
        for s, length in enumerate(lengths):
            k, v = (source.standard_normal((length, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
            v *= 10.0 ** source.uniform(-2, 2, (1, kv_heads, head_dim)).astype(np.float32)
            self.cache.append(k, v, list(range(length)), [s] * length)
            self.k.append(rounded(k, kinds[0])), self.v.append(rounded(v, kinds[1]))
        q = source.standard_normal((sum(counts), heads, head_dim)) * 10.0 ** source.uniform(
            -1, 0.5, (sum(counts), 1, 1)
        )
        ends = [length - count + 1 + i for length, count in zip(lengths, counts, strict=True) for i in range(count)]
        visible = [(0 if window is None else max(0, end - window), end) for end in ends]
        self.rows = Rows(q.astype(np.float32), np.array(visible, np.int32), counts)

    def run(self, block_rows: int | None) -> NDArray[np.float32]:
        return attend(self.cache, self.rows, self.scale, block_rows, list(range(len(self.rows.counts))))

    def check(self, y: NDArray[np.float32]) -> None:
        row = 0
        for s, count in enumerate(self.rows.counts):
            for r in range(row, row + count):
                begin, end = self.rows.visible[r]
                for head in range(self.rows.q.shape[1]):
                    kv_head = (head + self.skew) // self.group
                    if begin >= end:
                        assert not y[r, head].any()
                        continue
                    k, v = self.k[s][begin:end, kv_head], self.v[s][begin:end, kv_head]
                    score = k @ self.rows.q[r, head].astype(np.float64) * self.scale
                    weight = np.exp(score - score.max())
                    weight /= weight.sum()
                    norm = np.linalg.norm(np.sqrt((weight**2) @ v**2))
                    error = np.linalg.norm(y[r, head] - weight @ v) / norm
                    assert error <= 3e-3, f"row {r}, head {head}: relative error {error:.2e}"
            row += count


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size_and_type(device: Device, head_dim: int, kinds: tuple[str, str]) -> None:
    if head_dim == 80 and kinds != ("f16", "f16"):
        pytest.skip("quantised heads are multiples of 32")
    problem = Problem(device, [37, 300], [2, 3], 6, 2, head_dim, kinds, seed=head_dim)
    for block_rows in (16, None):
        problem.check(problem.run(block_rows))


@pytest.mark.parametrize(
    ("head_dim", "kinds"),
    [(64, ("q4_1", "q5_1")), (128, ("q5_0", "q4_1")), (256, ("q5_1", "q5_0")), (64, ("q8_0", "q4_1")),
     (64, ("q5_1", "f16")), (64, ("q5_0", "q4_0"))],
)  # fmt: skip
def test_types_with_kernels_of_their_own(device: Device, head_dim: int, kinds: tuple[str, str]) -> None:
    problem = Problem(device, [37, 600], [2, 3], 6, 2, head_dim, kinds, seed=head_dim)
    for block_rows in (16, 64, None):
        problem.check(problem.run(block_rows))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 700])
def test_decode_of_any_length(device: Device, length: int) -> None:
    problem = Problem(device, [length], [1], 4, 1, 64, ("q8_0", "q8_0"), seed=length)
    for block_rows in (8, None):
        problem.check(problem.run(block_rows))


@pytest.mark.parametrize("length", [16_400, 70_000])
def test_long_sequences_cross_the_sizes_of_partitions(device: Device, length: int) -> None:
    problem = Problem(device, [length], [9], 6, 1, 64, ("q8_0", "q4_0"), seed=length)
    problem.check(problem.run(64))


@pytest.mark.parametrize("heads", [(1, 1), (64, 1), (24, 4), (40, 40), (7, 1)])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_groups_of_heads_and_rows_that_fill_more_than_a_block(
    device: Device, count: int, heads: tuple[int, int]
) -> None:
    problem = Problem(device, [count + 3, 290], [count, count], *heads, 64, seed=count)
    for block_rows in (8, 64):
        problem.check(problem.run(block_rows))


@pytest.mark.parametrize("window", [1, 16, 300])
def test_windows_and_rows_that_see_nothing(device: Device, window: int) -> None:
    problem = Problem(device, [20, 600], [4, 5], 4, 2, 64, window=window, seed=window)
    problem.rows.visible[2] = (7, 7)
    problem.rows.visible[6] = (590, 4)
    for block_rows in (8, 32, None):
        problem.check(problem.run(block_rows))


def test_heads_of_a_rank_that_begin_within_a_group(device: Device) -> None:
    problem = Problem(device, [50], [3], 8, 2, 64, group=6, skew=4)
    for block_rows in (8, None):
        problem.check(problem.run(block_rows))


def test_prompts_of_several_sequences(device: Device) -> None:
    problem = Problem(device, [130, 1, 530], [130, 1, 45], 6, 2, 64, ("q8_0", "q8_0"))
    problem.check(problem.run(None))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_row_has_the_same_bits_whatever_is_beside_it(device: Device, head_dim: int) -> None:
    problem = Problem(device, [290, 40], [7, 3], 6, 2, head_dim, ("q8_0", "q4_0"))
    whole = problem.rows
    for kernels in (BLOCK_ROWS, (None,)):
        together = problem.run(kernels[0])
        for block_rows in kernels:
            assert np.array_equal(problem.run(block_rows), together), block_rows
            for row, sequence in ((0, 0), (4, 0), (8, 1)):
                alone = Rows(whole.q[row : row + 1], whole.visible[row : row + 1], [1])
                y = attend(problem.cache, alone, problem.scale, block_rows, [sequence])
                assert np.array_equal(y[0], together[row]), (block_rows, row)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 1), 64), ((6, 2), 96), ((24, 4), 256), ((40, 2), 256)])
@pytest.mark.parametrize("gates_of_head", [0, 1, 32])
def test_the_merge_gates_its_rows_and_leaves_their_panel(
    device: Device, heads: tuple[int, int], head_dim: int, gates_of_head: int
) -> None:
    """As the kernels apply_gate and panel after it would. 0: without a gate."""
    problem = Problem(device, [300, 20], [3, 6], *heads, head_dim)
    problem.rows.visible[1] = (7, 7)  # a row of zeros
    n, features, gates = 9, heads[0] * head_dim, heads[0] * gates_of_head
    expected = device.put(problem.run(8).reshape(n, features))
    gate = device.put(np.random.default_rng(1).standard_normal((n, max(1, gates))).astype(np.float32))
    if gates > 0:
        device.kernel("rows", "apply_gate")(
            64, THREADS, "ApplyGateParams", x=expected, gate=gate, rows=n, features=features, gates=gates
        )
    arrived, panel = device.put(np.zeros(n, np.uint32)), LeftPanel(device, n, features)
    for _ in range(2):  # the counters are as before
        merge = {"gate": gate, "gates": gates} if gates > 0 else {}
        y = attend(problem.cache, problem.rows, problem.scale, 8, [0, 1], arrived=arrived, out=panel.struct, **merge)
        assert y.tobytes() == expected.get().tobytes()
        assert panel.bits() == panel_of(device, expected).bits()
        assert not arrived.get().any()


def test_infinite_values_that_a_row_does_not_see_do_not_reach_it(device: Device) -> None:
    problem = Problem(device, [40], [1], 2, 1, 64)
    clean = problem.run(8)
    junk = np.full((24, 1, 64), 1e9, np.float32)  # infinity in f16
    problem.cache.append(junk, junk, list(range(40, 64)), [0] * 24)
    assert np.array_equal(problem.run(8), clean)
