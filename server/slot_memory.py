"""What the slots hold in the engine: reusing prefixes, keeping states, giving memory back. Engine thread only.

The engine finds a prefix wherever it is: in the slot itself, in another one, or among copies in host memory. Whatever a
slot gives up for another prompt is kept there as far as `--cache-ram` allows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pyllama.checkpoints import PAGE_TOKENS, CheckpointRule
from pyllama.errors import ContextFull, InvalidArgument, OutOfMemory
from pyllama.server.slots import Slot, common_prefix

log = logging.getLogger("pyllama.server.slot")

NO_PAGE = "no page"  # PrefixReuse.limit: a copy in host memory found no room in the pool

# Copies are made of whole pages. A text shorter than this is computed again in the time of two or three copies, and
# clients that send many different ones would fill the cache with them.
WORTH_KEEPING = 64


class SlotMemory:
    """Keeps `Slot.tokens` true to the engine. rule: where states are kept; None for models that need no copies.

    can_cut: sequences within a page can be cut back to any length, so no state is lost with their ends.
    usage: the cache in host memory (`pyllama._engine.CacheUsage`) after the last change; any thread may read it.
    """

    def __init__(
        self, engine: Any, slots: Sequence[Slot], rule: CheckpointRule | None, *, can_cut: bool = True
    ) -> None:
        self._engine = engine
        self._slots = slots
        self._rule = rule
        self._can_cut = can_cut
        self._n_uses = 0
        self.usage: Any = engine.cache_usage()

    def use(self, engine: Any) -> None:
        """From now on another engine, which holds nothing; None: for a while none, and `usage` stays what it was."""
        for slot in self._slots:
            slot.tokens, slot.checkpoints, slot.scales = [], [], ()
        self._engine = engine
        if engine is not None:
            self._note_usage()

    def reuse(self, slot: Slot, prompt: list[int], scales: tuple[float, ...] = (), least_chunk: int = 0) -> Any:
        """The slot := the longest known beginning of a prompt but for its last token. The engine's `PrefixReuse`.

        scales: of the LoRA adapters, empty for none; what was computed with others is not that beginning.
        least_chunk > 0: runs of at least so many tokens that the slot holds elsewhere may be moved.
        Idle slots make room for a copy that comes back from host memory: the prompt would take their pages anyway.
        """
        most = len(prompt) - 1
        if self._is_short(slot) and not least_chunk:
            self.cut(slot, common_prefix(slot.tokens, prompt) if slot.scales == scales else 0)
        try:
            found = self._engine.reuse_prefix(slot.id, prompt, most, scales, least_chunk)
            slot.tokens, slot.scales = prompt[: found.length], scales
            while found.limit == NO_PAGE and self.drop_idle():
                found = self._engine.reuse_prefix(slot.id, prompt, most, scales, least_chunk)
                slot.tokens = prompt[: found.length]
        except OutOfMemory as error:  # the answer does not depend on the cache
            log.warning("slot %2d | no host memory for the prompt cache, the prompt is computed: %s", slot.id, error)
            self.clear(slot)
            self._set_scales(slot, scales)
            return None
        finally:
            self._note_usage()
        return found

    def start_anew(self, slot: Slot, scales: tuple[float, ...] = ()) -> None:
        """The slot := nothing, with these scales for what comes; what it held is kept as `forget` does."""
        self.forget(slot)
        self._set_scales(slot, scales)

    def _set_scales(self, slot: Slot, scales: tuple[float, ...]) -> None:
        if slot.scales != scales:
            self._engine.set_adapters(slot.id, scales)
            slot.scales = scales

    def plan_checkpoints(self, slot: Slot, prompt: list[int]) -> None:
        """Choose the positions for the part of a prompt that the slot does not hold yet."""
        n_held = len(slot.tokens)
        slot.checkpoints = self._rule.positions(prompt[n_held:], n_held) if self._rule is not None else []
        self.keep_state(slot, is_generating=False)

    def keep_state(self, slot: Slot, *, is_generating: bool) -> None:
        """A checkpoint, if the slot has reached a position for one: planned, or a full page of an answer."""
        if self._rule is None:
            return
        n_held = len(slot.tokens)
        if n_held in slot.checkpoints or (is_generating and n_held % PAGE_TOKENS == 0):
            try:
                self._engine.checkpoint(slot.id)
            except OutOfMemory as error:
                log.warning("slot %2d | no host memory for a checkpoint at %d: %s", slot.id, n_held, error)
            self._note_usage()

    def share(self, source: Slot, target: Slot, length: int) -> None:
        """The target := the first `length` tokens of the source; all of them, for models that keep states."""
        if length > 0:
            self._engine.fork(source.id, target.id, length)
            target.tokens, target.scales = source.tokens[:length], source.scales
        else:
            self._set_scales(target, source.scales)

    def cut(self, slot: Slot, length: int) -> None:
        """The slot keeps its first `length` tokens. Only for models whose sequences can be cut."""
        if length < len(slot.tokens):
            self._engine.truncate(slot.id, length)
            del slot.tokens[length:]

    def drop_behind(self, slot: Slot, tokens: list[int]) -> None:
        """The engine has `tokens` more than the slot, which nobody wants: they go where sequences can be cut."""
        if not tokens:
            return
        if self._can_cut:
            self._engine.truncate(slot.id, len(slot.tokens))
        else:
            slot.tokens += tokens

    def forget(self, slot: Slot) -> None:
        """Give the slot's pages back; what they held is kept in host memory, if it is worth that."""
        slot.checkpoints = []
        if not slot.tokens:
            return
        if self._is_short(slot):
            self.clear(slot)
            return
        try:
            self._engine.release(slot.id)
            slot.tokens = []
        except OutOfMemory as error:
            log.warning("slot %2d | no host memory to keep %d tokens: %s", slot.id, len(slot.tokens), error)
            self.clear(slot)
        self._note_usage()

    def _is_short(self, slot: Slot) -> bool:
        return self._can_cut and len(slot.tokens) < WORTH_KEEPING

    def clear(self, slot: Slot) -> None:
        """Give the slot's pages back and keep nothing of them."""
        slot.checkpoints = []
        self._engine.clear(slot.id)
        slot.tokens = []

    def drop_idle(self) -> bool:
        """The least recently used idle slot gives its pages back; False when no idle slot holds any."""
        held = [slot for slot in self._slots if slot.generation is None and slot.tokens]
        if not held:
            return False
        victim = min(held, key=lambda slot: slot.last_used)
        log.info("slot %2d | the cache is dropped to make room, n_tokens = %d", victim.id, len(victim.tokens))
        self.forget(victim)
        return True

    def mark_used(self, slot: Slot) -> None:
        self._n_uses += 1
        slot.last_used = self._n_uses

    # ---- actions on idle slots, see `EngineLoop.on_idle_slot`

    def save(self, slot: Slot) -> tuple[list[int], bytes]:
        """The tokens that a slot holds, and their state."""
        return list(slot.tokens), self._engine.save_sequence(slot.id)

    def restore(self, slot: Slot, tokens: list[int], state: bytes) -> None:
        """The slot holds `tokens` with their state; after an error (`PyllamaError`) it is empty.

        Other idle slots forget their tokens when the pool is full.
        """
        self.forget(slot)
        while True:
            try:
                self._engine.load_sequence(slot.id, state)
                break
            except ContextFull:
                if not self.drop_idle():
                    raise
            finally:
                slot.scales = self._engine.adapters(slot.id)
                self._note_usage()
        if self._engine.length(slot.id) != len(tokens):
            self._engine.clear(slot.id)
            raise InvalidArgument(f"the state is not that of {len(tokens)} tokens")
        slot.tokens = tokens
        self.mark_used(slot)

    def erase(self, slot: Slot) -> int:
        """The number of tokens that the slot forgets."""
        n_tokens = len(slot.tokens)
        self.clear(slot)
        return n_tokens

    def _note_usage(self) -> None:
        self.usage = self._engine.cache_usage()
