"""`/v1/responses` over the fake engine: translation, shapes, order of events, by the official client's types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import forced_text
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support_app import THINKING_TEMPLATE, parse_named_events

from pyllama.errors import InvalidArgument
from pyllama.server.errors import InvalidRequest, NotSupported
from pyllama.server.openai_responses_request import chat_body

PATH = "/v1/responses"


def respond(server: Any, **fields: Any) -> Any:
    return server.post(PATH, {"input": "hi", "max_output_tokens": 4, **fields})


def stream(server: Any, **fields: Any) -> list[tuple[str, Any]]:
    response = respond(server, stream=True, **fields)
    assert response.status_code == 200, response.text
    return parse_named_events(response.text)


def messages(value: Any, **fields: Any) -> Any:
    return chat_body({"input": value, **fields})["messages"]


@pytest.mark.contract("responses 1")
def test_a_response_is_complete_for_a_typed_client(serve: Any) -> None:
    result = respond(serve(), instructions="be brief", metadata={"a": "b"}).json()
    assert list(result)[:8] == [
        "completed_at", "created_at", "id", "model", "object", "output", "status", "usage",
    ]  # fmt: skip
    assert "timings" not in result
    typed = Response.model_validate(result)
    assert typed.id.startswith("resp_")
    assert typed.output[0].id.startswith("msg_")
    assert len(typed.output_text) == 4
    assert (typed.instructions, typed.metadata) == ("be brief", {"a": "b"})
    assert typed.usage is not None
    assert typed.usage.input_tokens == len("system: be brief\nuser: hi\nassistant:")
    assert (typed.usage.output_tokens, typed.usage.total_tokens) == (4, 4 + typed.usage.input_tokens)


def test_the_limit_is_said_and_so_is_a_complete_answer(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"done", after=b":")})
    cut, whole = (respond(server, input="", max_output_tokens=n).json() for n in (2, 9))
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    assert whole["output"][0]["content"][0]["text"] == "done"


@pytest.mark.contract("responses 2")
@pytest.mark.parametrize("text", ["", "x", "Grüße 🙂"])
def test_a_streams_events_are_in_order_and_sum_up_to_the_plain_answer(serve: Any, text: str) -> None:
    server = serve(engine={"next_token": forced_text(text.encode(), after=b":")})
    plain = respond(server, input="", max_output_tokens=50).json()
    events = stream(server, input="", max_output_tokens=50)
    names = [name for name, _ in events]
    n_deltas = names.count("response.output_text.delta")
    item = [
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * n_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    expected = ["response.created", "response.in_progress", *(item if text else []), "response.completed"]
    assert names == expected
    assert (n_deltas > 0) == bool(text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    reader = TypeAdapter(ResponseStreamEvent)
    for name, data in events:
        assert data["type"] == name
        reader.validate_python(data)
    by_name = dict(events)
    assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == text
    final = by_name["response.completed"]["response"]
    assert [item["content"][0]["text"] for item in final["output"]] == [text] * bool(text)
    assert final["usage"]["output_tokens"] == plain["usage"]["output_tokens"]
    assert list(final) == list(plain)
    assert "timings" in by_name["response.completed"]
    ids = {data["response"]["id"] for _, data in events if "response" in data}
    assert ids == {final["id"]}
    if text:
        assert {data["item_id"] for _, data in events if "item_id" in data} == {final["output"][0]["id"]}
        assert by_name["response.output_text.done"]["text"] == text
        assert by_name["response.output_item.done"]["item"] == final["output"][0]


@pytest.mark.contract("responses 3")
def test_progress_is_in_the_in_progress_events_and_timings_with_the_last_of_a_group(serve: Any) -> None:
    server = serve(n_batch=32, n_slots=1)
    events = stream(server, input="word " * 30, timings_per_token=True, return_progress=True)
    progress = [(name, data["prompt_progress"]) for name, data in events if "prompt_progress" in data]
    assert len(progress) > 1
    assert {name for name, _ in progress} == {"response.in_progress"}
    assert all(p["total"] > 0 and p["processed"] >= p["cache"] for _, p in progress)
    deltas = [data for name, data in events if name == "response.output_text.delta"]
    assert deltas
    assert all("predicted_per_second" in data["timings"] for data in deltas)
    assert "timings" not in dict(events)["response.content_part.added"]


def test_items_become_chat_messages() -> None:
    assert messages("hi") == [{"role": "user", "content": "hi"}]
    assert messages("hi", instructions="be brief")[0] == {"role": "system", "content": "be brief"}
    value = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    calls = [
        {"id": call, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call, name in (("c1", "f"), ("c2", "g"))
    ]
    assert messages(value) == [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "b"}],
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]


def test_reasoning_items_that_nobody_can_read_are_skipped() -> None:
    value = [
        {"role": "user", "content": "a"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "encrypted_content": "?",
        },
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert messages(value) == [value[0], value[2], value[3]]


def test_what_a_response_returned_can_be_sent_back(serve: Any) -> None:
    server = serve()
    answer = respond(server).json()
    conversation = [{"role": "user", "content": "hi"}, *answer["output"], {"role": "user", "content": "more"}]
    again = respond(server, input=conversation)
    assert again.status_code == 200
    assert again.json()["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_other_fields_are_passed_on() -> None:
    body = chat_body({"input": "x", "reasoning": {"effort": "low"}, "top_k": 3, "max_output_tokens": 5, "store": True})
    assert body == {
        "top_k": 3, "store": True, "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5, "reasoning_effort": "low",
    }  # fmt: skip


def test_the_form_of_the_answer_is_that_of_a_chat_request(serve: Any) -> None:
    schema = {"const": {"a": [1, 2]}}
    form = {"format": {"type": "json_schema", "name": "pair", "schema": schema, "strict": True}}
    assert chat_body({"input": "x", "text": form})["response_format"] == {
        "type": "json_schema", "json_schema": {"schema": schema},
    }  # fmt: skip
    assert (
        chat_body({"input": "x", "text": {"format": {"type": "json_object"}}})["response_format"]["type"]
        == "json_object"
    )
    assert "response_format" not in chat_body({"input": "x", "text": {"format": {"type": "text"}}})
    result = respond(serve(), text=form, max_output_tokens=900).json()
    assert json.loads(result["output"][0]["content"][0]["text"]) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"input": None}, InvalidRequest, "'input' is required"),
        ({"input": 5}, InvalidRequest, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, InvalidRequest, "Cannot determine type of 'item'"),
        ({"input": [{"role": "robot", "content": "x"}]}, InvalidRequest, "Cannot determine type of 'item'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, InvalidRequest, "input_file"),
        ({"previous_response_id": "resp_1"}, InvalidRequest, "previous_response_id"),
        ({"background": True}, NotSupported, "background"),
        ({"tools": [{"type": "function"}]}, InvalidRequest, r"tools\[0\].name"),
        ({"text": {"format": {"type": "json_schema"}}}, InvalidRequest, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, InvalidRequest, "text.format.*'yaml'"),
        ({"n": 2}, InvalidRequest, "'n'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        chat_body({"input": "x", **fields})


def test_errors_have_the_apis_body(serve: Any) -> None:
    server = serve()
    response = respond(server, temperature="hot")
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    assert "image input is not supported" in respond(server, input=image).json()["error"]["message"]
    assert respond(server, input="x" * 2000, stream=True).json()["error"]["type"] == "exceed_context_size_error"


def test_a_failure_in_a_stream_is_the_last_event(serve: Any) -> None:
    server = serve(engine={"step_seconds": 0.05})  # so that the stream has begun when the step fails

    def breaks(history: Any, sampler: Any) -> int:
        if bytes(history).endswith(b"xxxx"):
            raise InvalidArgument("broken on purpose")
        return ord("x")

    server.engine.next_token = breaks
    name, data = stream(server, max_output_tokens=50)[-1]
    assert name == ""
    assert data["error"]["message"] == "broken on purpose"


def test_tokens_are_counted_as_the_answer_counts_them(serve: Any) -> None:
    server = serve()
    expected = {"input_tokens": len("user: hi\nassistant:"), "object": "response.input_tokens"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for prefix in ("", "/v1"):
        assert server.post(prefix + "/responses/input_tokens", {"input": "hi"}).json() == expected
        assert server.post(prefix + "/chat/completions/input_tokens", chat).json() == expected
    assert respond(server).json()["usage"]["input_tokens"] == expected["input_tokens"]
    assert server.post(PATH + "/input_tokens", {}).status_code == 400


def test_thoughts_are_an_item_of_their_own_before_the_message(serve: Any) -> None:
    text = "<think>\nwhy 🙂\n</think>\n\nbecause"
    server = serve(template=THINKING_TEMPLATE, engine={"next_token": forced_text(text.encode(), after=b":")})
    plain = respond(server, input="", max_output_tokens=60).json()
    reasoning, answer = plain["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"text": "why 🙂", "type": "reasoning_text"}])
    assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], "")
    assert reasoning["id"].startswith("rs_")
    assert answer["content"][0]["text"] == "because"
    assert plain["usage"]["output_tokens_details"]["reasoning_tokens"] == len("why 🙂".encode())
    events = stream(server, input="", max_output_tokens=60)
    reader = TypeAdapter(ResponseStreamEvent)
    for _, data in events:
        reader.validate_python(data)
    names = list(dict.fromkeys(name.removeprefix("response.") for name, _ in events))
    assert names == [
        "created", "in_progress", "output_item.added", "reasoning_text.delta", "content_part.added",
        "output_text.delta", "output_item.done", "output_text.done", "content_part.done", "completed",
    ]  # fmt: skip
    for kind, index, whole in (("reasoning_text", 0, "why 🙂"), ("output_text", 1, "because")):
        deltas = [data for name, data in events if name == f"response.{kind}.delta"]
        assert "".join(data["delta"] for data in deltas) == whole
        assert {data["output_index"] for data in deltas} == {index}
    final = events[-1][1]["response"]["output"]
    assert [data["item"] for name, data in events if name == "response.output_item.done"] == final
    assert [(item["type"], item["content"]) for item in final] == [
        (item["type"], item["content"]) for item in plain["output"]
    ]
    again = respond(server, input=[{"role": "user", "content": ""}, *final, {"role": "user", "content": "more"}])
    assert again.status_code == 200


TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Weather",
    "parameters": {"type": "object"},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🙂"}}\n</tool_call>'


def test_functions_are_shown_to_the_chat_layer_and_other_tools_are_not() -> None:
    choice = {"type": "function", "name": "weather"}
    body = chat_body({"input": "x", "tools": [{"type": "web_search"}, TOOL], "tool_choice": choice})
    function = {"name": "weather", "description": "Weather", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_calls_are_items_and_the_streams_items_are_the_plain_answers(serve: Any) -> None:
    text = f"<think>hm</think>I look.\n{CALL}\n{CALL}"
    server = serve(
        n_ctx=4096,
        template=THINKING_TEMPLATE.replace("assistant:", "assistant^") + "{# <tool_call> #}",
        engine={"next_token": forced_text(text.encode(), after=b"^")},
    )
    fields = {"max_output_tokens": 1000, "tools": [TOOL]}
    plain = respond(server, **fields).json()
    assert [item["type"] for item in plain["output"]] == ["reasoning", "message", "function_call", "function_call"]
    events = stream(server, **fields)
    reader = TypeAdapter(ResponseStreamEvent)
    for _, data in events:
        reader.validate_python(data)
    final = events[-1][1]["response"]["output"]
    assert [data["item"] for name, data in events if name == "response.output_item.done"] == final
    calls = [item for item in final if item["type"] == "function_call"]
    for call in calls:
        deltas = [d["delta"] for n, d in events if n.endswith("arguments.delta") and d["item_id"] == call["id"]]
        assert json.loads("".join(deltas)) == {"city": "Paris 🙂"}
        assert "".join(deltas) == call["arguments"]
        assert call["id"].startswith("fc_")
        assert call["call_id"].startswith("call_")
    added = [data for name, data in events if name == "response.output_item.added"]
    assert [data["output_index"] for data in added] == [0, 1, 2, 3]
    assert [(data["item"]["name"], data["item"]["arguments"]) for data in added[2:]] == [("weather", "")] * 2
    assert len({call["call_id"] for call in calls}) == 2
    ids = ("id", "call_id")
    strip = [{key: value for key, value in item.items() if key not in ids} for item in final]
    assert strip == [{key: value for key, value in item.items() if key not in ids} for item in plain["output"]]
    result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "sunny"}
    again = respond(server, input=[{"role": "user", "content": "hi"}, *final, result], tools=[TOOL])
    assert again.status_code == 200


INCLUDE = ["message.output_text.logprobs"]


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": INCLUDE, "top_logprobs": 2}, {"include": INCLUDE}])
def test_log_probabilities_stand_beside_the_text_of_the_message(serve: Any, fields: dict[str, Any]) -> None:
    text = "Grüße 🙂"
    server = serve(engine={"next_token": forced_text(text.encode(), after=b":")})
    fields = {"input": "", "max_output_tokens": 50, "temperature": 0, **fields}
    plain = respond(server, **fields).json()
    (part,) = plain["output"][0]["content"]
    Response.model_validate(plain)
    chat = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": ""}], "max_tokens": 50, "temperature": 0, "logprobs": True,
         "top_logprobs": fields.get("top_logprobs", 0)},
    ).json()  # fmt: skip
    told = chat["choices"][0]["logprobs"]["content"]
    assert part["logprobs"] == [record for record in told if record["bytes"]]
    assert bytes(byte for record in part["logprobs"] for byte in record["bytes"]).decode() == text
    assert {len(record["top_logprobs"]) for record in part["logprobs"]} == {fields.get("top_logprobs", 0)}
    events = stream(server, **fields)
    reader = TypeAdapter(ResponseStreamEvent)
    for _, data in events:
        reader.validate_python(data)
    deltas = [data for name, data in events if name == "response.output_text.delta"]
    assert [record for data in deltas for record in data["logprobs"]] == part["logprobs"]
    for data in deltas:
        assert bytes(byte for record in data["logprobs"] for byte in record["bytes"]).decode() == data["delta"]
    by_name = dict(events)
    assert by_name["response.output_text.done"]["logprobs"] == part["logprobs"]
    assert by_name["response.content_part.done"]["part"] == part
    assert by_name["response.completed"]["response"]["output"][0]["content"] == [part]


@pytest.mark.parametrize("text", ["<think>\nb b\n</think>\n\nbe b", "<think>be</think>be", "be <b"])
def test_log_probabilities_are_those_of_the_message_alone(serve: Any, text: str) -> None:
    server = serve(template=THINKING_TEMPLATE, engine={"next_token": forced_text(text.encode(), after=b":")})
    fields = {"input": "", "max_output_tokens": 90, "temperature": 0, "include": INCLUDE}
    message = respond(server, **fields).json()["output"][-1]
    (part,) = message["content"]
    assert bytes(byte for record in part["logprobs"] for byte in record["bytes"]).decode() == part["text"]
    events = stream(server, **fields)
    assert dict(events)["response.output_text.done"]["logprobs"] == part["logprobs"]


def test_without_asking_there_are_no_log_probabilities(serve: Any) -> None:
    server = serve()
    assert respond(server).json()["output"][0]["content"][0]["logprobs"] == []
    assert all(not data.get("logprobs") for _, data in stream(server))
    assert respond(server, top_logprobs="x").status_code == 400
    assert respond(server, top_logprobs=-1).status_code == 400


def test_a_call_can_be_demanded(serve: Any) -> None:
    clock = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
    server = serve(n_ctx=4096, template=THINKING_TEMPLATE + "{# <tool_call> #}")
    named = {"type": "function", "name": "clock"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        fields = {"tools": [TOOL, clock], "tool_choice": choice, "reasoning": {"effort": "none"}}
        (item,) = respond(server, max_output_tokens=500, parallel_tool_calls=False, **fields).json()["output"]
        assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "clock", {})
    unknown = {"type": "function", "name": "nothing"}
    assert respond(server, tools=[TOOL], tool_choice=unknown).status_code == 400
    assert respond(server, tool_choice=named).status_code == 400
    assert respond(server, tool_choice="required", max_output_tokens=1).status_code == 200
