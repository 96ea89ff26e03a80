"""Speculation over HTTP changes nothing but speed: every answer equals that of a server without it, to the last bit.

Models are tiny and random, so that n-gram drafts and those of a foreign draft model are mostly wrong; drafts of the
same model are always right.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer

from pyllama.errors import InvalidArgument
from pyllama.grammar import Constraint
from pyllama.server import constrained_draws
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import TinyQwen4Exp, write_tiny_qwen4exp

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
        return write_tiny_hybrid(path, architecture, n_layer=5, attention_interval=3, n_mtp=1, **options)
    if architecture == "qwen4exp":
        return write_tiny_qwen4exp(path, TinyQwen4Exp(mtp=True), **options)
    return write_tiny_model(path, architecture, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def foreign(folder: Path) -> Path:
    """A draft model with the same vocabulary and nothing else in common."""
    return write_tiny_llama(folder / "foreign.gguf", seed=99)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted under a grammar shall not depend on how busy the machine is."""
    monkeypatch.setattr(constrained_draws, "DRAFT_SECONDS", 5.0)


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


CASES = [
    *itertools.product(("llama", "qwen3", "qwen35", "qwen35moe"), ("ngrams", "same", "foreign", "both")),
    ("qwen35", "mtp"),
    ("qwen35moe", "mtp"),
    ("qwen4exp", "mtp"),
]


@pytest.mark.parametrize(("architecture", "drafter"), CASES)
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
        "mtp": ["--spec-type", "draft-mtp", "--spec-draft-n-max", "4"],
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
        assert n_accepted > 0 or drafter in ("foreign", "mtp")
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


def test_clients_at_once_get_what_each_gets_alone(folder: Path) -> None:
    """Eight clients on four slots, with conversations that begin alike; n-grams and the model's own block."""
    model = write(folder / "concurrent.gguf", "qwen35")
    plain = EngineServer(model, "-np", "4", "-c", "8192")
    drafting = EngineServer(
        model, "-np", "4", "-c", "8192", "--no-spec-adaptive", *NGRAMS, "--spec-type", f"{ALL_NGRAMS},draft-mtp"
    )
    beginnings = ["the same beginning of all " * 12, "another one, of others, " * 12]

    def ask(number: int) -> list[tuple[Any, ...]]:
        answers, prompt = [], beginnings[number % 2] + f"{number % 4} "
        for turn in range(3):
            fields = {"temperature": 0.8 * (number % 2), "seed": number, "n_predict": 24, "n_probs": number % 3}
            expected = plain.complete(prompt, return_tokens=True, **fields)
            answer = drafting.complete(prompt, return_tokens=True, **fields)
            answers.append((number, turn, answer["tokens"], answer["content"], answer.get("completion_probabilities")))
            assert answers[-1][2:] == (
                expected["tokens"],
                expected["content"],
                expected.get("completion_probabilities"),
            )
            prompt += answer["content"] + f" and then {turn}. "
        return answers

    try:
        with ThreadPoolExecutor(8) as clients:
            together = list(clients.map(ask, range(8)))
        assert together == [ask(number) for number in range(8)]
    finally:
        plain.close()
        drafting.close()


def test_a_file_with_a_block_of_multi_token_prediction_says_so_itself_and_loads_without_it(folder: Path) -> None:
    model = write(folder / "hybrid.gguf", "qwen35")
    server = EngineServer(model)
    assert server.state.loaded.engine_loop.speculation_names == []
    server.close()
    server = EngineServer(model, "--spec-type", "draft-mtp")
    try:
        settings = server.complete("abc")["generation_settings"]
        assert settings["speculative.types"] == "draft-mtp"
        assert server.client.get("/slots").json()[0]["speculative"] is True
    finally:
        server.close()


def test_what_cannot_speculate_stops_the_start_with_the_reason(folder: Path, foreign: Path) -> None:
    llama = write(folder / "plain.gguf", "llama")
    other = write_tiny_llama(folder / "other.gguf", metadata={"tokenizer.ggml.eos_token_id": 7})
    for arguments, message in (
        (["--spec-type", "draft-simple"], "needs a draft model"),
        (["--spec-type", "draft-simple", "-md", str(folder / "missing.gguf")], "there is no file"),
        (["--spec-type", "draft-mtp"], "block of multi-token prediction"),
        (["--spec-type", "ngram-simple", "--spec-synth-len", "99"], "expected 1 to 49"),
        (["--spec-type", "ngram-cache", "-lcs", str(llama)], "lookup file"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            EngineServer(llama, *arguments)
    assert other.exists()


def test_synthetic_acceptance_gives_rounds_of_the_wanted_length(folder: Path, foreign: Path) -> None:
    model = write(folder / "synthetic.gguf", "llama")
    arguments = ["--spec-type", "draft-simple", "-md", str(foreign), "--spec-draft-n-max", "4"]
    server = EngineServer(model, *arguments, "--spec-synth-len", "3")
    try:
        timings = server.complete("abc", n_predict=400)["timings"]
        n_rounds = timings["draft_n"] / 4
        assert 1 + timings["draft_n_accepted"] / n_rounds == pytest.approx(3, abs=0.4)
    finally:
        server.close()


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": 'root ::= ("a" | "b" | "ab")+ "c" [a-z]*'},
    "schema": {"json_schema": {"type": "array", "items": {"enum": ["ab", "abab", 7]}, "minItems": 4}},
    "lazy": {
        "grammar": "root ::= [a-d]+",
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": "a"}],
    },
    "budget": {
        "reasoning_budget_tokens": 9,
        "reasoning_budget_start_tag": "a",
        "reasoning_budget_end_tag": "zz",
        "reasoning_budget_message": "abab",
    },
}


@pytest.mark.parametrize("drafter", ["ngrams", "same", "mtp"])
@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_what_keeps_to_a_grammar_is_drafted_for(folder: Path, architecture: str, drafter: str) -> None:
    """Texts, ends and probabilities are those of a server without speculation; biases make them repeat themselves."""
    if drafter == "mtp" and architecture == "llama":
        pytest.skip("llama has no block of multi-token prediction")
    model = folder / f"{architecture}.gguf"
    if not model.exists():
        write(model, architecture)
    arguments = {
        "ngrams": ["--spec-type", ALL_NGRAMS],
        "same": ["--spec-type", "draft-simple", "-md", str(model), "--spec-draft-n-max", "5"],
        "mtp": ["--spec-type", "draft-mtp", "--spec-draft-n-max", "4"],
    }[drafter]
    pair = Pair(model, *arguments)
    letters = [[pair.plain.client.post("/tokenize", json={"content": x}).json()["tokens"][0], 6.0] for x in "ab"]
    try:
        for name, fields in CONSTRAINTS.items():
            n_drafted = n_accepted = 0
            for prompt, temperature in itertools.product(("abababababab", "x"), (0.0, 0.7)):
                common = {"temperature": temperature, "seed": 3, "n_predict": 48, "n_probs": 2, "logit_bias": letters}
                timings = pair.ask(prompt, **common, **fields)["timings"]
                n_drafted += timings.get("draft_n", 0)
                n_accepted += timings.get("draft_n_accepted", 0)
            if drafter == "ngrams" or name == "budget":  # a model's own likeliest tokens are no letters
                assert n_drafted > 20, name
                assert n_accepted > 0 or drafter == "mtp", name
    finally:
        pair.close()


def test_masks_that_are_late_hold_nobody_up_and_change_no_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask takes longer than a draft waits for; then only some do."""
    model = write(folder / "late.gguf", "llama")
    arguments = ["--spec-type", "draft-simple", "-md", str(model), "--no-spec-adaptive", "-np", "2"]
    server = EngineServer(model, *arguments)
    monkeypatch.setattr(constrained_draws, "DRAFT_SECONDS", 0.05)
    fields = {"grammar": "root ::= [a-z ]{16}", "n_predict": 24}
    original, calls = Constraint.mask, itertools.count()
    try:
        expected = server.complete("abc", **fields)
        assert expected["timings"]["draft_n"] > 0
        for every in (1, 3):

            def late(constraint: Constraint, every: int = every) -> Any:
                if next(calls) % every == 0:
                    time.sleep(0.08)
                return original(constraint)

            monkeypatch.setattr(Constraint, "mask", late)
            found = server.complete("abc", **fields)
            assert found["content"] == expected["content"]
            assert found["timings"].get("draft_n", 0) < expected["timings"]["draft_n"]
    finally:
        server.close()


TWO_LETTERS = {"n_predict": 60, "logit_bias": [[100, 50.0], [101, 50.0]]}  # a text that repeats itself


def test_the_log_says_how_the_drafts_of_a_request_and_of_each_drafter_fared(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(folder / "logged.gguf", "llama")
    caplog.set_level(logging.DEBUG, "pyllama.server")
    server = EngineServer(model, "--no-spec-adaptive", *NGRAMS, "--spec-type", "ngram-cache")
    server.complete("abcabcabcabcabc", **TWO_LETTERS)
    server.close()
    assert "draft acceptance = 0." in caplog.text
    assert "acc per pos = (" in caplog.text
    assert "statistics      ngram-cache: #calls(b,g,a) =    1" in caplog.text


def test_a_server_that_slept_drafts_again(folder: Path) -> None:
    model = write(folder / "asleep.gguf", "llama")
    server = EngineServer(
        model, "--no-spec-adaptive", *NGRAMS, "--spec-type", "ngram-cache", "--sleep-idle-seconds", "1"
    )
    try:
        before = server.complete("abcabcabcabcabc", **TWO_LETTERS)
        deadline = time.monotonic() + 30
        while not server.state.loaded.engine_loop.is_sleeping and time.monotonic() < deadline:
            time.sleep(0.05)
        after = server.complete("abcabcabcabcabc", **TWO_LETTERS)
        assert after["content"] == before["content"]
        assert after["timings"]["draft_n"] == before["timings"]["draft_n"] > 0
    finally:
        server.close()
