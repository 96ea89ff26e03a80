"""Configurations and deterministic weights of tiny checkpoints of qwen3_5, qwen3_5_moe and qwen4_exp.

Names and shapes are those that transformers saves, vision tensors and blocks for multi-token prediction included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 304
END_OF_TEXT = 2
N_TOKENS = 150  # more than two chunks of 64, in which the delta net is often computed

_ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
_TEXT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "eos_token_id": END_OF_TEXT,
    "rope_parameters": {**_ROPE, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MOE: dict[str, Any] = {
    **{key: value for key, value in _TEXT.items() if key != "intermediate_size"},
    **{"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **_EXPERTS},
    "shared_expert_intermediate_size": 48,
}
_EXP: dict[str, Any] = {
    **_MOE,
    **{"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", "norm_topk_prob": True},
    **{"hc_count": 4, "hc_lowrank": 24, "output_gate_type": "sigmoid"},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    # Many heads: a block whose score is 0 for every head would be chosen at random among its like.
    **{"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    **{"ple_layer_ids": [2], "ple_embed_dim": 64, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 4},
    **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 16, "seed": 1234, "split_ngram_parts": 4},
}


def _multimodal(text: dict[str, Any], model_type: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"model_type": model_type + "_vision", "depth": 1, "hidden_size": 16, "num_heads": 2},
        "image_token_id": 300,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


HYBRID_CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen35": _TEXT,
    # The heads of the published models.
    "qwen35-wide-heads": {
        **_TEXT,
        **{"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4},
        **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        "rope_parameters": {**_ROPE, "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
    },
    "qwen35-odd": {
        **_TEXT,
        **{"hidden_size": 60, "intermediate_size": 100, "num_attention_heads": 5, "num_key_value_heads": 5},
        **{"head_dim": 24, "linear_key_head_dim": 48, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 3},
        **{"linear_num_key_heads": 3, "linear_num_value_heads": 3},
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "rope_parameters": {**_ROPE, "mrope_interleaved": True, "mrope_section": [1, 1, 1]},
    },
    "qwen35-multimodal-tied": _multimodal(
        {
            **{key: value for key, value in _TEXT.items() if key != "layer_types"},
            **{"full_attention_interval": 2, "tie_word_embeddings": True, "mtp_num_hidden_layers": 1},
        },
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
    ),
    "qwen35-yarn": {
        **_TEXT,
        "rope_parameters": {
            **_TEXT["rope_parameters"],
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0},
        },
    },
    "qwen35moe": {**_MOE, "mtp_num_hidden_layers": 1},
    "qwen35moe-apart": {**_MOE, "num_experts_per_tok": 3, "linear_num_value_heads": 2},
    "qwen4exp": {**_EXP, "mtp_num_hidden_layers": 1},
    "qwen4exp-multimodal-plain": _multimodal(
        {**_EXP, "hc_count": 2, "ple_layer_ids": [], "indexer_budget": 512},
        "qwen4_exp",
        "Qwen4ExpForConditionalGeneration",
    ),
}
APART = ("qwen35moe-apart",)
"""Variants whose checkpoint holds each expert apart."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config", config)


def is_hybrid(config: Mapping[str, Any]) -> bool:
    return "linear_num_key_heads" in text_config(config)


def hybrid_tokens() -> list[int]:
    """With ends of text, two of them in a row."""
    tokens = np.random.default_rng(12).integers(3, 300, N_TOKENS)
    tokens[[7, 40, 41, 100]] = END_OF_TEXT
    return tokens.tolist()


def layer_types(config: Mapping[str, Any]) -> list[str]:
    interval = config.get("full_attention_interval", 4)
    default = [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return config.get("layer_types") or default


def hash_numbers(config: Mapping[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Multipliers, offsets and sizes of the n-gram heads: one prime after the other, and one random odd number each."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def scrambled(value: int) -> int:
        value = value + golden & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    bound = ((1 << 63) - 1) // config["vocab_size"] // 2
    seeds = [config["seed"] + golden * (index + 1) & mask for index in range(config["ngram_size"])]
    multipliers = [2 * (scrambled(seed) % bound) + 1 for seed in seeds]
    sizes: list[int] = []
    candidate = config["ngram_vocab_size_base"]
    while len(sizes) < (config["ngram_size"] - 1) * config["heads_per_ngram"]:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            sizes.append(candidate)
        candidate += 1
    offsets = [sum(sizes[:head]) for head in range(len(sizes))]
    return multipliers, offsets, sizes


class _Weights:
    """Collects the tensors; those of a module share its prefix."""

    def __init__(self, config: Mapping[str, Any], *, experts_apart: bool, shapes_only: bool) -> None:
        self.config = config
        self.experts_apart = experts_apart
        self.shapes_only = shapes_only
        self.rng = np.random.default_rng(20260203)
        self.tensors: dict[str, NDArray[Any]] = {}

    def add(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        if self.shapes_only:
            self.tensors[name] = np.broadcast_to(np.float32(0), shape)
        else:
            self.tensors[name] = (mean + std * self.rng.standard_normal(shape)).astype(np.float32)

    def linear(self, name: str, rows: int, columns: int, std: float = 1.0) -> None:
        self.add(name + ".weight", (rows, columns), std / columns**0.5)

    def norm(self, name: str, size: int, std: float = 0.2) -> None:
        self.add(name + ".weight", (size,), std)  # stored less 1

    def attention(self, module: str) -> None:
        config = self.config
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        q_size, kv_size = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
        self.linear(module + "q_proj", 2 * q_size, hidden, 1.6)
        self.linear(module + "k_proj", kv_size, hidden, 1.6)
        self.linear(module + "v_proj", kv_size, hidden)
        self.linear(module + "o_proj", hidden, q_size)
        for name in ("q_norm", "k_norm"):
            self.norm(module + name, head_dim, 0.3)
        if "indexer_n_heads" in config:
            size = config["indexer_head_dim"]
            self.linear(module + "indexer.index_qk_proj", (config["indexer_n_heads"] + 1) * size, hidden, 1.6)
            for name in ("q_layernorm", "k_layernorm"):
                self.norm(f"{module}indexer.{name}", size, 0.3)

    def delta_net(self, module: str) -> None:
        config = self.config
        hidden, size, taps = config["hidden_size"], config["linear_value_head_dim"], config["linear_conv_kernel_dim"]
        n_keys, n_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        channels = (2 * n_keys + n_values) * size
        self.linear(module + "in_proj_qkv", channels, hidden)
        self.linear(module + "in_proj_z", n_values * size, hidden)
        self.linear(module + "in_proj_b", n_values, hidden)
        self.linear(module + "in_proj_a", n_values, hidden)
        self.add(module + "conv1d.weight", (channels, 1, taps), 0.6)
        self.tensors[module + "A_log"] = np.log(self.rng.uniform(0.5, 6, n_values)).astype(np.float32)
        self.tensors[module + "dt_bias"] = self.rng.uniform(-5, 0, n_values).astype(np.float32)
        self.add(module + "norm.weight", (size,), 0.2, 1.0)
        self.linear(module + "out_proj", hidden, n_values * size, 1.5)

    def feed_forward(self, module: str) -> None:
        config = self.config
        hidden = config["hidden_size"]
        if "num_experts" not in config:
            return self.gated(module, config["intermediate_size"], hidden)
        count, ffn, shared = (
            config[key] for key in ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
        )
        self.linear(module + "gate", count, hidden, 1.5)
        if self.experts_apart:
            for expert in range(count):
                self.gated(f"{module}experts.{expert}.", ffn, hidden)
        else:
            self.add(module + "experts.gate_up_proj", (count, 2 * ffn, hidden), 1.3 / hidden**0.5)
            self.add(module + "experts.down_proj", (count, hidden, ffn), 1 / ffn**0.5)
        self.gated(module + "shared_expert.", shared, hidden)
        self.linear(module + "shared_expert_gate", 1, hidden)

    def gated(self, module: str, ffn: int, hidden: int) -> None:
        self.linear(module + "gate_proj", ffn, hidden, 1.5)
        self.linear(module + "up_proj", ffn, hidden)
        self.linear(module + "down_proj", hidden, ffn)

    def mixing(self, module: str, *, injects: bool = True) -> None:
        width = self.config["hc_count"] * self.config["hidden_size"]
        self.norm(module + "hc_norm", width)
        self.linear(module + "input_mix_weight_down", self.config["hc_lowrank"], width, 3.0)
        self.linear(module + "input_mix_weight_up", width, self.config["hc_lowrank"], 2.0)
        if injects:
            self.linear(module + "block_inject_weight", self.config["hc_count"], width, 3.0)

    def ngram_embedding(self, module: str) -> None:
        config = self.config
        hidden, width = config["hidden_size"], config["hc_count"] * config["hidden_size"]
        embedding = module + "ple_embedding."
        numbers = hash_numbers(config)
        for name, values in zip(
            ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"), numbers, strict=True
        ):
            self.tensors[embedding + name] = np.array(values, np.int64)
        step, parts = config["make_ngram_vocab_size_divisible_by"], config["split_ngram_parts"]
        rows = -(-sum(numbers[2]) // step) * step
        for part in range(parts):
            shape = (rows // parts, config["ple_embed_dim"] // len(numbers[2]))
            self.add(f"{embedding}ngram_embedding.shard_{part}.weight", shape, 1.0)
        self.linear(module + "key_proj", width, config["ple_embed_dim"])
        self.linear(module + "value_proj", hidden, config["ple_embed_dim"])
        for name in ("norm_key", "norm_query", "norm_conv"):
            self.norm(module + name, width)
        self.add(module + "conv1d.weight", (width, 1, config["ple_conv_kernel_size"]), 0.5)

    def block(self, module: str, kind: str) -> None:
        if "hc_count" in self.config:
            self.mixing(module + "attn_hyper_connection.")
            self.mixing(module + "mlp_hyper_connection.")
        else:
            self.norm(module + "input_layernorm", self.config["hidden_size"])
            self.norm(module + "post_attention_layernorm", self.config["hidden_size"])
        if kind == "linear_attention":
            self.delta_net(module + "linear_attn.")
        else:
            self.attention(module + "self_attn.")
        self.feed_forward(module + "mlp.")

    def prediction_block(self) -> None:
        hidden = self.config["hidden_size"]
        self.block("mtp.layers.0.", "full_attention")
        self.norm("mtp.pre_fc_norm_embedding", hidden)
        if "hc_count" in self.config:
            self.linear("mtp.fc_embedding", hidden, hidden)
            self.linear("mtp.fc_hidden", hidden, hidden)
            self.norm("mtp.pre_fc_norm_hidden", self.config["hc_count"] * hidden)
            self.mixing("mtp.hyper_connection_mixer.", injects=False)
        else:
            self.linear("mtp.fc", hidden, 2 * hidden)
            self.norm("mtp.pre_fc_norm_hidden", hidden)
            self.norm("mtp.norm", hidden)


def hybrid_weights(
    config: Mapping[str, Any], *, experts_apart: bool = False, shapes_only: bool = False
) -> dict[str, NDArray[Any]]:
    """All tensors of the checkpoint, of a spread that makes scores, gates and logits anything but flat.

    shapes_only: zeros that take no memory, for the sizes of published models.
    """
    text = text_config(config)
    weights = _Weights(text, experts_apart=experts_apart, shapes_only=shapes_only)
    hidden, n_vocab = text["hidden_size"], text["vocab_size"]
    weights.linear("model.embed_tokens", n_vocab, hidden, 2.4)
    for layer, kind in enumerate(layer_types(text)):
        weights.block(f"model.layers.{layer}.", kind)
        if layer + 1 in text.get("ple_layer_ids", []):
            weights.ngram_embedding(f"model.layers.{layer}.ple.")
    if "hc_count" in text:
        weights.mixing("model.hyper_connection_mixer.", injects=False)
    else:
        weights.norm("model.norm", hidden)
    if not text["tie_word_embeddings"]:
        weights.linear("lm_head", n_vocab, hidden, 2.4)
    if text.get("mtp_num_hidden_layers"):
        weights.prediction_block()
    if text is config:
        return weights.tensors
    weights.add("model.visual.patch_embed.proj.weight", (16, 3, 2, 16, 16), 1.0)
    weights.add("model.visual.blocks.0.norm1.weight", (16,), 1.0)
    return dict(_with_prefix(weights.tensors))


def _with_prefix(tensors: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """As multimodal checkpoints name the tensors of their text part."""
    for name, values in tensors.items():
        is_text = name.startswith("model.") and not name.startswith("model.visual.")
        yield name.replace("model.", "model.language_model.", 1) if is_text else name, values
