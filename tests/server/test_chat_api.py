"""`/v1/chat/completions` and `/apply-template` over the fake engine: validation, prefill, shapes, streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_engine import forced_text

from pyllama.errors import TemplateError

USER = {"role": "user", "content": "hi"}
CHUNK_KEYS = ["choices", "created", "id", "model", "system_fingerprint", "object"]


def chat(server: Any, *messages: Any, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": list(messages), "max_tokens": 4, **fields})


def rendered(server: Any, *messages: Any, **fields: Any) -> Any:
    response = server.post("/apply-template", {"messages": list(messages), **fields})
    return response.json()["prompt"] if response.status_code == 200 else response


@pytest.mark.contract("chat 1")
def test_a_chat_result_has_its_keys_in_order(serve: Any) -> None:
    server = serve()
    result = chat(server, USER).json()
    assert list(result) == [
        "choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings",
    ]  # fmt: skip
    choice = result["choices"][0]
    assert list(choice) == ["finish_reason", "index", "message"]
    assert choice["finish_reason"] == "length"
    assert list(choice["message"]) == ["role", "content"]
    assert len(choice["message"]["content"]) == 4
    assert result["id"].startswith("chatcmpl-")
    assert len(result["id"]) == len("chatcmpl-") + 32
    assert result["system_fingerprint"].startswith("b")
    assert result["model"] == "fake"
    assert result["usage"] == {
        "completion_tokens": 4,
        "prompt_tokens": len("user: hi\nassistant:"),
        "total_tokens": 4 + len("user: hi\nassistant:"),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.contract("chat 1")
def test_the_alias_route_and_an_unknown_model_name_are_accepted(serve: Any) -> None:
    response = serve().post("/chat/completions", {"messages": [USER], "max_tokens": 1, "model": "gpt-9", "user": "me"})
    assert response.status_code == 200
    assert response.json()["model"] == "fake"


@pytest.mark.contract("chat 3")
def test_stream_begins_with_the_role_and_ends_with_an_empty_delta(serve: Any) -> None:
    server = serve()
    body = {"messages": [USER], "max_tokens": 5, "seed": 3}
    events = server.events("/v1/chat/completions", body)
    assert events.pop() == "[DONE]"
    assert [list(event)[:6] for event in events] == [CHUNK_KEYS] * len(events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert all(list(delta) == ["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    plain = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == plain
    assert ["timings" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert not any("usage" in event for event in events)


@pytest.mark.contract("chat 3")
def test_the_usage_chunk_with_empty_choices_comes_only_when_asked_for(serve: Any) -> None:
    events = serve().events(
        "/v1/chat/completions", {"messages": [USER], "max_tokens": 5, "stream_options": {"include_usage": True}}
    )
    assert events.pop() == "[DONE]"
    assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert "timings" in events[-1]
    assert "timings" not in events[-2]


@pytest.mark.contract("chat 15")
def test_timings_per_token_leave_the_role_chunk_alone(serve: Any) -> None:
    events = serve().events("/v1/chat/completions", {"messages": [USER], "max_tokens": 5, "timings_per_token": True})[
        :-1
    ]
    assert ["timings" in event for event in events] == [False] + [True] * (len(events) - 1)
    assert events[-1]["timings"]["predicted_n"] == 5


@pytest.mark.contract("own 1")
def test_held_back_text_is_not_sent_before_the_stop_string_is_decided(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"The quick brown fox")})
    body = {"messages": [{"role": "user", "content": "|"}], "max_tokens": 50, "stop": ["own fox"]}
    # Only what follows the bar is forced text; the prompt's own tail is made part of the answer by prefilling nothing.
    server.engine.next_token = forced_text(b"The quick brown fox", after=b":")
    events = server.events("/v1/chat/completions", body)[:-1]
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert "".join(content or "" for content in contents) == "The quick br"
    assert "" not in contents
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.contract("chat 16", "chat 17")
def test_logprobs_with_every_visible_chunk_and_whole_in_the_plain_answer(serve: Any) -> None:
    server = serve()
    body = {"messages": [USER], "max_tokens": 5, "logprobs": True, "top_logprobs": 10, "temperature": 0}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    records = choice["logprobs"]["content"]
    assert "".join(record["token"] for record in records) == choice["message"]["content"]
    assert [len(record["top_logprobs"]) for record in records] == [10] * 5
    events = server.events("/v1/chat/completions", body)[:-1]
    streamed = [event["choices"][0]["logprobs"]["content"] for event in events[1:-1]]
    assert [record for part in streamed for record in part] == records
    assert "logprobs" not in events[0]["choices"][0]
    default = chat(server, USER, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert len(default[0]["top_logprobs"]) == 20
    none = chat(server, USER, logprobs=True, top_logprobs=0).json()["choices"][0]["logprobs"]["content"]
    assert none[0]["top_logprobs"] == []
    assert "logprobs" not in chat(server, USER).json()["choices"][0]


def test_records_of_held_back_tokens_come_later_and_those_of_the_stop_string_never(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"brow own fox", after=b":")})
    body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 50, "stop": ["own fox"], "logprobs": True}
    plain = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert plain["message"]["content"] == "brow "
    events = server.events("/v1/chat/completions", body)[:-1]
    streamed = [event["choices"][0]["logprobs"]["content"] for event in events if "logprobs" in event["choices"][0]]
    assert [record for part in streamed for record in part] == plain["logprobs"]["content"]
    assert "".join(record["token"] for record in plain["logprobs"]["content"]) == "brow "


def test_top_logprobs_without_logprobs_is_refused(serve: Any) -> None:
    response = chat(serve(), USER, top_logprobs=3)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "top_logprobs requires logprobs to be set to true"


def test_choices_interleave_and_each_has_its_finish_chunk(serve: Any) -> None:
    server = serve()
    body = {"messages": [USER], "max_tokens": 6, "n": 2, "seed": 11, "stream_options": {"include_usage": True}}
    plain = server.post("/v1/chat/completions", body).json()
    assert [c["index"] for c in plain["choices"]] == [0, 1]
    events = server.events("/v1/chat/completions", body)
    assert events.count("[DONE]") == 1
    texts = {0: "", 1: ""}
    finishes = []
    for event in events[:-2]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            finishes.append(choice["index"])
    assert texts == {c["index"]: c["message"]["content"] for c in plain["choices"]}
    assert sorted(finishes) == [0, 1]
    assert events[-2]["choices"] == []


@pytest.mark.contract("chat 21")
def test_progress_chunks_precede_the_answer(serve: Any) -> None:
    server = serve(n_batch=64)
    message = {"role": "user", "content": "z" * 170}
    events = server.events("/v1/chat/completions", {"messages": [message], "max_tokens": 2, "return_progress": True})[
        :-1
    ]
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[0]["processed"] == progress[0]["cache"] == 0
    assert progress[-1]["processed"] == progress[-1]["total"] == len("user: \nassistant:") + 170
    assert [event["choices"][0]["delta"]["role"] for event in events[: len(progress)]] == ["assistant"] * len(progress)


@pytest.mark.contract("chat 14")
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (None, "'messages' is required"),
        ("hi", "Expected 'messages' to be an array"),
        ([5], "must be an object"),
        ([{}], "All non-assistant messages must contain 'content'"),
        ([{"role": 5, "content": "x"}], "type must be string"),
        ([{"role": "user"}], "All non-assistant messages must contain 'content'"),
        ([{"role": "assistant"}], "'content' or 'tool_calls'"),
        ([{"role": "user", "content": 5}], "Expected 'content' to be a string or an array"),
        ([{"role": "user", "content": {}}], "Expected 'content' to be a string or an array"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "unsupported content[].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "type must be string"),
        ([{"role": "user", "content": ["x"]}], "must be objects"),
        ([USER, {}], "All non-assistant messages must contain 'content'"),
        (
            [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            "2 or more assistant messages",
        ),
        ([USER, USER], "conversation roles must alternate"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
def test_bad_messages_are_refused_with_a_reason(serve: Any, path: str, messages: Any, text: str) -> None:
    response = serve().post(path, {"messages": messages, "max_tokens": 1})
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


@pytest.mark.contract("own 3")
@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "assistant", "tool_calls": [{"type": "plugin"}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]},
    ],
)
def test_mistakes_that_llama_server_reports_as_its_own_keep_that_status(serve: Any, message: Any) -> None:
    response = serve().post("/v1/chat/completions", {"messages": [message, USER]})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


def test_text_parts_are_joined_by_a_line_break_and_developer_may_speak(serve: Any) -> None:
    from pyllama.chat_template import ChatTemplate
    from pyllama.server.chat_templates import ServerTemplate

    source = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    server = serve()
    template = ServerTemplate(ChatTemplate(source), server.vocabulary.tokenizer)
    text = template.render(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        add_generation_prompt=False,
        variables={},
    )
    assert text == "system:be brief;user:a\nb;"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_no_content_is_an_empty_text_for_every_template(serve: Any, content: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = (
        "{{ m.role + '<' + m.content + '>' }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    )
    server = serve(template="{% for m in messages %}" + text + "{% endfor %}{{ tools }}")
    messages = [{"role": "assistant", "tool_calls": [call], **content}, USER]
    assert rendered(server, *messages).startswith("assistant<>fuser<hi>")
    if content:
        assert rendered(server, {"role": "user", **content}).startswith("user<>")


@pytest.mark.contract("chat 6", "chat 7")
def test_the_last_assistant_message_is_continued(serve: Any) -> None:
    server = serve()
    parts = [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]
    assert rendered(server, USER, {"role": "assistant", "content": "Once"}) == "user: hi\nassistant:Once"
    assert rendered(server, USER, {"role": "assistant", "content": parts}) == "user: hi\nassistant:Once\n\nupon"
    explicit = rendered(
        server, USER, {"role": "assistant", "content": "Once"}, continue_final_message=True, add_generation_prompt=False
    )
    assert explicit == "user: hi\nassistant:Once"
    alone = rendered(server, USER, {"role": "assistant", "content": "Once"}, add_generation_prompt=False)
    assert alone == "user: hi\nassistant:Once"
    off = serve(prefill_assistant=False)
    assert rendered(off, USER, {"role": "assistant", "content": "Once"}) == "user: hi\nassistant: Once\nassistant:"
    assert rendered(server, USER, add_generation_prompt=False) == "user: hi\n"


def test_the_given_text_is_repeated_only_with_echo(serve: Any) -> None:
    server = serve()
    messages = [USER, {"role": "assistant", "content": "Once"}]
    plain = chat(server, *messages, seed=2).json()["choices"][0]["message"]["content"]
    echoed = chat(server, *messages, seed=2, echo=True).json()["choices"][0]["message"]["content"]
    assert echoed == "Once" + plain
    events = server.events("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "seed": 2, "echo": True})[
        :-1
    ]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == echoed


@pytest.mark.contract("chat 8")
@pytest.mark.parametrize(
    ("fields", "message", "status"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, {"role": "assistant", "content": "x"}, 400),
        ({"continue_final_message": True}, {"role": "user", "content": "x"}, 400),
        ({"continue_final_message": "nothing"}, {"role": "assistant", "content": "x"}, 400),
        ({"continue_final_message": "reasoning_content"}, {"role": "assistant", "content": ""}, 400),
        ({}, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}, 400),
    ],
)
def test_impossible_continuations_are_refused(serve: Any, fields: Any, message: Any, status: int) -> None:
    assert rendered(serve(), {"role": "system", "content": "s"}, message, **fields).status_code == status


def test_template_variables_come_from_server_and_request(serve: Any) -> None:
    server = serve(chat_template_kwargs={"enable_thinking": False})
    assert "[no thinking]" in rendered(server, USER)
    assert "[no thinking]" not in rendered(server, USER, chat_template_kwargs={"enable_thinking": True})
    assert "[no thinking]" in rendered(serve(), USER, reasoning_effort="none")
    assert "[no thinking]" not in rendered(serve(), USER, reasoning_effort="high")
    response = rendered(server, USER, chat_template_kwargs={"enable_thinking": "true"})
    assert response.json()["error"]["message"] == 'invalid type for "enable_thinking" (expected boolean, got string)'


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, 200),
        ({"tools": []}, 200),
        ({"tools": None, "tool_choice": "auto"}, 200),
        ({"tools": "x"}, 400),
        ({"response_format": {"type": "text"}}, 200),
        ({"response_format": {"type": "json_object", "schema": 5}}, 400),
        ({"response_format": {"type": "sound"}}, 400),
        ({"response_format": "x"}, 200),
        ({"reasoning_format": "none"}, 200),
        ({"reasoning_format": "deepseek"}, 200),
        ({"reasoning_format": "sound"}, 500),
        ({"reasoning_budget_tokens": 5}, 200),
        ({"reasoning_budget_tokens": -2}, 400),
        ({"reasoning_budget_tokens": -1}, 200),
        ({"samplers": ["top_k", "infill"]}, 200),
        ({"mirostat": 2}, 200),
        ({"top_k": 5, "min_p": 0.1}, 200),
    ],
)
def test_features_that_do_not_exist_yet_are_named_and_neutral_values_accepted(
    serve: Any, fields: Any, status: int
) -> None:
    response = chat(serve(), USER, **fields)
    assert response.status_code == status, response.text
    if status == 501:
        assert response.json()["error"]["type"] == "not_supported_error"
        assert f"'{next(iter(fields))}'" in response.json()["error"]["message"]


def test_the_native_result_of_a_verbose_stream_comes_with_its_end(serve: Any) -> None:
    server = serve()
    body = {"messages": [USER], "max_tokens": 3, "verbose": True}
    *_, final = server.events("/v1/chat/completions", body)[:-1]
    assert list(final)[-2:] == ["timings", "__verbose"]
    assert final["__verbose"]["prompt"] == "user: hi\nassistant:"
    *_, final, usage = server.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})[:-1]
    assert ("__verbose" in final, "__verbose" in usage) == (True, False)
    assert ("timings" in final, "timings" in usage) == (False, True)


def test_n_predict_beats_max_tokens(serve: Any) -> None:
    assert chat(serve(), USER, n_predict=2, max_tokens=9).json()["usage"]["completion_tokens"] == 2


def test_a_model_without_a_usable_template_still_completes_text(serve: Any) -> None:
    from dataclasses import replace

    server = serve()
    loaded = replace(server.state.loaded, chat_template=None, template_error=TemplateError("unknown tag 'generation'"))
    server.state.set_loaded(loaded)
    response = chat(server, USER)
    assert response.status_code == 400
    assert "unknown tag 'generation'" in response.json()["error"]["message"]
    assert server.post("/completion", {"prompt": "x", "n_predict": 1}).status_code == 200
    assert server.get("/props").json()["chat_template"] == ""


STRICT = """\
{%- for m in messages -%}
    {%- if m.role == 'system' and not loop.first -%}
        {{- raise_exception('System message must be at the beginning.') -}}
    {%- endif -%}
    {{- m.role ~ ':' ~ m.content ~ ';' -}}
{%- endfor -%}
"""
DROPPING = """\
{%- if messages[0].role == 'system' -%}{{- 'system:' ~ messages[0].content ~ ';' -}}{%- endif -%}
{%- for m in messages if m.role != 'system' -%}{{- m.role ~ ':' ~ m.content ~ ';' -}}{%- endfor -%}
"""
LATE = [USER, {"role": "assistant", "content": "yes?"}, {"role": "developer", "content": "be brief"}, USER]


@pytest.mark.parametrize("source", [STRICT, DROPPING])
def test_late_system_messages_are_moved_to_the_first(serve: Any, source: str) -> None:
    """Known fault C1."""
    server = serve(template=source)
    assert rendered(server, *LATE) == "system:be brief;user:hi;assistant:yes?;user:hi;"
    first = {"role": "system", "content": "be kind"}
    assert rendered(server, first, *LATE) == "system:be kind\n\nbe brief;user:hi;assistant:yes?;user:hi;"
    for path, body in (
        ("/v1/chat/completions", {"messages": LATE}),
        ("/v1/responses", {"input": LATE}),
        ("/v1/messages", {"messages": [USER], "system": "a", "max_tokens": 4}),
    ):
        assert server.post(path, body).status_code == 200


def test_system_messages_stay_where_the_template_takes_them(serve: Any) -> None:
    server = serve(template="{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}")
    assert rendered(server, *LATE) == "user:hi;assistant:yes?;system:be brief;user:hi;"


def test_merging_of_system_messages_can_be_switched_off(serve: Any) -> None:
    from pyllama.chat_template import ChatTemplate
    from pyllama.server.chat_templates import ServerTemplate

    server = serve()
    template = ServerTemplate(ChatTemplate(STRICT), server.vocabulary.tokenizer, merges_system=False)
    server.state.set_loaded(replace(server.state.loaded, chat_template=template))
    response = server.post("/v1/chat/completions", {"messages": LATE})
    assert response.status_code == 400
    assert "System message must be at the beginning." in response.json()["error"]["message"]


def test_parts_of_system_messages_stay_parts(serve: Any) -> None:
    typed = "{% for m in messages %}{{ m.role }}{% for p in m.content %}<{{ p.text }}>{% endfor %};{% endfor %}"
    source = (
        "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('late') }}{% endif %}"
    )
    part = {"type": "text", "text": "b"}
    late = [
        {"role": "user", "content": [part]},
        {"role": "system", "content": "a"},
        {"role": "system", "content": [part]},
    ]
    assert rendered(serve(template=source + typed), *late).startswith("system<a><b>;user<b>;")
