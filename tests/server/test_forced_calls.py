"""Tool calls that keep to their schemas: forced ones, free ones once they have begun, in the way of every family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engine_server import EngineServer
from fake_engine import BOS, END, FakeTokenizer, forced_text

from pyllama.chat.answer import AnswerParser, AnswerShape, whole_answer
from pyllama.chat.reasoning_split import KNOWN_TAGS
from pyllama.chat.tool_calls import ToolCall, call_reader
from pyllama.chat.tool_sets import ToolSet, ToolStyle, tool_schemas

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]

# Templates of our own in the published ways of writing calls. `^` ends the prompt.
_TURNS = """\
{%%- if tools -%%}{%%- for tool in tools -%%}{{- tool | tojson ~ '\\n' -}}{%%- endfor -%%}{%%- endif -%%}
{%%- for m in messages -%%}
    {{- m.role ~ ': ' ~ (m.content or '') -}}
    {%%- for call in m.tool_calls or [] -%%}%s{%%- endfor -%%}
    {{- '\\n' -}}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}{{- 'assistant^' -}}{%%- endif -%%}
"""
_JSON = (
    "{{- '%s{\"name\": ' ~ call.function.name | tojson ~ ', \"%s\": ' ~ call.function.arguments | tojson ~ '}%s' -}}"
)
_XML = """\
{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' -}}
{%- for key, value in call.function.arguments.items() -%}
    {{- '<parameter=' ~ key ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}"""
_MISTRAL = "{{- '[TOOL_CALLS]' ~ call.function.name ~ %s'[ARGS]' ~ call.function.arguments | tojson -}}"
TEMPLATES = {
    ToolStyle.HERMES: _TURNS % (_JSON % ("<tool_call>\\n", "arguments", "\\n</tool_call>")),
    ToolStyle.HERMES_ARGUMENTS_FIRST: _TURNS % (_JSON % ("<tool_call>", "arguments", "</tool_call>"))
    + '{# <tool_call>\n{"arguments": ..., "name": ...} #}',
    ToolStyle.QWEN_XML: _TURNS % _XML,
    ToolStyle.LLAMA3: _TURNS % (_JSON % ("", "parameters", "")) + "{# <|python_tag|> #}",
    ToolStyle.MISTRAL: _TURNS % (_JSON % ("[TOOL_CALLS][", "arguments", "]")),
    ToolStyle.MISTRAL_ARGS: _TURNS % (_MISTRAL % ""),
    ToolStyle.MISTRAL_ID_ARGS: _TURNS % (_MISTRAL % "'[CALL_ID]' ~ call.id ~ "),
    None: _TURNS.replace("if tools", "if false") % "",  # knows no tools: they are described, and written as Hermes does
}
PARIS = {"city": "Paris", "unit": "C"}
CALLS = {
    ToolStyle.HERMES: '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}\n</tool_call>',
    ToolStyle.HERMES_ARGUMENTS_FIRST: '<tool_call>{"arguments": {"city": "Paris", "unit": "C"}, "name": "weather"}'
    "</tool_call>",
    ToolStyle.QWEN_XML: "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=unit>\nC\n"
    "</parameter>\n</function>\n</tool_call>",
    ToolStyle.LLAMA3: '{"name": "weather", "parameters": {"city": "Paris", "unit": "C"}}',
    ToolStyle.MISTRAL: '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}]',
    ToolStyle.MISTRAL_ARGS: '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "unit": "C"}',
    ToolStyle.MISTRAL_ID_ARGS: '[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "Paris", "unit": "C"}',
    None: '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}</tool_call>',
}
FAMILIES = pytest.mark.parametrize("style", list(TEMPLATES), ids=lambda style: style.name if style else "fallback")


def is_valid(name: str, arguments: Any) -> bool:
    if name == "clock":
        return bool(arguments == {})
    return (
        name == "weather"
        and {"city", "unit"} <= arguments.keys() <= {"city", "unit", "days"}
        and isinstance(arguments["city"], str)
        and len(arguments["city"]) <= 6
        and arguments["unit"] in ("C", "F")
        and ("days" not in arguments or (type(arguments["days"]) is int and 0 <= arguments["days"] <= 99))
    )


def saying(serve: Any, style: ToolStyle | None, text: str, **options: Any) -> Any:
    engine = {"next_token": forced_text(text.encode(), after=b"^")}
    return serve(**{"template": TEMPLATES[style], "engine": engine, "n_ctx": 8192, **options})


def choice_of(server: Any, **fields: Any) -> Any:
    """The choice of a chat; checks that the sum of the stream's deltas is the same message."""
    body = {"messages": [USER], "max_tokens": 600, "tools": TOOLS, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    sums: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in server.events("/v1/chat/completions", body)[:-1]:
        for kind, value in event["choices"][0]["delta"].items():
            if kind == "tool_calls":
                for part in value:
                    if "name" in part["function"]:
                        sums[kind].append((part["function"]["name"], ""))
                    name, arguments = sums[kind][part["index"]]
                    sums[kind][part["index"]] = (name, arguments + part["function"]["arguments"])
            elif kind in sums:
                sums[kind] += value or ""
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    plain = {"content": message["content"], "reasoning_content": message.get("reasoning_content", "")}
    assert sums == {**plain, "tool_calls": calls}
    return choice


def functions(choice: Any) -> list[Any]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@FAMILIES
def test_a_free_call_is_read_with_text_before_it_and_a_second_call(serve: Any, style: ToolStyle | None) -> None:
    """Known fault D9."""
    call = CALLS[style]
    has_text = style is not ToolStyle.LLAMA3
    between = {ToolStyle.LLAMA3: "; ", ToolStyle.HERMES: "\n"}.get(style, "")  # type: ignore[call-overload]
    text = ("Let me see. é\n" if has_text else "") + call + between + call
    if style is ToolStyle.MISTRAL:
        text = "Let me see. é\n" + call[:-1] + ", " + call.removeprefix("[TOOL_CALLS][")
    choice = choice_of(saying(serve, style, text))
    assert functions(choice) == [("weather", PARIS)] * 2
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ("Let me see. é" if has_text else "")
    if style is ToolStyle.MISTRAL_ID_ARGS:
        assert choice["message"]["tool_calls"][0]["id"] == "abcdef123"
    assert functions(choice_of(saying(serve, style, text), parallel_tool_calls=False)) == [("weather", PARIS)]


@FAMILIES
def test_a_free_answer_needs_no_call_and_a_call_that_has_begun_keeps_to_its_schema(
    serve: Any, style: ToolStyle | None
) -> None:
    choice = choice_of(saying(serve, style, 'No. < [ { "name": "weather" }'))
    assert choice["message"] == {"role": "assistant", "content": 'No. < [ { "name": "weather" }'}
    wrong = CALLS[style].replace("Paris", "Paris and Rome").replace("C", "K")
    for name, arguments in functions(choice_of(saying(serve, style, wrong), temperature=0)):
        assert is_valid(name, arguments)


@pytest.mark.contract("own 25")
@FAMILIES
def test_a_call_is_forced_from_a_model_that_would_not_make_it(serve: Any, style: ToolStyle | None) -> None:
    """Known faults E17 and E18."""
    server = serve(template=TEMPLATES[style], n_ctx=8192)
    required = functions(choice_of(server, tool_choice="required", parallel_tool_calls=False))
    assert len(required) == 1
    assert is_valid(*required[0])
    for name in ("weather", "clock"):
        choice = {"type": "function", "function": {"name": name}}
        (call,) = functions(choice_of(server, tool_choice=choice, parallel_tool_calls=False))
        assert call[0] == name
        assert is_valid(*call)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert functions(choice_of(server, tool_choice=choice, parallel_tool_calls=False)) == [("clock", {})]


def test_a_name_that_no_tool_has_is_a_400_that_says_it(serve: Any) -> None:
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}}
    response = serve(template=TEMPLATES[ToolStyle.HERMES]).post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "'nothing'" in response.json()["error"]["message"]


@pytest.mark.parametrize("style", [ToolStyle.HERMES, ToolStyle.QWEN_XML])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": 5}}}, "type must be"),
        ({"type": "string"}, "arguments are an object"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_a_400_with_the_tool_and_the_reason(
    serve: Any, style: ToolStyle, parameters: Any, words: str
) -> None:
    tools = [CLOCK, {"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    for choice in ("auto", "required"):
        body = {"messages": [USER], "tools": tools, "tool_choice": choice}
        response = serve(template=TEMPLATES[style]).post("/v1/chat/completions", body)
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert "'tools'" in message
        assert "'odd'" in message
        assert words in message


def test_many_large_tools_and_long_strings_are_honoured(serve: Any) -> None:
    """Known faults D3 and D5."""
    for style in (ToolStyle.HERMES, ToolStyle.QWEN_XML):
        tools = [
            {
                "type": "function",
                "function": {
                    "name": f"tool_{i}",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            f"p{k}": {"type": "string", "maxLength": (1999, 2000, 2001, 100_000)[k]} for k in range(4)
                        },
                        "required": ["p0"],
                    },
                },
            }
            for i in range(32)
        ]
        named = {"type": "function", "function": {"name": "tool_31"}}
        for choice in ("auto", named):
            body = {"messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 40}
            response = serve(template=TEMPLATES[style], n_ctx=16384).post("/v1/chat/completions", body)
            assert response.status_code == 200, response.text


THINKING = TEMPLATES[ToolStyle.HERMES].replace("'assistant^'", "'assistant^<think>\\n'") + "{# </think> #}"


def test_a_forced_call_comes_after_the_thoughts(serve: Any) -> None:
    text = "<think>\nhm <tool_call> é\n</think>\n\n" + CALLS[ToolStyle.HERMES]
    for template in (THINKING, TEMPLATES[ToolStyle.HERMES] + "{# </think> #}"):  # who opens the block: prompt, model
        for choice in ("auto", "required"):
            server = saying(serve, None, text, template=template)
            answer = choice_of(server, tool_choice=choice)
            assert functions(answer) == [("weather", PARIS)]
            assert answer["message"]["reasoning_content"] == "hm <tool_call> é"
            assert answer["message"]["content"] == ""
    # Thoughts that would never end, or end the answer.
    for thoughts in ("<think>\n" + "so " * 500, "<think>\nso"):
        server = saying(serve, None, thoughts, template=THINKING)
        answer = choice_of(server, tool_choice="required", reasoning_budget_tokens=20, parallel_tool_calls=False)
        assert answer["finish_reason"] == "tool_calls"
        assert [is_valid(*call) for call in functions(answer)] == [True]
        assert answer["message"]["reasoning_content"].startswith("so")


def test_without_thinking_a_forced_call_is_the_whole_answer(serve: Any) -> None:
    text = "<think>\nhm</think>" + CALLS[ToolStyle.HERMES]
    server = saying(serve, None, text, template=TEMPLATES[ToolStyle.HERMES] + "{# </think> #}")
    answer = choice_of(server, tool_choice="required", reasoning_effort="none", parallel_tool_calls=False)
    assert "reasoning_content" not in answer["message"]
    assert [is_valid(*call) for call in functions(answer)] == [True]


class MergedTokenizer(FakeTokenizer):
    """Besides bytes, texts that hold a tag and more; and a tag that is a control token."""

    WORDS: ClassVar = {
        1: b"<tool_call>\n",
        2: b"I see. <tool_",
        3: b'call>{"',
        4: b"</think>\n\n<tool_call>",
        5: b"call>wrong",
    }
    TAG = 6

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token == self.TAG:
            return b"[TOOL_CALLS]" if special else b""
        return self.WORDS.get(token) or super().piece(token, special=special)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        if parse_special and text == "[TOOL_CALLS]":
            return [self.TAG]
        return super().encode(text, add_special=add_special, parse_special=parse_special)


def saying_tokens(serve: Any, template: str, tokens: list[int], **options: Any) -> Any:
    def next_token(history: Any, sampler: Any) -> int:
        n_done = len(history) - list(history).index(ord("^")) - 1
        return tokens[n_done] if n_done < len(tokens) else END

    options = {"engine": {"next_token": next_token}, "tokenizer_class": MergedTokenizer, "n_ctx": 8192, **options}
    return serve(template=template, **options)


REST = b'{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}</tool_call>'


@pytest.mark.parametrize(
    ("tokens", "content"),
    [
        ([1, *REST], ""),
        ([*b"<tool_", 3, *REST[2:], 1, *REST], ""),
        ([2, 3, *REST[2:]], "I see."),
        ([*b"Hm <tool_c", *b"all>", *REST], "Hm"),
    ],
)
def test_tags_split_over_tokens_and_merged_with_text_start_the_grammar(
    serve: Any, tokens: list[int], content: str
) -> None:
    """Known fault D9."""
    server = saying_tokens(serve, TEMPLATES[ToolStyle.HERMES], tokens)
    for choice in ("auto",) if content else ("auto", "required"):  # a forced answer has no text before the call
        answer = choice_of(server, tool_choice=choice)
        assert set(map(str, functions(answer))) == {str(("weather", PARIS))}
        assert answer["message"]["content"] == content


def test_a_token_that_would_complete_the_tag_and_go_on_wrongly_is_not_drawn(serve: Any) -> None:
    """Known fault D9."""
    server = saying_tokens(serve, TEMPLATES[ToolStyle.HERMES], [2, 5, *REST])
    answer = choice_of(server, max_tokens=60)
    assert "<tool_call>wrong" not in json.dumps(answer)


def test_the_end_of_thoughts_may_share_its_token_with_the_call(serve: Any) -> None:
    tokens = [*b"<think>\nhm", 4, *REST]
    for choice in ("auto", "required"):
        answer = choice_of(saying_tokens(serve, THINKING, tokens), tool_choice=choice)
        assert functions(answer) == [("weather", PARIS)]
        assert answer["message"]["reasoning_content"] == "hm"


def test_a_tag_that_is_a_control_token_starts_and_is_forced(serve: Any) -> None:
    tokens = [MergedTokenizer.TAG, *b'[{"name": "clock", "arguments": {}}]']
    template = TEMPLATES[ToolStyle.MISTRAL]
    assert functions(choice_of(saying_tokens(serve, template, tokens))) == [("clock", {})]
    forced = choice_of(saying_tokens(serve, template, [BOS]), tool_choice="required", parallel_tool_calls=False)
    assert [is_valid(*call) for call in functions(forced)] == [True]


@FAMILIES
def test_the_message_does_not_depend_on_where_its_text_was_cut(style: ToolStyle | None) -> None:
    """Every place of the text, for text, thoughts and calls together."""
    style = style or ToolStyle.HERMES
    has_text = style is not ToolStyle.LLAMA3
    text = "<think>\nwhy 漢\n</think>\n\n" + ("So é. " if has_text else "") + CALLS.get(style, "")
    shape = AnswerShape(tags=KNOWN_TAGS[0], tools=ToolSet(style, tool_schemas(TOOLS)))

    def parts(message: Any) -> Any:
        calls = [call["function"] for call in message.get("tool_calls", [])]
        return message["content"], message.get("reasoning_content"), calls

    whole = parts(whole_answer(shape, text).message())
    assert whole[0] == ("So é." if has_text else "")
    assert whole[1] == "why 漢"
    assert [(call["name"], json.loads(call["arguments"])) for call in whole[2]] == [("weather", PARIS)]
    data = text.encode()
    for cut in range(len(data) + 1):
        parser = AnswerParser(shape)
        first = data[:cut].decode("utf-8", "ignore")  # what a stream shows of an incomplete character: nothing yet
        deltas = parser.push(first) + parser.push(text[len(first) :]) + parser.finish()
        assert parts(parser.message()) == whole
        assert "".join(delta.get("content", "") for delta in deltas) == whole[0]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole[1]
        sent = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
        assert "".join(part["arguments"] for part in sent) == "".join(call["arguments"] for call in whole[2])


@pytest.mark.parametrize("style", [ToolStyle.MISTRAL, ToolStyle.MISTRAL_ARGS, ToolStyle.MISTRAL_ID_ARGS])
def test_what_only_looks_like_a_call_of_this_family_is_text(style: ToolStyle) -> None:
    tools = ToolSet(style, tool_schemas(TOOLS))
    texts = [
        "[TOOL_CALLS]", "[TOOL_CALLS] [1]", '[TOOL_CALLS][{"name": 5}]', "[TOOL_CALLS]name[ARGS]", "[TOOL_CAL",
        "a [TOOL_CALLS]name{", "[TOOL_CALLS]name[ARGS]{]", "[TOOL_CALLS]a[CALL_ID]b", "[TOOL_CALLS]a[CALL_ID]b[ARGS]x",
        "[TOOL_CALLS][]",
    ]  # fmt: skip
    for text in texts:
        for pieces in ([text], list(text)):
            reader = call_reader(tools)
            parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
            assert not any(isinstance(part, ToolCall) for part in parts), text
            assert "".join(part for part in parts if isinstance(part, str)) == text


# ---- the real engine


@pytest.fixture(scope="module", params=list(TEMPLATES), ids=lambda style: style.name if style else "fallback")
def real(request: pytest.FixtureRequest, tiny_llama_path: Path) -> Iterator[EngineServer]:
    server = EngineServer(tiny_llama_path, "--chat-template", TEMPLATES[request.param])
    yield server
    server.close()


def test_random_weights_make_valid_calls(real: EngineServer) -> None:
    """Known fault E18."""
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    seen = set()
    for seed in range(10):
        fields = {**body, "max_tokens": 300, "temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": seed}
        choice = real.client.post("/v1/chat/completions", json=fields).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] == ""
        (call,) = functions(choice)
        assert is_valid(*call)
        seen.add(str(call))
    assert len(seen) > 3


def test_a_hybrid_model_thinks_as_long_as_it_may_and_then_calls(tiny_hybrid_path: Path) -> None:
    """Known faults E17 and E18."""
    server = EngineServer(tiny_hybrid_path, "--chat-template", THINKING, "--reasoning-budget", "12")
    try:
        body = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 400}
        for name in ("weather", "clock"):
            choice = {"type": "function", "function": {"name": name}}
            answer = server.client.post("/v1/chat/completions", json={**body, "tool_choice": choice}).json()
            (call,) = functions(answer["choices"][0])
            assert call[0] == name
            assert is_valid(*call)
            assert answer["choices"][0]["message"]["reasoning_content"]
    finally:
        server.close()


def test_a_call_that_the_client_began_is_finished_by_its_schema(serve: Any) -> None:
    begun = {"role": "assistant", "content": '<tool_call>{"name": "weather", "arguments": {"city": "Rome", '}
    server = serve(template=TEMPLATES[ToolStyle.HERMES], n_ctx=8192)
    for choice in ("auto", "required"):
        fields = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 600, "echo": True}
        body = {"messages": [USER, begun], "tools": TOOLS, **fields}
        answer = server.post("/v1/chat/completions", body).json()["choices"][0]
        ((name, arguments),) = functions(answer)
        assert is_valid(name, arguments)
        assert arguments["city"] == "Rome"
