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
        length = economy.best_length(acceptance, 1, most)
        if length:
            seconds += draft_seconds * length
            economy.on_draft(length, draft_seconds * length)
        step = 1 + per_row * length
        seconds += step
        economy.on_step(1 + length, step * rng.uniform(0.95, 1.05))
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
