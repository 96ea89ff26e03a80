"""Option values of a program from defaults, config files, environment and command line, later ones winning.

`parse` prints nothing: it returns `Options` or raises `OptionError` / `Information`. `parse_options` is what programs
call: it prints notices and errors and ends the process with the right exit code.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import help as help_pages
from .errors import Information, OptionError
from .sources import Assignment, Source, default_config_files, from_config_file, from_environment
from .table import TOOLS, Option, gone_options, options_of
from .values import FILE_READERS, TRUE_WORDS, parse_bool, parse_value, process_escapes, unknown_samplers
from .version import version_text

TOOLS_WITH_SOURCES = tuple(tool for tool in TOOLS if tool != "llama-bench")
"""Programs that read config files and environment variables; llama-bench takes its command line only."""

ESCAPED_DESTS = ("prompt", "reverse_prompt", "dry_sequence_breaker")


@dataclass(frozen=True, slots=True)
class Options:
    """Values by dest, as attributes. `notices`: lines for the user about what was given (warnings, no-effect notes)."""

    tool: str
    values: Mapping[str, Any]
    sources: Mapping[str, Source]
    notices: tuple[str, ...] = ()

    def __getattr__(self, dest: str) -> Any:
        if dest.startswith("__"):
            raise AttributeError(dest)
        try:
            return self.values[dest]
        except KeyError:
            raise AttributeError(f"{self.tool} has no option {dest!r}") from None

    def source(self, dest: str) -> Source:
        """Where the value came from. KeyError for a dest the program lacks."""
        return self.sources[dest]

    def given(self, dest: str) -> bool:
        """Whether the user set the value (by any source), even to the default."""
        return self.sources[dest] is not Source.DEFAULT


def parse_options(
    tool: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    config_files: Iterable[Path] | None = None,
) -> Options:
    """Parse, print notices on stderr, and end the process (`SystemExit`) for `-h`, `--version` (0) and faults (1).

    argv: without the program name. config_files: rising priority; None takes the system's and the user's.
    """
    try:
        options = parse(tool, argv, environ, config_files=config_files)
    except Information as text:
        print(text)
        raise SystemExit(0) from None
    except OptionError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    for notice in options.notices:
        print(notice, file=sys.stderr)
    return options


def parse(
    tool: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    config_files: Iterable[Path] | None = None,
) -> Options:
    """As `parse_options`, but raises `Information` (text for stdout) or `OptionError` (text for stderr)."""
    table = options_of(tool)
    state = _State(table)
    # The command line is looked at first, so that -h works whatever the environment holds.
    from_command_line = list(command_line_assignments(tool, argv))
    for assignment in from_command_line:
        _answer_information(tool, assignment.option, environ)
    if tool in TOOLS_WITH_SOURCES:
        for path in default_config_files(environ) if config_files is None else config_files:
            for assignment in from_config_file(table, path, state.notices):
                state.apply(assignment)
        for assignment in from_environment(table, environ):
            state.apply(assignment)
    for assignment in from_command_line:
        state.apply(assignment)
    return state.finish(tool)


def command_line_assignments(tool: str, argv: Sequence[str]) -> Iterator[Assignment]:
    """What a command line says, option by option, with the values still as text. Raises `OptionError`."""
    known: dict[str, tuple[Option, bool]] = {}
    for option in options_of(tool):
        if option.command_line:
            known.update(dict.fromkeys(option.names, (option, False)))
            known.update(dict.fromkeys(option.negated, (option, True)))
    position = 0
    while position < len(argv):
        spelling = argv[position]
        name = spelling.replace("_", "-") if spelling.startswith("--") else spelling
        position += 1
        found = known.get(name)
        if found is None:
            raise OptionError(_unknown(spelling, name))
        option, negated = found
        n_values = 0 if option.is_flag else 2 if option.type == "pair" else 1
        values = argv[position : position + n_values]
        if len(values) < n_values:
            raise OptionError(_bad_value(option, spelling, "expected value for argument"))
        position += n_values
        yield Assignment(option, Source.COMMAND_LINE, spelling, " ".join(values) if n_values else "true", negated)


def _answer_information(tool: str, option: Option, environ: Mapping[str, str]) -> None:
    if option.dest == "help":
        raise Information(help_pages.help_text(tool))
    if option.dest == "version":
        raise Information(version_text())
    if option.dest == "completion_bash":
        raise Information(help_pages.bash_completion())
    if option.dest == "list_devices":
        from pyllama.tools.devices import device_list

        raise Information(device_list())
    if option.dest == "cache_list":
        from pyllama.download.cache import cache_list

        raise Information(cache_list(environ))


class _State:
    """Values while the sources are applied in rising priority."""

    def __init__(self, table: Sequence[Option]) -> None:
        self.values: dict[str, Any] = {option.dest: option.default for option in table}
        self.sources: dict[str, Source] = {option.dest: Source.DEFAULT for option in table}
        self.setters: dict[str, Assignment] = {}
        self.notices: list[str] = []

    def apply(self, assignment: Assignment) -> None:
        option = assignment.option
        if option.status == "removed":
            raise OptionError(f"error: {assignment.spelling} was removed; use {' or '.join(option.replacement)}")
        try:
            value = self._value(assignment)
            contents = FILE_READERS[option.type](option, value) if option.type in FILE_READERS else None
        except ValueError as error:
            raise OptionError(_bad_value(option, assignment.spelling, str(error), assignment.source)) from None
        if value is None:
            return
        for name in unknown_samplers(option, assignment.text):
            self.notices.append(f"warn: {assignment.spelling}: unknown sampler '{name}' is skipped")
        self._notice_overwriting(assignment)
        self._set(option.dest, value, assignment, append=option.append and option.into is None)
        if option.into is not None:
            self._set(option.into, contents, assignment, append=option.append)

    def _value(self, assignment: Assignment) -> Any:
        option = assignment.option
        if not option.is_flag:
            return parse_value(option, assignment.text)
        if assignment.source is Source.COMMAND_LINE:
            on = True
        elif option.negated:
            on = parse_bool(assignment.text)
        elif assignment.text in TRUE_WORDS:
            on = True
        else:
            return None  # a flag without a --no- form can only be switched on
        if option.constant is not None:
            return option.constant
        return on is not assignment.negated

    def _set(self, dest: str, value: Any, assignment: Assignment, *, append: bool) -> None:
        if append and self.sources[dest] is assignment.source:
            value = (*self.values[dest], *value)
        self.values[dest] = value
        self.sources[dest] = assignment.source
        self.setters[dest] = assignment

    def _notice_overwriting(self, assignment: Assignment) -> None:
        previous = self.setters.get(assignment.option.dest)
        if previous is None or assignment.source is not Source.COMMAND_LINE:
            return
        spelling = assignment.spelling
        if previous.source is Source.ENVIRONMENT:
            self.notices.append(
                f"warn: {previous.spelling} is set in the environment; {spelling} on the command line wins"
            )
        elif (
            previous.option is assignment.option and not previous.option.append and previous.source is assignment.source
        ):
            self.notices.append(f"warn: {spelling} is given more than once, which is deprecated; the last value counts")

    def finish(self, tool: str) -> Options:
        for dest, assignment in self.setters.items():
            if dest == assignment.option.dest:
                self._check_support(assignment, self.values[dest])
        if self.values.get("escape"):
            for dest in ESCAPED_DESTS:
                if dest in self.values:
                    self.values[dest] = _unescaped(self.values[dest])
        return Options(tool, MappingProxyType(self.values), MappingProxyType(self.sources), tuple(self.notices))

    def _check_support(self, assignment: Assignment, value: Any) -> None:
        option, spelling = assignment.option, assignment.spelling
        if option.supported:
            for item in value if isinstance(value, tuple) else (value,):
                if item not in option.supported:
                    reason = f"{option.unsupported_reason}; use {', '.join(option.supported)}"
                    raise OptionError(f"error: not supported yet: {spelling} {item} ({reason})")
        if option.status == "deprecated":
            self.notices.append(f"note: {spelling} is deprecated and has no effect: {option.reason}")
        if option.is_neutral(value):
            return
        if option.status == "planned":
            raise OptionError(f"error: not supported yet: {spelling} ({option.reason})")
        if option.status == "accepted":
            self.notices.append(f"note: {spelling} has no effect: {option.reason}")


def _unescaped(value: Any) -> Any:
    return tuple(map(process_escapes, value)) if isinstance(value, tuple) else process_escapes(value)


def _unknown(spelling: str, name: str) -> str:
    message = f"error: invalid argument: {spelling}"
    if instead := gone_options().get(name):
        message += f"\nhint: {spelling} belongs to older releases; use {instead}"
    return message


def _bad_value(option: Option, spelling: str, message: str, source: Source = Source.COMMAND_LINE) -> str:
    what = {
        Source.COMMAND_LINE: "argument",
        Source.ENVIRONMENT: "environment variable",
        Source.CONFIG_FILE: "config file key",
    }[source]
    usage = help_pages.option_text(option)
    hint = "to show complete usage, run with -h"
    return f'error while handling {what} "{spelling}": {message}\n\nusage:\n{usage}\n\n{hint}'
