"""The dense pre-norm block that llama, qwen2 and qwen3 share: hyperparameters, tensor names, tied embeddings.

A family states its difference by overriding `attention_extras`, `feed_forward` and `rotate`. H hidden, Hq/Hkv query and
key heads, D head size, F feed-forward, V vocabulary; shapes are row-major.
"""

import logging
import re
from collections.abc import Callable, Container, Iterator
from typing import Any, ClassVar

from numpy.typing import NDArray

from pyllama.gguf import KeyValue

from ..config import Config
from ..rope import Rope
from ..tensor import Tensor

logger = logging.getLogger(__name__)

Rearrange = Callable[[NDArray[Any]], NDArray[Any]]


class DenseFamily:
    """Base of the families. Reading the configuration raises `ModelError` for what the GGUF file could not express."""

    architecture: ClassVar[str]  # in GGUF files
    hf_architectures: ClassVar[tuple[str, ...]]  # in config.json
    model_types: ClassVar[tuple[str, ...]]
    tokenizer_kinds: ClassVar[tuple[str, ...]] = ("byte-level",)  # in order of preference
    activation: ClassVar[tuple[str, str]] = ("hidden_act", "silu")  # key in config.json, the only value
    default_head_dim: ClassVar[int] = 0  # 0: H / Hq
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "dynamic", "yarn")
    ignored: ClassVar[re.Pattern[str]] = re.compile(r".*\.rotary_emb\.inv_freq")
    """Tensors of a checkpoint that hold nothing to convert."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layers = config.integer("num_hidden_layers")
        self.hidden = config.integer("hidden_size")
        self.ffn = config.integer("intermediate_size")
        self.heads = config.integer("num_attention_heads")
        self.kv_heads = config.integer("num_key_value_heads", self.heads)
        self.head_dim = config.integer("head_dim", self.default_head_dim or max(1, self.hidden // self.heads))
        self.vocab_size = config.integer("vocab_size")
        self.rope = self.read_rope()
        config.require(*self.activation, self.activation[1])
        if self.heads % self.kv_heads:
            raise config.fault("num_key_value_heads", self.kv_heads, f"a divisor of the {self.heads} attention heads")
        if self.head_dim % 2:
            raise config.fault("head_dim", self.head_dim, "an even number")
        if config.get("quantization_config") is not None:
            method = config.section("quantization_config").get("quant_method")
            raise config.fault("quantization_config", method, "a checkpoint that is not quantised")
        is_mistral = config.get("model_type") == "mistral"  # which has no switch
        if config.get("sliding_window") is not None and config.flag("use_sliding_window", is_mistral):
            logger.warning("sliding-window attention has no form in %s files and is left out", self.architecture)

    def read_rope(self) -> Rope:
        return Rope.read(self.config, self.rope_kinds)

    def key_values(self) -> list[KeyValue]:
        prefix = self.architecture
        keys = [
            KeyValue(f"{prefix}.block_count", "u32", self.layers),
            KeyValue(f"{prefix}.context_length", "u32", self.rope.context_length),
            KeyValue(f"{prefix}.embedding_length", "u32", self.hidden),
            KeyValue(f"{prefix}.feed_forward_length", "u32", self.ffn),
            KeyValue(f"{prefix}.attention.head_count", "u32", self.heads),
            KeyValue(f"{prefix}.attention.head_count_kv", "u32", self.kv_heads),
            *self.rope.key_values(prefix),
            KeyValue(f"{prefix}.attention.layer_norm_rms_epsilon", "f32", self.config.number("rms_norm_eps")),
            KeyValue(f"{prefix}.vocab_size", "u32", self.vocab_size),
        ]
        if self.config.get("head_dim") is not None or self.heads * self.head_dim != self.hidden:
            keys.append(KeyValue(f"{prefix}.attention.key_length", "u32", self.head_dim))
            keys.append(KeyValue(f"{prefix}.attention.value_length", "u32", self.head_dim))
        return keys

    def tensors(self, present: Container[str]) -> Iterator[Tensor]:
        """Every tensor of the file, in order. `present`: the names in the checkpoint."""
        table = (self.vocab_size, self.hidden)
        yield Tensor("token_embd.weight", table, "model.embed_tokens.weight")
        for layer in range(self.layers):
            yield from self._block(f"blk.{layer}.", f"model.layers.{layer}.")
        yield Tensor("output_norm.weight", (self.hidden,), "model.norm.weight")
        if not self.is_tied(present):
            yield Tensor("output.weight", table, "lm_head.weight")

    def is_tied(self, present: Container[str]) -> bool:
        """Without an output matrix loaders use the embeddings. Older checkpoints do not say; then its absence does."""
        return self.config.flag("tie_word_embeddings", "lm_head.weight" not in present)

    def is_ignored(self, name: str, present: Container[str]) -> bool:
        return self.ignored.fullmatch(name) is not None or (name == "lm_head.weight" and self.is_tied(present))

    def attention_extras(self, block: str, layer: str) -> Iterator[Tensor]:
        """Tensors of a layer's attention besides its four matrices."""
        yield from ()

    def norms(self, block: str, layer: str) -> Iterator[Tensor]:
        yield Tensor(block + "attn_norm.weight", (self.hidden,), layer + "input_layernorm.weight")
        yield Tensor(block + "ffn_norm.weight", (self.hidden,), layer + "post_attention_layernorm.weight")

    def feed_forward(self, block: str, layer: str) -> Iterator[Tensor]:
        hidden, ffn = self.hidden, self.ffn
        yield Tensor(block + "ffn_gate.weight", (ffn, hidden), layer + "mlp.gate_proj.weight")
        yield Tensor(block + "ffn_up.weight", (ffn, hidden), layer + "mlp.up_proj.weight")
        yield Tensor(block + "ffn_down.weight", (hidden, ffn), layer + "mlp.down_proj.weight")

    def rotate(self, heads: int) -> Rearrange | None:
        """How the rows of `heads` query or key heads are moved for the rotary layout of the architecture."""
        return None

    def qkv_biases(self, block: str, layer: str) -> Iterator[Tensor]:
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_rows, k_rows = self.rotate(self.heads), self.rotate(self.kv_heads)
        yield Tensor(block + "attn_q.bias", (q_size,), layer + "self_attn.q_proj.bias", q_rows)
        yield Tensor(block + "attn_k.bias", (kv_size,), layer + "self_attn.k_proj.bias", k_rows)
        yield Tensor(block + "attn_v.bias", (kv_size,), layer + "self_attn.v_proj.bias")

    def _block(self, block: str, layer: str) -> Iterator[Tensor]:
        hidden = self.hidden
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_rows, k_rows = self.rotate(self.heads), self.rotate(self.kv_heads)
        yield from self.norms(block, layer)
        yield Tensor(block + "attn_q.weight", (q_size, hidden), layer + "self_attn.q_proj.weight", q_rows)
        yield Tensor(block + "attn_k.weight", (kv_size, hidden), layer + "self_attn.k_proj.weight", k_rows)
        yield Tensor(block + "attn_v.weight", (kv_size, hidden), layer + "self_attn.v_proj.weight")
        yield Tensor(block + "attn_output.weight", (hidden, q_size), layer + "self_attn.o_proj.weight")
        yield from self.attention_extras(block, layer)
        yield from self.feed_forward(block, layer)
