"""Copies a GGUF file with changes: tensors edited or dropped, metadata replaced, another architecture claimed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Edit = Callable[[str, np.ndarray], np.ndarray | None]


def rewrite(
    source: Path,
    target: Path,
    *,
    tensors: Edit = lambda name, data: data,
    extra: dict[str, np.ndarray] | None = None,
    keys: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Copy a float GGUF, passing each tensor through `tensors` (None drops it), replacing `keys` (None drops one)."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, architecture)
    keys = keys or {}
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or field.name in keys:
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for name, value in keys.items():
        if value is not None:
            writer.add_key_value(name, value[1], value[0], value[2] if len(value) > 2 else None)
    for tensor in reader.tensors:
        data = tensors(tensor.name, np.array(tensor.data))
        if data is not None:
            writer.add_tensor(tensor.name, data)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def edit_one(wanted: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Edit:
    return lambda name, data: change(data) if name == wanted else data


def without(name: str) -> dict[str, Any]:
    """Changes for `rewrite`: the tensor is missing."""
    return {"tensors": edit_one(name, lambda data: None)}


def cut(name: str) -> dict[str, Any]:
    """Changes for `rewrite`: the tensor lacks the last of its rows (of its experts, of its values)."""
    return {"tensors": edit_one(name, lambda data: data[:-1])}


U32 = gguf.GGUFValueType.UINT32
F32 = gguf.GGUFValueType.FLOAT32
STRING = gguf.GGUFValueType.STRING
ARRAY = gguf.GGUFValueType.ARRAY
