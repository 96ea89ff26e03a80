"""`Tokenizer`: text to token ids and back, for the vocabulary inside a GGUF file.

The vocabulary is read by `vocabulary.py`; merging is done by `tokenizer_bpe.py` and `tokenizer_spm.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.tokenizer_bpe import BytePairEncoder, from_byte_text
from pyllama.tokenizer_spm import SentencePieceEncoder
from pyllama.vocabulary import SPM_SPACE, TokenType, Vocabulary, byte_of_token

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Immutable; may be used from several threads at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._encoder = BytePairEncoder(vocabulary) if vocabulary.model == "gpt2" else SentencePieceEncoder(vocabulary)
        by_type: dict[int, list[int]] = {}
        for token, kind in enumerate(vocabulary.types):
            by_type.setdefault(kind, []).append(token)
        user_defined = by_type.get(TokenType.USER_DEFINED, [])
        hidden = by_type.get(TokenType.CONTROL, []) + by_type.get(TokenType.UNKNOWN, [])
        self._user_defined = _TokenFinder(vocabulary.texts, user_defined)
        self._special = _TokenFinder(vocabulary.texts, user_defined + hidden)
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._special_pieces: list[bytes | None] = [None] * self.n_vocab

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From GGUF key/values: strings as `str` with surrogate escapes, arrays as sequences or numpy arrays.

        Raises `TokenizerError` naming the key at fault.
        """
        return cls(Vocabulary.from_metadata(metadata))

    @property
    def n_vocab(self) -> int:
        return len(self.vocabulary.texts)

    @property
    def model(self) -> str:
        """`gpt2` (byte-level BPE) or `llama` (SentencePiece)."""
        return self.vocabulary.model

    @property
    def pre(self) -> str:
        """Name of the pre-tokenizer; `default` for SentencePiece."""
        return self.vocabulary.pre

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.special.get("bos")

    @property
    def eos_id(self) -> int | None:
        return self.vocabulary.special.get("eos")

    @property
    def eot_id(self) -> int | None:
        return self.vocabulary.special.get("eot")

    @property
    def eom_id(self) -> int | None:
        return self.vocabulary.special.get("eom")

    @property
    def unk_id(self) -> int | None:
        return self.vocabulary.special.get("unk")

    @property
    def sep_id(self) -> int | None:
        return self.vocabulary.special.get("sep")

    @property
    def pad_id(self) -> int | None:
        return self.vocabulary.special.get("pad")

    @property
    def fim_pre_id(self) -> int | None:
        return self.vocabulary.special.get("fim_pre")

    @property
    def fim_suf_id(self) -> int | None:
        return self.vocabulary.special.get("fim_suf")

    @property
    def fim_mid_id(self) -> int | None:
        return self.vocabulary.special.get("fim_mid")

    @property
    def fim_pad_id(self) -> int | None:
        return self.vocabulary.special.get("fim_pad")

    @property
    def fim_rep_id(self) -> int | None:
        return self.vocabulary.special.get("fim_rep")

    @property
    def fim_sep_id(self) -> int | None:
        return self.vocabulary.special.get("fim_sep")

    @property
    def add_bos(self) -> bool:
        return self.vocabulary.add_bos

    @property
    def add_eos(self) -> bool:
        return self.vocabulary.add_eos

    @property
    def add_space_prefix(self) -> bool:
        return self.vocabulary.add_space_prefix

    @property
    def eog_ids(self) -> frozenset[int]:
        """Tokens that end generation."""
        return self.vocabulary.eog_ids

    @property
    def suppress_ids(self) -> frozenset[int]:
        """Tokens that must never be sampled."""
        return self.vocabulary.suppress_ids

    def is_eog(self, token: int) -> bool:
        return token in self.vocabulary.eog_ids

    def is_control(self, token: int) -> bool:
        """Control or unknown token: its text is shown only on request. `InvalidArgument` outside the vocabulary."""
        return self.vocabulary.types[self._checked(token)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def token_text(self, token: int) -> str:
        """The text as stored in the file, of byte-level vocabularies in byte characters. Raises `InvalidArgument`."""
        return self.vocabulary.texts[self._checked(token)]

    def encode(self, text: str | bytes, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special: add BOS and EOS where the vocabulary asks for them.
        parse_special: the texts of control tokens become those tokens; otherwise they are plain text. User-defined
        tokens are always recognised. Any input is accepted. Bytes need not be UTF-8: `decode(encode(data)) == data` for
        byte-level vocabularies with all 256 byte tokens. In a `str`, surrogate escapes (U+DC80..U+DCFF) stand for their
        byte; any other lone surrogate has no UTF-8 form and becomes U+FFFD. Raises `TokenizerError` for a byte that a
        SentencePiece vocabulary cannot express.
        """
        text = _normalised(text)
        vocabulary = self.vocabulary
        tokens: list[int] = []
        if add_special and vocabulary.add_bos:
            tokens.append(vocabulary.special["bos"])
        after_special = True
        finder = self._special if parse_special else self._user_defined
        for fragment in finder.partition(text):
            if isinstance(fragment, int):
                tokens.append(fragment)
                after_special = True
            else:
                tokens.extend(self._encoder.encode(fragment, after_special=after_special))
                after_special = False
        if add_special and vocabulary.add_eos:
            tokens.append(vocabulary.special["eos"])
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token, possibly a part of a UTF-8 character. Control tokens are empty unless `special`.

        Raises `InvalidArgument` naming an id outside the vocabulary.
        """
        pieces = self._special_pieces if special else self._pieces
        known = pieces[self._checked(token)]
        if known is None:
            known = pieces[token] = self._make_piece(token, special)
        return known

    def decode(
        self,
        tokens: Iterable[int],
        *,
        special: bool = False,
        remove_special: bool = False,
        clean_spaces: bool | None = False,
    ) -> bytes:
        """Bytes of a whole text: the inverse of `encode`.

        special: render control tokens. remove_special: drop the BOS and EOS that `add_special` adds.
        A prefix space that `encode` adds is taken away again.
        clean_spaces: also remove spaces before punctuation; None as the vocabulary says. Off by default, because with
        it the text no longer is what was encoded. Raises `InvalidArgument` naming an id outside the vocabulary.
        """
        ids = list(tokens)
        for token in ids:
            self._checked(token)
        vocabulary = self.vocabulary
        strip_space = vocabulary.add_space_prefix
        if remove_special and vocabulary.add_bos and ids and ids[0] == self.bos_id:
            ids = ids[1:]
            strip_space = False
        if remove_special and vocabulary.add_eos and ids and ids[-1] == self.eos_id:
            ids = ids[:-1]
        pieces = [self.piece(token, special=special) for token in ids]
        if strip_space and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        if vocabulary.clean_spaces if clean_spaces is None else clean_spaces:
            text = _clean_spaces(text)
        return text

    def _checked(self, token: int) -> int:
        if not 0 <= token < len(self._pieces):
            raise InvalidArgument(f"token id {token} is outside the vocabulary: expected 0..{self.n_vocab - 1}")
        return token

    def _make_piece(self, token: int, special: bool) -> bytes:
        text = self.vocabulary.texts[token]
        kind = self.vocabulary.types[token]
        if kind == TokenType.BYTE:
            value = byte_of_token(text)
            assert value is not None  # checked when the vocabulary was read
            return bytes([value])
        if kind == TokenType.USER_DEFINED or (special and kind in (TokenType.CONTROL, TokenType.UNKNOWN)):
            return text.encode("utf-8", "surrogateescape")
        if kind != TokenType.NORMAL:
            return b""
        if self.model == "gpt2":
            return from_byte_text(text)
        return text.replace(SPM_SPACE, " ").encode("utf-8", "surrogateescape")


class _TokenFinder:
    """Finds the texts of whole tokens. Longer texts take precedence wherever they stand; among equals the leftmost."""

    def __init__(self, texts: Sequence[str], tokens: Iterable[int]) -> None:
        self._ids: dict[str, int] = {}
        for token in tokens:
            self._ids.setdefault(texts[token], token)
        # By the first two characters (of one-character texts, by that one): vocabularies with a token for every run of
        # spaces would otherwise try dozens of lengths at every single space.
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(found) for head, found in lengths.items()}
        firsts = "".join(map(re.escape, sorted({head[0] for head in lengths})))
        self._starts = re.compile(f"[{firsts}]") if firsts else None

    def partition(self, text: str) -> Iterator[str | int]:
        """Token ids and the non-empty texts between them, in order."""
        end = 0
        for start, stop, token in self._accepted(text):
            if end < start:
                yield text[end:start]
            yield token
            end = stop
        if end < len(text):
            yield text[end:]

    def _accepted(self, text: str) -> list[tuple[int, int, int]]:
        """Non-overlapping (start, stop, token) in text order."""
        if self._starts is None:
            return []
        candidates = []
        for match in self._starts.finditer(text):
            start = match.start()
            for head in (match[0], text[start : start + 2]):
                for length in self._lengths.get(head, ()):
                    candidate = text[start : start + length]
                    token = self._ids.get(candidate)
                    if token is not None and len(candidate) == length:
                        size = len(candidate.encode("utf-8", "surrogateescape"))
                        candidates.append((-size, token, start, start + length))
        accepted: list[tuple[int, int, int]] = []
        taken = bytearray(len(text)) if len(candidates) > 1 else bytearray()
        for _, token, start, stop in sorted(candidates):
            if taken and any(taken[start:stop]):
                continue
            if taken:
                taken[start:stop] = b"\1" * (stop - start)
            accepted.append((start, stop, token))
        return sorted(accepted)


def _normalised(text: str | bytes) -> str:
    """`str` whose only surrogates are escapes of bytes that are not UTF-8."""
    if isinstance(text, str):
        if not _LONE_SURROGATE.search(text):
            return text
        # Other surrogates have no byte form; escapes may, side by side, spell a character.
        text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text).encode("utf-8", "surrogateescape")
    return bytes(text).decode("utf-8", "surrogateescape")


def _clean_spaces(text: bytes) -> bytes:
    text = re.sub(rb" ([?!.,])", rb"\1", text)
    text = re.sub(rb" ' ", rb"'", text)
    return re.sub(rb" ('(?:[sm]|re|ve))", rb"\1", text)
