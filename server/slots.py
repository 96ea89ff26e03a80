"""Slots: the places for sequences in the engine, what each of them holds, and which one suits a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama.server.generation import Generation


class Slot:
    """One sequence of the engine. Changed by the engine thread only; others may read."""

    __slots__ = ("checkpoints", "generation", "id", "last_generation", "last_used", "scales", "tokens")

    def __init__(self, slot_id: int) -> None:
        self.id = slot_id
        self.tokens: list[int] = []  # exactly what the engine's sequence holds
        self.scales: tuple[float, ...] = ()  # of the LoRA adapters they were computed with; empty: without any
        self.checkpoints: list[int] = []  # lengths at which the state is to be kept while the prompt is computed
        self.generation: Generation | None = None  # who is being served
        self.last_generation: Generation | None = None  # the same, kept after its end for display
        self.last_used = 0  # number of the release or restore, for least-recently-used order


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix. Compares slices, so that 100,000 equal tokens take about a millisecond."""
    end = min(len(a), len(b))
    position, stride = 0, 256
    while position < end:
        stop = min(position + stride, end)
        if a[position:stop] != b[position:stop]:
            break
        position = stop
    else:
        return end
    while a[position] == b[position]:
        position += 1
    return position


def choose_slot(
    idle: Iterable[Slot], prompt: Sequence[int], similarity: float, scales: tuple[float, ...] = ()
) -> tuple[Slot, float | None]:
    """The idle slot for a prompt, and the common-prefix share when that decided.

    The largest share of the prompt that a slot already holds, computed with the same scales, wins if it exceeds
    `similarity` (0: rule off), else the slot unused for longest (ties: the highest id).
    """
    candidates = list(idle)
    if similarity > 0 and prompt:
        best, best_length = None, 0
        for slot in candidates:
            length = common_prefix(slot.tokens, prompt) if slot.scales == scales else 0
            if length > best_length:
                best, best_length = slot, length
        if best is not None and best_length / len(prompt) > similarity:
            return best, best_length / len(prompt)
    return min(candidates, key=lambda slot: (slot.last_used, -slot.id)), None
