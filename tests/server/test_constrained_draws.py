"""Masks of grammars are computed beside the engine: nobody waits for another's, and no bit depends on when it came.

Masks are held back by a gate or for a moment, so that the sequences with a grammar have to wait for them.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer

from pyllama.dry_breakers import DryBreakerTable
from pyllama.grammar import Constraint
from pyllama.server.constrained_draws import ConstrainedDraws

GRAMMAR = {"grammar": "root ::= [a-z ]{30}", "n_predict": 60}


class Gate:
    """Masks after the first `n_free` wait until `opens`. `waits` once one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_free: int = 3) -> None:
        self.opens, self.waits = threading.Event(), threading.Event()
        self.n_left = n_free
        original = Constraint.mask

        def mask(constraint: Constraint) -> Any:
            assert threading.current_thread().name.startswith("mask")
            self.n_left -= 1
            if self.n_left < 0:
                self.waits.set()
                assert self.opens.wait(20)
            return original(constraint)

        monkeypatch.setattr(Constraint, "mask", mask)


def complete(server: Any, **fields: Any) -> Any:
    return server.post("/completion", {"prompt": "x", **fields})


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


def test_others_generate_while_a_mask_is_computed(serve: Any, monkeypatch: Any, pool: Any) -> None:
    server = serve()
    alone, free = (complete(server, **fields).json() for fields in (GRAMMAR, {"n_predict": 80}))
    gate = Gate(monkeypatch)
    waiting = pool.submit(complete, server, **GRAMMAR)
    assert gate.waits.wait(10)
    assert complete(server, n_predict=80).json()["content"] == free["content"]
    assert complete(server, prompt="y" * 300, n_predict=5).status_code == 200  # several chunks of a prompt
    assert not waiting.done()
    gate.opens.set()
    answer = waiting.result().json()
    assert (answer["content"], answer["stop_type"]) == (alone["content"], alone["stop_type"])
    server.wait_idle()


def test_nothing_runs_while_all_wait_for_masks(serve: Any, monkeypatch: Any, pool: Any) -> None:
    server = serve()
    gate = Gate(monkeypatch)
    waiting = pool.submit(complete, server, **GRAMMAR)
    assert gate.waits.wait(10)
    n_steps = -1
    while n_steps != server.engine.n_steps:  # what it has still to do
        n_steps = server.engine.n_steps
        time.sleep(0.05)
    time.sleep(0.1)
    assert server.engine.n_steps == n_steps
    gate.opens.set()
    assert len(waiting.result().json()["content"]) == 30


def test_a_client_that_leaves_while_its_mask_is_computed_frees_the_slot(
    serve: Any, monkeypatch: Any, pool: Any
) -> None:
    server = serve(n_slots=1)
    gate = Gate(monkeypatch)
    waiting = pool.submit(complete, server, **GRAMMAR)
    assert gate.waits.wait(10)
    (slot,) = server.engine_loop.slots
    request = slot.generation.request
    server.engine_loop.cancel(request)
    server.client.portal.call(request.mailbox.close)
    assert waiting.result().status_code == 499
    assert len(complete(server, n_predict=9).json()["content"]) == 9
    gate.opens.set()
    assert complete(server, grammar='root ::= "b"').json()["content"] == "b"


def test_a_sequence_that_gives_way_while_it_waits_goes_on_with_the_same_text(
    serve: Any, monkeypatch: Any, pool: Any
) -> None:
    """The pool has two pages: the older request takes both, the newer one computes its tokens again later."""
    server = serve(n_ctx=512, n_ctx_slot=512, n_slots=2, engine={"step_seconds": 0.001})
    alone = complete(server, **GRAMMAR).json()["content"]
    prompt = "y" * 240
    free = complete(server, prompt=prompt, n_predict=60).json()["content"]
    gate = Gate(monkeypatch)
    older = pool.submit(complete, server, prompt=prompt, n_predict=60)
    while not any(slot.generation is not None and slot.generation.n_decoded for slot in server.engine_loop.slots):
        time.sleep(0.001)
    newer = pool.submit(complete, server, **GRAMMAR)
    assert gate.waits.wait(10)
    assert older.result().json()["content"] == free
    gate.opens.set()
    assert newer.result().json()["content"] == alone


def test_an_error_in_a_late_mask_fails_its_request_alone(serve: Any, monkeypatch: Any, pool: Any) -> None:
    server = serve()
    gate = Gate(monkeypatch, n_free=0)
    waiting = pool.submit(complete, server, grammar='root ::= "ab"', logit_bias=[[ord("a"), False]])
    assert gate.waits.wait(10)
    gate.opens.set()
    assert waiting.result().status_code == 500
    assert "banned" in waiting.result().json()["error"]["message"]
    assert complete(server, grammar='root ::= "ab"').json()["content"] == "ab"


@pytest.mark.parametrize("fields", [{"dry_multiplier": 1}, {"samplers": ["top_k", "infill"]}], ids=str)
def test_tables_of_the_vocabulary_are_made_beside_the_event_loop(
    serve: Any, monkeypatch: Any, pool: Any, fields: dict[str, Any]
) -> None:
    from pyllama.infill_vocabulary import InfillTable

    server = serve()
    begun, goes_on = threading.Event(), threading.Event()

    def prepare(table: Any, *_: Any) -> Any:
        begun.set()
        assert goes_on.wait(10)

    monkeypatch.setattr(DryBreakerTable, "prepare", prepare)
    monkeypatch.setattr(InfillTable, "prepare", prepare)
    waiting = pool.submit(complete, server, n_predict=5, **fields)
    assert begun.wait(10)
    assert server.get("/health").status_code == 200
    goes_on.set()
    assert waiting.result().status_code == 200


# ---- the real engine


@pytest.fixture(scope="module")
def real(tiny_llama_path: Path) -> Iterator[EngineServer]:
    server = EngineServer(tiny_llama_path)
    yield server
    server.close()


def test_no_bit_depends_on_when_a_mask_was_there(real: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that the engine waited for, masks that came late, and a busy server: the same tokens and probabilities."""
    bodies = [
        {"prompt": "the world", "n_predict": 40, "temperature": 1.5, "seed": seed, "n_probs": 3, "repeat_penalty": 1.2,
         "grammar": "root ::= ([a-z]{1,9} [ ,.])*", "post_sampling_probs": seed % 2 == 1, "mirostat": seed % 3}
        for seed in range(6)
    ]  # fmt: skip

    def answer(body: dict[str, Any]) -> Any:
        found = real.client.post("/completion", json=body).json()
        return found["content"], found["completion_probabilities"]

    place = ConstrainedDraws.place

    def place_in_time(draws: ConstrainedDraws, slot: Any) -> Any:
        if slot.generation.mask is not None:
            slot.generation.mask.result()
        return place(draws, slot)

    with monkeypatch.context() as patch:
        patch.setattr(ConstrainedDraws, "place", place_in_time)
        expected = [answer(body) for body in bodies]
    assert len({text for text, _ in expected}) > 3

    original, n_late = Constraint.mask, 0

    def late(constraint: Constraint) -> Any:
        time.sleep(0.003)
        return original(constraint)

    def count(draws: ConstrainedDraws, slot: Any) -> Any:
        nonlocal n_late
        sampler, row = place(draws, slot)
        n_late += row is not None
        return sampler, row

    with monkeypatch.context() as patch:
        patch.setattr(Constraint, "mask", late)
        patch.setattr(ConstrainedDraws, "place", count)
        assert [answer(body) for body in bodies] == expected
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            assert list(pool.map(answer, bodies)) == expected
    assert n_late > 100
