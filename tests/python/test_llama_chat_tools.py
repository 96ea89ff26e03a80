"""Tools and thoughts of `Llama.create_chat_completion`, on a real engine with random weights.

A logits processor makes the model write any text that the grammars allow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllama import InvalidArgument, Llama, LlamaGrammar

pytest.importorskip("pyllama._engine", reason="needs the native module")

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = """\
{%- if tools -%}{{- tools | tojson ~ '\\n' -}}{%- endif -%}
{%- for m in messages -%}
    {{- m.role ~ ':' ~ (m.content or '').split('</think>')[-1] -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '<tool_call>' ~ call.function.name ~ call.function.arguments | tojson ~ '</tool_call>' -}}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' ~ ('<think>' if enable_thinking else '') -}}{%- endif -%}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}


@pytest.fixture(scope="module")
def llm(tiny_llama_path: Path) -> Iterator[Llama]:
    with Llama(str(tiny_llama_path), n_ctx=2048, n_threads=1, chat_format=TEMPLATE, verbose=False) as llama:
        yield llama


def wanting(llm: Llama, text: str) -> Any:
    """A processor with which the model writes `text`, then ends."""
    tokens = llm.tokenize(text.encode(), add_bos=False)
    start: list[int] = []

    def process(ids: Any, scores: Any) -> Any:
        if not start:
            start.append(len(ids))
        n_done = len(ids) - start[0]
        scores[tokens[n_done] if n_done < len(tokens) else llm.token_eos()] = 1000
        return scores

    return [process]


def chat(llm: Llama, text: str | None = None, **options: Any) -> Any:
    """The choice; checks that the stream's deltas put together are the same message."""
    options = {"messages": MESSAGES, "max_tokens": 300, "temperature": 0, **options}

    def run(stream: bool) -> Any:
        processors = {} if text is None else {"logits_processor": wanting(llm, text)}
        return llm.create_chat_completion(**options, **processors, stream=stream)

    choice = run(False)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in run(True)]
    assert chunks[0]["delta"] == {"role": "assistant"}
    assert chunks[-1]["delta"] == {}
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    sums = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, str]] = []
    for chunk in chunks[1:-1]:
        ((kind, value),) = chunk["delta"].items()
        if kind != "tool_calls":
            sums[kind] += value
            continue
        for part in value:
            if "id" in part:
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    message = choice["message"]
    assert sums == {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", "")}
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    return choice


def functions(choice: Any) -> list[Any]:
    return [call["function"] for call in choice["message"].get("tool_calls", [])]


def test_a_free_call_with_text_before_it(llm: Llama) -> None:
    choice = chat(llm, "I look.\n" + CALL, tools=TOOLS)
    assert functions(choice) == [ROME]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    alone = chat(llm, CALL, tools=TOOLS, tool_choice="auto")["message"]
    assert alone["content"] is None
    assert alone["tool_calls"][0]["type"] == "function"
    assert alone["tool_calls"][0]["id"]
    assert chat(llm, "No.", tools=TOOLS)["message"] == {"role": "assistant", "content": "No."}
    assert chat(llm, CALL, tools=TOOLS, tool_choice="none")["message"]["content"] == CALL


@pytest.mark.parametrize("temperature", [0, 3.0])
def test_a_call_is_forced_and_keeps_to_its_schema(llm: Llama, temperature: float) -> None:
    for seed in range(3):
        options = {"tools": TOOLS, "temperature": temperature, "seed": seed, "parallel_tool_calls": False}
        options["chat_template_kwargs"] = {"enable_thinking": False}
        (call,) = functions(chat(llm, tool_choice="required", **options))
        arguments = json.loads(call["arguments"])
        if call["name"] == "weather":
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments.get("days", 0) <= 9
        else:
            assert (call["name"], arguments) == ("clock", {})
        named = {"type": "function", "function": {"name": "clock"}}
        assert functions(chat(llm, tool_choice=named, **options)) == [{"name": "clock", "arguments": "{}"}]


def test_calls_and_results_of_earlier_turns_reach_the_template(llm: Llama) -> None:
    earlier = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": ROME}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    chat(llm, "ok", messages=earlier, tools=TOOLS)
    prompt = llm.detokenize(llm.eval_tokens, special=True).decode()
    assert '<tool_call>weather{"city": "Rome"}</tool_call>tool:sunny' in prompt
    assert '"name": "clock"' in prompt


def test_a_template_without_tools_gets_them_as_text(tiny_llama_path: Path) -> None:
    with Llama(str(tiny_llama_path), n_ctx=2048, n_threads=1, chat_format="chatml", verbose=False) as llama:
        assert functions(chat(llama, CALL, tools=TOOLS)) == [ROME]
        assert b"You can call functions." in llama.detokenize(llama.eval_tokens, special=True)


def test_thoughts_are_told_apart_when_asked(llm: Llama) -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    assert chat(llm, text)["message"] == {"role": "assistant", "content": text}
    apart = chat(llm, text, reasoning_format="deepseek")["message"]
    assert apart == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    opened = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_format": "auto"}
    assert chat(llm, "hm</think>Yes.", **opened)["message"] == apart
    both = chat(llm, "hm" + CALL + "</think>" + CALL, tools=TOOLS, **opened)["message"]
    assert (both["reasoning_content"], [call["function"] for call in both["tool_calls"]]) == ("hm" + CALL, [ROME])


def test_thoughts_have_a_limit(llm: Llama) -> None:
    options = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_format": "deepseek", "max_tokens": 200}
    message = chat(llm, reasoning_budget=8, reasoning_budget_message=" (stop)", **options)["message"]
    assert message["reasoning_content"].endswith("(stop)")
    assert message["content"]
    forced = chat(
        llm, reasoning_budget=5, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False, **options
    )
    assert functions(forced) == [{"name": "clock", "arguments": "{}"}]
    assert forced["message"]["reasoning_content"]


def test_a_schema_comes_after_thoughts_that_are_told_apart_and_instead_of_others(llm: Llama) -> None:
    schema = {"type": "json_object", "schema": {"enum": [1, 2]}}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "response_format": schema}
    assert chat(llm, **thinking)["message"]["content"] in ("1", "2")
    message = chat(llm, reasoning_format="deepseek", reasoning_budget=5, **thinking)["message"]
    assert message["content"] in ("1", "2")
    assert message["reasoning_content"]
    assert chat(llm, tools=TOOLS, **thinking)["message"]["content"] in ("1", "2")  # it wins over tools
    grammar = LlamaGrammar.from_string('root ::= "ok"')
    options = {"chat_template_kwargs": {"enable_thinking": True}, "grammar": grammar, "reasoning_format": "deepseek"}
    assert chat(llm, **options)["message"] == {"role": "assistant", "content": "ok"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool 'x'"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "grammar": LlamaGrammar.from_string('root ::= "a"')}, "grammar and tools"),
        ({"reasoning_format": "sound"}, "reasoning_format"),
        ({"chat_template_kwargs": {"messages": []}}, "reserved"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]},
            "'f'.*not",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(llm: Llama, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){words}"):
        llm.create_chat_completion(MESSAGES, max_tokens=1, **options)
