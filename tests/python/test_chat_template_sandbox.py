"""Hostile chat templates: each is a `TemplateError`, soon and without taking memory."""

from __future__ import annotations

import time

import pytest

from pyllama import chat_template, chat_template_sandbox
from pyllama.chat_template import ChatTemplate
from pyllama.errors import TemplateError

MESSAGES = [{"role": "user", "content": "Hi"}]

REACHING_FOR_PYTHON = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ messages.__class__ }}",
    "{{ namespace.__init__ }}",
    "{{ _budget._left }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
]


@pytest.mark.parametrize("source", REACHING_FOR_PYTHON)
def test_names_with_underscores_are_out_of_reach(source: str) -> None:
    with pytest.raises(TemplateError, match=r"not allowed|unsafe"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].clear() }}",
        "{% set messages[0].role = 'system' %}",
        "{% set _budget = 1 %}{% for i in [1] %}{% endfor %}",
    ],
)
def test_what_the_template_was_given_cannot_be_changed(source: str) -> None:
    messages = [dict(MESSAGES[0])]
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(messages)
    assert messages == MESSAGES


DOUBLING = "{{% set n = namespace(x='xxxx') %}}{{% for i in range(60) %}}{}{{% endfor %}}{{{{ n.x | length }}}}"
TOO_MUCH = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(999999999) %}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 'x' * 10000000000 }}",
    "{{ [1] * 10000000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 9 ** 9 ** 9 ** 9 ** 9 ** 9 }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[3]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    DOUBLING.format("{% set n.x = n.x ~ n.x %}"),
    DOUBLING.format("{% set n.x = n.x + n.x %}"),
    DOUBLING.format("{% set n.x = [n.x, n.x] | join %}"),
    DOUBLING.format("{% set n.x = ''.join([n.x, n.x]) %}"),
    DOUBLING.format("{% set n.x = n.x | replace('x', 'xx') %}"),
    DOUBLING.format("{% set n.x = n.x.replace('x', 'xx') %}"),
    DOUBLING.format("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "{{ 'x'.ljust(10000000000) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'a\nb' | indent(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10000000000) }}",
    "{{ [1] | slice(10000000000) | list }}",
    "{{ [1] | batch(10000000000, 0) | list }}",
    "{{ {} | tojson(indent=10000000000) }}",
]


@pytest.mark.parametrize("source", TOO_MUCH)
def test_templates_that_ask_for_too_much_are_stopped(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(MESSAGES)
    assert time.monotonic() - started < 60  # seconds at most; without the limits these run for years or out of memory


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TEXT_LENGTH", 1000)
    template = ChatTemplate("{% for i in range(2000) %}x{% endfor %}")
    with pytest.raises(TemplateError, match="more than 1000 characters"):
        template.render(MESSAGES)


def test_a_long_honest_conversation_stays_inside_the_limits() -> None:
    source = "{% for m in messages if m.content.strip() %}{{ m.role ~ ': ' ~ m.content.strip() }}\n{% endfor %}"
    messages = [{"role": "user", "content": "word " * 200}] * 5000
    assert len(ChatTemplate(source).render(messages)) > 4_900_000
    assert chat_template_sandbox.MAX_TEXT_LENGTH > 4_900_000


def test_each_rendering_has_its_own_budget() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done")
    assert [template.render(MESSAGES) for _ in range(30)] == ["done"] * 30
