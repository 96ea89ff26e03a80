"""The forward pass of a `qwen4exp` file over one text, in NumPy and f64: an oracle. The whole text at once, no cache.

Names are those of the file's tensors. Hyper-connections: n residual streams of width H side by side in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
WORD = (1 << 64) - 1


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms(x: Array, weight: Array, epsilon: float) -> Array:
    """Over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def ngram_rows(
    tokens: Sequence[int],
    position: int,
    *,
    multipliers: Sequence[int],
    vocab_sizes: Sequence[int],
    offsets: Sequence[int],
    ngram_size: int,
    eos: int,
) -> list[int]:
    """Rows of the n-gram table for the token at `position`: those of 2-grams, then of 3-grams and so on."""
    context, cut = [tokens[position]], False
    for back in range(1, ngram_size):
        cut = cut or position < back or tokens[position - back] == eos
        context.append(eos if cut else tokens[position - back])
    heads = len(vocab_sizes) // (ngram_size - 1)
    rows = []
    for n in range(2, ngram_size + 1):
        mixed = 0
        for token, multiplier in zip(context[:n], multipliers, strict=False):
            mixed ^= token * multiplier & WORD
        for head in range((n - 2) * heads, (n - 1) * heads):
            rows.append(mixed % vocab_sizes[head] + offsets[head])
    return rows


class Qwen4ExpForward:
    """dense: attend to everything, as if the sparse budget were unlimited."""

    def __init__(self, path: Path | str, *, dense: bool = False) -> None:
        reader = gguf.GGUFReader(path, "r")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._decoded: dict[str, Array] = {}
        self._fields = reader.fields
        self.n_streams = self.key("hyper_connection.count")
        self.width = self.key("embedding_length")
        self.n_layer = self.key("block_count") - self.key("nextn_predict_layers", 0)
        self.epsilon = float(self.key("attention.layer_norm_rms_epsilon"))
        self.top_k = 1 << 40 if dense else self.key("attention.indexer.top_k")

    def key(self, name: str, missing: Any = None) -> Any:
        field = self._fields.get("qwen4exp." + name)
        return missing if field is None else field.contents()

    def weight(self, name: str) -> Array:
        """In f64, rows of a matrix first."""
        if name not in self._decoded:
            tensor = self._tensors[name]
            values = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
            self._decoded[name] = values.astype(np.float64)
        return self._decoded[name]

    def streams(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.n_streams, -1)

    def logits(self, tokens: Sequence[int]) -> Array:
        """After each token, [tokens, vocabulary]."""
        return self._head("output_hc_", self.final_streams(tokens))

    def final_streams(self, tokens: Sequence[int]) -> Array:
        """The residual streams after the last layer, [tokens, n, H]."""
        x = np.repeat(self.weight("token_embd.weight")[list(tokens)][:, None, :], self.n_streams, axis=1)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            if layer in (self.key("ple.layers") or []):
                x = x + self._memory(block, x, tokens)
            x = self._block(block, x)
        return x

    def predicted(self, tokens: Sequence[int], n: int) -> list[int]:
        """What the block of multi-token prediction says follows `tokens`, of which the last is not in the trunk yet."""
        block = f"blk.{self.n_layer}."
        tokens = list(tokens)
        before = np.concatenate([np.zeros((1, self.n_streams, self.width)), self.final_streams(tokens[:-1])])
        hidden_norm = self.streams(self.weight(block + "nextn.hnorm.weight").reshape(-1))
        drafted: list[int] = []
        while len(drafted) < n:
            embedded = self.weight("token_embd.weight")[tokens]
            embedded = rms(embedded, self.weight(block + "nextn.enorm.weight").reshape(-1), self.epsilon)
            embedded = np.repeat(embedded[:, None, :], self.n_streams, axis=1)
            joined = np.concatenate([embedded, rms(before, hidden_norm, self.epsilon)], axis=2)
            x = self._block(block, joined @ self.weight(block + "nextn.eh_proj.weight").T)
            drafted.append(int(self._head(block + "nextn.hc_head_", x[-1:]).argmax()))
            tokens.append(drafted[-1])
            before = np.concatenate([before, x[-1:]])
        return drafted

    def _block(self, block: str, x: Array) -> Array:
        recurrent = f"{block}ssm_a" in self._tensors
        for part, function in (("attn", self._delta_net if recurrent else self._attention), ("ffn", self._experts)):
            mixed, normed = self._mix(f"{block}hc_{part}_", x)
            inject = normed @ self.weight(f"{block}hc_{part}_inject.weight").T
            x = x + 2 * sigmoid(inject / self.n_streams)[:, :, None] * function(block, mixed)[:, None, :]
        return x

    def _head(self, mixer: str, x: Array) -> Array:
        return self._mix(mixer, x)[0] @ self.weight("output.weight").T

    def _mix(self, prefix: str, x: Array) -> tuple[Array, Array]:
        """x [tokens, n, H] -> input of a layer [tokens, H], normalised streams [tokens, n H]."""
        normed = rms(x, self.streams(self.weight(prefix + "norm.weight").reshape(-1)), self.epsilon)
        flat = normed.reshape(len(x), -1)
        low = silu(flat @ self.weight(prefix + "down.weight").T / self.n_streams)
        gate = self.streams(sigmoid(low @ self.weight(prefix + "up.weight").T))
        return (gate * normed).mean(axis=1), flat

    def _rope(self, x: Array, positions: Array) -> Array:
        """x [tokens, heads, D]: the first n_rot features in halves."""
        n_rot = self.key("rope.dimension_count")
        angles = positions[:, None] / self.key("rope.freq_base") ** (np.arange(0, n_rot, 2) / n_rot)
        turned = (x[..., : n_rot // 2] + 1j * x[..., n_rot // 2 : n_rot]) * np.exp(1j * angles)[:, None, :]
        return np.concatenate([turned.real, turned.imag, x[..., n_rot:]], axis=-1)

    def chosen_tokens(self, block: str, m: Array) -> list[list[int]]:
        """The tokens each row of a layer's input attends to."""
        heads, size = self.key("attention.indexer.head_count"), max(self.key("attention.compress_ratios"))
        positions = np.arange(len(m), dtype=np.float64)
        queries = (m @ self.weight(block + "indexer.q_proj.weight").T).reshape(len(m), heads, -1)
        queries = self._rope(rms(queries, self.weight(block + "indexer.q_norm.weight"), self.epsilon), positions)
        raw = m @ self.weight(block + "indexer.k_proj.weight").T
        n_blocks = len(m) // size
        pooled = raw[: n_blocks * size].reshape(n_blocks, size, -1).mean(axis=1)
        pooled = rms(pooled, self.weight(block + "indexer.k_norm.weight"), self.epsilon)
        pooled = self._rope(pooled[:, None, :], positions[::size][:n_blocks])[:, 0, :]
        scores = np.maximum(np.einsum("thd,bd->thb", queries, pooled), 0).sum(axis=1) / queries.shape[-1] ** 0.5
        chosen = []
        for row in range(len(m)):
            complete = (row + 1) // size
            best = np.argsort(-scores[row, :complete], kind="stable")[: self.top_k // size]
            tokens = [int(b) * size + i for b in sorted(best) for i in range(size)]
            chosen.append(tokens + list(range(complete * size, row + 1)))
        return chosen

    def _attention(self, block: str, m: Array) -> Array:
        heads, kv_heads, dim = (self.key(f"attention.{name}") for name in ("head_count", "head_count_kv", "key_length"))
        positions = np.arange(len(m), dtype=np.float64)
        q, gate = (m @ self.weight(block + "attn_q.weight").T).reshape(len(m), heads, 2, dim).transpose(2, 0, 1, 3)
        k = (m @ self.weight(block + "attn_k.weight").T).reshape(len(m), kv_heads, dim)
        v = (m @ self.weight(block + "attn_v.weight").T).reshape(len(m), kv_heads, dim)
        q = self._rope(rms(q, self.weight(block + "attn_q_norm.weight"), self.epsilon), positions)
        k = self._rope(rms(k, self.weight(block + "attn_k_norm.weight"), self.epsilon), positions)
        out = np.empty_like(q)
        for row, seen in enumerate(self.chosen_tokens(block, m)):
            for h in range(heads):
                g = h // (heads // kv_heads)
                out[row, h] = softmax(k[seen, g] @ q[row, h] / dim**0.5) @ v[seen, g]
        out = out * sigmoid(gate)
        return out.reshape(len(m), -1) @ self.weight(block + "attn_output.weight").T

    def _delta_net(self, block: str, m: Array) -> Array:
        key_heads, value_heads, size = (
            self.key(f"ssm.{name}") for name in ("group_count", "time_step_rank", "state_size")
        )
        u = m @ self.weight(block + "attn_qkv.weight").T
        taps = self.weight(block + "ssm_conv1d.weight")  # [channels, taps], the oldest token first
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, u.shape[1])), u])
        c = silu(sum(padded[t : t + len(u)] * taps[:, t] for t in range(taps.shape[1])))
        q, k, v = np.split(c, [key_heads * size, 2 * key_heads * size], axis=1)
        q, k = (x.reshape(len(m), key_heads, size) for x in (q, k))
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + self.epsilon) for x in (q, k))
        v = v.reshape(len(m), value_heads, size)
        beta = sigmoid(m @ self.weight(block + "ssm_beta.weight").T)
        rate = np.log1p(np.exp(m @ self.weight(block + "ssm_alpha.weight").T + self.weight(block + "ssm_dt.bias")))
        decay = np.exp(self.weight(block + "ssm_a").reshape(-1) * rate)
        z = (m @ self.weight(block + "attn_gate.weight").T).reshape(v.shape)
        out = np.empty_like(v)
        for h in range(value_heads):
            state = np.zeros((size, size))  # [key feature, value feature]
            for t in range(len(m)):
                key, query = k[t, h % key_heads], q[t, h % key_heads] / size**0.5
                state = state * decay[t, h]
                state = state + np.outer(key, beta[t, h] * (v[t, h] - key @ state))
                out[t, h] = query @ state
        out = rms(out, self.weight(block + "ssm_norm.weight"), self.epsilon) * sigmoid(z)
        return out.reshape(len(m), -1) @ self.weight(block + "ssm_out.weight").T

    def _experts(self, block: str, m: Array) -> Array:
        shared = silu(m @ self.weight(block + "ffn_gate_shexp.weight").T)
        shared = shared * (m @ self.weight(block + "ffn_up_shexp.weight").T)
        out = shared @ self.weight(block + "ffn_down_shexp.weight").T
        out = out * sigmoid(m @ self.weight(block + "ffn_gate_inp_shexp.weight").reshape(-1, 1))
        if f"{block}ffn_gate_up_exps.weight" in self._tensors:
            gates, ups = np.split(self.weight(block + "ffn_gate_up_exps.weight"), 2, axis=1)
        else:
            gates, ups = (self.weight(f"{block}ffn_{name}_exps.weight") for name in ("gate", "up"))
        downs = self.weight(block + "ffn_down_exps.weight")
        for row, router in enumerate(m @ self.weight(block + "ffn_gate_inp.weight").T):
            shares = softmax(router)
            best = np.argsort(-shares, kind="stable")[: self.key("expert_used_count")]
            for e in best:
                f = silu(gates[e] @ m[row]) * (ups[e] @ m[row])
                out[row] += shares[e] / shares[best].sum() * (downs[e] @ f)
        return out

    def _memory(self, block: str, x: Array, tokens: Sequence[int]) -> Array:
        """What the n-gram table adds to the streams x [tokens, n, H]."""
        size = self.key("ple.ngram_size")
        rows = [
            ngram_rows(
                tokens,
                position,
                multipliers=self.key("ple.layer_multipliers"),
                vocab_sizes=self.key("ple.head_vocab_sizes"),
                offsets=self.key("ple.head_offsets"),
                ngram_size=size,
                eos=self.key("ple.eos_token_id"),
            )
            for position in range(len(tokens))
        ]
        table = self._tensors["per_layer_token_embd.weight"]  # perhaps larger than memory
        read = table.data[np.array(rows).reshape(-1)]
        embedding = gguf.quants.dequantize(read, table.tensor_type).astype(np.float64).reshape(len(tokens), -1)

        def normed(name: str, value: Array) -> Array:
            return rms(value, self.streams(self.weight(f"{block}ple_norm_{name}.weight").reshape(-1)), self.epsilon)

        key = normed("key", self.streams(embedding @ self.weight(block + "ple_key.weight").T))
        query = normed("query", x)
        a = (key * query).sum(axis=-1) / self.width**0.5  # [tokens, n]
        gate = sigmoid(np.sign(a) * np.sqrt(np.maximum(np.abs(a), 1e-6)))
        gated = gate[:, :, None] * (embedding @ self.weight(block + "ple_value.weight").T)[:, None, :]
        conv_in = normed("conv", gated).reshape(len(tokens), -1)
        taps = self.weight(block + "ple_conv1d.weight")  # [channels, taps]
        n_taps = taps.shape[1]
        padded = np.concatenate([np.zeros(((n_taps - 1) * size, conv_in.shape[1])), conv_in])
        conv = silu(sum(padded[t * size : t * size + len(tokens)] * taps[:, t] for t in range(n_taps)))
        return gated + self.streams(conv)
