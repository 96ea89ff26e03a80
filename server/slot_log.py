"""Log lines about slots, in the words that scripts look for in llama-server's log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pyllama.server.speculation import log_drafts

if TYPE_CHECKING:
    from pyllama.server.generation import Generation
    from pyllama.server.slots import Slot

log = logging.getLogger("pyllama.server.slot")

REPORT_SECONDS = 3.0  # of a prompt before it is reported, and between reports of a generation
FIRST_REPORT_TOKENS = 100  # generated before the first report

_RATE = "%10.2f ms / %5d tokens (%8.2f ms per token, %8.2f tokens per second)"


def _line(slot_id: int, task: int, text: str, *values: Any) -> None:
    log.info("id %2d | task %d | " + text, slot_id, task, *values)


def selected_by_id(slot_id: int, asked_for: int) -> None:
    _line(slot_id, -1, "selected slot by id (%d)", asked_for)


def selected(slot: Slot, share: float | None) -> None:
    """share: of the prompt that the slot holds; None: it was the one unused for longest."""
    if share is not None:
        _line(slot.id, -1, "selected slot by LCP similarity, f_sim_best = %.3f", share)
    else:
        _line(slot.id, -1, "selected slot by LRU, t_last = %d", slot.last_used)


def launched(generation: Generation) -> None:
    is_child = int(generation.parent is not None)
    _line(generation.slot_id, generation.age, "processing task, is_child = %d", is_child)


def prompt_progress(generation: Generation, n_tokens: int) -> None:
    """`n_tokens` of the prompt are in the slot. Says nothing about prompts that are quickly done."""
    seconds = generation.t_prompt_end - generation.t_start
    if seconds >= REPORT_SECONDS:
        _line(
            generation.slot_id,
            generation.age,
            "prompt processing, n_tokens = %6d, progress = %.2f, t = %6.2f s / %.2f tokens per second",
            n_tokens,
            n_tokens / generation.n_prompt,
            seconds,
            (n_tokens - generation.n_cached) / seconds,
        )


class GenerationReports:
    """How fast slots generate, at most every `REPORT_SECONDS` seconds."""

    def __init__(self, n_slots: int) -> None:
        self._tasks = [-1] * n_slots  # that the slots' values below are of
        self._times = [0.0] * n_slots
        self._counts = [0] * n_slots

    def on_token(self, generation: Generation, now: float) -> None:
        """now: seconds of the clock that timed the generation."""
        slot_id, n = generation.slot_id, generation.n_decoded
        if self._tasks[slot_id] != generation.age:
            self._tasks[slot_id], self._times[slot_id], self._counts[slot_id] = generation.age, now, n
        elif n >= FIRST_REPORT_TOKENS and now - self._times[slot_id] >= REPORT_SECONDS:
            recent = (n - self._counts[slot_id]) / (now - self._times[slot_id])
            overall = (n - 1) / (now - generation.t_prompt_end)
            _line(slot_id, generation.age, "n_gen = %6d, tg = %6.2f t/s, tg_3s = %6.2f t/s", n, overall, recent)
            self._times[slot_id], self._counts[slot_id] = now, n


def finished(slot: Slot, generation: Generation, timings: dict[str, Any]) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    for title, part in (("prompt eval", "prompt"), ("       eval", "predicted")):
        rates = [timings[f"{part}_{name}"] for name in ("ms", "n", "per_token_ms", "per_second")]
        _line(slot.id, generation.age, f"{title} time = {_RATE}", *rates)
    total = timings["prompt_ms"] + timings["predicted_ms"], timings["prompt_n"] + timings["predicted_n"]
    _line(slot.id, generation.age, "      total time = %10.2f ms / %5d tokens", *total)
    log_drafts(slot.id, generation)
    stopped(slot, generation)


def stopped(slot: Slot, generation: Generation, *, why: str = "") -> None:
    """why: text that follows, of an end other than the usual ones."""
    text = "stop processing: n_tokens = %d, truncated = %d" + why
    _line(slot.id, generation.age, text, len(slot.tokens), generation.truncated)


def all_idle() -> None:
    log.debug("all slots are idle")
