"""`Llama` with a tiny hybrid model on the native engine: whatever is reused, the bits are those of a fresh object."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import InvalidArgument
from pyllama.llama import Llama
from support.tiny_hybrid import write_tiny_hybrid

pytest.importorskip("pyllama._engine", reason="needs the native module")

OPENER = 1  # <|im_start|>
MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "you are the world " * 15}]


@pytest.fixture
def llm(tiny_hybrid_path: Path) -> Iterator[Llama]:
    with Llama(tiny_hybrid_path, n_ctx=2048, n_threads=1) as opened:
        yield opened


def fresh_row(path: Path, tokens: list[int]) -> Any:
    with Llama(path, n_ctx=2048, n_threads=1, n_batch=7) as fresh:
        fresh.eval(tokens)
        return fresh.scores[-1].copy()


def text(rng: random.Random, n: int) -> list[int]:
    return [OPENER, *(rng.randrange(3, 290) for _ in range(n - 1))]


def watch(llm: Llama) -> list[int]:
    """Gets the length of every reuse from now on."""
    lengths: list[int] = []
    engine = llm._sequence.engine  # type: ignore[union-attr]

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def reuse_prefix(self, *arguments: Any) -> Any:
            found = engine.reuse_prefix(*arguments)
            lengths.append(found.length)
            return found

    llm._sequence._engine = Watched()  # type: ignore[union-attr, assignment]
    return lengths


def test_appended_edited_repeated_and_alternating_prompts_give_the_bits_of_a_fresh_object(
    llm: Llama, tiny_hybrid_path: Path
) -> None:
    rng = random.Random(1)
    a, b, c, d = (text(rng, n) for n in (300, 40, 50, 60))
    lengths = watch(llm)
    for prompt, reused in (
        (a + b, 0),
        (a + b + c, 340),
        (a + b + c, 340),
        (a + d, 300),
        (d + a, 0),
        (a + b + c + d, 390),
        ((a + b)[:320], 300),
    ):
        next(llm.generate(prompt, temp=0))
        row = llm.scores[-1] if len(llm.scores) - 1 in llm.scores else llm._sequence.last_row()  # type: ignore[union-attr]
        assert np.array_equal(row, fresh_row(tiny_hybrid_path, prompt))
        assert lengths[0] == reused, prompt
        lengths.clear()


def test_a_conversation_says_what_fresh_objects_say_and_reads_each_turn_once(
    llm: Llama, tiny_hybrid_path: Path
) -> None:
    lengths, messages = watch(llm), list(MESSAGES)
    n_before = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"hello number {turn}"})
        options = {"max_tokens": 30, "temperature": 0, "logit_bias": dict.fromkeys(range(3), -100)}
        reply = llm.create_chat_completion(messages, **options)
        with Llama(tiny_hybrid_path, n_ctx=2048, n_threads=1) as fresh:
            expected = fresh.create_chat_completion(messages, **options)
        assert reply["choices"] == expected["choices"]
        # Random weights write bytes that are no text: the answer, read again, need not be the same tokens.
        assert lengths[0] >= n_before
        n_before = reply["usage"]["prompt_tokens"] - 8
        lengths.clear()
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


def test_a_cut_sequence_is_that_of_the_shorter_text(llm: Llama, tiny_hybrid_path: Path) -> None:
    rng = random.Random(2)
    tokens = text(rng, 260) + text(rng, 100) + text(rng, 30)
    llm.eval(tokens)
    for length in (389, 371, 360, 300, 260, 100, 1):
        llm.n_tokens = length
        assert list(llm.eval_tokens) == tokens[:length]
        assert llm.sample(temp=0) == int(fresh_row(tiny_hybrid_path, tokens[:length]).argmax())


def test_all_logits_are_right_after_reuse(tiny_hybrid_path: Path) -> None:
    rng = random.Random(3)
    first = text(rng, 60) + text(rng, 20)
    second = first[:60] + text(rng, 30)
    with Llama(tiny_hybrid_path, n_ctx=512, n_threads=1, logits_all=True) as llm:
        for prompt in (first, second, first, second[:70]):
            next(llm.generate(prompt, temp=0))
            with Llama(tiny_hybrid_path, n_ctx=512, n_threads=1, logits_all=True) as fresh:
                fresh.eval(prompt)
                assert np.array_equal(np.asarray(llm.scores), np.asarray(fresh.scores))


def test_a_saved_state_brings_its_checkpoints_along(llm: Llama, tiny_hybrid_path: Path) -> None:
    rng = random.Random(4)
    prompt = text(rng, 300) + text(rng, 40)
    drawn = list(itertools.islice(llm.generate(prompt, temp=0), 20))
    state = llm.save_state()
    with Llama(tiny_hybrid_path, n_ctx=1024, n_threads=1) as other:
        other.load_state(state)
        lengths = watch(other)
        assert list(itertools.islice(other.generate(prompt, temp=0), 20)) == drawn
        assert lengths == [300]
        edited = prompt[:310] + text(rng, 9)
        next(other.generate(edited, temp=0))
        assert lengths[-1] == 300
        assert np.array_equal(other._sequence.last_row(), fresh_row(tiny_hybrid_path, edited))  # type: ignore[union-attr]


def test_a_state_of_another_model_is_refused_with_its_reason(llm: Llama, tmp_path: Path) -> None:
    llm.eval(text(random.Random(5), 30))
    state = llm.save_state()
    with Llama(write_tiny_hybrid(tmp_path / "other.gguf", seed=3), n_threads=1) as other:
        with pytest.raises(InvalidArgument, match="another model"):
            other.load_state(state)
        assert other.n_tokens == 0
        assert other("the", max_tokens=2)["usage"]["completion_tokens"] <= 2


def test_echoed_probabilities_are_those_of_the_scores(llm: Llama, tiny_hybrid_path: Path) -> None:
    prompt = "the world is an island and you are the other"
    for _ in range(2):
        logprobs = llm(prompt, max_tokens=1, echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"]
        tokens = llm.tokenize(prompt.encode())
        with Llama(tiny_hybrid_path, n_threads=1, logits_all=True) as every:
            every.eval(tokens)
            rows = np.asarray(every.scores).astype(np.float64)
        rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
        expected = [rows[i, token] for i, token in enumerate(tokens[1:])]
        assert logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-9)
