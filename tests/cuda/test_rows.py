"""Row-wise kernels against float64: odd sizes, poisoned outputs, repeated for equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Device
from support.cuda_linear import NORM_THREADS, THREADS

EPS = 1e-5


def close(found: NDArray[Any], expected: NDArray[np.float64], tolerance: float = 2e-6) -> None:
    """Relative to each row's largest value: a few roundings of f32 and the device's exp."""
    scale = np.abs(expected).max(axis=-1, keepdims=True) + 1e-30
    worst = (np.abs(found - expected) / scale).max()
    assert worst <= tolerance, f"{worst:.2e}"


def normed(x: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("features", [1, 31, 576, 5120, 17408])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_rms_norm_with_and_without_residual_sum(device: Device, rows: int, features: int) -> None:
    source = np.random.default_rng(features)
    x, added = (source.standard_normal((rows, features)).astype(np.float32) for _ in range(2))
    weight = source.standard_normal(features).astype(np.float32)
    kernel = device.kernel("rows", "rms_norm")
    for extra in (None, added):
        bits = []
        for _ in range(2):
            stream, y = device.put(x), device.empty((rows, features))
            kernel(
                rows, NORM_THREADS, "RmsNormParams", x=stream, y=y, weight=device.put(weight), rows=rows,
                features=features, eps=EPS, added=device.put(extra) if extra is not None else 0,
            )  # fmt: skip
            summed = x if extra is None else x + extra
            assert np.array_equal(stream.get(), summed)
            close(y.get(), normed(summed, weight))
            bits.append(y.get())
        assert np.array_equal(*bits)
        alone = device.empty((1, features))
        kernel(
            1, NORM_THREADS, "RmsNormParams", x=device.put(summed[-1:]), y=alone, weight=device.put(weight), rows=1,
            features=features, eps=EPS,
        )  # fmt: skip
        assert np.array_equal(alone.get()[0], bits[0][-1])


def test_elementwise_operations(device: Device) -> None:
    source = np.random.default_rng(2)
    for n in (1, 255, 256, 70_001):
        a, b = (source.standard_normal(n).astype(np.float32) * 3 for _ in range(2))
        grid = min(-(-n // THREADS), 8)  # fewer threads than elements
        x = device.put(a)
        device.kernel("rows", "add")(grid, THREADS, "AddParams", x=x, added=device.put(b), n=n)
        assert np.array_equal(x.get(), a + b)
        x = device.put(a)
        device.kernel("rows", "scale")(grid, THREADS, "ScaleParams", x=x, n=n, factor=0.3)
        assert np.array_equal(x.get(), a * np.float32(0.3))
        x = device.put(a * 20)
        device.kernel("rows", "soft_cap")(grid, THREADS, "ScaleParams", x=x, n=n, factor=30.0)
        close(x.get(), 30 * np.tanh((a * 20).astype(np.float64) / 30))
        y = device.empty((n,))
        fields: dict[str, Any] = {"gate": device.put(a), "up": device.put(b), "y": y, "n": n}
        wide = a.astype(np.float64)
        device.kernel("rows", "gated")(grid, THREADS, "GatedParams", activation=0, **fields)
        close(y.get(), wide / (1 + np.exp(-wide)) * b)
        device.kernel("rows", "gated")(grid, THREADS, "GatedParams", activation=1, **fields)
        inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        close(y.get(), wide / 2 * (1 + np.tanh(inner)) * b)


@pytest.mark.parametrize("halves", [0, 1])
@pytest.mark.parametrize(("heads", "head_dim", "pairs"), [(1, 64, 32), (5, 80, 20), (24, 256, 32), (64, 128, 64)])
def test_heads_are_normed_and_rotated(device: Device, heads: int, head_dim: int, pairs: int, halves: int) -> None:
    source = np.random.default_rng(heads)
    rows = 13
    x = source.standard_normal((rows, heads, head_dim)).astype(np.float32)
    weight = source.standard_normal(head_dim).astype(np.float32)
    angles = source.uniform(-3, 3, (rows, pairs))
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first = np.arange(pairs) if halves else 2 * np.arange(pairs)
    second = first + (pairs if halves else 1)
    for with_norm in (False, True):
        values = device.put(x)
        device.kernel("rows", "norm_rope")(
            -(-rows * heads // 8), THREADS, "NormRopeParams", x=values, cosine=device.put(cosine),
            sine=device.put(sine), weight=device.put(weight) if with_norm else 0, rows=rows, heads=heads,
            head_dim=head_dim, pairs=pairs, halves=halves, eps=EPS,
        )  # fmt: skip
        expected = normed(x, weight) if with_norm else x.astype(np.float64)
        a, b = expected[..., first].copy(), expected[..., second].copy()
        c, s = cosine[:, None, :].astype(np.float64), sine[:, None, :].astype(np.float64)
        expected[..., first], expected[..., second] = a * c - b * s, a * s + b * c
        close(values.get(), expected)


@pytest.mark.parametrize("function", [0, 1])
def test_heads_are_normed_and_gated(device: Device, function: int) -> None:
    source = np.random.default_rng(4)
    x, gate = (source.standard_normal((9, 12, 128)).astype(np.float32) for _ in range(2))
    weight = source.standard_normal(128).astype(np.float32)
    values = device.put(x)
    device.kernel("rows", "norm_gate")(
        -(-9 * 12 // 8), THREADS, "NormGateParams", x=values, gate=device.put(gate), weight=device.put(weight),
        y=values, rows=9, heads=12, head_dim=128, function=function, eps=EPS,
    )  # fmt: skip
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    close(values.get(), normed(x, weight) * (gate * sigmoid if function == 0 else sigmoid))


def test_gates_cover_adjacent_features_and_rows_are_gathered(device: Device) -> None:
    source = np.random.default_rng(6)
    x, gate = source.standard_normal((11, 96)).astype(np.float32), source.standard_normal((11, 6)).astype(np.float32)
    values = device.put(x)
    fields: dict[str, Any] = {"x": values, "gate": device.put(gate), "rows": 11, "features": 96, "gates": 6}
    device.kernel("rows", "apply_gate")(2, THREADS, "ApplyGateParams", **fields)
    close(values.get(), x / (1 + np.exp(-np.repeat(gate.astype(np.float64), 16, axis=1))))
    chosen = np.array([10, 0, 3, 3], np.int32)
    y = device.empty((4, 96))
    fields = {"x": device.put(x), "indices": device.put(chosen), "y": y, "rows": 4, "features": 96}
    device.kernel("rows", "gather_rows")(4, THREADS, "GatherRowsParams", **fields)
    assert np.array_equal(y.get(), x[chosen])
