"""`eagle3`: EAGLE-3 drafters, made for one target model. One layer like those of Llama, which sees a token beside a
state fused from three of the target's layers.

Checkpoints come in two spellings: the layer is `midlayer` or `layers.0`, and its configuration stands beside the other
keys or in `transformer_layer_config`. They have no tokenizer, and embeddings and a head only where these are not the
target's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pyllama.errors import InvalidArgument, ModelError
from pyllama.gguf import KeyValue

from ..config import Config
from ..safetensors import StoredTensor
from ..tensor import Tensor
from .dense import DenseFamily, Layer
from .llama import Llama
from .own_head import own_head

_TAPS = 3
_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Beside the other keys they are layers by their inputs, in `eagle_config` by their outputs; none: the usual ones."""


class Eagle3(Llama):
    architecture = "eagle3"
    hf_architectures = ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel")
    model_types = ()  # they say llama
    names_head_dim = True

    def __init__(self, config: Config) -> None:
        super().__init__(config.with_section("transformer_layer_config"))
        settings = self.config
        settings.require("num_hidden_layers", 1, None)
        for key in ("attention_bias", "mlp_bias", "fc_norm", "norm_output"):
            settings.require(key, False, False)
        section = settings.section("eagle_config")
        self.norms_stream = settings.flag("norm_before_residual", False)
        self.norms_input = settings.flag("norm_before_fc", section.flag("norm_before_fc", False))
        self.target_hidden = settings.count("target_hidden_size", 0)  # 0: the target says
        self.target_layers = settings.integers(_LAYERS, [layer + 1 for layer in section.integers(_LAYERS, [])])
        if len(self.target_layers) not in (0, _TAPS):
            raise settings.fault(_LAYERS, self.target_layers, "three layers of the target")

    def settle_target(self, target: DenseFamily | None) -> None:
        if target is None:
            raise InvalidArgument(
                f"{self.config.source}: an EAGLE-3 drafter has the tokenizer of its target: "
                "say with --target-model-dir where that lies"
            )
        if self.vocab_size != target.vocab_size:
            expected = f"{target.vocab_size} as in {target.config.source}"
            raise self.config.fault("vocab_size", self.vocab_size, expected)
        if self.target_hidden not in (0, target.hidden):
            expected = f"{target.hidden}, the hidden_size in {target.config.source}"
            raise self.config.fault("target_hidden_size", self.target_hidden, expected)
        self.target_hidden = target.hidden
        self.target_layers = self.target_layers or [2, target.layers // 2, target.layers - 3]
        if min(self.target_layers) < 0 or max(self.target_layers) > target.layers:
            expected = f"layers of the target, which has {target.layers}"
            raise self.config.fault(_LAYERS, self.target_layers, expected)

    def key_values(self) -> list[KeyValue]:
        return [
            *super().key_values(),
            KeyValue("eagle3.target_layers", "i32[]", self.target_layers),
            KeyValue("eagle3.target_hidden_size", "u32", self.target_hidden),
            KeyValue("eagle3.norm_before_residual", "bool", self.norms_stream),
            KeyValue("eagle3.norm_before_fc", "bool", self.norms_input),
        ]

    def tensors(self, stored: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        module = "model." if "model.fc.weight" in stored else ""
        hidden, inputs = self.hidden, _TAPS * self.target_hidden
        divisors = self.rope.divisors(self.head_dim)
        if divisors is not None:
            yield Tensor("rope_freqs.weight", divisors.shape, divisors)
        yield Tensor("fc.weight", (hidden, inputs), module + "fc.weight")
        if self.norms_input:
            yield Tensor("enc.output_norm.weight", (inputs,), module + "input_norm.weight")
        yield Tensor("output_norm.weight", (hidden,), module + "norm.weight")
        has_table, has_head = (name in stored for name in (module + "embed_tokens.weight", "lm_head.weight"))
        if not (has_table and has_head) and hidden != self.target_hidden:
            raise ModelError(
                f"{self.config.source}: embeddings and head are missing, and those of the target have "
                f"{self.target_hidden} features instead of {hidden}"
            )
        if has_table:
            yield Tensor("token_embd.weight", (self.vocab_size, hidden), module + "embed_tokens.weight")
        if has_head:
            rows = self.config.integer("draft_vocab_size", self.vocab_size)
            yield from own_head(self.config, rows, self.vocab_size, hidden, module, stored)
        layer = "midlayer." if f"{module}midlayer.hidden_norm.weight" in stored else "layers.0."
        yield from self.decoder_block(Layer(0, "blk.0.", module + layer, stored))

    def is_ignored(self, name: str, stored: Mapping[str, StoredTensor]) -> bool:
        """`t2d` is d2t backwards; what begins with verifier_ is a copy of the target's."""
        is_copy = name.rpartition("verifier_")[1] != ""
        return self.ignored.fullmatch(name) is not None or name.endswith("t2d") or is_copy

    def norms(self, layer: Layer) -> Iterator[Tensor]:
        yield from super().norms(layer)
        yield Tensor(layer.block + "attn_norm_2.weight", (self.hidden,), layer.module + "hidden_norm.weight")

    def mixer(self, layer: Layer) -> Iterator[Tensor]:
        for tensor in super().mixer(layer):
            reads_both = not tensor.name.endswith("attn_output.weight")
            yield replace(tensor, shape=(tensor.shape[0], 2 * self.hidden)) if reads_both else tensor
