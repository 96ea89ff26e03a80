"""Sequences that begin as others began, on tiny models: the logits are those of a cold run, bit by bit.

Which beginning is found, and that bytes and budget are right under random use, is the subject of test_prefix_memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import Engine, Model, PrefixReuse, Sampler, Work
from pyllama.errors import InvalidArgument
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import write_tiny_qwen4exp

PAGE = 256
NO_LIMIT = -1


WINDOW = 100


def write_tiny_windowed(path: Path, **arguments: Any) -> Path:
    return write_tiny_model(
        path, "gemma3", n_layer=6, metadata={"gemma3.attention.sliding_window": WINDOW}, **arguments
    )


# Of each kind of memory one model.
WRITERS = {
    "llama": write_tiny_llama,
    "qwen35": write_tiny_hybrid,
    "gemma3": write_tiny_windowed,
    "qwen4exp": write_tiny_qwen4exp,
}


@pytest.fixture(scope="module", params=list(WRITERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = Model(WRITERS[request.param](tmp_path_factory.mktemp("models") / f"{request.param}.gguf"))
    yield model
    model.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = Model(write_tiny_hybrid(tmp_path_factory.mktemp("models") / "hybrid.gguf", "qwen35"))
    yield model
    model.close()


def new_engine(
    model: Model, cache_bytes: int = NO_LIMIT, *, n_pages: int = 16, n_seq_max: int = 3, n_checkpoints: int = 32
) -> Engine:
    return Engine(
        model,
        n_ctx=n_pages * PAGE,
        n_seq_max=n_seq_max,
        n_ubatch=64,
        cache_bytes=cache_bytes,
        n_checkpoints=n_checkpoints,
        swa_full=False,
    )


def random_tokens(model: Model, n_tokens: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.n_vocab, n_tokens).tolist()


def run(engine: Engine, seq_id: int, tokens: list[int]) -> np.ndarray:
    """Append tokens; the logits of the last one."""
    engine.decode(tokens, [seq_id] * len(tokens))
    return engine.logits()[-1]


def run_with_checkpoints(engine: Engine, seq_id: int, tokens: list[int], positions: list[int]) -> None:
    begin = engine.length(seq_id)
    for position in positions:
        run(engine, seq_id, tokens[begin:position])
        engine.checkpoint(seq_id)
        begin = position
    if begin < len(tokens):
        run(engine, seq_id, tokens[begin:])


def cold(model: Model, tokens: list[int]) -> np.ndarray:
    """The logits of the last token of a prompt in a new engine that forgets nothing."""
    engine = Engine(model, n_ctx=16 * PAGE, n_ubatch=512)
    logits = run(engine, 0, tokens)
    engine.close()
    return logits


def reuse_and_finish(model: Model, engine: Engine, seq_id: int, tokens: list[int]) -> PrefixReuse:
    """As a server answers a prompt: reuse, compute the rest, compare with a cold run."""
    reuse = engine.reuse_prefix(seq_id, tokens, len(tokens) - 1)
    assert engine.length(seq_id) == reuse.length
    np.testing.assert_array_equal(run(engine, seq_id, tokens[reuse.length :]), cold(model, tokens))
    return reuse


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = new_engine(model)
    yield engine
    engine.close()


def test_a_longer_prompt_goes_on_from_what_the_sequence_holds(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 500)
    run(engine, 0, tokens[:400])
    reuse = reuse_and_finish(model, engine, 0, tokens)
    assert reuse == PrefixReuse(400, 400, "own", -1, "not cached")


def test_an_edited_prompt_goes_on_from_the_last_usable_place(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 700)
    run_with_checkpoints(engine, 0, tokens, [100, 300, 650])
    edited = tokens[:400] + random_tokens(model, 200, seed=2)
    reuse = reuse_and_finish(model, engine, 0, edited)
    if engine.needs_checkpoints:
        assert reuse == PrefixReuse(300, 400, "own", 300, "no checkpoint")
    else:
        assert reuse == PrefixReuse(400, 400, "own", -1, "not cached")


def test_what_an_edit_loses_is_there_when_the_edit_is_undone(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 700)
    run_with_checkpoints(engine, 0, tokens, [300])
    reuse_and_finish(model, engine, 0, tokens[:400] + random_tokens(model, 200, seed=2))
    reuse = reuse_and_finish(model, engine, 0, [*tokens, 5, 6, 7])
    assert reuse == PrefixReuse(700, 700, "host", 700 if engine.needs_checkpoints else -1, "not cached")


def test_another_sequence_gives_its_beginning_and_shares_its_pages(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 600)
    run(engine, 0, tokens)
    free = engine.free_tokens()
    reuse = engine.reuse_prefix(1, [*tokens, 9, 8], len(tokens) + 1)
    assert reuse == PrefixReuse(600, 600, "other", -1, "not cached")
    assert engine.free_tokens() == free
    # Both go on their own ways.
    tails = {0: random_tokens(model, 30, seed=3), 1: random_tokens(model, 30, seed=4)}
    for seq_id, tail in tails.items():
        np.testing.assert_array_equal(run(engine, seq_id, tail), cold(model, tokens + tail))


def test_a_released_sequence_comes_back_from_host_memory(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 600)
    run(engine, 0, tokens)
    before = engine.free_tokens()
    engine.release(0)
    assert (engine.length(0), engine.free_tokens()) == (0, before + 3 * PAGE)
    for seq_id, source in ((1, "host"), (2, "other")):
        reuse = reuse_and_finish(model, engine, seq_id, tokens + random_tokens(model, 40, seed=seq_id))
        # A live sequence that has gone on still has the window of its earlier end, but not the recurrent state.
        takes_checkpoint = model.is_recurrent or (engine.needs_checkpoints and source == "host")
        assert reuse == PrefixReuse(600, 600, source, 600 if takes_checkpoint else -1, "not cached")


def test_a_cleared_sequence_is_forgotten(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 300)
    run(engine, 0, tokens)
    engine.clear(0)
    assert reuse_and_finish(model, engine, 0, tokens) == PrefixReuse(0, 0, "nothing", -1, "not cached")


def test_the_same_prompt_again_computes_its_last_token_only(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 500)
    run_with_checkpoints(engine, 0, tokens, [499])
    reuse = reuse_and_finish(model, engine, 0, tokens)
    assert reuse == PrefixReuse(499, 500, "own", 499 if model.is_recurrent else -1, "prompt")


def test_a_conversation_computes_new_tokens_only_also_after_an_edit(model: Model, engine: Engine) -> None:
    """Eight turns of question and greedy answer in two sequences; then the sixth question is asked differently."""
    history: list[int] = []
    borders = []
    for turn in range(8):
        borders.append(len(history))
        seq_id = turn % 2
        prompt = history + random_tokens(model, 90 + 13 * turn, seed=10 + turn)
        assert engine.reuse_prefix(seq_id, prompt, len(prompt) - 1).length == len(history)
        engine.checkpoint(seq_id)
        sampler = Sampler(model.n_vocab, temperature=0.0)
        (output,) = engine.step([Work(seq_id, prompt[len(history) :], sampler)])
        assert output.token == int(np.argmax(cold(model, prompt)))
        history = prompt
        for _ in range(12):
            history.append(output.token)
            (output,) = engine.step([Work(seq_id, [output.token], sampler)])
    edited = history[: borders[5]] + random_tokens(model, 60, seed=99)
    assert reuse_and_finish(model, engine, 2, edited).length == borders[5]


@pytest.mark.parametrize("position", [1, 2, 63, 64, 65, 255, 256, 257, 512, 599])
def test_a_checkpoint_may_lie_anywhere(hybrid: Model, position: int) -> None:
    engine = new_engine(hybrid)
    tokens = random_tokens(hybrid, 600)
    run_with_checkpoints(engine, 0, tokens, [position])
    edited = tokens[:position] + random_tokens(hybrid, 50, seed=7)
    assert reuse_and_finish(hybrid, engine, 1, edited) == PrefixReuse(
        position, position, "other", position, "not cached"
    )
    engine.close()


def test_checkpoints_are_for_models_that_need_them_and_kept_once(model: Model, engine: Engine) -> None:
    engine.checkpoint(0)  # an empty sequence has no state worth keeping
    run(engine, 0, random_tokens(model, 20))
    for _ in range(3):
        engine.checkpoint(0)
    usage = engine.cache_usage()
    assert usage.n_checkpoints == (1 if engine.needs_checkpoints else 0)
    assert (usage.checkpoint_bytes > 0) == engine.needs_checkpoints


def test_the_budget_holds_and_zero_keeps_nothing(model: Model) -> None:
    for budget in (0, 1_000_000):
        engine = new_engine(model, budget, n_checkpoints=4)
        for seed in range(16):
            tokens = random_tokens(model, 300, seed=seed)
            run_with_checkpoints(engine, seed % 3, tokens, [100, 200])
            engine.release(seed % 3)
            usage = engine.cache_usage()
            assert usage.used <= usage.budget == budget
        assert (usage.n_nodes > 0, usage.n_evicted > 0) == (budget > 0, budget > 0)
        engine.close()


def test_copies_in_host_memory_are_reused_as_far_as_pages_are_free(model: Model) -> None:
    engine = new_engine(model, n_pages=4, n_seq_max=2)  # six pages
    tokens = random_tokens(model, 4 * PAGE)
    run_with_checkpoints(engine, 0, tokens, [PAGE, 2 * PAGE, 3 * PAGE])
    engine.release(0)
    run(engine, 1, random_tokens(model, 4 * PAGE, seed=2))
    reuse = engine.reuse_prefix(0, [*tokens, 3], 4 * PAGE)
    assert reuse == PrefixReuse(2 * PAGE, 4 * PAGE, "host", 2 * PAGE if engine.needs_checkpoints else -1, "no page")
    engine.clear(1)
    np.testing.assert_array_equal(run(engine, 0, tokens[2 * PAGE : 700]), cold(model, tokens[:700]))
    engine.close()


def test_a_saved_sequence_brings_its_checkpoints_along(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 700)
    run_with_checkpoints(engine, 0, tokens, [200, 450])
    state = engine.save_sequence(0)
    restarted = new_engine(model)
    restarted.load_sequence(2, state)
    assert restarted.length(2) == 700
    assert restarted.cache_usage().n_checkpoints == (2 if restarted.needs_checkpoints else 0)
    np.testing.assert_array_equal(run(restarted, 2, [3, 4, 5]), cold(model, [*tokens, 3, 4, 5]))
    edited = tokens[:500] + random_tokens(model, 20, seed=2)
    assert reuse_and_finish(model, restarted, 2, edited).length == (450 if restarted.needs_checkpoints else 500)
    restarted.close()


def test_damage_anywhere_in_a_saved_sequence_is_found(model: Model, engine: Engine) -> None:
    run_with_checkpoints(engine, 0, random_tokens(model, 300), [100])
    state = engine.save_sequence(0)
    for position in np.random.default_rng(5).integers(0, len(state), 40).tolist() + list(range(80)):
        damaged = bytearray(state)
        damaged[position] ^= 0x41
        with pytest.raises(InvalidArgument):
            engine.load_sequence(1, bytes(damaged))
        assert engine.length(1) == 0
    for length in (len(state) - 1, len(state) // 2, 79, 0):
        with pytest.raises(InvalidArgument, match="bytes"):
            engine.load_sequence(1, state[:length])


def test_a_state_of_another_quantisation_or_rotation_is_refused(model: Model, engine: Engine, tmp_path: Path) -> None:
    run(engine, 0, random_tokens(model, 10))
    write = WRITERS[model.architecture]
    quantised = new_engine(Model(write(tmp_path / "bf16.gguf", weight_type="bf16")))
    with pytest.raises(InvalidArgument, match="another model, quantisation"):
        quantised.load_sequence(0, engine.save_sequence(0))
    rotated = Engine(model, n_ctx=PAGE, rope_freq_base=5000.0, swa_full=False)
    with pytest.raises(InvalidArgument, match="rope settings"):
        rotated.load_sequence(0, engine.save_sequence(0))


def test_cutting_inside_a_recurrent_sequence_stays_refused(hybrid: Model) -> None:
    engine = new_engine(hybrid)
    run_with_checkpoints(engine, 0, random_tokens(hybrid, 50), [20])
    with pytest.raises(InvalidArgument, match="recurrent"):
        engine.truncate(0, 20)
    with pytest.raises(InvalidArgument, match="recurrent"):
        engine.fork(0, 1, 20)
    engine.close()


@pytest.mark.parametrize(
    ("seq_id", "tokens", "most", "message"),
    [
        (3, [3], 1, "sequence 3 is unknown"),
        (0, [3], 2, "cannot reuse 2 of 1"),
        (0, [3], -1, "cannot reuse -1"),
        (0, [10**6], 1, "token id 1000000"),
    ],
)
def test_bad_arguments_of_reuse_are_named(
    engine: Engine, seq_id: int, tokens: list[int], most: int, message: str
) -> None:
    run(engine, 0, [5, 6])
    with pytest.raises(InvalidArgument, match=message):
        engine.reuse_prefix(seq_id, tokens, most)
    assert engine.length(0) == 2


def test_budgets_out_of_range_are_refused(hybrid: Model) -> None:
    with pytest.raises(InvalidArgument, match="budget"):
        new_engine(hybrid, -2)
    with pytest.raises(InvalidArgument, match="checkpoints"):
        new_engine(hybrid, n_checkpoints=-1)
