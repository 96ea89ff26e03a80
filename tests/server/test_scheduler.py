"""The pure scheduler: plans, admission, memory shortage. The end-to-end simulation is in test_engine_loop.py."""

from __future__ import annotations

import random

import pytest

from pyllama.server.scheduler import Chunk, SequenceState, Waiting, admit, gives_way, plan_step, resumable


def generating(slot: int, age: int) -> SequenceState:
    return SequenceState(slot, age, 1, True)


def prompt(slot: int, age: int, n_pending: int) -> SequenceState:
    return SequenceState(slot, age, n_pending, False)


def blocked(slot: int, age: int, n_pending: int) -> SequenceState:
    return SequenceState(slot, age, n_pending, False, True)


def lowest(index: int, free: object) -> int:
    return min(free)  # type: ignore[call-overload]


def test_every_generating_sequence_gets_one_token_and_prompts_fill_the_batch_oldest_first() -> None:
    plan = plan_step([prompt(0, 9, 50), generating(1, 1), prompt(2, 3, 20), generating(3, 2)], 32)
    assert plan == [Chunk(1, 1, True), Chunk(3, 1, True), Chunk(2, 20, True), Chunk(0, 10, False)]


def test_a_prompt_longer_than_the_batch_is_cut_and_draws_only_at_its_end() -> None:
    assert plan_step([prompt(0, 0, 100)], 64) == [Chunk(0, 64, False)]
    assert plan_step([prompt(0, 0, 36)], 64) == [Chunk(0, 36, True)]


def test_prompts_that_do_not_fit_are_cut_at_multiples_of_the_grain() -> None:
    behind = SequenceState(0, 0, 1000, False, n_held=70)
    assert plan_step([behind], 500, prompt_grain=64) == [Chunk(0, 442, False)]  # 512 in all
    assert plan_step([behind, prompt(1, 1, 200)], 500, prompt_grain=64) == [Chunk(0, 442, False)]  # not 58
    assert plan_step([behind, prompt(1, 1, 30)], 500, prompt_grain=64) == [Chunk(0, 442, False), Chunk(1, 30, True)]
    assert plan_step([behind], 40, prompt_grain=64) == [Chunk(0, 40, False)]  # rather a part of the grain than nothing
    assert plan_step([behind._replace(n_pending=450)], 500, prompt_grain=64) == [Chunk(0, 450, True)]
    assert plan_step([behind._replace(n_until_cut=33)], 500, prompt_grain=64) == [Chunk(0, 33, False)]


def test_a_prompt_is_cut_where_its_state_is_wanted() -> None:
    wanted = SequenceState(0, 0, 100, False, n_until_cut=30)
    assert plan_step([wanted, prompt(1, 1, 20)], 64) == [Chunk(0, 30, False), Chunk(1, 20, True)]
    assert plan_step([wanted], 20) == [Chunk(0, 20, False)]
    assert plan_step([SequenceState(0, 0, 30, False, n_until_cut=30)], 64) == [Chunk(0, 30, True)]


def test_without_continuous_batching_prompts_wait_until_nothing_generates() -> None:
    states = [generating(0, 0), prompt(1, 1, 5)]
    assert plan_step(states, 64, mixes_prompts=False) == [Chunk(0, 1, True)]
    assert plan_step(states[1:], 64, mixes_prompts=False) == [Chunk(1, 5, True)]


def test_a_child_that_waits_for_its_parent_is_not_planned() -> None:
    assert plan_step([prompt(0, 0, 0)], 64) == []


def test_no_younger_prompt_starts_past_an_older_sequence_that_waits_for_memory() -> None:
    plan = plan_step([blocked(0, 5, 300), prompt(1, 4, 10), prompt(2, 6, 10), generating(3, 9)], 64)
    assert [chunk.slot for chunk in plan] == [3, 1]


def test_the_newest_gives_way_and_the_last_one_cannot() -> None:
    assert gives_way([generating(0, 3), generating(1, 8), generating(2, 5)]).slot == 1
    assert gives_way([generating(0, 3)]) is None


def test_a_blocked_sequence_resumes_when_it_fits_or_when_nothing_else_runs() -> None:
    states = [blocked(0, 1, 300), generating(1, 0)]
    assert resumable(states, 512, 256) == []
    assert resumable(states, 768, 256) == [0]
    assert resumable([blocked(0, 1, 300)], 0, 256) == [0]


def test_blocked_sequences_resume_oldest_first_without_overtaking() -> None:
    states = [blocked(0, 7, 10), blocked(1, 3, 2000), generating(2, 0)]
    assert resumable(states, 1024, 256) == []


def test_groups_start_first_come_first_served() -> None:
    waiting = [Waiting(1), Waiting(1), Waiting(1)]
    assert admit(waiting, {2, 3}, lowest) == [(0, [2]), (1, [3])]


def test_a_group_that_does_not_fit_keeps_later_ones_from_starving_it() -> None:
    assert admit([Waiting(3), Waiting(1)], {0, 1}, lowest) == []


def test_a_request_for_a_busy_slot_lets_others_pass_but_is_first_on_that_slot() -> None:
    waiting = [Waiting(1, id_slot=0), Waiting(1), Waiting(1, id_slot=0)]
    assert admit(waiting, {1}, lowest) == [(1, [1])]
    assert admit(waiting, {0, 1}, lowest) == [(0, [0]), (1, [1])]


def test_a_pinned_group_takes_its_slot_first_and_others_after() -> None:
    assert admit([Waiting(2, id_slot=1)], {0, 1, 2}, lowest) == [(0, [1, 2])]
    assert admit([Waiting(2, id_slot=1), Waiting(1)], {0, 2}, lowest) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_keep_the_batch_limit_and_never_skip_a_generating_sequence(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        n = rng.randrange(1, 9)
        n_batch = rng.randrange(n + 1, 80)
        ages = rng.sample(range(100), n)
        states = []
        for slot, age in enumerate(ages):
            kind = rng.random()
            n_pending = rng.randrange(0, 200)
            states.append(
                generating(slot, age)
                if kind < 0.4
                else blocked(slot, age, n_pending + 1)
                if kind < 0.5
                else prompt(slot, age, n_pending)
            )
        plan = plan_step(states, n_batch)
        assert sum(chunk.n_tokens for chunk in plan) <= n_batch
        planned = {chunk.slot: chunk for chunk in plan}
        assert len(planned) == len(plan)
        for state in states:
            chunk = planned.get(state.slot)
            if state.is_generating and not state.is_blocked:
                assert chunk == Chunk(state.slot, 1, True)
            if chunk is not None:
                assert not state.is_blocked
                assert chunk.draws == (chunk.n_tokens == state.n_pending)
        # Whoever may run at all and is oldest does run.
        runnable = [s for s in states if s.n_pending and not s.is_blocked]
        oldest_blocked = min((s.age for s in states if s.is_blocked), default=1000)
        runnable = [s for s in runnable if s.is_generating or s.age < oldest_blocked]
        if runnable:
            assert min(runnable, key=lambda s: s.age).slot in planned
