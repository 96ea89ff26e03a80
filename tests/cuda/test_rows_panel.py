"""Row-wise kernels that leave a panel have the bits of the plain kernel and of `panel` after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.cuda_device import Array, Device, struct_of
from support.cuda_linear import NORM_THREADS, ROW_THREADS, THREADS
from support.cuda_panel import LeftPanel, panel_of

ROWS = (1, 8, 11, 32, 64)


def check(device: Device, name: str, plain: tuple[str, str, int], params: Any, field: str, result: list[Array]) -> None:
    """result: of the plain kernel and of the other one, which work on equal values. params(y) are theirs."""
    unit_name, struct_name, grid = plain
    device.kernel("rows", unit_name)(grid, THREADS, struct_name, **params(result[0]))
    expected = panel_of(device, result[0])
    panel = LeftPanel(device, *result[1].shape)
    threads = NORM_THREADS if name == "rms_norm" else ROW_THREADS
    nested = {field: struct_of(struct_name, **params(result[1])), "out": panel.struct}
    if name == "gated":
        nested["features"] = result[1].shape[1]
    device.kernel("rows_panel", f"{name}_panel")(panel.rows, threads, STRUCTS[name], **nested)
    assert result[1].get().tobytes() == result[0].get().tobytes()
    assert panel.bits() == expected.bits()


STRUCTS = {
    "rms_norm": "RmsNormPanelParams",
    "norm_gate": "NormGatePanelParams",
    "apply_gate": "ApplyGatePanelParams",
    "gated": "GatedPanelParams",
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("features", [32, 576, 5120])
def test_rms_norm(device: Device, rows: int, features: int) -> None:
    source = np.random.default_rng(rows)
    x = (source.standard_normal((rows, features)) * 10.0 ** source.uniform(-6, 6, (rows, 1))).astype(np.float32)
    added, weight = device.put(x[::-1].copy()), device.put(source.standard_normal(features).astype(np.float32))
    for extra in (0, added):
        fields = {"weight": weight, "rows": rows, "features": features, "eps": 1e-5, "added": extra}
        streams = [device.put(x), device.put(x)]
        outputs = [device.empty((rows, features)) for _ in range(2)]

        def params(y: Array, fields: Any = fields, outputs: Any = outputs, streams: Any = streams) -> dict[str, Any]:
            return {**fields, "x": streams[outputs.index(y)], "y": y}

        check(device, "rms_norm", ("rms_norm", "RmsNormParams", rows), params, "norm", outputs)
        assert streams[1].get().tobytes() == streams[0].get().tobytes()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (5, 128), (48, 128)])
def test_norm_gate(device: Device, rows: int, heads: int, head_dim: int) -> None:
    source = np.random.default_rng(rows)
    x, gate = (source.standard_normal((rows, heads * head_dim)).astype(np.float32) for _ in range(2))
    weight, gates = device.put(source.standard_normal(head_dim).astype(np.float32)), device.put(gate)
    fields = {"gate": gates, "weight": weight, "rows": rows, "heads": heads, "head_dim": head_dim, "eps": 1e-6}
    for function in (0, 1):
        grid = -(-rows * heads // 8)
        check(
            device, "norm_gate", ("norm_gate", "NormGateParams", grid),
            lambda y, function=function: {**fields, "x": y, "y": y, "function": function}, "gate",
            [device.put(x), device.put(x)],
        )  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("features", "gates"), [(64, 64), (6144, 6144), (96, 3), (5120, 1)])
def test_apply_gate(device: Device, rows: int, features: int, gates: int) -> None:
    source = np.random.default_rng(rows)
    x = source.standard_normal((rows, features)).astype(np.float32)
    gate = device.put(source.standard_normal((rows, gates)).astype(np.float32))
    check(
        device, "apply_gate", ("apply_gate", "ApplyGateParams", 64),
        lambda y: {"x": y, "gate": gate, "rows": rows, "features": features, "gates": gates}, "gate",
        [device.put(x), device.put(x)],
    )  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("features", [64, 17408, 21504])
@pytest.mark.parametrize("activation", [0, 1])
def test_gated(device: Device, rows: int, features: int, activation: int) -> None:
    source = np.random.default_rng(rows)
    gate, up = (source.standard_normal((rows, features)).astype(np.float32) for _ in range(2))
    fields = {"up": device.put(up), "n": rows * features, "activation": activation}
    check(
        device, "gated", ("gated", "GatedParams", 64), lambda y: {**fields, "gate": y, "y": y}, "gated",
        [device.put(gate), device.put(gate)],
    )  # fmt: skip
