"""Generated requests to servers with and without speculation: every answer must be the same to the last bit.

A setting is an architecture, a type of weights, a drafter and a number of slots. Each has clients whose conversations
grow turn by turn, so that prefixes are reused; requests differ in temperature, stop strings, grammars, probabilities,
penalties, limits. Nothing is random but by the seed. The models say six letters (`spoken_letters`), of which drafts of
every kind are right now and then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from engine_server import EngineServer

from support.spoken_letters import LETTERS, speak_letters
from support.tiny_dflash import write_tiny_dflash
from support.tiny_eagle3 import write_tiny_eagle3
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import NgramMemory, TinyQwen4Exp, write_tiny_qwen4exp

ARCHITECTURES = ("llama", "qwen3", "qwen35", "qwen35moe", "qwen4exp")
DRAFTERS = ("ngrams", "same", "foreign", "dflash", "dflash2", "dspark", "eagle3", "mtp")
COMPARED = (
    *("tokens", "content", "stop_type", "stopping_word", "truncated", "tokens_predicted", "tokens_evaluated"),
    "completion_probabilities",
)
_NGRAMS = (
    *("--spec-type", "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache"),
    *("--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "3"),
    *("--spec-ngram-map-k-size-n", "2", "--spec-ngram-map-k-size-m", "3"),
    *("--spec-ngram-map-k4v-size-n", "2", "--spec-ngram-map-k4v-size-m", "3"),
    *("--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "4"),
)
_GRAMMARS = (
    {"grammar": "root ::= [a-e ]+"},
    {"grammar": 'root ::= ([a-c] [d-e ])+ "."'},
    {"json_schema": {"type": "array", "items": {"enum": ["ab", "cde", 7]}, "minItems": 2}},
    {"grammar": "root ::= [a-c]+ [d-e]*", "grammar_lazy": True, "grammar_triggers": [{"type": 1, "value": "ab"}]},
    {
        "reasoning_budget_tokens": 5,
        "reasoning_budget_start_tag": "a",
        "reasoning_budget_end_tag": "dd",
        "reasoning_budget_message": "cbc",
    },
)


@dataclass(frozen=True, slots=True)
class Setting:
    architecture: str
    weights: str
    drafter: str
    slots: int

    def __str__(self) -> str:
        return f"{self.architecture} {self.weights}, {self.drafter}, {self.slots} slots"


def settings() -> list[Setting]:
    return [
        Setting(architecture, weights, drafter, slots)
        for architecture in ARCHITECTURES
        for weights in ("f32", "q8_0")
        for slots in (1, 4)
        for drafter in DRAFTERS
        if _fits(architecture, drafter)
    ]


def _fits(architecture: str, drafter: str) -> bool:
    if architecture == "qwen4exp":  # no drafters on its hidden states
        return drafter in ("ngrams", "same", "foreign", "mtp")
    return drafter != "mtp" or architecture.startswith("qwen35")


@dataclass(slots=True)
class Tally:
    """differing: what tells a case, for those whose answers were not equal."""

    n_cases: int = 0
    n_constrained: int = 0
    n_prefix_hits: int = 0
    n_stopped: int = 0  # by a stop string
    n_drafted: int = 0
    n_accepted: int = 0
    n_drafted_constrained: int = 0
    differing: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Case:
    prompt: str
    fields: dict[str, Any]
    expected: dict[str, Any]


class Files:
    """Written when they are first wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, architecture: str, weights: str) -> Path:
        path = self._folder / f"{architecture}-{weights}.gguf"
        if path.exists():
            return path
        if architecture == "llama":
            write_tiny_llama(path, n_layer=4, weight_type=weights)
        elif architecture.startswith("qwen35"):
            shape: dict[str, Any] = {"n_layer": 5, "attention_interval": 3, "n_mtp": 1}
            write_tiny_hybrid(path, architecture, weight_type=weights, **shape)
        elif architecture == "qwen4exp":
            memory = NgramMemory(heads=1, vocab_sizes=(101, 103))  # rows of 32 features, which Q8_0 can hold
            write_tiny_qwen4exp(path, TinyQwen4Exp(mtp=True, memory=memory), weight_type=weights)
        else:
            write_tiny_model(path, architecture, n_layer=4, weight_type=weights)
        return speak_letters(path)

    @cached_property
    def foreign(self) -> Path:
        return speak_letters(write_tiny_llama(self._folder / "foreign.gguf", seed=99))

    def dflash(self, version: int, weights: str, markov_rank: int = 0) -> Path:
        path = self._folder / f"dflash{version}-{markov_rank}-{weights}.gguf"
        shape: dict[str, Any] = {"target_layers": (1, 3), "window": 64, "selector_rank": 32, "markov_rank": markov_rank}
        return path if path.exists() else write_tiny_dflash(path, version=version, weight_type=weights, **shape)

    def eagle3(self, weights: str) -> Path:
        path = self._folder / f"eagle3-{weights}.gguf"
        return path if path.exists() else write_tiny_eagle3(path, target_layers=(1, 4, 2), weight_type=weights)

    def arguments(self, setting: Setting) -> tuple[str, ...]:
        """Of the server that drafts."""
        model = self.model(setting.architecture, setting.weights)
        computed = {
            "same": ("draft-simple", model, 5),
            "foreign": ("draft-simple", self.foreign, 4),
            "dflash": ("draft-dflash", self.dflash(1, setting.weights), 7),
            "dflash2": ("draft-dflash", self.dflash(2, setting.weights), 7),
            "dspark": ("draft-dspark", self.dflash(1, setting.weights, markov_rank=32), 7),
            "eagle3": ("draft-eagle3", self.eagle3(setting.weights), 4),
            "mtp": ("draft-mtp", None, 4),
        }
        if setting.drafter == "ngrams":
            return _NGRAMS
        kind, drafter, n_max = computed[setting.drafter]
        named = ("--spec-draft-model", str(drafter)) if drafter is not None else ()
        # Drawn drafts are verified by rejection, which gives other texts of the same distribution.
        return ("--spec-type", kind, *named, "--spec-draft-n-max", str(n_max), "--spec-draft-sampling", "greedy")


def _letters(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(low, high)))


def _fields(rng: random.Random) -> dict[str, Any]:
    """A request's, besides the prompt."""
    fields: dict[str, Any] = {"n_predict": rng.choice((1, 2, 24, 24, 40)), "seed": rng.randrange(1 << 30)}
    fields["temperature"] = rng.choice((0.0, 0.0, 0.8, 1.3))
    for chance, more in (
        (0.35, rng.choice(_GRAMMARS)),
        (0.3, {"stop": rng.choice((["ab"], ["e", "ca"], ["dad", "  "]))}),
        (0.4, {"n_probs": rng.randint(1, 3)}),
        (0.15, {"top_k": 4, "post_sampling_probs": True, "n_probs": 2}),
        (0.2, {"repeat_penalty": 1.1, "frequency_penalty": 0.1, "repeat_last_n": 32}),
        (0.15, {"ignore_eos": False, "logit_bias": [[2, 3.0], ["b", 1.0], ["d", False]]}),
        (0.1, {"cache_prompt": False}),
    ):
        if rng.random() < chance:
            fields |= more
    return fields


def _conversation(server: EngineServer, rng: random.Random, n_turns: int) -> list[Case]:
    cases = []
    prompt = _letters(rng, 5, 300)
    for _ in range(n_turns):
        fields = _fields(rng)
        answer = server.complete(prompt, return_tokens=True, **fields)
        cases.append(Case(prompt, fields, {name: answer.get(name) for name in COMPARED}))
        prompt += answer["content"] + _letters(rng, 1, 12)
    return cases


def _open(model: Path, slots: int, *arguments: str) -> EngineServer:
    return EngineServer(model, "-np", str(slots), "-c", str(1024 * slots), *arguments)


def conversations(files: Files, architecture: str, weights: str, slots: int, n_turns: int) -> list[list[Case]]:
    """Of the server without speculation: at least three clients, as many as slots, one after the other."""
    server = _open(files.model(architecture, weights), slots)
    try:
        return [
            _conversation(server, random.Random(f"{architecture} {weights} {slots} {client}"), n_turns)
            for client in range(max(3, slots))
        ]
    finally:
        server.close()


def compare(files: Files, setting: Setting, expected: list[list[Case]]) -> Tally:
    """The same conversations with drafts, as many at once as there are slots."""
    server = _open(
        files.model(setting.architecture, setting.weights),
        setting.slots,
        *("--no-spec-adaptive", *files.arguments(setting)),
    )

    def replay(cases: list[Case]) -> Tally:
        tally = Tally()
        for case in cases:
            answer = server.complete(case.prompt, return_tokens=True, **case.fields)
            if "timings" not in answer:
                tally.differing.append(f"{setting}: {case.fields} of {case.prompt!r}: {answer}")
                continue
            timings, is_constrained = answer["timings"], any(set(g) <= set(case.fields) for g in _GRAMMARS)
            n_drafted = timings.get("draft_n", 0)
            tally.n_cases += 1
            tally.n_constrained += is_constrained
            tally.n_prefix_hits += timings["cache_n"] > 0
            tally.n_stopped += answer["stop_type"] == "word"
            tally.n_drafted += n_drafted
            tally.n_accepted += timings.get("draft_n_accepted", 0)
            tally.n_drafted_constrained += n_drafted * is_constrained
            different = [name for name in COMPARED if answer.get(name) != case.expected[name]]
            if different:
                tally.differing.append(f"{setting}: {different} of {case.fields} after {case.prompt!r}")
        return tally

    total = Tally()
    try:
        with ThreadPoolExecutor(setting.slots) as clients:
            for tally in clients.map(replay, expected):
                total.add(tally)
    finally:
        server.close()
    return total


def run(files: Files, chosen: list[Setting], n_turns: int = 3) -> Iterator[tuple[Setting, Tally]]:
    """Settings of one model and number of slots share the run without drafts: let them stand together."""
    known: tuple[tuple[str, str, int], list[list[Case]]] | None = None
    for setting in chosen:
        key = (setting.architecture, setting.weights, setting.slots)
        if known is None or known[0] != key:
            known = key, conversations(files, *key, n_turns)
        yield setting, compare(files, setting, known[1])
