"""The Jinja environment that chat templates run in. A template comes with a model file: it is treated as hostile.

Refused: attributes that begin with an underscore, changes to the messages, other files. Bounded: loop iterations and
calls together, the length of texts built on the way, and the output. Not bounded: the memory of deeply shared lists
(`tojson` of a list that holds itself twice, thirty levels deep); a server that loads files of strangers should also
limit its process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, Undefined, nodes, pass_context
from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT_LENGTH = 1 << 25
"""Characters of any text a template builds, and of its output. A prompt of a million tokens has about four million."""
MAX_STEPS = 2_000_000
"""Loop iterations of one rendering, each call counting as `CALL_STEPS`: a few seconds at worst."""
CALL_STEPS = 10
MAX_NUMBER = 100_000
"""Widths, repeat counts and the like that are handed to text functions."""
MAX_ITEMS = 1 << 20
"""Items of a list that an operator makes."""
MAX_BITS = 4096
"""Size of integers."""

BUDGET_NAME = "_budget"

_LONG_NUMBER = re.compile(r"\d{6,}")
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


class TemplateRaised(JinjaError):
    """The template itself called `raise_exception`."""


class Budget:
    """Steps left in one rendering."""

    __slots__ = ("_left",)

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"the template ran more than {MAX_STEPS} steps (loop iterations, calls)")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Options and functions as the `transformers` package gives them to templates; nothing is HTML-escaped."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlocks], autoescape=False
        )
        for name in ("center", "indent", "wordwrap", "slice", "batch", "format"):
            self.filters[name] = _with_small_numbers(FILTERS[name])
        self.filters.update(tojson=_to_json, replace=_replace, join=_join, _bounded=bounded, _counted=_counted)
        del self.globals["lipsum"]  # random filler text: of no use here
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def compile_source(self, source: str) -> Template:
        """Raises `jinja2.TemplateError` for what is no valid template."""
        tree = self.parse(source)
        _insert_limits(tree, self)
        return self.from_string(tree)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """jinja2 would hand out an undefined value, which prints as nothing. An attempt is reason enough to refuse."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The parameter names are jinja2's: the template's own keyword arguments must not collide with them.
        _budget_of(__context).spend(CALL_STEPS)
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `str.format`
        if isinstance(getattr(method, "__self__", None), str):
            _check_text_method(method.__self__, method.__name__, args, kwargs)
        return bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for repeated, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    _check_product(repeated, count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            _check_items(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return bounded(super().call_binop(context, operator, left, right))


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what the assistant wrote, for training. For a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def bounded(value: Any) -> Any:
    """`value`, unless it is a text beyond the limit."""
    if isinstance(value, str):
        _check_length(len(value))
    return value


def _check_length(length: int) -> None:
    if length > MAX_TEXT_LENGTH:
        raise SecurityError(f"the template built a text of {length} characters; {MAX_TEXT_LENGTH} are allowed")


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise SecurityError(f"the template built a list of {count} items; {MAX_ITEMS} are allowed")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"the template computed a number of about {bits} bits; {MAX_BITS} are allowed")


def _check_product(value: Any, count: int) -> None:
    if isinstance(value, str):
        _check_length(len(value) * count)
    elif isinstance(value, (list, tuple)):
        _check_items(len(value) * count)
    elif isinstance(value, int):
        _check_bits(value.bit_length() + count.bit_length())


def _check_numbers(values: Iterable[Any]) -> None:
    """Refuse huge widths, as plain numbers or inside a format text, before the text they ask for is built."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"number {value} given to a text function; {MAX_NUMBER} is the largest allowed")


def _check_format(template: str, values: Iterable[Any]) -> None:
    if _LONG_NUMBER.search(template):
        raise SecurityError(f"width of 6 or more digits in a format text: {template[:80]!r}")
    if "*" in template or re.search(r"\{[^{}]*\{", template):  # widths among the arguments
        _check_numbers(values)


def _check_text_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in _PADDING_METHODS:
        _check_numbers(args)
    elif name in ("format", "format_map"):
        _check_format(text, (*args, *kwargs.values()))
    elif name == "replace" and len(args) >= 2:
        _check_replacement(text, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_length(sum(len(part) + len(text) for part in args[0] if isinstance(part, str)))


def _check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        _check_length(len(text) + text.count(old) * (len(new) - len(old)))


def _budget_of(context: Context) -> Budget:
    budget = context.get(BUDGET_NAME)
    if not isinstance(budget, Budget):
        raise SecurityError(f"the template may not assign the name {BUDGET_NAME!r}")
    return budget


@pass_context
def _counted(context: Context, iterable: Any) -> Any:
    """Items of a loop as a list, charged to the budget."""
    items = list(iterable)
    _budget_of(context).spend(len(items))
    return items


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, refusing huge numbers among its arguments. What decides its calling convention is kept."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, str):
                _check_format(value, (*args, *kwargs.values()))
        _check_numbers((*args, *kwargs.values()))
        return bounded(function(*args, **kwargs))

    guarded.__dict__.update(function.__dict__)
    return guarded


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = str(text)
    _check_replacement(text, old, new)
    result: str = text.replace(old, new, count)
    return result


@pass_context
def _join(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(values)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    texts = [str(item) for item in items]
    _check_length(sum(len(text) + len(d) for text in texts))
    return str(d).join(texts)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes `<`, `>`, `&` and `'` for HTML and sorts keys."""
    if indent is not None:
        _check_numbers((indent,))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateRaised(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 (templates may pass it by this name)
    return datetime.now().strftime(format)


def _insert_limits(tree: nodes.Template, environment: Environment) -> None:
    """Count loop iterations; check the length of texts joined by `~` and of the content of `{% set %}` blocks."""

    def filtered(node: Any, name: str) -> nodes.Filter:
        filter_node = nodes.Filter(node, name, [], [], None, None)
        filter_node.lineno = node.lineno if node is not None else 1
        return filter_node

    for loop in list(tree.find_all(nodes.For)):
        loop.iter = filtered(loop.iter, "_counted")
    for block in list(tree.find_all(nodes.AssignBlock)):
        block.filter = filtered(block.filter, "_bounded")
    for parent, replace in list(_concatenations(tree)):
        replace(filtered(parent, "_bounded"))
    tree.set_environment(environment)


def _concatenations(node: nodes.Node) -> Iterator[tuple[nodes.Concat, Callable[[nodes.Expr], None]]]:
    """Every `~` expression below `node`, with a function that puts another expression in its place."""
    for field, value in node.iter_fields():
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, nodes.Node):
                continue
            if isinstance(child, nodes.Concat):
                yield child, _replacer(node, field, value, index)
            yield from _concatenations(child)


def _replacer(node: nodes.Node, field: str, siblings: Any, index: int | None) -> Callable[[nodes.Expr], None]:
    def replace(expression: nodes.Expr) -> None:
        if index is None:
            setattr(node, field, expression)
        else:
            siblings[index] = expression

    return replace
