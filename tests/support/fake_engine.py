"""A stand-in for `pyllama._engine` without weights: logits are a fixed function of the sequence, or a forced answer.

It keeps the engine's contract (all-or-nothing steps, room, token ids, one thread at a time) and counts what is alive,
what was computed and what the samplers were told.
"""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import ContextFull, InvalidArgument
from support.fake_prefix_cache import CacheUsage, FakePrefixCache, PrefixReuse
from support.tiny_llama import CHAT_TEMPLATE, ENDOFTEXT, IM_END, IM_START, byte_level_vocabulary

VOCABULARY = byte_level_vocabulary()
N_VOCAB = len(VOCABULARY.tokens)
FIRST_BYTE = 3  # the token of byte b is FIRST_BYTE + b


def byte_tokens(text: str | bytes) -> list[int]:
    """One token per byte, so that characters and stop strings are cut everywhere."""
    data = text.encode() if isinstance(text, str) else text
    return [FIRST_BYTE + byte for byte in data]


class Work(NamedTuple):
    seq_id: int
    tokens: Sequence[int]
    sampler: Sampler | None = None
    n_probs: int = 0
    post_sampling_probs: bool = False


class RankNeeds(NamedTuple):
    device: str
    weights: int
    kv: int
    states: int
    compute: int


class StepOutput(NamedTuple):
    seq_id: int
    token: int
    logprob: float
    top: list[tuple[int, float]]


class Model:
    """`answer`: forced tokens after the last `marker` of the sequence, then end of generation. None: no forcing."""

    live = 0
    is_recurrent = False
    n_swa = 0
    answer: list[int] | None = None
    marker = FIRST_BYTE + ord(">")

    def __init__(
        self, path: str, *, n_threads: int = 0, kv_overrides: dict[str, Any] | None = None, **placement: Any
    ) -> None:
        self.metadata: dict[str, Any] = {
            "general.architecture": "llama",
            "general.name": "fake",
            "llama.context_length": 2048,
            "llama.embedding_length": 64,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": VOCABULARY.tokens,
            "tokenizer.ggml.token_type": VOCABULARY.types,
            "tokenizer.ggml.merges": VOCABULARY.merges,
            "tokenizer.ggml.bos_token_id": IM_START,
            "tokenizer.ggml.eos_token_id": IM_END,
            "tokenizer.ggml.unknown_token_id": ENDOFTEXT,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        } | dict(kv_overrides or {})
        self.n_vocab, self.n_embd, self.n_ctx_train = N_VOCAB, 64, 2048
        self.path, self.pooling_type, self.n_labels = path, "none", 0
        self._is_open = True
        Model.live += 1

    def row(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Raw logits after `tokens`."""
        row = np.random.default_rng(list(tokens)).standard_normal(N_VOCAB).astype(np.float32) * 3
        if Model.answer is not None:
            after = 0
            while after < len(tokens) and tokens[-1 - after] != Model.marker:
                after += 1
            row[Model.answer[after] if after < len(Model.answer) else IM_END] += 100
        return row

    def close(self) -> None:
        Model.live -= self._is_open
        self._is_open = False


class MemoryNeeds:
    """Of a model that is all on one device and takes nothing."""

    n_layer, n_experts, n_ctx_train = 2, 0, 2048

    def __init__(self, path: str, **arguments: Any) -> None:
        pass

    def of(self, *, devices: Sequence[str] = (), **arguments: Any) -> tuple[RankNeeds, ...]:
        return (RankNeeds(next(iter(devices), "CPU"), 0, 0, 0, 0),)


class Sampler:
    """Greedy at temperature 0, else a draw from the softmax; bias and repeat penalty only."""

    created: ClassVar[list[Sampler]] = []

    def __init__(self, n_vocab: int, *, seed: int, temperature: float, repeat_penalty: float, repeat_last_n: int,
                 logit_bias: Sequence[tuple[int, float]], top_k: int, top_p: float, min_p: float,
                 presence_penalty: float, frequency_penalty: float, **others: Any) -> None:  # fmt: skip
        if repeat_penalty <= 0:
            raise InvalidArgument(f"repeat_penalty must be > 0, found {repeat_penalty}")
        self.seed = random.getrandbits(32) if seed == 0xFFFFFFFF else seed
        self.temperature, self.repeat_penalty, self.repeat_last_n = temperature, repeat_penalty, repeat_last_n
        self.logit_bias, self.top_k, self.others = tuple(logit_bias), top_k, others
        self.history: list[int] = []
        self._random = random.Random(self.seed)
        Sampler.created.append(self)

    def accept(self, tokens: Sequence[int]) -> None:
        self.history += tokens

    def sample(self, logits: NDArray[np.float32]) -> int:
        logits = logits.astype(np.float64)
        for token, bias in self.logit_bias:
            if 0 <= token < len(logits):
                logits[token] += bias
        for token in set(self.history[-self.repeat_last_n :]) if self.repeat_last_n else ():
            logits[token] *= self.repeat_penalty if logits[token] <= 0 else 1 / self.repeat_penalty
        if self.temperature == 0:
            return int(logits.argmax())
        weights = np.exp((logits - logits.max()) / self.temperature)
        return int(np.searchsorted(weights.cumsum(), self._random.random() * weights.sum()))


class Engine:
    live = 0
    fail_with: Exception | None = None  # raised by the constructor

    def __init__(self, model: Model, *, n_ctx: int, n_seq_max: int, n_batch: int, **options: Any) -> None:
        if Engine.fail_with is not None:
            raise Engine.fail_with
        self.model, self.n_ctx, self.n_batch, self.options = model, n_ctx, n_batch, options
        self.tokens: list[int] = []
        self.cache = FakePrefixCache(options.get("cache_bytes", 0), is_recurrent=model.is_recurrent)
        self.checkpoints: list[int] = []  # lengths, in the order they were asked for
        self.computed: list[int] = []  # rows of each pass
        self.delay = 0.0
        self._logits = np.empty((0, N_VOCAB), np.float32)
        self._busy = threading.Lock()
        self._is_open = True
        Engine.live += 1

    def _pass(self, tokens: Sequence[int]) -> None:
        if not self._busy.acquire(blocking=False):
            raise AssertionError("two threads in one engine")
        try:
            assert self._is_open, "engine used after close"
            if not 1 <= len(tokens) <= self.n_batch:
                raise InvalidArgument(f"{len(tokens)} tokens in a pass of at most n_batch={self.n_batch}")
            if not self.can_append(0, len(tokens)):
                raise ContextFull("no pages", 0)
            time.sleep(self.delay)
            self.tokens += tokens
            self.computed.append(len(tokens))
        finally:
            self._busy.release()

    def step(self, work: Sequence[Work]) -> list[StepOutput]:
        (item,) = work
        self._pass(item.tokens)
        if item.sampler is None:
            return []
        row = self.model.row(self.tokens)
        token = item.sampler.sample(row)
        item.sampler.accept([token])
        logprobs = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        order = np.argsort(-logprobs, kind="stable")[: item.n_probs]
        logprob = float(logprobs[token]) if item.n_probs else 0.0
        return [StepOutput(0, token, logprob, [(int(i), float(logprobs[i])) for i in order])]

    def decode(self, tokens: Sequence[int], logits: Sequence[bool] | None = None) -> None:
        flags = logits if logits is not None else [False] * (len(tokens) - 1) + [True]
        first = len(self.tokens)
        self._pass(tokens)
        rows = [self.model.row(self.tokens[: first + i + 1]) for i, flag in enumerate(flags) if flag]
        self._logits = np.stack(rows) if rows else np.empty((0, N_VOCAB), np.float32)

    def logits(self) -> NDArray[np.float32]:
        return self._logits.copy()

    def length(self, seq_id: int) -> int:
        return len(self.tokens)

    def can_append(self, seq_id: int, n_tokens: int) -> bool:
        return len(self.tokens) + n_tokens <= self.n_ctx

    def truncate(self, seq_id: int, length: int) -> None:
        if length > len(self.tokens) or (self.model.is_recurrent and length not in (0, len(self.tokens))):
            raise InvalidArgument(f"a sequence of {len(self.tokens)} tokens cannot be cut to {length}")
        del self.tokens[length:]

    def clear(self, seq_id: int) -> None:
        self.tokens.clear()

    def set_adapters(self, seq_id: int, scales: Sequence[float]) -> None:
        assert not tuple(scales), "this engine has no adapters"

    def adapters(self, seq_id: int) -> tuple[float, ...]:
        return ()

    def reuse_prefix(self, seq_id: int, tokens: Sequence[int], most: int, scales: Sequence[float] = ()) -> PrefixReuse:
        assert self._is_open, "engine used after close"
        assert 0 <= most <= len(tokens)
        assert not tuple(scales)
        matched = self.cache.matched([self.tokens], tokens)
        best = self.cache.find([self.tokens], 0, tokens, most, self.n_ctx)[0]
        if best.length < len(self.tokens) or best.index != 0:
            self.cache.keep(self.tokens)
        self.tokens = list(tokens[: best.length])
        source = "nothing" if best.length == 0 else "own" if best.index == 0 else "host"
        limit = self.cache.limit_of(best.length, matched, most, lacked_pages=False)
        return PrefixReuse(best.length, matched, source, best.checkpoint, limit)

    def checkpoint(self, seq_id: int) -> None:
        self.checkpoints.append(len(self.tokens))
        self.cache.keep_state(self.tokens)

    def release(self, seq_id: int) -> None:
        self.cache.keep(self.tokens)
        self.tokens.clear()

    def cache_usage(self) -> CacheUsage:
        return self.cache.usage()

    def save_sequence(self, seq_id: int) -> bytes:
        return pickle.dumps(self.tokens)

    def load_sequence(self, seq_id: int, state: bytes) -> None:
        try:
            self.tokens = pickle.loads(state)
        except Exception as error:
            raise InvalidArgument(f"truncated state: {error}") from None

    def close(self) -> None:
        Engine.live -= self._is_open
        self._is_open = False


class GgufFile:
    def __init__(self, path: str, *, metadata_only: bool = False) -> None:
        model = Model(path)
        model.close()
        self.metadata = model.metadata

    def close(self) -> None:
        pass


def reset() -> None:
    """Forget what earlier tests forced and counted."""
    Model.answer, Model.marker, Model.is_recurrent = None, FIRST_BYTE + ord(">"), False
    Engine.fail_with = None
    Sampler.created.clear()
