"""Speculation over HTTP changes nothing but speed: every answer equals that of a server without it, to the last bit.

Models are tiny and random, so that n-gram drafts and those of a foreign draft model are mostly wrong; drafts of the
same model are always right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer

from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

pytest.importorskip("pyllama._engine", reason="needs the native module")

NGRAMS = [
    *("--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "3"),
    *("--spec-ngram-map-k-size-n", "2", "--spec-ngram-map-k-size-m", "3"),
    *("--spec-ngram-map-k4v-size-n", "2", "--spec-ngram-map-k4v-size-m", "3"),
    *("--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "4"),
]
ALL_NGRAMS = "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache"


def write(path: Path, architecture: str, **options: Any) -> Path:
    if architecture == "llama":
        return write_tiny_llama(path, **options)
    if architecture.startswith("qwen35"):
        return write_tiny_hybrid(path, architecture, n_layer=5, attention_interval=3, **options)
    return write_tiny_model(path, architecture, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def foreign(folder: Path) -> Path:
    """A draft model with the same vocabulary and nothing else in common."""
    return write_tiny_llama(folder / "foreign.gguf", seed=99)


class Pair:
    """A server that drafts and one that does not."""

    def __init__(self, model: Path, *arguments: str) -> None:
        self.plain = EngineServer(model, "--metrics")
        self.drafting = EngineServer(model, "--metrics", "--no-spec-adaptive", *NGRAMS, *arguments)

    def close(self) -> None:
        self.plain.close()
        self.drafting.close()

    def ask(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """The answer with drafts, after comparing it with the one without."""
        expected = self.plain.complete(prompt, return_tokens=True, **fields)
        answer = self.drafting.complete(prompt, return_tokens=True, **fields)
        assert without_times(answer) == without_times(expected)
        return answer


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    settings = {k: v for k, v in answer["generation_settings"].items() if k != "speculative.types"}
    kept = {k: v for k, v in answer.items() if k not in ("timings", "id_slot", "tokens_cached", "model")}
    return kept | {"generation_settings": settings}


def cases(n_predict: int = 40) -> Iterator[tuple[str, dict[str, Any]]]:
    prompts = ("abcabcabcabcabcabc", "to be or not to be, that is the question: to be or not", "x")
    for prompt, temperature in itertools.product(prompts, (0.0, 0.9)):
        common = {"temperature": temperature, "seed": 11, "n_predict": n_predict}
        yield prompt, common
        yield prompt, common | {"n_probs": 3}
        yield prompt, common | {"stop": ["e", "a"]}
        yield prompt, common | {"ignore_eos": False, "logit_bias": [[0, 8.0], [1, 8.0], [2, 8.0]]}
        yield prompt, common | {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "dry_multiplier": 0.8}
        yield prompt, common | {"n_predict": 3}
        yield prompt, common | {"n_probs": 2, "post_sampling_probs": True, "top_k": 5}
        yield prompt, common | {"grammar": 'root ::= [a-z]+ " " [a-z]+', "n_predict": 20}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen35", "qwen35moe"])
@pytest.mark.parametrize("drafter", ["ngrams", "same", "foreign", "both"])
def test_answers_are_those_of_a_server_without_speculation(
    folder: Path, foreign: Path, architecture: str, drafter: str
) -> None:
    model = folder / f"{architecture}.gguf"
    if not model.exists():
        write(model, architecture)
    arguments = {
        "ngrams": ["--spec-type", ALL_NGRAMS],
        "same": ["--spec-type", "draft-simple", "-md", str(model), "--spec-draft-n-max", "5"],
        "foreign": ["--spec-type", "draft-simple", "-md", str(foreign), "--spec-draft-n-max", "4"],
        "both": ["--spec-type", f"{ALL_NGRAMS},draft-simple", "-md", str(foreign)],
    }[drafter]
    pair = Pair(model, *arguments)
    try:
        n_drafted = n_accepted = 0
        for prompt, fields in cases():
            timings = pair.ask(prompt, **fields)["timings"]
            n_drafted += timings.get("draft_n", 0)
            n_accepted += timings.get("draft_n_accepted", 0)
            if drafter == "same" and len(fields) == 3 and fields["temperature"] == 0:
                # Refused are end tokens at most, which the requests ban.
                assert timings["draft_n_accepted"] >= 0.9 * timings["draft_n"] > 0
        assert n_drafted > 100
        assert n_accepted > 0 or drafter == "foreign"
        assert n_accepted < n_drafted or drafter == "same"
        metrics = pair.drafting.metrics()
        assert metrics["spec_decode_num_draft_tokens_total"] == n_drafted
        assert metrics["spec_decode_num_accepted_tokens_total"] == n_accepted
        assert metrics["spec_decode_num_drafts_total"] > 0
        at = [
            value for name, value in metrics.items() if name.startswith("spec_decode_num_accepted_tokens_per_pos_total")
        ]
        assert sum(at) == n_accepted
    finally:
        pair.close()
