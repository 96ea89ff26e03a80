"""`/v1/messages` over the fake engine: translation, shapes, order of events, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import forced_text
from support_app import THINKING_TEMPLATE, parse_named_events

from pyllama.errors import InvalidArgument
from pyllama.server.anthropic_request import chat_body
from pyllama.server.errors import InvalidRequest, ServerFault

USER = {"role": "user", "content": "hi"}
PATH = "/v1/messages"


def message(server: Any, **fields: Any) -> Any:
    return server.post(PATH, {"messages": [USER], "max_tokens": 4, **fields})


def stream(server: Any, **fields: Any) -> list[tuple[str, Any]]:
    response = message(server, stream=True, **fields)
    assert response.status_code == 200, response.text
    return parse_named_events(response.text)


@pytest.mark.contract("anthropic 1")
def test_a_message_has_its_keys_in_order(serve: Any) -> None:
    server = serve()
    result = message(server).json()
    assert list(result) == ["id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"]
    assert result["id"].startswith("msg_")
    assert (result["type"], result["role"], result["model"]) == ("message", "assistant", "fake")
    assert [list(block) for block in result["content"]] == [["type", "text"]]
    assert len(result["content"][0]["text"]) == 4
    assert (result["stop_reason"], result["stop_sequence"]) == ("max_tokens", None)
    n_prompt = len("user: hi\nassistant:")
    assert result["usage"] == {"cache_read_input_tokens": 0, "input_tokens": n_prompt, "output_tokens": 4}


def test_cached_tokens_are_not_counted_as_input(serve: Any) -> None:
    server = serve()
    first = message(server).json()["usage"]
    again = message(server).json()["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["cache_read_input_tokens"] + again["input_tokens"] == first["input_tokens"]


@pytest.mark.contract("anthropic 3")
@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_stream_has_the_events_of_one_text_block_and_the_plain_answers_text(serve: Any, length: int) -> None:
    server = serve(engine={"next_token": forced_text("Grüße 🙂".encode()[:length], after=b":")})
    fields = {"messages": [{"role": "user", "content": ""}], "max_tokens": 30}
    plain = message(server, **fields).json()
    events = stream(server, **fields)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    n_deltas = names.count("content_block_delta")
    block = ["content_block_start", *["content_block_delta"] * n_deltas, "content_block_stop"] if n_deltas else []
    assert names == ["message_start", *block, "message_delta", "message_stop"]
    assert (n_deltas > 0) == (length > 0)
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert [{"type": "text", "text": text}] * bool(text) == plain["content"]
    start = events[0][1]["message"]
    assert list(start) == list(plain)
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    by_name = dict(events)
    assert by_name["message_delta"]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert by_name["message_delta"]["usage"] == {"output_tokens": plain["usage"]["output_tokens"]}
    assert by_name["message_stop"] == {"type": "message_stop"}
    if block:
        assert by_name["content_block_start"]["content_block"] == {"type": "text", "text": ""}
        assert {data["index"] for name, data in events if name.startswith("content_block")} == {0}


@pytest.mark.contract("anthropic 10")
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_sequence_ends_the_text_and_is_named(serve: Any, is_stream: bool) -> None:
    server = serve(engine={"next_token": forced_text(b"The quick brown fox", after=b":")})
    fields = {"messages": [{"role": "user", "content": ""}], "max_tokens": 50, "stop_sequences": ["zzz", "own fox"]}
    if is_stream:
        events = stream(server, **fields)
        text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
        end = dict(events)["message_delta"]["delta"]
    else:
        end = message(server, **fields).json()
        text = end["content"][0]["text"]
    assert text == "The quick br"
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "own fox")


def test_only_the_fields_of_this_api_reach_the_sampler() -> None:
    body = {"messages": [USER], "temperature": 0.5, "top_k": 3, "top_p": 0.1, "stream": True, "id_slot": 3, "n": 2}
    assert chat_body(body) == {
        "temperature": 0.5, "top_k": 3, "top_p": 0.1, "stream": True, "messages": [USER], "max_tokens": 4096,
    }  # fmt: skip


@pytest.mark.contract("anthropic 2")
def test_system_prompts_go_first_and_a_billing_line_becomes_constant() -> None:
    def system(value: Any) -> Any:
        first = chat_body({"system": value, "messages": [USER]})["messages"][0]
        assert first["role"] == "system"
        return first["content"]

    assert system("be brief") == "be brief"
    assert system([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]) == "ab"
    lines = [f"x-anthropic-billing-header: v=2; cch={value}; end" for value in ("1a2b", "ffff")]
    assert system(lines[0]) == system([{"type": "text", "text": lines[1]}]) != lines[0]
    assert system("text with cch=1a2b") == "text with cch=1a2b"


def test_blocks_of_earlier_turns_become_chat_messages() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "so?"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "is_error": True}]},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert chat_body({"messages": turns})["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "look"}],
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "user", "content": [{"type": "text", "text": "so?"}]},
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
    ]


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ({}, ServerFault, "'messages' is required"),
        ({"messages": "x"}, InvalidRequest, "array"),
        ({"messages": [5]}, InvalidRequest, r"messages\[0\]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, InvalidRequest, "robot"),
        ({"messages": [{"role": "user"}]}, InvalidRequest, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, InvalidRequest, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ServerFault, "image input"),
        ({"messages": [USER], "tools": [{}]}, InvalidRequest, r"tools\[0\].name"),
        ({"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, InvalidRequest, "bash_20250124"),
        (
            {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": "many"}},
            InvalidRequest,
            "thinking.budget_tokens",
        ),
        (
            {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": -1}},
            InvalidRequest,
            "thinking.budget_tokens",
        ),
        (
            {"messages": [USER], "tools": [{"name": "f"}], "tool_choice": {"type": "tool"}},
            InvalidRequest,
            "tool_choice",
        ),
        ({"messages": [USER], "stop_sequences": "x"}, InvalidRequest, "stop_sequences"),
        ({"messages": [USER], "system": [{"type": "image"}]}, ServerFault, "image input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        chat_body(body)


def test_errors_have_the_apis_envelope(serve: Any) -> None:
    server = serve()
    for fields, status, kind in (
        ({"messages": None}, 500, "server_error"),
        ({"temperature": "hot"}, 400, "invalid_request_error"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 2000}], "stream": True}, 400, "exceed_context_size_error"),
    ):
        response = message(server, **fields)
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["error"]["message"]
    assert server.client.post(PATH, content=b"{").json()["type"] == "error"
    assert message(server, thinking={"type": "disabled"}, metadata={"user_id": "me"}).status_code == 200


def test_a_failure_in_a_stream_is_an_error_event_and_the_last(serve: Any) -> None:
    server = serve(engine={"step_seconds": 0.05})  # so that the stream has begun when the step fails

    def breaks(history: Any, sampler: Any) -> int:
        if bytes(history).endswith(b"xxxx"):
            raise InvalidArgument("broken on purpose")
        return ord("x")

    server.engine.next_token = breaks
    events = stream(server, max_tokens=50)
    assert [name for name, _ in events].count("error") == 1
    name, data = events[-1]
    assert (name, data["type"], data["error"]["message"]) == ("error", "error", "broken on purpose")


@pytest.mark.contract("anthropic 4")
def test_tokens_are_counted_as_the_answer_counts_them(serve: Any) -> None:
    server = serve()
    body = {"messages": [USER], "system": "be brief"}
    counted = server.post(PATH + "/count_tokens", body)
    assert json.loads(counted.text) == {"input_tokens": len("system: be brief\nuser: hi\nassistant:")}
    assert message(server, **body).json()["usage"]["input_tokens"] == counted.json()["input_tokens"]
    assert server.post(PATH + "/count_tokens", {}).status_code == 500


def test_a_last_assistant_message_is_continued(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"and so on", after=b"|")})
    answer = message(server, messages=[USER, {"role": "assistant", "content": "first|"}], max_tokens=40).json()
    assert answer["content"][0]["text"] == "and so on"


@pytest.mark.parametrize("text", ["<think>\nwhy 🙂\n</think>\n\nbecause", "<think>cut", "<think>only</think>", "plain"])
def test_thoughts_are_a_block_of_their_own_before_the_text(serve: Any, text: str) -> None:
    server = serve(template=THINKING_TEMPLATE, engine={"next_token": forced_text(text.encode(), after=b":")})
    fields = {"messages": [{"role": "user", "content": ""}], "max_tokens": 60, "thinking": {"type": "enabled"}}
    content = message(server, **fields).json()["content"]
    expected = {
        "<think>\nwhy 🙂\n</think>\n\nbecause": [("thinking", "why 🙂"), ("text", "because")],
        "<think>cut": [("thinking", "cut")],
        "<think>only</think>": [("thinking", "only")],
        "plain": [("text", "plain")],
    }[text]
    assert [(block["type"], block[block["type"]]) for block in content] == expected
    assert all(block["signature"] == "" for block in content if block["type"] == "thinking")
    blocks: list[dict[str, str]] = []
    for name, data in stream(server, **fields)[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"])
            continue
        assert data["index"] == len(blocks) - 1
        if name == "content_block_delta":
            kind = data["delta"]["type"].removesuffix("_delta")
            blocks[-1][kind] += data["delta"][kind]
            is_signed = kind == "signature"
        else:
            assert name == "content_block_stop"
            assert is_signed == (blocks[-1]["type"] == "thinking")
    assert blocks == content


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "description": "Weather of a place", "input_schema": CITY}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🙂"}}\n</tool_call>'


def test_tools_are_shown_to_the_chat_layer() -> None:
    function = {"name": "weather", "description": "Weather of a place", "parameters": TOOLS[0]["input_schema"]}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = chat_body({"messages": [USER], "tools": TOOLS, "tool_choice": choice})
    assert body["tools"] == [{"type": "function", "function": function}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)
    named = {"type": "function", "function": {"name": "weather"}}
    for kind, expected in (("any", "required"), ("tool", named), ("none", "none"), ("other", None)):
        choice = {"type": kind, "name": "weather"}
        assert chat_body({"messages": [USER], "tools": TOOLS, "tool_choice": choice}).get("tool_choice") == expected


@pytest.mark.contract("anthropic 5", "anthropic 8", "anthropic 12")
@pytest.mark.parametrize("text", [CALL, f"<think>hm</think>I look.\n{CALL}\n{CALL}", "no call"])
def test_calls_are_blocks_and_the_streams_blocks_are_the_plain_answers(serve: Any, text: str) -> None:
    server = serve(
        n_ctx=4096,
        template=THINKING_TEMPLATE.replace("assistant:", "assistant^") + "{# <tool_call> #}",
        engine={"next_token": forced_text(text.encode(), after=b"^")},
    )
    fields = {"max_tokens": 1000, "tools": TOOLS}
    plain = message(server, **fields).json()
    blocks: list[Any] = []
    events = stream(server, **fields)
    for name, data in events[1:-2]:
        if name == "content_block_start":
            blocks.append(data["content_block"])
        elif name == "content_block_delta" and data["delta"]["type"] == "input_json_delta":
            blocks[-1]["input"] = (blocks[-1]["input"] or "") + data["delta"]["partial_json"]
        elif name == "content_block_delta":
            kind = data["delta"]["type"].removesuffix("_delta")
            blocks[-1][kind] += data["delta"][kind]
        assert data["index"] == len(blocks) - 1
    calls = [block for block in blocks if block["type"] == "tool_use"]
    for block in calls:
        block["input"] = json.loads(block["input"])
    plain_calls = [block for block in plain["content"] if block["type"] == "tool_use"]
    assert len(calls) == text.count("<tool_call>")
    assert all(call["input"] == {"city": "Paris 🙂"} and call["name"] == "weather" for call in calls)
    assert len({call["id"] for call in calls + plain_calls}) == 2 * len(calls)
    for block in calls + plain_calls:
        del block["id"]
    assert blocks == plain["content"]
    reason = "tool_use" if calls else "end_turn"
    assert plain["stop_reason"] == dict(events)["message_delta"]["delta"]["stop_reason"] == reason


# Renders thoughts of every turn, and calls and results of tools.
REMEMBERING = """\
{%- for m in messages -%}
    {{- m.role ~ ':' -}}
    {%- if m.reasoning_content -%}{{- '<think>' ~ m.reasoning_content ~ '</think>' -}}{%- endif -%}
    {{- m.content or '' -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '<tool_call>' ~ ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) -}}
        {{- '</tool_call>' -}}
    {%- endfor -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if tools -%}{{- tools | tojson -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""


def tool_turn(name: str, thought: str, result: Any = "42", **fields: Any) -> list[dict[str, Any]]:
    """An answer that calls a tool, and what the tool said."""
    call = {"type": "tool_use", "id": name, "name": "weather", "input": {"city": name}}
    thoughts = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    told = {"type": "tool_result", "tool_use_id": name, "content": result, **fields}
    return [{"role": "assistant", "content": [*thoughts, call]}, {"role": "user", "content": [told]}]


@pytest.mark.contract("anthropic 2")
def test_a_conversation_with_texts_and_blocks_is_answered(serve: Any) -> None:
    server = serve()
    turns = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]},
    ]
    counted = server.post(PATH + "/count_tokens", {"messages": turns, "system": "be brief"}).json()
    result = message(server, messages=turns, system=[{"type": "text", "text": "be brief"}]).json()
    assert result["content"][0]["text"]
    usage = result["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


@pytest.mark.contract("anthropic 6")
@pytest.mark.parametrize(
    ("result", "fields"),
    [
        ("42", {}),
        ([{"type": "text", "text": "42"}], {}),
        ("it is not there", {"is_error": True}),
        ([], {}),
    ],
)
@pytest.mark.parametrize("with_text", [False, True])
def test_results_of_tools_are_taken(serve: Any, result: Any, fields: Any, with_text: bool) -> None:
    server = serve(template=REMEMBERING)
    turns = [USER, *tool_turn("Paris", "", result, **fields)]
    if with_text:
        turns[-1]["content"].append({"type": "text", "text": "what does it mean?"})
    assert message(server, messages=turns, tools=TOOLS).status_code == 200


@pytest.mark.contract("anthropic 7")
@pytest.mark.parametrize("in_result", [False, True])
def test_pictures_on_a_text_model_are_refused_by_their_name(serve: Any, in_result: bool) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    turns = [USER, *tool_turn("Paris", "", [picture])] if in_result else [{"role": "user", "content": [picture]}]
    response = message(serve(template=REMEMBERING), messages=turns)
    assert response.status_code == 500
    assert "image input is not supported" in response.json()["error"]["message"]


@pytest.mark.contract("anthropic 10")
def test_settings_of_this_api_are_accepted(serve: Any) -> None:
    fields = {
        "stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "me"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    assert message(serve(), **fields).json()["content"]


@pytest.mark.contract("anthropic 11")
def test_missing_messages_are_an_error_and_none_are_answered(serve: Any) -> None:
    server = serve()
    assert server.post(PATH, {"max_tokens": 4}).status_code >= 400
    assert message(server, messages=[]).json()["content"]


@pytest.mark.contract("anthropic 13", "anthropic 14")
def test_thoughts_of_earlier_turns_are_in_the_prompt(serve: Any) -> None:
    server = serve(template=REMEMBERING, n_ctx=4096)

    def counted(*thoughts: str) -> int:
        turns = [USER]
        for index, thought in enumerate(thoughts):
            turns += tool_turn(f"city {index}", thought)
        found = server.post(PATH + "/count_tokens", {"messages": turns, "tools": TOOLS})
        assert found.status_code == 200, found.text
        return int(found.json()["input_tokens"])

    assert counted("", "so", "") - counted("", "", "") == len("<think>so</think>")
    assert counted("first", "so") - counted("", "") == len("<think>first</think><think>so</think>")


def test_a_call_can_be_demanded_and_thoughts_have_a_limit(serve: Any) -> None:
    """Known faults E17, E18 and E22."""
    template = THINKING_TEMPLATE.replace("assistant:", "assistant^<think>") + "{# <tool_call> #}"
    server = serve(
        n_ctx=4096, template=template, engine={"next_token": forced_text(b"<think>hm and hm again", after=b"^")}
    )
    fields = {
        "max_tokens": 1000,
        "tools": [*TOOLS, {"name": "clock", "input_schema": {"type": "object", "properties": {}}}],
        "thinking": {"type": "enabled", "budget_tokens": 6},
    }
    for choice in ({"type": "any"}, {"type": "tool", "name": "clock"}):
        content = message(server, **fields, tool_choice=choice).json()["content"]
        assert [block["type"] for block in content] == ["thinking", "tool_use"]
        assert content[0]["thinking"] == "hm and"
        if choice["type"] == "tool":
            assert (content[1]["name"], content[1]["input"]) == ("clock", {})
