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

    shape: row-major, as in the checkpoint. source: a tensor of the checkpoint with that shape, several that are stacked
    along its first axis, or the values.
    rearrange: moves elements about, whatever their type; the shape stays. shift: added to the values of a tensor that
    stays F32.
    """

    name: str
    shape: tuple[int, ...]
    source: str | tuple[str, ...] | NDArray[np.float32]
    rearrange: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    shift: float = 0.0

    @property
    def sources(self) -> tuple[str, ...]:
        """Tensors of the checkpoint, in order."""
        if isinstance(self.source, np.ndarray):
            return ()
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Of each of `sources`."""
        return self.shape[1:] if isinstance(self.source, tuple) else self.shape

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stays_f32(self) -> bool:
        """Vectors, norms, biases and routers are small and decide much: they are never rounded."""
        is_matrix = len(self.shape) > 1 and self.name.endswith(".weight")
        return not is_matrix or self.name.endswith(("_norm.weight", "ffn_gate_inp.weight"))

    def spec(self, outtype: str) -> TensorSpec:
        type_name = "f32" if self.stays_f32 else outtype
        if self.shape[-1] % type_traits[type_name].block_values:
            type_name = "f16"
        return TensorSpec(self.name, type_name, self.shape[::-1])
