"""A tiny EAGLE-3 drafter's file as the checkpoint that it might have been converted from, in either of two spellings;
names and keys spelled out backwards, independently of the converter.
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
    "enc.output_norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "d2t": "d2t",
}
_OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_norm_2.weight": "hidden_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"attn_{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkv"},
    **{f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}


def checkpoint_tensors(drafter: Path, layer: str) -> dict[str, NDArray[Any]]:
    """layer: the prefix of the layer's names. Rows of queries and keys are those of halves again."""
    reader = gguf.GGUFReader(drafter)
    head_dim = int(reader.fields["eagle3.attention.key_length"].contents())
    found = {}
    for tensor in reader.tensors:
        values = np.array(tensor.data)
        if tensor.name == "d2t":  # checkpoints store the distance from the row's own number
            values = values - np.arange(len(values))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        name = tensor.name.removeprefix("blk.0.")
        found[layer + _OF_LAYER[name] if name != tensor.name else _WHOLE[name]] = values
    return found


def checkpoint_config(drafter: Path, *, is_nested: bool) -> dict[str, Any]:
    """What config.json says of a drafter with F32 weights. is_nested: the layer's part in a section of its own."""
    reader = gguf.GGUFReader(drafter)
    keys = {name.removeprefix("eagle3."): field.contents() for name, field in reader.fields.items()}
    heads = [int(tensor.shape[0]) for tensor in reader.tensors if tensor.name == "d2t"]
    n_vocab = len(keys["tokenizer.ggml.tokens"])
    layer = {
        "model_type": "llama",
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": 1,
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "head_dim": keys["attention.key_length"],
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": keys["context_length"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "vocab_size": n_vocab,
        "rope_theta": keys["rope.freq_base"],
    }
    own = {
        "draft_vocab_size": heads[0] if heads else n_vocab,
        "target_hidden_size": keys["target_hidden_size"],
        "norm_before_residual": keys["norm_before_residual"],
        "norm_before_fc": keys["norm_before_fc"],
        "eagle_aux_hidden_state_layer_ids": keys["target_layers"],
    }
    if is_nested:
        return {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, **own}
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own}


def write_eagle3_checkpoint(
    folder: Path,
    drafter: Path,
    *,
    is_nested: bool = False,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """config.json and one safetensors file, no tokenizer. config: keys that replace those of the drafter's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", checkpoint_config(drafter, is_nested=is_nested) | dict(config or {}))
    found = checkpoint_tensors(drafter, "layers.0." if is_nested else "midlayer.") if tensors is None else tensors
    (folder / "model.safetensors").write_bytes(safetensors_bytes(found))
    return folder
