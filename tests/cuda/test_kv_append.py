"""Pages written by the card and read by numpy, and by the card: codes are those of the rounding rules, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from support.cuda_device import Device, struct_of
from support.cuda_kv import Cache, rounded


@pytest.mark.parametrize(
    ("kinds", "head_dim"),
    [(("f16", "f16"), 80), (("f16", "f16"), 256), (("q8_0", "q8_0"), 128), (("q4_0", "q4_0"), 64),
     (("q4_0", "q8_0"), 96), (("q8_0", "q4_0"), 256), (("f16", "q4_0"), 64), (("q4_1", "q5_0"), 96),
     (("q5_1", "q4_1"), 64), (("q5_0", "q5_1"), 128)],
)  # fmt: skip
def test_pages_hold_the_rounded_keys_and_values(device: Device, kinds: tuple[str, str], head_dim: int) -> None:
    source = np.random.default_rng(head_dim)
    lengths, kv_heads = [3, 300], 3
    cache = Cache(device, lengths, kv_heads, head_dim, kinds, source)
    shape = (sum(lengths), kv_heads, head_dim)
    k, v = (
        (source.standard_normal(shape) * 10.0 ** source.uniform(-3, 3, (*shape[:2], 1))).astype(np.float32)
        for _ in range(2)
    )
    k[1] = 0  # a block without a largest value
    v[0, 0, 3:9] = [2, -5, 5, -5, 4, 5]  # the first of equals decides the sign of the scale
    sequence = [0] * lengths[0] + [1] * lengths[1]
    index = [*range(lengths[0]), *range(lengths[1])]
    cut = 100  # in two ubatches, the second in the middle of what shares words with the first
    cache.append(k[:cut], v[:cut], index[:cut], sequence[:cut])
    cache.append(k[cut:], v[cut:], index[cut:], sequence[cut:])
    for s, length in enumerate(lengths):
        rows = [r for r, of in enumerate(sequence) if of == s]
        for found, stored, kind in zip(cache.read(s, length), (k[rows], v[rows]), kinds, strict=True):
            assert np.array_equal(found, rounded(stored, kind))


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_a_token_that_is_written_again_leaves_its_neighbours_alone(device: Device, kind: str) -> None:
    source = np.random.default_rng(5)
    cache = Cache(device, [40], 2, 64, (kind, kind), source)
    k, v, other = (source.standard_normal((40, 2, 64)).astype(np.float32) for _ in range(3))
    cache.append(k, v, list(range(40)), [0] * 40)
    cache.append(other[13:14], other[13:14], [13], [0])
    k[13], v[13] = other[13], other[13]
    for found, stored in zip(cache.read(0, 40), (k, v), strict=True):
        assert np.array_equal(found, rounded(stored, kind))


@pytest.mark.parametrize(
    ("kinds", "head_dim"),
    [(("f16", "q4_0"), 96), (("q8_0", "f16"), 64), (("q4_0", "q8_0"), 256), (("q4_1", "q5_1"), 96),
     (("q5_1", "q5_0"), 64), (("q5_0", "q4_1"), 64)],
)  # fmt: skip
def test_what_is_read_back_is_exact_and_storing_it_again_changes_no_bit(
    device: Device, kinds: tuple[str, str], head_dim: int
) -> None:
    source = np.random.default_rng(head_dim)
    length, first, kv_heads = 300, 37, 3
    cache = Cache(device, [5, length], kv_heads, head_dim, kinds, source)
    shape = (length, kv_heads, head_dim)
    k, v = (
        (source.standard_normal(shape) * 10.0 ** source.uniform(-3, 3, (*shape[:2], 1))).astype(np.float32)
        for _ in range(2)
    )
    k[first] = 0
    cache.append(k, v, list(range(length)), [1] * length)
    before = cache.pages.get()
    read = cache.load(1, first, length - first)
    for found, stored, kind in zip(read, (k, v), kinds, strict=True):
        assert np.array_equal(found, rounded(stored[first:], kind).astype(np.float32))
    cache.append(*read, list(range(first, length)), [1] * (length - first))
    assert np.array_equal(cache.pages.get(), before)


@pytest.mark.parametrize("kinds", [("f16", "f16"), ("q8_0", "q4_0")], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (1, 1, 256), (0, 3, 64), (5, 1, 80)])
@pytest.mark.parametrize("halves", [0, 1])
@pytest.mark.parametrize("normed", [False, True])
def test_turned_and_appended_is_turned_then_appended(
    device: Device, kinds: tuple[str, str], heads: int, kv_heads: int, head_dim: int, halves: int, normed: bool
) -> None:
    if head_dim % 32 != 0 and kinds != ("f16", "f16"):
        pytest.skip("quantised heads are multiples of 32")
    source = np.random.default_rng(heads)
    lengths, rows, pairs = [270, 3], 7, head_dim // 2 - 8
    kv_index, sequence = [3, 255, 256, 257, 269, 0, 2], [0, 0, 0, 0, 0, 1, 1]

    def normal(*shape: int) -> np.ndarray:
        return source.standard_normal(shape).astype(np.float32)

    q, k, v = normal(rows, max(heads, 1), head_dim), normal(rows, kv_heads, head_dim), normal(rows, kv_heads, head_dim)
    angles = {"cosine": device.put(normal(rows, pairs)), "sine": device.put(normal(rows, pairs))}
    norms = [device.put(normal(head_dim)) if normed else 0 for _ in range(2)]
    results = []
    for fused in (False, True):
        cache = Cache(device, lengths, kv_heads, head_dim, kinds, np.random.default_rng(1))
        turned = [device.put(q), device.put(k)]
        parts = [
            {
                "x": x, "weight": weight, "rows": rows, "heads": n, "head_dim": head_dim, "pairs": pairs,
                "halves": halves, "eps": 1e-5, **angles,
            }
            for x, weight, n in zip(turned, norms, (heads, kv_heads), strict=True)
        ]  # fmt: skip
        append = {
            "k": turned[1], "v": device.put(v), "kv_index": device.put(np.array(kv_index, np.int32)), "rows": rows,
            "sequence": device.put(np.array(sequence, np.int32)), "page_table": device.put(cache.page_table),
            "most_pages": cache.most_pages, "cache": cache.struct,
        }  # fmt: skip
        blocks = -(-head_dim // 32)
        if fused:
            structs = [struct_of("NormRopeParams", **part) for part in parts]
            warps = rows * (heads + kv_heads + kv_heads * blocks)
            device.kernel("kv_append", "rotate_and_append")(
                -(-warps // 8), 256, "RotateAppendParams", q=structs[0], k=structs[1],
                append=struct_of("KvAppendParams", **append),
            )  # fmt: skip
        else:
            for part in parts:
                if part["heads"] > 0:
                    device.kernel("rows", "norm_rope")(-(-rows * part["heads"] // 8), 256, "NormRopeParams", **part)
            warps = rows * kv_heads * blocks * 2
            device.kernel("kv_append", "kv_append")(-(-warps // 8), 256, "KvAppendParams", **append)
        results.append((turned[0].get().tobytes(), turned[1].get().tobytes(), cache.pages.get().tobytes()))
    assert results[0] == results[1]
