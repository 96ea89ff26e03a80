"""The engine loop against the fake engine, without threads or HTTP: a long random simulation and the single rules
behind it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import (
    END,
    LETTERS,
    N_VOCAB,
    PAGE,
    FakeEngine,
    FakeRow,
    FakeSampler,
    FakeTokenizer,
    Work,
    forced_text,
    pseudo_random_token,
)

from pyllama.checkpoints import CheckpointRule
from pyllama.errors import DeviceError
from pyllama.server.engine_loop import EngineLoop
from pyllama.server.errors import QueueFull, ServerFault
from pyllama.server.generation import Event, Failed, Finished, Generation, Progress, Started, TokenText
from pyllama.server.generation_params import GenerationParams
from pyllama.server.loop_settings import LoopSettings
from pyllama.server.requests import ActiveRequest
from pyllama.server.sampling_params import SamplingParams
from pyllama.server.vocabulary import Vocabulary


class Bench:
    """A loop with a clock that ticks once per step, and all events it delivered."""

    def __init__(
        self,
        *,
        n_slots: int = 4,
        n_ctx: int = 1024,
        n_batch: int = 64,
        max_queue: int = 10_000,
        max_passes: int = 1,
        checkpoints: CheckpointRule | None = None,
        prefill_pace: int = 0,
        **engine: Any,
    ) -> None:
        self.engine = FakeEngine(n_ctx=n_ctx, n_seq_max=n_slots, n_batch=max(n_batch, n_slots + 1), **engine)
        self.vocabulary = Vocabulary(FakeTokenizer(), N_VOCAB)
        self.events: list[Event] = []
        self.n_ctx = n_ctx
        self.loop = EngineLoop(
            self.engine,
            LoopSettings(
                n_slots=n_slots,
                n_ctx_slot=n_ctx,
                n_batch=n_batch,
                max_queue=max_queue,
                max_passes=max_passes,
                checkpoints=checkpoints,
                prefill_pace=prefill_pace,
                can_cut=not engine.get("is_recurrent", False),
            ),
            make_work=Work,
            make_row=FakeRow,
            deliver=self.events.extend,
            clock=lambda: self.engine.n_steps * (1.0 if max_passes == 1 else 1e-3),
        )

    def request(self, *prompts: list[int], id_slot: int = -1, **fields: Any) -> ActiveRequest:
        seed = fields.pop("seed", 1)
        temperature = fields.pop("temperature", 0.0)
        sampling = SamplingParams(seed=seed, temperature=temperature)
        params = replace(GenerationParams(stream=True), sampling=sampling, id_slot=id_slot, **fields)
        request = ActiveRequest(id_slot=id_slot)
        index = 0
        for prompt in prompts:
            group: list[Generation] = []
            for choice in range(params.n_cmpl):
                chosen = params.sampling.for_choice(choice)
                sampler = FakeSampler(N_VOCAB, seed=chosen.seed, temperature=chosen.temperature)
                group.append(
                    Generation(
                        request,
                        index,
                        prompt=list(prompt),
                        params=params,
                        sampler=sampler,
                        vocabulary=self.vocabulary,
                        n_ctx=self.n_ctx,
                        n_predict_limit=-1,
                        parent=group[0] if group else None,
                    )
                )
                index += 1
            group[0].children = group[1:]
            request.groups.append(group)
        return request

    def submit(self, *prompts: list[int], **fields: Any) -> ActiveRequest:
        request = self.request(*prompts, **fields)
        self.loop.submit(request)
        return request

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            self.loop.iterate()
            self.check_slots()
            if not self.loop.n_busy and not self.loop.n_deferred:
                return
        raise AssertionError("requests are still running")

    def check_slots(self) -> None:
        for slot in self.loop.slots:
            assert slot.tokens == self.engine.tokens[slot.id]

    def generated(self, request: ActiveRequest) -> list[list[int]]:
        return [generation.generated for generation in request.generations]

    def drop_caches(self) -> None:
        for slot in self.loop.slots:
            assert slot.generation is None
            self.engine.clear(slot.id)
            slot.tokens = []


def letters(rng: random.Random, n: int) -> list[int]:
    return [rng.choice(LETTERS) for _ in range(n)]


def expected_tokens(prompt: list[int], n: int, *, seed: int = 1, temperature: float = 0.0) -> list[int]:
    """What a sequence alone would generate."""
    sampler = FakeSampler(N_VOCAB, seed=seed, temperature=temperature)
    history = list(prompt)
    for _ in range(n):
        history.append(pseudo_random_token(history, sampler))
    return history[len(prompt) :]


RULE = CheckpointRule(frozenset(b"\n"), min_step=30)  # a line is a message


@pytest.mark.parametrize(
    "options",
    [
        {"max_passes": 1},
        {"max_passes": 4, "cache_tokens": 2000},
        {"max_passes": 1, "cache_tokens": 20_000, "is_recurrent": True, "checkpoints": RULE},
        {"max_passes": 1, "cache_tokens": 500, "is_recurrent": True, "checkpoints": RULE},
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_load_loses_no_token_starves_nobody_and_leaks_no_page(seed: int, options: dict[str, Any]) -> None:
    """350 requests of every kind with a small pool: every answer is the one of a lone sequence, starts are first come
    first served.
    """
    rng = random.Random(seed)
    max_passes = options["max_passes"]
    bench = Bench(
        n_slots=rng.randrange(1, 6), n_ctx=PAGE * rng.randrange(2, 8), n_batch=rng.choice([7, 64, 500]), **options
    )
    prefixes = [letters(rng, rng.randrange(1, bench.n_ctx // 3)) for _ in range(5)]
    requests: list[tuple[ActiveRequest, int, int, float]] = []
    cancelled: set[int] = set()
    n_total = 350
    while len(requests) < n_total or bench.loop.n_busy or bench.loop.n_deferred:
        if len(requests) < n_total and rng.random() < 0.3:
            n_predict = rng.choice([1, 2, 5, 30, 120])
            room = bench.n_ctx - n_predict - 1
            prompts = []
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                prefix = rng.choice(prefixes)[: rng.randrange(1, 200)]
                prompts.append((prefix + letters(rng, rng.randrange(0, 150)))[:room])
            n_cmpl = rng.choice([1, 1, 1, 2, len(bench.loop.slots)])
            n_cmpl = min(n_cmpl, len(bench.loop.slots))
            temperature = rng.choice([0.0, 1.0])
            request = bench.submit(
                *prompts,
                n_predict=n_predict,
                n_cmpl=n_cmpl,
                temperature=temperature,
                seed=len(requests),
                id_slot=rng.choice([-1, -1, -1, rng.randrange(10)]),
                cache_prompt=rng.random() < 0.9,
            )
            requests.append((request, n_predict, len(requests), temperature))
        if requests and rng.random() < 0.02:
            victim = rng.choice(requests[-20:])[0]
            if not all(generation.is_done for generation in victim.generations):
                bench.loop.cancel(victim)
                cancelled.add(victim.id)
        bench.loop.iterate()
        bench.check_slots()
        assert bench.engine.cache.used <= bench.engine.cache.budget

    assert bench.engine.max_rows <= max(bench.loop._n_batch, 1)
    assert (bench.engine.n_extra_passes > 0) == (max_passes > 1)
    assert bool(bench.engine.checkpoints) == ("checkpoints" in options)
    sources = {reuse.source for reuse in bench.engine.reuses}
    assert sources >= ({"own", "host"} if bench.engine.cache.budget >= 2000 else {"own"})
    by_generation: dict[int, list[Event]] = {}
    for event in bench.events:
        by_generation.setdefault(id(event.generation), []).append(event)
    for request, n_predict, request_seed, temperature in requests:
        if request.id in cancelled:
            continue
        for group in request.groups:
            for choice, generation in enumerate(group):
                expected = expected_tokens(
                    generation.prompt, n_predict, seed=request_seed + choice, temperature=temperature
                )
                assert generation.generated == expected, f"seed {seed}, request {request_seed}"
                events = by_generation[id(generation)]
                assert [type(events[0]), type(events[-1])] == [Started, Finished]
                assert [e.token for e in events if isinstance(e, TokenText)] == expected
    # First come, first served: parents start in the order of arrival, but for those that asked for a busy slot.
    started = [e.generation for e in bench.events if isinstance(e, Started)]
    free_choice = [g.age for g in started if g.request.id_slot < 0 and g.parent is None]
    assert free_choice == sorted(free_choice)
    for slot in range(len(bench.loop.slots)):
        pinned = [
            g.age
            for g in started
            if g.request.id_slot >= 0 and g.parent is None and g.request.id_slot % len(bench.loop.slots) == slot
        ]
        assert pinned == sorted(pinned)
    bench.drop_caches()
    assert len(bench.engine.pool.free) == bench.n_ctx // PAGE
    assert not bench.engine.pool.references


def test_a_full_pool_makes_the_newest_wait_and_all_answers_complete() -> None:
    """Four times 70 tokens over a pool of one page: nobody fails, nobody's text changes (known fault E13)."""
    bench = Bench(n_ctx=PAGE)
    rng = random.Random(0)
    prompts = [letters(rng, 100) for _ in range(4)]
    requests = [bench.submit(prompt, n_predict=70) for prompt in prompts]
    bench.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert bench.generated(request) == [expected_tokens(prompt, 70)]
    assert not any(isinstance(event, Failed) for event in bench.events)
    finished = [e.generation.age for e in bench.events if isinstance(e, Finished)]
    assert finished == [0, 1, 2, 3]


def test_a_sequence_that_gave_way_keeps_its_sampler_history_and_counts() -> None:
    bench = Bench(n_ctx=2 * PAGE, n_slots=2)
    rng = random.Random(1)
    first = bench.submit(letters(rng, 200), n_predict=200)
    second = bench.submit(letters(rng, 200), n_predict=200)
    bench.run()
    preempted = second.generations[0]
    assert preempted.sampler.history == preempted.tokens
    assert preempted.timings()["prompt_n"] == 200
    assert preempted.timings()["predicted_n"] == 200
    assert bench.generated(first)[0] == expected_tokens(first.generations[0].prompt, 200)


@pytest.mark.contract("own 18")
def test_idle_caches_are_dropped_least_recently_used_first_before_anyone_waits() -> None:
    bench = Bench(n_ctx=4 * PAGE, n_slots=4)
    rng = random.Random(2)
    for _ in range(3):
        bench.submit(letters(rng, PAGE), n_predict=1)
        bench.run()
    held = [slot.id for slot in bench.loop.slots if slot.tokens]
    oldest = min(held, key=lambda i: bench.loop.slots[i].last_used)
    bench.submit(letters(rng, PAGE + 10), n_predict=1)
    bench.run()
    assert not bench.loop.slots[oldest].tokens
    assert sum(bool(slot.tokens) for slot in bench.loop.slots) == 3


def test_the_same_prompt_again_computes_one_token() -> None:
    bench = Bench()
    prompt = letters(random.Random(3), 77)
    for n_cached in (0, 76):
        request = bench.submit(prompt, n_predict=1)
        bench.run()
        assert request.generations[0].timings()["cache_n"] == n_cached
        assert request.generations[0].timings()["prompt_n"] == 77 - n_cached


def test_a_prefix_is_shared_from_a_busy_slot_and_without_cache_prompt_nothing_is() -> None:
    bench = Bench(n_slots=2)
    prompt = letters(random.Random(4), 50)
    bench.submit(prompt, n_predict=100)
    for _ in range(5):
        bench.loop.iterate()
    shared = bench.submit(prompt + letters(random.Random(5), 5), n_predict=1)
    unshared = bench.submit(prompt, n_predict=1, cache_prompt=False)
    bench.run()
    assert shared.generations[0].n_cached == 50
    assert unshared.generations[0].n_cached == 0


@pytest.mark.contract("own 19")
def test_the_slot_with_the_longest_common_prefix_is_chosen_else_the_least_recently_used() -> None:
    bench = Bench(n_slots=3)
    rng = random.Random(6)
    prompts = [letters(rng, 60) for _ in range(3)]
    slots = []
    for prompt in prompts:
        request = bench.submit(prompt, n_predict=1)
        bench.run()
        slots.append(request.generations[0].slot_id)
    assert slots == [2, 1, 0]
    for prompt, slot in zip(prompts, slots, strict=True):
        request = bench.submit(prompt + letters(rng, 3), n_predict=1)
        bench.run()
        assert request.generations[0].slot_id == slot


@pytest.mark.contract("own 19")
def test_a_requested_slot_is_taken_modulo_their_number() -> None:
    bench = Bench(n_slots=4)
    request = bench.submit(letters(random.Random(7), 5), n_predict=1, id_slot=6)
    bench.run()
    assert request.generations[0].slot_id == 2


def test_children_share_the_prompt_and_use_their_own_seeds() -> None:
    bench = Bench(n_ctx=8 * PAGE)
    prompt = letters(random.Random(8), 300)
    request = bench.submit(prompt, n_predict=20, n_cmpl=3, temperature=1.0, seed=41)
    bench.run()
    assert bench.generated(request) == [expected_tokens(prompt, 20, seed=41 + k, temperature=1.0) for k in range(3)]
    # Prompt once, one more row for each child, then the drawn tokens.
    assert bench.engine.n_rows == 300 + 2 + 3 * 19
    assert sum(bool(slot.tokens) for slot in bench.loop.slots) == 1


def test_a_cancelled_request_is_gone_before_the_next_step() -> None:
    bench = Bench()
    request = bench.submit(letters(random.Random(9), 10), n_predict=100)
    bench.loop.iterate()
    rows, n_events = bench.engine.n_rows, len(bench.events)
    bench.loop.cancel(request)
    bench.loop.iterate()
    assert bench.engine.n_rows == rows
    assert len(bench.events) == n_events
    assert bench.loop.n_busy == 0


@pytest.mark.contract("own 20")
def test_a_queued_request_can_be_cancelled() -> None:
    bench = Bench(n_slots=1)
    bench.submit(letters(random.Random(10), 10), n_predict=5)
    queued = bench.submit(letters(random.Random(11), 10), n_predict=5)
    bench.loop.iterate()
    bench.loop.cancel(queued)
    bench.run()
    assert not any(event.generation.request is queued for event in bench.events)


def test_the_queue_is_bounded() -> None:
    bench = Bench(n_slots=1, max_queue=2)
    prompt = letters(random.Random(12), 10)
    bench.submit(prompt, n_predict=5)
    bench.loop.iterate()
    bench.submit(prompt, n_predict=5)
    bench.submit(prompt, n_predict=5)
    with pytest.raises(QueueFull):
        bench.submit(prompt, n_predict=5)
    bench.run()


def test_a_failed_step_ends_its_requests_only_and_the_loop_goes_on() -> None:
    bench = Bench(n_slots=1)
    prompt = letters(random.Random(13), 10)
    first = bench.submit(prompt, n_predict=5)
    second = bench.submit(prompt, n_predict=5)
    bench.engine.fails = DeviceError("the device is gone")
    bench.run()
    failed = [event for event in bench.events if isinstance(event, Failed)]
    assert [event.generation.request for event in failed] == [first]
    assert bench.generated(second) == [expected_tokens(prompt, 5)]


def test_a_prompt_that_the_whole_pool_cannot_hold_fails_alone() -> None:
    bench = Bench(n_ctx=PAGE, n_slots=2)
    bench.n_ctx = 10_000  # a slot limit beyond the pool, which the server's own set-up never makes
    request = bench.submit(letters(random.Random(14), PAGE + 1), n_predict=5)
    bench.run()
    failed = [event for event in bench.events if isinstance(event, Failed)]
    assert [event.generation for event in failed] == request.generations
    assert isinstance(failed[0].error, ServerFault)
    assert str(failed[0].error) == "Context size has been exceeded."


def test_generation_ends_with_the_slot_full() -> None:
    bench = Bench(n_ctx=PAGE)
    request = bench.submit(letters(random.Random(15), 8), n_predict=-1)
    bench.run()
    generation = request.generations[0]
    assert (generation.n_decoded, generation.truncated, generation.stop_type) == (PAGE - 8, True, "limit")


def test_progress_runs_from_the_cached_to_the_last_prompt_token() -> None:
    bench = Bench(n_batch=64)
    prompt = letters(random.Random(16), 180)
    bench.submit(prompt, n_predict=1, return_progress=True)
    bench.run()
    assert [e.processed for e in bench.events if isinstance(e, Progress)] == [0, 64, 128, 180]
    bench.events.clear()
    bench.submit(prompt, n_predict=1, return_progress=True)
    bench.run()
    assert [e.processed for e in bench.events if isinstance(e, Progress)] == [179, 180]


def test_an_end_token_ends_the_generation_and_counts() -> None:
    bench = Bench(next_token=lambda history, sampler: END if len(history) > 12 else LETTERS[0])
    request = bench.submit(letters(random.Random(17), 10), n_predict=50)
    bench.run()
    generation = request.generations[0]
    assert (generation.stop_type, generation.n_decoded, generation.content) == ("eos", 4, "aaa")


def test_an_answer_that_ends_within_a_step_keeps_nothing_of_the_passes_after_it() -> None:
    bench = Bench(n_slots=2, max_passes=4, next_token=forced_text(b"one two", after=b"|"))
    ends = bench.submit([*b"first|"], n_predict=100, stop=("wo",))
    goes_on = bench.submit([*b"second|"], n_predict=100)
    while bench.loop.n_busy or bench.loop.n_deferred:
        bench.loop.iterate()
        bench.check_slots()
    first, second = ends.generations[0], goes_on.generations[0]
    assert (first.content, first.stop_type, second.content, second.stop_type) == ("one t", "word", "one two", "eos")
    assert bench.engine.n_extra_passes > 0
    held = {bytes(slot.tokens).decode() for slot in bench.loop.slots}
    assert held == {"first|one tw", "second|one two"}
