"""The indexer of sparse attention against numpy: keys of blocks, their scores in float64, the choice exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Device
from support.cuda_kv import Cache, rounded

THREADS, CHOOSE_THREADS = 256, 512
EPS = 1e-6
LENGTHS = [700, 33]


def first_rows(counts: list[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


class Index:
    """Two sequences whose index keys were appended in three ubatches, with the blocks' keys as numpy makes them."""

    def __init__(self, device: Device, block: int, head_dim: int, kind: str) -> None:
        source = np.random.default_rng(block * head_dim)
        self.device, self.block, self.head_dim = device, block, head_dim
        self.cache = Cache(device, LENGTHS, 1, head_dim, (kind, kind), source, block=block)
        self.weight = source.uniform(0.5, 2, head_dim).astype(np.float32)
        self.pairs = head_dim // 4
        self.raw = [source.standard_normal((n, 1, head_dim)).astype(np.float32) for n in LENGTHS]
        self.angles = [source.uniform(-3, 3, (n // block, self.pairs)) for n in LENGTHS]
        done = [0, 0]
        for upto in ([259, 5], [260, 6], LENGTHS):  # ubatches that end inside a block, and of a single token
            rows = [(s, i) for s in range(2) for i in range(done[s], upto[s])]
            self.append(rows)
            done = upto

    def append(self, rows: list[tuple[int, int]]) -> None:
        device, put = self.device, self.device.put
        keys = np.stack([self.raw[s][i] for s, i in rows])
        sequence, index = [s for s, _ in rows], [i for _, i in rows]
        self.cache.append(None, keys, index, sequence)
        ends = [(s, i // self.block) for s, i in rows if (i + 1) % self.block == 0]
        angles = np.stack([self.angles[s][b] for s, b in ends]) if ends else np.zeros((1, self.pairs))
        numbers = iter(range(len(ends)))
        block_row = [next(numbers) if (i + 1) % self.block == 0 else -1 for i in index]
        device.kernel("block_index", "append_block_keys")(
            -(-len(rows) // 8), THREADS, "BlockKeysParams", weight=put(self.weight), pairs=self.pairs, eps=EPS,
            cosine=put(np.cos(angles).astype(np.float32)), sine=put(np.sin(angles).astype(np.float32)), rows=len(rows),
            block_row=put(np.array(block_row, np.int32)), kv_index=put(np.array(index, np.int32)),
            sequence=put(np.array(sequence, np.int32)), page_table=put(self.cache.page_table), cache=self.cache.struct,
            most_pages=self.cache.most_pages,
        )  # fmt: skip

    def expected_keys(self, sequence: int) -> NDArray[np.float64]:
        n = LENGTHS[sequence] // self.block
        tokens = rounded(self.raw[sequence][:, 0], self.cache.kinds[1])[: n * self.block]
        mean = tokens.reshape(n, self.block, self.head_dim).mean(axis=1)
        key = mean / np.sqrt((mean**2).mean(axis=-1, keepdims=True) + EPS) * self.weight
        a, b = key[:, : self.pairs].copy(), key[:, self.pairs : 2 * self.pairs].copy()
        c, s = np.cos(self.angles[sequence]), np.sin(self.angles[sequence])
        key[:, : self.pairs], key[:, self.pairs : 2 * self.pairs] = a * c - b * s, a * s + b * c
        return key


SHAPES = [
    (4, 128, "f16"),
    (4, 96, "q8_0"),
    (2, 64, "q4_0"),
    (16, 80, "f16"),
    (64, 256, "q8_0"),
    (256, 32, "f16"),
    (4, 32, "q4_1"),
    (4, 64, "q5_0"),
]


@pytest.mark.parametrize(("block", "head_dim", "kind"), SHAPES)
def test_a_block_has_the_normed_and_rotated_mean_of_its_tokens(
    device: Device, block: int, head_dim: int, kind: str
) -> None:
    index = Index(device, block, head_dim, kind)
    for sequence, length in enumerate(LENGTHS):
        keys, tokens = index.cache.read(sequence, length)
        assert np.array_equal(tokens, rounded(index.raw[sequence], kind))
        expected = index.expected_keys(sequence)
        # Half a step of f16; of codes half a step (q4_0: a whole one at the far end) and the rounding of their scale.
        # q4_1: its step is a fifteenth of twice the largest.
        step = {"f16": 2.0**-11, "q8_0": 1 / 254 + 2.0**-11, "q4_0": 1 / 8 + 2.0**-11}.get(kind, 1 / 15 + 2.0**-10)
        size = np.abs(expected) if kind == "f16" else np.abs(expected).reshape(-1, head_dim // 32, 32).max(axis=-1)
        size = size if kind == "f16" else np.repeat(size, 32, axis=-1)
        assert (np.abs(keys[:, 0] - expected) <= size * step * 1.01 + 2e-6).all()


def scored(
    index: Index, q: NDArray[np.float32], counts: list[int], visible: NDArray[np.int32], rows: int, most: int, grid: int
) -> NDArray[np.float32]:
    device, cache, (n, heads, _) = index.device, index.cache, q.shape
    stride = max(LENGTHS) // index.block + 3
    scores = device.empty((n, stride))
    shared = heads * rows * (-(-index.head_dim // 32) * 128 + 4)
    device.kernel("block_index", f"score_blocks_{rows}")(
        (-(-max(counts) // rows) + 1, grid, len(counts)), THREADS, "ScoreBlocksParams", shared, q=device.put(q),
        visible=device.put(visible), first_row=device.put(first_rows(counts)), scores=scores, cache=cache.struct,
        page_table=device.put(cache.page_table), heads=heads, most_pages=cache.most_pages, score_stride=stride,
        most=most,
    )  # fmt: skip
    return scores.get()


@pytest.mark.parametrize(("block", "head_dim", "kind"), SHAPES)
def test_scores_are_sums_over_heads_of_positive_products(device: Device, block: int, head_dim: int, kind: str) -> None:
    index = Index(device, block, head_dim, kind)
    source = np.random.default_rng(1)
    counts, heads = [37, 2], 1 if head_dim == 256 else 3
    q = source.standard_normal((sum(counts), heads, head_dim)) * 10.0 ** source.uniform(-3, 3, (sum(counts), 1, 1))
    q = q.astype(np.float32)
    ends = [n - count + 1 + i for n, count in zip(LENGTHS, counts, strict=True) for i in range(count)]
    visible = np.array([(0, end) for end in ends], np.int32)
    found = scored(index, q, counts, visible, 8, 0, 2)
    row = 0
    for sequence, count in enumerate(counts):
        keys = index.cache.read(sequence, LENGTHS[sequence])[0][:, 0]
        for r in range(row, row + count):
            complete = ends[r] // block
            products = q[r].astype(np.float64) @ keys[:complete].T
            magnitude = (np.abs(q[r]).astype(np.float64) @ np.abs(keys[:complete]).T).sum(axis=0)
            error = np.abs(found[r, :complete] - np.maximum(products, 0).sum(axis=0))
            tolerance = 2e-6 if kind in ("f16", "q8_0", "q4_0") else 1e-3  # the others' keys are rounded to f16
            assert (error <= magnitude * tolerance).all(), f"row {r}: {(error / magnitude).max():.2e}"
            assert np.isnan(found[r, complete:]).all()  # beyond what the row sees nothing is written
        row += count
    for rows, grid in ((32, 1), (8, 9)):  # the same bits from the other kernel and another grid
        assert np.array_equal(scored(index, q, counts, visible, rows, 0, grid), found, equal_nan=True)
    most = ends[0] // block - 1  # of the first sequence all rows choose, of the second none
    few = scored(index, q, counts, visible, 32, most, 3)
    assert np.array_equal(few[: counts[0]], found[: counts[0]], equal_nan=True)
    assert np.isnan(few[counts[0] :]).all()


@pytest.mark.parametrize("most", [1, 13, 512])
def test_the_best_blocks_are_chosen_and_of_equals_the_first(device: Device, most: int) -> None:
    source = np.random.default_rng(most)
    block, stride = 4, 70_003
    complete = [0, 1, 12, 13, 14, 511, 513, 2048, 2049, 20_000, 70_000, 5000, 5000, 5000]
    scores = np.maximum(source.standard_normal((len(complete), stride)), 0).astype(np.float32)
    scores[-1] = 0  # all equal
    scores[-2] = np.round(scores[-2] * 2)  # few values
    scores[-3] = 1 + np.round(scores[-3] * 8) * np.float32(2**-23)  # apart in the last bits only
    scores[8, ::3] = np.inf
    visible = np.array([(0, n * block + n % block) for n in complete], np.int32)
    count, blocks = device.empty((len(complete),), np.int32), device.empty((len(complete), most), np.int32)
    fields: dict[str, Any] = {"scores": device.put(scores), "visible": device.put(visible)}
    device.kernel("block_index", "choose_blocks")(
        len(complete), CHOOSE_THREADS, "ChooseBlocksParams", count=count, blocks=blocks, rows=len(complete),
        score_stride=stride, block=block, most=most, **fields,
    )  # fmt: skip
    assert np.array_equal(count.get(), np.minimum(complete, most))
    for r, n in enumerate(complete):
        expected = np.sort(np.argsort(-scores[r, :n], kind="stable")[:most])
        found = blocks.get()[r]
        assert np.array_equal(found[: len(expected)], expected), f"row {r}"
        assert (found[len(expected) :] == -1).all()
