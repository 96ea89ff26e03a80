"""`llama`: Llama 1 to 3, Mistral, SmolLM2, TinyLlama. Rotary positions on interleaved pairs, optional biases."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pyllama.gguf import KeyValue

from ..config import Config
from ..safetensors import StoredTensor
from ..tensor import Order, Tensor
from .dense import DenseFamily, Layer


class Llama(DenseFamily):
    architecture = "llama"
    hf_architectures = ("LlamaForCausalLM", "MistralForCausalLM")
    model_types = ("llama", "mistral")
    rope_kinds = (*DenseFamily.rope_kinds, "llama3")
    tokenizer_kinds = ("byte-level", "sentencepiece", "byte-fallback")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention_bias = config.flag("attention_bias", False)
        self.mlp_bias = config.flag("mlp_bias", False)

    def key_values(self) -> list[KeyValue]:
        return [*super().key_values(), KeyValue(f"{self.architecture}.rope.dimension_count", "u32", self.head_dim)]

    def tensors(self, stored: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        divisors = self.rope.divisors(self.head_dim)
        if divisors is not None:
            yield Tensor("rope_freqs.weight", divisors.shape, divisors)
        yield from super().tensors(stored)

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        block, module = layer.block, layer.module
        if self.attention_bias:
            yield from self.qkv_biases(layer)
            yield Tensor(block + "attn_output.bias", (self.hidden,), module + "self_attn.o_proj.bias")
        if self.mlp_bias:
            yield Tensor(block + "ffn_gate.bias", (self.ffn,), module + "mlp.gate_proj.bias")
            yield Tensor(block + "ffn_up.bias", (self.ffn,), module + "mlp.up_proj.bias")
            yield Tensor(block + "ffn_down.bias", (self.hidden,), module + "mlp.down_proj.bias")

    def rotate(self, heads: int) -> Order:
        return partial(interleaved_halves, heads, self.head_dim)


def interleaved_halves(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Row s D/2 + p of a head goes to 2p + s: checkpoints rotate p with p + D/2, `llama` files 2p with 2p + 1."""
    return np.arange(heads * head_dim).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
