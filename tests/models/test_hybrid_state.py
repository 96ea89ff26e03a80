"""Sequences of hybrids keep their recurrent states apart, whatever happens around them: neighbours, cuts of the prompt,
refused and failed steps, forks, files. Everything is compared, bit for bit, with a sequence that was alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import Engine, Model, Sampler, Work
from pyllama.errors import ContextFull, InvalidArgument, PyllamaError
from support.logits import assert_same_bits, greedy_tokens, position_logits
from support.rewritten_gguf import edit_one, rewrite
from support.tiny_hybrid import write_tiny_hybrid

PAGE = 256
N_SEQUENCES = 4
POISON = 40  # a token whose embedding is not a number in `poisoned`


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "model.gguf", n_layer=5, attention_interval=3)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    model = Model(path)
    yield model
    model.close()


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = Engine(model, n_ctx=4 * PAGE, n_seq_max=N_SEQUENCES, n_ubatch=16)
    yield engine
    engine.close()


def random_tokens(n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(50, 290, n_tokens).tolist()


def greedy(model: Model) -> Sampler:
    return Sampler(model.n_vocab, temperature=0.0)


def cold_logits(model: Model, tokens: list[int]) -> np.ndarray:
    """After the last token, [1, n_vocab], of a sequence that was never anything else."""
    engine = Engine(model, n_ctx=4 * PAGE)
    engine.decode(tokens)
    logits = engine.logits()
    engine.close()
    return logits


def answers(engine: Engine, model: Model, prompts: dict[int, list[int]], n_tokens: int) -> dict[int, list[int]]:
    """Greedy answers of all sequences, computed together."""
    samplers = {seq_id: greedy(model) for seq_id in prompts}
    pending, found = dict(prompts), {seq_id: [] for seq_id in prompts}
    for _ in range(n_tokens):
        for output in engine.step([Work(seq_id, pending[seq_id], samplers[seq_id]) for seq_id in pending]):
            found[output.seq_id].append(output.token)
            pending[output.seq_id] = [output.token]
    return found


def test_equal_prompts_at_once_give_one_distinct_answer(model: Model, engine: Engine) -> None:
    prompt = random_tokens(37, seed=1)
    found = answers(engine, model, dict.fromkeys(range(N_SEQUENCES), prompt), 24)
    assert len({tuple(answer) for answer in found.values()}) == 1
    assert found[0] == greedy_tokens(Engine(model, n_ctx=PAGE), prompt, 24)


def test_different_prompts_at_once_answer_as_if_alone(model: Model, engine: Engine) -> None:
    prompts = {seq_id: random_tokens(9 + 13 * seq_id, seed=seq_id) for seq_id in range(N_SEQUENCES)}
    found = answers(engine, model, prompts, 24)
    assert len({tuple(answer) for answer in found.values()}) == N_SEQUENCES
    for seq_id, prompt in prompts.items():
        assert found[seq_id] == greedy_tokens(Engine(model, n_ctx=PAGE), prompt, 24), f"sequence {seq_id}"


def test_two_prompts_in_one_step_with_log_probabilities(model: Model, engine: Engine) -> None:
    prompts = [random_tokens(21, seed=5), random_tokens(34, seed=6)]
    outputs = engine.step([Work(seq_id, prompt, greedy(model), 4) for seq_id, prompt in enumerate(prompts)])
    for prompt, output in zip(prompts, outputs, strict=True):
        (alone,) = Engine(model, n_ctx=PAGE).step([Work(0, prompt, greedy(model), 4)])
        assert (output.token, output.logprob, output.top) == (alone.token, alone.logprob, alone.top)


def test_every_prompt_length_up_to_three_ubatches(model: Model) -> None:
    n_ubatch = 8
    tokens = random_tokens(3 * n_ubatch + 5, seed=7)
    one_by_one = position_logits(Engine(model, n_ctx=PAGE, n_ubatch=1), tokens)
    engine = Engine(model, n_ctx=PAGE, n_ubatch=n_ubatch)
    for length in range(1, 3 * n_ubatch + 1):
        for held in (0, 5):  # a new sequence, and one that goes on
            engine.clear(0)
            if held:
                engine.decode(tokens[:held])
            engine.decode(tokens[held : held + length])
            last = held + length - 1
            assert_same_bits(engine.logits(), one_by_one[last : last + 1], f"{length} tokens after {held}")


@pytest.mark.parametrize("sequence_of_poison", [0, 1, 2])
def test_a_failed_step_leaves_every_state_as_it_was(path: Path, tmp_path: Path, sequence_of_poison: int) -> None:
    def poison(data: np.ndarray) -> np.ndarray:
        data[POISON] = np.nan
        return data

    model = Model(
        rewrite(path, tmp_path / "nan.gguf", architecture="qwen35", tensors=edit_one("token_embd.weight", poison))
    )
    engine = Engine(model, n_ctx=4 * PAGE, n_seq_max=N_SEQUENCES, n_ubatch=16)
    held = {0: random_tokens(30, seed=8), 1: [], 2: random_tokens(3, seed=9)}
    added = {seq_id: random_tokens(19, seed=10 + seq_id) for seq_id in held}
    for seq_id, tokens in held.items():
        if tokens:
            engine.decode(tokens, [seq_id] * len(tokens))
    free = engine.free_tokens()
    bad = {**added, sequence_of_poison: [*added[sequence_of_poison], POISON]}
    for _ in range(3):
        with pytest.raises(PyllamaError, match="NaN"):
            engine.step([Work(seq_id, tokens, greedy(model)) for seq_id, tokens in bad.items()])
        assert [engine.length(seq_id) for seq_id in held] == [len(tokens) for tokens in held.values()]
        assert engine.free_tokens() == free
    for seq_id, tokens in added.items():
        engine.decode(tokens, [seq_id] * len(tokens))
        assert_same_bits(engine.logits(), cold_logits(model, held[seq_id] + tokens), f"sequence {seq_id}")


def test_a_step_that_does_not_fit_leaves_every_state_as_it_was(model: Model) -> None:
    engine = Engine(model, n_ctx=PAGE, n_seq_max=2)  # three pages
    prompts = {seq_id: random_tokens(40, seed=seq_id) for seq_id in range(2)}
    for seq_id, tokens in prompts.items():
        engine.decode(tokens, [seq_id] * len(tokens))
    with pytest.raises(ContextFull):
        engine.step([Work(0, random_tokens(5, seed=3)), Work(1, random_tokens(3 * PAGE, seed=4), greedy(model))])
    tail = random_tokens(6, seed=5)
    for seq_id, tokens in prompts.items():
        engine.decode(tail, [seq_id] * len(tail))
        assert_same_bits(engine.logits(), cold_logits(model, tokens + tail), f"sequence {seq_id}")


def test_a_state_is_kept_or_shared_whole_or_not_at_all(model: Model, engine: Engine) -> None:
    tokens = random_tokens(50, seed=11)
    engine.decode(tokens)
    for length in (1, 49):
        with pytest.raises(InvalidArgument, match=f"holds 50 tokens; it cannot be cut to {length}"):
            engine.truncate(0, length)
        with pytest.raises(InvalidArgument, match=f"holds 50 tokens; it cannot be cut to {length}"):
            engine.fork(0, 1, length)
    with pytest.raises(InvalidArgument, match="n_passes is 2, a recurrent model takes 1"):
        engine.step([Work(0, [60], greedy(model))], 2)
    assert (engine.length(0), engine.length(1)) == (50, 0)
    engine.truncate(0, 50)
    engine.fork(0, 1, 50)
    branches = {seq_id: random_tokens(7, seed=20 + seq_id) for seq_id in (0, 1)}
    for seq_id, branch in branches.items():
        engine.decode(branch, [seq_id] * len(branch))
        assert_same_bits(engine.logits(), cold_logits(model, tokens + branch), f"branch {seq_id}")


def test_a_cleared_sequence_begins_without_a_state(model: Model, engine: Engine) -> None:
    tokens = random_tokens(20, seed=12)
    for forget in (lambda: engine.clear(0), lambda: engine.truncate(0, 0), lambda: engine.fork(1, 0, 0)):
        engine.decode(random_tokens(33, seed=13), [0] * 33)
        forget()
        engine.decode(tokens, [0] * len(tokens))
        assert_same_bits(engine.logits(), cold_logits(model, tokens), "after a clear")


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_a_saved_state_continues_identically_in_another_engine(model: Model, cache_type: str) -> None:
    tokens, tail = random_tokens(PAGE + 20, seed=14), random_tokens(5, seed=15)
    first = Engine(model, n_ctx=2 * PAGE, type_k=cache_type, type_v=cache_type)
    first.decode(tokens)
    state = first.save_sequence(0)
    first.decode(tail)
    second = Engine(model, n_ctx=2 * PAGE, n_seq_max=2, type_k=cache_type, type_v=cache_type, n_ubatch=3)
    second.decode(random_tokens(9, seed=16), [1] * 9)  # what the sequence held goes
    second.load_sequence(1, state)
    assert second.length(1) == len(tokens)
    second.decode(tail, [1] * len(tail))
    assert_same_bits(second.logits(), first.logits(), "after a load")


def test_a_damaged_state_is_refused_and_leaves_the_sequence_empty(model: Model, engine: Engine, tmp_path: Path) -> None:
    engine.decode(random_tokens(10, seed=17))
    state = engine.save_sequence(0)
    larger = Model(write_tiny_hybrid(tmp_path / "larger.gguf", n_layer=5, attention_interval=3, n_value_head=6))
    for target, bad, reason in (
        (engine, state[:-1], "bytes, expected"),
        (engine, state[: len(state) // 2], "bytes, expected"),
        (Engine(larger, n_ctx=PAGE), state, "another model"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            target.load_sequence(0, bad)
        assert target.length(0) == 0
        tokens = random_tokens(4, seed=18)
        target.decode(tokens)
        expected = cold_logits(larger if target is not engine else model, tokens)
        assert_same_bits(target.logits(), expected, "after a refused load")


def test_random_work_ends_where_a_cold_run_does(model: Model, engine: Engine) -> None:
    rng = np.random.default_rng(19)
    held: list[list[int]] = [[] for _ in range(N_SEQUENCES)]
    for _ in range(120):
        one, other = rng.choice(N_SEQUENCES, 2, replace=False).tolist()
        action = rng.choice(["append", "append", "append", "fork", "clear", "reload"])
        if action == "append" and max(map(len, held)) < PAGE:
            work = {seq_id: rng.integers(50, 290, rng.integers(1, 25)).tolist() for seq_id in (one, other)}
            engine.step([Work(seq_id, tokens) for seq_id, tokens in work.items()])
            for seq_id, tokens in work.items():
                held[seq_id] = held[seq_id] + tokens
        elif action == "fork":
            engine.fork(one, other, len(held[one]))
            held[other] = held[one]
        elif action == "clear" or action == "append":
            engine.clear(one)
            held[one] = []
        else:
            engine.load_sequence(other, engine.save_sequence(one))
            held[other] = held[one]
    assert len({tuple(tokens) for tokens in held}) > 1
    for seq_id, tokens in enumerate(held):
        assert engine.length(seq_id) == len(tokens)
        engine.decode([60], [seq_id])
        assert_same_bits(engine.logits(), cold_logits(model, [*tokens, 60]), f"sequence {seq_id}")
