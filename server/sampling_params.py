"""The sampling parameters of one request, as a value, and the sampler made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.sampling_values import SamplingValues
from pyllama.server.errors import InvalidRequest

RANDOM_SEED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingValues):
    """Values after defaults, limits and clamping. Field meanings: docs/server.md."""

    seed: int = RANDOM_SEED
    ignore_eos: bool = False

    def for_choice(self, choice: int) -> SamplingParams:
        """The parameters of the `choice`-th completion of one prompt: with a given seed each choice has its own."""
        if choice == 0 or self.seed == RANDOM_SEED:
            return self
        return replace(self, seed=(self.seed + choice) % (1 << 32))


def with_end_tokens_banned(params: SamplingParams, eog_ids: Sequence[int]) -> SamplingParams:
    """`ignore_eos`: the end-of-generation tokens are banned after the user's biases."""
    return replace(params, logit_bias=params.logit_bias + tuple((token, -math.inf) for token in eog_ids))


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
            dry_breakers=parts.dry_breakers,
            infill_vocabulary=parts.infill_vocabulary,
            **params.arguments(),
        )
    except InvalidArgument as error:
        raise InvalidRequest(f"Failed to initialize samplers: {error}") from error
