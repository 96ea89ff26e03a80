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

Order = Callable[[], NDArray[np.int64]]
"""Positions in a source by position in the tensor; computed when it is written, because experts have many rows."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the GGUF file and where its values come from.

    shape: row-major. source: a tensor of the checkpoint, several that follow each other, or the values.
    source_shapes: one of each source, where they are not `shape` (of several: `shape` without its first axis).
    side_by_side: the rows of several sources are joined, instead of the sources being stacked.
    rows, columns: which rows, and which elements of each row, are taken and in what order. A source is seen as
    `[rows, columns]` with its last axis as the columns; the rows of a vector are its elements.
    compute: applied to the values of a tensor that stays F32 or I64. is_integer: I64 in checkpoint and file.
    """

    name: str
    shape: tuple[int, ...]
    source: str | tuple[str, ...] | NDArray[np.float32]
    rows: Order | None = None
    columns: Order | None = None
    source_shapes: tuple[tuple[int, ...], ...] | None = None
    side_by_side: bool = False
    compute: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    is_integer: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """Tensors of the checkpoint, in order."""
        if isinstance(self.source, np.ndarray):
            return ()
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those that `sources` must have."""
        if self.source_shapes is not None:
            return self.source_shapes
        return (self.shape[1:] if isinstance(self.source, tuple) else self.shape,) * len(self.sources)

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stays_f32(self) -> bool:
        """Vectors, norms, biases, routers and short convolutions are small and decide much: they are never rounded."""
        is_matrix = len(self.shape) > 1 and self.name.endswith(".weight")
        return not is_matrix or self.name.endswith(("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight"))

    def spec(self, outtype: str) -> TensorSpec:
        type_name = "i64" if self.is_integer else "f32" if self.stays_f32 else outtype
        if self.shape[-1] % type_traits[type_name].block_values:
            type_name = "f16"
        return TensorSpec(self.name, type_name, self.shape[::-1])


def plus_one(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """For norm weights that checkpoints store less 1."""
    return values + np.float32(1.0)
