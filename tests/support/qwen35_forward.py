"""Logits of `qwen35` and `qwen35moe` files, computed with NumPy in f64 straight from the definitions: an oracle.

The delta net runs token by token, attention over the whole text. Text positions only; no rotary scaling.
n tokens, H hidden, Hq/Hkv heads of D, Hk/Hv key and value heads of S.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from support.decoded_file import Array, read_decoded


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    shares = np.exp(x - x.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


class Qwen35Forward:
    """One file. Raises ValueError for one of another architecture."""

    architectures: tuple[str, ...] = ("qwen35", "qwen35moe")

    def __init__(self, path: Path) -> None:
        self.weights, self.keys = read_decoded(path, *self.architectures)
        if self.keys.get("rope.scaling.type", "none") != "none":
            raise ValueError(f"{path} scales its rotary positions")
        self.epsilon: float = self.keys["attention.layer_norm_rms_epsilon"]
        self.n_layers: int = self.keys["block_count"] - self.keys.get("nextn_predict_layers", 0)

    def logits(self, tokens: Sequence[int]) -> Array:
        """After each token, `[n, vocabulary]`."""
        return self.head(self.hidden(tokens))

    def predicted(self, tokens: Sequence[int], n: int) -> list[int]:
        """What the block of multi-token prediction says follows `tokens`, of which the last is not in the trunk yet."""
        block = f"blk.{self.n_layers}."
        tokens = list(tokens)
        before = np.concatenate([np.zeros((1, self.keys["embedding_length"])), self.hidden(tokens[:-1])])
        drafted: list[int] = []
        while len(drafted) < n:
            embedded = self.norm(self.weights["token_embd.weight"][tokens], block + "nextn.enorm.weight")
            joined = np.concatenate([embedded, self.norm(before, block + "nextn.hnorm.weight")], axis=1)
            x = self.linear(joined, block + "nextn.eh_proj.weight")
            x = x + self.attention(block, self.norm(x, block + "attn_norm.weight"))
            x = x + self.feed_forward(block, self.norm(x, block + "post_attention_norm.weight"))
            last = self.norm(x, block + "nextn.shared_head_norm.weight")[-1:]
            drafted.append(int(self.head(last).argmax()))
            tokens.append(drafted[-1])
            before = np.concatenate([before, last])
        return drafted

    def hidden(self, tokens: Sequence[int]) -> Array:
        """After each token, past the output norm, `[n, H]`."""
        return self.norm(self.layer_inputs(tokens)[-1], "output_norm.weight")

    def layer_inputs(self, tokens: Sequence[int]) -> list[Array]:
        """The residual stream `[n, H]` as it enters each layer, and as it leaves the last one."""
        x = self.weights["token_embd.weight"][list(tokens)]
        inputs = [x]
        for layer in range(self.n_layers):
            block = f"blk.{layer}."
            x = x + self.mixer(layer, self.norm(x, block + "attn_norm.weight"))
            x = x + self.feed_forward(block, self.norm(x, block + "post_attention_norm.weight"))
            inputs.append(x)
        return inputs

    def head(self, x: Array) -> Array:
        return x @ self.weights.get("output.weight", self.weights["token_embd.weight"]).T

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name].T

    def norm(self, x: Array, name: str) -> Array:
        """Over the last axis; a weight of that length, or one that holds a slice for each row before it."""
        weight = self.weights[name].reshape(-1, x.shape[-1])
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * np.squeeze(weight)

    def mixer(self, layer: int, x: Array) -> Array:
        is_recurrent = self.keys["attention.recurrent_layers"][layer]
        return self.delta_net(f"blk.{layer}.", x) if is_recurrent else self.attention(f"blk.{layer}.", x)

    def attention(self, block: str, x: Array) -> Array:
        n, d = len(x), self.keys["attention.key_length"]
        q, gate = np.split(self.linear(x, block + "attn_q.weight").reshape(n, -1, 2 * d), 2, axis=-1)
        k, v = (self.linear(x, f"{block}attn_{name}.weight").reshape(n, -1, d) for name in "kv")
        q = self.rotated(self.norm(q, block + "attn_q_norm.weight"))
        k = self.rotated(self.norm(k, block + "attn_k_norm.weight"))
        k, v = (heads.repeat(q.shape[1] // k.shape[1], axis=1) for heads in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d)
        shares = softmax(np.where(self.visible(block, x), scores, -np.inf))
        y = np.einsum("hij,jhd->ihd", shares, v) * sigmoid(gate)
        return self.linear(y.reshape(n, -1), block + "attn_output.weight")

    def visible(self, block: str, x: Array) -> NDArray[np.bool_]:
        """`[n, n]`: whether token i attends to token j."""
        return np.tri(len(x), dtype=bool)

    def rotated(self, x: Array, positions: NDArray[np.int64] | None = None) -> Array:
        """x `[n, heads, D]`: the first dimensions turn, p with p + half of them."""
        half = self.keys["rope.dimension_count"] // 2
        if positions is None:
            positions = np.arange(len(x))
        angles = positions[:, None, None] * self.keys["rope.freq_base"] ** (-np.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles))
        return np.concatenate([*turned, rest], axis=-1)

    def delta_net(self, block: str, x: Array) -> Array:
        n, weights = len(x), self.weights
        size, n_keys, n_values = (self.keys[f"ssm.{key}"] for key in ("state_size", "group_count", "time_step_rank"))
        mixed = silu(
            causal_convolution(self.linear(x, block + "attn_qkv.weight"), weights[block + "ssm_conv1d.weight"])
        )
        q, k, v = np.split(mixed, [n_keys * size, 2 * n_keys * size], axis=1)
        # Value head h uses key head h mod Hk.
        q, k = (np.tile(self.unit(heads.reshape(n, n_keys, size)), (1, n_values // n_keys, 1)) for heads in (q, k))
        v = v.reshape(n, n_values, size)
        beta = sigmoid(self.linear(x, block + "ssm_beta.weight"))
        time_step = self.linear(x, block + "ssm_alpha.weight") + weights[block + "ssm_dt.bias"]
        decay = np.exp(weights[block + "ssm_a"] * np.logaddexp(0, time_step))
        state = np.zeros((n_values, size, size))  # of each head [value, key]
        y = np.empty_like(v)
        for t in range(n):
            state *= decay[t][:, None, None]
            delta = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
            state += np.einsum("hv,hk->hvk", delta, k[t])
            y[t] = np.einsum("hvk,hk->hv", state, q[t]) / np.sqrt(size)
        gate = self.linear(x, block + "attn_gate.weight").reshape(y.shape)
        y = self.norm(y, block + "ssm_norm.weight") * self.output_gate(gate)
        return self.linear(y.reshape(n, -1), block + "ssm_out.weight")

    def output_gate(self, x: Array) -> Array:
        return silu(x)

    def unit(self, x: Array) -> Array:
        return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + self.epsilon)

    def feed_forward(self, block: str, x: Array) -> Array:
        if block + "ffn_gate_inp.weight" not in self.weights:
            gate, up = (self.linear(x, f"{block}ffn_{name}.weight") for name in ("gate", "up"))
            return self.linear(silu(gate) * up, block + "ffn_down.weight")
        gate, up, down = (self.weights[f"{block}ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        chances = softmax(self.linear(x, block + "ffn_gate_inp.weight"))
        y = np.zeros_like(x)
        for t, row in enumerate(x):
            chosen = np.argsort(-chances[t], kind="stable")[: self.keys["expert_used_count"]]
            shares = chances[t][chosen] / max(chances[t][chosen].sum(), 2.0**-14)
            for expert, share in zip(chosen, shares, strict=True):
                y[t] += share * (down[expert] @ (silu(gate[expert] @ row) * (up[expert] @ row)))
        gate, up = (self.linear(x, f"{block}ffn_{name}_shexp.weight") for name in ("gate", "up"))
        shared = self.linear(silu(gate) * up, block + "ffn_down_shexp.weight")
        return y + sigmoid(x @ self.weights[block + "ffn_gate_inp_shexp.weight"])[:, None] * shared


def causal_convolution(x: Array, taps: Array, dilation: int = 1) -> Array:
    """Of each channel apart: x `[n, channels]`, taps `[channels, taps]`, the newest last; zeros before the text."""
    n_taps = taps.shape[1]
    padded = np.concatenate([np.zeros(((n_taps - 1) * dilation, x.shape[1])), x])
    return sum(padded[tap * dilation : tap * dilation + len(x)] * taps[:, tap] for tap in range(n_taps))
