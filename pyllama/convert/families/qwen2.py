"""`qwen2`: Qwen2 and Qwen2.5. Biases on queries, keys and values."""

from collections.abc import Iterator

from ..config import Config
from ..tensor import Tensor
from .dense import DenseFamily, Layer


class Qwen2(DenseFamily):
    architecture = "qwen2"
    hf_architectures = ("Qwen2ForCausalLM",)
    model_types = ("qwen2",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.heads * self.head_dim != self.hidden:
            raise config.fault("head_dim", self.head_dim, f"{self.hidden} / {self.heads}")

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.qkv_biases(layer)
