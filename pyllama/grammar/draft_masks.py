"""What a grammar allows along a draft: a copy of the sequence's state goes ahead over the tokens that are guessed.

The draft ends before the first token that the grammar refuses, or after which nothing could follow. What is drawn by
these masks is what would have been drawn token by token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from pyllama.grammar.constraint import Constraint, ConstraintFailed
from pyllama.grammar.guide import Guide

Mask = NDArray[np.uint32]


class DraftMasks:
    """The copy is made at once; `walk` may then run on another thread, which others may look at meanwhile.

    ends: tokens that end a text; a draft goes as far as such a token.
    """

    def __init__(self, guide: Guide | Constraint, draft: Sequence[int], ends: Collection[int]) -> None:
        self._guide = guide.fork()
        self._draft = draft
        self._ends = ends
        self._masks: list[Mask | None] = []  # of the token after the sequence, then after each token of the draft
        self.is_wanted = True  # False ends the walk, from any thread

    def walk(self) -> None:
        """Compute the masks, one after the other. Where the grammar fails the sequence will see that itself."""
        guide = self._guide
        try:
            self._masks.append(guide.mask())
            for token in self._draft:
                if not self.is_wanted or token in self._ends or not _allows(self._masks[-1], token):
                    return
                guide.accept(token)
                if guide.must_end:
                    return
                self._masks.append(guide.mask())
        except ConstraintFailed:
            return

    def found(self) -> tuple[int, Mask]:
        """Of how many tokens of the draft all masks are there, and those, `[tokens + 1, words]`."""
        every = self._guide.every_token
        rows = [every if mask is None else mask for mask in tuple(self._masks)]
        return max(0, len(rows) - 1), np.array(rows, np.uint32).reshape(-1, len(every))


def _allows(mask: Mask | None, token: int) -> bool:
    return mask is None or bool(int(mask[token // 32]) >> (token % 32) & 1)
