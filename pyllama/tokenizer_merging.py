"""The merge loop that byte-pair encoding and SentencePiece share: repeatedly join the best adjacent pair of symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush


def merge_adjacent(symbols: Iterable[str], priority: Callable[[str, str], float | None]) -> list[str]:
    """Join adjacent symbols, lowest `priority(left, right)` first, ties leftmost, until every pair has priority None.

    O(n log n). A joined symbol lives at the place of its left part.
    """
    texts = list(symbols)
    count = len(texts)
    following = list(range(1, count + 1))
    preceding = list(range(-1, count - 1))

    queue: list[tuple[float, int, str, str]] = []
    for place in range(count - 1):
        value = priority(texts[place], texts[place + 1])
        if value is not None:
            queue.append((value, place, texts[place], texts[place + 1]))
    heapify(queue)

    def consider(left: int, right: int) -> None:
        value = priority(texts[left], texts[right])
        if value is not None:
            heappush(queue, (value, left, texts[left], texts[right]))

    while queue:
        _, left, left_text, right_text = heappop(queue)
        right = following[left]
        # Stale when either part has been joined with something since; a place that was swallowed holds "".
        if right >= count or texts[left] != left_text or texts[right] != right_text:
            continue
        texts[left] = left_text + right_text
        texts[right] = ""
        after = following[left] = following[right]
        if after < count:
            preceding[after] = left
            consider(left, after)
        if preceding[left] >= 0:
            consider(preceding[left], left)
    return [text for text in texts if text]
