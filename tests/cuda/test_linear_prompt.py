"""The kernels of prompts against float64 with the weights as `gguf` decodes them. The tolerance
stands in `support.linear_rows`.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Array, Device
from support.cuda_linear import PROMPT_TILES, Job, Weight, make_panel, pack, run_linear, run_linear_prompt
from support.linear_rows import activations, assert_close
from support.random_blocks import TYPES, block_size, random_rows

TILES = tuple(PROMPT_TILES)
KINDS = (
    "Q8_0",
    "Q4_K",
    "Q3_K",
    "F16",
)  # where units and heads of records differ; how codes decode is for all types below


def outputs(device: Device, weight: Weight, x: NDArray[np.float32], tile: str) -> NDArray[np.float32]:
    y = device.empty((len(x), weight.out_features))
    run_linear_prompt(device, make_panel(device, device.put(x), prompt=True), [Job(weight, y)], tile)
    return y.get()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("type_name", TYPES)
def test_outputs_of_any_type_match_float64(device: Device, type_name: str, tile: str) -> None:
    source = np.random.default_rng(sum(type_name.encode()))
    for blocks, out_features, rows in ((1, 31, 65), (3, 300, 130), (8, 257, 257)):
        features = blocks * block_size(type_name)[0]
        packed, decoded = random_rows(type_name, out_features, features, source)
        x = activations(rows, features, source)
        assert_close(outputs(device, pack(device, type_name, packed, features), x, tile), x, decoded)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_outputs_of_a_large_matrix_match_float64(device: Device, type_name: str) -> None:
    source = np.random.default_rng(7)
    features, out_features = 4096, 521
    packed, decoded = random_rows(type_name, out_features, features, source)
    weight = pack(device, type_name, packed, features)
    for rows, tile in ((65, "narrow"), (128, "wide"), (512, "wide")):
        x = activations(rows, features, source)
        assert_close(outputs(device, weight, x, tile), x, decoded)


@pytest.mark.parametrize("type_name", KINDS)
def test_a_row_has_the_same_bits_in_any_tile_and_any_place_and_when_repeated(device: Device, type_name: str) -> None:
    source = np.random.default_rng(11)
    features = 160 if block_size(type_name)[0] == 32 else 512
    weight = pack(device, type_name, random_rows(type_name, 300, features, source)[0], features)
    x = activations(1100, features, source)  # nine wide tiles: more than blocks go along before the next columns
    together = outputs(device, weight, x, "wide").view(np.uint32)
    assert np.array_equal(together, outputs(device, weight, x, "wide").view(np.uint32))
    assert np.array_equal(together, outputs(device, weight, x, "narrow").view(np.uint32))
    for rows in (65, 128, 257):
        for tile in TILES:
            assert np.array_equal(together[:rows], outputs(device, weight, x[:rows], tile).view(np.uint32)), rows
    places = source.permutation(len(x))[:200]
    assert np.array_equal(together[places], outputs(device, weight, x[places], "wide").view(np.uint32))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_several_weights_in_one_launch_have_the_bits_of_single_launches(
    device: Device, type_name: str, tile: str
) -> None:
    source = np.random.default_rng(2)
    features, rows = 1024, 150
    x = activations(rows, features, source)
    panel = make_panel(device, device.put(x), prompt=True)
    sizes = (96, 70, 1, 290)
    weights = [pack(device, type_name, random_rows(type_name, n, features, source)[0], features) for n in sizes]
    bias = source.standard_normal(70).astype(np.float32)
    before = source.standard_normal((rows, 96)).astype(np.float32)

    def jobs() -> list[Job]:
        return [
            Job(weights[0], device.put(before), adds=True),
            Job(weights[1], device.empty((rows, 70)), bias=device.put(bias), scale=0.37),
            *(Job(weight, device.empty((rows, weight.out_features))) for weight in weights[2:]),
        ]

    together, alone = jobs(), jobs()
    run_linear_prompt(device, panel, together, tile)
    for job in alone:
        run_linear_prompt(device, panel, [job], tile)
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one.y.get().view(np.uint32), other.y.get().view(np.uint32))
    assert np.array_equal(together[0].y.get(), before + outputs(device, weights[0], x, tile))
    assert np.array_equal(together[1].y.get(), outputs(device, weights[1], x, tile) * np.float32(0.37) + bias)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("type_name", TYPES)
def test_gated_outputs_are_the_activated_gate_times_up(device: Device, type_name: str, tile: str) -> None:
    source = np.random.default_rng(3)
    features, out_features, rows = 512, 203, 140
    gate, up = (
        pack(device, type_name, random_rows(type_name, out_features, features, source)[0], features) for _ in range(2)
    )
    x = (source.standard_normal((rows, features)) * 0.1).astype(np.float32)
    panel = make_panel(device, device.put(x), prompt=True)
    g, u = (outputs(device, weight, x, tile).astype(np.float64) for weight in (gate, up))
    unused: Array = device.empty((rows, out_features))
    for activation in (0, 1):
        y = device.empty((rows, out_features))
        run_linear_prompt(device, panel, [Job(gate, y), Job(up, unused)], tile, activation)
        inner = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
        activated = g / (1 + np.exp(-g)) if activation == 0 else g / 2 * (1 + np.tanh(inner))
        assert np.allclose(y.get(), activated * u, rtol=1e-5, atol=1e-6 * np.abs(u).max()), activation
        assert np.isnan(unused.get()).all()


@pytest.mark.parametrize("type_name", KINDS)
def test_streamed_rows_differ_from_those_of_prompts_by_the_rounding_of_sums_only(
    device: Device, type_name: str
) -> None:
    source = np.random.default_rng(4)
    features = 2048
    packed, decoded = random_rows(type_name, 64, features, source)
    weight = pack(device, type_name, packed, features)
    x = activations(40, features, source)
    streamed = device.empty((40, 64))
    run_linear(device, make_panel(device, device.put(x)), [Job(weight, streamed)])
    scale = np.abs(x.astype(np.float64)) @ np.abs(decoded).T
    assert (np.abs(streamed.get() - outputs(device, weight, x, "narrow")) <= 1e-5 * scale).all()


def test_rows_of_zeros_and_of_huge_and_tiny_values_stay_finite(device: Device) -> None:
    source = np.random.default_rng(9)
    packed, decoded = random_rows("Q8_0", 40, 128, source)
    x = source.standard_normal((80, 128)).astype(np.float32)
    x *= np.array([0, 1e30, 1e-36, 1], np.float32).repeat(20)[:, None]
    y = outputs(device, pack(device, "Q8_0", packed, 128), x, "narrow")
    assert not y[:20].any()
    assert_close(y[20:], x[20:], decoded)
