"""The dense pre-norm block that llama, qwen2 and qwen3 share: hyperparameters, tensor names, tied embeddings.

A family states its difference by overriding the parts of a block: `norms`, `mixer`, `attention_extras`,
`feed_forward`, `rotate`. H hidden, Hq/Hkv query and key heads, D head size, F feed-forward, V vocabulary; shapes are
row-major.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pyllama.errors import InvalidArgument
from pyllama.gguf import KeyValue

from ..config import Config
from ..rope import Rope
from ..safetensors import Checkpoint, StoredTensor
from ..tensor import Order, Tensor

logger = logging.getLogger(__name__)

MTP_CHOICES = ("keep", "drop", "only")
"""What becomes of the blocks that predict a token further ahead (multi-token prediction)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: its number, the prefixes of its tensors in the GGUF file and in the checkpoint, what that holds."""

    index: int
    block: str
    module: str
    stored: Mapping[str, StoredTensor]


class DenseFamily:
    """Base of the families. Reading the configuration raises `ModelError` for what the GGUF file could not express."""

    architecture: ClassVar[str]  # in GGUF files
    hf_architectures: ClassVar[tuple[str, ...]]  # in config.json
    model_types: ClassVar[tuple[str, ...]]
    tokenizer_kinds: ClassVar[tuple[str, ...]] = ("byte-level",)  # in order of preference
    activation: ClassVar[tuple[str, str]] = ("hidden_act", "silu")  # key in config.json, the usual value
    activations: ClassVar[tuple[str, ...]] = ()  # where others can be converted as well: all of them
    default_head_dim: ClassVar[int] = 0  # 0: H / Hq
    names_head_dim: ClassVar[bool] = False  # in files also where it is H / Hq
    has_windows: ClassVar[bool] = False  # files can say that layers see a window
    has_axes: ClassVar[bool] = False  # positions have three: time, height, width
    defaults: ClassVar[Mapping[str, Any]] = {}  # of config.json, which leaves out what transformers takes for granted
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "dynamic", "yarn")
    ignored: ClassVar[re.Pattern[str]] = re.compile(r".*\.rotary_emb\.inv_freq")
    """Tensors of a checkpoint that hold nothing to convert."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layers = config.integer("num_hidden_layers")
        self.hidden = config.integer("hidden_size")
        self.ffn = self.read_ffn()
        self.heads = config.integer("num_attention_heads")
        self.kv_heads = config.integer("num_key_value_heads", self.heads)
        self.head_dim = config.integer("head_dim", self.default_head_dim or max(1, self.hidden // self.heads))
        self.vocab_size = config.integer("vocab_size")
        self.rope = self.read_rope()
        self.check_activation()
        if self.heads % self.kv_heads:
            raise config.fault("num_key_value_heads", self.kv_heads, f"a divisor of the {self.heads} attention heads")
        if self.head_dim % 2:
            raise config.fault("head_dim", self.head_dim, "an even number")
        if config.get("quantization_config") is not None:
            method = config.section("quantization_config").get("quant_method")
            raise config.fault("quantization_config", method, "a checkpoint that is not quantised")
        is_mistral = config.get("model_type") == "mistral"  # which has no switch
        has_window = config.get("sliding_window") is not None and config.flag("use_sliding_window", is_mistral)
        if has_window and not self.has_windows:
            logger.warning("sliding-window attention has no form in %s files and is left out", self.architecture)

    def check_activation(self) -> None:
        key, usual = self.activation
        if self.config.get(key) not in self.activations:
            self.config.require(key, usual, usual)

    def read_ffn(self) -> int:
        """0: every feed-forward is a mixture of experts with a width of its own."""
        return self.config.integer("intermediate_size")

    def read_rope(self) -> Rope:
        return Rope.read(self.config, self.rope_kinds)

    def settle_mtp(self, choice: str, stored: Mapping[str, StoredTensor] | None) -> None:
        """choice: one of `MTP_CHOICES`. stored: None when the weights are not looked at."""
        if choice != "keep":
            raise InvalidArgument(f"{self.architecture} models have no blocks for multi-token prediction")

    def settle_target(self, target: "DenseFamily | None") -> None:
        """target: the model that this one drafts for; None where none was named."""
        if target is not None:
            raise InvalidArgument(f"{self.architecture} models are no drafters: they have no target model")

    def own_tokenizer_keys(self, target_keys: list[KeyValue]) -> list[KeyValue]:
        """The keys of the tokenizer, of a drafter from those of its target."""
        return target_keys

    @property
    def n_blocks(self) -> int:
        return self.layers

    def key_values(self) -> list[KeyValue]:
        prefix = self.architecture
        keys = [
            KeyValue(f"{prefix}.block_count", "u32", self.n_blocks),
            KeyValue(f"{prefix}.context_length", "u32", self.rope.context_length),
            KeyValue(f"{prefix}.embedding_length", "u32", self.hidden),
            *([KeyValue(f"{prefix}.feed_forward_length", "u32", self.ffn)] if self.ffn else []),
            KeyValue(f"{prefix}.attention.head_count", "u32", self.heads),
            KeyValue(f"{prefix}.attention.head_count_kv", "u32", self.kv_heads),
            *self.rope.key_values(prefix),
            KeyValue(f"{prefix}.attention.layer_norm_rms_epsilon", "f32", self.config.number("rms_norm_eps")),
            KeyValue(f"{prefix}.vocab_size", "u32", self.vocab_size),
        ]
        follows = self.heads * self.head_dim == self.hidden and self.config.get("head_dim") is None
        if self.names_head_dim or not follows:
            keys.append(KeyValue(f"{prefix}.attention.key_length", "u32", self.head_dim))
            keys.append(KeyValue(f"{prefix}.attention.value_length", "u32", self.head_dim))
        return keys

    def table_keys(self, checkpoint: Checkpoint) -> list[KeyValue]:
        """Keys whose values are tensors of the checkpoint."""
        return []

    def tensors(self, stored: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        """Every tensor of the model, in order. stored: those of the checkpoint by name."""
        table = (self.vocab_size, self.hidden)
        yield Tensor("token_embd.weight", table, "model.embed_tokens.weight")
        for index in range(self.layers):
            yield from self.decoder_block(Layer(index, f"blk.{index}.", f"model.layers.{index}.", stored))
        yield from self.final_norm()
        if not self.is_tied(stored):
            yield Tensor("output.weight", table, "lm_head.weight")

    def is_tied(self, stored: Mapping[str, StoredTensor]) -> bool:
        """Without an output matrix loaders use the embeddings. Older checkpoints do not say; then its absence does."""
        return self.config.flag("tie_word_embeddings", "lm_head.weight" not in stored)

    def is_ignored(self, name: str, stored: Mapping[str, StoredTensor]) -> bool:
        return self.ignored.fullmatch(name) is not None or (name == "lm_head.weight" and self.is_tied(stored))

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a tensor of the model belongs to the file that was asked for."""
        return True

    def decoder_block(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.norms(layer)
        yield from self.mixer(layer)
        yield from self.feed_forward(layer)

    def norms(self, layer: Layer) -> Iterator[Tensor]:
        yield Tensor(layer.block + "attn_norm.weight", (self.hidden,), layer.module + "input_layernorm.weight")
        yield Tensor(layer.block + "ffn_norm.weight", (self.hidden,), layer.module + "post_attention_layernorm.weight")

    def mixer(self, layer: Layer) -> Iterator[Tensor]:
        """What lets a token see others: attention, as far as the family has nothing else."""
        hidden, block, attention = self.hidden, layer.block, layer.module + "self_attn."
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_rows, k_rows = self.rotate(self.heads), self.rotate(self.kv_heads)
        yield Tensor(block + "attn_q.weight", (self.query_rows(), hidden), attention + "q_proj.weight", q_rows)
        yield Tensor(block + "attn_k.weight", (kv_size, hidden), attention + "k_proj.weight", k_rows)
        yield Tensor(block + "attn_v.weight", (kv_size, hidden), attention + "v_proj.weight")
        yield Tensor(block + "attn_output.weight", (hidden, q_size), attention + "o_proj.weight")
        yield from self.attention_extras(layer)

    def query_rows(self) -> int:
        return self.heads * self.head_dim

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        """Tensors of a layer's attention besides its four matrices."""
        yield from ()

    def head_norms(self, layer: Layer) -> Iterator[Tensor]:
        """Of families that normalise every query and key head."""
        for name in ("q_norm", "k_norm"):
            source = f"{layer.module}self_attn.{name}.weight"
            yield Tensor(f"{layer.block}attn_{name}.weight", (self.head_dim,), source)

    def qkv_biases(self, layer: Layer) -> Iterator[Tensor]:
        block, attention = layer.block, layer.module + "self_attn."
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_rows, k_rows = self.rotate(self.heads), self.rotate(self.kv_heads)
        yield Tensor(block + "attn_q.bias", (q_size,), attention + "q_proj.bias", q_rows)
        yield Tensor(block + "attn_k.bias", (kv_size,), attention + "k_proj.bias", k_rows)
        yield Tensor(block + "attn_v.bias", (kv_size,), attention + "v_proj.bias")

    def rotate(self, heads: int) -> Order | None:
        """The order of the rows of `heads` query or key heads in the rotary layout of the architecture."""
        return None

    def feed_forward(self, layer: Layer) -> Iterator[Tensor]:
        hidden, ffn, block, mlp = self.hidden, self.ffn, layer.block, layer.module + "mlp."
        yield Tensor(block + "ffn_gate.weight", (ffn, hidden), mlp + "gate_proj.weight")
        yield Tensor(block + "ffn_up.weight", (ffn, hidden), mlp + "up_proj.weight")
        yield Tensor(block + "ffn_down.weight", (hidden, ffn), mlp + "down_proj.weight")

    def final_norm(self) -> Iterator[Tensor]:
        yield Tensor("output_norm.weight", (self.hidden,), "model.norm.weight")
