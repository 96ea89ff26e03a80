"""Models as the quantiser's type rules see them: names, columns and a few keys. Every matrix has two rows only, so that
a model of 80 layers stays small: the quantiser looks at rows one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from pyllama.gguf import GgufWriter, KeyValue, TensorSpec

N_EMBD, N_HEAD, N_ROWS = 256, 8, 2


@dataclass(frozen=True)
class ModelShape:
    architecture: str = "llama"
    n_layer: int = 1
    n_expert: int = 0
    queries_per_kv: int = 1
    tied: bool = False
    n_ff: int = 256

    @property
    def key(self) -> str:
        tied = "_tied" if self.tied else ""
        return f"{self.architecture}_l{self.n_layer}_e{self.n_expert}_q{self.queries_per_kv}_f{self.n_ff}{tied}"

    @property
    def n_head_kv(self) -> int:
        return N_HEAD // self.queries_per_kv


def all_shapes() -> list[ModelShape]:
    plain = [
        ModelShape("llama", n_layer, n_expert, queries_per_kv, tied)
        for n_layer, n_expert, queries_per_kv, tied in product((1, 8, 18, 32), (0, 8), (1, 4, 8), (False, True))
    ]
    return [
        *plain,
        ModelShape(n_layer=18, n_expert=4, queries_per_kv=1),
        ModelShape(n_layer=80, queries_per_kv=8),  # "70B"
        ModelShape(n_layer=80, queries_per_kv=1),
        ModelShape("falcon", n_layer=32, queries_per_kv=8),
        ModelShape(n_layer=18, n_ff=224),  # rows that are no whole super-blocks
    ]


def key_values_of(shape: ModelShape) -> list[KeyValue]:
    name = shape.architecture
    numbers = {
        "block_count": shape.n_layer,
        "context_length": 128,
        "embedding_length": N_EMBD,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": shape.n_head_kv,
        "rope.dimension_count": N_EMBD // N_HEAD,
        "vocab_size": N_ROWS,
    }
    if shape.n_expert:
        numbers |= {"expert_count": shape.n_expert, "expert_used_count": 2}
    epsilon = "attention.layer_norm_epsilon" if name == "falcon" else "attention.layer_norm_rms_epsilon"
    return [
        KeyValue("general.architecture", "string", name),
        *(KeyValue(f"{name}.{key}", "u32", value) for key, value in numbers.items()),
        KeyValue(f"{name}.{epsilon}", "f32", 1e-5),
        KeyValue("general.file_type", "u32", 1),
        KeyValue("tokenizer.ggml.model", "string", "none"),
    ]


def tensors_of(shape: ModelShape) -> list[TensorSpec]:
    """In a scrambled order: the quantiser's own order is part of what is tested."""

    def matrix(name: str, columns: int = N_EMBD, stack: tuple[int, ...] = ()) -> TensorSpec:
        return TensorSpec(f"{name}.weight", "f16", (columns, N_ROWS, *stack))

    def vector(name: str) -> TensorSpec:
        return TensorSpec(f"{name}.weight", "f32", (N_EMBD,))

    is_falcon = shape.architecture == "falcon"
    stack, end = ((shape.n_expert,), "_exps") if shape.n_expert else ((), "")
    tensors = [matrix("token_embd"), vector("output_norm")]
    if not shape.tied:
        tensors.append(matrix("output"))
    for layer in reversed(range(shape.n_layer)):
        block = f"blk.{layer}."
        tensors += [vector(block + "attn_norm"), matrix(block + "attn_output")]
        tensors += [matrix(f"{block}attn_{part}") for part in (["qkv"] if is_falcon else ["v", "q", "k"])]
        tensors += [matrix(f"{block}ffn_up{end}", stack=stack), matrix(f"{block}ffn_down{end}", shape.n_ff, stack)]
        if not is_falcon:
            tensors.append(matrix(f"{block}ffn_gate{end}", stack=stack))
        if shape.n_expert:
            tensors.append(TensorSpec(f"{block}ffn_gate_inp.weight", "f32", (N_EMBD, shape.n_expert)))
    return tensors


def write_model(path: Path, shape: ModelShape, seed: int = 1) -> Path:
    """With random weights."""
    rng = np.random.default_rng(seed)
    tensors = tensors_of(shape)
    with GgufWriter(path, key_values_of(shape), tensors) as writer:
        for tensor in tensors:
            n_values = int(np.prod(tensor.shape))
            dtype = {"f16": np.float16, "f32": np.float32}[tensor.type_name]
            writer.write(rng.standard_normal(n_values, np.float32).astype(dtype))
    return path
