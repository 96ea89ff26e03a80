"""What `llama-perplexity` and `llama-imatrix` share: a model that runs over chunks of a text, running means."""

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama.download.model_options import choose_model
from pyllama.errors import InvalidArgument
from pyllama.options import Options, placement_request, rope_arguments
from pyllama.placement import place_model
from pyllama.placement_log import load_lines
from pyllama.thread_placement import engine_thread_options
from pyllama.tokenizer import Tokenizer


class ScoredModel:
    """A model with memory for one chunk of `n_ctx` tokens (0: its training length). A context manager."""

    def __init__(self, options: Options, *, n_ctx: int, collect_importance: bool = False) -> None:
        from pyllama import _engine
        from pyllama.adapters import load_adapters, load_control_vector
        from pyllama.gguf.split_set import check_parts

        path = choose_model(options, os.environ).fetch()
        check_parts(Path(path))
        piece = min(options.batch_size, options.ubatch_size)
        request = placement_request(options)
        if collect_importance and request.devices is None and request.split_mode == "layer":
            request = replace(request, split_mode="none")  # sums are collected on one device
        placed = place_model(
            request,
            path,
            n_ctx=n_ctx,
            sizes={"n_ubatch": piece, "type_k": options.cache_type_k, "type_v": options.cache_type_v},
            kv_overrides=dict(options.override_kv),
        )
        for line in () if options.log_disable else (*placed.warnings, *load_lines(placed)):
            print(line, file=sys.stderr)
        self._model = _engine.Model(
            path,
            n_threads=max(options.threads, 0),
            check_tensors=options.check_tensors,
            kv_overrides=dict(options.override_kv),
            **placed.arguments,
        )
        self.tokenizer = Tokenizer.from_metadata(self._model.metadata)
        self.n_vocab = self._model.n_vocab
        self.n_ctx = n_ctx or self._model.n_ctx_train
        if self.n_ctx > self._model.n_ctx_train:
            print(f"warn: chunks of {self.n_ctx} tokens; trained on {self._model.n_ctx_train}", file=sys.stderr)
        # Logits leave the engine piece by piece: the rows of a whole chunk may take gigabytes.
        self._piece = min(piece, self.n_ctx)
        self.engine = _engine.Engine(
            self._model,
            n_ctx=self.n_ctx,
            n_batch=self._piece,
            n_ubatch=self._piece,
            n_threads=max(options.threads, 0),
            n_threads_batch=max(options.threads_batch or 0, 0),
            **engine_thread_options(options),
            type_k=options.cache_type_k,
            type_v=options.cache_type_v,
            offload_kqv=options.kv_offload,
            **rope_arguments(options),
            collect_importance=collect_importance,
            adapters=load_adapters(self._model, options.adapters),
            control=load_control_vector(self._model, options.control_vectors, options.control_vector_layer_range),
        )
        self.engine.set_adapters(0, [scale for _, scale in options.adapters])

    def encode(self, text: str, *, parse_special: bool) -> NDArray[np.int32]:
        return np.asarray(self.tokenizer.encode(text, add_special=True, parse_special=parse_special), np.int32)

    def logits(self, chunk: NDArray[np.int32], first: int, end: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Run a chunk from an empty context, with BOS in place of its first token where the model wants one.

        Gives (position of the first row, rows) until the logits after positions `first` to `end` - 1 are out.
        """
        tokens = chunk.copy()
        if self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
            tokens[0] = self.tokenizer.bos_id
        wanted = np.zeros(len(tokens), bool)
        wanted[first:end] = True
        self.engine.clear(0)
        for start in range(0, len(tokens), self._piece):
            piece = slice(start, start + self._piece)
            self.engine.decode(tokens[piece].tolist(), logits=wanted[piece].tolist())
            if wanted[piece].any():
                yield max(start, first), self.engine.logits()

    def close(self) -> None:
        self.engine.close()
        self._model.close()

    def __enter__(self) -> "ScoredModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def chunks_of(tokens: NDArray[np.int32], n_ctx: int, most: int) -> NDArray[np.int32]:
    """[chunks, n_ctx]: the whole chunks of a text, at most `most` unless that is negative.

    Raises `InvalidArgument` for a text of less than two chunks: too short for a figure that means something.
    """
    first, end = scored_positions(n_ctx)
    if first >= end:
        raise InvalidArgument(f"a chunk of {n_ctx} tokens leaves nothing to predict")
    if len(tokens) < 2 * n_ctx:
        raise InvalidArgument(
            f"the text has {len(tokens)} tokens; chunks of {n_ctx} need at least {2 * n_ctx} (-c makes them smaller)"
        )
    n_chunks = len(tokens) // n_ctx
    n_chunks = n_chunks if most < 0 else min(most, n_chunks)
    if n_chunks == 0:
        raise InvalidArgument("--chunks 0 leaves nothing to compute")
    return tokens[: n_chunks * n_ctx].reshape(n_chunks, n_ctx)


def scored_positions(n_ctx: int) -> tuple[int, int]:
    """Positions of a chunk whose next token is scored, [first, end): those with half a context and a next token."""
    return n_ctx // 2, n_ctx - 1


def token_logprobs(
    logits: NDArray[np.float32], log_sums: NDArray[np.float64], tokens: Sequence[int] | NDArray[np.int32]
) -> NDArray[np.float64]:
    """ln p of one token per row of logits, whose `log_sum_exp` is `log_sums`."""
    return logits[np.arange(len(logits)), tokens] - log_sums


@dataclass(slots=True)
class Mean:
    """Mean of a growing set of values with the standard error of that mean."""

    count: int = 0
    total: float = 0.0
    total_squares: float = 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        self.count += values.size
        self.total += float(values.sum())
        self.total_squares += float(np.square(values).sum())

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        if self.count < 2:
            return 0.0
        return math.sqrt(max(self.total_squares / self.count - self.value**2, 0.0) / (self.count - 1))


def perplexity_text(surprise: Mean) -> str:
    """`surprise`: of -ln p."""
    perplexity = math.exp(surprise.value)
    return f"Final estimate: PPL = {perplexity:.4f} +/- {surprise.error * perplexity:.5f}"


class Progress:
    """Notes on stderr; silent with --log-disable."""

    def __init__(self, options: Options) -> None:
        self._silent: bool = options.log_disable
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        if not self._silent:
            print(text, file=sys.stderr, flush=True)

    def start(self, n_chunks: int, n_ctx: int) -> None:
        self.note(f"computing {n_chunks} chunks of {n_ctx} tokens")
        self._started = time.monotonic()

    def first_done(self, n_chunks: int) -> None:
        seconds = time.monotonic() - self._started
        self.note(f"{seconds:.2f} seconds per chunk, about {seconds * (n_chunks - 1) / 60:.1f} minutes to go")


def text_of(options: Options) -> str:
    """The text of -f, -bf or -p. Raises `InvalidArgument` without one."""
    text: Any = options.prompt
    if not text:
        raise InvalidArgument("no text given; use -f FILE")
    return str(text)
