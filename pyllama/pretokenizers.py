"""Pre-tokenizers of byte-level BPE: cut text into the pieces inside which merges may happen.

Runs on the standard `re` with frozen Unicode tables rather than on a Unicode-aware engine, for three reasons:
undecodable bytes (surrogate escapes in a `str`) pass through and belong to no class; results do not depend on the
interpreter's Unicode version; and classes cut to the basic plane are matched through a bitmap (28 MB/s on mixed text,
against 2.5 MB/s with the full classes).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import chain

from pyllama import tokenizer_unicode

# `\s` as Unicode White_Space: Python's own also counts U+001C..U+001F.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"

# Every pattern must match at every position: what the published expressions leave over is the last alternative here.
# ~L ~N ~M ~P ~S stand for the contents of character classes.
_SPACES = r"[~S]+(?![^~S])|[~S]+"
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?[~L]+| ?[~N]+| ?[^~S~L~N]+|" + _SPACES
_LINES = r"[~S]*[\r\n]+|" + _SPACES
_TAIL = r" ?[^~S~L~N]+[\r\n]*|" + _LINES
_QWEN2 = _CONTRACTION + r"|[^\r\n~L~N]?[~L]+|[~N]|" + _TAIL
_QWEN35 = _CONTRACTION + r"|[^\r\n~L~N]?[~L~M]+|[~N]| ?[^~S~L~M~N]+[\r\n]*|" + _LINES
_LLAMA3 = _CONTRACTION + r"|[^\r\n~L~N]?[~L]+|[~N]{1,3}|" + _TAIL
# Tekken ends a word before an upper-case letter that follows a lower-case one; only ASCII letters count as cased here.
_TEKKEN = (
    r"[^\r\n~L~N]?(?:(?![a-z])[~L])*(?:(?![A-Z])[~L])+|[^\r\n~L~N]?(?:(?![a-z])[~L])+(?:(?![A-Z])[~L])*"
    r"|[~N]| ?[^~S~L~N]+[\r\n/]*|" + _LINES
)
# Published as two stages, single numbers and then the GPT-2 pattern on what lies between. In one pattern a number ends
# a run of spaces like the end of text does.
_SINGLE_NUMBERS_GPT2 = r"[~N]|'(?:[stmd]|re|ve|ll)| ?[~L]+| ?[^~S~L~N]+|[~S]+(?![^~S~N])|[~S]+"
_DEFAULT = (
    r"[~P$+<=>\^~|]+|[^~P$+<=>\^~|]+",
    _GPT2,
    r"[~N]+|[^~N]+",
    r"[0-9]{3}|(?:(?![0-9]{3})[\s\S])+",
)

_STAGES: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "starcoder": (_SINGLE_NUMBERS_GPT2,),
    "refact": (_SINGLE_NUMBERS_GPT2,),
    "command-r": (_SINGLE_NUMBERS_GPT2,),
    "smollm": (_SINGLE_NUMBERS_GPT2,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "pixtral": (_LLAMA3,),
    "tekken": (_TEKKEN,),
}

_TABLES = {
    "L": tokenizer_unicode.LETTERS,
    "N": tokenizer_unicode.NUMBERS,
    "M": tokenizer_unicode.MARKS,
    "P": tokenizer_unicode.PUNCTUATION,
}
# A character beyond the basic plane is replaced by one of its class from inside it, with the same behaviour in every
# pattern.
_STAND_INS = {"L": "\u4e00", "N": "\u0660", "M": "\u0300", "P": "\u2020"}
_OTHER_STAND_IN = "\ufffd"
_BEYOND_BASIC_PLANE = re.compile("[\U00010000-\U0010ffff]")


def known_names() -> tuple[str, ...]:
    return tuple(_STAGES)


@cache
def splitter(name: str) -> Callable[[str], list[str]]:
    """Function that cuts a text into pieces, which concatenated give the text again. KeyError for an unknown name."""
    first, *later = (_compile(pattern) for pattern in _STAGES[name])

    def split_basic(text: str) -> list[str]:
        pieces = first(text)
        for stage in later:
            pieces = list(chain.from_iterable(map(stage, pieces)))
        return pieces

    def split(text: str) -> list[str]:
        basic, replaced = _BEYOND_BASIC_PLANE.subn(_stand_in, text)
        pieces = split_basic(basic)
        if not replaced:
            return pieces
        original, start = [], 0
        for piece in pieces:
            original.append(text[start : start + len(piece)])
            start += len(piece)
        return original

    return split


@cache
def _compile(pattern: str) -> Callable[[str], list[str]]:
    for letter in _TABLES:
        pattern = pattern.replace("~" + letter, _class_content(letter))
    return re.compile(pattern.replace("~S", _SPACE)).findall


def _ranges(letter: str) -> list[tuple[int, int]]:
    pairs = (entry.partition("-") for entry in _TABLES[letter].split())
    return [(int(first, 16), int(last or first, 16)) for first, _, last in pairs]


@cache
def _class_content(letter: str) -> str:
    ranges = [(first, min(last, 0xFFFF)) for first, last in _ranges(letter) if first <= 0xFFFF]
    return "".join(rf"\u{first:04x}-\u{last:04x}" for first, last in ranges)


@cache
def _class_beyond_basic_plane() -> re.Pattern[str]:
    groups = []
    for letter in _TABLES:
        ranges = [(first, last) for first, last in _ranges(letter) if first > 0xFFFF]
        groups.append(f"(?P<{letter}>[" + "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ranges) + "])")
    return re.compile("|".join(groups))


@cache
def _stand_in_of(character: str) -> str:
    match = _class_beyond_basic_plane().match(character)
    return _STAND_INS[str(match.lastgroup)] if match else _OTHER_STAND_IN


def _stand_in(match: re.Match[str]) -> str:
    return _stand_in_of(match[0])
