"""Speculation in the server's loop: which slots draft in a step, what stood, and what a request is told of it.

Engine thread only. A draft is dropped wherever it would cost somebody else something: when memory is short, the step
runs again without any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyllama.checkpoints import PAGE_TOKENS
from pyllama.draft_economy import DraftEconomy
from pyllama.speculation import MOST_ROWS, Speculation, SpeculationOptions, open_speculation

if TYPE_CHECKING:
    from pyllama.server.constrained_draws import ConstrainedDraws
    from pyllama.server.generation import Generation
    from pyllama.server.scheduler import Chunk
    from pyllama.server.slots import Slot

log = logging.getLogger("pyllama.server.slot")


class SlotDraft(NamedTuple):
    """Fields of `pyllama._engine.Work`. masks: of a generation with a grammar."""

    tokens: Sequence[int]
    proposals: Sequence[Sequence[tuple[int, float]]] = ()
    masks: Any = None


class SlotSpeculation:
    """Drafts for the slots of one engine.

    ends: tokens that end a text. stops_at_pages: the state of a slot is kept wherever a page is full, so that no draft
    may lead beyond. most_rows: of a step's drafts together. economy: verifies only what pays; None: everything.
    """

    def __init__(
        self,
        speculation: Speculation,
        *,
        make_draft_order: Any,
        make_synthetic: Any,
        ends: Iterable[int],
        stops_at_pages: bool,
        most_rows: int = MOST_ROWS,
        economy: DraftEconomy | None = None,
        samples: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._speculation = speculation
        self._speculator = speculation.speculator
        self._make_order = make_draft_order
        self._make_synthetic = make_synthetic
        self._ends = tuple(sorted(ends))
        self._stops_at_pages = stops_at_pages
        self._most_rows = min(most_rows, MOST_ROWS)
        self._economy = economy
        self._samples = samples
        self._clock = clock
        self.n_quiet = 1  # steps, the planned one included, in which nothing will be drafted

    @property
    def names(self) -> list[str]:
        return self._speculation.names

    def drafts(
        self, plan: Sequence[Chunk], slots: Sequence[Slot], constrained: ConstrainedDraws
    ) -> dict[int, SlotDraft]:
        """By slot, what may follow the token that it is about to compute. Slots without a draft are missing."""
        self.n_quiet = 1
        drafting = [slots[chunk.slot] for chunk in plan if self._may_draft(chunk, slots[chunk.slot])]
        if not drafting:
            return {}
        n_rows = sum(slots[chunk.slot].generation.n_decoded > 0 for chunk in plan)
        economy = self._economy
        if economy is not None and economy.wants_plain_step(n_rows):
            return {}
        orders = []
        for slot in drafting:
            room = self._room(slot, len(drafting))
            if self._is_measured(slot):
                if not economy.has_credit:  # what cannot pay is not even looked up
                    economy.n_quiet = min(economy.n_quiet, max(1, economy.n_without_credit))
                    room = 0
                elif room > 0 and self._speculation.computes:
                    room = economy.best_length(slot.generation.drafts.acceptance, room)
            if room > 0:
                generation = slot.generation
                # A draft that may end where a grammar refuses it cannot be verified by rejection.
                temperature = 0.0 if _is_constrained(slot) else generation.params.sampling.temperature
                seed = generation.sampler.seed
                orders.append(self._make_order(slot.id, generation.tokens[-1], room, temperature, seed))
        if not orders:
            if economy is not None and len(drafting) == n_rows:
                self.n_quiet = economy.n_quiet
            return {}
        started = self._clock()
        drafts = self._speculator.draft(orders)
        found = {order.seq_id: SlotDraft(*draft) for order, draft in zip(orders, drafts, strict=True) if draft.tokens}
        if not self._speculation.computes:
            for slot_id, draft in tuple(found.items()):
                if self._is_measured(slots[slot_id]):
                    acceptance = slots[slot_id].generation.drafts.acceptance
                    length = economy.best_length(acceptance, len(draft.tokens))
                    found[slot_id] = draft._replace(tokens=draft.tokens[:length])
        kept = constrained.keep_to_grammars(
            {slot_id: draft.tokens for slot_id, draft in found.items() if _is_constrained(slots[slot_id])},
            slots,
            self._ends,
        )
        found |= {slot_id: SlotDraft(tokens, (), masks) for slot_id, (tokens, masks) in kept.items()}
        if economy is not None:
            economy.is_accounted = all(self._is_measured(slots[slot_id]) for slot_id in found)
            lengths = [len(draft.tokens) for draft in found.values() if draft.tokens]
            economy.on_draft(len(lengths), max(lengths, default=0), self._clock() - started)
        return {slot_id: draft for slot_id, draft in found.items() if draft.tokens}

    def _room(self, slot: Slot, n_drafting: int) -> int:
        """Tokens that the draft of a slot may have."""
        room: int = min(self._most_rows // n_drafting, slot.generation.n_left) - 1
        if self._stops_at_pages:
            room = min(room, PAGE_TOKENS - len(slot.tokens) % PAGE_TOKENS - 1)
        return min(room, self._speculation.longest)

    def _is_measured(self, slot: Slot) -> bool:
        """Whether only what pays is drafted for the slot."""
        # With rejection sampling the text depends on where drafts are: that shall not hang on measured times.
        draws = self._samples and slot.generation.params.sampling.temperature > 0 and not _is_constrained(slot)
        return self._economy is not None and not draws

    def on_step(self, n_rows: int, seconds: float, *, n_drafted: int, n_passes: int) -> None:
        """The engine took so long for a step that only generated, or for each of its passes. n_drafted: of the rows."""
        if self._economy is not None:
            self._economy.on_step(n_rows, seconds, n_drafted=n_drafted, n_steps=n_passes)

    def _may_draft(self, chunk: Chunk, slot: Slot) -> bool:
        generation = slot.generation
        return bool(chunk.draws and chunk.n_tokens == 1 and generation.n_decoded > 0)

    def work(self, slot: Slot, draft: SlotDraft) -> dict[str, Any]:
        """The fields of the engine's `Work` that a draft adds."""
        fields: dict[str, Any] = {
            "draft": draft.tokens, "proposals": draft.proposals, "ends": self._ends, "masks": draft.masks
        }  # fmt: skip
        if self._speculation.synthetic_rates:
            generation = slot.generation
            if generation.synthetic is None:
                generation.synthetic = self._make_synthetic(self._speculation.synthetic_rates, generation.sampler.seed)
            fields["synthetic"] = generation.synthetic
        return fields

    def on_verified(self, slot: Slot, n_drafted: int, n_accepted: int) -> None:
        self._speculator.accept(slot.id, n_drafted, n_accepted)
        slot.generation.drafts.add(n_drafted, n_accepted)
        if self._economy is not None:
            self._economy.on_verified(n_drafted, n_accepted)

    def on_computed(self, slot: Slot, *, begins: bool) -> None:
        """The slot holds more of its prompt; begins: all of it, and the first token was drawn."""
        if begins:
            self._speculator.begin(slot.id)
        elif self._speculation.computes and (self._economy is None or self._economy.is_believed_in):
            self._speculator.follow(slot.id)

    def log_statistics(self) -> None:
        for s in self._speculator.statistics():
            rates = ", ".join(f"{n / s.n_drafts:.3f}" for n in s.accepted_at) if s.n_drafts else ""
            mean = s.n_accepted_tokens / s.n_drafts + 1 if s.n_drafts else 0.0
            log.info(
                "statistics %16s: #calls(b,g,a) = %4d %6d %6d, #gen drafts = %6d, #acc drafts = %5d, "
                "#gen tokens = %6d, #acc tokens = %5d, #mean acc len = %.2f, #acc rate/pos = (%s), "
                "dur(b,g,a) = %.3f, %.3f, %.3f ms",
                s.name,
                s.n_begins,
                s.n_draft_calls,
                s.n_accept_calls,
                s.n_drafts,
                s.n_accepted_drafts,
                s.n_tokens,
                s.n_accepted_tokens,
                mean,
                rates,
                s.begin_ms,
                s.draft_ms,
                s.accept_ms,
            )

    def close(self) -> None:
        self._speculation.close()


def _is_constrained(slot: Slot) -> bool:
    return slot.generation.constraint is not None


def log_drafts(slot_id: int, generation: Generation) -> None:
    """The lines of a finished request about its drafts; none when it had none."""
    counts = generation.drafts
    if not counts.n_drafted:
        return
    log.info(
        "slot %2d | task %d | draft acceptance = %0.5f (%5d accepted / %5d generated), mean len = %5.2f",
        slot_id,
        generation.age,
        counts.n_accepted / counts.n_drafted,
        counts.n_accepted,
        counts.n_drafted,
        1 + counts.n_accepted / counts.n_rounds,
    )
    log.debug(
        "slot %2d | task %d | acc per pos = (%s)",
        slot_id,
        generation.age,
        ", ".join(f"{n / counts.n_rounds:.3f}" for n in counts.accepted_at),
    )


def open_slot_speculation(
    options: SpeculationOptions,
    engine: Any,
    metadata: Mapping[str, Any],
    *,
    engine_arguments: Mapping[str, Any],
    ends: Iterable[int],
    stops_at_pages: bool,
) -> SlotSpeculation | None:
    """`pyllama.speculation.open_speculation` for the slots of a server; None when no drafter is wanted."""
    from pyllama._engine import DraftOrder, SyntheticAcceptance

    speculation = open_speculation(options, engine, metadata, engine_arguments=engine_arguments)
    if speculation is None:
        return None
    token_by_token = {"draft-simple", "draft-mtp", "draft-eagle3"}.intersection(speculation.names)
    economy = DraftEconomy(drafts_at_once=not token_by_token)
    log.info("speculative decoding: %s, drafts of at most %d tokens", ", ".join(speculation.names), speculation.longest)
    return SlotSpeculation(
        speculation,
        make_draft_order=DraftOrder,
        make_synthetic=SyntheticAcceptance,
        ends=ends,
        stops_at_pages=stops_at_pages,
        most_rows=engine_arguments["n_ubatch"],
        economy=economy if options.adaptive and not options.is_synthetic else None,
        samples=options.draws,
    )
