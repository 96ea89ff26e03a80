"""The norms that embeddings are divided by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import InvalidArgument

# Largest magnitude of a vector that is scaled by its maximum, to fit 16-bit integers.
LARGEST_INT16 = 32760.0


def normalized(vector: NDArray[Any], norm: int = 2) -> NDArray[np.float64]:
    """`vector` divided by its norm; zeros stay zeros.

    norm: -1 none, 0 the largest magnitude (which becomes 32760), 1 the sum of magnitudes, 2 the length, p the p-norm.
    Other values raise `InvalidArgument`.
    """
    values = np.asarray(vector, np.float64)
    if norm < -1:
        raise InvalidArgument(f"the norm of an embedding is {norm}, expected -1 or more")
    if norm == -1 or not values.size:
        return values
    magnitudes = np.abs(values)
    largest = float(magnitudes.max())
    if largest == 0.0:
        return values
    if norm == 0:
        return values * (LARGEST_INT16 / largest)
    # Relative to the largest, so that high powers neither overflow nor vanish.
    return values / (largest * float(np.sum((magnitudes / largest) ** norm)) ** (1.0 / norm))
