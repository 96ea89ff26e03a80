"""LoRA adapters and control vectors beside a model: from files and scales to what an `Engine` takes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyllama import _engine
from pyllama.errors import InvalidArgument

ScaledFile = tuple[str | os.PathLike[str], float]
"""A file and how much of it is applied."""


def read_scaled_files(name: str, files: Mapping[Any, float] | Iterable[ScaledFile] | None) -> tuple[ScaledFile, ...]:
    """(path, scale) pairs in order. `name`: of the argument, for messages. Raises `InvalidArgument`."""
    pairs = []
    for item in files.items() if isinstance(files, Mapping) else files or ():
        try:
            path, scale = item
            pairs.append((os.fspath(path), float(scale)))
        except (TypeError, ValueError):
            raise InvalidArgument(f"{name}: expected (path, scale) pairs, found {item!r}") from None
        if not math.isfinite(pairs[-1][1]):
            raise InvalidArgument(f"{name}: the scale of {path} is {scale}, expected a finite number")
    return tuple(pairs)


def read_scales(scales: Iterable[float], n_adapters: int) -> tuple[float, ...]:
    """One finite scale for each adapter. Raises `InvalidArgument`."""
    values = tuple(map(float, scales))
    if len(values) != n_adapters:
        raise InvalidArgument(f"{len(values)} scales for {n_adapters} LoRA adapters")
    if not all(map(math.isfinite, values)):
        raise InvalidArgument(f"scales of LoRA adapters must be finite, found {values}")
    return values


def load_adapters(model: _engine.Model, adapters: Sequence[ScaledFile]) -> list[_engine.LoraAdapter]:
    """The adapters of (path, scale) pairs. Raises `InvalidArgument` for a missing file, `GgufError`, `ModelError`."""
    loaded = []
    for path, _ in adapters:
        _require_file("LoRA adapter", path)
        loaded.append(_engine.LoraAdapter(model, path))
    return loaded


def load_control_vector(
    model: _engine.Model, files: Sequence[ScaledFile], layers: tuple[int, int] | None = None
) -> _engine.ControlVector | None:
    """The sum of the files, for the given first and last layer; None without files. Raises as `load_adapters` does.

    Bounds of 0 and below leave the range open at that end.
    """
    if not files:
        return None
    for path, _ in files:
        _require_file("control vector", path)
    first, last = layers or (0, 0)
    return _engine.ControlVector(model, files, first_layer=max(0, first), last_layer=max(0, last))


def _require_file(what: str, path: str | os.PathLike[str]) -> None:
    if not Path(path).is_file():
        raise InvalidArgument(f"{what}: there is no file {os.fspath(path)!r}")
