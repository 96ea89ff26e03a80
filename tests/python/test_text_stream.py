"""TextStream against a plain model that sees the whole text at once: UTF-8 hold-back, stop strings, any split."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama.text_stream import TextStream


def cut_at_once(data: bytes, stops: list[str]) -> str:
    """The definition: decode everything, cut before the leftmost stop string."""
    text = data.decode("utf-8", "replace")
    positions = [text.find(stop) for stop in stops if stop in text]
    return text[: min(positions)] if positions else text


def run(pieces: list[bytes], stops: list[str]) -> tuple[str, TextStream]:
    """The streamed text, as a client would put it together."""
    stream = TextStream(stops)
    shown = ""
    for piece in pieces:
        shown += stream.push(piece)
        assert stream.text.startswith(shown)
        if stream.matched is not None:
            break
        assert stream.text == shown + stream.pending
    shown += stream.finish()
    return shown, stream


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


# Few letters, so that stop strings overlap the text and each other; characters of 1 to 4 bytes.
letters = st.text(alphabet="ab", max_size=24) | st.text(alphabet="abé你😀", max_size=24)
stop = st.text(alphabet="ab", min_size=2, max_size=7) | st.text(alphabet="abé你😀", min_size=1, max_size=4)
stop_lists = st.lists(stop, max_size=4)
cut_lists = st.lists(st.integers(0, 1000), max_size=12)


@settings(max_examples=1500, deadline=None)
@given(text=letters, stops=stop_lists, cuts=cut_lists)
def test_any_split_of_the_bytes_gives_the_text_cut_at_once(text: str, stops: list[str], cuts: list[int]) -> None:
    data = text.encode()
    expected = cut_at_once(data, stops)
    shown, stream = run(split(data, cuts), stops)
    assert shown == expected
    assert stream.text == expected
    assert (stream.matched is not None) == any(stop in text for stop in stops)
    if stream.matched is not None:
        assert text.startswith(expected + stream.matched)


@settings(max_examples=500, deadline=None)
@given(
    data=st.binary(max_size=24),
    stops=st.lists(st.text(alphabet="a\ufffd\x00é", min_size=1, max_size=3), max_size=3),
    cuts=cut_lists,
)
def test_bytes_that_are_not_utf8_decode_the_same_for_any_split(data: bytes, stops: list[str], cuts: list[int]) -> None:
    shown, stream = run(split(data, cuts), stops)
    assert shown == stream.text == cut_at_once(data, stops)


@settings(max_examples=500, deadline=None)
@given(text=letters, stops=stop_lists)
def test_shown_text_is_never_longer_than_what_any_continuation_allows(text: str, stops: list[str]) -> None:
    """What was pushed so far, continued by any stop string's end, may not have leaked that stop string's beginning."""
    stream = TextStream(stops)
    shown = stream.push(text.encode())
    if stream.matched is None:
        for stop in stops:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    assert len(shown) <= len(text) - length


def test_nothing_is_held_back_without_a_reason() -> None:
    stream = TextStream(["END"])
    assert stream.push(b"plain text") == "plain text"
    assert stream.push(b" E") == " "
    assert stream.pending == "E"
    assert stream.push(b"at") == "Eat"
    assert stream.pending == ""


def test_stop_string_across_tokens_shows_only_the_text_before_it() -> None:
    stream = TextStream(["own fox"])
    assert [stream.push(piece) for piece in (b"The quick", b" br", b"own", b" fo", b"x jumps")] == [
        "The quick",
        " br",
        "",
        "",
        "",
    ]
    assert stream.matched == "own fox"
    assert stream.finish() == ""
    assert stream.text == "The quick br"


def test_half_a_stop_string_that_comes_to_nothing_is_released() -> None:
    stream = TextStream(["own fox"])
    assert "".join(stream.push(piece) for piece in (b"br", b"own", b" dog")) == "brown dog"
    assert stream.push(b" own f") == " "
    assert stream.finish() == "own f"
    assert stream.matched is None


def test_incomplete_character_waits_for_its_last_byte() -> None:
    stream = TextStream()
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert stream.push(b"caf" + first) == "caf"
    assert stream.pending_bytes == first
    assert stream.push(second) == "é"
    assert stream.pending_bytes == b""


def test_incomplete_character_at_the_end_becomes_the_replacement_character() -> None:
    for stops in ([], ["zz"]):
        stream = TextStream(stops)
        assert stream.push("ok😀".encode()[:-1]) == "ok"
        assert stream.finish() == "\ufffd"
        assert stream.text == "ok\ufffd"


def test_dropping_the_held_text_hides_it_from_the_stream_but_not_from_the_text() -> None:
    stream = TextStream(["STOP"])
    assert stream.push(b"x ST") == "x "
    assert stream.finish(drop_held=True) == ""
    assert stream.text == "x ST"
    unstopped = TextStream()
    unstopped.push("y😀".encode()[:3])
    assert unstopped.finish(drop_held=True) == ""
    assert unstopped.text == "y\ufffd"


def test_earliest_match_wins_and_equal_positions_take_the_first_in_the_list() -> None:
    assert run([b"hello world"], ["world", "lo"])[1].matched == "lo"
    assert run([b"hello world"], ["lo w", "lo"])[1].matched == "lo w"
    assert run([b"hello world"], ["lo", "lo w"])[1].matched == "lo"


def test_inner_stop_string_waits_for_the_outer_one_that_began_earlier() -> None:
    for last, text, matched in ((b"c", "x", "abc"), (b"d", "xa", "b")):
        stream = TextStream(["b", "abc"])
        assert stream.push(b"xab") == "x"
        assert stream.matched is None
        stream.push(last)
        assert (stream.text, stream.matched) == (text, matched)
    ended = TextStream(["b", "abc"])
    assert ended.push(b"xab") == "x"
    assert ended.finish() == "a"
    assert (ended.text, ended.matched) == ("xa", "b")


@pytest.mark.parametrize(
    ("text", "stop"), [("xaaab", "aab"), ("ababac", "abac"), ("aabaabaaab", "aabaaab"), ("abcabcabd", "abcabd")]
)
def test_stop_string_whose_beginning_repeats_is_found(text: str, stop: str) -> None:
    expected = text[: text.index(stop)]
    assert run([text.encode()], [stop])[0] == expected
    assert run([character.encode() for character in text], [stop])[0] == expected


def test_empty_stop_string_matches_at_once() -> None:
    stream = TextStream(["never", ""])
    assert stream.matched is None
    assert stream.push(b"abc") == ""
    assert (stream.matched, stream.text) == ("", "")


def test_one_string_is_a_list_of_one() -> None:
    assert run([b"abcabc"], "ca")[0] == "ab"  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [[b"x"], [None], [1]])
def test_stop_that_is_not_a_string_is_a_type_error(stops: list[object]) -> None:
    with pytest.raises(TypeError, match="stop strings must be str, found"):
        TextStream(stops)  # type: ignore[arg-type]


def test_push_after_finish_is_refused() -> None:
    stream = TextStream()
    stream.finish()
    with pytest.raises(RuntimeError, match="finish"):
        stream.push(b"x")


def test_time_stays_linear_for_long_and_self_similar_stop_strings() -> None:
    """A hostile request: the text is always one character short of a long stop string."""
    stream = TextStream(["a" * 3000 + "b", "a" * 2000 + "c"])
    started = time.perf_counter()
    for _ in range(30_000):
        stream.push(b"a")
    elapsed = time.perf_counter() - started
    assert stream.matched is None
    assert len(stream.pending) == 3000
    assert elapsed < 5.0, f"30000 pushes took {elapsed:.1f} s"
