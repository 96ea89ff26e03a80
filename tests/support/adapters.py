"""Writes LoRA adapters and control vectors for tiny models, and the models that have an adapter merged into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from support.rewritten_gguf import rewrite

Matrices = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""By the model's tensor: A and B in the file's order, as `lora_a` [.., R, in] and `lora_b` [.., out, R]; for embeddings
A [vocab, R] and B [features, R]."""

LOOKED_UP = "token_embd.weight"


def random_matrices(
    model: Path, names: Callable[[str], bool], *, rank: int = 4, std: float = 0.5, seed: int = 5
) -> Matrices:
    """Random A and B for the model's tensors that `names` chooses: B (A x) has about `std` of the spread of x."""
    rng = np.random.default_rng(seed)
    matrices = {}
    for tensor in gguf.GGUFReader(model).tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # [.., out, in]
        if len(shape) < 2 or not names(tensor.name):
            continue
        *experts, rows, columns = shape
        a_shape = (rows, rank) if tensor.name == LOOKED_UP else (*experts, rank, columns)
        b_shape = (columns, rank) if tensor.name == LOOKED_UP else (*experts, rows, rank)
        a = rng.standard_normal(a_shape) / (1 if tensor.name == LOOKED_UP else columns**0.5)
        b = rng.standard_normal(b_shape) * std / rank**0.5 * (0.3 if tensor.name == LOOKED_UP else 1)
        matrices[tensor.name] = (a.astype(np.float32), b.astype(np.float32))
    return matrices


def write_adapter(
    path: Path,
    matrices: Mapping[str, tuple[NDArray[Any], NDArray[Any]]],
    *,
    architecture: str = "llama",
    alpha: float | None = 8.0,
    keys: Mapping[str, Any] | None = None,
    drop: Iterable[str] = (),
    extra: Mapping[str, NDArray[Any]] | None = None,
    type_name: str = "f32",
) -> Path:
    """keys: strings to replace or add, None leaves one out. drop: tensors to leave out. type_name: of all tensors."""
    texts = {"general.type": "adapter", "adapter.type": "lora", **(keys or {})}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in texts.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    quant_type = gguf.GGMLQuantizationType[type_name.upper()]
    tensors = {}
    for name, (a, b) in matrices.items():
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    for name, values in {**tensors, **(extra or {})}.items():
        if name in drop:
            continue
        if type_name == "f32":
            writer.add_tensor(name, np.asarray(values))
        elif type_name == "f16":
            writer.add_tensor(name, np.asarray(values, np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.asarray(values), quant_type), raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merge(
    model: Path, target: Path, adapters: Iterable[tuple[Matrices, float]], *, architecture: str, alpha: float = 8.0
) -> Path:
    """The F32 model with W + scale * alpha / rank * B A for each adapter, summed in f64."""
    adapters = list(adapters)

    def change(name: str, data: NDArray[Any]) -> NDArray[Any]:
        result = data.astype(np.float64)
        for matrices, scale in adapters:
            if name in matrices:
                a, b = (matrix.astype(np.float64) for matrix in matrices[name])
                product = a @ b.T if name == LOOKED_UP else b @ a
                result += scale * alpha / b.shape[-1] * product
        return result.astype(np.float32)

    return rewrite(model, target, tensors=change, architecture=architecture)


def write_control_vector(path: Path, directions: Mapping[int, NDArray[Any]], *, hint: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", hint)
    writer.add_uint32("controlvector.layer_count", len(directions))
    for layer, values in directions.items():
        writer.add_tensor(f"direction.{layer}", np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
