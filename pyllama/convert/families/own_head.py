"""The output matrix that a drafter may have of its own, perhaps for fewer tokens than its target knows."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import ModelError

from ..config import Config
from ..safetensors import StoredTensor
from ..tensor import Tensor


def own_head(
    config: Config, rows: int, vocab_size: int, hidden: int, module: str, stored: Mapping[str, StoredTensor]
) -> Iterator[Tensor]:
    """rows: of the head. With fewer than the vocabulary's, `d2t` says how far the target's id is from the row's number.
    Raises `ModelError`.
    """
    mapping = next((name for name in (module + "d2t", "d2t") if name in stored), None)
    if rows > vocab_size or (mapping is None and rows != vocab_size):
        raise ModelError(f"{config.source}: a head of {rows} rows, without the tokens that they stand for")
    yield Tensor("output.weight", (rows, hidden), "lm_head.weight")
    if mapping is not None:
        yield Tensor("d2t", (rows,), mapping, is_integer=True, compute=_from_offsets)


def _from_offsets(offsets: NDArray[Any]) -> NDArray[Any]:
    """One row of all of them."""
    return offsets + np.arange(offsets.size)
