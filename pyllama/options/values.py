"""Text to value, one function per value type of the option table.

Every fault is a `ValueError` that says what was expected and what was found.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .sampling import LETTERS, canonical_name
from .table import Option

TRUE_WORDS = ("on", "enabled", "true", "1")
FALSE_WORDS = ("off", "disabled", "false", "0")
AUTO_WORDS = ("auto", "-1")

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
UINT32_MAX = 2**32 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127

_INTEGER = re.compile(r"\s*([+-]?\d+)")
_FLOAT = re.compile(r"\s*([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|inf(?:inity)?|nan))", re.IGNORECASE)
_RANGE = re.compile(r"(-?\d+)(?:-(\d+)(?:([+*])(\d+))?)?")
_BIAS = re.compile(r"\s*(\d+)([+-].+)")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def parse_value(option: Option, text: str) -> Any:
    """The value of `option` that `text` spells. For options that append, a tuple of the values to add."""
    return _PARSERS[option.type](option, text)


def parse_bool(text: str) -> bool:
    if text in TRUE_WORDS:
        return True
    if text in FALSE_WORDS:
        return False
    raise ValueError(f"expected one of {', '.join(TRUE_WORDS + FALSE_WORDS)}, found '{text}'")


def split_csv(text: str) -> list[str]:
    """Comma list in which double quotes protect commas and `""` inside quotes is one quote."""
    fields: list[str] = []
    current: list[str] = []
    quoted = False
    position = 0
    while position < len(text):
        character = text[position]
        if quoted and character == '"' and text[position + 1 : position + 2] == '"':
            current.append('"')
            position += 1
        elif character == '"':
            quoted = not quoted
        elif character == "," and not quoted:
            fields.append("".join(current))
            current = []
        else:
            current.append(character)
        position += 1
    if quoted:
        raise ValueError(f"a double quote is not closed in '{text}'")
    fields.append("".join(current))
    return fields


def process_escapes(text: str) -> str:
    r"""Replace `\n`, `\r`, `\t`, `\'`, `\"`, `\\` and `\xHH`; any other backslash stays."""

    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        return _ESCAPED.get(match[2], match[0])

    return _ESCAPE.sub(replacement, text)


def _integer(text: str) -> int:
    match = _INTEGER.match(text)
    if match is None:
        raise ValueError(f"expected an integer, found '{text}'")
    return int(match[1])


def _int32(text: str) -> int:
    value = _integer(text)
    if not INT32_MIN <= value <= INT32_MAX:
        raise ValueError(f"{value} is out of the range of a 32-bit integer")
    return value


def _checked(option: Option, value: Any) -> Any:
    if option.choices and value not in option.choices:
        raise ValueError(f"expected one of {', '.join(map(str, option.choices))}, found {value}")
    if reason := option.refuse.get(str(value)):
        raise ValueError(f"must not be {value}: {reason}")
    if option.minimum is not None and value < option.minimum:
        raise ValueError(f"must be at least {option.minimum:g}, found {value}")
    if option.maximum is not None and value > option.maximum:
        raise ValueError(f"must be at most {option.maximum:g}, found {value}")
    return value


def _int(option: Option, text: str) -> int:
    return int(_checked(option, _int32(text)))


def _uint32(option: Option, text: str) -> int:
    value = _integer(text)
    if not INT32_MIN <= value <= UINT32_MAX:
        raise ValueError(f"{value} is out of the range of an unsigned 32-bit integer")
    return value & UINT32_MAX


def _float(option: Option, text: str) -> float:
    match = _FLOAT.match(text)
    if match is None:
        raise ValueError(f"expected a number, found '{text}'")
    value = float(match[1])
    if option.dest == "temperature":
        value = max(value, 0.0)
    if not math.isfinite(value):
        raise ValueError(f"must be finite, found {text.strip()}")
    if abs(value) > FLOAT32_MAX:
        raise ValueError(f"{text.strip()} is out of the range of a 32-bit float")
    if option.dest == "repeat_penalty" and (value <= 0.0 or not math.isfinite(1.0 / value)):
        raise ValueError(f"must be greater than 0, found {value:g}")
    return float(_checked(option, value))


def _reciprocal(option: Option, text: str) -> float:
    value = _float(option, text)
    if value == 0.0:
        raise ValueError("must not be 0")
    return 1.0 / value


def _str(option: Option, text: str) -> str:
    return text


def _enum(option: Option, text: str) -> str:
    if option.dest == "numa" and text == "":
        return "distribute"
    if text not in option.choices:
        raise ValueError(f"expected one of {', '.join(option.choices)}, found '{text}'")
    return text


def _on_off(option: Option, text: str) -> str:
    for word, spellings in (("on", TRUE_WORDS), ("off", FALSE_WORDS), ("auto", AUTO_WORDS)):
        if text in spellings and word in option.choices:
            return word
    raise ValueError(f"expected one of {', '.join(option.choices)}, found '{text}'")


def _layers(option: Option, text: str) -> str:
    if text in ("auto", "-1"):
        return "auto"
    if text in ("all", "-2"):
        return "all"
    if _INTEGER.match(text) is None:
        raise ValueError(f"expected a number of layers, auto or all, found '{text}'")
    return str(_int32(text))


def _list(option: Option, text: str) -> tuple[str, ...]:
    items = tuple(item for item in split_csv(text) if item)
    for item in items:
        if option.choices and item not in option.choices:
            raise ValueError(f"expected a list of {', '.join(option.choices)}, found '{item}'")
    return tuple(sorted(set(items))) if option.dest == "alias" else items


def _text(option: Option, text: str) -> tuple[str, ...]:
    return () if text == option.empty_word else (text,)


def _samplers(option: Option, text: str) -> tuple[str, ...]:
    return tuple(canonical for name in text.split(";") if (canonical := canonical_name(name)) is not None)


def _sampler_letters(option: Option, text: str) -> tuple[str, ...]:
    return tuple(LETTERS[letter.lower()] for letter in text if letter.lower() in LETTERS)


def unknown_samplers(option: Option, text: str) -> list[str]:
    """The names or letters in `text` that stand for no sampler: they are skipped, and the user is told."""
    if option.type == "samplers":
        return [name.strip() for name in text.split(";") if name.strip() and canonical_name(name) is None]
    if option.type == "sampler_letters":
        return [letter for letter in text if letter.lower() not in LETTERS]
    return []


def _json_object(option: Option, text: str) -> str:
    if text == "":
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found '{text}'")
    return text


def _logit_bias(option: Option, text: str) -> tuple[tuple[int, float], ...]:
    match = _BIAS.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        return ((int(match[1]), float(match[2])),)
    except ValueError:
        raise ValueError(f"expected a token id and a signed bias, as in 15043+1 or 15043-0.5, found '{text}'") from None


def _override_kv(option: Option, text: str) -> tuple[tuple[str, int | float | bool | str], ...]:
    return tuple(parse_override(item) for item in split_csv(text))


def parse_override(item: str) -> tuple[str, int | float | bool | str]:
    """`KEY=TYPE:VALUE`, TYPE one of int, float, bool, str. Raises `ValueError`."""
    key, equals, typed = item.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and equals and colon):
        raise ValueError(f"expected key=type:value, found '{item}'")
    if kind == "int":
        number = _integer(value)
        if not INT64_MIN <= number <= INT64_MAX:
            raise ValueError(f"{key}: {number} is out of the range of a 64-bit integer")
        return key, number
    if kind == "float":
        match = _FLOAT.match(value)
        if match is None:
            raise ValueError(f"expected a number for {key}, found '{value}'")
        return key, float(match[1])
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(f"expected true or false for {key}, found '{value}'")
        return key, value == "true"
    if kind == "str":
        return key, value
    raise ValueError(f"expected type int, float, bool or str for {key}, found '{kind}'")


def _pair(option: Option, text: str) -> tuple[int, int]:
    first, last = text.split()
    return _int32(first), _int32(last)


def _files(option: Option, text: str) -> tuple[tuple[str, float], ...]:
    return tuple((path, 1.0) for path in _list(option, text))


def _scaled_files(option: Option, text: str) -> tuple[tuple[str, float], ...]:
    """Comma list of `FNAME:SCALE`."""
    files = []
    for item in split_csv(text):
        path, colon, scale = item.rpartition(":")
        if not (path and colon):
            raise ValueError(f"expected FNAME:SCALE, found '{item}'")
        files.append((path, _float(option, scale)))
    return tuple(files)


def _int_list(option: Option, text: str) -> tuple[int, ...]:
    return tuple(_int32(item) for item in split_csv(text))


def _float_list(option: Option, text: str) -> tuple[float, ...]:
    return tuple(_float(option, item) for item in split_csv(text))


def _ratio_list(option: Option, text: str) -> tuple[float, ...]:
    return tuple(_float(option, item) for item in re.split(r"[,/]+", text) if item)


def _on_off_list(option: Option, text: str) -> tuple[str, ...]:
    return tuple(_on_off(option, item) for item in split_csv(text))


def _ranges(option: Option, text: str) -> tuple[int, ...]:
    """Comma list of `n`, `first-last`, `first-last+step` and `first-last*factor`, ends included."""
    numbers: list[int] = []
    for item in split_csv(text):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"expected n, first-last, first-last+step or first-last*factor, found '{item}'")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        amount = 1 if match[4] is None else int(match[4])
        if last < first or (match[3] == "+" and amount < 1) or (match[3] == "*" and (amount < 2 or first < 1)):
            raise ValueError(f"the range '{item}' does not advance")
        if last > INT32_MAX or first < INT32_MIN:
            raise ValueError(f"{item} is out of the range of a 32-bit integer")
        while first <= last:
            numbers.append(int(_checked(option, first)))
            if len(numbers) > 100_000:
                raise ValueError(f"the range '{item}' has too many values")
            first = first * amount if match[3] == "*" else first + amount
    return tuple(numbers)


def _int_pairs(option: Option, text: str) -> tuple[tuple[int, int], ...]:
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"expected two numbers, as in 512,128, found '{text}'")
    pair = (_int32(parts[0]), _int32(parts[1]))
    if min(pair) < 1:
        raise ValueError(f"both numbers must be at least 1, found '{text}'")
    return (pair,)


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read file '{path}': {error.strerror}") from None


def read_text_file(option: Option, path: str) -> str:
    """Contents of a text file; one newline at the end is dropped where the row says so."""
    try:
        text = _read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"file '{path}' is not UTF-8 at byte {error.start}") from None
    return text.removesuffix("\n") if option.drop_newline else text


def read_bytes_file(option: Option, path: str) -> str:
    """Contents of any file as text; bytes that are not UTF-8 become surrogates."""
    return _read_file(path).decode("utf-8", "surrogateescape")


def read_key_file(option: Option, path: str) -> tuple[str, ...]:
    """One key per line; empty lines and lines that start with `#` are skipped."""
    lines = read_text_file(option, path).splitlines()
    return tuple(line for line in lines if line.strip() and not line.startswith("#"))


FILE_READERS: dict[str, Callable[[Option, str], Any]] = {
    "text_file": read_text_file,
    "bytes_file": read_bytes_file,
    "key_file": read_key_file,
}

_PARSERS: dict[str, Callable[[Option, str], Any]] = {
    "int": _int,
    "uint32": _uint32,
    "float": _float,
    "reciprocal": _reciprocal,
    "str": _str,
    "text_file": _str,
    "bytes_file": _str,
    "key_file": _str,
    "enum": _enum,
    "on_off": _on_off,
    "layers": _layers,
    "list": _list,
    "paths": _list,
    "text": _text,
    "json_object": _json_object,
    "pair": _pair,
    "files": _files,
    "scaled_files": _scaled_files,
    "samplers": _samplers,
    "sampler_letters": _sampler_letters,
    "logit_bias": _logit_bias,
    "override_kv": _override_kv,
    "int_list": _int_list,
    "float_list": _float_list,
    "ratio_list": _ratio_list,
    "on_off_list": _on_off_list,
    "ranges": _ranges,
    "int_pairs": _int_pairs,
}
