"""What a converted file must hold: the GGUF names of a checkpoint's tensors and their values, spelled out
independently of the converter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support import checkpoints
from support.hybrid_checkpoints import is_hybrid, text_config

Tensors = dict[str, NDArray[np.float32]]


def expected_tensors(config: Mapping[str, Any], dtype: str = "F32") -> Tensors:
    """In f32, matrices with their rows first. dtype: of the checkpoint."""
    stored = {name: _rounded(values, dtype) for name, values in checkpoints.weights(config).items()}
    return dict(_hybrid(text_config(config), stored)) if is_hybrid(config) else _dense(config, stored)


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """As a checkpoint of that type holds them."""
    if dtype == "BF16" and values.dtype == np.float32:
        return (checkpoints.bf16_bits(values).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16" and values.dtype == np.float32:
        return values.astype(np.float16).astype(np.float32)
    return values


def expected_name(name: str, *, is_gemma3: bool = False) -> str:
    if name.startswith("model.layers."):
        _, _, layer, *rest = name.split(".")
        part = ".".join(rest[:-1])
        table = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "attn_output",
        }
        table |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {
            f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"
        }
        table |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
        table |= {"mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp"}
        if is_gemma3:
            table |= {
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            }
        if ".experts." in name:
            mixtral = {"w1": "gate", "w2": "down", "w3": "up"}
            part = f"ffn_{mixtral.get(rest[-2], rest[-2].removesuffix('_proj'))}_exps"
            return f"blk.{layer}.{part}.{rest[-1]}"
        return f"blk.{layer}.{table[part]}.{rest[-1]}"
    names = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    return names[name] + ".weight"


def _dense(config: Mapping[str, Any], stored: Mapping[str, NDArray[Any]]) -> Tensors:
    is_gemma3 = config["model_type"] == "gemma3_text"
    tensors: Tensors = {}
    experts: dict[str, list[NDArray[np.float32]]] = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for source, values in stored.items():
        name = expected_name(source, is_gemma3=is_gemma3)
        part = name.split(".")[-2]
        if config["model_type"] in ("llama", "mistral", "mixtral") and part in heads:
            size = len(values) // heads[part]
            order = [
                head * size + half * size // 2 + pair
                for head in range(heads[part])
                for pair in range(size // 2)
                for half in range(2)
            ]
            values = values[order]
        if is_gemma3 and name.endswith("_norm.weight"):
            values = values + np.float32(1)
        if ".experts." in source:
            experts.setdefault(name, []).append(values)
        else:
            tensors[name] = values
    return tensors | {name: np.stack(values) for name, values in experts.items()}


_PLAIN = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.indexer.{x}_layernorm": f"indexer.{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate": "ffn_gate_inp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"ple.{x}_proj": f"ple_{x}" for x in ("key", "value")},
    **{f"ple.norm_{x}": f"ple_norm_{x}" for x in ("key", "query", "conv")},
    "ple.conv1d": "ple_conv1d",
}
_MIXING = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"}
_GLOBAL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "mtp.fc": "blk.{mtp}.nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "blk.{mtp}.nextn.enorm",
    "mtp.pre_fc_norm_hidden": "blk.{mtp}.nextn.hnorm",
    "mtp.norm": "blk.{mtp}.nextn.shared_head_norm",
    **{f"model.hyper_connection_mixer.{source}": f"output_hc_{name}" for source, name in _MIXING.items()},
    **{f"mtp.hyper_connection_mixer.{source}": "blk.{mtp}.nextn.hc_head_" + name for source, name in _MIXING.items()},
}


def _hybrid(config: Mapping[str, Any], stored: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Names and values. What several tensors make together is made at the last of them."""
    n_layers, experts = config["num_hidden_layers"], config.get("num_experts", 0)
    for source, values in stored.items():
        source = source.replace("language_model.", "")
        if source.startswith("model.visual.") or values.dtype == np.int64:
            continue
        if "norm" in source and "linear_attn.norm" not in source:
            values = values + np.float32(1)
        stem = source.removesuffix(".weight")
        if stem in _GLOBAL:
            yield _GLOBAL[stem].format(mtp=n_layers) + ".weight", values
            continue
        if stem in ("mtp.fc_embedding", "mtp.fc_hidden"):
            if stem == "mtp.fc_hidden":
                halves = [stored["mtp.fc_embedding.weight"], values]
                yield f"blk.{n_layers}.nextn.eh_proj.weight", np.concatenate(halves, axis=1)
            continue
        if ".ngram_embedding." in source:
            parts = [values for name, values in stored.items() if ".ngram_embedding." in name]
            yield "per_layer_token_embd.weight", np.concatenate(parts)
            continue
        module, _, rest = stem.partition("layers.")
        number, _, part = rest.partition(".")
        block = f"blk.{n_layers + int(number) if module == 'mtp.' else number}."
        if "_hyper_connection." in part:
            kind, _, name = part.partition("_hyper_connection.")
            prefix = block + ("hc_attn_" if kind == "attn" else "hc_ffn_")
            yield f"{prefix}{(_MIXING | {'block_inject_weight': 'inject'})[name]}.weight", values
        elif part == "self_attn.indexer.index_qk_proj":
            rows = config["indexer_n_heads"] * config["indexer_head_dim"]
            yield block + "indexer.q_proj.weight", values[:rows]
            yield block + "indexer.k_proj.weight", values[rows:]
        elif part == "mlp.experts.gate_up_proj":
            gates, ups = np.split(values, 2, axis=1)
            yield block + "ffn_gate_exps.weight", gates
            yield block + "ffn_up_exps.weight", ups
        elif part == "mlp.experts.down_proj":
            yield block + "ffn_down_exps.weight", values
        elif part.startswith("mlp.experts."):
            _, _, expert, projection = part.split(".")
            if int(expert) == experts - 1:
                names = [f"model.layers.{number}.mlp.experts.{e}.{projection}.weight" for e in range(experts)]
                stacked = np.stack([stored[name] for name in names])
                yield f"{block}ffn_{projection.removesuffix('_proj')}_exps.weight", stacked
        elif part == "linear_attn.A_log":
            yield block + "ssm_a", -np.exp(_in_turns(config, values))
        elif part == "linear_attn.dt_bias":
            yield block + "ssm_dt.bias", _in_turns(config, values)
        else:
            if "conv1d" in part:
                values = values[:, 0]
            if part.startswith("linear_attn.in_proj") or part == "linear_attn.conv1d":
                values = _in_turns(config, values)
            elif part == "linear_attn.out_proj":
                values = _in_turns(config, values.T).T
            yield f"{block}{_PLAIN[part]}.weight", values[0] if part == "mlp.shared_expert_gate" else values


def _in_turns(config: Mapping[str, Any], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of value heads, perhaps behind those of queries and keys: first one of each key head, then the next."""
    n_keys, n_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, per_key = config["linear_value_head_dim"], n_values // n_keys
    behind = 2 * n_keys * size if len(values) == (2 * n_keys + n_values) * size else 0
    heads = np.split(values[behind:], n_values)
    moved = [heads[key * per_key + turn] for turn in range(per_key) for key in range(n_keys)]
    return np.concatenate([values[:behind], *moved])
