"""A deterministic stand-in for the native engine, its sampler and a tokenizer: the next token is a function of the
history alone.

It keeps a real page pool (reference counts, copy on write) and checks every call as the engine's contract says, so
that a scheduler
that forgets, mixes or leaks sequences fails here. Tokens 0..255 are bytes, 256 is BOS, 257 ends a generation.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pyllama.errors import ContextFull, InvalidArgument
from support.fake_prefix_cache import CacheUsage, FakePrefixCache, PrefixReuse, chunked_length

PAGE = 256
BOS, END = 256, 257
N_VOCAB = 258
LETTERS = b"abcdefghijklmnopqrstuvwxyz \n"


class Work(NamedTuple):
    seq_id: int
    tokens: Sequence[int]
    sampler: Any = None
    n_probs: int = 0
    post_sampling_probs: bool = False
    logits: FakeRow | None = None


class FakeRow:
    """Stands for the logits of a row: what a draw depends on. `is_drawn` until the next step fills it."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.history: list[int] = []
        self.is_drawn = True

    def draw(self, seq_id: int, sampler: FakeSampler, n_probs: int, post_sampling_probs: bool) -> StepOutput:
        assert not self.is_drawn
        assert self.history == self.engine.tokens[seq_id]
        self.is_drawn = True
        return self.engine.draw(Work(seq_id, (), sampler, n_probs, post_sampling_probs))


class StepOutput(NamedTuple):
    seq_id: int
    token: int
    logprob: float
    top: list[tuple[int, float]]


class EmbeddingWork(NamedTuple):
    seq_id: int
    tokens: Sequence[int]
    pool: FakeHiddenPool
    ends: bool = True


def fake_embedding(tokens: Sequence[int], n_embd: int = 4) -> Any:
    """Depends on every token and its place."""
    state = zlib.crc32(b"".join(token.to_bytes(2, "little") for token in tokens))
    return np.random.default_rng(state).standard_normal(n_embd).astype(np.float32)


class FakeHiddenPool:
    """`pooling_type` none gives a vector for each token, rank two scores, everything else one vector."""

    def __init__(self, pooling_type: str = "mean") -> None:
        self.pooling_type = pooling_type
        self.tokens: list[int] = []
        self.is_complete = False

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def values(self) -> Any:
        assert self.is_complete
        if self.pooling_type == "none":
            return np.stack([fake_embedding(self.tokens[: i + 1]) for i in range(len(self.tokens))])
        return fake_embedding(self.tokens, 2 if self.pooling_type == "rank" else 4)


def pseudo_random_token(history: Sequence[int], sampler: FakeSampler) -> int:
    """A letter that depends on the whole history and, above temperature 0, on the seed."""
    state = zlib.crc32(b"".join(token.to_bytes(2, "little") for token in history))
    if sampler.temperature > 0:
        state = zlib.crc32(sampler.seed.to_bytes(4, "little"), state)
    return LETTERS[state % len(LETTERS)]


def forced_text(text: bytes, *, after: bytes = b"|") -> Callable[[Sequence[int], FakeSampler], int]:
    """Continue every history that holds `after` with `text`, byte by byte, then end."""

    def next_token(history: Sequence[int], sampler: FakeSampler) -> int:
        last = max(index for index, token in enumerate(history) if token == after[0])
        n_done = len(history) - last - 1
        return text[n_done] if n_done < len(text) else END

    return next_token


class FakeSampler:
    """Signature and checks of the native one; `history` is what was accepted."""

    def __init__(
        self,
        n_vocab: int,
        *,
        seed: int = 0xFFFFFFFF,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        min_keep: int = 0,
        repeat_last_n: int = 64,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Sequence[tuple[int, float]] = (),
        samplers: Sequence[str] = (),
        **others: Any,
    ) -> None:
        if not repeat_penalty > 0:
            raise InvalidArgument(f"repeat_penalty: found {repeat_penalty}, expected > 0")
        self.n_vocab = n_vocab
        self.seed = 12345 if seed == 0xFFFFFFFF else seed
        self.temperature = temperature
        self.others = {**others, "samplers": tuple(samplers)}
        self.logit_bias = tuple(logit_bias)
        self.banned = {token for token, bias in logit_bias if bias == float("-inf") or bias <= -100}
        self.history: list[int] = []
        self.mask: Any = None

    def accept(self, tokens: Sequence[int]) -> None:
        self.history += tokens

    def set_mask(self, mask: Any) -> None:
        assert mask is None or mask.shape == (-(-self.n_vocab // 32),)
        self.mask = None if mask is None else mask.copy()

    def allows(self, token: int) -> bool:
        if token in self.banned:
            return False
        return self.mask is None or bool(int(self.mask[token // 32]) >> (token % 32) & 1)


class FakePool:
    """Pages with reference counts."""

    def __init__(self, n_pages: int) -> None:
        self.free = list(range(n_pages))
        self.references: Counter[int] = Counter()

    def take(self) -> int:
        page = self.free.pop()
        self.references[page] = 1
        return page

    def drop(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0:
            del self.references[page]
            self.free.append(page)


class FakeEngine:
    """See `pyllama/_engine.pyi`. `step_seconds`: how long a step sleeps. `fails`: raised by the next step.

    cache_tokens: budget of the prompt cache. is_recurrent: sequences are cut, shared and reused only where a state is.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 1024,
        n_seq_max: int = 4,
        n_batch: int = 2048,
        next_token: Callable[[Sequence[int], FakeSampler], int] = pseudo_random_token,
        step_seconds: float = 0.0,
        cache_tokens: int = 0,
        is_recurrent: bool = False,
    ) -> None:
        self.n_ctx, self.n_seq_max, self.n_batch = n_ctx, n_seq_max, n_batch
        self.next_token = next_token
        self.step_seconds = step_seconds
        self.fails: Exception | None = None
        self.pool = FakePool(n_ctx // PAGE)
        self.tokens: list[list[int]] = [[] for _ in range(n_seq_max)]
        self.pages: list[list[int]] = [[] for _ in range(n_seq_max)]
        self.moved_at = [n_ctx] * n_seq_max  # tokens from there on have seen others than those before them
        self.is_recurrent = is_recurrent
        self.cache = FakePrefixCache(cache_tokens, is_recurrent=is_recurrent)
        self.reuses: list[PrefixReuse] = []
        self.checkpoints: list[tuple[int, int]] = []  # sequence and length, in the order they were asked for
        self.n_steps = 0
        self.n_extra_passes = 0
        self.n_rows = 0
        self.embedded_rows: list[int] = []  # of each call
        self.shifts: list[tuple[int, int, int]] = []
        self.max_rows = 0

    def step(self, work: Sequence[Work], n_passes: int = 1) -> list[StepOutput]:
        self.n_steps += 1
        if n_passes > 1 and self.is_recurrent:
            raise InvalidArgument("a recurrent model takes one pass")
        outputs = self._pass(work)
        for _ in range(1, n_passes):
            drawn = outputs[-sum(item.sampler is not None for item in work) :]
            work = [item for item in work if item.sampler is not None]
            work = [item._replace(tokens=[output.token]) for item, output in zip(work, drawn, strict=True)]
            try:
                outputs += self._pass(work)
            except ContextFull:
                break
            self.n_extra_passes += 1
        return outputs

    def _pass(self, work: Sequence[Work]) -> list[StepOutput]:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        seen: set[int] = set()
        for item in work:
            if item.seq_id in seen or not 0 <= item.seq_id < self.n_seq_max:
                raise InvalidArgument(f"unknown or repeated sequence {item.seq_id}")
            seen.add(item.seq_id)
            if not item.tokens:
                raise InvalidArgument("empty work item")
            if any(not 0 <= token < N_VOCAB for token in item.tokens):
                raise InvalidArgument("token outside the vocabulary")
        n_rows = sum(len(item.tokens) for item in work)
        if n_rows > self.n_batch:
            raise InvalidArgument(f"{n_rows} rows are more than n_batch {self.n_batch}")
        needed = [self._pages_needed(item.seq_id, len(item.tokens)) for item in work]
        left = len(self.pool.free)
        for item, pages in zip(work, needed, strict=True):
            left -= pages
            if left < 0:
                raise ContextFull("no pages are left", item.seq_id)
        self.n_rows += n_rows
        self.max_rows = max(self.max_rows, n_rows)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        outputs = []
        for item in work:
            self._append(item.seq_id, item.tokens)
            if item.sampler is not None:
                assert item.logits is None
                outputs.append(self.draw(item))
            elif item.logits is not None:
                row = item.logits
                row.engine, row.history, row.is_drawn = self, list(self.tokens[item.seq_id]), False
        return outputs

    def embed(self, work: Sequence[EmbeddingWork]) -> None:
        self.n_steps += 1
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        assert len({item.seq_id for item in work}) == len({id(item.pool) for item in work}) == len(work)
        n_rows = sum(len(item.tokens) for item in work)
        assert 0 < n_rows <= self.n_batch
        left = len(self.pool.free)
        for item in work:
            assert 0 <= item.seq_id < self.n_seq_max
            assert item.tokens
            assert item.pool.tokens == self.tokens[item.seq_id]
            assert not item.pool.is_complete
            left -= self._pages_needed(item.seq_id, len(item.tokens))
            if left < 0:
                raise ContextFull("no pages are left", item.seq_id)
        self.embedded_rows.append(n_rows)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        for item in work:
            self._append(item.seq_id, item.tokens)
            item.pool.tokens += item.tokens
            item.pool.is_complete = item.ends

    def draw(self, item: Work) -> StepOutput:
        history = self.tokens[item.seq_id]
        token = self.next_token(history, item.sampler)
        assert any(map(item.sampler.allows, range(N_VOCAB)))
        while not item.sampler.allows(token):
            token = (token + 1) % N_VOCAB
        item.sampler.accept([token])
        value = 0.5 if item.post_sampling_probs else -0.5
        top = [((token + i) % N_VOCAB, value / (i + 1) if value > 0 else value * (i + 1)) for i in range(item.n_probs)]
        return StepOutput(item.seq_id, token, value, top)

    def _pages_needed(self, seq_id: int, n_tokens: int) -> int:
        held = self.pages[seq_id]
        length = len(self.tokens[seq_id])
        copies = int(length % PAGE != 0 and self.pool.references[held[-1]] > 1)
        return -(-(length + n_tokens) // PAGE) - len(held) + copies

    def _append(self, seq_id: int, tokens: Sequence[int]) -> None:
        held = self.pages[seq_id]
        length = len(self.tokens[seq_id])
        if length % PAGE != 0 and self.pool.references[held[-1]] > 1:
            shared = held.pop()
            held.append(self.pool.take())
            self.pool.drop(shared)
        self.tokens[seq_id] += tokens
        while len(held) * PAGE < len(self.tokens[seq_id]):
            held.append(self.pool.take())

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int], logits: Sequence[bool]) -> None:
        (seq_id,) = set(seq_ids)
        if self._pages_needed(seq_id, len(tokens)) > len(self.pool.free):
            raise ContextFull("no pages are left", seq_id)
        assert all(logits)
        rows = []
        for token in tokens:
            self._append(seq_id, [token])
            row = np.zeros(N_VOCAB, np.float32)
            row[self.next_token(self.tokens[seq_id], FakeSampler(N_VOCAB, temperature=0))] = 3.0
            rows.append(row)
        self._logits = np.array(rows)

    def logits(self) -> Any:
        return self._logits

    def length(self, seq_id: int) -> int:
        return len(self.tokens[seq_id])

    def free_tokens(self) -> int:
        return len(self.pool.free) * PAGE

    def truncate(self, seq_id: int, length: int) -> None:
        self._check_cut(seq_id, length)
        self._cut(seq_id, length)

    def _check_cut(self, seq_id: int, length: int) -> None:
        held = len(self.tokens[seq_id])
        if length > held or (self.is_recurrent and length not in (0, held)):
            raise InvalidArgument(f"sequence {seq_id} has {held} tokens, not {length}")

    def _cut(self, seq_id: int, length: int) -> None:
        if length <= self.moved_at[seq_id]:
            self.moved_at[seq_id] = self.n_ctx
        del self.tokens[seq_id][length:]
        while len(self.pages[seq_id]) > -(-length // PAGE):
            self.pool.drop(self.pages[seq_id].pop())

    def fork(self, src: int, dst: int, length: int) -> None:
        self._check_cut(src, length)
        self._share(src, dst, length)

    def _share(self, src: int, dst: int, length: int) -> None:
        self.clear(dst)
        self.moved_at[dst] = self.moved_at[src] if length > self.moved_at[src] else self.n_ctx
        self.tokens[dst] = self.tokens[src][:length]
        self.pages[dst] = self.pages[src][: -(-length // PAGE)]
        for page in self.pages[dst]:
            self.pool.references[page] += 1

    def clear(self, seq_id: int) -> None:
        self._cut(seq_id, 0)

    def set_adapters(self, seq_id: int, scales: Sequence[float]) -> None:
        assert not tuple(scales), "this engine has no adapters"

    def adapters(self, seq_id: int) -> tuple[float, ...]:
        return ()

    def reuse_prefix(
        self, seq_id: int, tokens: Sequence[int], most: int, scales: Sequence[float] = (), least_chunk: int = 0
    ) -> PrefixReuse:
        assert 0 <= most <= len(tokens)
        assert not tuple(scales)
        known = [held[:moved_at] for held, moved_at in zip(self.tokens, self.moved_at, strict=True)]
        own, tokens = known[seq_id], list(tokens)
        unshared = sum(self.pool.references[page] == 1 for page in self.pages[seq_id])
        room = (len(self.pool.free) + unshared) * PAGE
        matched = self.cache.matched(known, tokens)
        best = self.cache.find(known, seq_id, tokens, most, room)[0]
        wished = self.cache.find(known, seq_id, tokens, most, len(tokens))[0]
        if least_chunk:
            common, reached = chunked_length(self.tokens[seq_id], tokens, most, least_chunk)
            if reached > best.length:
                self.cache.keep(own)
                self._cut(seq_id, reached)
                self.tokens[seq_id] = tokens[:reached]
                self.moved_at[seq_id] = min(self.moved_at[seq_id], common)
                self.reuses.append(PrefixReuse(reached, reached, "own", -1, "not cached", reached - common))
                return self.reuses[-1]
        if own != tokens[: len(own)] or len(own) > best.length:
            self.cache.keep(own)
        if best.length == 0:
            self.clear(seq_id)
        elif best.index == seq_id:
            self._cut(seq_id, best.length)
        elif best.index >= 0:
            self._share(best.index, seq_id, best.length)
        else:
            self.clear(seq_id)
            self._append(seq_id, tokens[: best.length])
        source = "nothing" if best.length == 0 else {seq_id: "own", -1: "host"}.get(best.index, "other")
        limit = self.cache.limit_of(best.length, matched, most, lacked_pages=best.length < wished.length)
        self.reuses.append(PrefixReuse(best.length, matched, source, best.checkpoint, limit))
        return self.reuses[-1]

    def checkpoint(self, seq_id: int) -> None:
        self.checkpoints.append((seq_id, len(self.tokens[seq_id])))
        self.cache.keep_state(self.tokens[seq_id])

    def release(self, seq_id: int) -> None:
        self.cache.keep(self.tokens[seq_id][: self.moved_at[seq_id]])
        self.clear(seq_id)

    def cache_usage(self) -> CacheUsage:
        return self.cache.usage()

    def shift(self, seq_id: int, n_keep: int, n_discard: int) -> None:
        tokens, held = self.tokens[seq_id], self.pages[seq_id]
        if n_keep < 0 or n_discard < 1 or n_keep + n_discard > len(tokens):
            raise InvalidArgument(f"sequence {seq_id} cannot be shifted by {n_discard} after {n_keep}")
        written = range(n_keep // PAGE, -(-(len(tokens) - n_discard) // PAGE))
        shared = [i for i in written if self.pool.references[held[i]] > 1]
        if len(shared) > len(self.pool.free):
            raise ContextFull("no pages are left", seq_id)
        for i in shared:
            self.pool.drop(held[i])
            held[i] = self.pool.take()
        kept = tokens[:n_keep] + tokens[n_keep + n_discard :]
        self.truncate(seq_id, len(kept))
        self.tokens[seq_id] = kept
        self.moved_at[seq_id] = min(self.moved_at[seq_id], n_keep)
        self.shifts.append((seq_id, n_keep, n_discard))


class FakeTokenizer:
    """One token per byte; `<s>` and `</s>` are control tokens."""

    model = "gpt2"
    n_vocab = N_VOCAB
    eog_ids = frozenset({END})
    suppress_ids: frozenset[int] = frozenset()
    bos_id, eos_id, sep_id = BOS, END, None
    eot_id: int | None = None
    fim_pre_id: int | None = None
    fim_suf_id: int | None = None
    fim_mid_id: int | None = None
    fim_rep_id: int | None = None
    fim_sep_id: int | None = None
    add_eos = False

    def __init__(self, *, add_bos: bool = False) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        tokens = [BOS] if add_special and self.add_bos else []
        data = text.encode("utf-8", "replace")
        while data:
            if parse_special and data.startswith(b"<s>"):
                tokens.append(BOS)
                data = data[3:]
            elif parse_special and data.startswith(b"</s>"):
                tokens.append(END)
                data = data[4:]
            else:
                tokens.append(data[0])
                data = data[1:]
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token >= BOS:
            return {BOS: b"<s>", END: b"</s>"}[token] if special else b""
        return bytes([token])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b"".join(self.piece(token, special=special) for token in tokens)


class FakeTemplate:
    """`role: content` lines; refuses two user messages in a row, as strict templates do."""

    source = "fake"
    tool_use = None

    def capabilities(self) -> dict[str, bool]:
        return {
            "supports_string_content": True,
            "supports_typed_content": False,
            "supports_system_role": True,
            "supports_tools": False,
            "supports_tool_calls": False,
        }

    def render(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, variables: Any, tools: Any = ()
    ) -> str:
        from pyllama.errors import TemplateError

        lines = []
        previous = None
        for message in messages:
            if message["role"] == previous == "user":
                raise TemplateError("conversation roles must alternate")
            previous = message["role"]
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "\n".join(part["text"] for part in content)
            lines.append(f"{previous}: {content}\n")
        if variables.get("enable_thinking") is False:
            lines.append("[no thinking]\n")
        return "".join(lines) + ("assistant:" if add_generation_prompt else "")
