"""The option table: reads `options.json` into `Option` records, one per option, and selects those of a program."""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

SCORING_TOOLS = ("llama-perplexity", "llama-imatrix")
"""Programs that have the common options of llama-cli without being named in the rows."""

TOOLS = ("llama-server", "llama-cli", "llama-bench", *SCORING_TOOLS, "llama-tokenize")

UNUSED_BY = {
    "llama-tokenize": (("common", "sampling"), "tokens depend on the vocabulary alone"),
    "llama-perplexity": (("sampling",), "nothing is sampled"),
}
"""Programs that take the options of these groups, as those of llama.cpp do, and have no use for them: why."""

UNUSED_BY_ALL = ("spec_draft_type_k", "spec_draft_type_v", "parallel")
"""Dests of other groups that both take as well."""

STATUSES = ("implemented", "accepted", "planned", "deprecated", "removed")
"""implemented: has its effect. accepted: any value is fine, none has an effect (`reason` says why; the user is told if
it is not neutral). planned: a value that is not neutral stops the start. deprecated: accepted with a notice.
removed: an error that names the replacement."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row.

    neutral: the values that change nothing: plain values, `{"at_most": x}`, `{"at_least": x}`, or `"only_first"` for
    lists that are zero after their first number; the default is always among them, and None stands for every value.
    supported: the part of `choices` that works today. refuse: single values that are not allowed, with the reason.
    into: the dest that takes the contents of a file. empty_word: the text that stands for an empty list. per_tool: what
    differs, by program or "program, program".
    """

    names: tuple[str, ...]
    tools: tuple[str, ...]
    dest: str
    type: str
    default: Any
    group: str
    status: str
    help: str
    negated: tuple[str, ...] = ()
    env: str | None = None
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    constant: Any = None
    append: bool = False
    empty_word: str | None = None
    into: str | None = None
    drop_newline: bool = False
    minimum: float | None = None
    maximum: float | None = None
    refuse: Mapping[str, str] = field(default_factory=dict)
    command_line: bool = True
    reason: str = ""
    neutral: tuple[Any, ...] | None = ()
    supported: tuple[Any, ...] = ()
    unsupported_reason: str = ""
    replacement: tuple[str, ...] = ()
    per_tool: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_flag(self) -> bool:
        return self.type == "flag"

    @property
    def negated_env(self) -> str | None:
        """The variable whose mere existence switches a flag pair off, e.g. `LLAMA_ARG_NO_SLOTS`."""
        if self.env is None or not self.negated:
            return None
        return self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)

    @property
    def long_name(self) -> str:
        """The spelling used in messages and documents: the first long name, else the first name."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    def is_neutral(self, value: Any) -> bool:
        if self.neutral is None or value == self.default:
            return True
        return any(_matches(rule, value) for rule in self.neutral)


def _matches(rule: Any, value: Any) -> bool:
    if isinstance(rule, Mapping):
        ((relation, bound),) = rule.items()
        return bool(value <= bound if relation == "at_most" else value >= bound)
    if rule == "only_first":
        return not any(value[1:])
    return bool(rule == value) and isinstance(rule, bool) == isinstance(value, bool)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _option(row: Mapping[str, Any]) -> Option:
    known = {f.name for f in fields(Option)}
    if unknown := set(row) - known:
        raise ValueError(f"options.json: unknown keys {sorted(unknown)} in the row of {row.get('names')}")
    values = {key: _frozen(value) for key, value in row.items()}
    if values.get("neutral") == "any":
        values["neutral"] = None
    if values["group"] == "common" and "llama-cli" in values["tools"]:
        values["tools"] += SCORING_TOOLS
    return Option(**values)


@functools.cache
def _document() -> dict[str, Any]:
    text = importlib.resources.files(__package__).joinpath("options.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@functools.cache
def all_options() -> tuple[Option, ...]:
    """Every row, without what is particular to a program."""
    return tuple(_option(row) for row in _document()["options"])


@functools.cache
def options_of(tool: str) -> tuple[Option, ...]:
    """The rows of one program, with its own default and status where they differ. Order: as in the table."""
    if tool not in TOOLS:
        raise ValueError(f"unknown program {tool!r}; expected one of {', '.join(TOOLS)}")
    rows = []
    unused_groups, unused_reason = UNUSED_BY.get(tool, ((), ""))
    for option in all_options():
        if tool not in option.tools:
            is_taken = option.group in unused_groups or (unused_groups and option.dest in UNUSED_BY_ALL)
            if is_taken and "llama-cli" in option.tools:
                status = "deprecated" if option.status == "deprecated" else "accepted"
                rows.append(replace(option, status=status, reason=unused_reason, neutral=None, supported=()))
            continue
        own: dict[str, Any] = {}
        for programs, differences in option.per_tool.items():
            if tool in programs.split(", "):
                own.update({key: _frozen(value) for key, value in differences.items()})
        if own.get("neutral") == "any":
            own["neutral"] = None
        rows.append(replace(option, **own) if own else option)
    return tuple(rows)


def gone_options() -> Mapping[str, str]:
    """Spellings of older releases that are rejected, with what to write instead."""
    gone: dict[str, str] = _document()["gone"]
    return gone
