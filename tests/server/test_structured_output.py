"""Answers that keep to a grammar or a JSON schema: fields, errors, mixed batches, choices, and the real engine."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer
from fake_engine import forced_text
from support_app import parse_events

USER = [{"role": "user", "content": "x"}]
SHORT = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["n", "tags"],
}


def conforms(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"n", "tags"}
        and 0 <= value["n"] <= 99
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "bc"}
    )


def complete(server: Any, **fields: Any) -> Any:
    return server.post("/completion", {"prompt": "x", "n_predict": 900, **fields})


def chat(server: Any, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": USER, "max_tokens": 900, **fields})


@pytest.mark.contract("chat 12")
def test_a_literal_grammar_forces_its_text(serve: Any) -> None:
    answer = complete(serve(), grammar='root ::= "text, é😀"').json()
    assert answer["content"] == "text, é😀"
    assert answer["stop_type"] == "eos"
    assert answer["generation_settings"]["grammar"] == 'root ::= "text, é😀"'


@pytest.mark.contract("chat 10", "chat 11")
def test_a_schema_holds_plain_and_streamed_on_every_path(serve: Any) -> None:
    server = serve()
    plain = complete(server, json_schema=SHORT).json()["content"]
    assert conforms(plain)
    events = server.events("/completion", {"prompt": "x", "n_predict": 900, "json_schema": SHORT})
    assert "".join(event["content"] for event in events) == plain
    text = server.post("/v1/completions", {"prompt": "x", "max_tokens": 900, "json_schema": SHORT}).json()
    assert text["choices"][0]["text"] == plain
    formats = (
        {"json_schema": SHORT},
        {"response_format": {"type": "json_object", "schema": SHORT}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SHORT}}},
        {"response_format": {"type": "json_object"}, "json_schema": SHORT},
    )
    answers = {chat(server, **fields).json()["choices"][0]["message"]["content"] for fields in formats}
    assert len(answers) == 1
    assert conforms(*answers)
    events = server.events("/v1/chat/completions", {"messages": USER, "max_tokens": 900, **formats[1]})
    pieces = [event["choices"][0]["delta"].get("content") for event in events if event != "[DONE]" and event["choices"]]
    assert "".join(piece or "" for piece in pieces) == answers.pop()


@pytest.mark.contract("chat 10")
def test_json_object_without_a_schema_is_an_object(serve: Any) -> None:
    server = serve()
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"json_schema": {}},
    ):
        assert chat(server, **fields, max_tokens=5).json()["choices"][0]["message"]["content"].startswith("{")


def test_each_choice_follows_the_grammar_by_itself(serve: Any) -> None:
    answer = chat(serve(n_ctx=4096, n_ctx_slot=1024), n=3, seed=1, json_schema=SHORT).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 3
    assert all(map(conforms, texts))


def test_free_and_constrained_requests_share_steps_without_touching_each_other(serve: Any) -> None:
    server = serve(n_ctx=4096, n_ctx_slot=1024, engine={"step_seconds": 0.001})
    free = complete(server, n_predict=60).json()["content"]
    bodies: list[dict[str, Any]] = [
        {"n_predict": 60},
        {"json_schema": SHORT},
        {"grammar": 'root ::= "k" [0-9]{40}'},
        {"grammar": 'root ::= "nonce-17"'},
    ] * 3
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        texts = [r.json()["content"] for r in pool.map(lambda body: complete(server, **body), bodies)]
    for index in range(0, len(bodies), 4):
        assert texts[index] == free
        assert conforms(texts[index + 1])
        assert len(texts[index + 2]) == 41
        assert texts[index + 2][1:].isdigit()
        assert texts[index + 3] == "nonce-17"


def test_without_end_tokens_to_draw_a_complete_text_ends(serve: Any) -> None:
    answer = complete(serve(), grammar='root ::= "abc"', ignore_eos=True).json()
    assert (answer["content"], answer["stop_type"]) == ("abc", "eos")


def test_a_constraint_that_bans_leave_nothing_of_fails_alone(serve: Any) -> None:
    server = serve()
    answer = complete(server, grammar='root ::= "ab"', logit_bias=[[ord("b"), False]])
    assert answer.status_code == 500
    assert "banned" in answer.json()["error"]["message"]
    assert complete(server, grammar='root ::= "ab"').json()["content"] == "ab"
    server.wait_idle()


def test_the_grammar_of_a_request_replaces_that_of_the_server(serve: Any) -> None:
    server = serve(defaults={"grammar": 'root ::= "server"'})
    assert complete(server).json()["content"] == "server"
    assert complete(server, grammar='root ::= "mine"').json()["content"] == "mine"
    assert complete(server, json_schema={"const": 5}).json()["content"] == "5"
    assert len(complete(server, grammar="", n_predict=30).json()["content"]) == 30
    assert complete(server, grammar='root ::= "a"', json_schema={"const": 5}).json()["content"] == "a"


@pytest.mark.contract("chat 13")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": ':== "kek"'}, "Failed to initialize samplers: failed to parse grammar: line 1, column 1"),
        ({"grammar": 'rout::="x"'}, "Failed to initialize samplers: failed to parse grammar: the grammar has no rule"),
        ({"grammar": 5}, "Field 'grammar': type must be string"),
        ({"json_schema": 5}, "Field 'json_schema': type must be object"),
        ({"json_schema": {"type": 123}}, "JSON schema conversion failed:\ntype must be"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"minimum": 1e400, "type": "number"}}, "JSON schema conversion failed"),
    ],
)
def test_what_cannot_be_honoured_is_a_400_and_never_free_text(
    serve: Any, fields: dict[str, Any], message: str, stream: bool
) -> None:
    """Known faults D5 and D10."""
    server = serve()
    content = json.dumps({"prompt": "x", "n_predict": 5, "stream": stream, **fields}).replace("Infinity", "1e400")
    response = server.client.post("/completion", content=content)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


@pytest.mark.contract("chat 10")
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"response_format": {"type": "json_object", "schema": {"type": "foo"}}}, 400),
        ({"response_format": {"type": "json_object", "schema": {"type": 123}}}, 400),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, 400),
        ({"response_format": {"type": []}}, 400),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, 500),
        ({"json_schema": {"const": 1}, "grammar": ""}, 200),
        ({"grammar_lazy": True}, 400),
        ({"grammar_lazy": True, "grammar_triggers": [{"type": 1, "value": "x"}], "grammar": 'root ::= "x"'}, 200),
        ({"grammar_lazy": True, "grammar_triggers": [{"type": 4, "value": "x"}], "grammar": 'root ::= "x"'}, 400),
        ({"grammar_lazy": True, "grammar_triggers": [{"type": 2, "value": "(a+)+b"}], "grammar": 'root ::= "x"'}, 400),
    ],
)
def test_chat_fields_that_clash_or_are_wrong(serve: Any, fields: dict[str, Any], status: int) -> None:
    assert chat(serve(), **fields).status_code == status


OPENING = (
    "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
)


def streamed(server: Any, **fields: Any) -> dict[str, str]:
    """Sums of a stream's deltas by kind."""
    events = server.events("/v1/chat/completions", {"messages": USER, "max_tokens": 900, **fields})
    sums: dict[str, str] = {}
    for delta in [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event["choices"]]:
        for kind, text in delta.items():
            if isinstance(text, str) and kind != "role":
                sums[kind] = sums.get(kind, "") + text
    return sums


def test_a_users_grammar_begins_with_the_first_token_although_the_template_opens_a_thinking_block(serve: Any) -> None:
    """Known fault C8."""
    server = serve(template=OPENING)
    fields = {"grammar": r'root ::= "{\"n\": " [0-9] ", \"tags\": [\"a\"]}"'}
    assert server.post("/apply-template", {"messages": USER, **fields}).json()["prompt"].endswith("</think>\n\n")
    message = chat(server, **fields).json()["choices"][0]["message"]
    assert conforms(message["content"])
    assert "reasoning_content" not in message
    assert streamed(server, **fields) == {"content": message["content"]}


def test_a_schema_begins_after_the_thinking_block(serve: Any) -> None:
    """Known fault C8: the answer was delivered as thoughts, because the schema forbade the end tag."""
    fields = {"response_format": {"type": "json_object", "schema": SHORT}, "reasoning_budget_tokens": 9}
    server = serve(template=OPENING)
    message = chat(server, **fields).json()["choices"][0]["message"]
    assert conforms(message["content"])
    assert len(message["reasoning_content"]) > 3
    assert streamed(server, **fields) == {k: v for k, v in message.items() if k != "role"}
    # The model may begin the block itself, or not think at all.
    silent = OPENING.replace("<think>\n{% endif %}", "^{% endif %}")
    fields["reasoning_budget_tokens"] = 30
    for text, thoughts in (("<think>so</think>\n\n", "so"), ('{"n": 1, ', None)):
        server = serve(template=silent, engine={"next_token": forced_text(text.encode(), after=b"^")})
        message = chat(server, **fields).json()["choices"][0]["message"]
        assert conforms(message["content"])
        assert message.get("reasoning_content") == thoughts
        assert streamed(server, **fields) == {k: v for k, v in message.items() if k != "role"}


def test_a_schema_goes_on_from_what_the_client_wrote_of_the_answer(serve: Any) -> None:
    for template in (OPENING, "{% for m in messages %}{{ m.content }}{% endfor %}|"):
        server = serve(template=template)
        begun = {"role": "assistant", "content": '{"n": 1'}
        body = {"messages": [*USER, begun], "max_tokens": 900, "json_schema": SHORT}
        content = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert conforms('{"n": 1' + content)
        assert not content.startswith("{")
        begun["content"] = "It is "  # nothing that the schema could go on from
        content = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert conforms(content)


def test_a_schema_wins_over_tools(serve: Any) -> None:
    """Known fault E19."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    fields = {"json_schema": SHORT, "reasoning_budget_tokens": 0}
    choice = chat(serve(template=OPENING), tools=tools, **fields).json()["choices"][0]
    assert conforms(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


# ---- the real engine


@pytest.fixture(scope="module")
def real(tiny_llama_path: Path) -> Iterator[EngineServer]:
    server = EngineServer(tiny_llama_path)
    yield server
    server.close()


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_model_with_random_weights_writes_the_forced_text(real: EngineServer, temperature: float) -> None:
    """The rig of many other tests: any text out of any model."""
    text = 'stop </s> <think>\n{"a": "ünï😀"}'
    literal = text.replace('"', '\\"').replace("\n", "\\n")
    body = {"prompt": "the world", "n_predict": 200, "temperature": temperature, "grammar": f'root ::= "{literal}"'}
    answer = real.client.post("/completion", json={**body, "n_probs": 2}).json()
    assert answer["content"] == text
    assert answer["stop_type"] == "eos"
    assert len(answer["completion_probabilities"]) >= 2
    streamed = parse_events(real.client.post("/completion", json={**body, "stream": True}).text)
    assert "".join(event["content"] for event in streamed) == text


def test_a_model_with_random_weights_keeps_to_a_schema(real: EngineServer) -> None:
    body = {"messages": USER, "max_tokens": 300, "temperature": 1.5, "response_format": {"type": "json_object"}}
    body["response_format"]["schema"] = SHORT
    texts = set()
    for seed in range(12):
        response = real.client.post("/v1/chat/completions", json={**body, "seed": seed})
        texts.add(response.json()["choices"][0]["message"]["content"])
    assert len(texts) > 6
    assert all(map(conforms, texts))


def test_free_generation_is_the_same_beside_a_constrained_one(real: EngineServer) -> None:
    alone = real.complete("the world is", n_predict=40)["content"]
    body = {"prompt": "you", "n_predict": 60, "grammar": "root ::= [a-z ]{50}"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        constrained = pool.submit(lambda: real.client.post("/completion", json=body).json()["content"])
        free = pool.submit(lambda: real.complete("the world is", n_predict=40)["content"])
        assert free.result() == alone
        assert len(constrained.result()) == 50


def test_the_server_takes_a_schema_or_a_grammar_for_all_answers(tiny_llama_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "answer.gbnf"
    file.write_text('root ::= "yes" | "no"\n')
    for arguments, answers in (
        (["--grammar-file", str(file)], {"yes", "no"}),
        (["-j", '{"enum": ["a", 1]}'], {'"a"', "1"}),
    ):
        server = EngineServer(tiny_llama_path, *arguments)
        try:
            assert server.complete("x", n_predict=20)["content"] in answers
        finally:
            server.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-j", "{"], "--json-schema: JSON schema conversion failed"),
        (["-j", "{}", "--grammar", 'root ::= "a"'], "cannot be used together"),
        (["-j", '{"not": {}}'], "not"),
        (["--grammar", "root ::= ("], "line 1, column 10"),
    ],
)
def test_a_faulty_constraint_stops_the_start(tiny_llama_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineServer(tiny_llama_path, *arguments)
