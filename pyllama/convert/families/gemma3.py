"""`gemma3` (text): norms before and after both halves of a block, most layers with a sliding window and a rotary base
of their own.

Checkpoints store norm weights less 1, files store them whole.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pyllama.gguf import KeyValue

from ..config import Config
from ..rope import Rope
from ..safetensors import StoredTensor
from ..tensor import Tensor, plus_one
from .dense import DenseFamily, Layer

_PERIOD = 6  # of layers, the last of which sees everything; what loaders take for granted
_DEEPEST = 62  # the 27B model: loaders know it by its depth, and scale its scores by hidden / heads


class Gemma3(DenseFamily):
    architecture = "gemma3"
    hf_architectures = ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM")
    model_types = ("gemma3", "gemma3_text")
    tokenizer_kinds = ("sentencepiece", "byte-fallback", "byte-level")
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    default_head_dim = 256
    names_head_dim = True
    rope_kinds = ("default", "linear")
    ignored = re.compile(r".*\.rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*")
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("attention_bias", False, False)
        if (cap := config.get("attn_logit_softcapping")) is not None:
            raise config.fault("attn_logit_softcapping", cap, "null: scores cannot be capped")
        config.require("use_bidirectional_attention", False, False)
        scaled_by = self.hidden // self.heads if self.layers == _DEEPEST else self.head_dim
        if (scalar := config.number("query_pre_attn_scalar", 256.0)) != scaled_by:
            raise config.fault("query_pre_attn_scalar", scalar, f"{scaled_by}: nothing else can be converted")
        self.windowed = self._windowed_layers()

    def read_rope(self) -> Rope:
        return Rope.read(self.config, self.rope_kinds, self._rope_section("full_attention"))

    def key_values(self) -> list[KeyValue]:
        keys = super().key_values()
        if any(self.windowed):
            local_base = self.config.number("rope_local_base_freq", 10000.0)
            if (section := self._rope_section("sliding_attention")) is not None:
                local_base = section.number("rope_theta", local_base)
            keys.append(KeyValue("gemma3.attention.sliding_window", "u32", self.config.integer("sliding_window", 4096)))
            keys.append(KeyValue("gemma3.rope.freq_base_swa", "f32", local_base))
            if self.windowed != [layer % _PERIOD < _PERIOD - 1 for layer in range(self.layers)]:
                keys.append(KeyValue("gemma3.attention.sliding_window_pattern", "bool[]", self.windowed))
        if self.config.get("final_logit_softcapping") is not None:
            cap = self.config.number("final_logit_softcapping")
            keys.append(KeyValue("gemma3.final_logit_softcapping", "f32", cap))
        return keys

    def tensors(self, stored: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        for tensor in super().tensors(stored):
            yield replace(tensor, compute=plus_one) if tensor.name.endswith("_norm.weight") else tensor

    def norms(self, layer: Layer) -> Iterator[Tensor]:
        for name, source in (
            ("attn_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ):
            yield Tensor(f"{layer.block}{name}.weight", (self.hidden,), f"{layer.module}{source}.weight")

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.head_norms(layer)

    def _rope_section(self, kind: str) -> Config | None:
        """The rotary settings of one kind of layer, where they are given apart."""
        settings = self.config.section("rope_parameters")
        return settings.section(kind) if settings.get(kind) is not None else None

    def _windowed_layers(self) -> list[bool]:
        kinds = self.config.get("layer_types")
        if kinds is None:
            period = self.config.integer("sliding_window_pattern", _PERIOD)
            return [layer % period < period - 1 for layer in range(self.layers)]
        names = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != self.layers or any(kind not in names for kind in kinds):
            raise self.config.fault("layer_types", kinds, f"{self.layers} times one of {', '.join(names)}")
        return [kind == "sliding_attention" for kind in kinds]
