"""Draws that keep to a grammar: the masks are computed on other threads while the engine works.

A token's mask depends on the tokens before it alone, so its computation starts as soon as the last of them is drawn and
runs beside the forward pass of that token, and beside those of other sequences. Where the forward pass ends first, the
logits are kept and the sequence waits by itself: nobody else does.

A draft needs the masks of all its tokens before the pass that verifies it. Where they take longer than others would
notice, the draft is cut to those that are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from pyllama.grammar import ConstraintFailed
from pyllama.grammar.draft_masks import DraftMasks

if TYPE_CHECKING:
    from pyllama.server.generation import Generation
    from pyllama.server.slots import Slot

DRAFT_SECONDS = 0.002
"""Longest wait for the masks of a step's drafts."""


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

    def keep_to_grammars(
        self, drafts: Mapping[int, Sequence[int]], slots: Sequence[Slot], ends: Collection[int]
    ) -> dict[int, tuple[Sequence[int], Any]]:
        """By slot, of slots whose generations have a grammar: the draft as far as it goes, and the masks of its rows.

        A draft is empty where not even the mask of its first token is there in time.
        """
        until = time.monotonic() + DRAFT_SECONDS
        pending = {}
        for slot_id, draft in drafts.items():
            generation = slots[slot_id].generation
            if generation.mask is None:  # it is quick; `place` shall take the very one that the draft goes on from
                generation.mask = _made_at_once(generation.constraint.mask)
            if _is_done(generation.mask, until):
                walk = DraftMasks(generation.constraint, draft, ends)
                pending[slot_id] = walk, self._workers.submit(walk.walk)
        kept: dict[int, tuple[Sequence[int], Any]] = dict.fromkeys(drafts, ((), None))
        for slot_id, (walk, done) in pending.items():
            if not _is_done(done, until):
                walk.is_wanted = False
            elif (error := done.exception()) is not None:
                raise error
            length, masks = walk.found()
            kept[slot_id] = drafts[slot_id][:length], masks
        return kept

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


def _made_at_once(make: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(make())
    except ConstraintFailed as error:
        future.set_exception(error)
    return future


def _is_done(future: Future[Any], until: float) -> bool:
    """Whether it is before the monotonic clock says `until`, for which it is waited."""
    wait((future,), timeout=max(0.0, until - time.monotonic()))
    return future.done()
