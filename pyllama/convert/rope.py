"""Rotary positions: base and scaling from a configuration, as GGUF keys and as the tensor of per-pair divisors."""

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyllama.gguf import KeyValue

from .config import Config

logger = logging.getLogger(__name__)

_BASIC = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Positions of three axes; what they say is the family's to read, and ordinary text does not depend on it.
_AXES = {"mrope_section", "mrope_interleaved"}
# What each kind of scaling may say. A setting outside the list would be lost.
_KNOWN = {
    "default": _BASIC,
    "linear": _BASIC | {"factor"},
    "dynamic": _BASIC | {"factor", "original_max_position_embeddings"},
    "yarn": _BASIC
    | {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "finetuned"},
    "llama3": _BASIC | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def rope_section(config: Config) -> Config:
    """The rotary settings in either spelling; empty where there are none."""
    return config.section("rope_parameters" if config.get("rope_parameters") else "rope_scaling")


@dataclass(frozen=True, slots=True)
class Rope:
    """base: theta. kind: one of `_KNOWN`. scaling: the settings of that kind."""

    base: float
    kind: str
    scaling: Config
    context_length: int

    @classmethod
    def read(
        cls, config: Config, kinds: Collection[str], scaling: Config | None = None, *, has_axes: bool = False
    ) -> "Rope":
        """Both spellings: `rope_parameters`, and `rope_theta` beside `rope_scaling`; or the given section.

        kinds: what may be used. has_axes: of a family with positions of three axes and heads that rotate in part.
        """
        if scaling is None:
            scaling = rope_section(config)
        base = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in kinds:
            raise scaling.fault("rope_type", kind, f"one of {', '.join(kinds)}")
        for key in scaling.keys() - _KNOWN[kind] - (_AXES if has_axes else set()):
            if scaling.get(key) is not None:
                raise scaling.fault(key, scaling.get(key), f"no such setting with {kind} scaling")
        for settings in () if has_axes else (config, scaling):
            settings.require("partial_rotary_factor", 1.0, 1.0)
        return cls(base, kind, scaling, config.integer("max_position_embeddings"))

    def key_values(self, prefix: str) -> list[KeyValue]:
        keys = [KeyValue(f"{prefix}.rope.freq_base", "f32", self.base)]
        if self.kind == "dynamic":
            logger.warning("dynamic rope scaling beyond the trained context has no form in GGUF and is left out")
        elif self.kind in ("linear", "yarn"):
            factor = self._factor()
            keys.append(KeyValue(f"{prefix}.rope.scaling.type", "string", self.kind))
            keys.append(KeyValue(f"{prefix}.rope.scaling.factor", "f32", factor))
            if self.kind == "yarn":
                keys += self._yarn(f"{prefix}.rope.scaling.", factor)
        return keys

    def divisors(self, head_dim: int) -> NDArray[np.float32] | None:
        """`[head_dim / 2]`: what the angle of each pair is divided by; None without llama3 scaling.

        Wavelengths beyond context / low_freq_factor are stretched by `factor`, those below context / high_freq_factor
        stay, and in between the two are blended.
        """
        if self.kind != "llama3":
            return None
        factor = self._factor()
        low, high = self.scaling.number("low_freq_factor"), self.scaling.number("high_freq_factor")
        if not 0 < low < high:
            raise self.scaling.fault("high_freq_factor", high, f"a number above low_freq_factor, which is {low}")
        context = self.scaling.integer("original_max_position_embeddings")
        wavelengths = 2 * math.pi * self.base ** (np.arange(0, head_dim, 2) / head_dim)
        share = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)  # of the unscaled frequency
        return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)

    def _factor(self) -> float:
        factor = self.scaling.number("factor")
        if not factor >= 1.0:
            raise self.scaling.fault("factor", factor, "a number of at least 1")
        return factor

    def _yarn(self, prefix: str, factor: float) -> list[KeyValue]:
        original = self.scaling.integer("original_max_position_embeddings", self.context_length)
        keys = [KeyValue(prefix + "original_context_length", "u32", original)]
        if self.scaling.get("attention_factor") is not None:
            # Loaders multiply by the usual magnitude themselves.
            usual = 0.1 * math.log(factor) + 1.0
            keys.append(KeyValue(prefix + "attn_factor", "f32", self.scaling.number("attention_factor") / usual))
        for name in ("beta_fast", "beta_slow"):
            if self.scaling.get(name) is not None:
                keys.append(KeyValue(f"{prefix}yarn_{name}", "f32", self.scaling.number(name)))
        return keys
