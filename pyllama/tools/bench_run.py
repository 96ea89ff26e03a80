"""Running llama-bench's tests on the engine.

Only `Engine.decode`, or with drafts their making and `Engine.step`, is inside the clock; token ids are drawn before it
starts.
"""

import contextlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from types import TracebackType
from typing import Any, TextIO

from pyllama.devices import this_machine
from pyllama.draft_placement import arguments_beside, looks_for_gpus
from pyllama.errors import InvalidArgument
from pyllama.placement import PlacementRequest, chosen
from pyllama.speculation import MOST_ROWS, SpeculationOptions
from pyllama.thread_placement import thread_cpus

from .bench_drafts import DraftedGeneration
from .bench_matrix import BenchTest

PAGE = 256
DEPTH_SEQUENCE = 1  # holds what a run at a depth begins with
TOKEN_SEED = 1
NO_MASK = ("0x0", "0")  # how llama-bench spells "any processor"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    path: str
    description: str
    size_bytes: int
    n_params: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`samples_ns`: duration of every repetition, in nanoseconds. `started`: UTC time at which the test began.

    speculation: how drafts were made, if they were; n_drafted, n_accepted: of all repetitions.
    """

    test: BenchTest
    model: ModelFacts
    started: datetime
    samples_ns: tuple[int, ...]
    speculation: SpeculationOptions | None = None
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of every repetition."""
        n_tokens = self.test.n_prompt + self.test.n_gen
        return tuple(1e9 * n_tokens / ns for ns in self.samples_ns)

    @property
    def avg_ns(self) -> int:
        return round(mean(self.samples_ns))

    @property
    def stddev_ns(self) -> int:
        return round(_deviation(self.samples_ns))

    @property
    def avg_ts(self) -> float:
        return mean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return _deviation(self.samples_ts)


def _deviation(samples: Sequence[float]) -> float:
    return stdev(samples) if len(samples) > 1 else 0.0


class Runner:
    """Measures tests one after the other. Keeps the last model loaded, as neighbours usually share it."""

    def __init__(
        self,
        native: Any,
        *,
        repetitions: int,
        warmup: bool,
        numa: str | None = None,
        priority: int = 0,
        speculation: SpeculationOptions | None = None,
        progress: TextIO | None = None,
    ) -> None:
        self._native = native
        self._numa = numa
        self._priority = priority
        self._speculation = speculation
        self._repetitions = repetitions
        self._warmup = warmup
        self._progress = progress
        self._model: Any = None
        self._loaded: tuple[str, PlacementRequest] | None = None  # path and placement of the model

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_model()

    def measure(self, test: BenchTest, *, label: str) -> BenchResult:
        """Warm up, then time every repetition. Raises the engine's errors."""
        self._tell(label, test, "loading")
        model = self._load(test)
        n_tokens = test.n_depth + test.n_prompt + test.n_gen
        if self._speculation is not None:
            n_tokens += MOST_ROWS  # a draft reaches beyond the end
        arguments = {
            "n_ctx": -(-n_tokens // PAGE) * PAGE,
            "n_seq_max": 2 if test.n_depth else 1,
            "n_batch": test.parameters["batch_size"],
            "n_ubatch": min(test.parameters["ubatch_size"], test.parameters["batch_size"]),
            "n_threads": test.parameters["threads"],
            "n_threads_batch": test.parameters["threads"],
            "type_k": test.parameters["cache_type_k"],
            "type_v": test.parameters["cache_type_v"],
            "offload_kqv": not test.parameters["no_kv_offload"],
            "thread_cpus": thread_cpus(
                mask="" if test.parameters["cpu_mask"] in NO_MASK else test.parameters["cpu_mask"],
                strict=bool(test.parameters["cpu_strict"]),
                numa=self._numa,
            ),
            "thread_priority": self._priority,
            "thread_poll": test.parameters["poll"],
        }
        with contextlib.ExitStack() as opened:
            engine = self._native.Engine(model, **arguments)
            opened.callback(engine.close)
            drafted = None
            if self._speculation is not None and test.n_gen:
                drafted = DraftedGeneration(self._native, engine, model, self._beside(model.devices), arguments)
                opened.callback(drafted.close)
            return self._measure(engine, model, test, label, drafted)

    def _measure(
        self, engine: Any, model: Any, test: BenchTest, label: str, drafted: DraftedGeneration | None
    ) -> BenchResult:
        def generate(generated: list[int]) -> None:
            if drafted is not None and generated:
                drafted.generate(generated[0], len(generated))
            else:
                _decode_each(engine, generated)

        tokens = _Tokens(model)
        if self._warmup:
            self._tell(label, test, "warm-up")
            if test.n_prompt:
                _decode_prompt(engine, tokens.prompt(test.n_prompt), test.parameters["batch_size"])
            if test.n_gen:
                generate(tokens.prompt(1))
            engine.clear(0)
        if test.n_depth:
            self._tell(label, test, f"filling the cache to {test.n_depth}")
            _decode_prompt(engine, tokens.prompt(test.n_depth), test.parameters["batch_size"])
            # The beginning of every run. A recurrent model cannot be cut back to it, but any model can be copied.
            engine.fork(0, DEPTH_SEQUENCE, test.n_depth)
        started = datetime.now(timezone.utc)
        samples = []
        for repetition in range(self._repetitions):
            self._tell(label, test, f"run {repetition + 1}/{self._repetitions}")
            prompt = tokens.prompt(test.n_prompt)
            generated = tokens.prompt(test.n_gen) if not test.n_prompt else tokens.random(test.n_gen)
            start = time.perf_counter_ns()
            _decode_prompt(engine, prompt, test.parameters["batch_size"])
            generate(generated)
            samples.append(max(time.perf_counter_ns() - start, 1))
            engine.clear(0)
            if test.n_depth:
                engine.fork(DEPTH_SEQUENCE, 0, test.n_depth)
        facts = ModelFacts(model.path, model.description, model.size_bytes, model.n_params, model.devices)
        counts = (drafted.n_drafted, drafted.n_accepted) if drafted is not None else (0, 0)
        return BenchResult(test, facts, started, tuple(samples), self._speculation, *counts)

    def _load(self, test: BenchTest) -> Any:
        path, placement = test.parameters["model"], test.placement
        if self._loaded != (path, placement):
            self._close_model()
            from pyllama.gguf.split_set import check_parts

            check_parts(Path(path))
            arguments, warnings = chosen(placement, this_machine(with_gpus=placement.looks_for_gpus))
            for warning in warnings:
                print(f"llama-bench: {warning}", file=sys.stderr)
            drafts = self._speculation.model_arguments if self._speculation is not None else {}
            self._model = self._native.Model(path, n_threads=test.parameters["threads"], **arguments, **drafts)
            self._loaded = (path, placement)
        return self._model

    def _beside(self, devices: Sequence[str]) -> SpeculationOptions:
        """How drafts are made beside a model on these devices. As the model itself, nothing is made to fit."""
        assert self._speculation is not None
        asked = self._speculation.placement
        machine = this_machine(with_gpus=looks_for_gpus(asked))
        return replace(self._speculation, placement=arguments_beside(asked, devices, machine))

    def _close_model(self) -> None:
        if self._model is not None:
            self._model.close()
        self._model = self._loaded = None

    def _tell(self, label: str, test: BenchTest, what: str) -> None:
        if self._progress is not None:
            print(f"llama-bench: test {label} ({test.name}): {what}", file=self._progress, flush=True)


class _Tokens:
    """Random token ids, the same in every run; a prompt starts with BOS where the vocabulary asks for it."""

    def __init__(self, model: Any) -> None:
        self._random = random.Random(TOKEN_SEED)
        self._n_vocab = model.n_vocab
        if self._n_vocab < 1:
            raise InvalidArgument(f"{model.path}: the vocabulary is empty")
        metadata = model.metadata
        add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
        self._bos = metadata.get("tokenizer.ggml.bos_token_id") if add_bos else None

    def random(self, count: int) -> list[int]:
        return [self._random.randrange(self._n_vocab) for _ in range(count)]

    def prompt(self, count: int) -> list[int]:
        tokens = self.random(count)
        if tokens and self._bos is not None:
            tokens[0] = int(self._bos)
        return tokens


def _decode_prompt(engine: Any, tokens: list[int], n_batch: int) -> None:
    for begin in range(0, len(tokens), n_batch):
        engine.decode(tokens[begin : begin + n_batch])


def _decode_each(engine: Any, tokens: list[int]) -> None:
    decode = engine.decode
    for token in tokens:
        decode((token,))
