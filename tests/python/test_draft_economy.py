"""The economy of drafts, simulated: lengths that pay, drafts that are left alone, and what finding out costs."""

from __future__ import annotations

import random

import pytest

from pyllama.draft_economy import Acceptance, DraftEconomy


def simulate(
    rate: float,
    *,
    per_row: float,
    draft_seconds: float = 0.0,
    n_tokens: int = 4000,
    most: int = 15,
    n_each: int = 4000,
    noise: float = 0.1,
) -> tuple[float, float]:
    """(speed, mean length of drafts): tokens per second where a step takes 1 + per_row for each row after the first.

    n_each: tokens of a sequence, after which another one begins.
    """
    rng = random.Random(1)
    economy, acceptance = DraftEconomy(), Acceptance()
    seconds, tokens, rounds, drafted = 0.0, 0, 0, 0
    while tokens < n_tokens:
        if tokens // n_each > (tokens - 1) // n_each:
            acceptance = Acceptance()
        length = 0 if economy.wants_plain_step(1) else economy.best_length(acceptance, 1, most)
        if length:
            seconds += draft_seconds * length
            economy.on_draft(length, draft_seconds * length)
        step = 1 + per_row * length
        seconds += step
        economy.on_step(1 + length, step * rng.uniform(1 - noise / 2, 1 + noise / 2))
        n_accepted = 0
        while n_accepted < length and rng.random() < rate:
            n_accepted += 1
        if length:
            acceptance.add(length, n_accepted)
            economy.on_verified(length, n_accepted)
        tokens += 1 + n_accepted
        rounds += 1
        drafted += length
    return tokens / seconds, drafted / rounds


@pytest.mark.parametrize("n_each", [20, 100, 4000])
@pytest.mark.parametrize(("per_row", "draft_seconds"), [(0.9, 0.0), (0.3, 0.0), (0.3, 0.3), (0.05, 0.4)])
def test_drafts_that_never_stand_cost_less_than_a_twentieth(per_row: float, draft_seconds: float, n_each: int) -> None:
    """Also where every request is a short one."""
    speed, _ = simulate(0.0, per_row=per_row, draft_seconds=draft_seconds, n_each=n_each)
    assert speed > 0.95


def test_a_request_that_repeats_itself_among_others_that_do_not_is_found_out_about() -> None:
    economy = DraftEconomy()
    economy.on_step(1, 1.0)
    economy.on_step(3, 1.5)

    def n_drafted(rate: float) -> int:
        acceptance, found = Acceptance(), 0
        for _ in range(400):
            if length := economy.best_length(acceptance, 1, 8):
                n_accepted = length if rate else 0
                acceptance.add(length, n_accepted)
                economy.on_verified(length, n_accepted)
            found += length
        return found

    assert sum(n_drafted(0.0) for _ in range(5)) < 100
    assert n_drafted(1.0) > 400
    assert n_drafted(0.0) < 60


def test_a_busy_machine_does_not_make_bad_drafts_pay() -> None:
    """Steps take up to twice their time at random, and so a longer one now and then less than a short one."""
    speed, length = simulate(0.0, per_row=0.9, noise=1.0, draft_seconds=0.2)
    assert speed > 0.95
    assert length < 0.05


def test_drafts_that_always_stand_grow_as_long_as_they_may() -> None:
    speed, length = simulate(1.0, per_row=0.05)
    assert length > 13
    assert speed > 6


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("per_row", [0.05, 0.2, 0.6])
def test_the_speed_is_near_that_of_the_best_fixed_length(rate: float, per_row: float) -> None:
    best = max(sum(rate**i for i in range(length + 1)) / (1 + per_row * length) for length in range(16))
    for n_each in (200, 4000):
        speed, _ = simulate(rate, per_row=per_row, n_each=n_each)
        assert speed > 0.9 * best, n_each


def test_a_sequence_that_turns_repetitive_is_drafted_again() -> None:
    economy, acceptance = DraftEconomy(), Acceptance()
    economy.on_step(1, 1.0)
    economy.on_step(3, 1.5)
    for _ in range(500):
        if length := economy.best_length(acceptance, 1, 8):
            acceptance.add(length, 0)
    lengths = []
    for _ in range(400):
        lengths.append(economy.best_length(acceptance, 1, 8))
        if lengths[-1]:
            acceptance.add(lengths[-1], lengths[-1])
    assert sum(map(bool, lengths[-60:])) > 50


def test_several_sequences_learn_what_a_step_without_drafts_takes() -> None:
    """The first such step took ten times as long as the others; of three of four sequences no draft ever stands."""
    economy, rng = DraftEconomy(), random.Random(2)
    sequences = [Acceptance() for _ in range(4)]
    n_tokens, seconds, is_first = 0, 0.0, True
    for _ in range(3000):
        lengths = [0] * 4
        if not economy.wants_plain_step(4):
            lengths = [economy.best_length(acceptance, 4, 7) for acceptance in sequences]
        if any(lengths):
            economy.on_draft(sum(lengths), 0.02 * sum(lengths))
        step = (1 + 0.2 * (3 + sum(lengths))) * (10 if is_first else 1)
        seconds += step + 0.02 * sum(lengths)
        economy.on_step(4 + sum(lengths), step)
        is_first = False
        for number, (acceptance, length) in enumerate(zip(sequences, lengths, strict=True)):
            n_accepted = 0
            while number == 0 and n_accepted < length and rng.random() < 0.8:
                n_accepted += 1
            if length:
                acceptance.add(length, n_accepted)
                economy.on_verified(length, n_accepted)
            n_tokens += 1 + n_accepted
    assert n_tokens / seconds > 4 / 1.6  # without any drafts
