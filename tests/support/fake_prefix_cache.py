"""What a stand-in engine remembers in "host memory": whole sequences and positions of states, in a budget of tokens.

The rules are those of `Engine.reuse_prefix` in `pyllama/_engine.pyi`, restated on lists of tokens without a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

STATE_TOKENS = 16  # what a state counts in the budget


class PrefixReuse(NamedTuple):
    length: int
    matched: int
    source: str
    checkpoint: int
    limit: str
    moved: int = 0


class CacheUsage(NamedTuple):
    budget: int
    used: int
    kv_bytes: int
    checkpoint_bytes: int
    n_nodes: int
    n_checkpoints: int
    n_evicted: int


class Found(NamedTuple):
    """length: reusable tokens. index: of the live sequence they are in, or -1 for host memory.

    checkpoint: position of the kept state that is used, -1 where none is needed.
    """

    length: int
    index: int
    checkpoint: int


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def chunked_length(held: Sequence[int], tokens: Sequence[int], most: int, least: int) -> tuple[int, int]:
    """(common beginning, length reached) when runs of `least` tokens of `held` may move down, tried place by place."""
    common = min(shared_length(held, tokens), most)
    reached = place = common
    while place < len(held) and reached < most:
        run = shared_length(held[place:], tokens[reached:])
        if run >= least:
            reached += run
            place += run
        else:
            place += 1
    return common, min(reached, most)


class FakePrefixCache:
    """budget: tokens of kept sequences and states together; the least recently used go first. 0: off."""

    def __init__(self, budget: int, *, is_recurrent: bool) -> None:
        self.budget, self.is_recurrent = budget, is_recurrent
        self._kept: dict[tuple[int, ...], None] = {}
        self._states: dict[tuple[int, ...], None] = {}
        self.n_evicted = 0

    def keep(self, tokens: Sequence[int]) -> None:
        """A sequence that is about to go, with its state at the end."""
        self._store(self._kept, tuple(tokens), len(tokens))
        if self.is_recurrent:
            self.keep_state(tokens)

    def keep_state(self, tokens: Sequence[int]) -> None:
        if self.is_recurrent:
            self._store(self._states, tuple(tokens), STATE_TOKENS)

    def _store(self, table: dict[tuple[int, ...], None], key: tuple[int, ...], size: int) -> None:
        table.pop(key, None)
        if not key or size > self.budget:
            return
        while self.used + size > self.budget:
            victims = self._kept or self._states
            del victims[next(iter(victims))]
            self.n_evicted += 1
        table[key] = None

    @property
    def used(self) -> int:
        return sum(map(len, self._kept)) + STATE_TOKENS * len(self._states)

    def usage(self) -> CacheUsage:
        states = STATE_TOKENS * len(self._states)
        return CacheUsage(
            self.budget, self.used, self.used - states, states, len(self._kept), len(self._states), self.n_evicted
        )

    def matched(self, live: Iterable[Sequence[int]], tokens: Sequence[int]) -> int:
        return max((shared_length(known, tokens) for known in (*live, *self._kept)), default=0)

    def find(
        self, live: Sequence[Sequence[int]], own: int, tokens: Sequence[int], most: int, host_room: int
    ) -> list[Found]:
        """What could be used, best first: longest, then the sequence's own, then another's. host_room: tokens."""
        found = [
            self._usable(index, held, tokens, min(shared_length(held, tokens), most)) for index, held in enumerate(live)
        ]
        found += [self._usable(-1, (), tokens, min(shared_length(h, tokens), most, host_room)) for h in self._kept]
        return sorted(found, key=lambda f: (-f.length, f.index != own, f.index < 0))

    def _usable(self, index: int, held: Sequence[int], tokens: Sequence[int], limit: int) -> Found:
        if not self.is_recurrent:
            return Found(limit, index, -1)
        if held and limit == len(held):
            return Found(limit, index, -1)
        states = [len(key) for key in self._states if len(key) <= limit and list(key) == list(tokens[: len(key)])]
        best = max(states, default=0)
        return Found(best, index, best or -1)

    def limit_of(self, length: int, matched: int, most: int, *, lacked_pages: bool) -> str:
        if length >= most:
            return "prompt"
        if lacked_pages:
            return "no page"
        if self.is_recurrent and length < matched:
            return "no checkpoint"
        return "not cached"
