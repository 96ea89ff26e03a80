"""Layers with a sliding window forget what is behind it: nothing that is computed changes, memory stays small, and a
sequence goes back only as far as its window is there.

What is reused of such sequences, by checkpoints too, is the subject of test_prefix_reuse and test_prefix_memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import Engine, Model, Sampler, Work
from pyllama.errors import ContextFull, InvalidArgument
from support.tiny_models import write_tiny_model

PAGE = 256
N_CTX = 8 * PAGE


def new_model(path: Path, window: int) -> Model:
    return Model(write_tiny_model(path, "gemma3", n_layer=6, metadata={"gemma3.attention.sliding_window": window}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = new_model(tmp_path_factory.mktemp("models") / "windowed.gguf", 100)
    yield model
    model.close()


def random_tokens(model: Model, n_tokens: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.n_vocab, n_tokens).tolist()


def new_engine(model: Model, *, swa_full: bool = False, n_seq_max: int = 1, n_ctx: int = N_CTX) -> Engine:
    return Engine(model, n_ctx=n_ctx, n_seq_max=n_seq_max, n_ubatch=64, swa_full=swa_full)


@pytest.mark.parametrize("window", [1, 2, 100, 256, 257, 700])
@pytest.mark.parametrize("chunk", [1000, 300, 37])
def test_chunks_of_a_long_prompt_give_the_logits_of_a_full_cache(tmp_path: Path, window: int, chunk: int) -> None:
    model = new_model(tmp_path / "model.gguf", window)
    tokens = random_tokens(model, 1000)
    rows = []
    for swa_full in (True, False):
        engine = new_engine(model, swa_full=swa_full)
        logits = []
        for begin in range(0, len(tokens), len(tokens) if swa_full else chunk):
            part = tokens[begin : begin + (len(tokens) if swa_full else chunk)]
            engine.decode(part, None, [True] * len(part))
            logits.append(engine.logits())
        rows.append(np.concatenate(logits))
        engine.close()
    np.testing.assert_array_equal(rows[0], rows[1])


def test_sequences_together_generate_what_they_do_with_a_full_cache(model: Model) -> None:
    drawn = []
    for swa_full in (True, False):
        engine = new_engine(model, swa_full=swa_full, n_seq_max=3)
        samplers = [Sampler(model.n_vocab, temperature=1.0, seed=s) for s in range(3)]
        engine.step([Work(0, random_tokens(model, 600))])
        engine.fork(0, 1, 600)
        pending = [[5], [6], random_tokens(model, 50, seed=2)]
        tokens = []
        for n_passes in [1] * 30 + [4] * 60:
            outputs = engine.step([Work(s, pending[s], samplers[s]) for s in range(3)], n_passes)
            tokens += [output.token for output in outputs]
            pending = [[output.token] for output in outputs[-3:]]
        drawn.append(tokens)
        engine.close()
    assert drawn[0] == drawn[1]


def test_memory_is_that_of_the_window_and_not_of_the_context(model: Model) -> None:
    sizes = {}
    for swa_full in (True, False):
        engine = new_engine(model, swa_full=swa_full)
        for begin in range(0, 1800, 200):
            engine.decode(random_tokens(model, 200, seed=begin))
        sizes[swa_full] = (len(engine.save_sequence(0)), engine.kv_bytes)
        engine.close()
    # Eight pages of six layers, against eight of one layer and two of five.
    assert sizes[False][0] < 0.42 * sizes[True][0]
    large = {full: new_engine(model, swa_full=full, n_ctx=256 * PAGE).kv_bytes for full in (True, False)}
    assert large[False] < 0.25 * large[True]


def test_models_without_windows_have_nothing_to_forget(tiny_llama_path: Path) -> None:
    model = Model(tiny_llama_path)
    engines = [new_engine(model, swa_full=swa_full) for swa_full in (True, False)]
    assert engines[0].kv_bytes == engines[1].kv_bytes
    assert not any(engine.needs_checkpoints for engine in engines)


def test_a_sequence_is_cut_back_as_far_as_its_window_reaches(model: Model) -> None:
    engine = new_engine(model, n_seq_max=2)
    tokens, tail = random_tokens(model, 1300), random_tokens(model, 20, seed=2)
    engine.decode(tokens[:1000])
    engine.decode(tokens[1000:])
    # Forgotten is what the second step did not see: pages before token 901, that is tokens before 768.
    length = 768 + 99
    for call in (lambda: engine.truncate(0, length - 1), lambda: engine.fork(0, 1, length - 1)):
        with pytest.raises(InvalidArgument, match="forgotten what is behind its window of 100"):
            call()
    engine.fork(0, 1, length)
    engine.truncate(0, length)
    full = new_engine(model, swa_full=True)
    full.decode(tokens[:length] + tail)
    for seq_id in (0, 1):
        engine.decode(tail, [seq_id] * len(tail))
        np.testing.assert_array_equal(engine.logits(), full.logits())
    engine.truncate(0, 0)
    assert engine.length(0) == 0
    engine.close()


def test_a_step_that_fails_leaves_the_window_it_began_with(model: Model) -> None:
    engine = new_engine(model, n_ctx=4 * PAGE)
    tokens = random_tokens(model, 900)
    engine.decode(tokens)
    with pytest.raises(ContextFull):
        engine.step([Work(0, random_tokens(model, 300))])
    assert engine.length(0) == 900
    engine.decode([7])
    full = new_engine(model, swa_full=True)
    full.decode([*tokens, 7])
    np.testing.assert_array_equal(engine.logits(), full.logits())
    engine.close()


def test_a_state_is_for_engines_with_the_same_choice_of_windows(model: Model) -> None:
    windowed, full = new_engine(model), new_engine(model, swa_full=True)
    windowed.decode(random_tokens(model, 300))
    with pytest.raises(InvalidArgument, match="full-size windows"):
        full.load_sequence(0, windowed.save_sequence(0))
    assert full.length(0) == 0


@pytest.mark.parametrize("split_mode", ["tensor", "layer"])
def test_every_rank_forgets_and_goes_back_as_one_does(tmp_path: Path, split_mode: str) -> None:
    path = write_tiny_model(
        tmp_path / "model.gguf", "gemma3", n_layer=6, metadata={"gemma3.attention.sliding_window": 100}
    )
    tokens, tail = random_tokens(Model(path), 900), [3, 4, 5]
    logits = []
    for devices, swa_full in ((["CPU0", "CPU1"], True), (["CPU0", "CPU1"], False)):
        model = Model(path, devices=devices, split_mode=split_mode)
        engine = Engine(model, n_ctx=N_CTX, n_seq_max=2, n_ubatch=64, swa_full=swa_full, cache_bytes=-1)
        for begin in range(0, 900, 150):
            engine.decode(tokens[begin : begin + 150])
            engine.checkpoint(0)
        edited = tokens[:500] + tail
        reuse = engine.reuse_prefix(1, edited, 500)
        assert (reuse.length, reuse.checkpoint) == ((500, -1) if swa_full else (450, 450))
        engine.decode(edited[reuse.length :], [1] * len(edited[reuse.length :]))
        rows = [engine.logits()[-1]]
        engine.load_sequence(1, engine.save_sequence(0))
        engine.decode(tail, [1] * len(tail))
        logits.append([*rows, engine.logits()[-1]])
        engine.close()
    np.testing.assert_array_equal(logits[0], logits[1])


def test_the_writer_of_these_models_has_both_kinds_of_layers(model: Model, tmp_path: Path) -> None:
    """Guards the tests above against a model in which windows do not matter."""
    logits = []
    for each in (model, new_model(tmp_path / "wide.gguf", 2000)):
        engine = new_engine(each, swa_full=True)
        engine.decode(random_tokens(model, 300))
        logits.append(engine.logits())
    assert not np.array_equal(logits[0], logits[1])
