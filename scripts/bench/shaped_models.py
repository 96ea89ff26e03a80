#!/usr/bin/env python3
"""Writes a GGUF file with the exact shapes of a published model and random weights: speed without a download.

    scripts/bench/shaped_models.py SHAPE FILE [--type Q8_0] [--layers N]

The types of the tensors are those that `llama-quantize` would choose. A matrix repeats the same random rows, so 27
billion weights take as long as the disk needs. The file has no tokenizer: it is for engines, not for texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama._engine import quantize
from pyllama.gguf import KeyValue
from pyllama.gguf.writer import GgufWriter, TensorSpec
from pyllama.quantize.file_types import FILE_TYPES
from pyllama.quantize.mixture import ModelTraits, TypeOptions, Weight, choose_types

POOL_ROWS = 256


@dataclass(frozen=True)
class Shape:
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert, where there are any
    vocab: int
    context: int
    rope_base: float
    rotary: int
    epsilon: float = 1e-6
    tied: bool = False
    key_heads: int = 0  # of delta nets
    value_heads: int = 0
    state: int = 128
    taps: int = 4
    interval: int = 4  # every so many layers attend
    experts: int = 0
    experts_used: int = 0
    shared_ffn: int = 0

    @property
    def is_hybrid(self) -> bool:
        return self.value_heads > 0


SHAPES = {
    "qwen3.8-27b": Shape(
        "qwen35", 64, 5120, 24, 4, 256, 17408, 248320, 262144, 1e7, 64, key_heads=16, value_heads=48
    ),
    "qwen3.5-35b-a3b": Shape(
        "qwen35moe", 40, 2048, 16, 2, 256, 512, 248320, 262144, 1e7, 64, key_heads=16, value_heads=32,
        experts=256, experts_used=8, shared_ffn=512,
    ),
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 5e5, 128, 1e-5),
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e5, 64, 1e-5, tied=True),
}  # fmt: skip


class Matrix(NamedTuple):
    """A tensor of a file and the spread of its values; `values` where they are no normal numbers."""

    name: str
    shape: tuple[int, ...]  # ggml order: shape[0] is contiguous
    spread: float = 0.0
    mean: float = 0.0
    values: NDArray[np.float32] | None = None


def key_values(shape: Shape) -> list[KeyValue]:
    name = shape.architecture
    keys: dict[str, int | float | list[int]] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.epsilon,
        "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.rotary,
        "vocab_size": shape.vocab,
    }
    if shape.is_hybrid:
        keys |= {
            "rope.dimension_sections": [11, 11, 10, 0],
            "full_attention_interval": shape.interval,
            "ssm.conv_kernel": shape.taps,
            "ssm.state_size": shape.state,
            "ssm.group_count": shape.key_heads,
            "ssm.time_step_rank": shape.value_heads,
            "ssm.inner_size": shape.value_heads * shape.state,
        }
    if shape.experts:
        keys |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.ffn,
            "expert_shared_feed_forward_length": shape.shared_ffn,
        }
    kinds = {int: "u32", float: "f32", list: "i32[]"}
    return [
        KeyValue("general.architecture", "string", name),
        *(KeyValue(f"{name}.{key}", kinds[type(value)], value) for key, value in keys.items()),
    ]


def matrices(shape: Shape) -> Iterator[Matrix]:
    hidden = shape.hidden
    yield Matrix("token_embd.weight", (hidden, shape.vocab), 0.02)
    yield Matrix("output_norm.weight", (hidden,), 0.05, 1.0)
    if not shape.tied:
        yield weight("output.weight", hidden, shape.vocab)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield Matrix(block + "attn_norm.weight", (hidden,), 0.05, 1.0)
        if shape.is_hybrid and (layer + 1) % shape.interval:
            yield from delta_net(shape, block)
        else:
            yield from attention(shape, block)
        before_ffn = "post_attention_norm" if shape.is_hybrid else "ffn_norm"
        yield Matrix(f"{block}{before_ffn}.weight", (hidden,), 0.05, 1.0)
        yield from feed_forward(shape, block)


def weight(name: str, columns: int, *rows: int) -> Matrix:
    return Matrix(name, (columns, *rows), 0.7 / columns**0.5)


def attention(shape: Shape, block: str) -> Iterator[Matrix]:
    gated = 2 if shape.is_hybrid else 1  # a query and its gate
    yield weight(block + "attn_q.weight", shape.hidden, gated * shape.heads * shape.head_dim)
    yield weight(block + "attn_k.weight", shape.hidden, shape.kv_heads * shape.head_dim)
    yield weight(block + "attn_v.weight", shape.hidden, shape.kv_heads * shape.head_dim)
    yield weight(block + "attn_output.weight", shape.heads * shape.head_dim, shape.hidden)
    if shape.is_hybrid:
        for name in ("q", "k"):
            yield Matrix(f"{block}attn_{name}_norm.weight", (shape.head_dim,), 0.05, 1.0)


def delta_net(shape: Shape, block: str) -> Iterator[Matrix]:
    rng = np.random.default_rng(1)
    heads, values = shape.value_heads, shape.value_heads * shape.state
    channels = 2 * shape.key_heads * shape.state + values
    yield weight(block + "attn_qkv.weight", shape.hidden, channels)
    yield weight(block + "attn_gate.weight", shape.hidden, values)
    yield weight(block + "ssm_beta.weight", shape.hidden, heads)
    yield weight(block + "ssm_alpha.weight", shape.hidden, heads)
    yield Matrix(block + "ssm_conv1d.weight", (shape.taps, channels), 0.5)
    yield Matrix(block + "ssm_dt.bias", (heads,), values=rng.uniform(-5, -1, heads).astype(np.float32))
    yield Matrix(block + "ssm_a", (heads,), values=-np.exp(rng.uniform(0, 2, heads)).astype(np.float32))
    yield Matrix(block + "ssm_norm.weight", (shape.state,), 0.05, 1.0)
    yield weight(block + "ssm_out.weight", values, shape.hidden)


def feed_forward(shape: Shape, block: str) -> Iterator[Matrix]:
    hidden, experts = shape.hidden, shape.experts
    if not experts:
        yield weight(block + "ffn_gate.weight", hidden, shape.ffn)
        yield weight(block + "ffn_up.weight", hidden, shape.ffn)
        yield weight(block + "ffn_down.weight", shape.ffn, hidden)
        return
    yield weight(block + "ffn_gate_inp.weight", hidden, experts)
    yield weight(block + "ffn_gate_exps.weight", hidden, shape.ffn, experts)
    yield weight(block + "ffn_up_exps.weight", hidden, shape.ffn, experts)
    yield weight(block + "ffn_down_exps.weight", shape.ffn, hidden, experts)
    yield Matrix(block + "ffn_gate_inp_shexp.weight", (hidden,), 0.02)
    yield weight(block + "ffn_gate_shexp.weight", hidden, shape.shared_ffn)
    yield weight(block + "ffn_up_shexp.weight", hidden, shape.shared_ffn)
    yield weight(block + "ffn_down_shexp.weight", shape.shared_ffn, hidden)


def write(path: Path, shape: Shape, file_type: str) -> int:
    """The file's bytes of weights that a token reads: all but the embeddings, of experts those it goes to."""
    keys = key_values(shape)
    plan = list(matrices(shape))
    kind = next(kind for kind in FILE_TYPES if kind.name == file_type)
    traits = ModelTraits.of({key.key: key.value for key in keys})
    weights = [Weight(matrix.name, "f32", matrix.shape) for matrix in plan]
    choices = choose_types(weights, traits, kind, TypeOptions(), has_imatrix=False)
    specs = [
        TensorSpec(matrix.name, "f32" if choice is None else choice.type_name, matrix.shape)
        for matrix, choice in zip(plan, choices, strict=True)
    ]
    keys.append(KeyValue("general.file_type", "u32", kind.id))
    pools: dict[tuple[str, int], NDArray[np.uint8]] = {}
    rng = np.random.default_rng(20261130)
    read = 0
    with GgufWriter(path, keys, specs) as writer:
        for matrix, spec in zip(plan, specs, strict=True):
            n_rows = int(np.prod(matrix.shape[1:]))
            is_read = matrix.name != "token_embd.weight" or shape.tied
            if matrix.name.endswith("_exps.weight"):
                read += spec.n_bytes * shape.experts_used // shape.experts
            elif is_read:
                read += spec.n_bytes
            if len(matrix.shape) == 1 or spec.type_name == "f32":
                values = matrix.values
                if values is None:
                    values = matrix.mean + matrix.spread * rng.standard_normal(
                        (n_rows, matrix.shape[0]), dtype=np.float32
                    )
                writer.write(np.ascontiguousarray(values, np.float32))
                continue
            pool = pools.get((spec.type_name, matrix.shape[0]))
            if pool is None:
                values = matrix.spread * rng.standard_normal((POOL_ROWS, matrix.shape[0]), dtype=np.float32)
                pool = quantize(spec.type_name, values).reshape(POOL_ROWS, -1)
                pools[spec.type_name, matrix.shape[0]] = pool
            for first in range(0, n_rows, POOL_ROWS):
                writer.write(pool[: min(POOL_ROWS, n_rows - first)])
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q8_0", choices=[kind.name for kind in FILE_TYPES])
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.layers is not None:
        shape = replace(shape, layers=arguments.layers)
    read = write(arguments.file, shape, arguments.type)
    print(f"{arguments.file}: {arguments.file.stat().st_size} bytes, {read} of them read for a token")


if __name__ == "__main__":
    main()
