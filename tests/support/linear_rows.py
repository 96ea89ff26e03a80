"""Activations for tests of linear layers and the tolerance of their outputs.

Tolerance: x and the decoded weights are rounded to f16, 2^-11 of each value; with a minimum in the type, of both of the
parts whose difference a weight is, so one near zero may be off by 2^-11 of a typical one. Products are exact, sums
f32. So the error of an output is measured against the root of the sum of its squared products (its size for
random signs), with every weight at least a typical one: below 2e-3 over a row, below 1e-2 in one output.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def activations(rows: int, features: int, source: np.random.Generator) -> NDArray[np.float32]:
    """Rows of very different size, some values far above the rest, as residual streams have them."""
    x = source.standard_normal((rows, features)) * 10.0 ** source.uniform(-6, 6, (rows, 1))
    x[:, ::97] *= 50
    return x.astype(np.float32)


def assert_close(y: NDArray[np.float32], x: NDArray[np.float32], decoded: NDArray[np.float64]) -> None:
    wide = x.astype(np.float64)
    error = np.abs(y - wide @ decoded.T)
    scale = np.sqrt(wide**2 @ np.maximum(decoded**2, (decoded**2).mean()).T)
    rows = np.linalg.norm(error, axis=1) / np.linalg.norm(scale, axis=1)
    assert rows.max() <= 2e-3, f"row {rows.argmax()}: relative error {rows.max():.2e}"
    worst = (error / scale).max()
    assert worst <= 1e-2, f"an output is off by {worst:.2e}"
