"""What steers an answer besides the sampler: a grammar, when it begins, and the limit on thoughts.

A grammar may begin at once, after the thinking block, or, when it is lazy, at a trigger in the text after that block.
Until then the text is free. A `Guide` is the state of one sequence; it has the methods of a `Constraint`, and its mask
may be None, which allows every token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import InvalidArgument
from pyllama.grammar.constraint import Constraint, ConstraintFailed, GrammarCompiler, GrammarSource
from pyllama.grammar.reasoning_budget import BudgetState, ReasoningBudget
from pyllama.grammar.triggers import Trigger, TriggerWatch

Pieces = Callable[[int], bytes]
"""The bytes of a token as the reader of the answer sees them."""


@dataclass(frozen=True, slots=True)
class ThinkingRules:
    """A thinking block that an answer may begin with. is_open: the prompt has begun it. may_open: the model may.

    so_far: what the prompt holds of an open block, after its start tag.
    """

    start: str
    end: str
    is_open: bool = False
    may_open: bool = True
    so_far: str = ""


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """tokens: that a thinking block may have; negative: any number. message: written before the end tag by force.

    can_end: somebody may ask for the end of a block while it is written. prompt: the beginning of the answer in the
    prompt, which may have begun a block.
    """

    start: str
    ends: tuple[str, ...]
    tokens: int = -1
    message: str = ""
    can_end: bool = False
    prompt: str = ""

    @property
    def acts(self) -> bool:
        return bool(self.start and self.ends) and (self.tokens >= 0 or self.can_end)


@dataclass(frozen=True, slots=True)
class GuideSource:
    """grammar: what the answer keeps to. triggers: with any the grammar is lazy.

    thinking: the grammar waits for the end of this block. Without it a budget counts beside the grammar, which then may
    forbid what the budget would force. is_forgiving: a text that a lazy grammar cannot go on from stays free.
    given: what the prompt holds of the answer already; a grammar that can go on from it does.
    """

    grammar: GrammarSource | None = None
    triggers: tuple[Trigger, ...] = ()
    thinking: ThinkingRules | None = None
    budget: BudgetRules | None = None
    is_forgiving: bool = False
    given: str = ""

    @property
    def acts(self) -> bool:
        return self.grammar is not None or (self.budget is not None and self.budget.acts)


class ThinkingGate:
    """Where an answer stands: before a thinking block, inside it, or after it. The block is the first thing in it."""

    def __init__(self, rules: ThinkingRules) -> None:
        self._start, self._end = rules.start, rules.end.encode()
        self.is_inside = self.has_thought = rules.is_open
        self.is_over = False
        self._text = rules.so_far.encode()[-len(self._end) :] if rules.is_open else b""

    def copy(self) -> ThinkingGate:
        other = object.__new__(ThinkingGate)
        other.__dict__.update(self.__dict__)
        return other

    @property
    def text(self) -> bytes:
        """Inside the block: the end of its text so far."""
        return self._text

    def push(self, piece: bytes) -> bytes | None:
        """What follows the block in this piece, once it is over. An answer that has no block is over as a whole: all of
        its text so far.
        """
        self._text += piece
        if not self.is_inside:
            text = self._text.decode("utf-8", "ignore").lstrip()
            if not text.startswith(self._start):
                if self._start.startswith(text):
                    return None
                self.is_over = True
                return self._text
            self.is_inside = self.has_thought = True
            self._text = text[len(self._start) :].encode()
        _, tag, rest = self._text.partition(self._end)
        if tag:
            self.is_inside, self.is_over = False, True
            return rest
        self._text = self._text[-(len(self._end) - 1) :]
        return None


class Handover:
    """Where free text ends with a word and a grammar begins: keeps tokens out that would go on wrongly after the word.

    A token may complete the word and hold more. constraint: at its beginning. reads_word: it begins with the word.
    """

    def __init__(self, word: bytes, constraint: Constraint, compiler: GrammarCompiler, *, reads_word: bool) -> None:
        self._word = word
        wrong: dict[int, set[int]] = {}
        verdicts: dict[bytes, bool] = {}
        beginning = constraint.copy()
        if reads_word and not beginning.try_spell(word):  # a client's grammar: it fails where it begins
            self._allowed: dict[int, NDArray[np.uint32]] = {}
            return
        for n_before, token, tail in compiler.tokens_past(word):
            if tail not in verdicts:
                verdicts[tail] = beginning.can_spell(tail)
            if not verdicts[tail]:
                wrong.setdefault(n_before, set()).add(token)
        self._allowed = {n_before: compiler.mask_without(tokens) for n_before, tokens in wrong.items()}

    def mask(self, text: bytes) -> NDArray[np.uint32] | None:
        """Tokens that may follow a text with this end; None: all of them."""
        mask = None
        for n_before, allowed in self._allowed.items():
            if n_before == 0 or text.endswith(self._word[:n_before]):
                mask = allowed if mask is None else mask & allowed
        return mask


class Guide:
    """The state of one sequence; made by `compile_guide`."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        pieces: Pieces,
        banned: Collection[int],
        *,
        constraint: Constraint | None = None,
        early: Constraint | None = None,
        opening: Constraint | None = None,
        watch: TriggerWatch | None = None,
        gate: ThinkingGate | None = None,
        budget: ReasoningBudget | None = None,
        handovers: tuple[Handover, ...] = (),
        budget_beside: bool = False,
        is_forgiving: bool = False,
    ) -> None:
        self._compiler, self._pieces = compiler, pieces
        self._constraint = constraint
        self._opening = opening  # the start tag of a block, while it may still come instead of the grammar
        self._early = early  # the grammar for an answer that has no such block
        self._watch, self._gate, self._budget = watch, gate, budget
        self._handovers = handovers
        self._thinking_mask = compiler.mask_without({*banned, *compiler.end_ids})
        self._active = constraint is not None and watch is None and gate is None
        self._budget_beside = budget_beside  # the budget counts on while the grammar is followed
        self._is_forgiving = is_forgiving
        self._must_end_block = False  # set by another thread
        self._start: list[tuple[int, bytes]] = []  # tokens of a lazy answer before it is clear whether it thinks
        self.has_ended = False

    def copy(self, banned: Collection[int] = ()) -> Guide:
        """Another sequence in the same state, which may have other banned tokens."""
        other = self._copy(lambda part: part.copy(banned))
        other._thinking_mask = self._compiler.mask_without({*banned, *self._compiler.end_ids})
        return other

    def fork(self) -> Guide:
        """The same sequence once more, to look ahead with. Who wants the thinking ended does not mean this one."""
        other = self._copy(Constraint.fork)
        other._must_end_block = False
        return other

    def _copy(self, copied: Callable[[Constraint], Constraint]) -> Guide:
        other: Guide = object.__new__(Guide)
        other.__dict__.update(self.__dict__)
        for name in ("_constraint", "_opening", "_early"):
            part: Constraint | None = getattr(self, name)
            setattr(other, name, None if part is None else copied(part))
        for name in ("_watch", "_gate", "_budget"):
            if getattr(self, name) is not None:
                setattr(other, name, getattr(self, name).copy())
        other._start = list(self._start)
        return other

    def end_thinking(self) -> bool:
        """Have the thinking block ended before the next token. Any thread may call it. False: this cannot be done."""
        if self._budget is None:
            return False
        self._must_end_block = True
        return True

    @property
    def takes_time(self) -> bool:
        """Whether a grammar makes the next mask, so that another thread should: then a word to end the thinking block
        that comes after `mask` was called counts from the token after. Without one `mask` is quick.
        """
        return (self._active and self._constraint is not None) or self._opening is not None

    def mask(self) -> NDArray[np.uint32] | None:
        """Tokens that may come next: bit t % 32 of word t // 32; None: all. Raises `ConstraintFailed`."""
        if self._must_end_block and self._budget is not None:
            self._must_end_block = False
            if self._budget_beside or not self._active:
                self._budget.end_block()
        forced = None if self._budget is None else self._budget.forced_token
        if self._active and self._constraint is not None:
            mask = self._constraint.mask()
            if forced is not None and self._budget_beside and int(mask[forced // 32]) >> (forced % 32) & 1:
                return self._compiler.bit(forced)
            return mask
        if forced is not None:
            return self._compiler.bit(forced)
        if self._constraint is None:
            return None
        if self._watch is not None:
            return self._watch_mask()
        if self._opening is not None:
            return self._start_mask(self._opening)
        mask = self._thinking_mask
        for handover in self._handovers:
            guarded = handover.mask(self._gate.text if self._gate is not None else b"")
            if guarded is not None:
                mask = mask & guarded
        return mask

    @property
    def every_token(self) -> NDArray[np.uint32]:
        """The mask that allows all of them."""
        return self._compiler.every_token

    def _start_mask(self, opening: Constraint) -> NDArray[np.uint32]:
        """A thinking block may begin, or the grammar."""
        mask = opening.mask()
        return mask if self._early is None else mask | self._early.mask()

    def _watch_mask(self) -> NDArray[np.uint32] | None:
        if self._watch is None or (self._gate is not None and not self._gate.is_over):
            return None
        mask = None
        for handover in self._handovers:
            guarded = handover.mask(self._watch.text)
            if guarded is not None:
                mask = guarded if mask is None else mask & guarded
        return mask

    def accept(self, token: int) -> None:
        """Go on with a drawn token. Raises `ConstraintFailed` when a grammar does not allow it."""
        if token in self._compiler.end_ids:
            if self._active and self._constraint is not None:
                self._constraint.accept(token)
            elif self._early is not None:
                self._early.accept(token)
            elif self._constraint is not None and self._watch is None:
                raise ConstraintFailed("the text ended before the grammar was complete")
            self.has_ended = True
            return
        piece = self._pieces(token)
        was_free = self._budget is None or self._budget.state in (BudgetState.IDLE, BudgetState.DONE)
        if self._budget is not None and (self._budget_beside or not self._active):
            self._budget.accept(token, piece)
        if self._active and self._constraint is not None:
            self._constraint.accept(token)
        elif self._constraint is None:
            return
        elif self._gate is not None and not self._gate.is_over:
            self._pass_gate(self._gate, token, piece)
        elif self._watch is not None and (was_free or self._gate is not None):
            self._look(self._watch, token, piece)

    def _pass_gate(self, gate: ThinkingGate, token: int, piece: bytes) -> None:
        if self._opening is not None:
            if not self._opening.try_accept(token):
                self._opening = None
            if self._early is not None and not self._early.try_accept(token):
                self._early = None
        self._start.append((token, piece))
        rest = gate.push(piece)
        if gate.is_inside:
            self._opening = self._early = None
            self._start.clear()
        if rest is None:
            return
        start, self._start = self._start, []
        if self._watch is not None:
            parts: list[tuple[int | bytes, bytes]] = [(rest, rest)] if gate.has_thought else list(start)
            for part, text in parts:
                if self._watch is not None:
                    self._look(self._watch, part, text)
                else:
                    self._read(part)
        elif gate.has_thought:
            self._begin([rest] if rest else [])
        elif self._early is None:
            raise ConstraintFailed("neither a thinking block nor the grammar begins like this answer")
        else:
            self._constraint, self._active = self._early, True
        self._opening = self._early = None

    def look(self, text: bytes) -> None:
        """Read free text that comes before the first token."""
        if self._watch is not None and text:
            self._look(self._watch, text, text)

    def _look(self, watch: TriggerWatch, token: int | bytes, piece: bytes) -> None:
        replay = watch.push(token, piece)
        if replay is not None:
            self._begin(replay)

    def _begin(self, replay: list[int | bytes]) -> None:
        """The grammar begins, with what it has of the text already."""
        self._active, self._watch = True, None
        for part in replay:
            self._read(part)

    def _read(self, part: int | bytes) -> None:
        if self._constraint is None:
            return
        fits = self._constraint.try_spell(part) if isinstance(part, bytes) else self._constraint.try_accept(part)
        if not fits and self._is_forgiving:
            self._active, self._constraint = False, None
        elif not fits:
            shown = part if isinstance(part, bytes) else self._pieces(part)
            raise ConstraintFailed(f"the grammar begins here, but does not allow {shown.decode('utf-8', 'replace')!r}")

    @property
    def must_end(self) -> bool:
        """The text is complete, nothing can follow, and every token that could say so is banned or missing."""
        return self._active and self._constraint is not None and self._constraint.must_end


def compile_guide(
    source: GuideSource, compiler: GrammarCompiler, pieces: Pieces, encode: Callable[[str], list[int]]
) -> Guide:
    """A guide at the beginning of an answer. encode: text to tokens, control tokens read.

    Raises `GrammarError` for a grammar, and `InvalidArgument` for triggers or tags, that cannot be honoured.
    """
    grammar, thinking = source.grammar, source.thinking
    constraint = watch = gate = opening = early = None
    handovers: list[Handover] = []
    if grammar is not None and source.triggers:
        constraint, watch = compiler.compile(grammar), TriggerWatch(source.triggers)
        gate = None if thinking is None else ThinkingGate(thinking)
        handovers = [_handover(grammar, word, constraint, compiler, reads_word=True) for word in watch.words]
    elif grammar is not None and thinking is not None and (thinking.is_open or thinking.may_open):
        # Models write line breaks between their thoughts and the answer.
        constraint, gate = compiler.compile(replace(grammar, may_lead=True)), ThinkingGate(thinking)
        handovers = [_handover(grammar, thinking.end.encode(), constraint, compiler, reads_word=False)]
        if not thinking.is_open:
            opening = compiler.compile(GrammarSource("lark", f"root: {compiler.marker(thinking.start)} /(?s:.*)/\n"))
            early = compiler.compile(grammar)
    elif grammar is not None:
        constraint = compiler.compile(grammar)
        continued = constraint.copy()
        if source.given and continued.try_spell(source.given.encode("utf-8", "replace")):
            constraint = continued
    guide = Guide(
        compiler,
        pieces,
        (),
        constraint=constraint,
        early=early,
        opening=opening,
        watch=watch,
        gate=gate,
        budget=_budget(source, pieces, encode),
        handovers=tuple(handovers),
        budget_beside=thinking is None,
        is_forgiving=source.is_forgiving,
    )
    if watch is not None and source.given and thinking is None:
        guide.look(source.given.encode("utf-8", "replace"))
    return guide


def _handover(
    grammar: GrammarSource, word: bytes, constraint: Constraint, compiler: GrammarCompiler, *, reads_word: bool
) -> Handover:
    """Clients send the same tools again and again, and a vocabulary takes a tenth of a second to look through."""
    made: Handover = compiler.kept(
        (grammar, word, reads_word), lambda: Handover(word, constraint, compiler, reads_word=reads_word)
    )
    return made


def _budget(source: GuideSource, pieces: Pieces, encode: Callable[[str], list[int]]) -> ReasoningBudget | None:
    rules = source.budget
    if rules is None or not rules.start or not rules.ends:
        return None
    # Lazy grammars of native requests wait for the end of a block by it.
    if not rules.acts and not (source.triggers and source.thinking is None):
        return None
    if not all(rules.ends):
        raise InvalidArgument("an end tag of the thinking block is empty")
    forced = encode(rules.message + rules.ends[0])
    budget = ReasoningBudget([rules.start.encode()], [end.encode() for end in rules.ends], forced, rules.tokens)
    for token in encode(rules.prompt) if rules.prompt else ():
        if budget.forced_token is None:  # what the prompt holds cannot be forced
            budget.accept(token, pieces(token))
    return budget
