"""Panels that kernels leave of their rows, as bits to compare."""

from __future__ import annotations

import numpy as np

from support.cuda_device import Array, Device, parameter_structs
from support.cuda_linear import ROW_THREADS


class LeftPanel:
    """Poisoned memory for a panel of as many rows, and what a kernel is told of it."""

    def __init__(self, device: Device, rows: int, features: int) -> None:
        self.tiles = next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)
        self.rows = rows
        self.values = device.empty((features * self.tiles * 8,), np.uint16)
        self.row_scale = device.empty((8 * self.tiles,))
        self.struct = parameter_structs()["PanelOutput"](
            panel=self.values.address, row_scale=self.row_scale.address, tiles=self.tiles
        )

    def bits(self) -> tuple[bytes, bytes]:
        return self.values.get().tobytes(), self.row_scale.get()[: self.rows].tobytes()


def panel_of(device: Device, x: Array) -> LeftPanel:
    """What the kernel `panel` makes of x [rows, features]."""
    panel = LeftPanel(device, *x.shape)
    device.kernel("panel", "panel")(
        x.shape[0], ROW_THREADS, "PanelParams", x=x, panel=panel.values, row_scale=panel.row_scale, rows=x.shape[0],
        features=x.shape[1], tiles=panel.tiles,
    )  # fmt: skip
    return panel
