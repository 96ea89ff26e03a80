"""`dflash`: the drafters DFlash, DFlash2 and DSpark, made for one target model. Blocks like those of Qwen3.

A checkpoint has no tokenizer, and as a rule no embeddings and no head: those are the target's. `target_layer_ids` are
the layers whose outputs are tapped; files name the layers whose inputs these are. DFlash2 adds convolutions around
every attention and feed-forward, and a selector with codebooks of the whole vocabulary; DSpark a Markov head and, as a
rule, a head of confidence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import InvalidArgument, ModelError
from pyllama.gguf import KeyValue

from ..config import Config
from ..rope import Rope, rope_section
from ..safetensors import StoredTensor
from ..tensor import Order, Tensor
from .dense import DenseFamily, Layer
from .own_head import own_head

_MASK_KEY = "tokenizer.ggml.mask_token_id"
_SIDES = 2  # a convolution stands before and one behind each sublayer


class DFlash(DenseFamily):
    architecture = "dflash"
    hf_architectures = ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "DSparkDraftModel")
    model_types = ()  # they say qwen3
    default_head_dim = 128
    names_head_dim = True
    has_windows = True
    activations = ("silu", "gelu_pytorch_tanh")
    rope_kinds = ("default", "linear", "yarn")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("attention_bias", False, False)
        self.version = 2 if "DFlash2DraftModel" in config.get("architectures") else 1
        self.block_size = self.setting("block_size").integer("block_size", 16)
        self.mask_token = self.setting("mask_token_id").count("mask_token_id")
        self.target_layers = self.setting("target_layer_ids").integers("target_layer_ids", [])
        if not self.target_layers:
            raise config.fault("target_layer_ids", self.target_layers, "the layers of the target that are tapped")
        if self.mask_token >= self.vocab_size:
            raise config.fault("mask_token_id", self.mask_token, f"one of {self.vocab_size} tokens")
        self.windowed = self._windowed_layers()
        self.rotary_dims = self._rotary_dims()
        self.halves_rotate = self.setting("rope_is_neox_style").flag("rope_is_neox_style", True)
        if self.version == 2:
            self.taps, self.group, self.rank, self.candidates = (
                self.setting(key).integer(key)
                for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
            )
            if self.hidden % self.group:
                raise config.fault("conv_group_size", self.group, f"a divisor of the {self.hidden} channels")
        self.is_dspark = any("DSpark" in name for name in config.get("architectures"))
        self.markov_rank = self.setting("markov_rank").count("markov_rank", 0)
        self.has_confidence = self.setting("enable_confidence_head").flag("enable_confidence_head", False)
        self.tells_from_anchor = self.setting("sample_from_anchor").flag("sample_from_anchor", self.is_dspark)
        if self.markov_rank:
            self.setting("markov_head_type").require("markov_head_type", "vanilla", "vanilla")
        if self.has_confidence:
            self.setting("confidence_head_with_markov").require("confidence_head_with_markov", True, False)
            if not self.markov_rank:
                raise config.fault("markov_rank", self.markov_rank, "a head that the confidence comes with")
        self.target_has_axes = False

    def setting(self, key: str) -> Config:
        """Where a key stands: checkpoints of different years have it beside the others or in a section of its own."""
        section = self.config.section("dflash_config")
        return self.config if section.get(key) is None else section

    def read_rope(self) -> Rope:
        return Rope.read(self.config, self.rope_kinds, has_axes=True)

    def settle_target(self, target: DenseFamily | None) -> None:
        if target is None:
            raise InvalidArgument(
                f"{self.config.source}: a DFlash drafter has the tokenizer of its target: "
                "say with --target-model-dir where that lies"
            )
        for key, value in (("hidden_size", self.hidden), ("vocab_size", self.vocab_size)):
            expected = target.hidden if key == "hidden_size" else target.vocab_size
            if value != expected:
                raise self.config.fault(key, value, f"{expected} as in {target.config.source}")
        if max(self.target_layers) >= target.layers - 1:
            expected_layers = f"layers of the target before the last of {target.layers}"
            raise self.config.fault("target_layer_ids", self.target_layers, expected_layers)
        self.target_has_axes = target.has_axes
        trained = Path(self.config.source).with_name("mask_embedding.pt")
        if trained.exists():
            raise ModelError(f"{trained}: a mask token with an embedding of its own, pickled, cannot be converted")

    def key_values(self) -> list[KeyValue]:
        prefix = self.architecture
        keys = [
            *super().key_values(),
            KeyValue(f"{prefix}.block_size", "u32", self.block_size),
            KeyValue(f"{prefix}.target_layers", "i32[]", [layer + 1 for layer in self.target_layers]),
        ]
        if self.rotary_dims != self.head_dim:
            keys.append(KeyValue(f"{prefix}.rope.dimension_count", "u32", self.rotary_dims))
        if self.target_has_axes:  # all pairs rotate with time
            keys.append(KeyValue(f"{prefix}.rope.dimension_sections", "i32[]", [self.rotary_dims // 2, 0, 0, 0]))
        if any(self.windowed):
            window = self.config.integer("sliding_window")
            keys.append(KeyValue(f"{prefix}.attention.sliding_window", "u32", window))
            keys.append(KeyValue(f"{prefix}.attention.sliding_window_pattern", "bool[]", self.windowed))
        if self.config.get("is_causal") is not None:
            keys.append(KeyValue(f"{prefix}.attention.causal", "bool", self.config.flag("is_causal", False)))
        if self.version == 2:
            for key, value in (
                ("conv_kernel_size", self.taps),
                ("conv_group_size", self.group),
                ("selector_rank", self.rank),
                ("selector_top_k", self.candidates),
            ):
                keys.append(KeyValue(f"{prefix}.{key}", "u32", value))
        if self.is_dspark or self.tells_from_anchor:
            keys.append(KeyValue(f"{prefix}.sample_from_anchor", "bool", self.tells_from_anchor))
        if self.markov_rank:
            keys.append(KeyValue(f"{prefix}.has_confidence_head", "bool", self.has_confidence))
        for key, source in (
            ("embedding_scale", "input_embedding_scale"),
            ("logit_scale", "output_multiplier"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ):
            if (found := self.setting(source)).get(source) is not None:
                keys.append(KeyValue(f"{prefix}.{key}", "f32", found.number(source)))
        if (activation := self.config.get("hidden_act") or "silu") != "silu":
            keys.append(KeyValue(f"{prefix}.hidden_activation", "string", activation))
        return keys

    def own_tokenizer_keys(self, target_keys: list[KeyValue]) -> list[KeyValue]:
        others = [entry for entry in target_keys if entry.key != _MASK_KEY]
        return [*others, KeyValue(_MASK_KEY, "u32", self.mask_token)]

    def tensors(self, stored: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        module = "model." if "model.fc.weight" in stored else ""
        hidden, table = self.hidden, (self.vocab_size, self.hidden)
        yield Tensor("fc.weight", (hidden, len(self.target_layers) * hidden), module + "fc.weight")
        yield Tensor("enc.output_norm.weight", (hidden,), module + "hidden_norm.weight")
        yield Tensor("output_norm.weight", (hidden,), module + "norm.weight")
        if (name := module + "embed_tokens.weight") in stored:
            yield Tensor("token_embd.weight", table, name)
        rows = self.setting("draft_vocab_size").integer("draft_vocab_size", self.vocab_size)
        if "lm_head.weight" in stored:
            yield from own_head(self.config, rows, self.vocab_size, hidden, module, stored)
        if self.version == 2:
            selector, codebook = module + "candidate_selector.", (self.vocab_size, self.rank)
            yield Tensor("selector_predecessor.weight", codebook, selector + "predecessor_codebook")
            yield Tensor("selector_successor.weight", codebook, selector + "successor_codebook")
            yield Tensor("selector_hidden.weight", (self.rank, hidden), selector + "hidden_projection.weight")
        if self.markov_rank:
            markov, rank = module + "markov_head.", self.markov_rank
            yield Tensor("markov_w1.weight", (self.vocab_size, rank), markov + "markov_w1.weight")
            yield Tensor("markov_w2.weight", (rows, rank), markov + "markov_w2.weight")
        if self.has_confidence:
            confidence = module + "confidence_head.proj."
            yield Tensor("conf_proj.weight", (1, hidden + self.markov_rank), confidence + "weight")
            if confidence + "bias" in stored:
                yield Tensor("conf_proj.bias", (1,), confidence + "bias")
        for index in range(self.layers):
            yield from self.decoder_block(Layer(index, f"blk.{index}.", f"{module}layers.{index}.", stored))

    def is_ignored(self, name: str, stored: Mapping[str, StoredTensor]) -> bool:
        return self.ignored.fullmatch(name) is not None or name.endswith("t2d")  # d2t backwards

    def mixer(self, layer: Layer) -> Iterator[Tensor]:
        for tensor in super().mixer(layer):
            if tensor.name.endswith("attn_v.weight") and tensor.source not in layer.stored:
                continue  # keys are values then
            yield tensor
        if self.version == 2:
            yield from self._convolution(layer, "attn", "attention_conv")

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        for tensor in self.head_norms(layer):
            yield replace(tensor, rows=self.rotate(1))

    def feed_forward(self, layer: Layer) -> Iterator[Tensor]:
        yield from super().feed_forward(layer)
        if self.version == 2:
            yield from self._convolution(layer, "ffn", "mlp_conv")

    def rotate(self, heads: int) -> Order | None:
        return None if self.halves_rotate else partial(split_halves, heads, self.head_dim, self.rotary_dims)

    def _convolution(self, layer: Layer, name: str, module: str) -> Iterator[Tensor]:
        base, projection = f"{layer.block}{name}_conv_base", f"{layer.block}{name}_conv_proj.weight"
        yield Tensor(base, (_SIDES, self.taps, self.hidden), f"{layer.module}{module}.base_kernel")
        rows = _SIDES * self.taps * (self.hidden // self.group)
        yield Tensor(projection, (rows, self.hidden), f"{layer.module}{module}.kernel_projection.weight")

    def _windowed_layers(self) -> list[bool]:
        kinds = self.config.get("layer_types")
        uses = self.config.flag("use_sliding_window", kinds is not None)
        if kinds is None or not uses:
            return [uses and self.config.get("sliding_window") is not None] * self.layers
        names = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != self.layers or any(kind not in names for kind in kinds):
            raise self.config.fault("layer_types", kinds, f"{self.layers} times one of {', '.join(names)}")
        return [kind == "sliding_attention" for kind in kinds]

    def _rotary_dims(self) -> int:
        factor = self.config.number("partial_rotary_factor", 1.0)
        factor = rope_section(self.config).number("partial_rotary_factor", factor)
        dims = int(self.head_dim * factor)
        if not 0 < dims <= self.head_dim or dims % 2:
            raise self.config.fault("partial_rotary_factor", factor, f"an even part of {self.head_dim} dimensions")
        return dims


def split_halves(heads: int, head_dim: int, rotary: int) -> NDArray[np.int64]:
    """Of each head the even ones of the rows that rotate, then the odd ones, then those that do not."""
    rows = np.arange(heads * head_dim).reshape(heads, head_dim)
    turning = rows[:, :rotary]
    return np.concatenate([turning[:, 0::2], turning[:, 1::2], rows[:, rotary:]], axis=1).reshape(-1)
