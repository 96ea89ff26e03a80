"""Byte-level byte-pair encoding: text without special tokens to ids, and the byte values of token texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from tokenizers import models

from pyllama.pretokenizers import splitter
from pyllama.tokenizer_merging import merge_adjacent
from pyllama.vocabulary import Vocabulary

CACHED_PIECES = 1 << 16
CACHED_PIECE_LENGTH = 64


def byte_characters() -> str:
    """The 256 printable characters that stand for bytes in token texts; index = byte value."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(substitutes)) for byte in range(256))


_CHARACTERS = byte_characters()
_BYTES: Mapping[str, int] = {character: byte for byte, character in enumerate(_CHARACTERS)}
_TRANSLATION = dict(enumerate(_CHARACTERS))


def to_byte_text(data: bytes) -> str:
    return data.decode("latin-1").translate(_TRANSLATION)


def from_byte_text(text: str) -> bytes:
    """Bytes of a token text. A character that stands for no byte gives a visible marker, as other loaders print it."""
    try:
        return bytes(map(_BYTES.__getitem__, text))
    except KeyError:
        pass
    whole = text.encode("utf-8", "surrogateescape")
    parts = []
    for character in text:
        if character in _BYTES:
            parts.append(bytes([_BYTES[character]]))
        else:
            code = character.encode("utf-8", "surrogateescape").hex().encode()
            parts.append(b"[UNK_BYTE_0x" + code + whole + b"]")
    return b"".join(parts)


class BytePairEncoder:
    """Splits text into pieces and merges inside each. Frequent pieces are remembered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._split = splitter(vocabulary.pre)
        self._pieces = _PieceCache(_piece_encoder(vocabulary))

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """`after_special` makes no difference here: byte-level vocabularies add no space."""
        return list(chain.from_iterable(map(self._pieces.__getitem__, self._split(text))))


class _PieceCache(dict[str, Sequence[int]]):
    """Piece to ids, filled on demand. Bounded: long pieces are not kept, a full cache starts anew.

    Safe to share between threads: each access is one dict operation, and a lost entry is only computed again.
    """

    def __init__(self, encode_piece: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode_piece = encode_piece

    def __missing__(self, piece: str) -> Sequence[int]:
        ids = self._encode_piece(piece)
        if len(piece) <= CACHED_PIECE_LENGTH:
            if len(self) >= CACHED_PIECES:
                self.clear()
            self[piece] = ids
        return ids


def _piece_encoder(vocabulary: Vocabulary) -> Callable[[str], Sequence[int]]:
    ids = vocabulary.ids
    merge = _library_merge(vocabulary) or _plain_merge(vocabulary)
    ignore_merges = vocabulary.ignore_merges

    def encode_piece(piece: str) -> Sequence[int]:
        byte_text = to_byte_text(piece.encode("utf-8", "surrogateescape"))
        if ignore_merges or len(byte_text) == 1:
            token = ids.get(byte_text)
            if token is not None:
                return (token,)
        return merge(byte_text)

    return encode_piece


def _library_merge(vocabulary: Vocabulary) -> Callable[[str], Sequence[int]] | None:
    """Merging by the `tokenizers` package: some 20 times faster than `_plain_merge`, but every symbol needs an id.

    So it is used where every byte and every merge result have one, which all published vocabularies satisfy; else None.
    """
    ids = vocabulary.ids
    if any(character not in ids for character in _CHARACTERS):
        return None
    merges: dict[tuple[str, str], None] = {}
    for left, right in vocabulary.merges:
        if left not in ids or right not in ids:
            continue  # never applies: with all results known, every symbol is a token
        if left + right not in ids:
            return None
        merges.setdefault((left, right))
    model = models.BPE(dict(ids), list(merges), cache_capacity=0)
    return lambda byte_text: tuple(token.id for token in model.tokenize(byte_text))


def _plain_merge(vocabulary: Vocabulary) -> Callable[[str], Sequence[int]]:
    """Merging for irregular vocabularies. Bytes that no token covers are dropped, as other loaders do."""
    ids = vocabulary.ids
    ranks: dict[tuple[str, str], int] = {}
    for rank, pair in enumerate(vocabulary.merges):
        ranks.setdefault(pair, rank)

    def merge(byte_text: str) -> Sequence[int]:
        symbols = merge_adjacent(byte_text, lambda left, right: ranks.get((left, right)))
        tokens = chain.from_iterable((symbol,) if symbol in ids else symbol for symbol in symbols)
        return tuple(ids[token] for token in tokens if token in ids)

    return merge
