"""Tiny model folders as transformers saves them: configurations by variant, deterministic weights, tokenizer files.

The golden logits of `tests/golden/convert` were made from exactly these folders.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.hybrid_checkpoints import APART, HYBRID_CONFIGS, hybrid_tokens, hybrid_weights, is_hybrid
from support.tiny_llama import CHAT_TEMPLATE, byte_level_vocabulary

VOCAB_SIZE = 304  # some rows beyond the tokens, as published models have
N_TOKENS = 24

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_LLAMA = {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
_QWEN2 = {**_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0}
_QWEN3 = {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1000000.0}

_QWEN3MOE = {
    **_QWEN3,
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
}
_MIXTRAL = {
    **_LLAMA,
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None},
    **{"num_local_experts": 4, "num_experts_per_tok": 3},
}
_GEMMA3 = {
    **{key: value for key, value in _COMMON.items() if key != "hidden_act"},
    **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
    **{"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True},
}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-biased-wide-tied": {
        **_LLAMA,
        **{"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
    },
    # The context is short enough for wavelengths of all three kinds: kept, blended, stretched.
    "llama-llama3": {
        **_LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-yarn": {
        **_LLAMA,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "mistral": {
        **_LLAMA,
        **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, "head_dim": 16},
    },
    "qwen2": _QWEN2,
    "qwen2-tied-yarn": {
        **_QWEN2,
        "tie_word_embeddings": True,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.1}
        },
    },
    # transformers 5 spells the rotary settings so.
    "qwen3": {
        **{key: value for key, value in _QWEN3.items() if key != "rope_theta"},
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-tied": {**_QWEN3, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3moe": _QWEN3MOE,
    "mixtral": _MIXTRAL,
    "gemma3": {
        **_GEMMA3,
        **{"num_hidden_layers": 7, "rope_theta": 1000000.0, "rope_local_base_freq": 5000.0},
        **{"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 6},
    },
    # transformers 5 spells the rotary settings and the windows so.
    "gemma3-capped": {
        **_GEMMA3,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
        },
        "final_logit_softcapping": 4.0,
    },
    # Sizes that are multiples of little, and heads that share nothing or everything.
    "llama-odd": {
        **_LLAMA,
        **{"hidden_size": 60, "intermediate_size": 100, "num_attention_heads": 5, "num_key_value_heads": 5},
    },
    "qwen2-odd": {
        **_QWEN2,
        **{"hidden_size": 54, "intermediate_size": 70, "num_attention_heads": 3, "num_key_value_heads": 1},
    },
    "qwen3-odd": {**_QWEN3, **{"hidden_size": 50, "intermediate_size": 90, "head_dim": 22, "num_key_value_heads": 1}},
    "qwen3moe-odd": {
        **_QWEN3MOE,
        **{"hidden_size": 44, "head_dim": 20, "num_experts": 5, "num_experts_per_tok": 4, "moe_intermediate_size": 20},
    },
    "mixtral-odd": {
        **_MIXTRAL,
        **{"hidden_size": 36, "intermediate_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
        **{"num_local_experts": 3, "num_experts_per_tok": 3},
    },
    "gemma3-odd": {
        **_GEMMA3,
        **{"hidden_size": 54, "intermediate_size": 62, "num_attention_heads": 3, "num_key_value_heads": 3},
        **{"head_dim": 10, "query_pre_attn_scalar": 10, "num_hidden_layers": 3, "sliding_window": 5},
        **{"rope_theta": 1000000.0, "sliding_window_pattern": 2},
    },
    **HYBRID_CONFIGS,
}

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def golden_tokens(config: Mapping[str, Any] | None = None) -> list[int]:
    """More for a model with a recurrent state."""
    if config is not None and is_hybrid(config):
        return hybrid_tokens()
    return np.random.default_rng(11).integers(3, 300, N_TOKENS).tolist()


def golden_columns(config: Mapping[str, Any]) -> slice:
    """The tokens of which golden logits are kept: all, or of long texts every sixth."""
    return slice(None, None, 6 if is_hybrid(config) else 1)


def weights(config: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """All tensors of the model, of a spread that makes attention scores and logits anything but flat."""
    if is_hybrid(config):
        return hybrid_weights(config, experts_apart=any(config is HYBRID_CONFIGS[variant] for variant in APART))
    rng = np.random.default_rng(20260101)
    hidden = config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    is_gemma3 = config["model_type"] == "gemma3_text"
    is_qwen2, is_qwen3 = config["model_type"] == "qwen2", config["model_type"].startswith("qwen3")
    norm_mean = 0.0 if is_gemma3 else 1.0  # gemma3 adds 1 itself
    tensors: dict[str, NDArray[np.float32]] = {}

    def add(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        tensors[name] = (mean + std * rng.standard_normal(shape)).astype(np.float32)

    add("model.embed_tokens.weight", (VOCAB_SIZE, hidden), 2.4 / hidden**0.5)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        for name, rows, columns, std in (
            ("self_attn.q_proj", q_size, hidden, 1.6),
            ("self_attn.k_proj", kv_size, hidden, 1.6),
            ("self_attn.v_proj", kv_size, hidden, 1.0),
            ("self_attn.o_proj", hidden, q_size, 1.0),
            *feed_forward_shapes(config),
        ):
            add(f"{block}{name}.weight", (rows, columns), std / columns**0.5)
            is_qkv = name[-6:] in ("q_proj", "k_proj", "v_proj")
            if (is_qwen2 and is_qkv) or config.get("mlp_bias" if name.startswith("mlp") else "attention_bias"):
                add(f"{block}{name}.bias", (rows,), 0.3)
        more_norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if is_gemma3 else ()
        for name in ("input_layernorm", "post_attention_layernorm", *more_norms):
            add(f"{block}{name}.weight", (hidden,), 0.2, norm_mean)
        for name in ("q_norm", "k_norm") if is_qwen3 or is_gemma3 else ():
            add(f"{block}self_attn.{name}.weight", (head_dim,), 0.3, norm_mean)
    add("model.norm.weight", (hidden,), 0.2, norm_mean)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", (VOCAB_SIZE, hidden), 2.4 / hidden**0.5)
    return tensors


def feed_forward_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int, float]]:
    """Name, rows, columns and spread of a layer's feed-forward matrices."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    modules, names = ["mlp"], ("gate_proj", "up_proj", "down_proj")
    if config["model_type"] == "qwen3_moe":
        yield "mlp.gate", config["num_experts"], hidden, 1.5
        ffn = config["moe_intermediate_size"]
        modules = [f"mlp.experts.{expert}" for expert in range(config["num_experts"])]
    elif config["model_type"] == "mixtral":
        yield "block_sparse_moe.gate", config["num_local_experts"], hidden, 1.5
        modules = [f"block_sparse_moe.experts.{expert}" for expert in range(config["num_local_experts"])]
        names = ("w1", "w3", "w2")
    for module in modules:
        yield f"{module}.{names[0]}", ffn, hidden, 1.5
        yield f"{module}.{names[1]}", ffn, hidden, 1.0
        yield f"{module}.{names[2]}", hidden, ffn, 1.0


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even; for finite values."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def safetensors_bytes(tensors: Mapping[str, NDArray[Any]], **header_changes: Any) -> bytes:
    """A file of these tensors; u16 arrays are taken for bf16. header_changes replace entries of the header."""
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint16): "BF16"}
    names |= {np.dtype(np.int64): "I64", np.dtype(np.bool_): "BOOL"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, offset = [], 0
    for name, values in tensors.items():
        parts.append(np.ascontiguousarray(values).tobytes())
        span = [offset, offset + len(parts[-1])]
        header[name] = {"dtype": names[values.dtype], "shape": list(values.shape), "data_offsets": span}
        offset = span[1]
    header.update(header_changes)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def tokenizer_json(pattern: str = QWEN2_PATTERN, **changes: Any) -> dict[str, Any]:
    """Byte-level BPE over the tiny vocabulary: special tokens 0 to 2, 256 bytes, merges."""
    vocabulary = byte_level_vocabulary()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(token, text) for token, text in enumerate(vocabulary.tokens[:3])],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                _BYTE_LEVEL,
            ],
        },
        "post_processor": {**_BYTE_LEVEL},
        "decoder": {**_BYTE_LEVEL},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token for token, text in enumerate(vocabulary.tokens)},
            "merges": [merge.split(" ") for merge in vocabulary.merges],
        },
        **changes,
    }


def added_token(token: int, text: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": special}


TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": {"content": "<|endoftext|>", "special": True},
    "add_bos_token": False,
    "chat_template": CHAT_TEMPLATE,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: str = "F32",
    tokenizer: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> Path:
    """config.json, one safetensors file, tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, NDArray[Any]] = dict(weights(config))
    if dtype != "F32":
        tensors = {
            name: values
            if values.dtype == np.int64
            else bf16_bits(values)
            if dtype == "BF16"
            else values.astype(np.float16)
            for name, values in tensors.items()
        }
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    write_json(folder / "config.json", config)
    write_tokenizer(folder, tokenizer, tokenizer_config)
    return folder


def write_tokenizer(
    folder: Path, tokenizer: Mapping[str, Any] | None = None, tokenizer_config: Mapping[str, Any] | None = None
) -> None:
    write_json(folder / "tokenizer.json", tokenizer or tokenizer_json())
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG if tokenizer_config is None else tokenizer_config)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
