"""The inputs of every linear layer of a `llama` model over one text, computed with NumPy in f64: an oracle.

Plain attention over the whole text, interleaved rotary pairs, SwiGLU; for F32 files of `write_tiny_llama`.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def linear_inputs(path: Path, tokens: NDArray[np.int32]) -> dict[str, Array]:
    """By weight name, [tokens, columns]; the output layer's included."""
    reader = gguf.GGUFReader(path, "r")
    weights = {t.name: t.data.astype(np.float64) for t in reader.tensors}
    keys = {name.removeprefix("llama."): field for name, field in reader.fields.items()}
    n_head, n_kv = (int(keys[f"attention.{name}"].contents()) for name in ("head_count", "head_count_kv"))
    epsilon = float(keys["attention.layer_norm_rms_epsilon"].contents())
    base = float(keys["rope.freq_base"].contents())
    inputs: dict[str, Array] = {}

    def linear(name: str, x: Array) -> Array:
        inputs[name] = x
        return x @ weights[name].T

    def norm(name: str, x: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weights[name]

    def rotated(x: Array) -> Array:
        """x [tokens, heads, head size]"""
        angles = np.arange(len(x))[:, None] / base ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    n = len(tokens)
    x = weights["token_embd.weight"][tokens]
    for layer in range(int(keys["block_count"].contents())):
        block = f"blk.{layer}."
        h = norm(block + "attn_norm.weight", x)
        q = rotated(linear(block + "attn_q.weight", h).reshape(n, n_head, -1))
        k = rotated(linear(block + "attn_k.weight", h).reshape(n, n_kv, -1)).repeat(n_head // n_kv, axis=1)
        v = linear(block + "attn_v.weight", h).reshape(n, n_kv, -1).repeat(n_head // n_kv, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5 + np.triu(np.full((n, n), -np.inf), 1)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + linear(block + "attn_output.weight", np.einsum("hij,jhd->ihd", shares, v).reshape(n, -1))
        h = norm(block + "ffn_norm.weight", x)
        gate = linear(block + "ffn_gate.weight", h)
        x = x + linear(block + "ffn_down.weight", gate / (1 + np.exp(-gate)) * linear(block + "ffn_up.weight", h))
    output = "output.weight" if "output.weight" in weights else "token_embd.weight"
    linear(output, norm("output_norm.weight", x))
    return inputs
