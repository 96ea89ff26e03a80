"""What a family says about each tensor of the GGUF file, and the type it is stored in."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama.gguf import TensorSpec, type_traits

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""Output types, and their numbers in `general.file_type`."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the GGUF file and where its values come from.

    shape: row-major, as in the checkpoint. source: a tensor of the checkpoint with that shape, or the values.
    rearrange: moves elements about, whatever their type; the shape stays.
    """

    name: str
    shape: tuple[int, ...]
    source: str | NDArray[np.float32]
    rearrange: Callable[[NDArray[Any]], NDArray[Any]] | None = None

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stays_f32(self) -> bool:
        """Vectors, norms and biases are small and enter sums directly: they are never rounded."""
        return len(self.shape) < 2 or not self.name.endswith(".weight") or self.name.endswith("_norm.weight")

    def spec(self, outtype: str) -> TensorSpec:
        type_name = "f32" if self.stays_f32 else outtype
        if self.shape[-1] % type_traits[type_name].block_values:
            type_name = "f16"
        return TensorSpec(self.name, type_name, self.shape[::-1])
