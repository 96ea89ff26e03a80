"""Sampler names: the spellings users write, their letters, and which of a list the engine runs today."""

from collections.abc import Sequence

LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "e": "penalties",
    "a": "adaptive_p",
}

ALIASES = {
    "topk": "top_k",
    "typ": "typ_p",
    "typp": "typ_p",
    "topp": "top_p",
    "nucleus": "top_p",
    "topnsigma": "top_n_sigma",
    "minp": "min_p",
    "temp": "temperature",
    "adaptivep": "adaptive_p",
}

ENGINE_SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")

NOT_BUILT = ("infill", "adaptive_p")
"""Samplers the engine lacks that act as soon as they are listed. The others it lacks are off at their defaults."""


def canonical_name(name: str) -> str | None:
    """`Top-K` -> `top_k`; None for a name nobody knows."""
    plain = name.strip().lower().replace("-", "_")
    if plain in LETTERS.values():
        return plain
    return ALIASES.get(plain)


def engine_samplers(samplers: Sequence[str]) -> tuple[str, ...]:
    """The part of a chain that the engine runs, in order. The rest is neutral: the option parser has checked that."""
    return tuple(name for name in samplers if name in ENGINE_SAMPLERS)
