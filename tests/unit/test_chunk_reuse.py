"""`Engine.reuse_prefix` with chunks: which runs move, that moved keys are those of their new places, what stays.

In a model of one layer keys and values depend on their own token and position only, so moved tokens must equal
evaluated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import Engine, Model, PrefixReuse
from pyllama.errors import InvalidArgument
from support.fake_prefix_cache import chunked_length
from support.logits import assert_same_bits
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_models import write_tiny_model

PAGE = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "model.gguf", "qwen3", head_dim=32, n_layer=1)
    model = Model(path)
    yield model
    model.close()


def new_engine(model: Model, **options: Any) -> Engine:
    return Engine(
        model, **{"n_ctx": 8 * PAGE, "n_seq_max": 3, "n_threads": 2, "type_k": "f32", "type_v": "f32", **options}
    )


def random_tokens(n_tokens: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, n_tokens).tolist()


def logits_after(engine: Engine, tokens: Sequence[int], seq_id: int = 0) -> np.ndarray:
    engine.decode(tokens, [seq_id] * len(tokens), [True] * len(tokens))
    return engine.logits()


HELD = random_tokens(700)
NEW = random_tokens(60, seed=2)


@pytest.mark.parametrize(
    ("wanted", "length"),
    [
        (HELD[:90] + HELD[150:] + NEW, 640),  # tokens are gone
        (HELD[100:] + NEW, 600),  # from the beginning
        (HELD[:90] + HELD[150:300] + HELD[360:] + NEW, 580),  # twice
        (HELD[:90] + HELD[150:170] + HELD[360:] + NEW, 90),  # the first run is too short to go on
        (HELD[:90] + NEW + HELD[150:], 90),  # what is new ends it
    ],
)
def test_runs_move_to_their_new_places(model: Model, wanted: list[int], length: int) -> None:
    moved, fresh = new_engine(model), new_engine(model)
    moved.decode(HELD)
    common = sum(np.cumprod([a == b for a, b in zip(HELD, wanted, strict=False)]))
    reuse = moved.reuse_prefix(0, wanted, len(wanted) - 1, least_chunk=32)
    assert reuse == PrefixReuse(length, length, "own", -1, "not cached", length - common)
    assert moved.length(0) == length
    fresh.decode(wanted[:length])
    found, expected = (logits_after(engine, wanted[length:]) for engine in (moved, fresh))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    moved.close()
    fresh.close()


def test_what_moves_is_what_the_definition_says(model: Model) -> None:
    rng = np.random.default_rng(5)
    engine = new_engine(model)
    n_moved = 0
    for case in range(150):
        held = rng.integers(3, 6, int(rng.integers(0, 40))).tolist()
        wanted = rng.integers(3, 6, int(rng.integers(1, 40))).tolist()
        most, least = int(rng.integers(0, len(wanted) + 1)), int(rng.integers(1, 6))
        engine.clear(0)
        if held:
            engine.decode(held)
        common, length = chunked_length(held, wanted, most, least)
        reuse = engine.reuse_prefix(0, wanted, most, least_chunk=least)
        assert (reuse.length, reuse.moved) == (length, length - common), (case, held, wanted, most, least)
        assert engine.length(0) == length
        n_moved += reuse.moved > 0
    assert n_moved > 40
    engine.close()


def test_moved_tokens_serve_again_only_where_chunks_are_asked_for(model: Model) -> None:
    wanted = HELD[:90] + HELD[150:]
    engine = new_engine(model)
    for least_chunk, length in ((32, len(wanted)), (0, 90)):
        engine.clear(0)
        engine.decode(HELD)
        engine.reuse_prefix(0, wanted, len(wanted), least_chunk=32)
        assert engine.reuse_prefix(0, [*wanted, *NEW], len(wanted), least_chunk=least_chunk).length == length
        assert engine.reuse_prefix(1, wanted, len(wanted)).length == 90  # others never begin with them
    engine.close()


def test_an_exact_beginning_of_the_same_length_is_preferred(model: Model) -> None:
    wanted = HELD[:90] + HELD[150:]
    engine = new_engine(model)
    engine.decode(HELD)
    engine.decode(wanted, [1] * len(wanted))
    reuse = engine.reuse_prefix(0, wanted, len(wanted), least_chunk=32)
    assert (reuse.length, reuse.source, reuse.moved) == (len(wanted), "other", 0)
    engine.close()


def test_sequences_that_share_pages_keep_theirs(model: Model) -> None:
    engine, fresh = new_engine(model), new_engine(model)
    engine.decode(HELD)
    engine.fork(0, 1, 700)
    assert engine.reuse_prefix(0, HELD[100:] + NEW, 650, least_chunk=32).moved == 600
    fresh.decode(HELD)
    assert_same_bits(logits_after(engine, NEW, 1), logits_after(fresh, NEW), "the other sequence")
    engine.close()
    fresh.close()


def test_without_pages_for_copies_the_exact_beginning_serves(model: Model) -> None:
    engine = new_engine(model, n_ctx=3 * PAGE)
    engine.decode(HELD)
    engine.fork(0, 1, 700)
    rest = engine.free_tokens()
    engine.decode(random_tokens(rest), [2] * rest)
    wanted = HELD[:90] + HELD[150:]
    assert engine.reuse_prefix(0, wanted, 640, least_chunk=32)[:3] == (90, 90, "own")
    assert engine.length(1) == 700
    engine.close()


def test_what_the_sequence_gives_up_is_kept_in_host_memory(model: Model) -> None:
    engine = new_engine(model, cache_bytes=1 << 24)
    engine.decode(HELD)
    assert engine.reuse_prefix(0, HELD[100:] + NEW, 600, least_chunk=32).moved == 600
    reuse = engine.reuse_prefix(1, HELD, 700)
    assert (reuse.length, reuse.source) == (700, "host")
    engine.close()


def test_hostile_repetitions_take_no_quadratic_time(model: Model) -> None:
    """150,000 tokens against each other by trying every place would take minutes; the limit is that of the test run."""
    engine = new_engine(model, n_ctx=16 * PAGE, n_batch=4096)
    engine.decode([7] * 2000 + [8] + [7] * 2000)
    for least in (1, 1900, 2_000_000_000):
        assert engine.reuse_prefix(0, ([7] * 1999 + [9]) * 100, 150_000, least_chunk=least).length == 1999
    engine.close()


def test_models_that_cannot_shift_and_bad_counts_are_refused(tmp_path: Path, model: Model) -> None:
    hybrid = Model(write_tiny_hybrid(tmp_path / "hybrid.gguf"))
    engine = new_engine(hybrid)
    with pytest.raises(InvalidArgument, match="cannot be moved"):
        engine.reuse_prefix(0, [5, 6], 1, least_chunk=8)
    assert engine.reuse_prefix(0, [5, 6], 1).length == 0
    engine.close()
    hybrid.close()
    engine = new_engine(model)
    engine.decode(HELD)
    for arguments in ((0, HELD, 701, 8), (0, HELD, -1, 8), (0, HELD, 9, -1), (9, HELD, 9, 8)):
        with pytest.raises(InvalidArgument):
            engine.reuse_prefix(*arguments[:3], least_chunk=arguments[3])
    assert engine.length(0) == 700
    engine.close()
