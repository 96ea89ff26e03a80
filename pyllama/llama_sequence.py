"""The one sequence of a `Llama` object: tokens in the engine's memory, the list of them here, and drawing the next."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama import _engine
from pyllama.checkpoints import PAGE_TOKENS, PROMPT_GRAIN, CheckpointRule, cut_to_grain
from pyllama.completion import DrawnToken, SamplingOptions, log_softmax_top
from pyllama.dry_breakers import DryBreakerTable
from pyllama.errors import ContextFull, InvalidArgument
from pyllama.grammar import Constraint
from pyllama.grammar.draft_masks import DraftMasks
from pyllama.grammar.guide import Guide
from pyllama.infill_vocabulary import InfillTable
from pyllama.llama_drafts import SequenceDrafts
from pyllama.llama_state import LlamaState, LogitsRows

LogitsProcessor = Callable[[NDArray[np.intc], NDArray[np.float32]], NDArray[np.float32]]
StoppingCriterion = Callable[[NDArray[np.intc], NDArray[np.float32]], bool]

SEQUENCE = 0  # the id of the only sequence of the engine


@dataclass(frozen=True, slots=True)
class _Round:
    """A step with a draft, and how to take it again. length: of the sequence before it. sampler: as it was then."""

    length: int
    last: int
    sampler: _engine.Sampler
    drawn: tuple[int, ...]
    masks: NDArray[np.uint32] | None


class TokenSequence:
    """Drives an engine of one sequence. One thread at a time; the queue of the `Llama` object sees to that.

    checkpoints: where states are kept, for models whose sequence cannot be cut back; None for others.
    dry_breakers, infill_table: make what the samplers dry and infill need.
    """

    def __init__(
        self,
        model: _engine.Model,
        engine: _engine.Engine,
        *,
        dry_breakers: DryBreakerTable,
        infill_table: InfillTable,
        keep_all_logits: bool,
        checkpoints: CheckpointRule | None = None,
        n_keep: int | None = None,
        drafts: SequenceDrafts | None = None,
    ) -> None:
        """n_keep: a full context goes on less tokens after the first `n_keep` (-1: the prompt). None: it ends.

        drafts: where guesses of what follows come from. They change no text.
        """
        self._model = model
        self._engine: _engine.Engine | None = engine
        self._dry_breakers, self._infill_table = dry_breakers, infill_table
        self._keep_all_logits = keep_all_logits
        self._checkpoints = checkpoints
        self._n_keep = n_keep
        self._drafts = drafts
        self.n_discarded = 0  # tokens that were dropped so
        self._sampling: tuple[SamplingOptions, _engine.Sampler, int] | None = (
            None  # of `sample`; the tokens it has accepted
        )
        self.n_vocab = model.n_vocab
        self.n_ctx = engine.n_ctx
        self.is_closing = False
        self._scales: tuple[float, ...] = ()  # of the LoRA adapters, as the engine has them
        self.tokens: list[int] = []
        self.rows = LogitsRows(self.n_vocab)
        self._planned: list[int] = []  # lengths at which the state is kept while a prompt is computed

    @property
    def engine(self) -> _engine.Engine:
        """Raises `InvalidArgument` once closing has begun, which ends a call of another thread at its next token."""
        if self._engine is None or self.is_closing:
            raise InvalidArgument("this Llama object is closed")
        return self._engine

    def close(self) -> None:
        self.is_closing = True
        engine, self._engine = self._engine, None
        drafts, self._drafts = self._drafts, None
        if drafts is not None:
            drafts.close()
        if engine is not None:
            engine.close()
            self._model.close()
        self.rows.truncate(0)

    # -------------------------------------------------------------------------------- length

    def reconcile(self) -> None:
        """After an exception between a step and its bookkeeping (an interrupt, say) keep what both sides know."""
        held = self.engine.length(SEQUENCE)
        length = min(held, len(self.tokens))
        if length != held or length != len(self.tokens):
            self.truncate(length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. The generator of `sample` starts anew.

        A recurrent state that cannot be had for that length is computed again from the last one before it.
        """
        kept = self.tokens[:length]
        if length:
            self.reuse(kept, length)
            self._append(kept[len(self.tokens) :])
        else:
            self.clear()
        self.forget_sampler()

    def clear(self) -> None:
        self.engine.clear(SEQUENCE)
        self.tokens = []
        self.rows.truncate(0)
        self.forget_sampler()

    def reuse(self, tokens: list[int], most: int) -> None:
        """The sequence becomes the longest known beginning of `tokens`, of at most `most` tokens.

        Where all logits are kept, known is only what this sequence has computed itself.
        """
        n_common = min(_common_prefix(self.tokens, tokens), most)
        most = n_common if self._keep_all_logits else most
        if n_common < len(self.tokens):
            self.forget_sampler()
        # Ours go first: whatever interrupts the call, both sides then agree up to the shorter length.
        del self.tokens[n_common:]
        self.rows.truncate(n_common)
        length = self.engine.reuse_prefix(SEQUENCE, tokens, most, self._scales).length
        self.tokens = tokens[:length]
        self.rows.truncate(min(n_common, length))
        self.rows.truncate(length)

    def use_scales(self, scales: Sequence[float]) -> None:
        """An empty sequence, whose tokens will be computed with these scales of the LoRA adapters."""
        self.release()
        self.engine.set_adapters(SEQUENCE, scales)
        self._scales = self.engine.adapters(SEQUENCE)

    def release(self) -> None:
        """As `clear`, but what the sequence held is kept in the engine's host memory, for later prompts."""
        del self.tokens[:]
        self.engine.release(SEQUENCE)
        self.clear()

    def forget_sampler(self) -> None:
        self._sampling = None

    # -------------------------------------------------------------------------------- evaluate

    def evaluate(self, tokens: list[int]) -> None:
        """Append `tokens`; keep the logits of the last one, or of all. Raises `ContextFull` before computing."""
        self._require_room(len(tokens))
        self._append(tokens)

    def _append(self, tokens: list[int]) -> None:
        for chunk, is_last in self._chunks(tokens):
            flags = [self._keep_all_logits] * len(chunk)
            flags[-1] = flags[-1] or is_last
            self._keep(self._decode(chunk, flags), [index for index, flag in enumerate(flags, -len(chunk)) if flag])

    def score(self, tokens: list[int], n_top: int) -> list[DrawnToken]:
        """`tokens` as the whole sequence, each with its probability after those before it. Logits are dropped early."""
        self.release()
        self._require_room(len(tokens))
        scored = [DrawnToken(tokens[0])]
        for chunk, _ in self._chunks(tokens):
            first = len(self.tokens)
            logits = self._decode(chunk, [True] * len(chunk))
            followers = tokens[first + 1 : first + 1 + len(chunk)]
            scored += [
                DrawnToken(token, *log_softmax_top(logits[i], token, n_top)) for i, token in enumerate(followers)
            ]
            self._keep(
                logits if self._keep_all_logits else logits[:0], range(-len(chunk), 0) if self._keep_all_logits else ()
            )
        return scored

    def last_row(self) -> NDArray[np.float32]:
        """Logits after the last token; computed again when they were not kept."""
        if not self.tokens:
            raise InvalidArgument("there are no tokens to continue: call eval first")
        last = len(self.tokens) - 1
        if last not in self.rows:
            tokens, sampling = list(self.tokens), self._sampling
            self.reuse(tokens, last)
            self.evaluate(tokens[len(self.tokens) :])
            self._sampling = sampling
        return self.rows[last]

    def _decode(self, chunk: list[int], flags: list[bool]) -> NDArray[np.float32]:
        """Append `chunk`; the logits of the flagged rows, `[flagged, n_vocab]`."""
        engine = self.engine
        engine.decode(chunk, logits=flags)
        self._on_appended(chunk)
        return engine.logits() if any(flags) else np.empty((0, self.n_vocab), np.float32)

    def _chunks(self, tokens: list[int]) -> Iterator[tuple[list[int], bool]]:
        """Parts of at most n_batch tokens that end where a state is to be kept, and whether it is the last one."""
        size, end = self.engine.n_batch, len(tokens)
        first = len(self.tokens)
        cuts = self._planned = self._checkpoints.positions(tokens, first) if self._checkpoints and end > 1 else []
        self._keep_state()
        grain = PROMPT_GRAIN if self._model.is_recurrent else 1
        start = 0
        while start < end:
            most = size if end - start <= size else cut_to_grain(first + start, size, grain)
            stop = min([start + most, end, *(cut - first for cut in cuts if cut - first > start)])
            yield tokens[start:stop], stop == end
            start = stop

    def _on_appended(self, chunk: list[int]) -> None:
        self.tokens += chunk
        if self._checkpoints is not None and len(chunk) == 1 and len(self.tokens) % PAGE_TOKENS == 0:
            self.engine.checkpoint(SEQUENCE)
        else:
            self._keep_state()

    def _keep_state(self) -> None:
        if len(self.tokens) in self._planned:
            self.engine.checkpoint(SEQUENCE)

    def _keep(self, logits: NDArray[np.float32], offsets: Sequence[int]) -> None:
        """Rows of tokens counted from the end of the sequence (negative)."""
        kept = {len(self.tokens) + offset: row for offset, row in zip(offsets, logits, strict=True)}
        self.rows.extend(len(self.tokens), kept, keep_others=self._keep_all_logits)

    def _require_room(self, n_tokens: int) -> None:
        if len(self.tokens) + n_tokens > self.n_ctx or not self.engine.can_append(SEQUENCE, n_tokens):
            message = (
                f"{n_tokens} tokens do not fit: the sequence has {len(self.tokens)} and the context holds {self.n_ctx}"
            )
            raise ContextFull(message, SEQUENCE)

    # -------------------------------------------------------------------------------- draw

    def sample(
        self, options: SamplingOptions, seed: int, processors: Sequence[LogitsProcessor], position: int | None
    ) -> int:
        """Draw what follows the sequence, or its token `position`. Calls with equal options share a sampler."""
        row = self.last_row() if position is None else self.rows[position]
        if self._sampling is not None and self._sampling[0] == options:
            _, sampler, n_accepted = self._sampling
        else:
            sampler, n_accepted = self._sampler(options, seed), 0
        if n_accepted < len(self.tokens):
            sampler.accept(self.tokens[n_accepted:])
        self._sampling = (options, sampler, len(self.tokens))
        return sampler.sample(self._process(processors, row))

    def draw(
        self,
        tokens: list[int],
        options: SamplingOptions,
        seed: int,
        n_probs: int | None,
        processors: Sequence[LogitsProcessor] = (),
        criteria: Sequence[StoppingCriterion] = (),
        *,
        reset: bool = True,
        constraint: Constraint | Guide | None = None,
        n_most: int | None = 0,
    ) -> Generator[DrawnToken, Sequence[int] | None, None]:
        """Draw token after token; a drawn one enters the memory when the next is asked for. `criteria` end it.

        constraint: what the drawn tokens keep to; the end of its text ends it as well. Raises `ConstraintFailed`.

        reset: `tokens` replaces the sequence, of which the common beginning is kept; otherwise it is appended.
        The engine draws by itself unless somebody wants to see logits.
        n_most: tokens that will be asked for at most, and nothing sent, so that drafts may be made. None: any number of
        tokens is asked for, and some may be sent. 0: no drafts.
        """
        self.reconcile()
        wanted = list(tokens) if reset else [*self.tokens, *tokens]
        if not wanted:
            raise InvalidArgument("there are no tokens to continue")
        sampler = self._sampler(options, seed)
        if reset or not tokens:  # the last token's row is drawn from: it is computed, maybe again
            self.reuse(wanted, len(wanted) - 1)
        tokens = wanted[len(self.tokens) :]
        n_prompt = len(wanted)
        sampler.accept(wanted)

        sees_logits = bool(processors or criteria or self._keep_all_logits)
        draw = self._draw_from_logits if sees_logits else self._draw_in_engine
        drafts = None if n_most == 0 or sees_logits else self._drafts
        ahead: deque[DrawnToken] = deque()  # drawn already, and the engine holds all but the last
        last_round: _Round | None = None  # where tokens may be sent
        n_drawn = 0
        while True:
            if constraint is not None and not ahead:
                sampler.set_mask(constraint.mask())
            if ahead:
                self._on_appended(tokens)
            elif drafts is not None and n_drawn > 0 and len(tokens) == 1:
                length, before = len(self.tokens), None if n_most is not None else sampler.clone()
                room = drafts.longest if n_most is None else min(drafts.longest, n_most - n_drawn - 1)
                # What is taken back when tokens are sent can be had again by match alone.
                temperature = 0.0 if constraint is not None or before is not None else options.temperature
                found, masks = self._draw_round(drafts, tokens[0], sampler, n_probs, room, temperature, constraint)
                ahead += found
                if before is not None:
                    last_round = _Round(length, tokens[0], before, tuple(item.token for item in found), masks)
            else:
                ahead.append(draw(tokens, sampler, n_probs, processors))
                if drafts is not None and n_drawn == 0:
                    drafts.begin()
            drawn = ahead.popleft()
            n_drawn += 1
            if constraint is not None:
                constraint.accept(drawn.token)
            if criteria and any(criterion(np.array(self.tokens, np.intc), self.last_row()) for criterion in criteria):
                return
            sent = yield drawn
            if sent and ahead and last_round is not None:
                sampler = self._draw_again(last_round, len(last_round.drawn) - len(ahead))
                ahead.clear()
            if constraint is not None:
                for token in sent or ():
                    constraint.accept(token)
                if constraint.has_ended or constraint.must_end:
                    return
            sampler.accept(sent or ())
            tokens = [drawn.token, *(sent or ())]
            if self._n_keep is not None and len(self.tokens) + len(tokens) >= self.n_ctx:
                self._shift(n_prompt if self._n_keep < 0 else self._n_keep)

    def _shift(self, n_keep: int) -> None:
        """Drop half of the tokens after the first `n_keep`; the server does the same."""
        n_keep = min(n_keep, self.n_ctx - 4, len(self.tokens) - 2)
        n_discard = max(1, (len(self.tokens) - n_keep) // 2)
        self.engine.shift(SEQUENCE, n_keep, n_discard)
        del self.tokens[n_keep : n_keep + n_discard]
        self.n_discarded += n_discard
        self.rows.truncate(n_keep)

    def _draw_in_engine(
        self, tokens: list[int], sampler: _engine.Sampler, n_probs: int | None, processors: Sequence[LogitsProcessor]
    ) -> DrawnToken:
        self._require_room(len(tokens))
        # The engine computes probabilities only when it is asked for at least one alternative.
        n_top = 0 if n_probs is None else max(n_probs, 1)
        outputs: list[_engine.StepOutput] = []
        for chunk, is_last in self._chunks(tokens):
            work = _engine.Work(SEQUENCE, chunk, sampler, n_top) if is_last else _engine.Work(SEQUENCE, chunk)
            outputs = self.engine.step([work])
            self._on_appended(chunk)
            self._keep(np.empty((0, self.n_vocab), np.float32), ())
        drawn = outputs[0]
        if n_probs is None:
            return DrawnToken(drawn.token)
        return DrawnToken(drawn.token, drawn.logprob, tuple(drawn.top[:n_probs]))

    def _draw_round(
        self,
        drafts: SequenceDrafts,
        last: int,
        sampler: _engine.Sampler,
        n_probs: int | None,
        room: int,
        temperature: float,
        constraint: Constraint | Guide | None,
    ) -> tuple[list[DrawnToken], NDArray[np.uint32] | None]:
        """The tokens that come of a draft after `last`, which is appended; the engine holds all but the last one.

        temperature: that the draft is drawn at; 0 for the likeliest tokens, which are verified by match.
        constraint: with the mask of the first of them set. It has not accepted any of them afterwards. Second comes
        what it allowed at each token.
        """
        room = min(room, self.n_ctx - len(self.tokens) - 2)
        if self._checkpoints is not None:  # a state is kept where a page is full
            room = min(room, PAGE_TOKENS - len(self.tokens) % PAGE_TOKENS - 1)
        draft = drafts.draft(self.tokens, last, room, temperature, sampler.seed) if room > 0 else None
        masks = None
        if constraint is not None and draft is not None:
            walk = DraftMasks(constraint, draft.tokens, drafts.ends)
            walk.walk()
            length, masks = walk.found()
            draft = _engine.Draft(draft.tokens[:length])
        if draft is None or not draft.tokens:
            return [self._draw_in_engine([last], sampler, n_probs, ())], None
        n_top = 0 if n_probs is None else max(n_probs, 1)
        work = _engine.Work(
            *(SEQUENCE, [last], sampler, n_top),
            draft=draft.tokens,
            proposals=draft.proposals,
            ends=drafts.ends,
            masks=masks,
        )
        try:
            outputs = self.engine.step([work])
        except ContextFull:
            return [self._draw_in_engine([last], sampler, n_probs, ())], None
        drafts.on_verified(len(draft.tokens), len(outputs) - 1)
        self._on_appended([last])
        self._keep(np.empty((0, self.n_vocab), np.float32), ())
        if n_probs is None:
            return [DrawnToken(output.token) for output in outputs], masks
        return [DrawnToken(output.token, output.logprob, tuple(output.top[:n_probs])) for output in outputs], masks

    def _draw_again(self, taken: _Round, n_tokens: int) -> _engine.Sampler:
        """The engine becomes as if a round had given `n_tokens` tokens, fewer than it did; and so its sampler is."""
        kept = taken.drawn[: n_tokens - 1]
        self.truncate(taken.length)
        sampler, masks = taken.sampler, taken.masks
        if masks is not None:
            sampler.set_mask(masks[0])
        with_draft = {"draft": kept, "masks": None if masks is None else masks[:n_tokens]} if kept else {}
        self.engine.step([_engine.Work(SEQUENCE, [taken.last], sampler, **with_draft)])
        for token in (taken.last, *kept):
            self._on_appended([token])
        self._keep(np.empty((0, self.n_vocab), np.float32), ())
        return sampler

    def _draw_from_logits(
        self, tokens: list[int], sampler: _engine.Sampler, n_probs: int | None, processors: Sequence[LogitsProcessor]
    ) -> DrawnToken:
        self.evaluate(tokens)
        row = self.last_row()
        token = sampler.sample(self._process(processors, row))
        sampler.accept([token])
        return DrawnToken(token) if n_probs is None else DrawnToken(token, *log_softmax_top(row, token, n_probs))

    def _process(self, processors: Sequence[LogitsProcessor], row: NDArray[np.float32]) -> NDArray[np.float32]:
        """Run the logits processors, each on a copy."""
        for processor in processors:
            result = np.asarray(processor(np.array(self.tokens, np.intc), row.copy()), np.float32)
            if result.shape != (self.n_vocab,):
                raise InvalidArgument(f"a logits processor returned shape {result.shape}, expected ({self.n_vocab},)")
            row = np.ascontiguousarray(result)
        return row

    def _sampler(self, options: SamplingOptions, seed: int) -> _engine.Sampler:
        breakers = self._dry_breakers.prepare(options.dry_sequence_breakers) if options.uses_dry else None
        texts = self._infill_table.prepare() if options.uses_infill else None
        return _engine.Sampler(
            self.n_vocab, seed=seed, dry_breakers=breakers, infill_vocabulary=texts, **options.arguments()
        )

    # -------------------------------------------------------------------------------- state

    def save(self, seed: int) -> LlamaState:
        return LlamaState(tuple(self.tokens), self.engine.save_sequence(SEQUENCE), seed)

    def load(self, state: LlamaState) -> None:
        """Raises `InvalidArgument` for a state that does not belong here; the sequence is then empty."""
        self.release()
        try:
            self.engine.load_sequence(SEQUENCE, state.llama_state)
            held = self.engine.length(SEQUENCE)
            if held != len(state.input_ids):
                raise InvalidArgument(f"the state lists {len(state.input_ids)} tokens, but its memory holds {held}")
            if held and self.engine.adapters(SEQUENCE) != self._scales:
                raise InvalidArgument("the state was computed with other scales of the LoRA adapters")
        except BaseException:
            self.engine.clear(SEQUENCE)
            self.engine.set_adapters(SEQUENCE, self._scales)
            raise
        if not held:
            self.engine.set_adapters(SEQUENCE, self._scales)
        self.tokens = list(state.input_ids)
        self.rows.extend(len(self.tokens), {}, keep_others=False)


def _common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def only_tokens(
    drawn: Generator[DrawnToken, Sequence[int] | None, None],
) -> Generator[int, Sequence[int] | None, None]:
    """What `TokenSequence.draw` yields without the probabilities; what is sent goes on to it."""
    with contextlib.closing(drawn):
        sent = None
        while True:
            try:
                item = drawn.send(sent)
            except StopIteration:
                return
            sent = yield item.token
