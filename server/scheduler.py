"""What runs next, as pure functions: states of sequences in, plan out. No clock, no I/O, no engine.

Fairness: everything is ordered by `age` (arrival number; smaller is older). Requests wait in one FIFO, the oldest
sequence always makes progress, and when memory is short the newest sequence gives way and waits. A younger sequence
never starts a prompt past an older one that waits for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from pyllama.checkpoints import cut_to_grain


class SequenceState(NamedTuple):
    """One busy slot. `n_pending`: tokens known but not yet in the engine; 0 while it waits for its parent's prompt.

    n_until_cut: tokens after which a step must end, because the state there is wanted; 0: none.
    has_begun: some of its prompt has been computed, so that the rest may be paced.
    n_held: tokens that are in the engine.
    awaits_mask: all its tokens are in the engine; the next one is drawn when its grammar's mask is there.
    """

    slot: int
    age: int
    n_pending: int
    is_generating: bool  # the one pending token is the last sampled one
    is_blocked: bool = False  # gave its memory away; all its tokens are pending
    n_until_cut: int = 0
    has_begun: bool = False
    awaits_mask: bool = False
    n_held: int = 0

    @property
    def generates(self) -> bool:
        return (self.is_generating or self.awaits_mask) and not self.is_blocked


class Chunk(NamedTuple):
    """Append `n_tokens` pending tokens of a slot; draw the next token when nothing is pending after them."""

    slot: int
    n_tokens: int
    draws: bool


class Waiting(NamedTuple):
    """A queued group: one prompt with `n_slots` completions. `id_slot`: the slot asked for (in range), or -1."""

    n_slots: int
    id_slot: int = -1


def prompts_rest(since_us: int, step_us: int, pace: int) -> bool:
    """Whether prompts that have begun rest now, so that they take at most `pace` per cent of the time.

    since_us: microseconds since the end of the last step that held prompt tokens; step_us: how long that step took, all
    of it. After t seconds of prompt work come at least t (100 - pace) / pace without. pace: 0..100; 0 and 100: never.
    """
    return 0 < pace < 100 and since_us < step_us * (100 - pace) // pace


def plan_step(
    sequences: Sequence[SequenceState],
    n_batch: int,
    *,
    mixes_prompts: bool = True,
    prompts_rest: bool = False,
    prompt_grain: int = 1,
) -> list[Chunk]:
    """One token of every generating sequence, then prompt tokens, oldest first, up to `n_batch` rows in all.

    n_batch: more than the number of slots. mixes_prompts: continuous batching; off, prompts wait for all generation.
    prompts_rest: while something generates only prompts that have not begun run, each its first chunk, so that nobody
    waits for the first sign of life.
    prompt_grain: a prompt that does not fit is cut at a multiple of it; if no more than that of it would run beside an
    older one, it waits.
    """
    chunks = [Chunk(s.slot, 1, True) for s in sequences if s.is_generating and not s.is_blocked]
    generates = any(s.generates for s in sequences)
    if generates and not mixes_prompts:
        return chunks
    room = n_batch - len(chunks)
    rests = prompts_rest and generates
    has_prompt = False
    for s in sorted(_startable_prompts(sequences), key=lambda s: s.age):
        if rests and s.has_begun:
            continue
        if room <= 0:
            break
        n_tokens = min(s.n_pending, room, s.n_until_cut or room)
        if n_tokens < s.n_pending and n_tokens != s.n_until_cut:
            n_tokens = cut_to_grain(s.n_held, n_tokens, prompt_grain)
            if has_prompt and n_tokens <= prompt_grain > 1:
                break
        chunks.append(Chunk(s.slot, n_tokens, n_tokens == s.n_pending))
        has_prompt = True
        room -= n_tokens
    return chunks


def _startable_prompts(sequences: Sequence[SequenceState]) -> list[SequenceState]:
    oldest_blocked = min((s.age for s in sequences if s.is_blocked), default=None)
    return [
        s
        for s in sequences
        if s.n_pending > 0
        and not s.is_generating
        and not s.is_blocked
        and (oldest_blocked is None or s.age < oldest_blocked)
    ]


def resumable(
    sequences: Sequence[SequenceState], free_tokens: int, page_tokens: int, *, others_run: bool = False
) -> list[int]:
    """Slots of blocked sequences that may start again, oldest first.

    A blocked sequence needs room for all its tokens and one page to go on with; when nothing else runs it may try at
    once (memory that younger sequences hold is then taken from them). others_run: so does something that is not listed.
    """
    blocked = sorted((s for s in sequences if s.is_blocked), key=lambda s: s.age)
    runs = others_run or any(s.generates for s in sequences) or bool(_startable_prompts(sequences))
    slots: list[int] = []
    for s in blocked:
        need = (s.n_pending // page_tokens + 2) * page_tokens
        if need > free_tokens and (runs or slots):
            break
        slots.append(s.slot)
        free_tokens -= need
    return slots


def gives_way(candidates: Sequence[SequenceState]) -> SequenceState | None:
    """Who loses its memory when the pool is full: the newest. None when only one is left: it cannot be served."""
    return max(candidates, key=lambda s: s.age) if len(candidates) > 1 else None


def admit(
    waiting: Sequence[Waiting], idle: Collection[int], choose: Callable[[int, Collection[int]], int]
) -> list[tuple[int, list[int]]]:
    """Which queued groups start now, and on which slots: pairs (index into `waiting`, slots, the first for the prompt).

    choose(index, free): the best of the free slots for a group that does not ask for one.
    Strictly first come, first served: a group that does not fit keeps every free slot for itself. Only a group that
    waits for one busy slot lets others pass, on other slots.
    """
    free = set(idle)
    admitted: list[tuple[int, list[int]]] = []
    for index, group in enumerate(waiting):
        if not free:
            break
        if group.id_slot >= 0 and group.id_slot not in free and group.n_slots == 1:
            continue
        if len(free) < group.n_slots or (group.id_slot >= 0 and group.id_slot not in free):
            break
        first = group.id_slot if group.id_slot >= 0 else choose(index, free)
        free.remove(first)
        others = sorted(free, reverse=True)[: group.n_slots - 1]
        free.difference_update(others)
        admitted.append((index, [first, *others]))
    return admitted
