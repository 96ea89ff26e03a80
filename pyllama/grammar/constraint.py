"""Generation that keeps to a grammar: the tokens allowed next, as a bit mask, through `llguidance`.

`GrammarCompiler` belongs to a vocabulary; a `Constraint` is the state of one sequence. Grammars start at the first
generated token, and end-of-generation tokens are allowed wherever the text so far is complete.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import InvalidArgument, PyllamaError
from pyllama.grammar.deep_thread import call_deep
from pyllama.grammar.gbnf import to_llguidance
from pyllama.grammar.json_schema import SCHEMA_ERROR, has_open_names, parse_schema, prepare_schema

# No whitespace before or after the value; inside as much as models use to lay JSON out.
_JSON_LAYOUT = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}

# Without `\u`: the control characters that have no short escape cannot be written then.
_FEW_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}

# Where only one text is possible the library would allow one way to spell it in tokens. The model shall choose.
_ALL_SPELLINGS = '%llguidance {"no_forcing": true}\n'

# Recursive grammars take one item per code point and rule: on a large vocabulary a mask needs more than the library's
# 50 000. Five millions are a quarter of a second; a grammar that needs more fails its request.
_LIMITS = {"step_max_items": 5_000_000, "max_items_in_row": 10_000}


MAX_SECONDS = 20
"""For the work on one grammar before its first token."""
# Clients with tools send the same ones with every turn, and a hundred of them take a tenth of a second to compile.
MOST_KEPT = 32


class GrammarError(InvalidArgument):
    """The grammar or the schema is wrong, or asks for what cannot be honoured; the message says where or which."""


class ConstraintFailed(PyllamaError):
    """A grammar allows no token any more, or became too costly to follow. The sequence cannot go on."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What a generation must keep to. may_lead: blanks may come first; not with gbnf.

    `kind`: gbnf (a grammar), json_schema (JSON text), or lark: llguidance's notation with a rule `root`, for grammars
    that this package writes.
    """

    kind: str
    text: str
    may_lead: bool = False


class GrammarTokenizer(Protocol):
    """The part of `pyllama.tokenizer.Tokenizer` that is needed here."""

    n_vocab: int
    eog_ids: frozenset[int]

    def piece(self, token: int, *, special: bool = False) -> bytes: ...

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]: ...


class Constraint:
    """The grammar's state of one sequence. One thread at a time; `mask` releases the GIL while it computes.

    next_bits: the matcher's mask, where it is known already.
    """

    def __init__(
        self, matcher: Any, compiler: GrammarCompiler, banned: Collection[int], next_bits: bytes | None = None
    ) -> None:
        self._matcher = matcher
        self._next_bits = next_bits
        self._compiler = compiler
        self._allowed = compiler.mask_without(banned)
        self.has_ended = False  # an end-of-generation token was drawn

    def copy(self, banned: Collection[int] = ()) -> Constraint:
        """Another sequence in the same state, which may have other banned tokens."""
        return Constraint(self._matcher.deep_copy(), self._compiler, banned, self._next_bits)

    def fork(self) -> Constraint:
        """The same sequence once more, to look ahead with."""
        other = object.__new__(Constraint)
        other.__dict__.update(self.__dict__)
        other._matcher = self._matcher.deep_copy()
        return other

    def mask(self) -> NDArray[np.uint32]:
        """Tokens that may come next: bit t % 32 of word t // 32. Raises `ConstraintFailed` when there are none."""
        if self._next_bits is None:
            self._next_bits = self._matcher.compute_bitmask()
        bits = self._next_bits
        self._check()
        mask = np.frombuffer(bits, np.uint32)[: len(self._allowed)].copy()
        self._compiler.spread_end(mask)
        mask &= self._allowed
        if not mask.any():
            raise ConstraintFailed("the grammar allows only tokens that are banned")
        return mask

    @property
    def every_token(self) -> NDArray[np.uint32]:
        """The mask that allows all of them."""
        return self._compiler.every_token

    def try_accept(self, token: int) -> bool:
        """Go on with a token that is no end; False, and nothing has changed, when the grammar does not allow it."""
        self._next_bits = None
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def try_spell(self, text: bytes) -> bool:
        """Go on with a text, however it is spelled in tokens; after False this constraint cannot be used any more."""
        self._next_bits = None
        tokens = self._compiler.spell(text)
        return bool(self._matcher.try_consume_tokens(tokens) == len(tokens))

    def can_spell(self, text: bytes) -> bool:
        """Whether the text could come next. Nothing changes."""
        tokens = self._compiler.spell(text)
        return bool(self._matcher.validate_tokens(tokens) == len(tokens))

    def accept(self, token: int) -> None:
        """Go on with a drawn token. Raises `ConstraintFailed` when the grammar does not allow it."""
        if token in self._compiler.end_ids:
            if not self._matcher.is_accepting():
                raise ConstraintFailed("the text ended before the grammar was complete")
            self.has_ended = True
            return
        self._next_bits = None
        if not self._matcher.consume_token(token):
            self._check()
            raise ConstraintFailed(f"the grammar does not allow token {token}")

    @property
    def must_end(self) -> bool:
        """The text is complete, nothing can follow, and every token that could say so is banned or missing."""
        if not self._matcher.is_stopped() or self._matcher.is_error():
            return False
        return not any(int(self._allowed[token // 32]) >> (token % 32) & 1 for token in self._compiler.end_ids)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(f"the grammar cannot be followed: {_reason(self._matcher)}")


class GrammarCompiler:
    """Compiles grammars for one vocabulary, whose table is built at the first use. Safe to use from several threads.

    n_vocab: rows of the model's output, of which the tokenizer may know fewer; the others are never allowed.
    """

    def __init__(self, tokenizer: GrammarTokenizer, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._lock = threading.Lock()
        self._table: Any = None
        self._made: dict[Hashable, Any] = {}  # matchers at the beginning of a text, and what belongs to them
        self._past: dict[bytes, list[tuple[int, int, bytes]]] = {}
        self.end_ids: frozenset[int] = frozenset(token for token in tokenizer.eog_ids if token < n_vocab)
        # llguidance wants an end token: without one a number after all tokens stands for it, which no mask shows.
        self._end = min(self.end_ids, default=n_vocab)
        self._end_mask = self._bits(self.end_ids)
        self.every_token = self._bits(range(n_vocab))

    def compile(self, source: GrammarSource, banned: Collection[int] = ()) -> Constraint:
        """A constraint at the beginning of a text. banned: tokens that the sampler will not draw.

        Raises `GrammarError`.
        """
        matcher, first = self.kept(source, lambda: self._compile(source))
        return Constraint(matcher.deep_copy(), self, banned, first)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns; what was made last for this vocabulary is kept. It must not be changed."""
        with self._lock:
            if key in self._made:
                self._made[key] = self._made.pop(key)  # the last one used stands last
                return self._made[key]
        made = make()
        with self._lock:
            self._made[key] = made
            while len(self._made) > MOST_KEPT:
                del self._made[next(iter(self._made))]
        return made

    def _compile(self, source: GrammarSource) -> tuple[Any, bytes]:
        """A matcher at its beginning, and its mask there."""
        from llguidance import LLMatcher, LLParserLimits

        prefix = SCHEMA_ERROR if source.kind == "json_schema" else ""
        try:
            grammar = self._translate(source)
        except GrammarError:
            raise
        except InvalidArgument as error:
            raise GrammarError(str(error)) from None
        except ValueError as error:  # the library's own
            raise GrammarError(f"{prefix}{error}") from None
        table = self._llguidance_table()

        def build() -> tuple[Any, bytes]:
            limits = LLParserLimits(**_LIMITS, verbose_errors=False)
            matcher = LLMatcher(table, grammar, log_level=0, limits=limits)
            return matcher, b"" if matcher.is_error() else matcher.compute_bitmask()

        try:
            matcher, first = call_deep(build, MAX_SECONDS)  # it recurses along chains of rules and references
        except TimeoutError:
            raise GrammarError(f"{prefix}too complex: it was not ready to use within {MAX_SECONDS} seconds") from None
        except MemoryError as error:
            raise GrammarError(f"{prefix}{error}") from None
        if not first:
            reason = _schema_fault(source) if source.kind == "json_schema" else ""
            raise GrammarError(f"{prefix}{reason or _reason(matcher)}")
        if matcher.is_error():
            raise GrammarError(f"{prefix}no text can match: {_reason(matcher)}")
        return matcher, first

    def prepare(self) -> None:
        """Build the table now: it takes a second per 150,000 tokens, and holds the GIL."""
        self._llguidance_table()

    def marker(self, text: str) -> str:
        """A text in a grammar of kind lark. It may also be one token that has no text of its own."""
        token = self._single_token(text)
        is_hidden = token is not None and token < self._n_vocab and not self._tokenizer.piece(token)
        literal = json.dumps(text)
        return f"({literal} | <[{token}]>)" if is_hidden and token not in self.end_ids else literal

    def spell(self, text: bytes) -> list[int]:
        """Tokens whose bytes are those of `text`."""
        return list(self._llguidance_table().tokenize_bytes(text))

    def tokens_past(self, word: bytes) -> list[tuple[int, int, bytes]]:
        """Tokens in which a text that ends with a part of `word`, or with nothing of it, completes it and goes on.

        Triples of how many bytes of the word come before the token, the token, and its bytes after the word.
        """
        with self._lock:
            known = self._past.get(word)
        if known is not None:
            return known
        found = []
        for token in range(min(self._tokenizer.n_vocab, self._n_vocab)):
            piece = self._tokenizer.piece(token)
            if piece.find(word[-1:], 0, -1) < 0:
                continue
            at = piece.find(word)
            if at >= 0 and at + len(word) < len(piece):
                found.append((0, token, piece[at + len(word) :]))
            for n_before in range(1, len(word)):
                rest = word[n_before:]
                if len(piece) > len(rest) and piece.startswith(rest):
                    found.append((n_before, token, piece[len(rest) :]))
        with self._lock:
            self._past[word] = found
        return found

    def bit(self, token: int) -> NDArray[np.uint32]:
        """The mask that allows one token."""
        return self._bits((token,))

    def mask_without(self, banned: Collection[int]) -> NDArray[np.uint32]:
        """All tokens of the model but the banned ones."""
        return ~self._bits(banned) & self.every_token

    def spread_end(self, mask: NDArray[np.uint32]) -> None:
        """Where the one end token that llguidance knows is allowed, all of them are."""
        if self._end < self._n_vocab and int(mask[self._end // 32]) >> (self._end % 32) & 1:
            mask |= self._end_mask

    def _bits(self, tokens: Collection[int]) -> NDArray[np.uint32]:
        flags = np.zeros(-(-self._n_vocab // 32) * 32, bool)
        flags[[token for token in tokens if 0 <= token < self._n_vocab]] = True
        return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)

    def _translate(self, source: GrammarSource) -> str:
        from llguidance import LLMatcher

        start = "start: /[ \\t\\r\\n]{1,8}/? root\n" if source.may_lead else "start: root\n"
        if source.kind == "lark":
            return str(LLMatcher.grammar_from_lark(f"{_ALL_SPELLINGS}{start}{source.text}"))
        if source.kind == "gbnf":
            return str(LLMatcher.grammar_from_lark(_ALL_SPELLINGS + to_llguidance(source.text, self._single_token)))
        if source.kind == "json_schema":
            schema = prepare_schema(parse_schema(source.text))
            layout = _JSON_LAYOUT | (_FEW_ESCAPES if has_open_names(schema) else {})
            schema = {"x-guidance": layout, **schema}
            return str(LLMatcher.grammar_from_lark(f"{_ALL_SPELLINGS}{start}root: %json {json.dumps(schema)}\n"))
        raise InvalidArgument(f"grammar kind {source.kind!r}, expected 'gbnf' or 'json_schema'")

    def _single_token(self, text: str) -> int | None:
        tokens = self._tokenizer.encode(text, parse_special=True)
        return tokens[0] if len(tokens) == 1 else None

    def _llguidance_table(self) -> Any:
        with self._lock:
            if self._table is None:
                self._table = _build_table(self._tokenizer, self._n_vocab, self._end)
            return self._table


def _schema_fault(source: GrammarSource) -> str:
    """What the library says of a schema alone, without the grammar around it."""
    from llguidance import LLMatcher

    schema = json.dumps(prepare_schema(parse_schema(source.text)))
    try:
        validate = LLMatcher.validate_grammar
        return call_deep(lambda: str(validate(LLMatcher.grammar_from_json_schema(schema))), MAX_SECONDS)
    except (TimeoutError, MemoryError):
        return ""


def _reason(matcher: Any) -> str:
    """The library's message without the dump of its state."""
    return str(matcher.get_error()).partition("\n<state>")[0]


class _TokenTable:
    """The view of a vocabulary that `llguidance.TokenizerWrapper` reads; calling it turns bytes into tokens."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], end: int, encode: Any) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special)
        self.eos_token_id = end
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return list(self._encode(text))


def _build_table(tokenizer: GrammarTokenizer, n_vocab: int, end: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    known = min(tokenizer.n_vocab, n_vocab)
    pieces: list[bytes] = []
    special = []
    for token in range(max(n_vocab, end + 1)):
        is_end = token == end or token in tokenizer.eog_ids
        piece = b"" if is_end or token >= known else tokenizer.piece(token)
        if not piece:  # no text comes from it: it may only be named by its number
            special.append(token)
            piece = f"<|{token}|>".encode()
        pieces.append(piece)
    table = _TokenTable(pieces, special, end, tokenizer.encode)
    return LLTokenizer(TokenizerWrapper(table), n_vocab=len(pieces), eos_token=end)
