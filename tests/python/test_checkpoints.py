"""Where states are kept: at borders of messages, at pages that lie ever farther from the end, near the end."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pyllama.checkpoints import MOST_BORDERS, PAGE_TOKENS, TAIL_TOKENS, CheckpointRule, checkpoint_rule

OPEN, CLOSE, TEXT = 1, 2, 9
RULE = CheckpointRule(frozenset({OPEN}), min_step=8192)


def prompt(*lengths: int) -> list[int]:
    """Messages of these lengths, each of which begins with the opening token."""
    return [token for length in lengths for token in (OPEN, *[TEXT] * (length - 1))]


class Words:
    """A tokenizer for which some texts are one token."""

    bos_id: int | None = None
    eog_ids = frozenset({CLOSE})

    def __init__(self, **tokens: int) -> None:
        self.tokens = tokens

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert parse_special
        assert not add_special
        return [self.tokens[text]] if text in self.tokens else [TEXT] * len(text)


def test_a_short_prompt_is_cut_at_its_last_two_messages() -> None:
    assert RULE.positions(prompt(20, 30, 40, 5)) == [50, 90]


def test_a_text_of_one_message_within_a_page_is_not_cut() -> None:
    assert RULE.positions(prompt(PAGE_TOKENS)) == []
    assert RULE.positions([TEXT] * PAGE_TOKENS) == []
    assert RULE.positions([TEXT]) == RULE.positions([]) == []


def test_without_a_border_in_the_last_page_a_state_is_kept_near_the_end() -> None:
    assert RULE.positions([TEXT] * 300) == [300 - TAIL_TOKENS]
    assert RULE.positions(prompt(50, 10, 300)) == [50, 60, 360 - TAIL_TOKENS]
    assert RULE.positions(prompt(50, 10, 200)) == [50, 60]


def test_pages_lie_at_growing_distances_from_the_end_and_none_beside_a_border() -> None:
    assert RULE.positions([TEXT] * 5000) == [768, 2816, 3840, 4352, 4608, 5000 - TAIL_TOKENS]
    positions = RULE.positions(prompt(4400, 590, 10))
    assert positions == [768, 2816, 3840, 4400, 4608, 4990]


def test_older_borders_count_when_they_are_a_step_apart_and_only_the_newest_of_them() -> None:
    rule = CheckpointRule(frozenset({OPEN}), min_step=100)
    borders = [p for p in rule.positions(prompt(*[60] * 30)) if p % PAGE_TOKENS]
    assert borders == [29 * 60 - 60 - 120 * k for k in range(6, 0, -1)] + [28 * 60, 29 * 60]
    assert len(borders) == MOST_BORDERS
    unbounded = CheckpointRule(frozenset({OPEN}), min_step=0)
    assert unbounded.positions(prompt(*[10] * 20)) == [10 * k for k in range(12, 20)]


def test_only_the_part_that_is_computed_is_cut_but_its_beginning_may_be_kept() -> None:
    whole = prompt(300, 300, 300)
    assert RULE.positions(whole[310:], 310) == [600, 896]
    assert RULE.positions(whole[600:], 600) == [600, 896]
    assert RULE.positions(whole[899:], 899) == [899]


def test_a_state_may_also_be_kept_behind_a_token_that_ends_a_message() -> None:
    rule = CheckpointRule(frozenset(), frozenset({CLOSE}))
    assert rule.positions([TEXT] * 10 + [CLOSE] + [TEXT] * 5) == [11]
    assert rule.positions([TEXT] * 10 + [CLOSE]) == []  # nothing would be left to compute


@pytest.mark.parametrize("seed", range(20))
def test_positions_ascend_leave_a_token_to_compute_and_bound_what_a_change_costs(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        n = rng.choice([rng.randrange(1, 600), rng.randrange(1, 40000)])
        tokens = [OPEN if rng.random() < 0.003 else TEXT for _ in range(n)]
        start = rng.choice([0, rng.randrange(0, 40000)])
        positions = CheckpointRule(frozenset({OPEN}), min_step=rng.choice([0, 500, 8192])).positions(tokens, start)
        end = start + n
        assert all(a < b for a, b in pairwise(positions))
        assert all(max(start, 1) <= position < end for position in positions)
        assert len(positions) <= MOST_BORDERS + n.bit_length() + 1
        # A change `distance` tokens before the end costs no more than another three times that, or two pages.
        for change in (end - 1, *(rng.randrange(start, end) for _ in range(5))):
            before = max([p for p in positions if p <= change], default=start)
            assert change - before <= max(2 * PAGE_TOKENS, 3 * (end - change))
        last_borders = [start + i for i, token in enumerate(tokens) if token == OPEN and start + i > 0][-2:]
        assert set(last_borders) <= set(positions)


def test_the_tokens_that_open_messages_are_found_in_the_vocabulary() -> None:
    rule = checkpoint_rule(Words(**{"<|im_start|>": 7, "<|user|>": 8}), 55)
    assert (rule.opening, rule.ending, rule.min_step) == ({7, 8}, frozenset(), 55)


def test_without_such_tokens_messages_are_taken_to_end_with_an_end_token() -> None:
    words = Words()
    assert checkpoint_rule(words) == CheckpointRule(frozenset(), frozenset({CLOSE}))
    words.bos_id = 5
    assert checkpoint_rule(words) == CheckpointRule(frozenset({5}), frozenset({CLOSE}))
