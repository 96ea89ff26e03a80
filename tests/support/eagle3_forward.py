"""What an `eagle3` drafter says of the next tokens, computed with NumPy in f64 straight from the definitions: an
oracle.

Everything is made from the whole text each time; positions are those of the states, one less than the tokens' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from support.decoded_file import Array, read_decoded
from support.qwen35_forward import silu, softmax


class Eagle3Forward:
    """A drafter beside its target's embeddings [V, E] and output matrix [V, E]."""

    def __init__(self, path: Path, embeddings: Array, head: Array) -> None:
        self.weights, self.keys = read_decoded(path, "eagle3")
        self.epsilon: float = self.keys["attention.layer_norm_rms_epsilon"]
        self.head_dim: int = self.keys["attention.key_length"]
        self.embeddings = self.weights.get("token_embd.weight", embeddings)
        self.head = self.weights.get("output.weight", head)
        self.vocab = len(embeddings)

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * self.weights[name]

    def rotated(self, x: Array, position: int) -> Array:
        """x [heads, D]: the pairs are dimensions 2p and 2p + 1."""
        half = self.head_dim // 2
        angles = position * self.keys["rope.freq_base"] ** (-np.arange(half) / half)
        angles = angles / self.weights.get("rope_freqs.weight", np.ones(half))
        pairs = x.reshape(len(x), half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles))
        return np.stack(turned, axis=-1).reshape(x.shape)

    def states(self, taps: Array) -> Array:
        """taps [n, 3 Et]: the inputs of the tapped layers side by side."""
        if self.keys.get("norm_before_fc", False):
            taps = self.norm(taps, "enc.output_norm.weight")
        return taps @ self.weights["fc.weight"].T

    def logits(self, x: Array) -> Array:
        logits = self.head @ self.norm(x, "output_norm.weight")
        if "d2t" not in self.weights:
            return logits
        whole = np.full(self.vocab, -np.inf)
        whole[self.weights["d2t"]] = logits
        return whole

    def draft_logits(
        self, history: Sequence[int], taps: Array, last: int, drafted: Sequence[int | None], dropped: range = range(0)
    ) -> list[Array]:
        """Of the token after `last`, and of each after it; None among `drafted`: the likeliest one.

        dropped: indices of tokens, not the last one, whose rows are gone, those after them moved down.
        """
        w, states = self.weights, self.states(taps)
        keys: list[Array] = []
        values: list[Array] = []
        found: list[Array] = []

        def row(token: int, state: Array, position: int) -> Array:
            normed = self.norm(state, "blk.0.attn_norm_2.weight")
            x = np.concatenate([self.norm(self.embeddings[token], "blk.0.attn_norm.weight"), normed])
            q, k, v = ((w[f"blk.0.attn_{name}.weight"] @ x).reshape(-1, self.head_dim) for name in "qkv")
            keys.append(self.rotated(k, position))
            values.append(v)
            group = len(q) // len(k)
            scores = np.einsum("hd,jhd->hj", self.rotated(q, position), np.repeat(keys, group, axis=1))
            shares = softmax(scores / self.head_dim**0.5)
            attended = np.einsum("hj,jhd->hd", shares, np.repeat(values, group, axis=1)).reshape(-1)
            stream = normed if self.keys.get("norm_before_residual", False) else state
            stream = stream + w["blk.0.attn_output.weight"] @ attended
            n = self.norm(stream, "blk.0.ffn_norm.weight")
            gated = silu(w["blk.0.ffn_gate.weight"] @ n) * (w["blk.0.ffn_up.weight"] @ n)
            return stream + w["blk.0.ffn_down.weight"] @ gated

        for index in range(1, len(history)):
            if index not in dropped:
                row(history[index], states[index - 1], len(keys))
        state, token = states[len(history) - 1], last
        for following in [*drafted, 0]:
            state = row(token, state, len(keys))
            found.append(self.logits(state))
            token = int(np.argmax(found[-1])) if following is None else following
        return found

    def draft(self, history: Sequence[int], taps: Array, last: int, n_draft: int) -> list[int]:
        """The likeliest tokens, one after the other."""
        logits = self.draft_logits(history, taps, last, [None] * (n_draft - 1))
        return [int(np.argmax(row)) for row in logits]
