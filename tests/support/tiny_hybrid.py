"""Writes tiny random-weight GGUF files of hybrids: `qwen35` and `qwen35moe`, gated delta nets and some attention.

Shapes are such that mistakes show: fewer key heads than value heads in the delta net, partial rotary positions with
sections of unequal size, a head size that is not the width divided by the heads, memories that neither die at once nor
last for ever. As in `tiny_llama`, weight scales keep scores, gates, router and logits from being flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from support.tiny_llama import CHAT_TEMPLATE, MetadataValue, ModelWriter, common_keys


def write_tiny_hybrid(
    path: Path | str,
    architecture: str = "qwen35",
    *,
    n_layer: int = 8,
    attention_interval: int = 4,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_rot: int = 16,
    rope_sections: tuple[int, int, int, int] = (3, 3, 2, 0),
    n_key_head: int = 2,
    n_value_head: int = 4,
    state_size: int = 32,
    conv_kernel: int = 4,
    n_ff: int = 128,
    n_ff_shared: int = 96,
    n_expert: int = 8,
    n_expert_used: int = 2,
    fused_gate_up: bool = False,
    n_mtp: int = 0,
    n_ctx_train: int = 4096,
    logit_std: float = 2.4,
    tied: bool = False,
    weight_type: str = "f32",
    tensor_types: Mapping[str, str] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    metadata: Mapping[str, MetadataValue] | None = None,
    seed: int = 20260103,
) -> Path:
    """Write the model and return its path. The same arguments give the same bytes.

    n_layer: of the trunk; layer i attends where (i + 1) % attention_interval == 0. n_ff: of one expert in `qwen35moe`.
    fused_gate_up: the experts' gates and ups in one tensor. n_mtp: blocks of multi-token prediction after the trunk.
    logit_std: spread of the logits of a model that is not tied. Other arguments as for `write_tiny_llama`.
    """
    has_experts = architecture == "qwen35moe"
    key_size, value_size = n_key_head * state_size, n_value_head * state_size
    q_rows, kv_rows = n_head * head_dim, n_head_kv * head_dim
    keys = common_keys(
        architecture,
        n_layer=n_layer + n_mtp,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=n_ff,
        n_ctx_train=n_ctx_train,
        rope_freq_base=100_000.0,
        weight_type=weight_type,
    )
    keys |= {
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.full_attention_interval": attention_interval,
        f"{architecture}.rope.dimension_count": n_rot,
        f"{architecture}.rope.dimension_sections": list(rope_sections),
        f"{architecture}.ssm.conv_kernel": conv_kernel,
        f"{architecture}.ssm.state_size": state_size,
        f"{architecture}.ssm.group_count": n_key_head,
        f"{architecture}.ssm.time_step_rank": n_value_head,
        f"{architecture}.ssm.inner_size": value_size,
    }
    if n_mtp:
        keys[f"{architecture}.nextn_predict_layers"] = n_mtp
    if has_experts:
        keys |= {
            f"{architecture}.expert_count": n_expert,
            f"{architecture}.expert_used_count": n_expert_used,
            f"{architecture}.expert_feed_forward_length": n_ff,
            f"{architecture}.expert_shared_feed_forward_length": n_ff_shared,
        }
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    keys |= dict(metadata or {})

    writer = ModelWriter(path, architecture, keys, weight_type=weight_type, tensor_types=tensor_types, seed=seed)
    rng = np.random.default_rng(seed + 1)

    def attention(block: str) -> None:
        writer.matrix(block + "attn_q.weight", 2 * q_rows, n_embd, 1.6 / n_embd**0.5)  # per head: query, gate
        writer.matrix(block + "attn_k.weight", kv_rows, n_embd, 1.6 / n_embd**0.5)
        writer.matrix(block + "attn_v.weight", kv_rows, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "attn_output.weight", n_embd, q_rows, 1.5 / q_rows**0.5)
        for name in ("q", "k"):
            writer.vector(f"{block}attn_{name}_norm.weight", head_dim, 1.6, 0.5)

    def delta_net(block: str) -> None:
        writer.matrix(block + "attn_qkv.weight", 2 * key_size + value_size, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "attn_gate.weight", value_size, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "ssm_beta.weight", n_value_head, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "ssm_alpha.weight", n_value_head, n_embd, 1.0 / n_embd**0.5)
        conv = rng.standard_normal((2 * key_size + value_size, conv_kernel)) * 0.7
        writer.values(block + "ssm_conv1d.weight", conv)
        writer.values(block + "ssm_dt.bias", rng.uniform(-5.0, -1.0, n_value_head))
        writer.values(block + "ssm_a", -np.exp(rng.uniform(0.0, 2.0, n_value_head)))
        writer.vector(block + "ssm_norm.weight", state_size, 1.0, 0.3)
        writer.matrix(block + "ssm_out.weight", n_embd, value_size, 1.2 / value_size**0.5)

    def feed_forward(block: str) -> None:
        if not has_experts:
            writer.matrix(block + "ffn_gate.weight", n_ff, n_embd, 1.5 / n_embd**0.5)
            writer.matrix(block + "ffn_up.weight", n_ff, n_embd, 1.0 / n_embd**0.5)
            writer.matrix(block + "ffn_down.weight", n_embd, n_ff, 1.0 / n_ff**0.5)
            return
        writer.router(block + "ffn_gate_inp.weight", n_expert, n_embd, 1.5 / n_embd**0.5)
        if fused_gate_up:
            writer.experts(block + "ffn_gate_up_exps.weight", n_expert, 2 * n_ff, n_embd, 1.3 / n_embd**0.5)
        else:
            writer.experts(block + "ffn_gate_exps.weight", n_expert, n_ff, n_embd, 1.5 / n_embd**0.5)
            writer.experts(block + "ffn_up_exps.weight", n_expert, n_ff, n_embd, 1.0 / n_embd**0.5)
        writer.experts(block + "ffn_down_exps.weight", n_expert, n_embd, n_ff, 1.0 / n_ff**0.5)
        writer.vector(block + "ffn_gate_inp_shexp.weight", n_embd, 0.0, 1.5 / n_embd**0.5)
        writer.matrix(block + "ffn_gate_shexp.weight", n_ff_shared, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "ffn_up_shexp.weight", n_ff_shared, n_embd, 1.0 / n_embd**0.5)
        writer.matrix(block + "ffn_down_shexp.weight", n_embd, n_ff_shared, 1.0 / n_ff_shared**0.5)

    recurrent = keys.get(f"{architecture}.attention.recurrent_layers")
    writer.matrix("token_embd.weight", writer.n_vocab, n_embd, 2.4 / n_embd**0.5)
    writer.vector("output_norm.weight", n_embd, 1.0, 0.2)
    if not tied:
        writer.matrix("output.weight", writer.n_vocab, n_embd, logit_std / n_embd**0.5)
    for layer in range(n_layer + n_mtp):
        block = f"blk.{layer}."
        writer.vector(block + "attn_norm.weight", n_embd, 1.0, 0.2)
        writer.vector(block + "post_attention_norm.weight", n_embd, 1.0, 0.2)
        if isinstance(recurrent, list):
            is_recurrent = bool(recurrent[layer])
        else:
            is_recurrent = layer < n_layer and (layer + 1) % attention_interval != 0
        (delta_net if is_recurrent else attention)(block)
        feed_forward(block)
        if layer >= n_layer:
            writer.matrix(block + "nextn.eh_proj.weight", n_embd, 2 * n_embd, 1.0 / (2 * n_embd) ** 0.5)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                writer.vector(f"{block}nextn.{name}.weight", n_embd, 1.0, 0.2)
    return writer.close()
