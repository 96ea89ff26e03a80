"""What a `dflash` drafter proposes, computed with NumPy in f64 straight from the definitions: an oracle.

E hidden, D drafted tokens (a block has D + 1 rows, the anchor first; D where the anchor's row counts), K candidates of
a row, R rank of the selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from support.decoded_file import Array, read_decoded
from support.qwen35_forward import silu, softmax


@dataclass(frozen=True)
class Lattice:
    """Of DFlash2: candidates [D, K], of a row by falling logit; scores [D, K, K] of candidate j after predecessor i
    (row 0: after the anchor, the same for every i).
    """

    candidates: NDArray[np.int64]
    scores: Array

    def greedy_walk(self) -> list[int]:
        at, tokens = 0, []
        for candidates, scores in zip(self.candidates, self.scores, strict=True):
            at = int(np.argmax(scores[at]))
            tokens.append(int(candidates[at]))
        return tokens


@dataclass(frozen=True)
class MarkovChain:
    """Of DSpark: logits [D, V], corrected for the tokens chosen before, the chosen tokens, how sure it is of each."""

    logits: Array
    tokens: list[int]
    confidences: list[float]  # empty without a head of confidence


class DFlashForward:
    """A drafter beside its target's embeddings [V, E] and output matrix [V, E]. Raises ValueError for other files."""

    def __init__(self, path: Path, embeddings: Array, head: Array) -> None:
        self.weights, self.keys = read_decoded(path, "dflash")
        self.epsilon: float = self.keys["attention.layer_norm_rms_epsilon"]
        self.n_layers: int = self.keys["block_count"]
        self.head_dim: int = self.keys["attention.key_length"]
        self.embeddings = self.weights.get("token_embd.weight", embeddings)
        self.head = self.weights.get("output.weight", head)
        self.vocab = len(embeddings)
        self.is_dspark = "markov_w1.weight" in self.weights
        self.silent_rows = 0 if self.keys.get("sample_from_anchor", self.is_dspark) else 1

    def norm(self, x: Array, name: str | None) -> Array:
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return y if name is None else y * self.weights[name]

    def heads(self, x: Array, name: str) -> Array:
        return (x @ self.weights[name].T).reshape(len(x), -1, self.head_dim)

    def rotated(self, x: Array, positions: NDArray[np.int64]) -> Array:
        half = self.keys.get("rope.dimension_count", self.head_dim) // 2
        angles = positions[:, None, None] * self.keys["rope.freq_base"] ** (-np.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles))
        return np.concatenate([*turned, rest], axis=-1)

    def context(self, taps: Array) -> Array:
        """taps [n, layers * E]: the inputs of the tapped layers side by side -> features [n, E]."""
        return self.norm(taps @ self.weights["fc.weight"].T, "enc.output_norm.weight")

    def keys_values(self, layer: int, x: Array, positions: NDArray[np.int64]) -> tuple[Array, Array]:
        block = f"blk.{layer}."
        k = self.heads(x, block + "attn_k.weight")
        has_values = block + "attn_v.weight" in self.weights
        v = self.heads(x, block + "attn_v.weight") if has_values else self.norm(k, None)
        return self.rotated(self.norm(k, block + "attn_k_norm.weight"), positions), v

    def convolved(self, x: Array, name: str, side: int, coefficients: Array | None) -> Array:
        """coefficients [rows, sides * taps * groups]; the taps reach back within the block only."""
        if coefficients is None:
            return x
        base = self.weights[f"{name}_conv_base"]  # [sides, taps, E]
        n_taps, width = base.shape[1:]
        dynamic = coefficients.reshape(len(x), 2, n_taps, -1).repeat(self.keys["conv_group_size"], axis=-1)
        y = np.zeros_like(x)
        for tap in range(n_taps):
            shifted = np.concatenate([np.zeros((tap, width)), x])[: len(x)]
            y += (base[side, tap] + dynamic[:, side, tap]) * shifted
        return y

    def coefficients(self, x: Array, name: str) -> Array | None:
        return x @ self.weights[f"{name}_conv_proj.weight"].T if f"{name}_conv_proj.weight" in self.weights else None

    def block_states(self, anchor: int, n_draft: int, taps: Array) -> Array:
        """Normed states of the block's rows, [D + 1, E]; taps [n, ...] of the n tokens before the anchor."""
        n, n_rows = len(taps), n_draft + self.silent_rows
        context, before, positions = self.context(taps), np.arange(n), np.arange(n, n + n_rows)
        mask_token = self.keys["tokenizer.ggml.mask_token_id"]
        h = self.keys.get("embedding_scale", 1.0) * self.embeddings[[anchor] + [mask_token] * (n_rows - 1)]
        for layer in range(self.n_layers):
            block = f"blk.{layer}."
            y = self.norm(h, block + "attn_norm.weight")
            delta = self.coefficients(y, block + "attn")
            y = self.convolved(y, block + "attn", 0, delta)
            q = self.rotated(self.norm(self.heads(y, block + "attn_q.weight"), block + "attn_q_norm.weight"), positions)
            parts = self.keys_values(layer, context, before), self.keys_values(layer, y, positions)
            k, v = (np.concatenate(both) for both in zip(*parts, strict=True))
            z = self.attention(layer, q, k, v) * self.keys.get("attention.value_scale", 1.0)
            z = self.convolved(z, block + "attn", 1, delta)
            h = h + self.post_norm(z, block + "attn_post_norm.weight")
            y = self.norm(h, block + "ffn_norm.weight")
            delta = self.coefficients(y, block + "ffn")
            y = self.convolved(y, block + "ffn", 0, delta)
            gate, up = (y @ self.weights[f"{block}ffn_{name}.weight"].T for name in ("gate", "up"))
            z = (silu(gate) * up) @ self.weights[block + "ffn_down.weight"].T
            z = self.convolved(z, block + "ffn", 1, delta)
            h = h + self.post_norm(z, block + "ffn_post_norm.weight")
            h = h * self.weights.get(block + "layer_output_scale.weight", np.ones(1))
        return self.norm(h, "output_norm.weight")

    def post_norm(self, x: Array, name: str) -> Array:
        return self.norm(x, name) if name in self.weights else x

    def attention(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        block = f"blk.{layer}."
        n_keys, n_rows = len(k), len(q)
        k, v = (heads.repeat(q.shape[1] // k.shape[1], axis=1) for heads in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * self.keys.get("attention.scale", self.head_dim**-0.5)
        row, key = np.arange(n_keys - n_rows, n_keys)[:, None], np.arange(n_keys)
        seen = np.ones((n_rows, n_keys), bool)
        if self.keys.get("attention.sliding_window_pattern", [False] * self.n_layers)[layer]:
            seen &= row - key < self.keys["attention.sliding_window"]
        if self.keys.get("attention.causal", False):
            seen &= key <= row
        scores = np.where(seen, scores, -np.inf)
        if block + "attn_sinks.weight" in self.weights:
            sinks = np.broadcast_to(self.weights[block + "attn_sinks.weight"][:, None, None], (*scores.shape[:2], 1))
            shares = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
        else:
            shares = softmax(scores)
        return np.einsum("hij,jhd->ihd", shares, v).reshape(n_rows, -1) @ self.weights[block + "attn_output.weight"].T

    def logits(self, states: Array) -> Array:
        """[rows, V]: over the target's vocabulary."""
        logits = states @ self.head.T
        if "d2t" in self.weights:
            whole = np.full((len(states), self.vocab), -np.inf)
            whole[:, self.weights["d2t"]] = logits
            return whole
        return logits

    def lattice(self, anchor: int, n_draft: int, taps: Array) -> Lattice:
        """Of DFlash2."""
        states = self.block_states(anchor, n_draft, taps)[1:]
        logits, k = self.logits(states), self.keys["selector_top_k"]
        if (scale := self.keys.get("logit_scale")) is not None:
            logits = logits * scale
        if (cap := self.keys.get("final_logit_softcapping", 0.0)) > 0:
            logits = cap * np.tanh(logits / cap)
        candidates = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
        before, after = self.weights["selector_predecessor.weight"], self.weights["selector_successor.weight"]
        hidden = states @ self.weights["selector_hidden.weight"].T
        scores = np.empty((n_draft, k, k))
        for t in range(n_draft):
            predecessors = np.full(k, anchor) if t == 0 else candidates[t - 1]
            pairs = (before[predecessors] * hidden[t]) @ after[candidates[t]].T
            scores[t] = logits[t, candidates[t]] + pairs
        return Lattice(candidates, scores)

    def chain(self, anchor: int, n_draft: int, taps: Array) -> MarkovChain:
        """Of DSpark."""
        states = self.block_states(anchor, n_draft, taps)[self.silent_rows :]
        logits, tokens, confidences, previous = self.logits(states), [], [], anchor
        for row, state in zip(logits, states, strict=True):
            embedded = self.weights["markov_w1.weight"][previous]
            row[self.weights.get("d2t", slice(None))] += self.weights["markov_w2.weight"] @ embedded
            if "conf_proj.weight" in self.weights:
                sure = self.weights["conf_proj.weight"][0] @ np.concatenate([state, embedded])
                confidences.append(float(1 / (1 + np.exp(-sure - self.weights["conf_proj.bias"][0]))))
            tokens.append(previous := int(np.argmax(row)))
        return MarkovChain(logits, tokens, confidences)

    def draft(self, anchor: int, n_draft: int, taps: Array) -> list[int]:
        """The greedy proposal: of DFlash2 the walk through the lattice, of DSpark the chain, of DFlash the best token
        of each row.
        """
        if self.is_dspark:
            return self.chain(anchor, n_draft, taps).tokens
        if "selector_hidden.weight" in self.weights:
            return self.lattice(anchor, n_draft, taps).greedy_walk()
        states = self.block_states(anchor, n_draft, taps)[self.silent_rows :]
        return np.argmax(self.logits(states), axis=-1).tolist()


def tapped_inputs(streams: Sequence[Array], target_layers: Sequence[int]) -> Array:
    """streams[t] [n, E]: what enters layer t of the target."""
    return np.concatenate([streams[layer] for layer in target_layers], axis=1)
