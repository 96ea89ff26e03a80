"""Kernels that choose: experts of a row, the largest logits, rows of the embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Array, Device
from support.cuda_linear import pack
from support.random_blocks import TYPES, block_size, random_rows

CHUNK = 2048


@pytest.mark.parametrize(("experts", "used"), [(1, 1), (2, 2), (31, 4), (128, 8), (512, 10), (1000, 32)])
def test_routing_matches_float64(device: Device, experts: int, used: int) -> None:
    source = np.random.default_rng(experts)
    logits = (source.standard_normal((9, experts)) * 4).astype(np.float32)
    logits[1] = 0.5  # all equal: the lower ids
    logits[2, ::2] = -np.inf
    logits[3, 0] = np.nan
    logits[4, -1] = np.inf
    expert, weight = device.empty((9, used), np.int32), device.empty((9, used))
    device.kernel("routing", "route")(
        3,
        128,
        "RouteParams",
        logits=device.put(logits),
        expert=expert,
        weight=weight,
        rows=9,
        experts=experts,
        used=used,
    )
    highest = np.finfo(np.float32).max
    finite = np.clip(np.nan_to_num(logits, nan=-highest, posinf=highest, neginf=-highest), -highest, highest)
    order = np.argsort(-finite.astype(np.float64), axis=1, kind="stable")[:, :used]
    assert np.array_equal(expert.get(), order)
    power = np.exp(finite.astype(np.float64) - finite.max(axis=1, keepdims=True))
    share = np.take_along_axis(power, order, axis=1) / power.sum(axis=1, keepdims=True)
    expected = share / np.maximum(share.sum(axis=1, keepdims=True), 2.0**-14)
    assert np.abs(weight.get() - expected).max() <= 2e-6


@pytest.mark.parametrize(("rows", "features", "used"), [(1, 1, 1), (5, 300, 8), (70, 64, 3)])
def test_experts_are_mixed_by_their_weights(device: Device, rows: int, features: int, used: int) -> None:
    source = np.random.default_rng(rows)
    x, weight = source.standard_normal((rows * used, features)), source.random((rows, used))
    y = device.empty((rows, features))
    device.kernel("routing", "mix_experts")(
        3, 256, "MixExpertsParams", x=device.put(x.astype(np.float32)), y=y, rows=rows, features=features, used=used,
        weight=device.put(weight.astype(np.float32)),
    )  # fmt: skip
    expected = np.einsum("ru,ruf->rf", weight, x.reshape(rows, used, features))
    assert np.abs(y.get() - expected).max() <= 2e-6 * np.abs(expected).max() * used


@pytest.mark.parametrize("type_name", TYPES)
def test_embeddings_are_rows_of_the_packed_matrix(device: Device, type_name: str) -> None:
    source = np.random.default_rng(sum(type_name.encode()))
    for features in (block_size(type_name)[0], 2560):
        raw, decoded = random_rows(type_name, 70, features, source)
        tokens = np.array([0, 69, 31, 32, 5, 5], np.int32)
        table, y = pack(device, type_name, raw, features), device.empty((len(tokens), features))
        device.kernel(f"embed_{type_name.lower()}", "embed")(
            (len(tokens), -(-features // 8192)), 256, "EmbedParams", table=table.packed, tokens=device.put(tokens), y=y,
            rows=len(tokens), features=features,
        )  # fmt: skip
        expected = decoded[tokens]
        error = np.linalg.norm(y.get() - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert error.max() <= 1e-3


def largest(device: Device, logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    kernel, rows, n = device.kernel("top_k", "top_k"), len(logits), logits.shape[1]
    values, indices = device.empty((rows, k)), device.empty((rows, k), np.int32)
    fields: dict[str, Array | int] = {"logits": device.put(logits)}
    while n > CHUNK:
        chunks = -(-n // CHUNK)
        kept = device.empty((rows, chunks, k), np.uint64)
        kernel((chunks, rows), 512, "TopKParams", kept_keys=kept, n=n, kept=k, **fields)
        fields, n = {"keys": kept}, chunks * k
    kernel((1, rows), 512, "TopKParams", values=values, indices=indices, n=n, kept=k, **fields)
    return values.get(), indices.get()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (100, 100), (2048, 64), (2049, 64), (5000, 1024), (151_936, 256)])
def test_largest_logits_in_order(device: Device, n: int, k: int) -> None:
    source = np.random.default_rng(n)
    logits = source.standard_normal((3, n)).astype(np.float32)
    logits[1] = np.round(logits[1] * 4)  # many equals, and both zeros
    logits[2, source.random(n) < 0.3] = np.nan
    logits[2, :: max(2, n // 7)] = np.inf
    values, indices = largest(device, logits, k)
    ordered = np.where(np.isnan(logits), -np.inf, logits)
    expected = np.argsort(-ordered, axis=1, kind="stable")[:, :k]
    assert np.array_equal(indices, expected)
    assert np.array_equal(values, np.take_along_axis(ordered, expected, axis=1))
