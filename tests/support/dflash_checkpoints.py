"""A tiny drafter's file as the checkpoint that it might have been converted from: names and keys spelled out backwards,
independently of the converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from support.checkpoints import safetensors_bytes, write_json

_WHOLE = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "d2t": "d2t",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
_OF_LAYERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"attn_{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkv"},
    **{f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
    **{f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}


def checkpoint_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part = name.split(".", 2)
        return f"layers.{layer}.{_OF_LAYERS[part]}"
    return _WHOLE[name]


def checkpoint_tensors(drafter: Path) -> dict[str, NDArray[Any]]:
    tensors = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(drafter).tensors}
    if "d2t" in tensors:  # checkpoints store the distance from the row's own number
        tensors["d2t"] = tensors["d2t"] - np.arange(len(tensors["d2t"]))
    return {checkpoint_name(name): values for name, values in tensors.items()}


def checkpoint_config(drafter: Path) -> dict[str, Any]:
    """What config.json says of a drafter with F32 weights."""
    reader = gguf.GGUFReader(drafter)
    keys = {name.removeprefix("dflash."): field.contents() for name, field in reader.fields.items()}
    heads = [int(tensor.shape[0]) for tensor in reader.tensors if tensor.name == "d2t"]
    version_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    ranks = [int(tensor.shape[0]) for tensor in reader.tensors if tensor.name == "markov_w1.weight"]
    section = {
        "block_size": keys["block_size"],
        "mask_token_id": keys["tokenizer.ggml.mask_token_id"],
        "target_layer_ids": [layer - 1 for layer in keys["target_layers"]],
        **{key: keys[key] for key in version_2 if key in keys},
    }
    if ranks:
        section |= {
            "markov_rank": ranks[0],
            "markov_head_type": "vanilla",
            "enable_confidence_head": keys["has_confidence_head"],
            "confidence_head_with_markov": keys["has_confidence_head"],
            "sample_from_anchor": keys["sample_from_anchor"],
        }
    named = "Qwen3DSparkModel" if ranks else "DFlash2DraftModel" if "selector_rank" in keys else "DFlashDraftModel"
    kinds = [
        "sliding_attention" if windowed else "full_attention"
        for windowed in keys.get("attention.sliding_window_pattern", [False] * keys["block_count"])
    ]
    return {
        "architectures": [named],
        "model_type": "qwen3",
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "head_dim": keys["attention.key_length"],
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": keys["context_length"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
        "draft_vocab_size": heads[0] if heads else None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": keys["rope.freq_base"]},
        "layer_types": kinds,
        "use_sliding_window": "attention.sliding_window" in keys,
        "sliding_window": keys.get("attention.sliding_window"),
        "is_causal": keys.get("attention.causal"),
        "dflash_config": section,
    }


def write_dflash_checkpoint(
    folder: Path,
    drafter: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """config.json and one safetensors file, no tokenizer. config: keys that replace those of the drafter's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", checkpoint_config(drafter) | dict(config or {}))
    found = checkpoint_tensors(drafter) if tensors is None else tensors
    (folder / "model.safetensors").write_bytes(safetensors_bytes(found))
    return folder
