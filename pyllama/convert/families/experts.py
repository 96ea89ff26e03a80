"""A mixture of experts in place of the dense feed-forward: stacked matrices and the router that chooses among them."""

from collections.abc import Iterator
from dataclasses import dataclass

from pyllama.gguf import KeyValue

from ..config import Config
from ..tensor import Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """module: of a layer, which holds the router `gate` and `experts`. gate, up, down: an expert's projections."""

    count: int
    used: int  # by a token
    ffn: int  # of one expert
    module: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def check(self, config: Config) -> None:
        if self.used > self.count:
            raise config.fault("num_experts_per_tok", self.used, f"at most the {self.count} experts")

    def key_values(self, prefix: str) -> list[KeyValue]:
        return [
            KeyValue(f"{prefix}.expert_count", "u32", self.count),
            KeyValue(f"{prefix}.expert_used_count", "u32", self.used),
        ]

    def tensors(self, block: str, layer: str, hidden: int) -> Iterator[Tensor]:
        module = f"{layer}{self.module}."

        def stack(name: str, rows: int, columns: int) -> Tensor:
            source = {"gate": self.gate, "up": self.up, "down": self.down}[name]
            sources = tuple(f"{module}experts.{expert}.{source}.weight" for expert in range(self.count))
            return Tensor(f"{block}ffn_{name}_exps.weight", (self.count, rows, columns), sources)

        yield Tensor(block + "ffn_gate_inp.weight", (self.count, hidden), module + "gate.weight")
        yield stack("gate", self.ffn, hidden)
        yield stack("up", self.ffn, hidden)
        yield stack("down", hidden, self.ffn)
