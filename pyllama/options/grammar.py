"""The options that constrain every answer: a grammar or a JSON schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyllama.errors import InvalidArgument

if TYPE_CHECKING:
    from pyllama.grammar import GrammarSource


def grammar_from_options(options: Any) -> GrammarSource | None:
    """None when there is no such option. Raises `InvalidArgument` for both kinds, bad JSON and an empty grammar."""
    if not options.grammar and not options.json_schema:
        for dest in ("grammar", "json_schema"):
            if options.given(dest) or options.given(f"{dest}_file"):
                raise InvalidArgument(f"--{dest.replace('_', '-')}: the text is empty")
        return None
    # Loaded on demand: most programs never need it, and it brings NumPy along.
    from pyllama.grammar import GrammarSource
    from pyllama.grammar.json_schema import parse_schema, prepare_schema

    if options.grammar and options.json_schema:
        raise InvalidArgument("--grammar and --json-schema cannot be used together")
    if options.grammar:
        return GrammarSource("gbnf", options.grammar)
    try:
        prepare_schema(parse_schema(options.json_schema))
    except InvalidArgument as error:
        raise InvalidArgument(f"--json-schema: {error}") from None
    return GrammarSource("json_schema", options.json_schema)
