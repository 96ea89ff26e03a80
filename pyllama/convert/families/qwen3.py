"""`qwen3`: Qwen3. Queries and keys are normalised per head; heads may be wider than hidden / heads."""

from collections.abc import Iterator

from ..config import Config
from ..tensor import Tensor
from .dense import DenseFamily, Layer


class Qwen3(DenseFamily):
    architecture = "qwen3"
    hf_architectures = ("Qwen3ForCausalLM",)
    model_types = ("qwen3",)
    default_head_dim = 128

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("attention_bias", False, False)

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.head_norms(layer)
