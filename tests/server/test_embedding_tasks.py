"""Texts to embed in the engine loop: beside generation, in a small pool, cancelled, in any mixture."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from fake_engine import LETTERS, PAGE, EmbeddingWork, FakeHiddenPool, FakeRow, Work, fake_embedding
from test_engine_loop import Bench, expected_tokens, letters

from pyllama.errors import ContextFull
from pyllama.server.embedding_tasks import EmbeddingQueue, EmbeddingRequest
from pyllama.server.engine_loop import EngineLoop
from pyllama.server.errors import ServerFault
from pyllama.server.generation import Failed, Finished
from pyllama.server.loop_settings import LoopSettings


class EmbeddingBench(Bench):
    """`n_texts`: sequences for embeddings after the slots."""

    def __init__(self, *, n_slots: int = 2, n_texts: int = 3, n_ctx: int = 1024, n_batch: int = 64) -> None:
        super().__init__(n_slots=n_slots + n_texts, n_ctx=n_ctx, n_batch=n_batch)
        self.queue = EmbeddingQueue(
            self.engine, range(n_slots, n_slots + n_texts), make_work=EmbeddingWork, make_pool=FakeHiddenPool
        )
        self.loop = EngineLoop(
            self.engine,
            LoopSettings(n_slots=n_slots, n_ctx_slot=n_ctx, n_batch=n_batch, n_embedding_rows=n_batch // 2),
            make_work=Work,
            make_row=FakeRow,
            deliver=self.events.extend,
            embeddings=self.queue,
            clock=lambda: float(self.engine.n_steps),
        )

    def embed(self, *texts: Sequence[int]) -> EmbeddingRequest:
        request = EmbeddingRequest([list(text) for text in texts])
        self.loop.submit(request)
        return request

    def check(self, request: EmbeddingRequest) -> None:
        for task in request.tasks:
            assert task.is_done
            np.testing.assert_array_equal(task.values, fake_embedding(task.tokens))

    def check_memory(self) -> None:
        self.drop_caches()
        assert len(self.engine.pool.free) == self.n_ctx // PAGE
        assert not self.engine.pool.references


def test_texts_share_steps_and_long_ones_take_several() -> None:
    bench = EmbeddingBench()
    request = bench.embed([1], [2, 3], [4] * 150, [5], [6])
    bench.run()
    bench.check(request)
    assert bench.engine.embedded_rows[0] == 64
    assert sum(bench.engine.embedded_rows) == 155
    finished = [event.generation.index for event in bench.events if isinstance(event, Finished)]
    assert finished[:2] == [0, 1]
    assert sorted(finished) == list(range(5))
    bench.check_memory()


def test_generation_and_embedding_do_not_wait_for_one_another() -> None:
    bench = EmbeddingBench(n_slots=1, n_ctx=2048)
    prompt = letters(random.Random(1), 40)
    generating = bench.submit(prompt, n_predict=200)
    for _ in range(3):
        bench.loop.iterate()
    request = bench.embed(letters(random.Random(2), 320), [1])
    n_iterations = 0
    before = generating.generations[0].n_decoded
    while not all(task.is_done for task in request.tasks):
        bench.loop.iterate()
        n_iterations += 1
    assert n_iterations == 321 // 32 + 1
    assert generating.generations[0].n_decoded - before == n_iterations
    bench.run()
    bench.check(request)
    assert bench.generated(generating) == [expected_tokens(prompt, 200)]


def test_texts_take_memory_from_idle_slots_but_not_from_running_ones() -> None:
    bench = EmbeddingBench(n_ctx=3 * PAGE)
    rng = random.Random(3)
    bench.submit(letters(rng, PAGE), n_predict=2)
    bench.run()
    busy = bench.submit(prompt := letters(rng, PAGE - 20), n_predict=30)
    bench.loop.iterate()
    request = bench.embed(letters(rng, 2 * PAGE), letters(rng, 3 * PAGE))
    bench.run()
    bench.check(request)
    assert bench.generated(busy) == [expected_tokens(prompt, 30)]
    bench.check_memory()


def test_a_text_that_waits_for_memory_is_not_starved_by_new_requests() -> None:
    bench = EmbeddingBench(n_slots=2, n_ctx=3 * PAGE)
    rng = random.Random(4)
    bench.submit(letters(rng, PAGE), n_predict=20)
    bench.loop.iterate()
    request = bench.embed(letters(rng, 3 * PAGE))
    n_iterations = 0
    while not request.tasks[0].is_done:
        bench.submit(letters(rng, 10), n_predict=20)
        bench.loop.iterate()
        n_iterations += 1
        assert n_iterations < 100
    bench.check(request)
    bench.run()
    bench.check_memory()


def test_a_text_that_no_pool_can_hold_fails_alone() -> None:
    bench = EmbeddingBench(n_ctx=2 * PAGE)
    small, large, after = bench.embed([1]), bench.embed([1] * (2 * PAGE + 1)), bench.embed([2])
    bench.run()
    bench.check(small)
    bench.check(after)
    failures = [event for event in bench.events if isinstance(event, Failed)]
    assert [event.generation for event in failures] == large.tasks
    assert isinstance(failures[0].error, ServerFault)
    bench.check_memory()


def test_an_error_of_the_engine_ends_the_running_texts_only() -> None:
    bench = EmbeddingBench(n_texts=1)
    first, second = bench.embed([1]), bench.embed([2])
    bench.engine.fails = ServerFault("broken")  # type: ignore[assignment]
    with pytest.raises(ServerFault):  # not an engine's error: the loop's own thread would fail everything
        bench.loop.iterate()
    bench.engine.fails = None
    bench.run()
    bench.check(first)
    bench.check(second)
    bench.engine.fails = ContextFull("odd", 0)
    third = bench.embed([3])
    bench.run()
    assert [event.generation for event in bench.events if isinstance(event, Failed)] == third.tasks


@pytest.mark.parametrize("seed", range(3))
def test_a_random_mixture_loses_nothing_and_leaks_no_page(seed: int) -> None:
    rng = random.Random(seed)
    bench = EmbeddingBench(
        n_slots=rng.randrange(1, 4),
        n_texts=rng.randrange(1, 5),
        n_ctx=PAGE * rng.randrange(2, 6),
        n_batch=rng.choice([12, 64, 500]),
    )
    embedded, generated, cancelled = [], [], set()
    while len(embedded) < 150 or bench.loop.n_busy or bench.loop.n_deferred:
        if len(embedded) < 150 and rng.random() < 0.3:
            sizes = [rng.choice([1, 3, 40, rng.randrange(1, bench.n_ctx)]) for _ in range(rng.randrange(1, 6))]
            embedded.append(bench.embed(*(letters(rng, size) for size in sizes)))
        if len(generated) < 60 and rng.random() < 0.1:
            n_predict = rng.choice([1, 5, 80])
            prompt = letters(rng, rng.randrange(1, bench.n_ctx - n_predict - 1))
            generated.append((bench.submit(prompt, n_predict=n_predict), prompt, n_predict))
        if embedded and rng.random() < 0.02 and not all(task.is_done for task in embedded[-1].tasks):
            bench.loop.cancel(embedded[-1])
            cancelled.add(embedded[-1].id)
        bench.loop.iterate()
        bench.check_slots()
    assert not any(isinstance(event, Failed) for event in bench.events)
    for request in embedded:
        if request.id not in cancelled:
            bench.check(request)
    for request, prompt, n_predict in generated:
        assert bench.generated(request) == [expected_tokens(prompt, n_predict)]
    assert cancelled
    assert set(LETTERS) >= set(embedded[0].tasks[0].tokens)
    bench.check_memory()
