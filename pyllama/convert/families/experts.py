"""A mixture of experts in place of the dense feed-forward: stacked matrices, the router that chooses among them, and
perhaps one expert that every token uses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pyllama.gguf import KeyValue

from ..config import Config
from ..tensor import Tensor
from .dense import Layer


@dataclass(frozen=True, slots=True)
class Experts:
    """module: of a layer, which holds the router `gate` and `experts`. gate, up, down: an expert's projections.

    A checkpoint stores each expert apart, or all of them as `experts.gate_up_proj` [experts, 2 ffn, hidden] and
    `experts.down_proj` [experts, hidden, ffn].
    """

    count: int
    used: int  # by a token
    ffn: int  # of one expert
    module: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared_ffn: int = 0  # of the expert that every token uses; 0: there is none

    def check(self, config: Config) -> None:
        if self.used > self.count:
            raise config.fault("num_experts_per_tok", self.used, f"at most the {self.count} experts")

    def key_values(self, prefix: str) -> list[KeyValue]:
        return [
            KeyValue(f"{prefix}.expert_count", "u32", self.count),
            KeyValue(f"{prefix}.expert_used_count", "u32", self.used),
        ]

    def width_keys(self, prefix: str) -> list[KeyValue]:
        """For architectures whose experts are not as wide as their dense feed-forward."""
        keys = [KeyValue(f"{prefix}.expert_feed_forward_length", "u32", self.ffn)]
        if self.shared_ffn:
            keys.append(KeyValue(f"{prefix}.expert_shared_feed_forward_length", "u32", self.shared_ffn))
        return keys

    def tensors(self, layer: Layer, hidden: int) -> Iterator[Tensor]:
        block, module = layer.block, f"{layer.module}{self.module}."
        yield Tensor(block + "ffn_gate_inp.weight", (self.count, hidden), module + "gate.weight")
        if module + "experts.gate_up_proj" in layer.stored:
            yield from self._fused(block, module + "experts.", hidden)
        else:
            yield self._stack(block, module, "gate", self.gate, (self.ffn, hidden))
            yield self._stack(block, module, "up", self.up, (self.ffn, hidden))
            yield self._stack(block, module, "down", self.down, (hidden, self.ffn))
        if self.shared_ffn:
            yield from self._shared(block, module, hidden)

    def _stack(self, block: str, module: str, name: str, projection: str, shape: tuple[int, int]) -> Tensor:
        sources = tuple(f"{module}experts.{expert}.{projection}.weight" for expert in range(self.count))
        return Tensor(f"{block}ffn_{name}_exps.weight", (self.count, *shape), sources)

    def _fused(self, block: str, experts: str, hidden: int) -> Iterator[Tensor]:
        for half, name in enumerate(("gate", "up")):
            yield Tensor(
                f"{block}ffn_{name}_exps.weight",
                (self.count, self.ffn, hidden),
                experts + "gate_up_proj",
                rows=partial(half_of_experts, half, self.count, self.ffn),
                source_shapes=((self.count, 2 * self.ffn, hidden),),
            )
        yield Tensor(f"{block}ffn_down_exps.weight", (self.count, hidden, self.ffn), experts + "down_proj")

    def _shared(self, block: str, module: str, hidden: int) -> Iterator[Tensor]:
        expert, ffn = module + "shared_expert.", self.shared_ffn
        gate = module + "shared_expert_gate.weight"
        yield Tensor(block + "ffn_gate_inp_shexp.weight", (hidden,), gate, source_shapes=((1, hidden),))
        yield Tensor(block + "ffn_gate_shexp.weight", (ffn, hidden), expert + "gate_proj.weight")
        yield Tensor(block + "ffn_up_shexp.weight", (ffn, hidden), expert + "up_proj.weight")
        yield Tensor(block + "ffn_down_shexp.weight", (hidden, ffn), expert + "down_proj.weight")


def half_of_experts(half: int, count: int, ffn: int) -> NDArray[np.int64]:
    """The rows of the gates (0) or of what they gate (1) among those of all experts: 2 `ffn` of each, gates first."""
    return (np.arange(count)[:, None] * 2 * ffn + half * ffn + np.arange(ffn)).reshape(-1)
