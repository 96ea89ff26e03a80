"""Writes tiny random-weight `dflash` drafters (DFlash, DFlash2, DSpark) for the tiny models, whose vocabulary they
share.

Shapes are such that mistakes show: a window shorter than the texts, groups of channels in the convolutions that are not
the heads, several tapped layers, coefficients that differ at both sides of a layer and at each tap, codebooks whose
scores are as large as the logits' differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from support.tiny_llama import MetadataValue, ModelWriter, common_keys

MASK_TOKEN = 0  # <|endoftext|>


def write_tiny_dflash(
    path: Path | str,
    *,
    target_layers: Sequence[int] = (1, 2),
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 128,
    block_size: int = 8,
    version: int = 2,
    conv_taps: int = 2,
    conv_group: int = 16,
    selector_rank: int = 24,
    selector_top_k: int = 5,
    markov_rank: int = 0,
    confidence_head: bool = True,
    from_anchor: bool | None = None,
    window: int | None = 16,
    windowed: Sequence[bool] | None = None,
    causal: bool | None = None,
    own_embeddings: bool = False,
    own_head: bool = False,
    draft_to_target: Sequence[int] | None = None,
    post_norms: bool = False,
    sinks: bool = False,
    shared_kv: bool = False,
    n_ctx_train: int = 2048,
    rope_freq_base: float = 10000.0,
    rope_sections: tuple[int, int, int, int] | None = None,
    weight_type: str = "f32",
    metadata: Mapping[str, MetadataValue] | None = None,
    seed: int = 20260401,
) -> Path:
    """Write the drafter and return its path. The same arguments give the same bytes.

    target_layers: layers of the target whose input is tapped. version: 1 or 2. markov_rank: of DSpark, which is the
    first version with two heads more, one of them `confidence_head`; 0: none. from_anchor: `sample_from_anchor`, not
    written when None. window: of the layers in `windowed` (all of them); None: layers see everything. causal:
    `attention.causal`, not written when None. draft_to_target: the token
    of each row of the drafter's own, smaller head. shared_kv: without value projections.
    """
    keys = common_keys(
        "dflash",
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
        "dflash.attention.layer_norm_rms_epsilon": 1e-6,
        "dflash.attention.key_length": head_dim,
        "dflash.attention.value_length": head_dim,
        "dflash.block_size": block_size,
        "dflash.target_layers": list(target_layers),
        "tokenizer.ggml.mask_token_id": MASK_TOKEN,
    }
    if rope_sections is not None:
        keys["dflash.rope.dimension_sections"] = list(rope_sections)
    if window is not None:
        keys["dflash.attention.sliding_window"] = window
        keys["dflash.attention.sliding_window_pattern"] = list(windowed or [True] * n_layer)
    if causal is not None:
        keys["dflash.attention.causal"] = causal
    if version == 2:
        keys |= {
            "dflash.conv_kernel_size": conv_taps,
            "dflash.conv_group_size": conv_group,
            "dflash.selector_rank": selector_rank,
            "dflash.selector_top_k": selector_top_k,
        }
    if markov_rank:
        keys["dflash.has_confidence_head"] = confidence_head
    if from_anchor is not None:
        keys["dflash.sample_from_anchor"] = from_anchor
    keys |= dict(metadata or {})
    writer = ModelWriter(path, "dflash", keys, weight_type=weight_type, seed=seed)
    q_rows, kv_rows = n_head * head_dim, n_head_kv * head_dim
    writer.matrix("fc.weight", n_embd, len(target_layers) * n_embd, 1.0 / (len(target_layers) * n_embd) ** 0.5)
    writer.vector("enc.output_norm.weight", n_embd, 1.0, 0.2)
    writer.vector("output_norm.weight", n_embd, 1.0, 0.2)
    if own_embeddings:
        writer.matrix("token_embd.weight", writer.n_vocab, n_embd, 2.4 / n_embd**0.5)
    if own_head or draft_to_target is not None:
        rows = writer.n_vocab if draft_to_target is None else len(draft_to_target)
        writer.matrix("output.weight", rows, n_embd, 2.4 / n_embd**0.5)
    if draft_to_target is not None:
        writer.integers("d2t", draft_to_target)
    if version == 2:
        writer.matrix("selector_predecessor.weight", writer.n_vocab, selector_rank, 1.0)
        writer.matrix("selector_successor.weight", writer.n_vocab, selector_rank, 1.0)
        writer.matrix("selector_hidden.weight", selector_rank, n_embd, 1.2 / (n_embd * selector_rank) ** 0.5)
    if markov_rank:
        rows = writer.n_vocab if draft_to_target is None else len(draft_to_target)
        writer.matrix("markov_w1.weight", writer.n_vocab, markov_rank, 1.0)
        writer.matrix("markov_w2.weight", rows, markov_rank, 1.2 / markov_rank**0.5)
        if confidence_head:
            writer.matrix("conf_proj.weight", 1, n_embd + markov_rank, 1.5 / (n_embd + markov_rank) ** 0.5)
            writer.vector("conf_proj.bias", 1, 0.7, 0.0)
    for layer in range(n_layer):
        block = f"blk.{layer}."
        writer.vector(block + "attn_norm.weight", n_embd, 1.0, 0.2)
        writer.matrix(block + "attn_q.weight", q_rows, n_embd, 1.6 / n_embd**0.5)
        writer.matrix(block + "attn_k.weight", kv_rows, n_embd, 1.6 / n_embd**0.5)
        if not shared_kv:
            writer.matrix(block + "attn_v.weight", kv_rows, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "attn_output.weight", n_embd, q_rows, 1.5 / q_rows**0.5)
        for name in ("q", "k"):
            writer.vector(f"{block}attn_{name}_norm.weight", head_dim, 1.6, 0.5)
        writer.vector(block + "ffn_norm.weight", n_embd, 1.0, 0.2)
        writer.matrix(block + "ffn_gate.weight", n_ff, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "ffn_up.weight", n_ff, n_embd, 1.0 / n_embd**0.5)
        writer.matrix(block + "ffn_down.weight", n_embd, n_ff, 1.0 / n_ff**0.5)
        if post_norms:
            for name in ("attn_post_norm", "ffn_post_norm"):
                writer.vector(f"{block}{name}.weight", n_embd, 1.0, 0.2)
            writer.vector(block + "layer_output_scale.weight", 1, 0.9, 0.0)
        if sinks:
            writer.vector(block + "attn_sinks.weight", n_head, 0.5, 1.0)
        if version == 2:
            for name in ("attn", "ffn"):
                base = 0.3 * writer.rng.standard_normal((2, conv_taps, n_embd))
                base[:, 0] += 1.0  # the row itself
                writer.values(f"{block}{name}_conv_base", base)
                rows = 2 * conv_taps * (n_embd // conv_group)
                writer.matrix(f"{block}{name}_conv_proj.weight", rows, n_embd, 0.3 / n_embd**0.5)
    return writer.close()
