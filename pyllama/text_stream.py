"""From pieces of tokens to text that may be shown: UTF-8 hold-back and stop strings across token borders.

Used by the `Llama` object, the server and the command-line programs, so that all of them cut text in the same place.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

__all__ = ["TextStream"]


class _StopMatcher:
    """Finds one stop string in text that arrives in parts (Knuth-Morris-Pratt: every character is looked at once).

    The border table grows only as far as the text has ever matched, so a stop string of a megabyte costs nothing until
    a megabyte of it was generated.
    """

    __slots__ = ("_borders", "is_done", "partial", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.partial = 0  # length of the longest suffix of the text so far that begins the stop string
        self.is_done = False
        self._borders = [0, 0]  # [k]: length of the longest proper prefix of stop[:k] that also ends it

    def feed(self, text: str) -> int:
        """Read `text`; the index just after the first full match in it, or -1."""
        stop, partial, index = self.stop, self.partial, 0
        while index < len(text):
            if partial == 0:
                index = text.find(stop[0], index)
                if index < 0:
                    break
            elif stop[partial] != text[index]:
                partial = self._border(partial)
                continue
            partial += 1
            index += 1
            if partial == len(stop):
                self.partial, self.is_done = 0, True
                return index
        self.partial = partial
        return -1

    def _border(self, length: int) -> int:
        stop, borders = self.stop, self._borders
        while len(borders) <= length:
            last = stop[len(borders) - 1]
            border = borders[-1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + 1 if stop[border] == last else 0)
        return borders[length]


class TextStream:
    """Bytes of tokens in, text that is safe to show out.

    `push` holds back (a) the bytes of an incomplete last UTF-8 character and (b) a tail that may turn out to be the
    beginning of a stop string. The leftmost stop string in the text wins, and cuts the text before it; of several that
    begin at the same character, the first in the list that is complete when the first of them is. When a stop
    string is complete while a longer one that began before it is still open, the decision waits for the next piece:
    that is what makes the text independent of how it was split into tokens.

    Bytes that are not UTF-8 become U+FFFD. An empty stop string matches at the first `push`, with empty text.

    stops: one string or a sequence of strings. Raises `TypeError` for anything else.
    """

    __slots__ = (
        "_active", "_by_first", "_decoder", "_first_characters", "_found", "_has_empty_stop", "_held", "_is_finished",
        "_length", "_matched", "_matchers", "_parts",
    )  # fmt: skip

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop strings must be str, found {type(stop).__name__}")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_empty_stop = "" in stops
        self._matchers = [_StopMatcher(stop) for stop in stops if stop]
        self._by_first: dict[str, list[int]] = {}
        for index, matcher in enumerate(self._matchers):
            self._by_first.setdefault(matcher.stop[0], []).append(index)
        # One search per piece answers the usual question: does any stop string begin here?
        pattern = "[" + "".join(map(re.escape, self._by_first)) + "]"
        self._first_characters = re.compile(pattern) if self._by_first else None
        self._active: set[int] = set()  # matchers that are inside their stop string
        self._found: tuple[int, int] | None = None  # (position, matcher) of the best full match, until it is decided
        self._length = 0  # characters decoded so far
        self._held = ""
        self._parts: list[str] = []
        self._matched: str | None = None
        self._is_finished = False

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matched

    @property
    def text(self) -> str:
        """All text so far, the held-back tail included, cut before the stop string."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return (self._parts[0] if self._parts else "") + self._held

    @property
    def pending(self) -> str:
        """The held-back end of `text`: complete characters that may be the beginning of a stop string."""
        return self._held

    @property
    def pending_bytes(self) -> bytes:
        """The bytes of an incomplete last character; not part of `text` until `finish`."""
        return self._decoder.getstate()[0]

    def push(self, piece: bytes) -> str:
        """Add the bytes of one token and return the text that may be shown now (often all of it, sometimes none).

        Ignored once a stop string has matched. Raises `RuntimeError` after `finish`.
        """
        if self._is_finished:
            raise RuntimeError("push after finish: this text stream has ended")
        if self._matched is not None:
            return ""
        if self._has_empty_stop:
            return self._end_with("")
        text = self._decoder.decode(piece)
        if self._first_characters is None:
            self._parts.append(text)
            return text
        return self._scan(text)

    def finish(self, *, drop_held: bool = False) -> str:
        """End of the generation. Returns the rest: the held-back tail, and U+FFFD for an incomplete character.

        drop_held: return nothing; `text` gets the rest all the same. It is what a llama-server stream does when the
        token limit ends it: its clients never see the held-back tail, while the non-stream answer holds it.
        """
        if self._is_finished:
            return ""
        self._is_finished = True
        if self._matched is not None:
            return ""
        text = self._decoder.decode(b"", final=True)
        shown = text if self._first_characters is None else self._scan(text)
        if self._first_characters is None:
            self._parts.append(text)
        elif self._matched is None:
            if self._found is not None:  # the longer stop string that began before it will never be complete
                shown += self._cut()
            else:
                shown += self._held
                self._parts.append(self._held)
                self._held = ""
        return "" if drop_held else shown

    def _scan(self, text: str) -> str:
        """Feed decoded text to the matchers; return what no stop string can take back any more."""
        if not self._active and self._found is None and self._first_characters.search(text) is None:
            self._length += len(text)
            self._parts.append(text)
            return text

        candidates = set(self._active)
        for character in self._by_first.keys() & set(text):
            candidates.update(self._by_first[character])
        for index in candidates:
            matcher = self._matchers[index]
            if matcher.is_done:
                continue
            end = matcher.feed(text)
            if end >= 0:
                found = (self._length + end - len(matcher.stop), index)
                self._found = found if self._found is None else min(self._found, found)
            if matcher.partial:
                self._active.add(index)
            else:
                self._active.discard(index)
        self._length += len(text)
        self._held += text

        longest_partial = max((self._matchers[index].partial for index in self._active), default=0)
        hold_from = self._length - longest_partial
        if self._found is not None and self._found[0] <= hold_from:
            return self._cut()
        # With a found one left, a stop string that began before it is still open. If that fails, the found one counts.
        return self._release(hold_from)

    def _release(self, position: int) -> str:
        """Move the held text before `position` to the shown text."""
        count = len(self._held) - (self._length - position)
        shown, self._held = self._held[:count], self._held[count:]
        self._parts.append(shown)
        return shown

    def _cut(self) -> str:
        """End the text before the found stop string."""
        position, index = self._found
        shown = self._release(position)
        self._end_with(self._matchers[index].stop)
        return shown

    def _end_with(self, stop: str) -> str:
        self._matched = stop
        self._held = ""
        self._active.clear()
        self._decoder.reset()
        return ""
