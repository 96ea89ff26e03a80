"""Mixtral: the form of `llama` with a mixture of experts in every block."""

from collections.abc import Iterator

from pyllama.gguf import KeyValue

from ..config import Config
from ..tensor import Tensor
from .dense import Layer
from .experts import Experts
from .llama import Llama


class Mixtral(Llama):
    hf_architectures = ("MixtralForCausalLM",)
    model_types = ("mixtral",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.experts = Experts(
            count=config.integer("num_local_experts", 8),
            used=config.integer("num_experts_per_tok", 2),
            ffn=self.ffn,
            module="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
        )
        self.experts.check(config)

    def key_values(self) -> list[KeyValue]:
        return [*super().key_values(), *self.experts.key_values("llama")]

    def feed_forward(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.experts.tensors(layer, self.hidden)
