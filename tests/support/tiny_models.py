"""Writes tiny random-weight GGUF files of the architectures beside dense `llama`: qwen2, qwen3, gemma3, experts.

As in `tiny_llama`, weight scales are chosen so that scores, gates, router and logits are not flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support.tiny_llama import MetadataValue, ModelWriter, common_keys


def write_tiny_model(
    path: Path | str,
    architecture: str,
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int = 128,
    n_expert: int | None = None,
    n_expert_used: int = 2,
    tied: bool = False,
    n_labels: int = 0,
    n_vocab: int = 0,
    has_dense_head: bool = False,
    weight_type: str = "f32",
    tensor_types: Mapping[str, str] | None = None,
    metadata: Mapping[str, MetadataValue] | None = None,
    seed: int = 20260102,
) -> Path:
    """Write the model and return its path. The same arguments give the same bytes.

    n_expert: default 8 for qwen3moe and `llama` (which is Mixtral here), 0 for others. n_ff: of one expert where there
    are experts. n_labels: outputs of a classification head (`cls.output`), as rerankers have one; 0: none.
    has_dense_head: with a layer before it (`cls`). n_vocab: as of `ModelWriter`. Other arguments as for
    `write_tiny_llama`.
    """
    if n_expert is None:
        n_expert = 8 if architecture in ("qwen3moe", "llama") else 0
    head_dim = head_dim or n_embd // n_head
    q_rows, kv_rows = n_head * head_dim, n_head_kv * head_dim
    has_head_norms = architecture in ("qwen3", "qwen3moe", "gemma3")

    keys = common_keys(
        architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=n_ff,
        n_ctx_train=2048,
        rope_freq_base=100_000.0,
        weight_type=weight_type,
    )
    if q_rows != n_embd:
        keys |= {f"{architecture}.attention.key_length": head_dim, f"{architecture}.attention.value_length": head_dim}
    if n_expert:
        keys |= {f"{architecture}.expert_count": n_expert, f"{architecture}.expert_used_count": n_expert_used}
    if architecture == "qwen3moe":
        keys |= {f"{architecture}.expert_feed_forward_length": n_ff, f"{architecture}.feed_forward_length": 3 * n_ff}
    if n_labels:
        keys[f"{architecture}.classifier.output_labels"] = [f"label {i}" for i in range(n_labels)]
    keys |= dict(metadata or {})

    writer = ModelWriter(
        path, architecture, keys, weight_type=weight_type, tensor_types=tensor_types, n_vocab=n_vocab, seed=seed
    )
    # gemma3 multiplies the embeddings by sqrt(n_embd); its head is tied to them as a rule.
    writer.matrix("token_embd.weight", writer.n_vocab, n_embd, 2.4 / n_embd**0.5)
    writer.vector("output_norm.weight", n_embd, 1.0, 0.2)
    if not tied:
        writer.matrix("output.weight", writer.n_vocab, n_embd, 2.4 / n_embd**0.5)
    if n_labels:
        writer.matrix("cls.output.weight", n_labels, n_embd, 1.0 / n_embd**0.5)
    if has_dense_head:
        writer.matrix("cls.weight", n_embd, n_embd, 0.7 / n_embd**0.5)
        writer.vector("cls.bias", n_embd, 0.1, 0.2)
    for layer in range(n_layer):
        block = f"blk.{layer}."
        writer.vector(block + "attn_norm.weight", n_embd, 1.0, 0.2)
        for name, rows, std in (("q", q_rows, 1.6), ("k", kv_rows, 1.6), ("v", kv_rows, 1.0)):
            writer.matrix(f"{block}attn_{name}.weight", rows, n_embd, std / n_embd**0.5)
            if architecture == "qwen2":
                writer.vector(f"{block}attn_{name}.bias", rows, 0.0, 0.3)
        writer.matrix(block + "attn_output.weight", n_embd, q_rows, 1.0 / q_rows**0.5)
        for name in ("q", "k") if has_head_norms else ():
            writer.vector(f"{block}attn_{name}_norm.weight", head_dim, 1.6, 0.5)
        if architecture == "gemma3":
            writer.vector(block + "post_attention_norm.weight", n_embd, 1.0, 0.3)
            writer.vector(block + "post_ffw_norm.weight", n_embd, 1.0, 0.3)
        writer.vector(block + "ffn_norm.weight", n_embd, 1.0, 0.2)
        if n_expert:
            writer.router(block + "ffn_gate_inp.weight", n_expert, n_embd, 1.5 / n_embd**0.5)
            writer.experts(block + "ffn_gate_exps.weight", n_expert, n_ff, n_embd, 1.5 / n_embd**0.5)
            writer.experts(block + "ffn_up_exps.weight", n_expert, n_ff, n_embd, 1.0 / n_embd**0.5)
            writer.experts(block + "ffn_down_exps.weight", n_expert, n_embd, n_ff, 1.0 / n_ff**0.5)
        else:
            writer.matrix(block + "ffn_gate.weight", n_ff, n_embd, 1.5 / n_embd**0.5)
            writer.matrix(block + "ffn_up.weight", n_ff, n_embd, 1.0 / n_embd**0.5)
            writer.matrix(block + "ffn_down.weight", n_embd, n_ff, 1.0 / n_ff**0.5)
    return writer.close()
