"""The steps of a completion on their own: validation, log-probabilities against numpy f64, text from drawn tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama.completion import (
    LOWEST_LOGPROB,
    CompletionRequest,
    DrawnToken,
    SamplingOptions,
    collect,
    iterate,
    log_softmax_top,
    prepare,
    read_logit_bias,
    refuse_unsupported,
)
from pyllama.errors import InvalidArgument


class Bytes:
    """Token = byte; 256 ends the generation."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else b""

    def is_eog(self, token: int) -> bool:
        return token == 256


def request(**options: Any) -> CompletionRequest:
    values: dict[str, Any] = {
        "n_ctx": 100,
        "max_tokens": 16,
        "stop": None,
        "echo": False,
        "n_probs": None,
        "model": "m",
    }
    return prepare([1], "p", **(values | options))


def draw(data: bytes) -> Iterator[DrawnToken]:
    for byte in data:
        yield DrawnToken(byte, -0.5)
    yield DrawnToken(256)
    raise AssertionError("a token was taken beyond the end")


@pytest.mark.parametrize("offset", [0.0, 440.0, -440.0, 1e5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 50.0])
def test_log_softmax_matches_f64_at_any_offset(offset: float, spread: float) -> None:
    row = (np.random.default_rng(1).standard_normal(5000) * spread + offset).astype(np.float32)
    exact = row.astype(np.longdouble)
    exact = exact - exact.max()
    exact = exact - np.log(np.exp(exact).sum())
    logprob, top = log_softmax_top(row, 17, 9)
    assert logprob == pytest.approx(float(exact[17]), abs=1e-9)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:9]
    assert [token for token, _ in top] == order
    assert [value for _, value in top] == pytest.approx([float(exact[i]) for i in order], abs=1e-9)


def test_log_softmax_of_a_banned_token_is_the_lowest_f32() -> None:
    row = np.array([0.0, -np.inf, 1.0], np.float32)
    assert log_softmax_top(row, 1, 5)[0] == LOWEST_LOGPROB
    assert [token for token, _ in log_softmax_top(row, 1, 5)[1]] == [2, 0, 1]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé😀", max_size=12),
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=3), max_size=3),
    max_tokens=st.integers(1, 30),
)
def test_text_reason_and_records_agree(text: str, stops: list[str], max_tokens: int) -> None:
    asked = request(stop=stops, max_tokens=max_tokens, n_probs=0)
    deltas = list(iterate(asked, draw(text.encode()), Bytes()))
    collected = collect(deltas)
    within = text.encode()[:max_tokens].decode("utf-8", "replace")
    positions = [within.find(stop) for stop in stops if stop in within]
    expected = within[: min(positions)] if positions else within
    assert collected.text == expected
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    reached_limit = not positions and len(text.encode()) >= max_tokens
    assert collected.finish_reason == ("length" if reached_limit else "stop")
    spelled = b"".join(record.piece for record in collected.records)
    assert spelled.decode("utf-8", "replace") == expected
    assert [record.start for record in collected.records] == sorted(record.start for record in collected.records)


def test_no_token_is_drawn_beyond_the_limit_or_the_stop_string() -> None:
    def exactly(data: bytes) -> Iterator[DrawnToken]:
        for byte in data:
            yield DrawnToken(byte)
        raise AssertionError("a token was taken beyond the last one needed")

    assert collect(iterate(request(max_tokens=3), exactly(b"abc"), Bytes())).finish_reason == "length"
    assert collect(iterate(request(stop="bc"), exactly(b"abc"), Bytes())).text == "a"


def test_drawn_tokens_that_end_by_themselves_are_a_stop() -> None:
    collected = collect(iterate(request(), iter([DrawnToken(97)]), Bytes()))
    assert (collected.text, collected.finish_reason, collected.n_tokens) == ("a", "stop", 1)


def test_limit_is_the_smaller_of_the_wish_and_the_room() -> None:
    assert request(max_tokens=5).max_tokens == 5
    assert request(max_tokens=99).max_tokens == 99
    assert request(max_tokens=100).max_tokens == 99
    assert request(max_tokens=None).max_tokens == 99


def test_identifiers_differ_between_requests() -> None:
    assert request().id != request().id


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sampling_value_that_is_not_finite_is_named(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be finite"):
        SamplingOptions(**{name: value})


def test_sampling_values_are_clamped() -> None:
    options = SamplingOptions(temperature=-1, top_p=7, min_p=-2, top_k=-5)
    assert (options.temperature, options.top_p, options.min_p, options.top_k) == (0, 1, 0, 0)


def test_logit_bias_keys_and_values() -> None:
    assert read_logit_bias({"12": 1, 3: -0.5, 4: False}) == ((12, 1.0), (3, -0.5), (4, -math.inf))
    assert read_logit_bias(None) == ()
    for bad in ({"a": 1}, {1: "x"}, {1: math.inf}, {1.5: 1}, {1: None}):
        with pytest.raises(InvalidArgument, match="logit_bias"):
            read_logit_bias(bad)


@pytest.mark.parametrize(
    "option",
    [
        {"tfs_z": True},
        {"suffix": 0},
    ],
)
def test_value_that_only_resembles_the_neutral_one_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(option))}=.*not supported yet"):
        refuse_unsupported(option)
