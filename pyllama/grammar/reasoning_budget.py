"""A limit on the tokens of a thinking block: when it is used up, a message and the end tag are written by force. Pure.

Tags are found in the bytes of the text, so that it does not matter which tokens spell them, as for the reader of the
answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from enum import Enum, auto

UNLIMITED = 2**31 - 1


class BudgetState(Enum):
    IDLE = auto()  # no block has begun
    COUNTING = auto()
    WAITING = auto()  # the budget is used up, and the last character is not complete
    FORCING = auto()
    DONE = auto()


class _Finder:
    """Finds one of several texts in bytes that come in pieces. After a find it begins anew."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._keep = max(map(len, self._texts), default=1) - 1
        self._tail = b""

    def push(self, piece: bytes) -> bool:
        held = self._tail + piece
        if any(text in held for text in self._texts):
            self._tail = b""
            return True
        self._tail = held[-self._keep :] if self._keep else b""
        return False

    def reset(self) -> None:
        self._tail = b""

    def copy(self) -> _Finder:
        other = _Finder(self._texts)
        other._tail = self._tail
        return other


class ReasoningBudget:
    """budget: tokens that a block may have; negative: any number. starts, ends: the tags.

    forced: the tokens of the message and of an end tag. A block may begin again after it has ended, with a new budget.
    """

    def __init__(self, starts: Sequence[bytes], ends: Sequence[bytes], forced: Sequence[int], budget: int) -> None:
        self.state = BudgetState.IDLE
        self._starts, self._ends = _Finder(starts), _Finder(ends)
        self._forced = tuple(forced)
        self._budget = budget if budget >= 0 else UNLIMITED
        self._remaining = 0
        self._n_forced = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self) -> ReasoningBudget:
        other = ReasoningBudget((), (), self._forced, self._budget)
        other.state = self.state
        other._starts, other._ends = self._starts.copy(), self._ends.copy()
        other._remaining, other._n_forced = self._remaining, self._n_forced
        other._decoder.setstate(self._decoder.getstate())
        return other

    @property
    def forced_token(self) -> int | None:
        """The token that must come next; None: any may."""
        return self._forced[self._n_forced] if self.state is BudgetState.FORCING else None

    def accept(self, token: int, piece: bytes) -> None:
        """Go on with a token of the answer, or of the prompt's beginning of it. piece: its bytes, tags shown."""
        self._decoder.decode(piece)
        if self.state is BudgetState.FORCING:
            self._n_forced += 1
            if self._n_forced >= len(self._forced):
                self._finish()
            return
        if self.state in (BudgetState.IDLE, BudgetState.DONE):
            if self._starts.push(piece):
                self._begin()
            return
        if self._ends.push(piece):
            self._finish()
            return
        self._remaining -= 1
        if self._remaining <= 0:
            if self._decoder.getstate()[0]:
                self.state = BudgetState.WAITING
            else:
                self._force()

    def end_block(self) -> None:
        """The block shall end now, whatever is left of its budget. Without a block nothing happens."""
        if self.state is BudgetState.COUNTING:
            self._force()

    def _begin(self) -> None:
        self.state = BudgetState.COUNTING
        self._remaining = self._budget
        self._ends.reset()
        if self._remaining <= 0:
            self._force()

    def _force(self) -> None:
        self.state = BudgetState.FORCING if self._forced else BudgetState.DONE
        self._n_forced = 0

    def _finish(self) -> None:
        self.state = BudgetState.DONE
        self._starts.reset()
        self._ends.reset()
