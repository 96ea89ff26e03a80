"""`Llama` with a model whose sequence cannot be cut back, against the engine without weights."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import host_memory, llama_sequence
from pyllama import llama as llama_module
from pyllama.errors import InvalidArgument
from pyllama.llama import Llama
from support import fake_engine
from support.fake_engine import IM_START, byte_tokens

CACHE = 100_000  # of the stand-in, in tokens


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for module in (llama_module, llama_sequence):
        monkeypatch.setattr(module, "_engine", fake_engine)
    monkeypatch.setattr(host_memory, "default_cache_bytes", lambda: CACHE)
    fake_engine.reset()
    fake_engine.Model.is_recurrent = True
    yield fake_engine
    fake_engine.reset()
    gc.collect()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.touch()
    return file


@pytest.fixture
def llm(path: Path) -> Iterator[Llama]:
    with Llama(path, n_ctx=4096, n_batch=128) as opened:
        yield opened


def native(llm: Llama) -> fake_engine.Engine:
    return llm._sequence.engine  # type: ignore[union-attr, return-value]


def message(text: str) -> list[int]:
    return [IM_START, *byte_tokens(text)]


def first_tokens(llm: Llama, prompt: list[int], n: int = 3) -> list[int]:
    return list(itertools.islice(llm.generate(prompt, temp=0), n))


def greedy(llm: Llama, tokens: list[int]) -> int:
    return int(native(llm).model.row(tokens).argmax())


def test_a_long_prompt_goes_on_from_an_odd_length_to_multiples_of_64(llm: Llama) -> None:
    llm.eval(byte_tokens("x" * 30))
    del native(llm).computed[:]
    llm.eval(byte_tokens("y" * 300))
    ends = list(itertools.accumulate(native(llm).computed, initial=30))
    assert ends[-1] == 330
    assert max(native(llm).computed) <= 128
    assert [end for end in ends[1:-1] if end % 64 != 0] == [
        end
        for end in ends[1:-1]
        if end in llm._sequence._planned and end % 64 != 0  # type: ignore[union-attr]
    ]
    assert 128 in ends  # not 158


def test_the_cache_in_host_memory_is_sized_by_itself_for_recurrent_models_only(path: Path) -> None:
    for is_recurrent, argument, expected in (
        (True, None, CACHE),
        (False, None, 0),
        (True, 0, 0),
        (False, 3, 3 << 20),
        (True, -1, -1),
    ):
        fake_engine.Model.is_recurrent = is_recurrent
        with Llama(path, cache_ram=argument, ctx_checkpoints=7) as llm:
            assert native(llm).options["cache_bytes"] == expected
            assert native(llm).options["n_checkpoints"] == 7
            assert (llm._sequence._checkpoints is not None) == (is_recurrent and expected != 0)  # type: ignore[union-attr]
    for argument in ({"cache_ram": -2}, {"ctx_checkpoints": -1}):
        with pytest.raises(InvalidArgument, match=next(iter(argument))):
            Llama(path, **argument)


def test_a_conversation_computes_what_is_new_and_an_edit_goes_on_from_the_message_before_it(llm: Llama) -> None:
    first, second, third = message("one " * 40), message("two " * 30), message("three " * 20)
    engine = native(llm)
    answer = first_tokens(llm, first + second)
    assert engine.checkpoints == [161]
    engine.computed.clear()
    follow_up = [*first, *second, *answer, *third]
    assert first_tokens(llm, follow_up, 1) == [greedy(llm, follow_up)]
    assert sum(engine.computed) == 1 + len(third)  # the last answered token never entered the memory
    engine.computed.clear()
    edited = [*first, *message("2 " * 30), *answer, *third]
    assert first_tokens(llm, edited, 1) == [greedy(llm, edited)]
    assert sum(engine.computed) == len(edited) - 161


def test_the_same_prompt_again_goes_on_from_its_last_message(llm: Llama) -> None:
    prompt = message("one " * 40) + message("answer:")
    answer = first_tokens(llm, prompt)
    native(llm).computed.clear()
    assert first_tokens(llm, prompt) == answer
    assert sum(native(llm).computed) == len(message("answer:")) + 2


def test_states_are_kept_at_full_pages_of_an_answer(llm: Llama) -> None:
    prompt = message("x" * 100)
    drawn = first_tokens(llm, prompt, 450)
    assert [p for p in native(llm).checkpoints if p > len(prompt)] == [256, 512]
    native(llm).computed.clear()
    llm.n_tokens = 540
    assert list(llm.eval_tokens) == [*prompt, *drawn][:540]
    assert sum(native(llm).computed) == 540 - 512


def test_assigning_n_tokens_computes_again_what_the_nearest_state_lacks(llm: Llama) -> None:
    tokens = message("one " * 10) + message("two " * 10) + message("three")
    llm.eval(tokens)
    for length in (len(tokens) - 1, 60, 41, 17):
        llm.n_tokens = length
        assert list(llm.eval_tokens) == tokens[:length] == native(llm).tokens
        assert llm.sample(temp=0) == greedy(llm, tokens[:length])
    llm.n_tokens = 0
    assert native(llm).tokens == []


def test_sampling_without_kept_logits_computes_the_last_token_again(llm: Llama) -> None:
    prompt = message("say") + message("it>")
    first_tokens(llm, prompt, 5)
    held = list(llm.eval_tokens)
    assert llm.sample(temp=0) == greedy(llm, held)
    assert list(llm.eval_tokens) == held == native(llm).tokens
    assert next(llm.generate([], temp=0, reset=False)) == greedy(llm, held)


def test_evaluating_token_by_token_gives_what_a_prompt_gives(llm: Llama) -> None:
    tokens = message("abc") + message("def")
    for token in tokens:
        llm.eval([token])
    assert llm.sample(temp=0) == greedy(llm, tokens)
    llm.reset()
    assert llm.n_tokens == 0
    llm.eval(tokens)
    assert llm.sample(temp=0) == greedy(llm, tokens)


def test_an_interrupted_step_leaves_a_usable_object(llm: Llama) -> None:
    prompt = message("abc") + message("def")
    engine = native(llm)

    def interrupted(work: Any) -> Any:
        fake_engine.Engine.step(engine, work)
        raise KeyboardInterrupt

    engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(llm.generate(prompt))
    del engine.step
    assert first_tokens(llm, prompt, 1) == [greedy(llm, prompt)]
    assert list(llm.eval_tokens) == engine.tokens


def test_an_interrupted_reuse_leaves_both_sides_in_agreement(llm: Llama) -> None:
    """The interrupt arrives when the engine holds another text of the same length already."""
    first, second = message("aaaa") + message("bbbb"), message("aaaa") + message("cccc")
    llm.eval(first)
    llm.eval([5])
    engine = native(llm)
    llm.n_tokens = 5
    llm.eval(second[5:])
    llm.eval([6])

    def interrupted(*arguments: Any) -> Any:
        fake_engine.Engine.reuse_prefix(engine, *arguments)
        raise KeyboardInterrupt

    engine.reuse_prefix = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(llm.generate([*first, 5, 7], temp=0))
    del engine.reuse_prefix
    assert first_tokens(llm, [*second, 8], 1) == [greedy(llm, [*second, 8])]
    assert list(llm.eval_tokens) == engine.tokens == [*second, 8]


def test_scores_of_every_token_survive_reuse(path: Path) -> None:
    with Llama(path, logits_all=True, n_batch=16) as llm:
        first, second = message("one") + message("two") + message("three"), message("one") + message("2")
        for prompt in (first, second, first, second + message("x")):
            llm.eval(prompt) if not llm.n_tokens else next(llm.generate(prompt, temp=0))
            rows = np.asarray(llm.scores)
            expected = [native(llm).model.row(prompt[: i + 1]) for i in range(len(prompt))]
            assert np.array_equal(rows, np.stack(expected))


def test_a_prompt_that_is_scored_leaves_the_conversation_in_host_memory(llm: Llama) -> None:
    prompt = message("one " * 40) + message("two")
    first_tokens(llm, prompt)
    llm("echo this", max_tokens=1, echo=True, logprobs=1)
    native(llm).computed.clear()
    first_tokens(llm, prompt, 1)
    assert sum(native(llm).computed) == len(message("two"))


def test_a_loaded_state_goes_on_identically(llm: Llama, path: Path) -> None:
    prompt = message("one") + message("two")
    first_tokens(llm, prompt, 9)
    state, held = llm.save_state(), list(llm.eval_tokens)
    with Llama(path, n_ctx=4096) as other:
        other.eval(message("something else"))
        other.load_state(state)
        assert list(other.eval_tokens) == held
        assert other.sample(temp=0) == greedy(llm, held)


def test_without_a_cache_everything_works_by_computing_again(path: Path) -> None:
    with Llama(path, cache_ram=0) as llm:
        tokens = message("one") + message("two") + message("three")
        first_tokens(llm, tokens)
        llm.n_tokens = 6
        assert llm.sample(temp=0) == greedy(llm, tokens[:6])
        assert first_tokens(llm, tokens, 1) == [greedy(llm, tokens)]
        assert native(llm).checkpoints == []
