"""Tool calls: the readers on any pieces, and chats over templates of every family."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import forced_text
from support_app import CALLING_TEMPLATE

from pyllama.chat.tool_calls import ToolCall, call_reader
from pyllama.chat.tool_sets import ToolSet, ToolStyle, style_of_template, tool_schemas
from pyllama.server.chat_templates import load_template

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
SCHEMAS = tool_schemas(TOOLS)
TAGGED, BARE = ToolStyle.HERMES, ToolStyle.LLAMA3


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return tagged(f"<function={name}>\n{parameters}</function>")


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARIS_BARE = '{"name": "weather", "parameters": {"city": "Paris"}}'
CASES: list[tuple[ToolStyle, str, list[Any]]] = [
    # text -> text and calls in order
    (TAGGED, "just text", ["just text"]),
    (TAGGED, " spaces kept \n", [" spaces kept \n"]),
    (TAGGED, tagged(PARIS), [call("weather", city="Paris")]),
    (TAGGED, "I look.\n" + tagged(PARIS) + "\n", ["I look.", call("weather", city="Paris")]),
    (
        TAGGED,
        tagged(PARIS) + "\n" + tagged('{"name": "clock", "arguments": {}}'),
        [call("weather", city="Paris"), call("clock")],
    ),
    (TAGGED, tagged(PARIS) + "\nDone.", [call("weather", city="Paris"), "\nDone."]),
    (TAGGED, "<tool_call>" + PARIS, [call("weather", city="Paris")]),  # the end tag is missing
    (TAGGED, tagged('{"name": "weather", "arguments": "{\\"city\\": 1}"}'), [call("weather", city=1)]),
    (TAGGED, tagged('{"name": "weather", "parameters": {"city": "漢é😀"}}'), [call("weather", city="漢é😀")]),
    (
        TAGGED,
        tagged('{"name": "weather", "arguments": {"city": "a </tool_call> \\" \\\\"}}'),
        [call("weather", city='a </tool_call> " \\')],
    ),
    (TAGGED, xml("weather", city="Paris", days="3"), [call("weather", city="Paris", days=3)]),
    (TAGGED, xml("weather", city="12", wind="True"), [call("weather", city="12", wind=True)]),
    (TAGGED, xml("weather", city="a\n\nb </tool_call> <c>"), [call("weather", city="a\n\nb </tool_call> <c>")]),
    (TAGGED, xml("weather", days="many", more='{"a": [1]}'), [call("weather", days="many", more={"a": [1]})]),
    (TAGGED, xml("clock"), [call("clock")]),
    # what is no call stays as it was written
    *[
        (TAGGED, text, [text])
        for text in (
            "a <tool_cal",
            "<tool_call>",
            "x <tool_call> y",
            "<tool_call>\n{",
            tagged('{"name": "weather", "arguments": {'),
            tagged('{"name": 5, "arguments": {}}'),
            tagged('{"name": "weather", "arguments": [1]}'),
            tagged('{"name": "weather", "arguments": {"days": NaN}}'),
            tagged('{"name": "weather", "arguments": {"days": 1e999}}'),
            tagged("<function=weather>\n<parameter=city>\nParis\n</function>"),
            tagged("<function=weather>\nloose\n</function>"),
            tagged("[1]"),
            tagged("{" * 3000),
            tagged('{"name": "weather", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001),
        )
    ],
    (TAGGED, "<tool_call>oops\n" + tagged(PARIS), ["<tool_call>oops", call("weather", city="Paris")]),
    (BARE, PARIS_BARE, [call("weather", city="Paris")]),
    (BARE, "\n" + PARIS, [call("weather", city="Paris")]),
    (BARE, "<|python_tag|>" + PARIS_BARE, [call("weather", city="Paris")]),
    (BARE, PARIS_BARE + "; " + PARIS, [call("weather", city="Paris")] * 2),
    (BARE, PARIS_BARE + "\nok", [call("weather", city="Paris"), "\nok"]),
    (
        BARE,
        '{"type": "function", "function": {"name": "clock", "parameters": {"a": "}\\""}}}',
        [call("clock", a='}"')],
    ),
    *[
        (BARE, text, [text])
        for text in (
            "text " + PARIS_BARE,
            '{"name": "unknown", "parameters": {}}',
            '{"city": "Paris"}',
            '{"name": "weather", "parameters": {"city": "Par',
            "<|python_tag|>print(1)",
            "<|pyth",
            "{",
            "",
            " ",
        )
    ],
]


def read(style: ToolStyle, pieces: Any) -> list[Any]:
    """Parts, with neighbouring texts joined."""
    reader = call_reader(ToolSet(style, SCHEMAS))
    parts: list[Any] = []
    for part in [part for piece in pieces for part in reader.push(piece)] + reader.finish():
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part:
            parts.append(part)
    return parts


@pytest.mark.parametrize(("style", "text", "parts"), CASES)
def test_calls_are_found_and_everything_else_stays_text(style: ToolStyle, text: str, parts: list[Any]) -> None:
    parts = [part for part in parts if part]
    assert read(style, [text]) == parts
    assert read(style, text) == parts  # character by character
    random_numbers = random.Random(len(text))
    for _ in range(30):
        cuts = sorted(random_numbers.choices(range(len(text) + 1), k=random_numbers.randrange(1, 5)))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert read(style, pieces) == parts


def test_any_text_reads_alike_however_it_is_cut_and_never_raises() -> None:
    random_numbers = random.Random(3)
    alphabet = [
        "<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", "{", "}", '"', "\\", '{"name": "clock"', ": ",
        ", ",
        '"arguments": {}', "<function=clock>", "</function>", "<parameter=a>", "</parameter>", "x", PARIS, PARIS_BARE,
        "<|python_tag|>", ";",
    ]  # fmt: skip
    n_calls = 0
    for _ in range(1500):
        text = "".join(random_numbers.choices(alphabet, k=random_numbers.randrange(10)))
        for style in ToolStyle:
            whole = read(style, [text])
            assert read(style, text) == whole, text
            n_calls += sum(isinstance(part, ToolCall) for part in whole)
            for part in whole:
                if isinstance(part, ToolCall):
                    assert isinstance(json.loads(part.arguments), dict)
    assert n_calls > 50


def test_half_a_surrogate_pair_is_still_json_and_utf8() -> None:
    (found,) = read(TAGGED, [tagged('{"name": "clock", "arguments": {"a": "\\ud83d"}}')])
    assert json.loads(found.arguments.encode()) == {"a": "\ud83d"}


def test_text_that_can_be_no_call_is_not_held_back() -> None:
    reader = call_reader(ToolSet(TAGGED, SCHEMAS))
    assert reader.push("a b") == ["a b"]
    assert reader.push(" <tool_call>") == []
    assert reader.push("\nno") == [" <tool_call>", "\nno"]
    reader = call_reader(ToolSet(BARE, SCHEMAS))
    assert reader.push('{"c') == ['{"c']
    assert reader.push("x") == ["x"]


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("say <tool_call>", TAGGED),
        ("Environment: ipython", BARE),
        ("<|python_tag|>", BARE),
        ("[CALLS]", None),
        ("<tool_call> <function=", ToolStyle.QWEN_XML),
        ("like <tool_call>\\n{'arguments': <args>, 'name': <name>}", ToolStyle.HERMES_ARGUMENTS_FIRST),
        ("[TOOL_CALLS] [{", ToolStyle.MISTRAL),
        ("[TOOL_CALLS] [ARGS]", ToolStyle.MISTRAL_ARGS),
        ("[TOOL_CALLS] [CALL_ID] [ARGS]", ToolStyle.MISTRAL_ID_ARGS),
    ],
)
def test_the_template_says_how_calls_are_written(source: str, style: ToolStyle | None) -> None:
    assert style_of_template(source) is style


HERMES = CALLING_TEMPLATE
QWEN = HERMES.replace("call.function.name ~ ' '", "'<function=' ~ call.function.name ~ '>'")
LLAMA3 = HERMES.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")
THINKING = HERMES.replace(
    "'assistant^'", "'assistant^<think>\\n' ~ ('</think>\\n' if enable_thinking is false else '')"
)


def saying(serve: Any, template: str | None, text: str, after: str = "^", **options: Any) -> Any:
    engine = {"next_token": forced_text(text.encode(), after=after.encode())}
    return serve(template=template, engine=engine, n_ctx=4096, **options)


def answer(server: Any, *messages: Any, **fields: Any) -> Any:
    """The choice of a chat; checks that the sum of the stream's deltas is the same message."""
    body = {"messages": list(messages or (USER,)), "max_tokens": 1000, "tools": TOOLS, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    message = choice["message"]
    events = server.events("/v1/chat/completions", body)[:-1]
    content = thoughts = ""
    calls: list[dict[str, Any]] = []
    for event in events[1:-1]:
        (delta,) = event["choices"][0]["delta"].items()
        if delta[0] == "content":
            content += delta[1]
        elif delta[0] == "reasoning_content":
            thoughts += delta[1]
        else:
            (part,) = delta[1]
            if part["index"] == len(calls):
                # Known faults E8 and E9: the first delta has no arguments, later ones nothing else.
                assert list(part) == ["index", "id", "type", "function"]
                assert part["function"]["arguments"] == ""
                calls.append({"type": part["type"], "function": dict(part["function"]), "id": part["id"]})
            else:
                assert part["index"] == len(calls) - 1
                assert list(part) == ["index", "function"]
                assert list(part["function"]) == ["arguments"]
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    assert content == message["content"]
    assert thoughts == message.get("reasoning_content", "")
    plain = message.get("tool_calls", [])
    assert [c["function"] for c in calls] == [c["function"] for c in plain]
    assert len({c["id"] for c in calls + plain}) == 2 * len(plain)
    assert all(len(c["id"]) == 32 for c in plain)
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice


def functions(choice: Any) -> list[Any]:
    calls = choice["message"].get("tool_calls", [])
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, tagged(PARIS)),
        (QWEN, xml("weather", city="Paris")),
        (LLAMA3, PARIS_BARE),
        (LLAMA3, "<|python_tag|>" + PARIS_BARE),
    ],
)
def test_a_call_is_answered_as_tool_calls(serve: Any, template: str, text: str) -> None:
    choice = answer(saying(serve, template, text))
    assert choice["finish_reason"] == "tool_calls"
    assert list(choice["message"]) == ["role", "content", "tool_calls"]
    assert list(choice["message"]["tool_calls"][0]) == ["type", "function", "id"]
    assert functions(choice) == [("weather", {"city": "Paris"})]
    assert choice["message"]["content"] == ""


@pytest.mark.contract("own 26")
def test_several_calls_with_text_and_thoughts(serve: Any) -> None:
    text = (
        "<think>\nhm <tool_call>\n</think>\n\nI look: é\n"
        + tagged(PARIS)
        + "\n"
        + tagged('{"name": "weather", "arguments": {"city": "漢😀"}}')
    )
    server = saying(serve, THINKING, text)
    choice = answer(server)
    assert functions(choice) == [("weather", {"city": "Paris"}), ("weather", {"city": "漢😀"})]
    assert choice["message"]["content"] == "I look: é"
    assert choice["message"]["reasoning_content"] == "hm <tool_call>"
    one = answer(saying(serve, THINKING, text), parallel_tool_calls=False)
    assert functions(one) == [("weather", {"city": "Paris"})]


@pytest.mark.contract("tool_call 1")
def test_calls_are_only_read_where_they_were_asked_for(serve: Any) -> None:
    text = tagged(PARIS)
    for server, fields in (
        (saying(serve, HERMES, text), {"tool_choice": "none"}),
        (saying(serve, HERMES, text), {"tools": None}),
        (saying(serve, HERMES, text), {"parse_tool_calls": False}),
        (saying(serve, HERMES, text, parses_chat=False), {}),
    ):
        choice = answer(server, **fields)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"].startswith("<tool_call>")
        assert "tool_calls" not in choice["message"]


def test_a_call_that_the_limit_cut_stays_text_and_one_before_it_counts(serve: Any) -> None:
    server = saying(serve, HERMES, tagged(PARIS) + tagged(PARIS))
    choice = answer(server, max_tokens=len(tagged(PARIS)) + 20)
    assert choice["finish_reason"] == "length"
    assert functions(choice) == [("weather", {"city": "Paris"})]
    assert choice["message"]["content"].startswith("<tool_call>\n{")


def test_log_probabilities_and_tools_go_together(serve: Any) -> None:
    """Known fault E14: `logprobs` with tools in a stream was refused while `n_probs` worked."""
    server = saying(serve, HERMES, "Hm.\n" + tagged(PARIS))
    for fields in ({"logprobs": True, "top_logprobs": 1}, {"n_probs": 1}):
        body = {"messages": [USER], "max_tokens": 1000, "tools": TOOLS, **fields}
        plain = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
        events = server.events("/v1/chat/completions", body)[:-1]
        parts = [event["choices"][0]["logprobs"]["content"] for event in events if "logprobs" in event["choices"][0]]
        assert [record for part in parts for record in part] == plain
        assert "".join(record["token"] for record in plain) == "Hm.\n" + tagged(PARIS)


def rendered(server: Any, *messages: Any, **fields: Any) -> Any:
    response = server.post("/apply-template", {"messages": list(messages or (USER,)), **fields})
    return response.json()["prompt"] if response.status_code == 200 else response


EARLIER = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
        {"id": "2", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ]},
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
    {"role": "tool", "content": [{"type": "text", "text": "noon"}], "tool_call_id": "2"},
]  # fmt: skip


def test_tools_calls_and_results_reach_the_template(serve: Any) -> None:
    text = rendered(serve(template=HERMES), *EARLIER, tools=TOOLS)
    assert text.startswith('{"name": "weather"')
    assert '<tool_call>weather {"city": "Paris"}</tool_call><tool_call>clock {}</tool_call>' in text
    assert text.endswith("tool: rain\ntool: noon\nassistant^")
    assert not rendered(serve(template=HERMES), USER, tools=TOOLS, tool_choice="none").startswith("{")


def test_a_template_without_tools_gets_them_as_text(serve: Any) -> None:
    server = saying(serve, None, tagged(PARIS), after="\x01")
    text = rendered(server, {"role": "system", "content": "Be brief."}, *EARLIER, tools=TOOLS)
    assert text.startswith("system: Be brief.\n\nYou can call functions.")
    assert json.dumps(WEATHER["function"]) in text
    assert 'assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n' in text
    assert "user: <tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n" in text
    choice = answer(server, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "\x01"})
    assert functions(choice) == [("weather", {"city": "Paris"})]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}, "tools": None}, 400),
        ({"tool_choice": {"type": "function"}}, 400),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, 400),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, 400),
        ({"tool_choice": {}}, 400),
        ({"tool_choice": 5}, 400),
        ({"tool_choice": "sometimes"}, 400),
        ({"tools": [{"type": "plugin", "function": {"name": "x"}}]}, 500),
        ({"tools": [{"type": "function", "function": {}}]}, 500),
        ({"tools": ["x"]}, 500),
        ({"tools": {}}, 400),
        ({"parallel_tool_calls": "no"}, 400),
        ({"grammar": 'root ::= "a"'}, 400),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused(serve: Any, fields: dict[str, Any], status: int) -> None:
    """Known faults E17 and E18: a forced call silently became `auto`, or was not forced."""
    body = {"messages": [USER], "max_tokens": 1, "tools": TOOLS, **fields}
    response = serve(template=THINKING + "{# </think> #}").post("/v1/chat/completions", body)
    assert response.status_code == status, response.text
    name = next(iter(fields))
    assert name in response.json()["error"]["message"] or name == "tools"


def test_a_family_whose_calls_cannot_be_read_is_refused_by_name(serve: Any) -> None:
    template = HERMES.replace("<tool_call>", "[CALLS]").replace("</tool_call>", "")
    response = serve(template=template).post("/v1/chat/completions", {"messages": [USER], "tools": TOOLS})
    assert response.status_code == 501
    assert "'tools'" in response.json()["error"]["message"]


def test_a_models_own_template_for_tools_is_used_with_tools_only(serve: Any, caplog: Any) -> None:
    server = serve()
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": HERMES}
    template, error = load_template("", metadata, server.vocabulary.tokenizer)
    assert error is None
    server.state.set_loaded(replace(server.state.loaded, chat_template=template))
    assert rendered(server, USER) == "plain"
    assert rendered(server, USER, tools=TOOLS).startswith('{"name": "weather"')
    assert rendered(server, USER, tools=TOOLS, tool_choice="none") == "plain"
    template, _ = load_template("{{ 'mine' }}", metadata, server.vocabulary.tokenizer)
    assert template is not None
    assert template.tool_use is None
    template, error = load_template(
        "", {**metadata, "tokenizer.chat_template.tool_use": "{% x"}, server.vocabulary.tokenizer
    )
    assert error is None
    assert template is not None
    assert (template.source, template.tool_use) == ("plain", None)
    assert "tool_use" in caplog.text


def test_thoughts_that_stay_in_the_content_hold_no_calls(serve: Any) -> None:
    text = "\n<think>\nhm " + tagged(PARIS) + "\n</think>\n\nI look.\n" + tagged(PARIS)
    server = saying(serve, HERMES + "{# </think> #}", text)
    shown = text[: -len(tagged(PARIS))].rstrip()
    for reasoning_format, thoughts in (("none", None), ("deepseek-legacy", "hm " + tagged(PARIS))):
        body = {"messages": [USER], "max_tokens": 1000, "tools": TOOLS, "reasoning_format": reasoning_format}
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        assert functions(choice) == [("weather", {"city": "Paris"})]
        assert choice["message"]["content"] == shown
        assert choice["message"].get("reasoning_content") == thoughts
        deltas = [event["choices"][0]["delta"] for event in server.events("/v1/chat/completions", body)[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == shown
    opened = saying(serve, THINKING + "{# </think> #}", text.lstrip())
    body["reasoning_format"] = "none"
    choice = opened.post("/v1/chat/completions", body).json()["choices"][0]
    assert functions(choice) == [("weather", {"city": "Paris"})]
    assert choice["message"]["content"] == shown.removeprefix("\n<think>\n")


def test_a_verbose_chat_says_how_its_answer_is_steered_and_read(serve: Any) -> None:
    server = saying(serve, HERMES, "no")
    body = {"messages": [USER], "max_tokens": 5, "tools": TOOLS, "verbose": True}
    settings = server.post("/v1/chat/completions", body).json()["__verbose"]["generation_settings"]
    assert settings["chat_format"] == "peg-native"
    assert settings["generation_prompt"] == "assistant^"
    assert settings["grammar_lazy"] is True
    assert settings["grammar_triggers"] == [{"type": 1, "value": "<tool_call>"}]
    settings = server.post("/completion", {"prompt": "a^", "n_predict": 2}).json()["generation_settings"]
    assert (settings["chat_format"], settings["grammar_lazy"]) == ("Content-only", False)
