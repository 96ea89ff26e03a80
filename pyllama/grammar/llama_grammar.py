"""`LlamaGrammar`, the constraint that users of the Python API hand over, and `response_format` read as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.grammar.constraint import GrammarSource
from pyllama.grammar.gbnf import to_llguidance
from pyllama.grammar.json_schema import parse_schema, prepare_schema


class LlamaGrammar:
    """What an answer keeps to. Immutable: one object serves any number of calls.

    The constructors raise `InvalidArgument` for a faulty grammar or schema. What only a vocabulary or the conversion
    can tell (a name of a token, a keyword that is not supported) is refused by the call that uses the object.
    """

    def __init__(self, source: GrammarSource) -> None:
        self.source = source

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A GBNF grammar. `verbose` has no effect."""
        if not isinstance(grammar, str):
            raise TypeError(f"a grammar must be a str, found {type(grammar).__name__}")
        to_llguidance(grammar, lambda name: 0)
        return cls(GrammarSource("gbnf", grammar))

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """The GBNF grammar in a UTF-8 file. Raises `OSError` too."""
        return cls.from_string(Path(file).read_text(encoding="utf-8"), verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str | Mapping[str, Any], verbose: bool = True) -> LlamaGrammar:
        """A JSON schema, as text or parsed; an empty one stands for any object."""
        if not isinstance(json_schema, (str, Mapping)):
            raise TypeError(f"a schema must be a str or a mapping, found {type(json_schema).__name__}")
        text = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
        prepare_schema(parse_schema(text))
        return cls(GrammarSource("json_schema", text))


def source_of(grammar: LlamaGrammar | None, response_format: Mapping[str, Any] | None) -> GrammarSource | None:
    """What the arguments of a call ask for. Raises `TypeError` and `InvalidArgument`."""
    if grammar is not None and not isinstance(grammar, LlamaGrammar):
        raise TypeError(f"grammar must be a LlamaGrammar, found {type(grammar).__name__}")
    formatted = None if response_format is None else _format_source(response_format)
    if grammar is not None and formatted is not None:
        raise InvalidArgument("grammar and response_format cannot be used together")
    return formatted if grammar is None else grammar.source


def _format_source(response_format: Mapping[str, Any]) -> GrammarSource | None:
    if not isinstance(response_format, Mapping):
        raise TypeError(f"response_format must be a mapping, found {type(response_format).__name__}")
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise InvalidArgument(f"response_format type {kind!r}, expected 'text', 'json_object' or 'json_schema'")
    holder = response_format if kind == "json_object" else response_format.get("json_schema") or {}
    if not isinstance(holder, Mapping):
        raise InvalidArgument(f"response_format: json_schema must be a mapping, found {type(holder).__name__}")
    schema = holder.get("schema")
    return LlamaGrammar.from_json_schema({} if schema is None else schema).source
