"""Thoughts and answer kept apart: the splitter on any pieces, and chats over templates that think."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from fake_engine import BOS, END, forced_text

from pyllama.chat import reasoning_split
from pyllama.chat.answer import AnswerParser, AnswerShape, whole_answer
from pyllama.chat.reasoning_split import (
    KNOWN_TAGS,
    PromptEnd,
    ReasoningSplitter,
    ReasoningTags,
    prompt_end,
    tags_of_template,
)

TAGS = KNOWN_TAGS[0]
USER = {"role": "user", "content": "hi"}

# Opens the block in the prompt, closes it when thinking is off, strips thoughts of old turns.
OPENING = """\
{%- for m in messages -%}
    {{- m.role ~ '|' ~ (m.content.split('</think>')[-1] if m.content else '') ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'assistant|<think>\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
# Leaves the block to the model, except that it writes an empty one when thinking is off.
SILENT = OPENING.replace("'assistant|<think>\\n'", "'assistant|'").replace("'\\n</think>", "'<think>\\n\\n</think>")

SPLITS = [
    # text, the prompt opened the block, thoughts, answer
    ("<think>\nwhy\n</think>\n\nbecause", False, "why", "because"),
    ("\n <think>a</think>b", False, "a", "b"),
    ("a\n\nb\n</think>\n\nc <think>d</think>", True, "a\n\nb", "c <think>d</think>"),
    ("  plain <think>x</think>", False, "", "  plain <think>x</think>"),
    ("<think", False, "", "<think"),
    ("<think>never ends </thi", False, "never ends </thi", ""),
    ("a <b> </think </think>ok", True, "a <b> </think", "ok"),
    ("</think>\n\nat once", True, "", "at once"),
    ("<think></think>", False, "", ""),
    ("<think>\n\n</think>\n\n", False, "", ""),
    ("", True, "", ""),
    ("  \n", False, "", "  \n"),
    ("<<think>x", False, "", "<<think>x"),
    ("<think>é漢</think>\n漢é", False, "é漢", "漢é"),
]


def split(pieces: Any, is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(TAGS, is_open=is_open)
    parts = [splitter.push(piece) for piece in pieces]
    parts.append(splitter.finish())
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(("text", "is_open", "thoughts", "answer"), SPLITS)
def test_thoughts_and_answer_are_told_apart(text: str, is_open: bool, thoughts: str, answer: str) -> None:
    assert split([text], is_open) == (thoughts, answer)


@pytest.mark.parametrize(("text", "is_open", "thoughts", "answer"), SPLITS)
def test_the_split_does_not_depend_on_the_pieces(text: str, is_open: bool, thoughts: str, answer: str) -> None:
    assert split(text, is_open) == (thoughts, answer)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert split([text[:first], text[first:second], text[second:]], is_open) == (thoughts, answer)


def test_random_texts_of_tag_pieces_split_alike_however_they_are_cut() -> None:
    random_numbers = random.Random(7)
    alphabet = ["<", "think>", "</", "<think>", "</think>", "\n", " ", "a", "</thi", "é"]
    for _ in range(400):
        text = "".join(random_numbers.choices(alphabet, k=random_numbers.randrange(12)))
        is_open = random_numbers.random() < 0.5
        whole = split([text], is_open)
        assert split(text, is_open) == whole
        cuts = sorted(random_numbers.choices(range(len(text) + 1), k=3))
        assert split([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])], is_open) == whole


def test_what_may_be_shown_is_not_held_back() -> None:
    splitter = ReasoningSplitter(TAGS)
    assert splitter.push("<think>one") == ("one", "")
    assert splitter.push(" two <") == (" two", "")
    assert splitter.push("b") == (" <b", "")
    assert splitter.push("</think>yes") == ("", "yes")
    assert splitter.push("<think>") == ("", "<think>")


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        ("assistant\n<think>\n", PromptEnd.OPEN),
        ("assistant\n<think>\n\n</think>\n\n", PromptEnd.CLOSED),
        ("assistant\n", PromptEnd.PLAIN),
        ("", PromptEnd.PLAIN),
    ],
)
def test_the_end_of_the_prompt_says_where_the_model_stands(prompt: str, end: PromptEnd) -> None:
    assert prompt_end(prompt, TAGS) is end


def test_a_template_is_known_by_its_end_tag() -> None:
    assert tags_of_template("{{ m.content.split('</think>')[-1] }}") == TAGS
    assert tags_of_template("{{ m.content }} think") is None


def test_the_parts_of_a_message_are_the_sums_of_its_deltas() -> None:
    text = "<think>\nwhy\n</think>\n\nbecause"
    for shape in (
        AnswerShape(),
        AnswerShape(tags=TAGS),
        AnswerShape(tags=TAGS, given="<think>so ", echo=True),
        AnswerShape(tags=TAGS, given="<think>so "),
        AnswerShape(tags=TAGS, opens_in_thoughts=True),
    ):
        parser = AnswerParser(shape)
        deltas = [delta for character in text for delta in parser.push(character)] + parser.finish()
        assert all(len(delta) == 1 and "" not in delta.values() for delta in deltas)
        message = whole_answer(shape, text).message()
        for part in ("content", "reasoning_content"):
            assert "".join(delta.get(part, "") for delta in deltas) == message.get(part, "")


def answer(server: Any, *messages: Any, **fields: Any) -> dict[str, Any]:
    """The message of a chat; checks that the stream says the same."""
    body = {"messages": list(messages or (USER,)), "max_tokens": 200, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in server.events("/v1/chat/completions", body)[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert all(len(delta) == 1 for delta in deltas[1:-1])
    for part in ("content", "reasoning_content"):
        streamed = "".join(delta.get(part) or "" for delta in deltas)
        if fields.get("reasoning_format") != "deepseek-legacy" or part == "content":
            assert streamed == message.get(part, "")
        else:
            assert streamed == ""
    return message


def rendered(server: Any, *messages: Any, **fields: Any) -> Any:
    response = server.post("/apply-template", {"messages": list(messages or (USER,)), **fields})
    return response.json()["prompt"] if response.status_code == 200 else response


def saying(serve: Any, template: str, text: str, after: str = "|", **options: Any) -> Any:
    engine = {"next_token": forced_text(text.encode(), after=after.encode())}
    return serve(template=template, engine=engine, **options)


@pytest.mark.parametrize("fields", [{}, {"reasoning_format": "deepseek"}, {"reasoning_format": "auto"}])
def test_thoughts_have_a_part_of_their_own(serve: Any, fields: dict[str, Any]) -> None:
    server = saying(serve, SILENT, "<think>\nhm é\n</think>\n\nYes.")
    assert answer(server, **fields) == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm é"}


def test_the_request_and_the_server_choose_where_thoughts_go(serve: Any) -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    server = saying(serve, SILENT, text)
    assert answer(server, reasoning_format="none") == {"role": "assistant", "content": text}
    legacy = answer(server, reasoning_format="deepseek-legacy")
    assert legacy == {"role": "assistant", "content": text, "reasoning_content": "hm"}
    assert answer(saying(serve, SILENT, text, reasoning_format="none")) == {"role": "assistant", "content": text}
    assert answer(saying(serve, SILENT, text, parses_chat=False)) == {"role": "assistant", "content": text}


def test_a_block_that_the_prompt_opened_needs_no_start_tag(serve: Any) -> None:
    # The prompt's "<think>\n" follows the bar, so the forced text counts from there.
    server = saying(serve, OPENING, "<think>\nhm\n</think>\n\nYes.")
    assert rendered(server).endswith("assistant|<think>\n")
    assert answer(server) == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    assert answer(server, max_tokens=2) == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize("template", [OPENING, SILENT])
@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_without_thinking_the_text_is_content(serve: Any, template: str, fields: dict[str, Any]) -> None:
    """Known fault C7: a closed block in the prompt, and yet everything arrived as reasoning_content."""
    server = saying(serve, template, "<think>\n\n</think>\n\nYes.")
    assert rendered(server, **fields).endswith("assistant|<think>\n\n</think>\n\n")
    assert answer(server, **fields) == {"role": "assistant", "content": "Yes."}


def test_the_server_turns_thinking_off_and_requests_turn_it_on_again(serve: Any) -> None:
    server = serve(template=OPENING, reasoning=False)
    assert rendered(server).endswith("</think>\n\n")
    assert rendered(server, chat_template_kwargs={"enable_thinking": True}).endswith("<think>\n")
    server = serve(template=OPENING, reasoning_effort="none")
    assert rendered(server).endswith("</think>\n\n")
    server = serve(
        template="{{ reasoning_effort }} {{ preserve_reasoning }}", reasoning_effort="low", reasoning_preserve=False
    )
    assert rendered(server) == "low False"
    assert rendered(server, reasoning_effort="high") == "high False"


def test_an_assistant_message_with_thoughts_is_continued(serve: Any) -> None:
    thinking = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    said = {"role": "assistant", "content": "It is", "reasoning_content": "Let me see."}
    for template in (OPENING, SILENT):
        server = serve(template=template)
        assert rendered(server, USER, thinking).endswith("assistant|<think>\nLet me")
        assert rendered(server, USER, said).endswith("assistant|<think>\nLet me see.\n</think>\n\nIt is")
        assert rendered(server, USER, said, reasoning_effort="none").endswith("<think>\n\n</think>\n\nIt is")
        for fields in ({"reasoning_effort": "none"}, {"continue_final_message": "reasoning_content"}):
            message = thinking if "reasoning_effort" in fields else said
            assert rendered(server, USER, message, add_generation_prompt=None, **fields).status_code == 400
    content = {"role": "assistant", "content": "It is"}
    assert rendered(serve(template=OPENING), USER, content).endswith("<think>\n\n</think>\n\nIt is")
    assert rendered(serve(template=SILENT), USER, content).endswith("assistant|It is")


def test_continued_thoughts_are_thoughts_and_echo_repeats_them(serve: Any) -> None:
    server = saying(serve, OPENING, "<think>\nLet me see.\n</think>\n\nYes.")
    thinking = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    assert answer(server, USER, thinking) == {"role": "assistant", "content": "Yes.", "reasoning_content": " see."}
    spaced = {**thinking, "reasoning_content": "Let me "}
    assert answer(server, USER, spaced) == {"role": "assistant", "content": "Yes.", "reasoning_content": "see."}
    echoed = answer(server, USER, thinking, echo=True)
    assert echoed == {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}


def test_log_probabilities_cover_thoughts_too(serve: Any) -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    server = saying(serve, SILENT, text)
    body = {"messages": [USER], "max_tokens": 200, "logprobs": True, "top_logprobs": 1}
    plain = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert "".join(record["token"] for record in plain) == text
    events = server.events("/v1/chat/completions", body)[:-1]
    streamed = [event["choices"][0]["logprobs"]["content"] for event in events if "logprobs" in event["choices"][0]]
    assert [record for part in streamed for record in part] == plain


def test_tags_that_are_control_tokens_are_seen(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_split, "KNOWN_TAGS", (ReasoningTags("<s>", "</think>"),))
    tokens = [BOS, *b"hm</think>Yes.", END]

    def next_token(history: Any, sampler: Any) -> int:
        return tokens[len(history) - list(history).index(ord("|"), 4) - 1]

    server = serve(
        template="u|{# </think> #}{% for m in messages %}{{ m.content }}{% endfor %}|",
        engine={"next_token": next_token},
    )
    assert answer(server) == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
