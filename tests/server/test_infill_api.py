"""`/infill`: the layout of prompts, what is cut, refusals, and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake_engine import BOS, FakeTokenizer

from pyllama.server.errors import InvalidRequest, NotSupported
from pyllama.server.infill_prompt import InfillText, check_infill_tokens, infill_prompt, read_infill

# Control characters stand for the special tokens, so that a prompt reads as text.
PRE, SUF, MID, REP, SEP = 1, 2, 3, 4, 5


class InfillTokenizer(FakeTokenizer):
    fim_pre_id, fim_suf_id, fim_mid_id = PRE, SUF, MID


class RepositoryTokenizer(InfillTokenizer):
    fim_rep_id, fim_sep_id = REP, SEP


def layout(text: InfillText, tokenizer: Any = None, **options: Any) -> str:
    chosen = {"n_batch": 400, "n_ctx": 1000, "n_predict": -1, "suffix_first": False, **options}
    tokens = infill_prompt(text, tokenizer or InfillTokenizer(), **chosen)
    names = {PRE: "<PRE>", SUF: "<SUF>", MID: "<MID>", REP: "<REP>", SEP: "<SEP>", BOS: "<BOS>"}
    return "".join(names.get(token) or chr(token) for token in tokens)


def test_the_parts_stand_between_their_tokens() -> None:
    text = InfillText("def f(", "return x", "x):")
    assert layout(text) == "<PRE>def f(x):<SUF>return x<MID>"
    assert layout(text, suffix_first=True) == "<SUF>return x<PRE>def f(x):<MID>"
    assert layout(text, InfillTokenizer(add_bos=True)) == "<BOS><PRE>def f(x):<SUF>return x<MID>"


@pytest.mark.contract("infill 2")
def test_other_files_stand_before_the_gap() -> None:
    text = InfillText("p", "s", extras=(("a.py", "A"), ("tmp", "B")))
    assert layout(text, RepositoryTokenizer(add_bos=True)) == (
        "<REP>myproject\n<SEP>a.py\nA<SEP>tmp\nB<SEP>filename\n<BOS><PRE>p<SUF>s<MID>"
    )
    assert layout(text) == "\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB<PRE>p<SUF>s<MID>"


def test_every_part_keeps_what_is_nearest_to_the_gap() -> None:
    text = InfillText("0123456789" * 10, "abcdefghij" * 10, "xy", extras=(("n", "E" * 50 + "F" * 50),))
    cut = layout(text, n_batch=40, n_ctx=100, n_predict=20)
    assert cut == "F" * 20 + "<PRE>" + "0123456789" * 3 + "xy<SUF>abcdef<MID>"
    assert layout(text, n_batch=40, n_ctx=60, n_predict=20).startswith("<PRE>")
    assert layout(text, n_batch=40, n_ctx=43, n_predict=-1).startswith("F<PRE>")
    assert layout(text, n_batch=40, n_ctx=42, n_predict=-1).startswith("<PRE>")
    assert "<SUF><MID>" in layout(InfillText("p", "s", "t" * 50), n_batch=40)


def test_special_tokens_in_the_files_are_text() -> None:
    assert layout(InfillText("</s>", "</s>")) == "<PRE></s><SUF></s><MID>"


def test_a_model_without_the_tokens_says_which(serve: Any) -> None:
    class Partial(FakeTokenizer):
        fim_pre_id = PRE

    with pytest.raises(NotSupported) as refused:
        check_infill_tokens(Partial())
    assert str(refused.value) == (
        "Infill is not supported by this model: suffix token is missing. middle token is missing. "
    )
    assert serve().post("/infill", {"input_prefix": "", "input_suffix": ""}).status_code == 501


@pytest.mark.contract("infill 3")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_suffix": ""}, "input_prefix"),
        ({"input_prefix": ""}, "input_suffix"),
        ({"input_prefix": 1, "input_suffix": ""}, "input_prefix"),
        ({"input_prefix": "", "input_suffix": "", "prompt": [1]}, "prompt"),
        ({"input_prefix": "", "input_suffix": "", "input_extra": {}}, "input_extra"),
        ({"input_prefix": "", "input_suffix": "", "input_extra": [{}]}, r"input_extra\[0\].text"),
        ({"input_prefix": "", "input_suffix": "", "input_extra": [{"text": "", "filename": 1}]}, "filename"),
        ({"input_prefix": "", "input_suffix": "", "input_extra": [{"filename": "a"}]}, r"input_extra\[0\].text"),
        ({"input_prefix": "", "input_suffix": "", "input_extra": [{"text": 1}]}, r"input_extra\[0\].text"),
    ],
)
def test_bad_fields_are_refused_by_name(body: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_infill(body)


@pytest.mark.contract("infill 1")
def test_results_are_native_and_a_stream_sums_up_to_the_plain_answer(serve: Any) -> None:
    def middle(history: Sequence[int], sampler: Any) -> int:
        n_done = len(history) - 1 - list(history).index(MID)
        return b"middle"[n_done] if n_done < 6 else 257

    server = serve(n_ctx=4096, engine={"next_token": middle}, tokenizer_class=InfillTokenizer)
    body = {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "other"}], "n_predict": 20}
    plain = server.post("/infill", body).json()
    assert (plain["content"], plain["stop_type"]) == ("middle", "eos")
    assert plain["tokens_evaluated"] == len("\n\n--- snippet ---\n\nother") + 5
    events = server.events("/infill", body)
    assert "[DONE]" not in events
    assert "".join(event["content"] for event in events) == "middle"
    assert server.post("/infill", {**body, "input_prefix": None}).status_code == 400
