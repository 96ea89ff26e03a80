"""`qwen3moe`: Qwen3 with a mixture of experts in every block."""

from collections.abc import Iterator

from pyllama.gguf import KeyValue

from ..config import Config
from ..tensor import Tensor
from .dense import Layer
from .experts import Experts
from .qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    architecture = "qwen3moe"
    hf_architectures = ("Qwen3MoeForCausalLM",)
    model_types = ("qwen3_moe",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("norm_topk_prob", True, False)  # loaders always make the weights of a token sum to 1
        config.require("decoder_sparse_step", 1, 1)
        config.require("mlp_only_layers", [], [])
        self.experts = Experts(
            count=config.integer("num_experts", 128),
            used=config.integer("num_experts_per_tok", 8),
            ffn=config.integer("moe_intermediate_size", 768),
            module="mlp",
        )
        self.experts.check(config)

    def key_values(self) -> list[KeyValue]:
        experts = self.experts
        return [*super().key_values(), *experts.key_values("qwen3moe"), *experts.width_keys("qwen3moe")]

    def feed_forward(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.experts.tensors(layer, self.hidden)
