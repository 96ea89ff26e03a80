"""One generation: from sampled tokens to text, stop reasons, probabilities and timings. Driven by the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyllama.server.draft_counts import DraftCounts
from pyllama.server.generation_params import GenerationParams
from pyllama.text_stream import TextStream

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pyllama.grammar.guide import Guide
    from pyllama.server.embedding_tasks import EmbeddingTask
    from pyllama.server.requests import ActiveRequest
    from pyllama.server.vocabulary import Vocabulary


class ProbabilityRecord(NamedTuple):
    """The chosen token and the most likely ones: log-probabilities, or probabilities after the chain."""

    token: int
    value: float
    top: Sequence[tuple[int, float]]


class Started(NamedTuple):
    """Work on the prompt begins: from here on a stream has status 200."""

    generation: Generation


class Progress(NamedTuple):
    """`processed` of the prompt's tokens are in the slot, `time_ms` after the start."""

    generation: Generation
    processed: int
    time_ms: float
    timings: dict[str, Any] | None


class TokenText(NamedTuple):
    """One token. `shows` is False while its last character is incomplete: there is no partial result for it then.

    Its text comes with the token that completes the character.
    """

    generation: Generation
    token: int
    text: str
    shows: bool
    record: ProbabilityRecord | None
    n_decoded: int
    timings: dict[str, Any] | None


class Finished(NamedTuple):
    generation: Generation | EmbeddingTask


class Failed(NamedTuple):
    generation: Generation | EmbeddingTask
    error: Exception


Event = Started | Progress | TokenText | Finished | Failed


class IndentGuard:
    """`n_indent`: lines after the first must begin with that many blanks; the first that does not is cut."""

    __slots__ = ("_held", "_in_indent", "_n_indent", "is_cut")

    def __init__(self, n_indent: int) -> None:
        self._n_indent = n_indent
        self._in_indent = False
        self._held = ""
        self.is_cut = False  # the end was reached: nothing is shown any more

    def push(self, text: str) -> str:
        """The text that may be shown; blanks at the start of a line wait for what follows."""
        shown: list[str] = []
        for character in text:
            if self.is_cut:
                break
            if self._in_indent:
                if character in " \t":
                    self._held += character
                    continue
                if len(self._held) < self._n_indent:
                    self.is_cut = True
                    break
                shown.append(self._held)
                self._held = ""
                self._in_indent = False
            shown.append(character)
            self._in_indent = character == "\n"
        return "".join(shown)

    def finish(self) -> str:
        """The blanks of a last line that had not gone on yet."""
        return "" if self.is_cut else self._held


class Generation:
    """State of one completion. `tokens` = prompt + generated; the engine's share of them is in the slot.

    shifts_context: when the slot is full, the engine loop drops tokens in the middle of it (`shift`) and the generation
    goes on; `tokens` is then what is left. Times are seconds of the loop's clock.
    """

    __slots__ = (
        "_all_tokens",
        "_budget",
        "_indent",
        "_parts",
        "_stream",
        "_unsent",
        "_vocabulary",
        "age",
        "awaits_mask",
        "children",
        "constraint",
        "drafts",
        "has_begun",
        "has_new_line",
        "index",
        "is_blocked",
        "is_done",
        "mask",
        "n_cached",
        "n_ctx",
        "n_decoded",
        "n_prompt",
        "n_prompt_done",
        "params",
        "parent",
        "prompt_records",
        "records",
        "request",
        "reuse",
        "sampler",
        "shifted_at",
        "shifts_context",
        "slot_id",
        "stop_type",
        "stopping_word",
        "synthetic",
        "t_end",
        "t_prompt_end",
        "t_start",
        "tokens",
        "tokens_held",
        "truncated",
        "waits_for_parent",
    )

    def __init__(
        self,
        request: ActiveRequest,
        index: int,
        *,
        prompt: list[int],
        params: GenerationParams,
        sampler: Any,
        vocabulary: Vocabulary,
        n_ctx: int,
        n_predict_limit: int,
        parent: Generation | None = None,
        shifts_context: bool = False,
        constraint: Guide | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.age = -1  # set by the engine loop on arrival
        self.parent = parent
        self.children: list[Generation] = []
        self.params = params
        self.sampler = sampler
        self.constraint = constraint  # which tokens may be drawn; None: any
        self.mask: Future[Any] | None = None  # of the next token, where the constraint takes its time
        self.awaits_mask = False  # the engine has kept the logits that it is to be drawn from
        self.n_ctx = n_ctx
        self.tokens = prompt if parent is None else list(prompt)
        self.n_prompt = len(prompt)
        self.shifts_context = shifts_context
        self.shifted_at: int | None = None  # tokens from there on are no longer at their first places
        self._all_tokens = self.tokens  # without what shifts took out; the same list until the first one
        self.records: list[ProbabilityRecord] = []
        self.prompt_records: list[ProbabilityRecord] = []  # of the prompt tokens after the first
        self.slot_id = -1
        self.reuse: Any = None  # the engine's PrefixReuse of the prompt; None when no reuse was tried
        self.has_begun = False  # some of its prompt has been computed since it got its memory
        self.is_blocked = False
        self.is_done = False
        self.waits_for_parent = parent is not None
        self.n_cached = 0
        self.n_prompt_done = 0
        self.n_decoded = 0
        self.stop_type = "none"
        self.stopping_word = ""
        self.truncated = False
        self.has_new_line = False
        self.tokens_held = 0
        self.drafts = DraftCounts()
        self.synthetic: Any = None  # `pyllama._engine.SyntheticAcceptance` of its drafts, for benchmarks
        self.t_start = self.t_prompt_end = self.t_end = 0.0
        self._budget = params.n_predict if params.n_predict != -1 else n_predict_limit
        self._vocabulary = vocabulary
        self._stream = TextStream(params.stop)
        self._indent = IndentGuard(params.n_indent) if params.n_indent > 0 else None
        self._parts: list[str] = []
        self._unsent = ""  # complete text of a token that ends inside a character; it is sent with the next token

    @property
    def prompt(self) -> list[int]:
        return self._all_tokens[: self.n_prompt]

    @property
    def generated(self) -> list[int]:
        return self._all_tokens[self.n_prompt :]

    @property
    def content(self) -> str:
        """All text that a client may see."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def n_remain(self) -> int:
        return -1 if self._budget < 0 or self.is_done else max(0, self._budget - self.n_decoded)

    @property
    def n_left(self) -> int:
        """Tokens until the budget or the slot ends the generation for certain, or the slot is full."""
        in_slot = self.n_ctx - len(self.tokens)
        return in_slot if self._budget < 0 else min(in_slot, self._budget - self.n_decoded)

    @property
    def is_scoring(self) -> bool:
        """Prompt tokens are still to be run with all their logits kept."""
        return self.params.scores_prompt and self.parent is None and len(self.prompt_records) < self.n_prompt - 1

    def start(self, now: float, n_cached: int) -> None:
        """The slot begins with the prompt, of which it already holds `n_cached` tokens."""
        self.t_start = self.t_prompt_end = self.t_end = now
        self.n_cached = self.n_prompt_done = n_cached

    def on_prompt(self, n_done: int, now: float) -> None:
        """`n_done` tokens of the prompt are in the slot."""
        self.n_prompt_done = max(self.n_prompt_done, n_done)
        self.t_prompt_end = self.t_end = now

    def on_preempted(self) -> None:
        """The slot lost its tokens; what cannot be had back is computed again later, with the same result."""
        self.is_blocked = True
        self.has_begun = self.awaits_mask = False
        if self.n_decoded == 0:
            self.prompt_records.clear()

    def shift(self, n_keep: int, n_discard: int) -> None:
        """The slot dropped `n_discard` tokens after the first `n_keep`."""
        if self._all_tokens is self.tokens:
            self._all_tokens = list(self.tokens)
        del self.tokens[n_keep : n_keep + n_discard]
        self.shifted_at = n_keep if self.shifted_at is None else min(self.shifted_at, n_keep)
        self.truncated = True

    def on_resumed(self, n_held: int) -> None:
        """The slot holds `n_held` tokens again. Those of the prompt that others computed count as cached."""
        self.is_blocked = False
        if self.n_decoded == 0:
            self.n_cached = min(self.n_cached, n_held) + max(0, n_held - self.n_prompt_done)
            self.n_prompt_done = n_held

    def on_token(self, token: int, value: float, top: Sequence[tuple[int, float]], now: float) -> TokenText:
        """Take in one sampled token; sets `is_done` and the stop fields when it was the last.

        Raises `ConstraintFailed`.
        """
        if self.constraint is not None:
            self.constraint.accept(token)
        self.n_decoded += 1
        self.t_end = now
        self.tokens.append(token)
        if self._all_tokens is not self.tokens:
            self._all_tokens.append(token)
        vocabulary, stream = self._vocabulary, self._stream
        is_end = token in vocabulary.eog_ids
        if is_end:
            piece = vocabulary.end_piece(token)
        elif token in self.params.preserved_tokens:
            piece = vocabulary.special_piece(token)
        else:
            piece = vocabulary.piece(token)
        text = stream.push(piece)
        if self._indent is not None:
            text = self._indent.push(text)
        if b"\n" in piece:
            self.has_new_line = True
        if self._indent is not None and self._indent.is_cut:
            self._stop("limit")
        elif stream.matched is not None:
            self._stop("word")
            self.stopping_word = stream.matched
        elif is_end or (self.constraint is not None and self.constraint.must_end):
            self._stop("eos")
        elif self._budget >= 0 and self.n_decoded >= self._budget:
            self._stop("limit")
        elif len(self.tokens) >= self.n_ctx and not self.shifts_context:
            self._stop("limit")
            self.truncated = True
        elif b"\n" in piece and 0 < self.params.t_max_predict_ms < (now - self.t_prompt_end) * 1e3:
            self._stop("limit")
        if self.is_done:
            text += self._finish_text()
        if text:
            self._parts.append(text)
        shows = self.is_done or not stream.pending_bytes
        if self._unsent:
            text = self._unsent + text
        self._unsent = "" if shows else text
        record = None
        if self.params.n_probs > 0:
            record = ProbabilityRecord(token, value, top)
            self.records.append(record)
        return TokenText(
            self,
            token,
            text if shows else "",
            shows,
            record,
            self.n_decoded,
            self.timings() if self.params.timings_per_token else None,
        )

    def _stop(self, stop_type: str) -> None:
        self.is_done = True
        self.stop_type = stop_type

    def _finish_text(self) -> str:
        """The held-back tail. Streams show it too, so that their text is always that of the plain answer."""
        rest = self._stream.finish()
        if self._indent is None:
            return rest
        return self._indent.push(rest) + self._indent.finish()

    def timings(self) -> dict[str, Any]:
        """The `timings` object. All values are finite; rates count the steps after the first token."""
        prompt_n = self.n_prompt_done - self.n_cached
        prompt_ms = (self.t_prompt_end - self.t_start) * 1e3
        n = self.n_decoded
        predicted_ms = max((self.t_end - self.t_prompt_end) * 1e3, 1e-3) if n > 0 else 0.0
        return {
            "cache_n": self.n_cached,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n > 0 else 0.0,
            "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms > 0 else 0.0,
            "predicted_n": n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / (n - 1) if n > 1 else 0.0,
            "predicted_per_second": 1e3 * (n - 1) / predicted_ms if n > 1 else 0.0,
            **self.drafts.timings(),
        }
