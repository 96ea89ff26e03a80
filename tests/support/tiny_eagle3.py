"""Writes tiny random-weight `eagle3` drafters for the tiny models, whose vocabulary they share.

Shapes are such that mistakes show: norms far from 1, a state that weighs as much as the token, an attention that is not
flat, layers of the target in an order of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from support.tiny_llama import MetadataValue, ModelWriter, common_keys


def write_tiny_eagle3(
    path: Path | str,
    *,
    target_layers: Sequence[int] = (1, 3, 2),
    target_hidden: int = 64,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 128,
    n_layer: int = 1,
    norm_before_residual: bool | None = None,
    norm_before_fc: bool | None = None,
    own_embeddings: bool = False,
    own_head: bool = False,
    draft_to_target: Sequence[int] | None = None,
    rope_divisors: bool = False,
    n_ctx_train: int = 2048,
    rope_freq_base: float = 10000.0,
    weight_type: str = "f32",
    metadata: Mapping[str, MetadataValue] | None = None,
    seed: int = 20260402,
) -> Path:
    """Write the drafter and return its path. The same arguments give the same bytes.

    target_layers: layers of the target whose input is tapped; their number stands for its output. norm_before_residual,
    norm_before_fc: not written when None. draft_to_target: the token of each row of the drafter's own, smaller head.
    """
    keys = common_keys(
        "eagle3",
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=n_ff,
        n_ctx_train=n_ctx_train,
        rope_freq_base=rope_freq_base,
        weight_type=weight_type,
    )
    keys |= {
        "eagle3.attention.layer_norm_rms_epsilon": 1e-6,
        "eagle3.attention.key_length": head_dim,
        "eagle3.attention.value_length": head_dim,
        "eagle3.rope.dimension_count": head_dim,
        "eagle3.target_hidden_size": target_hidden,
        "eagle3.target_layers": list(target_layers),
    }
    if norm_before_residual is not None:
        keys["eagle3.norm_before_residual"] = norm_before_residual
    if norm_before_fc is not None:
        keys["eagle3.norm_before_fc"] = norm_before_fc
    keys |= dict(metadata or {})
    writer = ModelWriter(path, "eagle3", keys, weight_type=weight_type, seed=seed)
    inputs, q_rows, kv_rows = len(target_layers) * target_hidden, n_head * head_dim, n_head_kv * head_dim
    writer.matrix("fc.weight", n_embd, inputs, 1.0 / inputs**0.5)
    if norm_before_fc:
        writer.vector("enc.output_norm.weight", inputs, 1.0, 0.3)
    writer.vector("output_norm.weight", n_embd, 1.0, 0.2)
    if own_embeddings:
        writer.matrix("token_embd.weight", writer.n_vocab, n_embd, 2.4 / n_embd**0.5)
    if own_head or draft_to_target is not None:
        rows = writer.n_vocab if draft_to_target is None else len(draft_to_target)
        writer.matrix("output.weight", rows, n_embd, 2.4 / n_embd**0.5)
    if draft_to_target is not None:
        writer.integers("d2t", draft_to_target)
    if rope_divisors:
        writer.values("rope_freqs.weight", np.linspace(1.0, 4.0, head_dim // 2))
    block = "blk.0."
    writer.vector(block + "attn_norm.weight", n_embd, 1.0, 0.3)
    writer.vector(block + "attn_norm_2.weight", n_embd, 1.2, 0.3)
    writer.matrix(block + "attn_q.weight", q_rows, 2 * n_embd, 1.6 / (2 * n_embd) ** 0.5)
    writer.matrix(block + "attn_k.weight", kv_rows, 2 * n_embd, 1.6 / (2 * n_embd) ** 0.5)
    writer.matrix(block + "attn_v.weight", kv_rows, 2 * n_embd, 1.5 / (2 * n_embd) ** 0.5)
    writer.matrix(block + "attn_output.weight", n_embd, q_rows, 1.5 / q_rows**0.5)
    writer.vector(block + "ffn_norm.weight", n_embd, 1.0, 0.2)
    writer.matrix(block + "ffn_gate.weight", n_ff, n_embd, 1.5 / n_embd**0.5)
    writer.matrix(block + "ffn_up.weight", n_ff, n_embd, 1.0 / n_embd**0.5)
    writer.matrix(block + "ffn_down.weight", n_embd, n_ff, 1.0 / n_ff**0.5)
    return writer.close()
