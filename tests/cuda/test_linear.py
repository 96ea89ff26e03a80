"""The weight-streaming kernels and the repacking before them, against float64 with the weights as `gguf` decodes them.

The tolerance stands in `support.linear_rows`.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Array, Device
from support.cuda_linear import Job, make_panel, pack, run_linear
from support.linear_rows import activations, assert_close
from support.random_blocks import TYPES, block_size, random_rows

ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64)


@pytest.mark.parametrize("type_name", TYPES)
def test_outputs_of_any_size_match_float64(device: Device, type_name: str) -> None:
    source = np.random.default_rng(sum(type_name.encode()))
    values = block_size(type_name)[0]
    for blocks, out_features in ((1, 1), (3, 33), (8, 64), (9, 31), (20, 200), (4096 // values, 257)):
        features = blocks * values
        packed, decoded = random_rows(type_name, out_features, features, source)
        weight = pack(device, type_name, packed, features)
        is_large = features * out_features > 200_000
        for rows in (1, 16, 33) if is_large and device.is_emulated else ROWS:
            x = activations(rows, features, source)
            y = device.empty((rows, out_features))
            run_linear(device, make_panel(device, device.put(x)), [Job(weight, y)])
            assert_close(y.get(), x, decoded)


@pytest.mark.parametrize("type_name", TYPES)
def test_a_row_has_the_same_bits_alone_and_among_64_and_when_repeated(device: Device, type_name: str) -> None:
    source = np.random.default_rng(11)
    features, out_features = 1280 if block_size(type_name)[0] == 32 else 2560, 96
    weight = pack(device, type_name, random_rows(type_name, out_features, features, source)[0], features)
    x = activations(64, features, source)

    def outputs(rows: NDArray[np.float32]) -> NDArray[np.uint32]:
        y = device.empty((len(rows), out_features))
        run_linear(device, make_panel(device, device.put(rows)), [Job(weight, y)])
        return y.get().view(np.uint32)

    together = outputs(x)
    assert np.array_equal(together, outputs(x))
    for rows in ROWS:
        assert np.array_equal(outputs(x[:rows]), together[:rows]), rows
    for row in (5, 40):
        assert np.array_equal(outputs(x[row : row + 1])[0], together[row]), row


@pytest.mark.parametrize("rows", [1, 8, 13, 32, 50])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_several_weights_in_one_launch_have_the_bits_of_single_launches(
    device: Device, type_name: str, rows: int
) -> None:
    source = np.random.default_rng(rows)
    features = 1024
    x = activations(rows, features, source)
    panel = make_panel(device, device.put(x))
    weights, bias, before = [], source.standard_normal(70).astype(np.float32), []
    for out_features in (96, 70, 1, 32):
        weights.append(pack(device, type_name, random_rows(type_name, out_features, features, source)[0], features))
        before.append(source.standard_normal((rows, out_features)).astype(np.float32))

    def jobs() -> list[Job]:
        return [
            Job(weights[0], device.put(before[0]), adds=True),
            Job(weights[1], device.empty((rows, 70)), bias=device.put(bias), scale=0.37),
            Job(weights[2], device.empty((rows, 1))),
            Job(weights[3], device.empty((rows, 32))),
        ]

    together, alone = jobs(), jobs()
    run_linear(device, panel, together)
    for job in alone:
        run_linear(device, panel, [job])
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one.y.get().view(np.uint32), other.y.get().view(np.uint32))
    plain = device.empty((rows, 96)), device.empty((rows, 70))
    run_linear(device, panel, [Job(weights[0], plain[0])])
    run_linear(device, panel, [Job(weights[1], plain[1])])
    assert np.array_equal(together[0].y.get(), before[0] + plain[0].get())
    assert np.array_equal(together[1].y.get(), plain[1].get() * np.float32(0.37) + bias)


@pytest.mark.parametrize("type_name", TYPES)
def test_gated_outputs_are_the_activated_gate_times_up(device: Device, type_name: str) -> None:
    source = np.random.default_rng(3)
    features, out_features = 1280, 75
    gate, up = (
        pack(device, type_name, random_rows(type_name, out_features, features, source)[0], features) for _ in range(2)
    )
    for rows in (1, 8, 16, 20, 32, 64):
        x = (source.standard_normal((rows, features)) * 0.1).astype(np.float32)
        panel = make_panel(device, device.put(x))
        parts: list[Array] = [device.empty((rows, out_features)) for _ in range(2)]
        run_linear(device, panel, [Job(gate, parts[0]), Job(up, parts[1])])
        g, u = (part.get().astype(np.float64) for part in parts)
        for activation in (0, 1):
            y = device.empty((rows, out_features))
            run_linear(device, panel, [Job(gate, y), Job(up, parts[1])], activation=activation)
            inner = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
            activated = g / (1 + np.exp(-g)) if activation == 0 else g / 2 * (1 + np.tanh(inner))
            assert np.allclose(y.get(), activated * u, rtol=1e-5, atol=1e-6 * np.abs(u).max()), (rows, activation)


def test_a_fault_in_one_weight_is_seen(device: Device) -> None:
    source = np.random.default_rng(1)
    packed, decoded = random_rows("Q8_0", 64, 256, source)
    faulty = packed.copy()
    faulty[17, 2:34] += 3  # the codes of one block
    weight = pack(device, "Q8_0", faulty, 256)
    x = activations(4, 256, source)
    y = device.empty((4, 64))
    run_linear(device, make_panel(device, device.put(x)), [Job(weight, y)])
    with pytest.raises(AssertionError):
        assert_close(y.get(), x, decoded)


def test_rows_of_zeros_and_of_huge_and_tiny_values_stay_finite(device: Device) -> None:
    source = np.random.default_rng(9)
    packed, decoded = random_rows("Q8_0", 40, 128, source)
    weight = pack(device, "Q8_0", packed, 128)
    x = source.standard_normal((4, 128)).astype(np.float32) * np.array([[0], [1e30], [1e-36], [1]], np.float32)
    y = device.empty((4, 40))
    run_linear(device, make_panel(device, device.put(x)), [Job(weight, y)])
    assert not y.get()[0].any()
    assert_close(y.get()[1:], x[1:], decoded)
