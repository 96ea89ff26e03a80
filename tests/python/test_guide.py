"""Grammars that begin late and limits on thoughts, token by token: guides, triggers, budgets."""

from __future__ import annotations

import itertools
import random
import re
import time
from typing import Any

import pytest

from pyllama.errors import InvalidArgument
from pyllama.grammar import ConstraintFailed, GrammarCompiler, GrammarSource
from pyllama.grammar.guide import BudgetRules, Guide, GuideSource, ThinkingGate, ThinkingRules, compile_guide
from pyllama.grammar.reasoning_budget import BudgetState, ReasoningBudget
from pyllama.grammar.triggers import Trigger, TriggerWatch, compile_pattern

END, HIDDEN = 256, 257
WORDS = {258: b"ab<c>d", 259: b"<c>", 260: b"c>[", 261: b"c>x", 262: b"</t>\n[", 263: b"</t>!", 264: b"\xe6"}
N_VOCAB = 265


class Bytes:
    """A token per byte, some longer ones, and a control token whose text is `<go>`."""

    n_vocab = N_VOCAB
    eog_ids = frozenset({END})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token == HIDDEN:
            return b"<go>" if special else b""
        return WORDS.get(token, bytes([token]) if token < 256 else b"")

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        if parse_special and text == "<go>":
            return [HIDDEN]
        return list(text.encode())


TOKENIZER = Bytes()
COMPILER = GrammarCompiler(TOKENIZER, N_VOCAB)
DIGITS = GrammarSource("gbnf", 'root ::= "[" [0-9]+ "]"')


def guide(grammar: GrammarSource | None = DIGITS, *triggers: Trigger, **rules: Any) -> Guide:
    source = GuideSource(grammar, triggers, **rules)
    return compile_guide(
        source,
        COMPILER,
        lambda token: TOKENIZER.piece(token, special=True),
        lambda text: TOKENIZER.encode(text, parse_special=True),
    )


def allows(state: Guide, token: int) -> bool:
    mask = state.mask()
    return mask is None or bool(int(mask[token // 32]) >> (token % 32) & 1)


def allowed(state: Guide) -> set[int] | None:
    mask = state.mask()
    return None if mask is None else {t for t in range(N_VOCAB) if int(mask[t // 32]) >> (t % 32) & 1}


def feed(state: Guide, *parts: int | str | bytes) -> Guide:
    """Accept tokens by number, texts byte by byte; each must be allowed."""
    for part in parts:
        for token in [part] if isinstance(part, int) else part.encode() if isinstance(part, str) else part:
            assert allows(state, token), token
            state.accept(token)
    return state


WORD = Trigger("word", "<c>")
WITH_WORD = GrammarSource("gbnf", 'root ::= "<c>" [\\[d] [0-9]* "]"')
PIECES = [["<c>[1]"], ["x<", "c>[1]"], [258, "1]"], ["ab", 259, "[1]"], ["<", 260, "1]"], ["<<c>d]"], ["<c<c>[12]"]]


@pytest.mark.parametrize("parts", PIECES)
def test_a_word_starts_the_grammar_wherever_tokens_cut_it(parts: list[int | str]) -> None:
    state = feed(guide(WITH_WORD, WORD), *parts)
    assert allowed(state) == {END}
    state.accept(END)
    assert state.has_ended


def test_until_its_trigger_a_lazy_grammar_forbids_nothing_but_a_wrong_start() -> None:
    state = guide(WITH_WORD, WORD)
    assert allowed(state) is None
    assert not state.must_end
    feed(state, "a <")
    wrong = set(range(N_VOCAB)) - (allowed(state) or set())
    assert wrong == {261}  # it would complete the word, and go on with an x
    feed(state, "no")
    assert allowed(state) is None
    feed(state, "<c>")
    assert allowed(state) == {ord("["), ord("d")}
    state = guide(WITH_WORD, WORD)
    state.accept(END)  # free text may end
    assert state.has_ended


def test_a_hidden_token_starts_and_is_read_by_the_grammar() -> None:
    grammar = GrammarSource("gbnf", 'root ::= <go> "x"')
    for trigger in (Trigger("token", token=HIDDEN), Trigger("word", "<go>")):
        assert allowed(feed(guide(grammar, trigger), "ab", HIDDEN, "x")) == {END}


def test_a_pattern_starts_the_grammar_at_its_first_group() -> None:
    numbers = GrammarSource("gbnf", "root ::= [0-9]+ [.]")
    pattern = Trigger("pattern", r"n(?:umber)? *= *()(\d)")
    assert allowed(feed(guide(numbers, pattern), "the n =", "12.")) == {END}
    full = Trigger("full_pattern", r"\s*(\d)")
    assert allowed(feed(guide(numbers, full), " 12.")) == {END}
    assert allowed(feed(guide(numbers, full), "x 12.")) is None
    whole = Trigger("pattern", r"^\s*(\d)$")
    assert allowed(feed(guide(numbers, whole), " 5.")) == {END}
    soon = Trigger("pattern", r"(\d)", within=4)
    assert allowed(feed(guide(numbers, soon), "abcde5.")) is None
    with pytest.raises(ConstraintFailed, match="begins here"):
        feed(guide(numbers, Trigger("pattern", r"go")), "go")
    forgiving = feed(guide(numbers, Trigger("pattern", r"go"), is_forgiving=True), "go on")
    assert allowed(forgiving) is None


def test_the_first_of_several_triggers_counts_and_only_once() -> None:
    state = feed(guide(WITH_WORD, Trigger("word", "zzz"), WORD), "zz<c>[7")
    assert allowed(state) == {*range(ord("0"), ord("9") + 1), ord("]")}


@pytest.mark.parametrize("pattern", ["(a+)+b", "(ab|a)*c", r"(a)\1", "((a*)b)*", "(", "a{1,9999999999}", "x" * 20_000])
def test_patterns_that_are_wrong_or_could_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument):
        compile_pattern(pattern)


def test_harmless_patterns_are_taken_and_searched_in_time() -> None:
    for pattern in (
        r"<tool>[\s\S]*",
        r"^\s*\{\s*\"name\"",
        r"(?:<a>[\s\S]*?</a>\s*)?(<b>|<c>)",
        r"(?:\d{3}){2}",
        "a|b",
    ):
        compile_pattern(pattern)
    watch = TriggerWatch([Trigger("word", "<tool_call>")])
    started = time.perf_counter()
    for _ in range(100_000):
        watch.push(1, b" word")
    assert len(watch.text) < 20
    assert time.perf_counter() - started < 20  # linear: a second or so; quadratic: minutes


def test_a_watch_finds_the_same_place_however_the_text_is_cut() -> None:
    numbers = random.Random(5)
    for _ in range(300):
        text = "".join(numbers.choices(["<", "c>", "<c>", "a", "é", " "], k=8)).encode()
        start = text.find(b"<c>")
        cuts = sorted(numbers.choices(range(len(text) + 1), k=3))
        watch, replay = TriggerWatch([WORD]), None
        for index, (a, b) in enumerate(itertools.pairwise([0, *cuts, len(text)])):
            if replay is None:
                replay = watch.push(index, text[a:b])
                read = text[:b]
        if start < 0:
            assert replay is None
            continue
        assert replay is not None
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        spelled = b"".join(part if isinstance(part, bytes) else pieces[part] for part in replay)
        assert spelled == read[start:]


THINKING = ThinkingRules("<t>", "</t>")
OPEN = ThinkingRules("<t>", "</t>", is_open=True)


def test_a_grammar_waits_for_the_end_of_a_block_that_the_prompt_opened() -> None:
    lead = GrammarSource("lark", 'root: "[" /[0-9]+/ "]"\n')
    state = guide(lead, thinking=OPEN)
    assert not allows(state, END)
    feed(state, "so [ < </t")
    assert set(range(N_VOCAB)) - (allowed(state) or set()) == {END, 263}
    assert allowed(feed(state, ">\n\n[12]")) == {END}
    state = feed(guide(lead, thinking=OPEN), "so", 262, "5]")
    assert allowed(state) == {END}
    assert not allows(guide(lead, thinking=OPEN), 263)  # it ends the block, and goes on with what is no answer


def test_the_model_chooses_whether_to_think() -> None:
    lead = GrammarSource("lark", 'root: "<c>" /[0-9]+/ "]"\n')
    state = guide(lead, thinking=THINKING)
    assert allowed(state) == {ord("<"), 259}
    assert allowed(feed(state, "<")) == {ord("t"), ord("c")}
    thinking = feed(state.copy(), "t>hm <c></t>")
    assert {*b" \n\t\r<", 259} == allowed(thinking)
    assert allowed(feed(thinking, "\n<c>1]")) == {END}
    assert allowed(feed(state, "c>1]")) == {END}
    assert allowed(guide(lead, thinking=ThinkingRules("<t>", "</t>", may_open=False))) == {ord("<"), 259}


def test_a_trigger_inside_the_thoughts_is_none() -> None:
    for rules, start in ((THINKING, "<t>"), (OPEN, "")):
        state = feed(guide(WITH_WORD, WORD, thinking=rules), f"{start}so <c>x</t>")
        assert allowed(state) is None
        assert allowed(feed(state, "ok <c>[1]")) == {END}
    assert allowed(feed(guide(WITH_WORD, WORD, thinking=THINKING), "<c>[1]")) == {END}
    assert allowed(feed(guide(WITH_WORD, WORD, thinking=THINKING), "<tag <c>[1]")) == {END}


def test_copies_go_their_own_ways_with_their_own_bans() -> None:
    state = feed(guide(WITH_WORD, WORD), "a<c")
    other = feed(state.copy(), ">")
    banned = state.copy({ord("[")})
    feed(banned, ">")
    assert allowed(other) == {ord("["), ord("d")}
    assert allowed(banned) == {ord("d")}
    assert allowed(feed(state, "a")) is None


# ---- budgets


def budget(tokens: int, forced: bytes = b"</t>") -> ReasoningBudget:
    return ReasoningBudget([b"<t>"], [b"</t>", b"</s>"], list(forced), tokens)


def run(state: ReasoningBudget, text: bytes) -> bytes:
    """What is written when the model wants `text` and goes on where it was after a forced end."""
    written = b""
    for byte in text:
        while state.forced_token is not None:
            written += bytes([state.forced_token])
            state.accept(state.forced_token, bytes([state.forced_token]))
        written += bytes([byte])
        state.accept(byte, bytes([byte]))
    return written


def test_the_states_of_a_budget() -> None:
    state = budget(3)
    assert run(state, b"ab<t>12") == b"ab<t>12"
    assert state.state is BudgetState.COUNTING
    assert run(state, b"34x") == b"3</t>4x"
    assert state.state is BudgetState.DONE
    assert run(state, b"<t>12345") == b"<t>123</t>45"  # a second block has a budget of its own
    assert run(budget(0), b"<t>1") == b"<t></t>1"
    assert run(budget(-1), b"<t>" + b"1" * 500) == b"<t>" + b"1" * 500
    assert run(budget(9), b"<t>12</t>123456789") == b"<t>12</t>123456789"
    assert run(budget(9), b"<t>12</s>123456789") == b"<t>12</s>123456789"


def test_a_budget_waits_for_the_end_of_a_character() -> None:
    for tokens in (1, 2, 3):
        assert run(budget(tokens), "<t>漢x".encode()) == "<t>漢</t>x".encode()
    assert run(budget(4), "<t>漢漢x".encode()) == "<t>漢漢</t>x".encode()


def test_a_block_is_ended_on_demand_and_only_a_block() -> None:
    state = budget(-1)
    state.end_block()
    assert state.state is BudgetState.IDLE
    run(state, b"<t>1")
    state.end_block()
    assert run(state, b"2") == b"</t>2"


def test_a_budget_without_a_grammar_guides_alone() -> None:
    rules = BudgetRules("<t>", ("</t>",), tokens=2, message="!", prompt="<t>a")
    state = feed(guide(None, budget=rules), "b")
    for byte in b"!</t>":
        assert allowed(state) == {byte}
        state.accept(byte)
    assert allowed(state) is None


def test_beside_a_users_grammar_a_budget_forces_only_what_the_grammar_allows() -> None:
    rules = BudgetRules("<t>", ("</t>",), tokens=2)
    grammar = GrammarSource("gbnf", 'root ::= "<t>" [a-z]* "</t>" [0-9]+')
    state = feed(guide(grammar, budget=rules), "<t>ab")
    assert allowed(state) == {ord("<")}
    feed(state, "</t>1")
    stubborn = feed(guide(GrammarSource("gbnf", 'root ::= "<t>" [a-z]*'), budget=rules), "<t>ab")
    assert ord("c") in (allowed(stubborn) or ())


def test_while_a_lazy_grammars_text_is_a_block_of_the_budget_no_trigger_counts() -> None:
    rules = BudgetRules("<t>", ("</t>",), tokens=20)
    state = feed(guide(WITH_WORD, WORD, budget=rules), "<t><c>x</t>")
    assert allowed(state) is None
    assert allowed(feed(state, "<c>[1]")) == {END}


def test_a_calls_text_is_not_limited_as_if_it_were_thoughts() -> None:
    text = GrammarSource("lark", 'root: "<c>" /(?s:.*)/ "]"\n')
    rules = BudgetRules("<t>", ("</t>",), tokens=2)
    state = guide(text, WORD, thinking=THINKING, budget=rules)
    feed(state, "<c> <t>abcdef")
    assert len(allowed(state) or ()) > 100


def test_the_gate_stands_where_the_reader_does() -> None:
    for text, inside, over in (
        ("", False, False),
        (" <t", False, False),
        ("\n<t>x", True, False),
        ("<t>x</t", True, False),
        ("<t>x</t>", False, True),
        ("<u", False, True),
    ):
        gate = ThinkingGate(THINKING)
        for byte in text.encode():
            if not gate.is_over:
                gate.push(bytes([byte]))
        assert (gate.is_inside, gate.is_over) == (inside, over), text


class ManyWords(Bytes):
    """60,000 tokens, many of which hold the end of a tag and more."""

    n_vocab = 60_000

    def __init__(self) -> None:
        numbers = random.Random(1)
        self._pieces = [
            bytes([i]) if i < 256 else "".join(numbers.choices('ab<>c/t[{"\n ', k=numbers.randrange(2, 8))).encode()
            for i in range(self.n_vocab)
        ]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"" if token == END else self._pieces[token]


def test_a_guide_of_a_large_vocabulary_is_made_in_time() -> None:
    """Every token that could end a tag is tried once, and each try costs microseconds."""
    tokenizer = ManyWords()
    compiler = GrammarCompiler(tokenizer, tokenizer.n_vocab)
    compiler.compile(WITH_WORD)  # the table
    source = GuideSource(WITH_WORD, (WORD,), thinking=THINKING)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        state = compile_guide(source, compiler, tokenizer.piece, tokenizer.encode)
        seconds.append(time.perf_counter() - started)
    assert seconds[0] < 20  # about 0.3; with a copy of the grammar for each of them it was minutes
    for token in b"a<c":
        state.accept(token)
    mask = state.mask()
    assert mask is not None
    for token in range(257, 20_000):
        piece = tokenizer.piece(token)
        tails = [piece[1:]] if piece[:1] == b">" else []
        if b"<c>" in piece:
            tails.append(piece.partition(b"<c>")[2])
        fits = all(re.fullmatch(rb"|[\[d][0-9]*\]?", tail) for tail in tails)
        assert bool(int(mask[token // 32]) >> (token % 32) & 1) is fits, piece
