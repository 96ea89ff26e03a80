"""Request fields about lazy grammars and limits on thoughts that are of a shape of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.grammar.guide import BudgetRules
from pyllama.grammar.triggers import TRIGGER_KINDS, Trigger, compile_pattern
from pyllama.server.errors import InvalidRequest
from pyllama.server.generation_params import GenerationParams
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import present, wrong_type
from pyllama.server.vocabulary import Vocabulary

MAX_TRIGGERS = 1000


def with_guide_fields(params: GenerationParams, body: Mapping[str, Any], vocabulary: Vocabulary) -> GenerationParams:
    """`params` with what the body says of triggers, preserved tokens and thinking tags. Raises `InvalidRequest`."""
    preserved = _preserved_tokens(body.get("preserved_tokens"), vocabulary)
    triggers = _triggers(body.get("grammar_triggers"), vocabulary, preserved)
    if params.grammar_lazy and not triggers:
        raise InvalidRequest("Error: no triggers set for lazy grammar!")
    return replace(
        params,
        grammar_triggers=triggers if params.grammar_lazy else (),
        preserved_tokens=preserved,
        budget=_budget(body, params),
        generation_prompt=_text(body, "generation_prompt"),
    )


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, "string", value)
    return value or ""


def _preserved_tokens(value: Any, vocabulary: Vocabulary) -> frozenset[int]:
    """Control tokens to show, by id or by text; a text of several tokens needs no preserving."""
    if value is None:
        return frozenset()
    if not isinstance(value, list):
        raise wrong_type("preserved_tokens", "array", value)
    found: set[int] = set()
    for item in value:
        if isinstance(item, str):
            tokens = vocabulary.tokenizer.encode(item, add_special=False, parse_special=True)
            if len(tokens) == 1:
                found.add(tokens[0])
        elif isinstance(item, int) and not isinstance(item, bool):
            if not 0 <= item < vocabulary.n_vocab:
                raise InvalidRequest(f"Field 'preserved_tokens': {item} is no token of this vocabulary")
            found.add(item)
        else:
            raise InvalidRequest(
                f"Field 'preserved_tokens': elements must be strings or token ids, but found {type_name(item)}"
            )
    return frozenset(found)


def _triggers(value: Any, vocabulary: Vocabulary, preserved: frozenset[int]) -> tuple[Trigger, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong_type("grammar_triggers", "array", value)
    if len(value) > MAX_TRIGGERS:
        raise InvalidRequest(f"Field 'grammar_triggers': {len(value)} triggers are more than {MAX_TRIGGERS}")
    return tuple(_trigger(item, f"grammar_triggers[{i}]", vocabulary, preserved) for i, item in enumerate(value))


def _trigger(item: Any, where: str, vocabulary: Vocabulary, preserved: frozenset[int]) -> Trigger:
    if not isinstance(item, dict):
        raise wrong_type(where, "object", item)
    number = item.get("type")
    if isinstance(number, bool) or not isinstance(number, int):
        raise wrong_type(f"{where}.type", "integer", number)
    if not 0 <= number < len(TRIGGER_KINDS):
        raise InvalidRequest(f"Field '{where}.type': must be 0 (token), 1 (word), 2 (pattern) or 3 (full pattern)")
    kind = TRIGGER_KINDS[number]
    if kind == "token":
        token = item.get("token")
        if isinstance(token, bool) or not isinstance(token, int):
            raise wrong_type(f"{where}.token", "integer", token)
        if not 0 <= token < vocabulary.n_vocab:
            raise InvalidRequest(f"Field '{where}.token': {token} is no token of this vocabulary")
        return Trigger(kind, _text(item, "value"), token)
    text = item.get("value")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.value", "string", text)
    if not text:
        raise InvalidRequest(f"Field '{where}.value': must not be empty")
    if kind == "word":
        tokens = vocabulary.tokenizer.encode(text, add_special=False, parse_special=True)
        if len(tokens) == 1 and not vocabulary.piece(tokens[0]) and tokens[0] not in preserved:
            raise InvalidRequest(
                f"Field '{where}.value': '{text}' is a control token: it must be one of 'preserved_tokens' too"
            )
        return Trigger(kind, text)
    try:
        compile_pattern(text)
    except InvalidArgument as error:
        raise InvalidRequest(f"Field '{where}.value': {error}") from None
    return Trigger(kind, text)


def _budget(body: Mapping[str, Any], params: GenerationParams) -> BudgetRules | None:
    """The limit on thoughts between the tags that the body names."""
    start = _text(body, "reasoning_budget_start_tag")
    found = present(body, ("reasoning_budget_end_tags", "reasoning_budget_end_tag"))
    ends: tuple[str, ...] = ()
    if found is not None:
        name, value = found
        if isinstance(value, str):
            value = [value] if value else []
        if not isinstance(value, list):
            raise wrong_type(name, "array or string", value)
        for item in value:
            if not isinstance(item, str) or not item:
                raise InvalidRequest(f"Field '{name}': elements must be strings that are not empty")
        ends = tuple(value)
    if not start or not ends:
        return None
    return params.budget_rules(start, ends, prompt=_text(body, "generation_prompt"))
