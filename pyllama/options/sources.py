"""Where option values come from besides the command line: configuration files and environment variables.

Both give `Assignment`s, in the order in which they are to be applied; turning text into values is the parser's work.
"""

import configparser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from .errors import OptionError
from .table import Option


class Source(IntEnum):
    """Rising priority."""

    DEFAULT = 0
    CONFIG_FILE = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, slots=True)
class Assignment:
    """`text` given to `option` under `spelling` (`-c`, `LLAMA_ARG_CTX_SIZE`, `file.ini: ctx-size`).

    negated: given by its `--no-` name.
    """

    option: Option
    source: Source
    spelling: str
    text: str
    negated: bool = False


HEAD, EVERY = " ", "*"
"""Sections of a file: the part before any section, and the one that is about every model."""

SYSTEM_CONFIG = Path("/etc/llama.cpp/config.ini")


def default_config_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """System file, then user file; they need not exist."""
    base = environ.get("XDG_CONFIG_HOME")
    if base:
        return (SYSTEM_CONFIG, Path(base) / "llama.cpp" / "config.ini")
    home = environ.get("HOME")
    return (SYSTEM_CONFIG, Path(home) / ".config" / "llama.cpp" / "config.ini") if home else (SYSTEM_CONFIG,)


def from_environment(options: Sequence[Option], environ: Mapping[str, str]) -> Iterator[Assignment]:
    for option in options:
        if option.env is None:
            continue
        if option.env in environ:
            yield Assignment(option, Source.ENVIRONMENT, option.env, environ[option.env])
        if option.negated_env is not None and option.negated_env in environ:
            # The mere existence of the NO_ form switches the pair off, whatever its text says.
            yield Assignment(option, Source.ENVIRONMENT, option.negated_env, "true", negated=True)


def read_ini(path: Path, *, strict: bool = False) -> dict[str, dict[str, str]]:
    """Keys and values by section; `HEAD` is the part before any section. Keys keep their case: -C and -c differ.

    strict: a section or key that is there twice is an error. Raises OSError, UnicodeDecodeError or configparser.Error.
    """
    parser = configparser.RawConfigParser(strict=strict, delimiters=("=",), default_section="\0")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(f"[{HEAD}]\n" + path.read_text(encoding="utf-8"), source=str(path))
    return {section: dict(parser.items(section)) for section in parser.sections()}


def from_config_file(options: Sequence[Option], path: Path, notices: list[str]) -> Iterator[Assignment]:
    """Keys of the part without a section and of `[*]`. Unknown keys go to `notices`. An absent file gives nothing."""
    try:
        sections = read_ini(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"error: cannot read config file {path}: {error}") from None
    except configparser.Error as error:
        raise OptionError(f"error: config file {path}: {' '.join(str(error).split())}") from None
    notices.append(f"using config file: {path}")
    names = config_names(options)
    for key, value in {**sections[HEAD], **sections.get(EVERY, {})}.items():
        if key == "version":
            continue
        found = names.get(key) or names.get(key.replace("_", "-"))
        if found is None:
            notices.append(f"warn: config file {path}: unknown key '{key}' is ignored")
            continue
        option, negated = found
        yield Assignment(option, Source.CONFIG_FILE, f"{path}: {key}", value, negated)


def config_names(options: Sequence[Option]) -> dict[str, tuple[Option, bool]]:
    """What a key of a file may be called -> the option, and whether it is the `no-` form."""
    names: dict[str, tuple[Option, bool]] = {}
    for option in options:
        names.update({name.lstrip("-"): (option, False) for name in option.names})
        names.update({name.lstrip("-"): (option, True) for name in option.negated})
        if option.env is not None:
            names[option.env] = (option, False)
    return names
