"""One generation fed token by token: text, hold-back and stop reasons for tokens of any bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pyllama.server.generation import Generation, IndentGuard, TokenText
from pyllama.server.generation_params import GenerationParams
from pyllama.server.requests import ActiveRequest

END = 1000


class Pieces:
    """A vocabulary of given pieces."""

    eog_ids = frozenset({END})

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def end_piece(self, token: int) -> bytes:
        return b""


def feed(pieces: list[bytes], **params: object) -> tuple[Generation, list[TokenText]]:
    generation = Generation(
        ActiveRequest(),
        0,
        prompt=[0],
        params=replace(GenerationParams(stream=True), **params),
        sampler=None,
        vocabulary=Pieces(pieces),  # type: ignore[arg-type]
        n_ctx=10_000,
        n_predict_limit=-1,
    )
    events = []
    for token in [*range(len(pieces)), END]:
        events.append(generation.on_token(token, 0.0, (), float(token)))
        if generation.is_done:
            break
    return generation, events


def shown(events: list[TokenText]) -> str:
    return "".join(event.text for event in events if event.shows)


def test_text_before_an_incomplete_character_comes_with_the_token_that_completes_it() -> None:
    generation, events = feed([b"a", b" \xf0\x9f", b"\x8c\x8d\n"])
    assert [(event.text, event.shows) for event in events] == [("a", True), ("", False), (" 🌍\n", True), ("", True)]
    assert generation.content == "a 🌍\n"


def test_an_incomplete_character_at_the_end_is_replaced_in_both_forms() -> None:
    generation, events = feed([b"a", b"b\xf0\x9f"], n_predict=2)
    assert generation.content == shown(events) == "ab\ufffd"


@pytest.mark.parametrize("seed", range(200))
def test_streamed_text_is_the_plain_text_and_does_not_depend_on_the_tokens(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab €🌍\n  x", k=60))
    data = text.encode()
    stops = tuple("".join(rng.choices("ab €🌍\n", k=rng.randrange(1, 4))) for _ in range(rng.randrange(3)))
    n_indent = rng.choice([0, 0, 1, 3])
    contents = set()
    for _ in range(5):
        cuts = sorted(rng.sample(range(1, len(data)), rng.randrange(1, 40)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        generation, events = feed(pieces, stop=stops, n_indent=n_indent)
        assert shown(events) == generation.content
        contents.add(generation.content)
    assert len(contents) == 1, f"seed {seed}"
    content = contents.pop()
    assert text.startswith(content)
    assert not any(stop in content for stop in stops)


def test_an_empty_stop_string_ends_at_once() -> None:
    generation, _ = feed([b"abc", b"d"], stop=("",))
    assert (generation.content, generation.stop_type, generation.n_decoded) == ("", "word", 1)


def test_the_end_token_wins_over_the_budget_it_meets() -> None:
    generation, _ = feed([b"a"], n_predict=2)
    assert (generation.stop_type, generation.n_decoded) == ("eos", 2)


def test_the_indent_guard_passes_lines_that_are_deep_enough_and_nothing_after_a_cut() -> None:
    guard = IndentGuard(2)
    assert guard.push("head\n  a\n") == "head\n  a\n"
    assert guard.push("  ") == ""
    assert guard.push("b\n c") == "  b\n"
    assert guard.is_cut
    assert guard.push("more") == ""
    assert guard.finish() == ""
