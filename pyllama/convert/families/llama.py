"""`llama`: Llama 1 to 3, Mistral, SmolLM2, TinyLlama. Rotary positions on interleaved pairs, optional biases."""

from collections.abc import Container, Iterator
from functools import partial
from typing import Any

from numpy.typing import NDArray

from pyllama.gguf import KeyValue

from ..config import Config
from ..tensor import Tensor
from .dense import DenseFamily, Rearrange


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
        return [*super().key_values(), KeyValue("llama.rope.dimension_count", "u32", self.head_dim)]

    def tensors(self, present: Container[str]) -> Iterator[Tensor]:
        divisors = self.rope.divisors(self.head_dim)
        if divisors is not None:
            yield Tensor("rope_freqs.weight", divisors.shape, divisors)
        yield from super().tensors(present)

    def attention_extras(self, block: str, layer: str) -> Iterator[Tensor]:
        if self.attention_bias:
            yield from self.qkv_biases(block, layer)
            yield Tensor(block + "attn_output.bias", (self.hidden,), layer + "self_attn.o_proj.bias")
        if self.mlp_bias:
            yield Tensor(block + "ffn_gate.bias", (self.ffn,), layer + "mlp.gate_proj.bias")
            yield Tensor(block + "ffn_up.bias", (self.ffn,), layer + "mlp.up_proj.bias")
            yield Tensor(block + "ffn_down.bias", (self.hidden,), layer + "mlp.down_proj.bias")

    def rotate(self, heads: int) -> Rearrange:
        return partial(interleave_halves, heads=heads)


def interleave_halves(rows: NDArray[Any], *, heads: int) -> NDArray[Any]:
    """Row s D/2 + p of a head goes to 2p + s: checkpoints rotate p with p + D/2, `llama` files 2p with 2p + 1."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
