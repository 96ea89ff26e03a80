"""Attention to chosen blocks against float64 over the rounded keys and values. Tolerance: that of test_attention.py."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Device
from support.cuda_kv import Cache, feature_blocks, rounded

THREADS = 256
KERNELS = (8, 16, 32)  # heads of a block


def shared_bytes(head_dim: int, heads: int) -> int:
    blocks = feature_blocks(head_dim)
    return heads * (64 * blocks + 592) + 2048 + (8 // blocks - 1) * blocks * 1024


class Problem:
    """Sequences with keys and values; rows with a view and the blocks each of them chose."""

    def __init__(
        self, device: Device, lengths: list[int], counts: list[int], heads: int, kv_heads: int, head_dim: int,
        kinds: tuple[str, str] = ("f16", "f16"), block: int = 4, most: int = 24, group: int | None = None,
        skew: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        source = np.random.default_rng(seed)
        self.device, self.heads, self.head_dim, self.block, self.most = device, heads, head_dim, block, most
        self.group, self.skew, self.scale = group or heads // kv_heads, skew, head_dim**-0.5
        self.cache = Cache(device, lengths, kv_heads, head_dim, kinds, source, self.group, skew)
        self.k, self.v = [], []
        for s, length in enumerate(lengths):
            k, v = (source.standard_normal((length, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
            v *= 10.0 ** source.uniform(-2, 2, (1, kv_heads, head_dim)).astype(np.float32)
            self.cache.append(k, v, list(range(length)), [s] * length)
            self.k.append(rounded(k, kinds[0])), self.v.append(rounded(v, kinds[1]))
        self.sequence = [s for s, count in enumerate(counts) for _ in range(count)]
        self.ends = [n - count + 1 + i for n, count in zip(lengths, counts, strict=True) for i in range(count)]
        q = source.standard_normal((sum(counts), heads, head_dim)) * 10.0 ** source.uniform(
            -1, 0.5, (sum(counts), 1, 1)
        )
        self.q = q.astype(np.float32)
        # Any choice will do.
        self.chosen = [np.sort(source.permutation(end // block)[:most]) for end in self.ends]

    def run(self, kernel: int, in_parts: bool, rows: list[int] | None = None) -> NDArray[np.float32]:
        device, put = self.device, self.device.put
        rows = list(range(len(self.ends))) if rows is None else rows
        n, cache = len(rows), self.cache
        count = np.array([len(self.chosen[r]) for r in rows], np.int32)
        blocks = np.full((n, self.most), -1, np.int32)
        for i, r in enumerate(rows):
            blocks[i, : count[i]] = self.chosen[r]
        partitions = ((self.most + 1) * max(self.block, 4) + 255) // 256 if in_parts else 1
        y = device.empty((n, self.heads, self.head_dim))
        part_y = device.empty((n, self.heads, partitions, self.head_dim)) if in_parts else 0
        part_weight = device.empty((n, self.heads, partitions, 2)) if in_parts else 0
        head_blocks = -(-self.group // kernel)
        fields = {
            "q": put(self.q[rows]), "visible": put(np.array([(0, self.ends[r]) for r in rows], np.int32)), "y": y,
            "sequence": put(np.array([self.sequence[r] for r in rows], np.int32)), "count": put(count),
            "page_table": put(cache.page_table), "blocks": put(blocks), "part_y": part_y, "part_weight": part_weight,
            "cache": cache.struct, "heads": self.heads, "most_pages": cache.most_pages, "block": self.block,
            "most": self.most, "partitions": partitions, "head_blocks": head_blocks, "scale": self.scale,
        }  # fmt: skip
        device.kernel("sparse_attention", f"sparse_attention_{kernel}")(
            (n, cache.kv_heads * head_blocks, partitions), THREADS, "SparseAttentionParams",
            shared_bytes(self.head_dim, kernel), **fields,
        )  # fmt: skip
        if in_parts:
            device.kernel("sparse_attention", "sparse_combine")(
                (self.heads, n), THREADS, "SparseAttentionParams", **fields
            )
        return y.get()

    def seen(self, r: int) -> NDArray[np.int64]:
        block, end = self.block, self.ends[r]
        tokens = (self.chosen[r][:, None] * block + np.arange(block)).ravel()
        return np.concatenate((tokens, np.arange(end // block * block, end))).astype(np.int64)

    def check(self, y: NDArray[np.float32]) -> None:
        for r, s in enumerate(self.sequence):
            tokens = self.seen(r)
            for head in range(self.heads):
                if len(tokens) == 0:
                    assert not y[r, head].any()
                    continue
                kv_head = (head + self.skew) // self.group
                k, v = self.k[s][tokens, kv_head], self.v[s][tokens, kv_head]
                score = k @ self.q[r, head].astype(np.float64) * self.scale
                weight = np.exp(score - score.max())
                weight /= weight.sum()
                norm = np.linalg.norm(np.sqrt((weight**2) @ v**2))
                error = np.linalg.norm(y[r, head] - weight @ v) / norm
                assert error <= 3e-3, f"row {r}, head {head}: relative error {error:.2e}"


KINDS = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "f16"), ("f16", "q4_0")]
COUNTED_KINDS = [("q4_1", "q5_0"), ("q5_0", "q5_1"), ("q5_1", "q4_1")]


@pytest.mark.parametrize("kinds", KINDS + COUNTED_KINDS)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 256])
def test_every_type_and_head_size(device: Device, head_dim: int, kinds: tuple[str, str]) -> None:
    if head_dim == 80 and kinds != ("f16", "f16"):
        pytest.skip("quantised heads are multiples of 32")
    problem = Problem(device, [37, 700], [2, 3], 6, 2, head_dim, kinds, most=100, seed=head_dim)
    problem.check(problem.run(8, True))
    problem.check(problem.run(8, False))


@pytest.mark.parametrize("block", [2, 4, 8, 64, 256])
def test_every_size_of_block_and_incomplete_ones(device: Device, block: int) -> None:
    problem = Problem(device, [1037, 530, 3], [5, 1, 3], 4, 2, 64, ("q8_0", "q4_0"), block, max(1, 300 // block))
    problem.ends[0] = 0  # sees nothing at all
    problem.chosen[0] = np.zeros(0, np.int64)
    problem.chosen[3] = problem.chosen[3][:0]  # nothing but what follows the last complete block
    for in_parts in (True, False):
        problem.check(problem.run(8, in_parts))


@pytest.mark.parametrize(("heads", "kv_heads", "group", "skew"), [(12, 1, 12, 0), (40, 1, 40, 0), (8, 2, 6, 4)])
def test_groups_of_heads_of_every_kernel(device: Device, heads: int, kv_heads: int, group: int, skew: int) -> None:
    problem = Problem(device, [600], [3], heads, kv_heads, 128, group=group, skew=skew, most=90)
    results = [problem.run(kernel, False) for kernel in KERNELS]
    problem.check(results[0])
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_row_has_the_same_bits_whatever_is_beside_it(device: Device, in_parts: bool) -> None:
    problem = Problem(device, [2500, 1300], [4, 3], 8, 2, 256, ("q8_0", "q8_0"), most=256)
    together = problem.run(8, in_parts)
    problem.check(together)
    for row in (0, 5, 6):
        assert np.array_equal(problem.run(8, in_parts, [row])[0], together[row])


def test_tokens_of_other_blocks_do_not_reach_a_row(device: Device) -> None:
    problem = Problem(device, [299], [1], 2, 1, 64, most=20)
    clean = problem.run(8, False)
    others = np.setdiff1d(np.arange(299), problem.seen(0)).tolist()
    junk = np.full((len(others), 1, 64), 1e9, np.float32)  # infinity in f16
    problem.cache.append(junk, junk, others, [0] * len(others))
    assert np.array_equal(problem.run(8, False), clean)
