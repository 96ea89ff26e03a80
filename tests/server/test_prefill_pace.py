"""`--prefill-pace`: how much of the time prompts take while something generates."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from test_engine_loop import Bench, expected_tokens, letters
from test_scheduler import generating, prompt

from pyllama.server.scheduler import Chunk, SequenceState, plan_step, prompts_rest


def begun(slot: int, age: int, n_pending: int, n_until_cut: int = 0) -> SequenceState:
    return SequenceState(slot, age, n_pending, False, n_until_cut=n_until_cut, has_begun=True)


def test_prompts_rest_in_proportion_to_the_step_that_they_took() -> None:
    assert prompts_rest(2_332, 1_000, 30)
    assert not prompts_rest(2_333, 1_000, 30)  # 1000 * 70 // 30
    assert prompts_rest(98_999, 1_000, 1)
    assert not prompts_rest(99_000, 1_000, 1)
    assert prompts_rest(9, 1_000, 99)
    assert not prompts_rest(10, 1_000, 99)


@pytest.mark.parametrize("pace", [0, 100])
def test_without_a_limit_prompts_never_rest(pace: int) -> None:
    assert not prompts_rest(0, 10**9, pace)


def test_while_prompts_rest_only_new_ones_run() -> None:
    states = [generating(0, 0), begun(1, 1, 500), prompt(2, 2, 40)]
    assert plan_step(states, 64, prompts_rest=True) == [Chunk(0, 1, True), Chunk(2, 40, True)]
    assert plan_step(states, 64) == [Chunk(0, 1, True), Chunk(1, 63, False)]


def test_prompts_do_not_rest_while_nothing_generates() -> None:
    states = [begun(0, 0, 500), begun(1, 1, 5)]
    assert plan_step(states, 64, prompts_rest=True) == plan_step(states, 64) == [Chunk(0, 64, False)]
    waiting = SequenceState(2, 2, 1, True, is_blocked=True)
    assert plan_step([begun(0, 0, 500), waiting], 64, prompts_rest=True) == [Chunk(0, 64, False)]


def test_a_prompt_that_rested_is_cut_where_its_state_is_wanted() -> None:
    states = [generating(0, 0), begun(1, 1, 500, n_until_cut=30), begun(2, 2, 20)]
    assert plan_step(states, 64, prompts_rest=True) == [Chunk(0, 1, True)]
    assert plan_step(states, 64) == [Chunk(0, 1, True), Chunk(1, 30, False), Chunk(2, 20, True)]


def recorded_steps(bench: Bench) -> list[list[int]]:
    """Filled with the numbers of tokens of each sequence in each step."""
    steps: list[list[int]] = []
    step: Callable[..., Any] = bench.engine.step

    def record(works: Any, *arguments: Any) -> Any:
        steps.append([len(work.tokens) for work in works])
        return step(works, *arguments)

    bench.engine.step = record
    return steps


@pytest.mark.contract("own 34")
@pytest.mark.parametrize(("pace", "n_between"), [(0, 1), (100, 1), (50, 2), (25, 4), (20, 5)])
def test_a_long_prompt_takes_its_share_of_the_steps_and_the_running_stream_the_rest(pace: int, n_between: int) -> None:
    """Steps of the bench take one second each."""
    rng = random.Random(1)
    bench = Bench(prefill_pace=pace)
    steps = recorded_steps(bench)
    first, second = letters(rng, 10), letters(rng, 640)
    running = bench.submit(first, n_predict=100)
    bench.loop.iterate()
    late = bench.submit(second, n_predict=5)
    bench.run()
    with_prompt = [i for i, step in enumerate(steps) if max(step) > 1 and i > 0]
    assert len(with_prompt) == 11  # 63 tokens beside the one that is generated
    assert {after - before for before, after in pairwise(with_prompt)} == {n_between}
    assert bench.generated(running) == [expected_tokens(first, 100)]
    assert bench.generated(late) == [expected_tokens(second, 5)]


def test_alone_a_prompt_runs_without_a_break() -> None:
    bench = Bench(prefill_pace=10)
    steps = recorded_steps(bench)
    bench.submit(letters(random.Random(2), 640), n_predict=3)
    bench.run()
    assert steps == [[64]] * 10 + [[1]] * 2


def test_a_new_prompt_gets_its_first_chunk_while_another_rests() -> None:
    rng = random.Random(3)
    bench = Bench(prefill_pace=10)
    steps = recorded_steps(bench)
    bench.submit(letters(rng, 10), n_predict=100)
    bench.loop.iterate()
    bench.submit(letters(rng, 640), n_predict=1)
    bench.loop.iterate()
    bench.submit(letters(rng, 30), n_predict=1)
    bench.loop.iterate()
    assert steps == [[10], [1, 63], [1, 30]]


@pytest.mark.parametrize("pace", [1, 30, 90])
def test_pacing_changes_no_text_also_when_memory_is_short(pace: int) -> None:
    rng = random.Random(pace)
    bench = Bench(n_ctx=1024, prefill_pace=pace)
    prompts = [letters(rng, rng.randint(1, 600)) for _ in range(24)]
    requests = [bench.submit(tokens, n_predict=60) for tokens in prompts]
    bench.run()
    for tokens, request in zip(prompts, requests, strict=True):
        assert bench.generated(request) == [expected_tokens(tokens, 60)]


def test_a_prompt_to_be_scored_rests_too() -> None:
    rng = random.Random(4)
    bench = Bench(prefill_pace=25)
    running = bench.submit(letters(rng, 10), n_predict=100)
    bench.loop.iterate()
    scored = bench.submit(letters(rng, 400), n_predict=1, scores_prompt=True, n_probs=1)
    held = []
    for _ in range(9):
        bench.loop.iterate()
        held.append(len(bench.loop.slots[scored.generations[0].slot_id].tokens))
    assert held == [64, 64, 64, 64, 128, 128, 128, 128, 192]
    assert len(running.generations[0].generated) == 10
    bench.run()
