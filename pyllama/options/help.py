"""Texts made from the table: the help page in its sections, the usage block of one option, and bash completion."""

import textwrap
from typing import Any

from .table import TOOLS, Option, options_of

SECTIONS = (
    ("common params", ("common",)),
    ("sampling params", ("sampling",)),
    ("speculative params", ("speculative",)),
    ("example-specific params", ("server", "cli", "scoring", "tokenize", "multimodal", "router", "preset")),
)

BENCH_SECTIONS = (("options", ("bench",)), ("speculative params, one value each", ("speculative",)))

NAME_WIDTH = 40
HELP_WIDTH = 80


def help_text(tool: str) -> str:
    options = [option for option in options_of(tool) if option.command_line and option.status != "removed"]
    sections = BENCH_SECTIONS if tool == "llama-bench" else SECTIONS
    blocks = [f"usage: {tool} [options]"]
    if tool == "llama-bench":
        blocks.append(
            "Test parameters take comma lists and may be repeated; every combination is a test.\n"
            "Numbers may be ranges: first-last, first-last+step, first-last*factor."
        )
    for title, groups in sections:
        rows = [option_text(option) for option in options if option.group in groups]
        if rows:
            blocks.append(f"----- {title} -----\n\n" + "\n".join(rows))
    return "\n\n".join(blocks)


def option_text(option: Option) -> str:
    """Names on the left, help, default, variable and status on the right."""
    names = ", ".join(option.names + option.negated)
    if option.metavar:
        names += f" {option.metavar}"
    notes = [note for note in (default_text(option), env_text(option), status_text(option)) if note]
    lines = textwrap.wrap(option.help, HELP_WIDTH) + [f"({note})" for note in notes]
    if option.choices and option.type in ("enum", "list"):
        lines[1:1] = textwrap.wrap("one of: " + ", ".join(map(str, option.choices)), HELP_WIDTH)
    if len(names) < NAME_WIDTH:
        lines[0] = names.ljust(NAME_WIDTH) + lines[0]
    else:
        lines[:1] = [names, " " * NAME_WIDTH + lines[0]]
    first = 1 if len(names) < NAME_WIDTH else 2
    return "\n".join(lines[:first] + [" " * NAME_WIDTH + line for line in lines[first:]])


def default_text(option: Option) -> str:
    if option.default in (None, "", (), False) or (option.is_flag and not option.negated):
        return ""
    return f"default: {show(option.default)}"


def env_text(option: Option) -> str:
    return f"env: {option.env}" if option.env else ""


def status_text(option: Option) -> str:
    if option.status == "planned":
        return f"not supported yet: {option.reason}"
    if option.status == "accepted":
        return f"no effect: {option.reason}"
    if option.status == "deprecated":
        return f"deprecated: {option.reason}"
    if option.supported:
        return f"supported now: {', '.join(option.supported)}"
    return ""


def show(value: Any) -> str:
    """A default as the user would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(repr(item)[1:-1] if isinstance(item, str) else str(item) for item in value)
    return str(value)


def bash_completion() -> str:
    """A script that completes option names and, after a `-m`, GGUF file names, for all programs."""
    lines = [
        "_pyllama_complete() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} names",
        "  case ${COMP_WORDS[0]##*/} in",
    ]
    for tool in TOOLS:
        names = [name for option in options_of(tool) if option.command_line for name in option.names + option.negated]
        lines.append(f"    {tool}) names='{' '.join(names)}' ;;")
    lines += [
        "  esac",
        "  if [[ $previous == -m || $previous == --model ]]; then",
        '    COMPREPLY=( $(compgen -f -X "!*.gguf" -- "$current") $(compgen -d -- "$current") )',
        "  elif [[ $current == -* ]]; then",
        '    COMPREPLY=( $(compgen -W "$names" -- "$current") )',
        "  else",
        '    COMPREPLY=( $(compgen -f -- "$current") )',
        "  fi",
        "}",
        f"complete -o filenames -F _pyllama_complete {' '.join(TOOLS)}",
    ]
    return "\n".join(lines)
