"""`ChatTemplate`: rendering, errors in the template's own words, capabilities, the choice of a template for a model."""

from __future__ import annotations

import datetime
import json
import threading
from typing import Any

import pytest

from pyllama.chat_template import ChatTemplate, template_from_metadata, without_duplicate_special
from pyllama.chat_template_builtins import BUILTIN_TEMPLATES
from pyllama.chat_template_turns import TURNS
from pyllama.errors import TemplateError
from pyllama.tokenizer import Tokenizer
from pyllama.tokenizer_bpe import byte_characters

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]

# Written for these tests: the features that templates of agentic models use, in one page.
AGENT_TEMPLATE = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}{%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set state = namespace(last_user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set state.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if state.last_user < 0 -%}{{- raise_exception('No user query found in messages.') -}}{%- endif -%}
{%- if tools -%}
    {{- '<tools>\\n' -}}
    {%- for tool in tools %}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}
    {{- '</tools>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{- raise_exception('System message must be at the beginning.') -}}
    {%- endif -%}
    {{- '<|' ~ message.role ~ '|>' ~ text_of(message.content or '') -}}
    {%- if message.reasoning_content and (preserve_thinking or loop.index0 > state.last_user) -%}
        {{- '<think>' ~ message.reasoning_content ~ '</think>' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '<call name=' ~ call.function.name ~ '>' -}}
        {%- for name, value in call.function.arguments.items() %}{{- name ~ '=' ~ (value | tojson) ~ ';' -}}{%- endfor
        -%}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' ~ ('<think>\\n\\n</think>\\n' if enable_thinking is false else '<think>\\n') -}}
{%- endif -%}
"""


def render(source: str, /, **variables: Any) -> str:
    return ChatTemplate(source).render(CONVERSATION, **variables)


def tokenizer(**changes: Any) -> Tokenizer:
    tokens = [*byte_characters(), "<s>", "</s>"]
    keys = {
        "model": "gpt2",
        "pre": "qwen2",
        "merges": ["a b"],
        "tokens": tokens,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    keys["token_type"] = [1] * 256 + [3, 3]
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in {**keys, **changes}.items()})


# Rendering


def test_blocks_leave_no_lines_behind() -> None:
    assert (
        render("{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\nend")
        == "system\nend"
    )


def test_variables_reach_the_template() -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ x.y }}|{{ tools is none }}|{{ add_generation_prompt }}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render([], x={"y": 1}, add_generation_prompt=False) == "<s>|</s>|1|True|False"


def test_variables_may_have_any_name_but_do_not_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }} {{ self_ }} {{ bos_token }}")
    assert template.render(CONVERSATION, **{"messages": [], "self_": 1, "bos_token": "B"}) == "4 1 B"


def test_loop_controls_and_namespaces() -> None:
    source = (
        "{% set n = namespace(i=0) %}{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
        "{% if loop.last %}{% break %}{% endif %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}"
    )
    assert render(source) == "2"


def test_generation_blocks_are_their_content() -> None:
    assert render("a{% generation %}{% for m in messages %}{{ m.role[0] }}{% endfor %}{% endgeneration %}b") == "asuaub"


def test_tojson_is_plain_json_in_the_order_given() -> None:
    value = {"b": "<é & 'x'>", "a": [1, 2.5, True, None], "c": {}}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<é & \'x\'>", "a": [1, 2.5, true, null], "c": {}}'
    assert render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, indent=2, ensure_ascii=False)
    assert render(
        "{{ v | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}", v={"b": 1, "a": "é"}
    ) == ('{"a":"\\u00e9","b":1}')


def test_strftime_now_gives_the_date() -> None:
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    found = render("{{ strftime_now('%Y-%m-%d') }}")
    assert found in (before, datetime.datetime.now().strftime("%Y-%m-%d"))


def test_nothing_is_html_escaped() -> None:
    assert render("{{ x }}{{ '<b>' ~ x }}", x="<&>'\"") == "<&>'\"<b><&>'\""


def test_filters_and_methods_that_templates_use() -> None:
    source = (
        "{{ messages | map(attribute='role') | join(',') }} {{ 'a-b'.split('-') | last }} {{ ' x ' | trim }} "
        "{{ 'abc'[::-1] }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
        "{{ 'ab' | replace('b', 'xy') }} {{ '%s=%d' % ('n', 3) }} "
        "{{ 'k'.join(['1', '2']) }} {{ 'x\ny' | indent(2) }} {{ {'a': 1} | items | list }} "
        "{{ 'Ab'.lower().startswith('a') }}"
    )
    assert render(source) == "system,user,assistant,user b x cba 2 axy n=3 1k2 x\n  y [('a', 1)] True"


def test_one_template_serves_several_threads() -> None:
    template = ChatTemplate(AGENT_TEMPLATE)
    expected = template.render(CONVERSATION)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.extend(template.render(CONVERSATION) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 80


# Errors


def test_a_refusal_carries_the_words_of_the_template() -> None:
    template = ChatTemplate(AGENT_TEMPLATE)
    with pytest.raises(TemplateError) as caught:
        template.render([CONVERSATION[1], CONVERSATION[0]])
    assert str(caught.value) == "System message must be at the beginning."


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", r"invalid chat template, line 2: "),
        ("{{ x | no_such_filter }}", r"invalid chat template, line 1: No filter named 'no_such_filter'"),
        ("{% no_such_tag %}", r"invalid chat template, line 1: .*no_such_tag"),
        ("{% for m in messages %}", r"invalid chat template, line 1: "),
        ("{% generation %}", r"invalid chat template, line 1: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"invalid chat template"),
    ],
)
def test_an_invalid_template_is_refused_when_it_is_made(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
        ("{{ raise_exception('') }}", "refused the messages"),
    ],
)
def test_a_failing_template_says_what_failed(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source)


# Capabilities


def test_capabilities_of_an_agentic_template() -> None:
    found = ChatTemplate(AGENT_TEMPLATE).capabilities
    assert found.string_content
    assert found.typed_content
    assert found.system_role
    assert found.tools
    assert found.tool_calls
    assert found.parallel_tool_calls
    assert found.object_arguments
    assert found.thinking
    assert found.preserve_reasoning
    assert not found.reasoning_effort


def test_capabilities_of_chatml() -> None:
    found = ChatTemplate(BUILTIN_TEMPLATES["chatml"]).capabilities
    assert found.string_content
    assert found.system_role
    others = (
        "typed_content",
        "tools",
        "tool_calls",
        "parallel_tool_calls",
        "object_arguments",
        "thinking",
        "reasoning_effort",
    )
    assert not any(getattr(found, name) for name in (*others, "preserve_reasoning"))


def test_a_template_that_drops_or_refuses_the_system_message_lacks_the_role() -> None:
    dropping = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    assert not ChatTemplate(dropping).capabilities.system_role
    assert not ChatTemplate(refusing).capabilities.system_role


def test_a_template_of_typed_parts_only_is_probed_with_parts() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    found = ChatTemplate(source).capabilities
    assert (found.string_content, found.typed_content, found.system_role) == (False, True, True)


def test_a_template_that_joins_arguments_wants_them_as_text() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name ~ ':' ~ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    found = ChatTemplate(source).capabilities
    assert found.tool_calls
    assert found.parallel_tool_calls
    assert not found.object_arguments


# Templates by name and from files


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "<s>[INST] Be brief.\nHi [/INST]Hello</s>[INST] Bye [/INST]"),
        ("llama2-sys", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]Hello</s>[INST] Bye [/INST]"),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("mistral-v7", "<s>[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] Hi[/INST] Hello</s>[INST] Bye[/INST]"),
        (
            "phi3",
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n"
            "<|assistant|>\n",
        ),
    ],
)
def test_templates_by_name(name: str, expected: str) -> None:
    assert template_from_metadata({}, tokenizer(), name).render(CONVERSATION) == expected


def test_every_named_template_is_pinned_above_or_with_the_table_of_turns() -> None:
    pinned = next(mark for mark in test_templates_by_name.pytestmark if mark.name == "parametrize").args[1]
    assert {name for name, _ in pinned} | set(TURNS) == set(BUILTIN_TEMPLATES)


def test_the_file_s_template_is_used_unless_overridden_and_chatml_without_one() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}

    def rendered(*args: Any, **kwargs: Any) -> str:
        return template_from_metadata(*args, **kwargs).render(CONVERSATION)

    assert rendered(metadata, tokenizer()) == "plain"
    assert rendered(metadata, tokenizer(), variant="tool_use") == "tools"
    assert rendered(metadata, tokenizer(), variant="rerank") == "plain"
    assert rendered(metadata, tokenizer(), "{{ eos_token }}") == "</s>"
    assert rendered({}, tokenizer()).startswith("<|im_start|>system\n")


def test_an_unknown_template_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        TemplateError, match=r"unknown chat template 'chatlm': expected Jinja source or one of chatml, llama2"
    ):
        template_from_metadata({}, tokenizer(), "chatlm")


def test_a_bos_that_the_tokenizer_adds_is_removed_from_the_prompt() -> None:
    assert without_duplicate_special("<s>a</s>", tokenizer(add_bos_token=True, add_eos_token=True)) == "a"
    assert without_duplicate_special("<s>a</s>", tokenizer(add_bos_token=True)) == "a</s>"
    assert without_duplicate_special("<s>a", tokenizer()) == "<s>a"
    assert without_duplicate_special("a<s>", tokenizer(add_bos_token=True)) == "a<s>"
