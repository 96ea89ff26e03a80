"""Gated delta nets of the card, token after token and in chunks, and the recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.cuda_device import Array, Device

EPS = 1e-6
CHUNK = 64
Inputs = tuple[NDArray[np.float32], ...]  # qkv, beta, alpha


def first_rows(counts: list[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


class Work(NamedTuple):
    """Launches, and where they leave their outputs."""

    launch: Callable[[], None]
    y: Array

    def run(self) -> NDArray[np.float32]:
        self.launch()
        return self.y.get()


class DeltaNet:
    def __init__(self, key_heads: int, value_heads: int, head_dim: int, source: np.random.Generator) -> None:
        self.key_heads, self.value_heads, self.head_dim = key_heads, value_heads, head_dim
        self.a = -np.exp(source.uniform(-3, 1, value_heads)).astype(np.float32)
        self.dt_bias = source.standard_normal(value_heads).astype(np.float32)

    def _fields(
        self, device: Device, inputs: Inputs, memory: Array, counts: list[int], state_from: list[int],
        state_to: list[int],
    ) -> dict[str, Any]:  # fmt: skip
        qkv, beta, alpha = inputs
        return {
            "qkv": device.put(qkv), "beta": device.put(beta), "alpha": device.put(alpha), "a": device.put(self.a),
            "dt_bias": device.put(self.dt_bias), "y": device.empty((len(qkv), self.value_heads * self.head_dim)),
            "memory": memory, "state_from": device.put(np.array(state_from, np.int32)),
            "state_to": device.put(np.array(state_to, np.int32)), "first_row": device.put(first_rows(counts)[:-1]),
            "end_row": device.put(first_rows(counts)[1:]), "slot_values": memory.shape[1],
            "key_heads": self.key_heads, "value_heads": self.value_heads, "eps": EPS,
        }  # fmt: skip

    def recurrent(
        self, device: Device, inputs: Inputs, memory: Array, counts: list[int], state_from: list[int],
        state_to: list[int], most_rows: int = 1 << 30,
    ) -> Work:  # fmt: skip
        fields = self._fields(device, inputs, memory, counts, state_from, state_to) | {"most_rows": most_rows}
        grid = (-(-self.value_heads * self.head_dim // 16 // 4), len(counts))
        kernel = device.kernel("delta_net", f"delta_net_{self.head_dim}")
        return Work(lambda: kernel(grid, 128, "DeltaNetParams", **fields), fields["y"])

    def chunked(
        self, device: Device, inputs: Inputs, memory: Array, counts: list[int], positions: list[int],
        state_from: list[int], state_to: list[int],
    ) -> Work:  # fmt: skip
        """`positions`: of each sequence's first row in it."""
        n = self.head_dim
        chunks = [-(-(at % CHUNK + rows) // CHUNK) if rows else 0 for at, rows in zip(positions, counts, strict=True)]
        total = sum(chunks)
        fields = self._fields(device, inputs, memory, counts, state_from, state_to) | {
            "first_position": device.put(np.array(positions, np.int32)), "first_chunk": device.put(first_rows(chunks)),
            "key_panels": device.empty((total, self.key_heads, 3 * CHUNK * n), np.uint16),
            "value_panels": device.empty((total, self.value_heads, 2 * CHUNK * CHUNK), np.uint16),
            "factors": device.empty((total, self.value_heads, 4 * CHUNK)),
        }  # fmt: skip
        shared = max(2 * n // 8 * (CHUNK + 1) * 16, 2 * CHUNK * (CHUNK + 4) * 4) + 4 * CHUNK * 20
        prepare = device.kernel("delta_net_chunked", f"delta_net_chunks_{n}")
        scan = device.kernel("delta_net_chunked", f"delta_net_scan_{n}")

        def launch() -> None:
            prepare((total, self.key_heads), 256, "DeltaNetChunksParams", shared, **fields)
            scan((self.value_heads * n // 32, len(counts)), 128, "DeltaNetChunksParams", **fields)

        return Work(launch, fields["y"])

    def inputs(self, rows: int, source: np.random.Generator) -> Inputs:
        width = (2 * self.key_heads + self.value_heads) * self.head_dim
        shapes = ((rows, width), (rows, self.value_heads), (rows, self.value_heads))
        return tuple(source.standard_normal(shape).astype(np.float32) for shape in shapes)

    def expected(self, inputs: Inputs, state: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Outputs [rows, value_heads, head_dim] and the state [value_heads, head_dim, head_dim] after the rows."""
        qkv, beta, alpha = (values.astype(np.float64) for values in inputs)
        n, state = self.key_heads * self.head_dim, state.copy()
        heads = np.arange(self.value_heads) % self.key_heads
        outputs = []
        for row in range(len(qkv)):
            q = qkv[row, :n].reshape(-1, self.head_dim)[heads]
            k = qkv[row, n : 2 * n].reshape(-1, self.head_dim)[heads]
            v = qkv[row, 2 * n :].reshape(-1, self.head_dim)
            k = k / np.sqrt((k**2).sum(axis=1, keepdims=True) + EPS)
            q = q / np.sqrt((q**2).sum(axis=1, keepdims=True) + EPS) * self.head_dim**-0.5
            decay = np.exp(self.a * np.logaddexp(0, alpha[row] + self.dt_bias))[:, None]
            delta = (v - decay * np.einsum("hij,hi->hj", state, k)) / (1 + np.exp(-beta[row]))[:, None]
            state = decay[..., None] * state + k[:, :, None] * delta[:, None]
            outputs.append(np.einsum("hij,hi->hj", state, q))
        return np.array(outputs), state

    def record(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """The layout of a record: [head][j / 16][i][j % 16]."""
        return state.reshape(self.value_heads, self.head_dim, -1, 16).transpose(0, 2, 1, 3).reshape(-1)
