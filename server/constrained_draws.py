"""Draws that keep to a grammar: the masks are computed on other threads while the engine works.

A token's mask depends on the tokens before it alone, so its computation starts as soon as the last of them is drawn and
runs beside the forward pass of that token, and beside those of other sequences. Where the forward pass ends first, the
logits are kept and the sequence waits by itself: nobody else does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyllama.server.generation import Generation
    from pyllama.server.slots import Slot


class ConstrainedDraws:
    """Masks and kept logits of the sequences with a grammar. All methods belong to the engine thread.

    make_row: `pyllama._engine.LogitsRow`. on_mask: called on another thread whenever a mask is there.
    """

    def __init__(self, n_slots: int, make_row: Callable[[], Any], on_mask: Callable[[], None]) -> None:
        n_workers = max(1, min(n_slots, os.cpu_count() or 1))
        self._workers = ThreadPoolExecutor(n_workers, thread_name_prefix="mask")
        self._make_row = make_row
        self._on_mask = on_mask
        self._rows: list[Any] = [None] * n_slots  # by slot, kept for their memory

    def begin(self, generation: Generation) -> None:
        """Start the mask of the generation's next token, if a grammar makes it."""
        generation.mask = None
        if generation.constraint is None or not generation.constraint.takes_time:
            return
        generation.mask = self._workers.submit(generation.constraint.mask)
        generation.mask.add_done_callback(self._on_done)

    def _on_done(self, mask: Future[Any]) -> None:
        self._on_mask()

    def place(self, slot: Slot) -> tuple[Any, Any]:
        """(sampler, row of logits) of a step's work for a slot whose next token is to be drawn: one of them is None.

        Raises `ConstraintFailed`.
        """
        generation = slot.generation
        if generation.constraint is None:
            return generation.sampler, None
        if generation.mask is None:
            generation.sampler.set_mask(generation.constraint.mask())
            return generation.sampler, None
        if generation.mask.done():
            generation.sampler.set_mask(generation.mask.result())
            return generation.sampler, None
        if self._rows[slot.id] is None:
            self._rows[slot.id] = self._make_row()
        return None, self._rows[slot.id]

    def can_draw(self, slot: Slot) -> bool:
        """Whether logits were kept for the slot and the mask that they waited for is there."""
        generation = slot.generation
        return generation is not None and generation.awaits_mask and generation.mask.done()

    def draw(self, slot: Slot) -> Any:
        """The token drawn from the kept logits, as the engine's step gives it out. Raises `PyllamaError`."""
        generation = slot.generation
        generation.awaits_mask = False
        generation.sampler.set_mask(generation.mask.result())
        params = generation.params
        return self._rows[slot.id].draw(slot.id, generation.sampler, params.n_probs, params.post_sampling_probs)

    def close(self) -> None:
        """Computations that have not begun never do."""
        self._workers.shutdown(wait=False, cancel_futures=True)
