"""How tokens are drawn, as a value that samplers are made from. Who takes the numbers from a user checks them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
ALL_SAMPLERS = (*DEFAULT_SAMPLERS, "infill", "adaptive_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingValues:
    """Meanings: docs/sampling.md."""

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS

    @property
    def uses_dry(self) -> bool:
        """Whether the DRY sampler acts at all, and its breakers are needed."""
        is_on = self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n > 0
        return is_on and self.mirostat == 0 and "dry" in self.samplers

    @property
    def uses_infill(self) -> bool:
        """Whether the infill sampler acts, and the texts of the vocabulary are needed."""
        return self.mirostat == 0 and "infill" in self.samplers

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that are never drawn."""
        return frozenset(token for token, bias in self.logit_bias if bias == -math.inf)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `pyllama._engine.Sampler`, without the seed and what is made of the vocabulary."""
        return {name: getattr(self, name) for name in SamplingValues.__slots__ if name != "dry_sequence_breakers"}
