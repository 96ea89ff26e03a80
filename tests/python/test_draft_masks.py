"""Masks along a draft are those that the sequence itself would have had at each token, and it notices nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pyllama.grammar import ConstraintFailed, GrammarCompiler, GrammarSource
from pyllama.grammar.draft_masks import DraftMasks
from pyllama.grammar.guide import BudgetRules, Guide, GuideSource, ThinkingRules, compile_guide
from pyllama.grammar.triggers import Trigger

END = 256
N_VOCAB = 270


class Bytes:
    """A token per byte, and a few longer ones."""

    n_vocab = N_VOCAB
    eog_ids = frozenset({END})
    words = (b"ab", b"abc", b'"a', b'":', b"</t>", b"<t>", b"12", b"}]", b"true", b", ", b"\n\n", b"<c>", b"e\n")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token]) if token < END else b"" if token == END else self.words[token - END - 1]

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        return list(text.encode())


TOKENIZER = Bytes()
COMPILER = GrammarCompiler(TOKENIZER, N_VOCAB)
LETTERS = GrammarSource("gbnf", 'root ::= [a-f]+ ("," [a-f]+)* "."')
SCHEMA = GrammarSource("json_schema", '{"type": "array", "items": {"enum": [true, "ab", 12]}, "maxItems": 3}')
THINKING = ThinkingRules("<t>", "</t>")
SOURCES = {
    "grammar": GuideSource(LETTERS),
    "schema": GuideSource(SCHEMA),
    "lazy": GuideSource(GrammarSource("gbnf", 'root ::= "<c>" [a-f]+ "."'), (Trigger("word", "<c>"),)),
    "after a block": GuideSource(LETTERS, thinking=THINKING),
    "in an open block": GuideSource(LETTERS, thinking=ThinkingRules("<t>", "</t>", is_open=True)),
    "budget": GuideSource(budget=BudgetRules("<t>", ("</t>",), tokens=4, message="so")),
    "budget and grammar": GuideSource(
        LETTERS, thinking=THINKING, budget=BudgetRules("<t>", ("</t>",), tokens=3, message="so")
    ),
}


def guide(kind: str) -> Guide:
    return compile_guide(SOURCES[kind], COMPILER, TOKENIZER.piece, lambda text: TOKENIZER.encode(text))


def allowed(mask: Any) -> list[int]:
    if mask is None:
        return list(range(N_VOCAB))
    return [token for token in range(N_VOCAB) if int(mask[token // 32]) >> (token % 32) & 1]


def random_text(state: Guide, rng: random.Random, length: int) -> list[int]:
    """Tokens that the guide allows, special spellings likelier than single bytes."""
    state, text = state.fork(), []
    while len(text) < length and not state.must_end:
        found = allowed(state.mask())
        long = [token for token in found if token > END]
        text.append(rng.choice(long) if long and rng.random() < 0.4 else rng.choice(found))
        if text[-1] == END:
            break
        state.accept(text[-1])
    return text


def walked(state: Guide, draft: Sequence[int]) -> tuple[int, Any]:
    walk = DraftMasks(state, draft, {END})
    walk.walk()
    return walk.found()


@pytest.mark.parametrize("kind", SOURCES)
def test_masks_are_those_of_the_sequence_itself(kind: str) -> None:
    rng = random.Random(kind)
    n_long = 0
    for _ in range(60):
        state = guide(kind)
        text = random_text(state, rng, 24)
        for token in text[: rng.randint(0, len(text) - 1)]:
            state.accept(token)
        draft = random_text(state, rng, rng.randint(1, 8))
        length, masks = walked(state, draft)
        assert masks.shape == (length + 1, -(-N_VOCAB // 32))
        n_long += length > 2
        for token, mask in zip([*draft[:length], None], masks, strict=True):
            assert allowed(mask) == allowed(state.mask())
            if token is not None:
                state.accept(token)
        if length < len(draft):  # only where the text can end there
            if draft[length] != END:
                state.accept(draft[length])
                assert state.must_end
            else:
                assert END in allowed(masks[-1])
    assert n_long > 20


@pytest.mark.parametrize("kind", ["grammar", "schema", "budget and grammar"])
def test_a_draft_ends_before_the_token_that_is_refused(kind: str) -> None:
    rng = random.Random(kind)
    state, n_cut = guide(kind), 0
    for _ in range(60):
        draft = random_text(state, rng, 8)
        fork, n_right = state.fork(), rng.randint(0, len(draft) - 1)
        for token in draft[:n_right]:
            fork.accept(token)
        refused = sorted(set(range(N_VOCAB)) - set(allowed(fork.mask())) - {END})
        if not refused:
            continue
        n_cut += 1
        length, masks = walked(state, [*draft[:n_right], rng.choice(refused), *draft[n_right:]])
        assert length == n_right
        assert allowed(masks[-1]) == allowed(fork.mask())
    assert n_cut > 20


def test_the_sequence_goes_on_as_if_nobody_had_looked_ahead() -> None:
    state, other = guide("grammar"), guide("grammar")
    for token in b"ab,c":
        walked(state, list(b"abc,d."))
        state.accept(token)
        other.accept(token)
        assert allowed(state.mask()) == allowed(other.mask())


def test_what_cannot_go_on_has_no_draft() -> None:
    """The sequence's own draw meets the same error."""
    failing = GuideSource(GrammarSource("gbnf", 'root ::= "a" "b"'))
    state = compile_guide(failing, COMPILER, TOKENIZER.piece, TOKENIZER.encode).copy({ord("a"), END + 1})
    length, masks = walked(state, [ord("a")])
    assert (length, len(masks)) == (0, 0)
    with pytest.raises(ConstraintFailed):
        state.mask()


def test_a_walk_that_nobody_waits_for_ends() -> None:
    walk = DraftMasks(guide("grammar"), list(b"abcdef"), {END})
    walk.is_wanted = False
    walk.walk()
    assert walk.found()[0] == 0


def test_a_wish_to_end_the_thoughts_is_left_to_the_sequence() -> None:
    source = GuideSource(budget=BudgetRules("<t>", ("</t>",), can_end=True))
    state = compile_guide(source, COMPILER, TOKENIZER.piece, TOKENIZER.encode)
    for token in b"<t>a":
        state.accept(token)
    assert state.end_thinking()
    length, masks = walked(state, list(b"bcd"))
    assert length == 3
    np.testing.assert_array_equal(masks, np.broadcast_to(COMPILER.every_token, masks.shape))
    assert allowed(state.mask()) == [ord("<")]
