"""The option table against the frozen facts about llama.cpp's options: every entry, by every name, from every source.

Entries are those of the programs that both have; `option_reference.jsonl` says what they are.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pyllama.options import OptionError, options_of, parse
from pyllama.options.errors import Information
from pyllama.options.parser import TOOLS_WITH_SOURCES
from pyllama.options.table import Option
from pyllama.options.values import FILE_READERS, parse_value

REFERENCE = Path(__file__).parent.parent / "golden" / "option_reference.jsonl"
TOOLS = ("llama-server", "llama-cli", "llama-bench", "llama-perplexity", "llama-tokenize")
INFORMATION = ("help", "version", "completion_bash", "list_devices", "cache_list")

# Where our default is another one, or is written in another way.
OWN_DEFAULTS = {
    "--samplers": "the chain itself",
    "--sampler-seq": "the chain itself",
    "--dry-sequence-breaker": "the list itself",
    "--seed": 4294967295,  # -1 as an unsigned number
    "--rope-scale": 0.0,  # "not given", as for --rope-freq-scale
    "--verbose": "shares the value of --verbosity",
    "--ui": False,  # there is no web interface
    "--model": "llama-bench has no model of its own",
}
# llama-cli says nothing but the answer; plain perplexity texts have no escapes; some have no effect.
OWN_DEFAULTS_OF = {
    ("llama-bench", "--fit-target"),
    ("llama-tokenize", "--parallel"),
    ("llama-cli", "--verbosity"),
    ("llama-perplexity", "--verbosity"),
    ("llama-perplexity", "--ctx-size"),
    ("llama-perplexity", "--escape"),
}


ADAPTIVE = {"--spec-adaptive", "--no-spec-adaptive"}
OWN_ADDITIONS = {
    "llama-server": {"--merge-system-messages", "--no-merge-system-messages"} | ADAPTIVE,
    # Rows of llama-server: llama.cpp's program knows no drafts.
    "llama-bench": {
        name for o in options_of("llama-bench") if o.group == "speculative" for name in o.names + o.negated
    },
    "llama-cli": {"-cnv", "--conversation", "-no-cnv", "--no-conversation"} | ADAPTIVE,
}
"""Spellings of ours that llama.cpp's program lacks: there, plain completion is a program of its own."""


@cache
def reference() -> tuple[dict[str, Any], ...]:
    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines[1:])


def entries(tool: str) -> Iterator[tuple[dict[str, Any], Option]]:
    by_name = {name: option for option in options_of(tool) for name in option.names}
    for row in reference():
        if tool in row["tools"]:
            yield row, by_name[row["names"][0]]


@pytest.mark.parametrize("tool", TOOLS)
def test_exactly_the_spellings_of_llama_cpp_are_known(tool: str) -> None:
    frozen = {name for row, _ in entries(tool) for name in (*row["names"], *row.get("negated", ()))}
    ours = {name for option in options_of(tool) for name in option.names + option.negated}
    assert ours == frozen | OWN_ADDITIONS.get(tool, set())


@pytest.mark.parametrize("tool", TOOLS)
def test_an_entry_has_its_names_variables_and_negations_in_one_row(tool: str) -> None:
    for row, option in entries(tool):
        assert set(option.names) == set(row["names"])
        assert set(option.negated) == set(row.get("negated", ()))
        variables = {name for name in (option.env, option.negated_env) if name}
        assert variables == set(row.get("env", ())), option.long_name
        assert option.is_flag == (row["type"] == "flag"), option.long_name


@pytest.mark.parametrize("tool", TOOLS)
def test_an_entry_has_the_default_and_the_choices_of_llama_cpp(tool: str) -> None:
    for row, option in entries(tool):
        if option.long_name not in OWN_DEFAULTS and (tool, option.long_name) not in OWN_DEFAULTS_OF:
            assert as_text(option.default) == as_text(row["default"]), option.long_name
        if option.type in ("enum", "list") and option.long_name != "--chat-template":
            assert {str(choice) for choice in option.choices} == set(row.get("choices", ())), option.long_name


def as_text(value: Any) -> str:
    """A default, with one text for "nothing"."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(as_text, value))
    return "" if value is None else str(value)


@pytest.mark.parametrize("tool", TOOLS)
def test_removed_entries_name_what_takes_their_place_from_every_source(tool: str) -> None:
    for row, option in entries(tool):
        assert (option.status == "removed") == ("removed" in row), option.long_name
        assert (option.status == "deprecated") == ("deprecated" in row), option.long_name
        if "removed" in row:
            assert list(option.replacement) == row["removed"]
            for spelling in option.names:
                with pytest.raises(OptionError, match=row["removed"][0]):
                    parse(tool, [spelling, "1"], {}, config_files=())
            for variable in row.get("env", ()):
                with pytest.raises(OptionError, match=row["removed"][0]):
                    parse(tool, [], {variable: "1"}, config_files=())


@pytest.mark.parametrize("tool", TOOLS)
def test_a_deprecated_entry_is_taken_with_a_notice(tool: str) -> None:
    for _, option in entries(tool):
        if option.status == "deprecated":
            options = parse(tool, [option.long_name, "1"], {}, config_files=())
            assert any("deprecated" in notice for notice in options.notices)


@pytest.mark.parametrize("tool", TOOLS)
def test_information_is_given_by_every_name(tool: str) -> None:
    for _, option in entries(tool):
        if option.dest in INFORMATION:
            for spelling in (*option.names, option.long_name.replace("-", "_").replace("__", "--", 1)):
                with pytest.raises(Information):
                    parse(tool, [spelling], {}, config_files=())


def sample(option: Option, folder: Path) -> str:
    """A text that the option can take."""
    file = folder / "file"
    file.write_text('root ::= "a"\n' if option.type != "text_file" or "json" not in option.dest else "{}")
    for text in (str(file), "7", "1", "0", "2048", "0x3", "{}", "5+1", "a=int:1", "1 2", "1,2", *option.choices):
        if option.type == "str" and text == str(file):
            continue
        try:
            value = parse_value(option, str(text))
            if option.type in FILE_READERS:
                FILE_READERS[option.type](option, value)
        except ValueError:
            continue
        return str(text)
    raise AssertionError(f"{option.long_name}: no sample for type {option.type}")


def outcome(tool: str, option: Option, argv: list[str], environ: dict[str, str], files: list[Path]) -> Any:
    """The values that come out, or the refusal without the words that say how the option was given."""
    try:
        options = parse(tool, argv, environ, config_files=files)
    except OptionError as error:
        words = [*option.names, *option.negated, *environ]
        lines = str(error).splitlines()
        return " ".join(word for word in lines[0].split() if word.replace("_", "-") not in words and word not in words)
    assert options.given(option.dest)
    return {dest: value for dest, value in options.values.items() if options.given(dest)}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_name_variable_and_config_key_means_the_same(tool: str, tmp_path: Path) -> None:
    n_walked = 0
    for row, option in entries(tool):
        if option.status == "removed" or option.dest in INFORMATION:
            continue
        n_walked += 1
        for names, negated in ((option.names, False), (option.negated, True)):
            if not names:
                continue
            text = "true" if option.is_flag else sample(option, tmp_path)
            values = [] if option.is_flag else text.split() if option.type == "pair" else [text]
            file = tmp_path / "config.ini"
            outcomes = {}
            for name in names:
                if option.command_line:
                    outcomes[name] = outcome(tool, option, [name, *values], {}, [])
                    if name.startswith("--") and "-" in name[2:]:
                        under = "--" + name[2:].replace("-", "_")
                        outcomes[under] = outcome(tool, option, [under, *values], {}, [])
                if tool in TOOLS_WITH_SOURCES:
                    file.write_text(f"[*]\n{name.lstrip('-')} = {text}\n")
                    outcomes[f"key {name}"] = outcome(tool, option, [], {}, [file])
            for variable in row.get("env", ()):
                if tool in TOOLS_WITH_SOURCES and (variable == option.negated_env) <= negated:
                    off = negated and variable == option.env
                    outcomes[variable] = outcome(tool, option, [], {variable: "off" if off else text}, [])
            reasons = {name: strip_source(result) for name, result in outcomes.items()}
            assert len({repr(result) for result in reasons.values()}) <= 1, reasons
    assert n_walked > 20


def strip_source(result: Any) -> Any:
    """A refusal from its first bracket on, which is where the reason begins."""
    return result[result.find("(") :] if isinstance(result, str) else result
