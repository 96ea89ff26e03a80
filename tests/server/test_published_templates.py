"""The end of the prompt with templates that write as published models do: thinking on, off and left to the model, with
and without tools; the date of the day; the generation prompt. The templates are ours, cut down to what matters here.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from engine_server import EngineServer

USER = {"role": "user", "content": "What day is today?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}

R1 = """\
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'system' -%}{{- m.content -}}{%- endif -%}
    {%- if m.role == 'user' -%}{{- '<｜User｜>' ~ m.content -}}{%- endif -%}
    {%- if m.role == 'assistant' -%}
        {{- '<｜Assistant｜>' ~ m.content.split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""
QWEN = """\
{%- if tools -%}
    {{- '<|im_start|>system\\nTools, as JSON in <tools></tools>:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>' -}}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content.split('</think>')[-1] -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    END
{%- endif -%}
"""
QWEN3 = QWEN.replace(
    "END",
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}",
)
QWQ = QWEN.replace("END", "{{- '<think>\\n' -}}")
COMMAND_R7B = """\
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}
        {%- if m.reasoning_content -%}
            {{- '<|START_THINKING|>' ~ m.reasoning_content ~ '<|END_THINKING|>' -}}
        {%- endif -%}
        {{- '<|START_RESPONSE|>' ~ m.content ~ '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' -}}
    {%- else -%}
        {{- '<|START_OF_TURN_TOKEN|><|' ~ m.role | upper ~ '_TOKEN|>' ~ m.content ~ '<|END_OF_TURN_TOKEN|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}{%- endif -%}
"""


def prompt(server: Any, **fields: Any) -> str:
    response = server.post("/apply-template", {"messages": [USER], **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


@pytest.mark.contract("template 1")
@pytest.mark.parametrize("tools", [None, [], [TOOL]], ids=["absent", "none", "one"])
@pytest.mark.parametrize(
    ("template", "mode", "end"),
    [
        (R1, "on", "<｜Assistant｜><think>\n"),
        (R1, "auto", "<｜Assistant｜><think>\n"),
        (R1, "off", "<｜Assistant｜><think>\n</think>"),
        (QWEN3, "auto", "<|im_start|>assistant\n"),
        (QWEN3, "on", "<|im_start|>assistant\n"),
        (QWEN3, "off", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (QWQ, "auto", "<|im_start|>assistant\n<think>\n"),
        (QWQ, "off", "<|im_start|>assistant\n<think>\n</think>"),
        (COMMAND_R7B, "auto", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
        (COMMAND_R7B, "off", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"),
    ],
)
def test_the_prompt_ends_as_thinking_is_set(serve: Any, template: str, mode: str, end: str, tools: Any) -> None:
    fields = {} if tools is None else {"tools": tools}
    server = serve(template=template, reasoning=mode != "off")
    text = prompt(server, **fields)
    assert text.endswith(end)
    assert ("lookup" in text) == bool(tools)
    # A request says the same as the option.
    assert prompt(serve(template=template), chat_template_kwargs={"enable_thinking": mode != "off"}, **fields) == text


@pytest.mark.parametrize("template", [R1, QWEN3, QWQ, COMMAND_R7B])
def test_with_thinking_off_the_answer_is_content(serve: Any, template: str) -> None:
    server = serve(template=template, reasoning=False)
    message = server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 8}).json()["choices"][0]["message"]
    assert list(message) == ["role", "content"]
    assert message["content"]


@pytest.mark.parametrize("template", [R1, QWEN3, QWQ, COMMAND_R7B])
def test_an_answer_to_be_continued_gets_no_second_block(serve: Any, template: str) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    text = prompt(serve(template=template, reasoning=False), messages=messages)
    assert text.endswith("It is")
    assert text.count("think>") in (0, 2)
    assert "THINKING" not in text


@pytest.mark.contract("template 2")
@pytest.mark.parametrize("form", ["%d %b %Y", "%b %d %Y", "%B %d, %Y"])
def test_the_date_of_the_day_is_in_the_prompt(serve: Any, form: str) -> None:
    server = serve(
        template="{{- 'Today Date: ' ~ strftime_now('" + form + "') -}}"
        "{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
    )
    before = datetime.now().strftime(form)
    text = prompt(server)
    assert any(f"Today Date: {date}" in text for date in (before, datetime.now().strftime(form)))


@pytest.mark.contract("template 3")
@pytest.mark.parametrize(
    ("template", "header"),
    [
        (QWEN3, "<|im_start|>assistant\n"),
        (R1, "<｜Assistant｜>"),
        (COMMAND_R7B, "<|CHATBOT_TOKEN|>"),
    ],
)
def test_the_assistants_header_is_there_when_asked_for(serve: Any, template: str, header: str) -> None:
    server = serve(template=template)
    assert header in prompt(server)
    assert header in prompt(server, add_generation_prompt=True)
    assert header not in prompt(server, add_generation_prompt=False)
    off = serve(template=template, reasoning=False)
    assert "think" not in prompt(off, add_generation_prompt=False).lower()


@pytest.mark.contract("template 1")
@pytest.mark.parametrize(("mode", "end"), [("on", "<think>\n"), ("off", "<think>\n</think>"), ("auto", "<think>\n")])
def test_the_options_of_the_program_reach_the_template(
    tiny_llama_path: Any, tmp_path: Any, mode: str, end: str
) -> None:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    file = tmp_path / "template.jinja"
    file.write_text(R1, encoding="utf-8")
    server = EngineServer(tiny_llama_path, "--chat-template-file", str(file), "--reasoning", mode)
    try:
        text = server.client.post("/apply-template", json={"messages": [USER]}).json()["prompt"]
    finally:
        server.close()
    assert text.endswith("<｜Assistant｜>" + end)
