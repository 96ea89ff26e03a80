"""`qwen35moe`: Qwen3.5 with a mixture of experts in every block, and a gated expert that every token uses."""

from collections.abc import Iterator

from pyllama.gguf import KeyValue

from ..config import Config
from ..tensor import Tensor
from .dense import Layer
from .experts import Experts
from .qwen35 import Qwen35


class Qwen35Moe(Qwen35):
    architecture = "qwen35moe"
    hf_architectures = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
    model_types = ("qwen3_5_moe", "qwen3_5_moe_text")
    default_experts = (256, 8)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("norm_topk_prob", True, True)  # loaders always make the weights of a token sum to 1
        config.require("decoder_sparse_step", 1, 1)
        config.require("mlp_only_layers", [], [])
        count, used = self.default_experts
        self.experts = Experts(
            count=config.integer("num_experts", count),
            used=config.integer("num_experts_per_tok", used),
            ffn=config.integer("moe_intermediate_size", 512),
            module="mlp",
            shared_ffn=config.integer("shared_expert_intermediate_size", 512),
        )
        self.experts.check(config)

    def read_ffn(self) -> int:
        return 0

    def key_values(self) -> list[KeyValue]:
        prefix, experts = self.architecture, self.experts
        return [*super().key_values(), *experts.key_values(prefix), *experts.width_keys(prefix)]

    def feed_forward(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.experts.tensors(layer, self.hidden)
