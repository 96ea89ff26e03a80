"""The kernels for one row have the bits of row-wise kernel, panel and streaming kernel one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Array, Device, struct_of
from support.cuda_linear import NORM_THREADS, THREADS, Job, Weight, make_panel, pack, run_linear, run_linear_row
from support.random_blocks import TYPES, block_size, random_rows

EPS = 1e-6
ON_THE_EMULATED_DEVICE = ("F16", "Q8_0", "Q4_K", "Q6_K", "IQ3_S")  # what other tests here compile anyway


def weights_of(device: Device, type_name: str, features: int, outputs: tuple[int, ...], seed: int) -> list[Weight]:
    source = np.random.default_rng(seed)
    return [pack(device, type_name, random_rows(type_name, n, features, source)[0], features) for n in outputs]


class Outputs:
    """Jobs that write, add and have a bias, with what was there before; the same for every instance of a seed."""

    def __init__(self, device: Device, weights: list[Weight], seed: int) -> None:
        source = np.random.default_rng(seed)
        self.jobs = []
        for i, weight in enumerate(weights):
            before = source.standard_normal((1, weight.out_features)).astype(np.float32)
            bias = device.put(source.standard_normal(weight.out_features).astype(np.float32)) if i == 1 else None
            y = device.put(before) if i == 0 else device.empty((1, weight.out_features))
            self.jobs.append(Job(weight, y, bias=bias, scale=0.37 if i == 1 else 1.0, adds=i == 0))

    def bits(self) -> list[bytes]:
        return [job.y.get().tobytes() for job in self.jobs]


def streamed(device: Device, weights: list[Weight], x: NDArray[np.float32], seed: int) -> list[bytes]:
    outputs = Outputs(device, weights, seed)
    run_linear(device, make_panel(device, device.put(x)), outputs.jobs)
    return outputs.bits()


def row_of(features: int, seed: int) -> NDArray[np.float32]:
    x = np.random.default_rng(seed).standard_normal((1, features)).astype(np.float32)
    x[:, ::97] *= 50
    return x


@pytest.mark.parametrize("type_name", TYPES)
def test_a_plain_row(device: Device, type_name: str) -> None:
    if device.is_emulated and type_name not in ON_THE_EMULATED_DEVICE:
        pytest.skip("needs a card: five types stand for all on the emulated device, where compiling takes long")
    values = block_size(type_name)[0]
    for blocks, outputs in ((1, (1, 33)), (3, (70,)), (9, (32, 64, 31)), (2560 // values, (257, 40))):
        features = blocks * values
        weights = weights_of(device, type_name, features, outputs, blocks)
        x = row_of(features, blocks)
        expected = streamed(device, weights, x, 5)
        largest = np.abs(x[0]).reshape(-1, 32).max(axis=1)
        tiles = sum(weight.tiles for weight in weights)
        for parts in (None, device.put(largest)):
            for grid in {1, 2, tiles}:
                got = Outputs(device, weights, 5)
                fields: dict[str, Any] = {"x": device.put(x), "largest": parts or 0, "parts": len(largest)}
                run_linear_row(device, "plain", got.jobs, grid, fields, "RowLinearParams")
                assert got.bits() == expected, (features, parts is None, grid)


def test_rows_of_zeros_infinities_and_nan_are_as_in_a_panel(device: Device) -> None:
    weights = weights_of(device, "Q8_0", 128, (40,), 3)
    for value in (0.0, 1e-40, 1e30, np.inf, np.nan):
        x = row_of(128, 1) if value else np.zeros((1, 128), np.float32)
        x[0, 7] = value
        got = Outputs(device, weights, 5)
        run_linear_row(device, "plain", got.jobs, 1, {"x": device.put(x), "largest": 0, "parts": 0}, "RowLinearParams")
        expected = streamed(device, weights, x, 5)
        for one, other in zip(got.bits(), expected, strict=True):
            np.testing.assert_array_equal(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("type_name", "features"), [("Q8_0", 576), ("Q4_K", 5120), ("F16", 8192), ("IQ3_S", 1280)])
def test_a_normed_row(device: Device, type_name: str, features: int, adds: bool) -> None:
    weights = weights_of(device, type_name, features, (96, 33, 40), 4)
    x, added = row_of(features, 2), device.put(row_of(features, 3))
    norm_weight = device.put(np.random.default_rng(6).standard_normal(features).astype(np.float32))
    counter = device.put(np.zeros(1, np.uint32))

    def norm(stream: Array, y: Array) -> dict[str, Any]:
        extra = added if adds else 0
        return {"x": stream, "added": extra, "weight": norm_weight, "y": y, "rows": 1, "features": features, "eps": EPS}

    streams = [device.put(x) for _ in range(2)]
    normed = [device.empty((1, features)) for _ in range(2)]
    device.kernel("rows", "rms_norm")(1, NORM_THREADS, "RmsNormParams", **norm(streams[0], normed[0]))
    expected = streamed(device, weights, normed[0].get(), 5)
    for grid in (1, 3, 7):
        streams[1] = device.put(x)
        got = Outputs(device, weights, 5)
        fields = {"norm": struct_of("RmsNormParams", **norm(streams[1], normed[1])), "arrived": counter}
        run_linear_row(device, "after_norm", got.jobs, grid, fields, "NormLinearParams")
        assert got.bits() == expected, grid
        assert normed[1].get().tobytes() == normed[0].get().tobytes()
        assert streams[1].get().tobytes() == streams[0].get().tobytes()
        assert counter.get()[0] == 0


@pytest.mark.parametrize("function", [0, 1])
@pytest.mark.parametrize(("type_name", "heads"), [("Q8_0", 5), ("Q4_K", 48), ("Q6_K", 64)])
def test_a_gated_row_of_heads(device: Device, type_name: str, heads: int, function: int) -> None:
    features = 128 * heads
    weights = weights_of(device, type_name, features, (96, 33), 4)
    x, gate = device.put(row_of(features, 2)), device.put(row_of(features, 3))
    weight = device.put(np.random.default_rng(6).standard_normal(128).astype(np.float32))
    results = [device.empty((1, features)) for _ in range(2)]

    def fields(y: Array) -> dict[str, Any]:
        return {
            "x": x, "gate": gate, "weight": weight, "y": y, "rows": 1, "heads": heads, "head_dim": 128,
            "function": function, "eps": EPS,
        }  # fmt: skip

    device.kernel("rows", "norm_gate")(-(-heads // 8), THREADS, "NormGateParams", **fields(results[0]))
    expected = streamed(device, weights, results[0].get(), 5)
    for grid in (1, 4):
        got = Outputs(device, weights, 5)
        nested = {"gate": struct_of("NormGateParams", **fields(results[1]))}
        run_linear_row(device, "after_norm_gate", got.jobs, grid, nested, "NormGateLinearParams")
        assert got.bits() == expected, grid
        assert results[1].get().tobytes() == results[0].get().tobytes()


@pytest.mark.parametrize("n", [4, 1020, 17408])
@pytest.mark.parametrize("activation", [0, 1])
def test_products_of_gates_leave_the_largest_of_each_part(device: Device, n: int, activation: int) -> None:
    source = np.random.default_rng(n)
    gate, up = (device.put(source.standard_normal(n).astype(np.float32)) for _ in range(2))
    results = [device.empty((n,)) for _ in range(2)]
    parts = -(-n // 1024)
    largest = device.empty((parts,))

    def fields(y: Array) -> dict[str, Any]:
        return {"gate": gate, "up": up, "y": y, "n": n, "activation": activation}

    device.kernel("rows", "gated")(8, THREADS, "GatedParams", **fields(results[0]))
    gated = struct_of("GatedParams", **fields(results[1]))
    device.kernel("rows", "gated_largest")(parts, THREADS, "GatedLargestParams", gated=gated, largest=largest)
    y = results[0].get()
    assert results[1].get().tobytes() == y.tobytes()
    assert np.array_equal(largest.get(), [np.abs(y[i : i + 1024]).max() for i in range(0, n, 1024)])


@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize(("state_from", "state_to"), [(0, 1), (2, 2), (-1, 0)])
def test_a_row_is_convolved_with_those_before_it(device: Device, taps: int, state_from: int, state_to: int) -> None:
    features, channels = 576, 70
    weights = weights_of(device, "Q8_0", features, (40, channels), 4)
    x = device.put(row_of(features, 2))
    source = np.random.default_rng(taps)
    taps_of = device.put(source.standard_normal((taps, channels)).astype(np.float32))
    history = source.standard_normal((3, taps - 1, channels)).astype(np.float32)
    states = [device.put(np.array([slot], np.int32)) for slot in (state_from, state_to)]
    shared: dict[str, Any] = {
        "weight": taps_of, "state_from": states[0], "state_to": states[1], "slot_values": (taps - 1) * channels,
        "taps": taps,
    }  # fmt: skip

    plain = Outputs(device, weights, 5)
    run_linear_row(device, "plain", plain.jobs, 2, {"x": x, "largest": 0, "parts": 0}, "RowLinearParams")
    expected, kept = device.empty((1, channels)), device.put(history)
    rows = [device.put(np.array([row], np.int32)) for row in (0, 1)]
    device.kernel("causal_conv", "causal_conv")(
        1, THREADS, "CausalConvParams", x=plain.jobs[1].y, y=expected, history=kept, first_row=rows[0],
        end_row=rows[1], channels=channels, dilation=1, **shared,
    )  # fmt: skip
    for grid in (1, 5):
        got, y, history_at = Outputs(device, weights, 5), device.empty((1, channels)), device.put(history)
        conv = struct_of("RowConv", y=y, history=history_at, job=1, **shared)
        fields = {"x": x, "largest": 0, "parts": 0, "conv": conv}
        run_linear_row(device, "plain", got.jobs, grid, fields, "RowLinearParams")
        assert got.bits() == plain.bits()
        assert y.get().tobytes() == expected.get().tobytes()
        assert history_at.get().tobytes() == kept.get().tobytes()
