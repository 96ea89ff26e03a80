"""GBNF, the grammar notation of llama-server: the parser, and its translation into the grammar of `llguidance`.

A grammar without recursion becomes one regular expression, which is followed fastest. In any other every character of a
literal and every class is a terminal of one code point: terminals then never differ in length, so that the lexer of
`llguidance`, which prefers the longest terminal, cannot cut the language down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pyllama.errors import InvalidArgument

MAX_REPETITIONS = 2000
"""Counts that a repetition must reach may not pass it, nor the product of nested ones; a higher maximum is no limit."""
MAX_DEPTH = 100
MAX_LENGTH = 50_000  # characters of a grammar
MAX_RULES = 2000
MAX_RECURSIVE_ALTERNATIVES = 2000  # of all rules together, in a grammar with recursion
MAX_EXPRESSION = 100_000  # characters of a grammar written as one regular expression

_SIMPLE_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_REFERENCE = re.compile("\0([^\0]*)\0")  # to a rule, in a translated piece
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")


@dataclass(slots=True)
class _Reference:
    line: int
    column: int


@dataclass(slots=True)
class _Rules:
    """Translated bodies by the names of the grammar; `used`: where each name stands first."""

    bodies: dict[str, str] = field(default_factory=dict)
    used: dict[str, _Reference] = field(default_factory=dict)


def to_llguidance(text: str, token_of: Callable[[str], int | None]) -> str:
    """A GBNF grammar as `llguidance` takes it. token_of: the id of the one token that a text consists of, else None.

    Raises `InvalidArgument` with line and column for what is not GBNF, and for a grammar without a rule `root`.
    """
    if len(text) > MAX_LENGTH:
        raise InvalidArgument(f"the grammar has {len(text)} characters, more than {MAX_LENGTH}")
    rules = _Parser(text, token_of).parse()
    if "root" not in rules.bodies:
        raise InvalidArgument("the grammar has no rule 'root'")
    if len(rules.bodies) > MAX_RULES:
        raise InvalidArgument(f"the grammar has {len(rules.bodies)} rules, more than {MAX_RULES}")
    for name, place in rules.used.items():
        if name not in rules.bodies:
            raise InvalidArgument(f"line {place.line}, column {place.column}: there is no rule '{name}'")
    expression = _as_expression(rules.bodies)
    if expression is not None:
        return f"start: /{expression}/\n"
    n_alternatives = sum(body.count("|") + 1 for body in rules.bodies.values())
    if n_alternatives > MAX_RECURSIVE_ALTERNATIVES:
        raise InvalidArgument(
            f"the grammar has {n_alternatives} alternatives, more than {MAX_RECURSIVE_ALTERNATIVES}, and recursion or "
            "more text than is followed as one expression"
        )
    # The names of the grammar may hold what the other notation does not allow: numbers stand for them.
    numbers = {name: f"rule_{index}" for index, name in enumerate(rules.bodies)}
    lines = [f"start: {numbers['root']}"]
    for name, body in rules.bodies.items():
        lines.append(f"{numbers[name]}: {_REFERENCE.sub(lambda match: numbers[match[1]], body)}")
    return "\n".join(lines) + "\n"


def _as_expression(bodies: dict[str, str]) -> str | None:
    """The language of `root` as a regular expression; None for recursion, token numbers, and when it gets too long."""
    done: dict[str, str] = {}
    open_rules: list[str] = []

    def expand(name: str) -> str | None:
        if name in done:
            return done[name]
        if name in open_rules or len(open_rules) > MAX_DEPTH or "<[" in bodies[name]:
            return None
        open_rules.append(name)
        parts = []
        length = 0
        for index, part in enumerate(_REFERENCE.split(bodies[name])):
            piece = expand(part) if index % 2 else _as_expression_part(part)
            if piece is None:
                return None
            length += len(piece)
            if length > MAX_EXPRESSION:
                return None
            parts.append(piece)
        open_rules.pop()
        done[name] = f"(?:{''.join(parts)})"
        return done[name]

    return expand("root")


def _as_expression_part(part: str) -> str:
    """A translated piece without references: classes between slashes, groups, marks, blanks and empty texts."""
    return part.replace(" ", "").replace("/", "").replace("(", "(?:").replace('""', "(?:)")


class _Parser:
    """Recursive descent over the text. In translated pieces `_REFERENCE` marks the names of rules."""

    def __init__(self, text: str, token_of: Callable[[str], int | None]) -> None:
        self._text = text
        self._token_of = token_of
        self._at = 0
        self._rules = _Rules()

    def parse(self) -> _Rules:
        self._skip_blanks(newlines=True)
        while self._at < len(self._text):
            self._rule()
            self._skip_blanks(newlines=True)
        return self._rules

    # ---- places

    def _place(self, at: int | None = None) -> _Reference:
        before = self._text[: self._at if at is None else at]
        line_start = before.rfind("\n") + 1
        return _Reference(before.count("\n") + 1, len(before) - line_start + 1)

    def _error(self, message: str, at: int | None = None) -> InvalidArgument:
        place = self._place(at)
        return InvalidArgument(f"line {place.line}, column {place.column}: {message}")

    def _found(self) -> str:
        return repr(self._text[self._at]) if self._at < len(self._text) else "the end of the grammar"

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _skip_blanks(self, *, newlines: bool) -> None:
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif character in " \t" or (newlines and character in "\r\n"):
                self._at += 1
            else:
                return

    # ---- rules

    def _name(self) -> str:
        start = self._at
        while self._peek() in _NAME_CHARACTERS and self._peek():
            self._at += 1
        if self._at == start:
            raise self._error(f"expected a rule name, found {self._found()}")
        return self._text[start : self._at]

    def _rule(self) -> None:
        name = self._name()
        self._skip_blanks(newlines=False)
        if not self._text.startswith("::=", self._at):
            raise self._error(f"expected '::=' after the rule name '{name}', found {self._found()}")
        self._at += 3
        self._skip_blanks(newlines=True)
        body, _ = self._alternates(depth=0)
        if self._peek() not in ("", "\r", "\n"):
            raise self._error(f"expected the end of the rule '{name}', found {self._found()}")
        self._rules.bodies[name] = body

    def _alternates(self, depth: int) -> tuple[str, int]:
        """The translation, and the largest product of repetition counts in it."""
        if depth > MAX_DEPTH:
            raise self._error(f"parentheses are nested deeper than {MAX_DEPTH}")
        sequences, most = [], 1
        while True:
            sequence, size = self._sequence(depth)
            sequences.append(sequence)
            most = max(most, size)
            if self._peek() != "|":
                return " | ".join(sequences), most
            self._at += 1
            self._skip_blanks(newlines=True)

    def _sequence(self, depth: int) -> tuple[str, int]:
        items: list[str] = []
        most = 1
        while True:
            at = self._at
            found = self._primary(depth)
            if found is None:
                return " ".join(items) or '""', most
            item, size = found
            self._skip_blanks(newlines=depth > 0)
            while self._peek() in ("*", "+", "?", "{") and self._peek():
                item, size = self._repetition(item, size, at)
                self._skip_blanks(newlines=depth > 0)
            items.append(item)
            most = max(most, size)

    def _primary(self, depth: int) -> tuple[str, int] | None:
        character = self._peek()
        if character == '"':
            return self._literal(), 1
        if character == "[":
            return self._class(), 1
        if character == ".":
            self._at += 1
            return f"/{_class_text([(0, 0x10FFFF)], negated=False)}/", 1
        if character in ("<", "!") and character:
            return self._token(), 1
        if character == "(":
            opened = self._at
            self._at += 1
            self._skip_blanks(newlines=True)
            body, size = self._alternates(depth + 1)
            if self._peek() != ")":
                raise self._error("this parenthesis is not closed", opened)
            self._at += 1
            return f"({body})", size
        if character and character in _NAME_CHARACTERS:
            place = self._place()
            name = self._name()
            self._rules.used.setdefault(name, place)
            return f"\0{name}\0", 1
        if character in ("*", "+", "?", "{") and character:
            raise self._error(f"{character!r} has nothing before it to repeat")
        return None

    # ---- repetitions

    def _repetition(self, item: str, size: int, at: int) -> tuple[str, int]:
        mark = self._peek()
        self._at += 1
        if mark == "*":
            least, most = 0, None
        elif mark == "+":
            least, most = 1, None
        elif mark == "?":
            least, most = 0, 1
        else:
            least, most = self._bounds()
        if least > MAX_REPETITIONS:
            raise self._error(f"{least} repetitions are demanded, more than {MAX_REPETITIONS}", at)
        if most is not None and most < least:
            raise self._error(f"at least {least} repetitions are demanded, but at most {most} allowed", at)
        if most is not None and most > MAX_REPETITIONS:
            most = None
        size *= max(1, least if most is None else most)
        if size > MAX_REPETITIONS:
            raise self._error(f"nested repetitions multiply to {size}, more than {MAX_REPETITIONS}", at)
        if most is None:
            suffix = {0: "*", 1: "+"}.get(least, f"{{{least},}}")
        elif most == 0:
            return '""', size
        else:
            suffix = "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
        return f"({item}){suffix}", size

    def _bounds(self) -> tuple[int, int | None]:
        self._skip_blanks(newlines=False)
        least = self._count()
        self._skip_blanks(newlines=False)
        most: int | None = least
        if self._peek() == ",":
            self._at += 1
            self._skip_blanks(newlines=False)
            most = None if self._peek() == "}" else self._count()
            self._skip_blanks(newlines=False)
        if self._peek() != "}":
            raise self._error(f"expected '}}' after the repetition counts, found {self._found()}")
        self._at += 1
        return least, most

    def _count(self) -> int:
        start = self._at
        while self._peek() in "0123456789" and self._peek():
            self._at += 1
        if self._at == start:
            raise self._error(f"expected a number, found {self._found()}")
        return int(self._text[start : min(self._at, start + 9)])

    # ---- terminals

    def _character(self) -> int:
        """One code point, escaped or not."""
        character = self._peek()
        self._at += 1
        if character != "\\":
            return ord(character)
        kind = self._peek()
        self._at += 1
        if kind in _SIMPLE_ESCAPES:
            return ord(_SIMPLE_ESCAPES[kind])
        if kind not in _HEX_ESCAPES:
            raise self._error(f"unknown escape '\\{kind}'", self._at - 2)
        digits = self._text[self._at : self._at + _HEX_ESCAPES[kind]]
        if len(digits) < _HEX_ESCAPES[kind] or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise self._error(f"'\\{kind}' needs {_HEX_ESCAPES[kind]} hexadecimal digits", self._at - 2)
        self._at += len(digits)
        value = int(digits, 16)
        if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            raise self._error(f"U+{value:04X} is not a character", self._at - len(digits) - 2)
        return value

    def _literal(self) -> str:
        opened = self._at
        self._at += 1
        parts = []
        while self._peek() != '"':
            if not self._peek() or self._peek() == "\n":
                raise self._error("this text has no closing quotation mark", opened)
            code = self._character()
            parts.append(f"/{_class_text([(code, code)], negated=False)}/")
        self._at += 1
        return "(" + " ".join(parts) + ")" if parts else '""'

    def _class(self) -> str:
        opened = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            if not self._peek() or self._peek() == "\n":
                raise self._error("this character class is not closed", opened)
            first = self._character()
            last = first
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                at = self._at
                self._at += 1
                last = self._character()
                if last < first:
                    raise self._error("a range of characters runs backwards", at)
            ranges.append((first, last))
        self._at += 1
        if not ranges and not negated:
            raise self._error("this character class is empty: nothing can match it", opened)
        if not ranges:
            return f"/{_class_text([(0, 0x10FFFF)], negated=False)}/"
        return f"/{_class_text(ranges, negated=negated)}/"

    def _token(self) -> str:
        opened = self._at
        if self._peek() == "!":
            raise self._error("tokens excluded with '!' are not supported yet", opened)
        end = self._text.find(">", opened)
        if end < 0 or "\n" in self._text[opened:end]:
            raise self._error("this token is not closed with '>'", opened)
        self._at = end + 1
        name = self._text[opened : self._at]
        if name.startswith("<[") and name.endswith("]>"):
            digits = name[2:-2]
            if not digits.isascii() or not digits.isdigit():
                raise self._error(f"'{digits}' is not a token id", opened)
            return f"<[{int(digits)}]>"
        token = self._token_of(name)
        if token is None:
            raise self._error(f"'{name}' is not one token of this vocabulary", opened)
        return f"<[{token}]>"


def _class_text(ranges: Sequence[tuple[int, int]], *, negated: bool) -> str:
    """A class in the notation of regular expressions."""
    parts = [f"\\x{{{first:X}}}" + (f"-\\x{{{last:X}}}" if last != first else "") for first, last in ranges]
    return f"[{'^' if negated else ''}{''.join(parts)}]"
