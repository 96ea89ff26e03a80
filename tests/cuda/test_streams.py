"""Residual streams and the convolution over drafted blocks against float64: odd sizes, repeated for equal bits.

Tolerance: a few roundings of f32 and the device's exp, relative to what was summed. Sums over features have rounding
errors that grow with the root of their number, far below 2e-6 of the summed magnitudes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Device, wide_grid

THREADS = 256
EPS = 1e-6
TOLERANCE = 2e-6
SHAPES = [(1, 1, 1), (3, 4, 31), (70, 4, 1025), (2, 4, 2560), (5, 3, 700)]


def random(source: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return source.standard_normal(shape).astype(np.float32)


def sigmoid(x: NDArray[Any]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def close(found: NDArray[Any], expected: NDArray[np.float64], magnitude: NDArray[Any]) -> None:
    worst = (np.abs(found - expected) / (np.abs(magnitude) + 1e-30)).max()
    assert worst <= TOLERANCE, f"{worst:.2e}"


@pytest.mark.parametrize(("rows", "streams", "features"), SHAPES)
def test_streams_are_repeated_normed_and_mixed(device: Device, rows: int, streams: int, features: int) -> None:
    source = np.random.default_rng(features)
    sizes: dict[str, Any] = {"rows": rows, "streams": streams, "features": features}
    one, x, gate = random(source, rows, features), *(random(source, rows, streams, features) for _ in range(2))
    x *= 10.0 ** source.uniform(-3, 3, (rows, streams, 1)).astype(np.float32)

    y = device.empty((rows, streams, features))
    grid = wide_grid(rows, features)
    device.kernel("streams", "repeat_streams")(grid, THREADS, "RepeatStreamsParams", x=device.put(one), y=y, **sizes)
    assert np.array_equal(y.get(), np.repeat(one[:, None], streams, axis=1))

    weight, bits = random(source, streams, features), []
    for in_place in (False, True):
        values = device.put(x)
        y = values if in_place else device.empty((rows, streams, features))
        device.kernel("streams", "norm_streams")(
            (rows, streams), THREADS, "NormStreamsParams", x=values, weight=device.put(weight), y=y, eps=EPS, **sizes
        )
        bits.append(y.get())
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * weight
        close(bits[-1], expected, np.abs(expected).max(axis=-1, keepdims=True))
    assert np.array_equal(*bits)

    for _ in range(2):
        y = device.empty((rows, features))
        device.kernel("streams", "mix_streams")(
            grid, THREADS, "MixStreamsParams", x=device.put(x), gate=device.put(gate), y=y, **sizes
        )
        terms = sigmoid(gate) * x
        close(y.get(), terms.mean(axis=1), np.abs(terms).mean(axis=1))


@pytest.mark.parametrize(("rows", "streams", "features"), SHAPES)
def test_a_layers_result_is_added_to_each_stream_by_its_strength(
    device: Device, rows: int, streams: int, features: int
) -> None:
    source = np.random.default_rng(features)
    x, y, inject = (
        random(source, rows, streams, features),
        random(source, rows, features),
        random(source, rows, streams),
    )
    values = device.put(x)
    device.kernel("streams", "add_to_streams")(
        wide_grid(rows, features), THREADS, "AddToStreamsParams", x=values, y=device.put(y), inject=device.put(inject),
        rows=rows, streams=streams, features=features,
    )  # fmt: skip
    added = 2 * sigmoid(inject / streams)[..., None] * y[:, None]
    close(values.get(), x + added, np.abs(x) + np.abs(added))


@pytest.mark.parametrize(("rows", "streams", "features"), SHAPES)
def test_memory_is_gated_by_how_well_key_and_query_agree(
    device: Device, rows: int, streams: int, features: int
) -> None:
    source = np.random.default_rng(features)
    key, query = (random(source, rows, streams, features) for _ in range(2))
    key[0, 0] = 0  # no agreement at all
    if rows > 1:
        key[1] *= 1e-9  # below the least gate, of either sign
        key[1, -1] = -1e-9 * np.sign(query[1, -1])
    value = random(source, rows, features)
    bits = []
    for _ in range(2):
        y = device.empty((rows, streams, features))
        device.kernel("streams", "gate_memory")(
            (rows, streams), THREADS, "GateMemoryParams", key=device.put(key), query=device.put(query), y=y,
            value=device.put(value), rows=rows, streams=streams, features=features,
        )  # fmt: skip
        bits.append(y.get())
    products = key.astype(np.float64) * query
    a = products.sum(axis=-1) / np.sqrt(features)
    u = np.where(a == 0, 0, np.copysign(np.sqrt(np.maximum(np.abs(a), 1e-6)), a))
    expected = sigmoid(u)[..., None] * value[:, None]
    # Errors of the sum: the slope of the gate in u is at most 1 / 4, that of u in a at most 1 / (2 sqrt(|a|)).
    slope = np.abs(products).sum(axis=-1) / np.sqrt(features) / np.sqrt(np.maximum(np.abs(a), 1e-6))
    close(bits[0], expected, np.abs(value[:, None]) * (1 + slope[..., None] / 8))
    assert np.array_equal(*bits)


def test_silu_of_scaled_values(device: Device) -> None:
    x = random(np.random.default_rng(3), 70_001) * 9
    values = device.put(x)
    device.kernel("streams", "scaled_silu")(5, THREADS, "ScaleParams", x=values, n=len(x), factor=0.25)
    scaled = x.astype(np.float64) * 0.25
    close(values.get(), scaled * sigmoid(scaled), scaled)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("features", "group", "taps", "block_rows"), [(96, 8, 3, 4), (1030, 103, 4, 16), (5, 5, 1, 1)])
def test_blocks_of_rows_are_convolved_by_base_and_own_coefficients(
    device: Device, features: int, group: int, taps: int, block_rows: int, place: int
) -> None:
    source = np.random.default_rng(features + place)
    rows = 3 * block_rows
    x, base = random(source, rows, features), random(source, 2, taps, features)
    own = random(source, rows, 2, taps, features // group)
    y = device.empty((rows, features))
    device.kernel("block_conv", "block_conv")(
        wide_grid(rows, features), THREADS, "BlockConvParams", x=device.put(x), base=device.put(base), y=y, rows=rows,
        own=device.put(own), features=features, taps=taps, group=group, place=place, block_rows=block_rows,
    )  # fmt: skip
    expected, magnitude = np.zeros((rows, features)), np.zeros((rows, features))
    for r in range(rows):
        for t in range(min(taps, r % block_rows + 1)):
            own_factor = np.repeat(own[r, place, t], group)
            expected[r] += (base[place, t].astype(np.float64) + own_factor) * x[r - t]
            magnitude[r] += (np.abs(base[place, t]) + np.abs(own_factor)) * np.abs(x[r - t])
    close(y.get(), expected, magnitude)
