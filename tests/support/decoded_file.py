"""A GGUF file as the float64 oracles read it: tensors decoded, the keys of its architecture without their prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def read_decoded(path: Path, *architectures: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Tensors, rows of a matrix first, those of I64 as they are; and keys.

    Raises ValueError for a file of another architecture.
    """
    reader = gguf.GGUFReader(path, "r")
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in architectures:
        raise ValueError(f"{path} is of architecture {architecture}")
    weights = {
        tensor.name: tensor.data
        if tensor.tensor_type == gguf.GGMLQuantizationType.I64
        else gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        for tensor in reader.tensors
    }
    keys = {name.removeprefix(f"{architecture}."): field.contents() for name, field in reader.fields.items()}
    return weights, keys
