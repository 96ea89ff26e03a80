"""Counters and gauges of `/metrics`: names, order and types of llama-server, in the Prometheus text format.

The official client library does not write them: its text writer forces the ending `_total` on every counter, while the
names here are a contract (`n_tokens_max` is a counter without it). A test reads the text with that library's parser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Totals:
    """Sums since the start. Written by the engine thread only."""

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    n_decode: int = 0
    n_tokens_max: int = 0
    n_busy_slots: int = 0  # summed over decode calls
    predicted_steps: int = 0  # generated tokens without the first of each answer
    n_drafts: int = 0  # that were verified
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    drafts_accepted_at: list[int] = field(default_factory=list)  # drafts whose i-th token stood

    def add_draft(self, n_drafted: int, n_accepted: int) -> None:
        self.n_drafts += 1
        self.draft_tokens += n_drafted
        self.draft_tokens_accepted += n_accepted
        self.drafts_accepted_at += [0] * (n_drafted - len(self.drafts_accepted_at))
        for place in range(n_accepted):
            self.drafts_accepted_at[place] += 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape shows."""

    totals: Totals
    since: Totals  # totals at the previous scrape
    requests_processing: int
    requests_deferred: int
    cache: Any  # pyllama._engine.CacheUsage


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _prompt_rate(s: Snapshot) -> float:
    return _rate(s.totals.prompt_tokens - s.since.prompt_tokens, s.totals.prompt_seconds - s.since.prompt_seconds)


def _predicted_rate(s: Snapshot) -> float:
    return _rate(
        s.totals.predicted_steps - s.since.predicted_steps, s.totals.predicted_seconds - s.since.predicted_seconds
    )


METRICS: tuple[tuple[str, str, str, Callable[[Snapshot], float]], ...] = (
    (
        "prompt_tokens_total",
        "counter",
        "Prompt tokens computed; cached ones are not counted.",
        lambda s: s.totals.prompt_tokens,
    ),
    (
        "prompt_tokens_cached_total",
        "counter",
        "Prompt tokens taken from the cache.",
        lambda s: s.totals.prompt_tokens_cached,
    ),
    ("prompt_seconds_total", "counter", "Time spent on prompts, in seconds.", lambda s: s.totals.prompt_seconds),
    ("tokens_predicted_total", "counter", "Generated tokens.", lambda s: s.totals.predicted_tokens),
    (
        "tokens_predicted_seconds_total",
        "counter",
        "Time spent on generation, in seconds.",
        lambda s: s.totals.predicted_seconds,
    ),
    ("n_decode_total", "counter", "Engine steps.", lambda s: s.totals.n_decode),
    ("n_tokens_max", "counter", "Longest sequence seen, in tokens.", lambda s: s.totals.n_tokens_max),
    ("spec_decode_num_draft_tokens_total", "counter", "Draft tokens.", lambda s: s.totals.draft_tokens),
    (
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Accepted draft tokens.",
        lambda s: s.totals.draft_tokens_accepted,
    ),
    ("spec_decode_num_drafts_total", "counter", "Verification steps.", lambda s: s.totals.n_drafts),
    ("prompt_tokens_seconds", "gauge", "Prompt tokens per second since the last scrape.", _prompt_rate),
    ("predicted_tokens_seconds", "gauge", "Generated tokens per second since the last scrape.", _predicted_rate),
    ("requests_processing", "gauge", "Busy slots.", lambda s: s.requests_processing),
    ("requests_deferred", "gauge", "Waiting requests.", lambda s: s.requests_deferred),
    (
        "n_busy_slots_per_decode",
        "gauge",
        "Busy slots per engine step, on average.",
        lambda s: _rate(s.totals.n_busy_slots, s.totals.n_decode),
    ),
    # llama-server has none of these.
    (
        "prompt_cache_limit_bytes",
        "gauge",
        "Host memory that the prompt cache may take.",
        lambda s: math.inf if s.cache.budget < 0 else s.cache.budget,
    ),
    ("prompt_cache_bytes", "gauge", "Host memory that the prompt cache takes.", lambda s: s.cache.used),
    ("prompt_cache_kv_bytes", "gauge", "Thereof KV pages.", lambda s: s.cache.kv_bytes),
    ("prompt_cache_checkpoint_bytes", "gauge", "Thereof recurrent states.", lambda s: s.cache.checkpoint_bytes),
    ("prompt_cache_checkpoints", "gauge", "Recurrent states in the prompt cache.", lambda s: s.cache.n_checkpoints),
    (
        "prompt_cache_evicted_total",
        "counter",
        "Entries that the prompt cache dropped to make room.",
        lambda s: s.cache.n_evicted,
    ),
)


def render(snapshot: Snapshot) -> str:
    """The exposition text, version 0.0.4. Whole numbers are written in full, so that no counter loses digits."""
    lines: list[str] = []
    for name, kind, help_text, value_of in METRICS:
        value = value_of(snapshot)
        number = "+Inf" if value == math.inf else str(value) if isinstance(value, int) else f"{value:.9g}"
        lines += [f"# HELP llamacpp:{name} {help_text}", f"# TYPE llamacpp:{name} {kind}", f"llamacpp:{name} {number}"]
    name, at = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total", snapshot.totals.drafts_accepted_at
    if at:  # as many samples as the longest draft had tokens
        lines += [f"# HELP {name} Drafts whose token at the position was accepted.", f"# TYPE {name} counter"]
        lines += [f'{name}{{position="{place}"}} {count}' for place, count in enumerate(tuple(at))]
    return "\n".join(lines) + "\n"
