"""Prefix reuse of the engine loop against the fake engine: where prompts are cut, what is kept, what comes back."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import PAGE, forced_text
from test_engine_loop import Bench, expected_tokens

from pyllama.checkpoints import CheckpointRule
from pyllama.errors import OutOfMemory
from pyllama.server.generation import Failed

RULE = CheckpointRule(frozenset(b"\n"), min_step=8192)


def hybrid(**options: Any) -> Bench:
    return Bench(**{"is_recurrent": True, "cache_tokens": 100_000, "checkpoints": RULE, "n_ctx": 16 * PAGE, **options})


def line(n: int, seed: int) -> list[int]:
    """A message of n tokens that begins with the opening token."""
    rng = random.Random(seed)
    return [*b"\n", *(rng.choice(b"abcdefgh") for _ in range(n - 1))]


def ask(bench: Bench, prompt: list[int], n: int = 5, **fields: Any) -> Any:
    """Run one request to its end; its generation."""
    request = bench.submit(prompt, n_predict=n, **fields)
    bench.run()
    (generation,) = request.generations
    assert generation.generated == expected_tokens(prompt, n)
    return generation


def computed(generation: Any) -> int:
    return generation.timings()["prompt_n"]


def test_a_prompt_is_computed_up_to_its_last_messages_and_the_states_there_are_kept() -> None:
    bench = hybrid(n_batch=2048)
    ask(bench, line(100, 1) + line(50, 2) + line(10, 3), n=1)
    assert [length for _, length in bench.engine.checkpoints] == [100, 150]
    assert bench.engine.n_steps == 3


def test_a_model_that_only_attends_is_not_cut() -> None:
    bench = Bench(n_ctx=16 * PAGE, n_batch=2048)
    ask(bench, line(100, 1) + line(50, 2) + line(300, 3), n=1)
    assert bench.engine.checkpoints == []
    assert bench.engine.n_steps == 1


def test_while_generating_the_state_is_kept_at_every_full_page() -> None:
    bench = hybrid()
    ask(bench, line(200, 1), n=400)
    assert [length for _, length in bench.engine.checkpoints] == [256, 512]


def test_steps_of_several_tokens_end_where_a_state_is_kept() -> None:
    """Models with sliding windows keep states, too, and draw several tokens in a step."""
    bench = Bench(n_ctx=16 * PAGE, checkpoints=RULE, cache_tokens=100_000, max_passes=4)
    ask(bench, line(201, 1), n=400)
    assert bench.engine.n_extra_passes > 200
    assert [length for _, length in bench.engine.checkpoints] == [256, 512]


def test_a_follow_up_an_edit_and_a_second_try_compute_little_more_than_what_is_new() -> None:
    bench = hybrid()
    system, question = line(300, 1), line(40, 2)
    first = ask(bench, system + question + line(9, 3))
    held = first.tokens[:-1]
    assert computed(ask(bench, [*held, *line(30, 4)])) == 30
    assert computed(ask(bench, first.prompt)) == 9  # the last message's border
    assert computed(ask(bench, system + line(44, 5) + line(9, 3))) == 53
    other = ask(bench, line(300, 9))
    assert (other.n_cached, other.reuse.limit) == (0, "no checkpoint")


def test_a_request_that_wants_its_prompt_computed_reuses_nothing_and_cuts_nothing() -> None:
    bench = hybrid(n_batch=2048)
    prompt = line(100, 1) + line(50, 2)
    ask(bench, prompt)
    n_steps, kept = bench.engine.n_steps, len(bench.engine.checkpoints)
    generation = ask(bench, prompt, n=1, cache_prompt=False)
    assert (generation.n_cached, generation.reuse) == (0, None)
    assert bench.engine.n_steps == n_steps + 1
    assert len(bench.engine.checkpoints) == kept


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_what_an_idle_slot_gave_up_for_another_prompt_comes_back_from_host_memory(is_recurrent: bool) -> None:
    options = {} if is_recurrent else {"is_recurrent": False, "checkpoints": None}
    bench = hybrid(n_slots=1, n_ctx=2 * PAGE, **options)
    prompts = [line(300, seed) for seed in range(4)]
    answers = [ask(bench, prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        again = ask(bench, [*answer.tokens[:-1], *line(5, 9)])
        assert (computed(again), again.n_cached, again.reuse.source) == (5, 304, "host")
        assert again.prompt[:300] == prompt


def test_without_host_memory_only_what_slots_hold_is_reused() -> None:
    bench = Bench(n_slots=1, n_ctx=4 * PAGE, cache_tokens=0)
    first, second = line(300, 1), line(300, 2)
    for prompt in (first, second, first):
        generation = ask(bench, prompt)
        assert computed(generation) >= 299  # all begin with the same token
        assert generation.reuse.limit == "not cached"


def test_short_texts_are_not_worth_a_copy_but_what_a_prompt_shares_with_its_slot_is_reused() -> None:
    bench = Bench(n_slots=1, n_ctx=4 * PAGE, cache_tokens=10_000)
    first = ask(bench, line(40, 1), n=2)
    again = ask(bench, [*first.prompt[:30], *b"xyz"], n=2)
    assert (again.n_cached, again.reuse.source) == (30, "own")
    ask(bench, line(62, 2), n=2, cache_prompt=False)
    ask(bench, line(63, 3), n=2, cache_prompt=False)
    assert bench.engine.cache.used == 0
    ask(bench, line(64, 4), n=1)  # holds as many
    ask(bench, line(64, 5), n=1)
    assert bench.engine.cache.used == 2 * 64


def test_the_longest_prefix_is_shared_from_a_busy_slot_at_a_state() -> None:
    bench = hybrid(n_slots=2)
    shared = line(300, 1) + line(20, 2)
    bench.submit(shared + line(10, 3), n_predict=300)
    for _ in range(20):
        bench.loop.iterate()
        bench.check_slots()
    request = bench.submit(shared + line(10, 4), n_predict=5)
    bench.run()
    generation = request.generations[0]
    assert generation.generated == expected_tokens(generation.prompt, 5)
    assert (generation.n_cached, generation.reuse.source, generation.reuse.checkpoint) == (320, "other", 320)


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_an_idle_slot_makes_room_for_a_copy_that_comes_back(is_recurrent: bool) -> None:
    options = {} if is_recurrent else {"is_recurrent": False, "checkpoints": None}
    bench = hybrid(n_slots=2, n_ctx=4 * PAGE, **options)
    long = line(3 * PAGE, 1)
    first = ask(bench, long)
    second = ask(bench, line(3 * PAGE, 2), id_slot=1 - first.slot_id)  # the first slot gives its pages away
    assert not bench.loop.slots[first.slot_id].tokens
    third = ask(bench, [*first.tokens[:-1], *line(4, 3)], id_slot=first.slot_id)
    assert (computed(third), third.reuse.source) == (4, "host")
    assert not bench.loop.slots[second.slot_id].tokens


def test_a_sequence_that_gave_way_gets_its_tokens_back_instead_of_computing_them_again() -> None:
    bench = hybrid(n_slots=2, n_ctx=2 * PAGE)
    prompts = [line(200, 1), line(200, 2)]
    requests = [bench.submit(prompt, n_predict=200) for prompt in prompts]
    bench.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert bench.generated(request) == [expected_tokens(prompt, 200)]
        assert request.generations[0].timings()["prompt_n"] == 200
        assert request.generations[0].n_cached == 0
    assert any(reuse.source == "host" and reuse.length > 250 for reuse in bench.engine.reuses)
    assert bench.engine.n_rows == 2 * (200 + 199)  # none twice


def test_a_prompt_that_gave_way_half_done_counts_its_own_tokens_as_computed() -> None:
    bench = hybrid(n_slots=2, n_ctx=2 * PAGE, n_batch=32)
    bench.submit(line(100, 1), n_predict=300)
    bench.loop.iterate()
    second = bench.submit(line(250, 2), n_predict=3)
    bench.run()
    generation = second.generations[0]
    assert generation.generated == expected_tokens(generation.prompt, 3)
    assert (generation.n_cached, computed(generation)) == (0, 250)


def test_choices_of_a_recurrent_model_share_the_whole_prompt_but_its_last_token() -> None:
    bench = hybrid()
    prompt = line(300, 1) + line(9, 2)
    request = bench.submit(prompt, n_predict=20, n_cmpl=3, temperature=1.0, seed=41)
    bench.run()
    expected = [expected_tokens(prompt, 20, seed=41 + k, temperature=1.0) for k in range(3)]
    assert bench.generated(request) == expected
    assert bench.engine.n_rows == 309 + 2 + 3 * 19
    assert [generation.n_cached for generation in request.generations] == [0, 308, 308]
    again = bench.submit(prompt, n_predict=20, n_cmpl=3, temperature=1.0, seed=41)
    bench.run()
    assert bench.generated(again) == expected


def test_a_prompt_of_one_token_has_choices_too() -> None:
    for bench in (hybrid(), Bench()):
        request = bench.submit([*b"a"], n_predict=4, n_cmpl=2, temperature=1.0, seed=4)
        bench.run()
        assert bench.generated(request) == [expected_tokens([*b"a"], 4, seed=4 + k, temperature=1.0) for k in range(2)]


def test_after_a_stop_string_the_next_prompt_goes_on_from_the_last_state_before_it() -> None:
    bench = hybrid(next_token=forced_text(b"one two three", after=b"|"))
    prompt = [*line(50, 1), *b"\nq|"]
    request = bench.submit(prompt, n_predict=100, stop=("two",))
    bench.run()
    assert request.generations[0].content == "one "
    follow_up = bench.submit([*prompt, *b"one ", *line(5, 2)], n_predict=1)
    bench.run()
    generation = follow_up.generations[0]
    assert (generation.n_cached, computed(generation)) == (50, 3 + 4 + 5)
    assert (generation.reuse.matched, generation.reuse.limit) == (57, "no checkpoint")


def test_a_cancelled_request_leaves_its_tokens_for_the_next() -> None:
    bench = hybrid()
    prompt = line(200, 1) + line(20, 2)
    request = bench.submit(prompt, n_predict=1000)
    for _ in range(8):
        bench.loop.iterate()
    bench.loop.cancel(request)
    bench.run()
    n_held = len(bench.loop.slots[request.generations[0].slot_id].tokens)
    assert n_held > len(prompt)
    assert computed(ask(bench, [*request.generations[0].tokens[:n_held], *line(3, 3)])) == 3


@pytest.mark.parametrize("call", ["reuse_prefix", "checkpoint", "release"])
def test_a_cache_without_memory_costs_work_but_fails_nobody(call: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = hybrid(n_slots=1)

    def fails(*arguments: Any) -> Any:
        raise OutOfMemory("no memory")

    setattr(bench.engine, call, fails)
    with caplog.at_level(logging.WARNING, "pyllama.server.slot"):
        for prompt in (line(100, 1) + line(10, 2), line(100, 1) + line(20, 3), line(90, 4)):
            ask(bench, prompt, cache_prompt=True)
            ask(bench, prompt, cache_prompt=False)
    assert not any(isinstance(event, Failed) for event in bench.events)
    assert "no host memory" in caplog.text


def test_every_reuse_is_explained_in_the_verbose_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = hybrid()
    with caplog.at_level(logging.DEBUG, "pyllama.server.slot"):
        ask(bench, line(100, 1) + line(50, 2))
        ask(bench, line(100, 1) + line(30, 3))
    reasons = [record.getMessage() for record in caplog.records if "prefix reuse" in record.getMessage()]
    assert "n_past = 0 of 150, known = 0, source = nothing, checkpoint = -1, limit = not cached" in reasons[0]
    assert "states will be kept at [100]" in reasons[0]
    assert "n_past = 100 of 130, known = 101" in reasons[1]
    assert "source = own, checkpoint = 100, limit = no checkpoint" in reasons[1]


def test_the_number_of_states_does_not_grow_with_the_prompt_but_with_its_logarithm() -> None:
    bench = hybrid(n_ctx=64 * PAGE, n_batch=512)
    ask(bench, [*b"a"] * 12_000, n=1)
    assert len(bench.engine.checkpoints) < 10


def test_of_many_short_messages_the_newest_are_kept() -> None:
    bench = hybrid(checkpoints=replace(RULE, min_step=0), n_batch=512)
    prompt = [token for seed in range(60) for token in line(40, seed)]
    ask(bench, prompt, n=1)
    edited = [*prompt[: 40 * 57], *line(40, 99), *prompt[40 * 58 :]]
    assert computed(ask(bench, edited, n=1)) == 3 * 40
