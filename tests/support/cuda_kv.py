"""Pages of the device's KV cache (kv_page.h), read by numpy, and attention over them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.cuda_device import Array, Device, parameter_structs

PAGE_TOKENS, TILES, THREADS = 256, 8, 256
TYPES = {"f16": 0, "q8_0": 1, "q4_0": 2, "q4_1": 3, "q5_0": 4, "q5_1": 5}
LOADS = {"f16": 4, "q8_0": 2}  # of a strip; others 1
FIFTH_BITS, MINIMUMS = ("q5_0", "q5_1"), ("q4_1", "q5_1")
COUNTED = ("q4_1", "q5_0", "q5_1")  # whose attention kernels are units of their own
PAGE_GAP = 48  # bytes between pages, so that the stride is not the page's size


def feature_blocks(head_dim: int) -> int:
    return -(-head_dim // 32)


def key_tiles(block: int) -> int:
    """Tiles of 32 keys in a page; block: of an index cache, else 0."""
    return TILES if block == 0 else -(-(PAGE_TOKENS // block) // 32)


def part_bytes(kind: str, head_dim: int, tiles: int = TILES) -> int:
    scales = 0 if kind == "f16" else 128 if kind in MINIMUMS else 64
    return tiles * feature_blocks(head_dim) * (strip_bytes(kind) + scales)


def strip_bytes(kind: str) -> int:
    return LOADS.get(kind, 1) * 512 + (128 if kind in FIFTH_BITS else 0)


def rounded(x: NDArray[np.float32], kind: str) -> NDArray[np.float64]:
    """What the cache keeps of x [..., head_dim], by the rules of ops.h."""
    if kind == "f16":
        return x.astype(np.float16).astype(np.float64)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    if kind == "q8_0":
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        with np.errstate(divide="ignore", over="ignore"):
            quotient = np.float32(127) / largest
        codes = np.rint(blocks * np.where(np.isfinite(quotient), quotient, np.float32(0)))
        scale = largest / np.float32(127)
        return (codes * scale.astype(np.float16).astype(np.float64)).reshape(x.shape)
    most = 31 if kind in FIFTH_BITS else 15
    if kind in MINIMUMS:
        offset = blocks.min(axis=-1, keepdims=True)
        scale = (blocks.max(axis=-1, keepdims=True) - offset) / np.float32(most)
        first = 0.5
    else:
        offset = np.zeros((*blocks.shape[:-1], 1), np.float32)
        scale = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1) / np.float32(
            -(most + 1) / 2
        )
        first = (most + 1) / 2 + 0.5
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    # fma: the product of two f32 is exact in f64, the sum is rounded once more than it should be, by far less
    sums = ((blocks - offset).astype(np.float64) * inverse + first).astype(np.float32)
    codes = np.minimum(most, np.trunc(sums))
    stored = scale.astype(np.float16).astype(np.float64)
    if kind in MINIMUMS:
        return (codes * stored + offset.astype(np.float16)).reshape(x.shape)
    return ((codes - (most + 1) / 2) * stored).reshape(x.shape)


def lane_of_column(column: int) -> int:
    return (column & 3) | (column >> 3 & 3) << 2 | (column >> 2 & 1) << 4


def read_part(
    part: NDArray[np.uint8], kind: str, head_dim: int, is_value: bool, tiles: int = TILES
) -> NDArray[np.float64]:
    """[32 tiles, head_dim] of one head's keys or values."""
    blocks, loads = feature_blocks(head_dim), LOADS.get(kind, 1)
    strips, size = tiles * blocks, strip_bytes(kind)
    packed = part[: strips * size].reshape(strips, size)
    codes = packed[:, : loads * 512].reshape(strips, loads, 32, 16)
    lanes = codes.transpose(0, 2, 1, 3)[:, [lane_of_column(c) for c in range(32)]].reshape(strips, 32, loads * 16)
    if kind == "f16":
        values = np.ascontiguousarray(lanes).view(np.float16).astype(np.float64)
    elif kind == "q8_0":
        values = lanes.view(np.int8).astype(np.float64)
    else:
        words = np.ascontiguousarray(lanes).view("<u4")
        places = [4 * (k % 8 // 2 + 4 * (k % 2)) for k in range(32)]
        levels = np.stack([words[..., k // 8] >> places[k] & 15 for k in range(32)], axis=-1)
        if kind in FIFTH_BITS:
            fifth = np.ascontiguousarray(packed[:, 512:]).view("<u4")[:, [lane_of_column(c) for c in range(32)]]
            pair = [k % 8 // 2 for k in range(32)]
            bits = [(4 + 4 * (pair[k] % 2) + 16 * (k % 2) + k // 8 + 8 * (pair[k] // 2)) % 32 for k in range(32)]
            levels = levels + 16 * np.stack([fifth >> bit & 1 for bit in bits], axis=-1)
        values = levels.astype(np.float64) - {"q4_0": 8, "q5_0": 16}.get(kind, 0)
    shape = (blocks, tiles, 32, 32) if is_value else (tiles, blocks, 32, 32)
    values = values.reshape(shape)  # [.., owner, packed]
    values = values.transpose(1, 3, 0, 2) if is_value else values.transpose(0, 2, 1, 3)  # [tile, token, block, feature]
    if kind != "f16":
        halves = part[strips * size :].view(np.float16).astype(np.float64).reshape(-1, *shape[:3])
        for i, scales in enumerate(halves):  # scales, then minimums
            if is_value:
                scales = scales.transpose(1, 2, 0)
            else:
                scales = scales[..., [lane_of_column(c) for c in range(32)]].transpose(0, 2, 1)
            values = values * scales[..., None] if i == 0 else values + scales[..., None]
    return values.reshape(tiles * 32, blocks * 32)


class Cache:
    """One layer's pages for several sequences; which page holds what is shuffled."""

    def __init__(
        self, device: Device, lengths: list[int], kv_heads: int, head_dim: int, kinds: tuple[str, str],
        source: np.random.Generator, group: int = 1, skew: int = 0, block: int = 0,
    ) -> None:  # fmt: skip
        self.device, self.kv_heads, self.head_dim, self.kinds, self.block = device, kv_heads, head_dim, kinds, block
        self.sizes = (part_bytes(kinds[0], head_dim, key_tiles(block)), part_bytes(kinds[1], head_dim))
        self.page_bytes = kv_heads * sum(self.sizes) + PAGE_GAP
        self.most_pages = max(-(-length // PAGE_TOKENS) for length in lengths) + 1
        pages = source.permutation(len(lengths) * self.most_pages).reshape(len(lengths), -1)
        self.page_table = pages.astype(np.int32)
        self.pages = device.empty((pages.size, self.page_bytes), np.uint8)  # all ones: NaN in f16
        self.struct = parameter_structs()["KvCache"](
            pages=self.pages.address, page_bytes=self.page_bytes, kv_heads=kv_heads, head_dim=head_dim,
            type_k=TYPES[kinds[0]], type_v=TYPES[kinds[1]], group=group, skew=skew, block=block,
        )  # fmt: skip

    def append(self, k: NDArray[Any] | None, v: NDArray[Any], kv_index: list[int], sequence: list[int]) -> None:
        """k, v [rows, kv_heads, head_dim]; k None: only values."""
        put, rows = self.device.put, len(v)
        warps = rows * self.kv_heads * feature_blocks(self.head_dim) * 2
        self.device.kernel("kv_append", "kv_append")(
            -(-warps // (THREADS // 32)), THREADS, "KvAppendParams", k=0 if k is None else put(k), v=put(v), rows=rows,
            cache=self.struct,
            kv_index=put(np.array(kv_index, np.int32)), sequence=put(np.array(sequence, np.int32)),
            page_table=put(self.page_table), most_pages=self.most_pages,
        )  # fmt: skip

    def load(self, sequence: int, first: int, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What the card reads back at indices first.. of a sequence: keys and values [rows, kv_heads, head_dim]."""
        k, v = (self.device.empty((rows, self.kv_heads, self.head_dim)) for _ in range(2))
        warps = rows * self.kv_heads * feature_blocks(self.head_dim) * 2
        page, place = divmod(first, PAGE_TOKENS)
        where = np.array([place, *self.page_table[sequence][page:]], np.int32)
        self.device.kernel("kv_append", "kv_read")(
            -(-warps // (THREADS // 32)), THREADS, "KvReadParams", k=k, v=v, rows=rows, cache=self.struct,
            where=self.device.put(where),
        )  # fmt: skip
        return k.get(), v.get()

    def read(self, sequence: int, length: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Keys (of an index: one for each block) and values [length, kv_heads, head_dim] as numpy finds them."""
        raw = self.pages.get()
        found = []
        start = 0
        for is_value, (kind, size) in enumerate(zip(self.kinds, self.sizes, strict=True)):
            block = 1 if is_value else max(1, self.block)
            tiles = TILES if is_value else key_tiles(self.block)
            heads = []
            for head in range(self.kv_heads):
                at = start + head * size
                parts = [
                    read_part(
                        raw[self.page_table[sequence, page], at : at + size], kind, self.head_dim, bool(is_value), tiles
                    )[: PAGE_TOKENS // block]
                    for page in range(-(-length // PAGE_TOKENS))
                ]
                heads.append(np.concatenate(parts)[: length // block, : self.head_dim])
            found.append(np.stack(heads, axis=1))
            start += self.kv_heads * size
        return found[0], found[1]


def partition_of(index: int) -> int:
    if index < 16384:
        return index // 256
    return 64 + (index - 16384) // 512 if index < 65536 else 160 + (index - 65536) // 2048


def shared_bytes(head_dim: int, rows: int) -> int:
    blocks = feature_blocks(head_dim)
    pairs = -(-blocks // 2)
    return rows * (64 * blocks + 576) + (4 // pairs - 1) * pairs * 2048 + 16


class Rows(NamedTuple):
    """Query rows of the sequences, one after the other."""

    q: NDArray[np.float32]  # [rows, heads, head_dim]
    visible: NDArray[np.int32]  # [rows, 2]
    counts: list[int]  # rows of each sequence


def attend(
    cache: Cache, rows: Rows, scale: float, block_rows: int | None, page_rows: list[int], **merge: Any
) -> NDArray[np.float32]:
    """Decode attention with blocks of `block_rows`, prompt attention for None. page_rows: a page list per sequence.
    merge: fields of AttentionCombineParams beside those that every merge has."""
    suffix = "_counted" if any(kind in COUNTED for kind in cache.kinds) else ""
    if suffix and block_rows is not None:
        block_rows = 16 if block_rows <= 16 else 64
    device, (n, heads, head_dim) = cache.device, rows.q.shape
    y = device.empty((n, heads, head_dim))
    group = cache.struct.group
    partitions = partition_of(max(1, int(rows.visible.max())) - 1) + 3
    size = block_rows or 64
    row_blocks = max(-(-count * group // size) for count in rows.counts) + 1  # one more than is needed
    fields: dict[str, Any] = {
        "q": device.put(rows.q), "visible": device.put(rows.visible), "y": y, "cache": cache.struct, "heads": heads,
        "first_row": device.put(np.concatenate(([0], np.cumsum(rows.counts))).astype(np.int32)),
        "page_table": device.put(cache.page_table[page_rows]), "most_pages": cache.most_pages, "scale": scale,
        "partitions": partitions, "row_blocks": row_blocks,
    }  # fmt: skip
    dynamic, sequences = shared_bytes(head_dim, size), len(rows.counts)
    if block_rows is None:
        grid = (row_blocks, cache.kv_heads, sequences)
        device.kernel(f"attention_prompt_{head_dim}{suffix}", "attention_prompt")(
            grid, THREADS, "AttentionParams", dynamic, **fields
        )
        return y.get()
    parts: dict[str, Array] = {
        "part_y": device.empty((n, heads, partitions, head_dim)), "part_weight": device.empty((n, heads, partitions, 2))
    }  # fmt: skip
    unit = f"attention_decode_{head_dim}"
    device.kernel(unit + suffix, f"attention_decode_{block_rows}{suffix}")(
        (cache.kv_heads * row_blocks, partitions, sequences),
        THREADS,
        "AttentionParams",
        dynamic,
        **fields,
        **parts,
    )
    combine(device, head_dim, n, visible=fields["visible"], y=y, heads=heads, partitions=partitions, **parts, **merge)
    return y.get()


def combine(device: Device, head_dim: int, rows: int, heads: int, **fields: Any) -> None:
    """Merges the partitions of decode attention."""
    grid = (heads * -(-head_dim // 128), rows)
    device.kernel(f"attention_decode_{head_dim}", "attention_combine")(
        grid, THREADS, "AttentionCombineParams", heads=heads, **fields
    )
