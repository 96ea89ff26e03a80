"""DRY breakers as tokens: what a string's beginning and rest become in a vocabulary."""

import pytest

from pyllama.dry_breakers import MOST_BREAKERS, DryBreakerTable
from pyllama.errors import InvalidArgument

PIECES = [b"a", b"b", b"ab", b"xab", b"\n", b"\xc3", b"\xa9", b"", b"ba", b"abcabc", b"cc"]


class Pieces:
    """A vocabulary whose encoder takes the longest piece."""

    n_vocab = len(PIECES)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return PIECES[token]

    def encode(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        tokens = []
        while data:
            piece = max((piece for piece in PIECES if piece and data.startswith(piece)), key=len, default=b"")
            if not piece:
                raise AssertionError(f"no piece begins {data!r}")
            tokens.append(PIECES.index(piece))
            data = data[len(piece) :]
        return tokens


def by_definition(breaker: bytes) -> set[tuple[int, tuple[int, ...]]]:
    result = set()
    for token, piece in enumerate(PIECES):
        if breaker in piece:
            result.add((token, ()))
            continue
        for n in range(1, len(breaker)):
            if piece.endswith(breaker[:n]):
                result.add((token, tuple(Pieces().encode(breaker[n:])[:20])))
    return result


@pytest.mark.parametrize("breaker", ["a", "ab", "aba", "aa", "\n", "é", "abab", "bab", "\na"])
def test_every_token_that_holds_or_begins_a_breaker_is_found(breaker: str) -> None:
    assert set(DryBreakerTable(Pieces()).tokens_of([breaker])) == by_definition(breaker.encode())


def test_lists_are_put_together_without_duplicates_and_long_strings_are_cut() -> None:
    table = DryBreakerTable(Pieces())
    assert table.tokens_of([""]) == []
    both = table.tokens_of(["a", "ab", "a"])
    assert len(both) == len(set(both))
    assert set(both) == by_definition(b"a") | by_definition(b"ab")
    ab = PIECES.index(b"ab")
    assert (ab, (ab,) * 19) in table.tokens_of(["ab" * 30]), "40 bytes are 20 tokens"
    assert all(len(tail) <= 20 for _, tail in table.tokens_of(["a" * 40]))


def test_prepared_lists_are_remembered_and_too_long_ones_refused() -> None:
    table = DryBreakerTable(Pieces())
    assert table.prepare(["a", "b"]) is table.prepare(("a", "b", "a"))
    with pytest.raises(InvalidArgument, match=f"{MOST_BREAKERS}"):
        table.prepare([str(i) for i in range(MOST_BREAKERS + 1)])
