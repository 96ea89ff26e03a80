"""Reads the argument values of `Llama`: counts, seeds, types by name or GGUF id, callables."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from pyllama.errors import InvalidArgument

# GGUF type ids of the cache types that exist, and the names of others that callers may know.
_CACHE_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
_SPLIT_MODES = {0: "none", 1: "layer", 2: "row", 3: "tensor"}
_ROPE_SCALING = {-1: None, 0: "none", 1: "linear", 2: "yarn", 3: "longrope"}


def read_callables(value: Any) -> tuple[Any, ...]:
    """One callable, a sequence of them (also a sequence that is itself callable, as in llama-cpp-python), or None."""
    if value is None:
        return ()
    items = tuple(value) if isinstance(value, Sequence) else (value,)
    for item in items:
        if not callable(item):
            raise TypeError(f"logits_processor and stopping_criteria take callables, found {type(item).__name__}")
    return items


LARGEST_COUNT = 2**31 - 1


def read_count(name: str, value: Any, *, at_least: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, found {type(value).__name__}") from None
    if number < at_least:
        raise InvalidArgument(f"{name} must be >= {at_least}, found {number}")
    if number > LARGEST_COUNT:
        raise InvalidArgument(f"{name} must be <= {LARGEST_COUNT}, found {number}")
    return number


def read_seed(value: Any) -> int:
    """Any integer, taken modulo 2^32, so that -1 is the random seed."""
    try:
        return operator.index(value) & 0xFFFFFFFF
    except TypeError:
        raise TypeError(f"seed must be an integer, found {type(value).__name__}") from None


def read_n_keep(value: Any, tokenizer: Any) -> int:
    """Tokens that a context shift keeps: a BOS token comes on top; -1 (the whole prompt, with it) stays."""
    n_keep = read_count("n_keep", value, at_least=-1)
    return n_keep if n_keep < 0 else n_keep + bool(tokenizer.add_bos)


def require_shift(engine: Any, model: Any, *, keeps_all_logits: bool) -> None:
    """Raises `InvalidArgument` when `context_shift` cannot be had."""
    if not engine.can_shift:
        raise InvalidArgument(
            f"context_shift: tokens of a {model.architecture} model cannot be moved to other positions"
        )
    if keeps_all_logits:
        raise InvalidArgument("context_shift and logits_all exclude each other: logits are kept by position")


def cache_type(name: str, value: int | str | None) -> str:
    if value is None:
        return "f16"
    if isinstance(value, str):
        return value.lower()
    if value not in _CACHE_TYPES:
        known = ", ".join(f"{number} ({label})" for number, label in _CACHE_TYPES.items())
        raise InvalidArgument(f"{name}={value!r} is not the GGUF id of a cache type; known: {known}")
    return _CACHE_TYPES[value]


def rope_scaling(value: int | str | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if value not in _ROPE_SCALING:
        raise InvalidArgument(f"rope_scaling_type={value!r}; known: {_ROPE_SCALING}")
    return _ROPE_SCALING[value]


def read_gpu_layers(value: int | str | None, *, has_devices: bool) -> int | str | None:
    """As `pyllama.placement.PlacementRequest` takes it. Negative numbers are all layers, as in llama-cpp-python."""
    if value is None:
        return None if has_devices else 0
    if isinstance(value, str):
        if value not in ("auto", "all"):
            raise InvalidArgument(f"n_gpu_layers={value!r}; expected a number, 'auto' or 'all'")
        return None if value == "auto" else value
    n_layers = operator.index(value)
    return n_layers if n_layers >= 0 else "all"


def read_split_mode(value: int | str) -> str:
    if isinstance(value, str):
        return value
    if value not in _SPLIT_MODES:
        raise InvalidArgument(f"split_mode={value!r}; known: {_SPLIT_MODES}")
    return _SPLIT_MODES[value]


def architecture_number(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(f"{metadata.get('general.architecture')}.{key}", 0)
    return value if isinstance(value, int) else 0


def metadata_text(value: str | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def token_or_none(token: int | None) -> int:
    return -1 if token is None else token
