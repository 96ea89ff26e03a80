"""A rank that throws or hangs ends the call in bounded time with one `DeviceError` that names it; nothing hangs.

Faults are injected at operations of a running forward pass; the machinery alone is in tests/unit/test_rank_threads.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from pyllama._engine import Engine, Model, Sampler, Work
from pyllama.errors import DeviceError, InvalidArgument
from support.logits import assert_same_bits
from support.tiny_hybrid import write_tiny_hybrid

N_RANKS = 3
TOKENS = np.random.default_rng(31).integers(3, 290, 40).tolist()
MANY = 10**9


@pytest.fixture(scope="module", params=["tensor", "layer"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_tiny_hybrid(tmp_path_factory.mktemp("faults") / "model.gguf", n_key_head=4, n_value_head=8)
    model = Model(path, devices=[f"CPU{i}" for i in range(N_RANKS)], split_mode=request.param)
    yield model
    model.close()


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = Engine(model, n_ctx=512, n_threads=2, n_ubatch=16)
    yield engine
    engine.close()


def operations(engine: Engine, rank: int) -> int:
    """How many signs of life the rank gives in a decode of TOKENS: the largest point at which a fault still strikes."""
    low, high = 1, 2
    while strikes(engine, rank, high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if strikes(engine, rank, middle) else (low, middle)
    return low


def strikes(engine: Engine, rank: int, at: int) -> bool:
    engine._inject_fault(rank, at)
    try:
        engine.clear(0)
        engine.decode(TOKENS)
    except DeviceError:
        return True
    finally:
        engine._inject_fault(0, MANY)
        engine.clear(0)
    return False


@pytest.mark.parametrize("rank", range(N_RANKS))
def test_a_throw_at_any_operation_of_any_rank_is_one_error_that_changes_nothing(engine: Engine, rank: int) -> None:
    engine.decode(TOKENS)
    expected = engine.logits()
    last = operations(engine, rank)
    assert last > 50
    engine.decode(TOKENS[:20])
    for at in sorted({*range(1, last // 2, max(1, last // 25)), last // 2}):
        engine._inject_fault(rank, at)
        begin = time.monotonic()
        with pytest.raises(DeviceError, match=rf"^rank {rank} \(CPU{rank}\): injected fault$"):
            engine.decode(TOKENS[20:])
        assert time.monotonic() - begin < 2.0
        assert engine.length(0) == 20
    engine.decode(TOKENS[20:])
    assert_same_bits(engine.logits(), expected, "after the faults")


def test_a_step_that_fails_draws_nothing_and_can_be_repeated(model: Model, engine: Engine) -> None:
    def draw() -> int:
        (output,) = engine.step([Work(0, TOKENS, Sampler(model.n_vocab, temperature=0.0))])
        return output.token

    expected = draw()
    engine.clear(0)
    engine._inject_fault(1, 30)
    with pytest.raises(DeviceError, match="rank 1"):
        draw()
    assert engine.length(0) == 0
    assert draw() == expected


@pytest.mark.parametrize("rank", range(N_RANKS))
def test_a_rank_that_is_silent_too_long_is_named_and_the_engine_goes_on_when_it_returns(
    engine: Engine, rank: int
) -> None:
    engine.decode(TOKENS)
    expected = engine.logits()
    engine.clear(0)
    engine._inject_fault(rank, 20, hang_seconds=1.2, stall_seconds=0.6)
    begin = time.monotonic()
    with pytest.raises(DeviceError, match=rf"^rank {rank} \(CPU{rank}\): no sign of life for 0.6"):
        engine.decode(TOKENS)
    assert time.monotonic() - begin < 4.0
    engine._inject_fault(0, MANY, stall_seconds=60)
    engine.decode(TOKENS)
    assert_same_bits(engine.logits(), expected, "after the silence")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_rank_stops_the_engine_but_neither_the_process_nor_the_next_engine(model: Model, rank: int) -> None:
    engine = Engine(model, n_ctx=512, n_threads=2)
    engine._inject_fault(rank, 20, hang_seconds=12, stall_seconds=0.6)
    begin = time.monotonic()
    with pytest.raises(DeviceError, match=rf"^rank {rank} \(CPU{rank}\): no sign of life"):
        engine.decode(TOKENS)
    for call in (lambda: engine.decode(TOKENS), lambda: engine.fork(0, 0, 0)):
        with pytest.raises(DeviceError, match="load the model again"):
            call()
    engine.clear(0)
    assert engine.length(0) == 0
    engine.close()
    again = Engine(model, n_ctx=512, n_threads=2)
    again.decode(TOKENS)
    again.close()
    assert time.monotonic() - begin < 8.0


def test_faults_are_for_ranks_that_exist(model: Model, engine: Engine) -> None:
    with pytest.raises(InvalidArgument, match=f"rank is {N_RANKS}, expected 0 to {N_RANKS - 1}"):
        engine._inject_fault(N_RANKS, 1)
