"""The sampling parameters of one request, as a value, and the sampler made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.server.errors import InvalidRequest

RANDOM_SEED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Values after defaults, limits and clamping. Field meanings: docs/server.md."""

    seed: int = RANDOM_SEED
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
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )

    def for_choice(self, choice: int) -> SamplingParams:
        """The parameters of the `choice`-th completion of one prompt: with a given seed each choice has its own."""
        if choice == 0 or self.seed == RANDOM_SEED:
            return self
        return replace(self, seed=(self.seed + choice) % (1 << 32))


def with_end_tokens_banned(params: SamplingParams, eog_ids: Sequence[int]) -> SamplingParams:
    """`ignore_eos`: the end-of-generation tokens are banned after the user's biases."""
    return replace(params, logit_bias=params.logit_bias + tuple((token, -math.inf) for token in eog_ids))


def banned_tokens(params: SamplingParams) -> frozenset[int]:
    """Tokens that the sampler will never draw."""
    return frozenset(token for token, bias in params.logit_bias if bias == -math.inf)


def uses_dry(params: SamplingParams) -> bool:
    """Whether the DRY sampler acts at all, and its breakers are needed."""
    return (
        params.mirostat == 0
        and "dry" in params.samplers
        and params.dry_multiplier != 0
        and params.dry_base >= 1
        and params.dry_penalty_last_n > 0
    )


def uses_infill(params: SamplingParams) -> bool:
    """Whether the infill sampler acts, and the texts of the vocabulary are needed."""
    return params.mirostat == 0 and "infill" in params.samplers


@dataclass(frozen=True, slots=True)
class SamplerParts:
    """What samplers share: `pyllama._engine.DryBreakers` and `InfillVocabulary`, where they are needed."""

    dry_breakers: Any = None
    infill_vocabulary: Any = None


def make_sampler(params: SamplingParams, n_vocab: int, factory: Callable[..., Any], parts: SamplerParts) -> Any:
    """A sampler with its own generator and history. Raises `InvalidRequest`. factory: `pyllama._engine.Sampler`."""
    try:
        return factory(
            n_vocab,
            seed=params.seed,
            temperature=params.temperature,
            dynatemp_range=params.dynatemp_range,
            dynatemp_exponent=params.dynatemp_exponent,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            top_n_sigma=params.top_n_sigma,
            typical_p=params.typical_p,
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
            min_keep=params.min_keep,
            repeat_last_n=params.repeat_last_n,
            repeat_penalty=params.repeat_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            dry_multiplier=params.dry_multiplier,
            dry_base=params.dry_base,
            dry_allowed_length=params.dry_allowed_length,
            dry_penalty_last_n=params.dry_penalty_last_n,
            dry_breakers=parts.dry_breakers,
            infill_vocabulary=parts.infill_vocabulary,
            mirostat=params.mirostat,
            mirostat_tau=params.mirostat_tau,
            mirostat_eta=params.mirostat_eta,
            adaptive_target=params.adaptive_target,
            adaptive_decay=params.adaptive_decay,
            logit_bias=params.logit_bias,
            samplers=params.samplers,
        )
    except InvalidArgument as error:
        raise InvalidRequest(f"Failed to initialize samplers: {error}") from error
