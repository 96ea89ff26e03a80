"""Pre-tokenizers against the published expressions in another engine (Oniguruma, in `tokenizers`) and cases by hand.

What llama.cpp makes of the same rules is compared in `tests/models/test_tokenizer_oracle.py`.
"""

from __future__ import annotations

import random
import sys
import unicodedata

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from pyllama import tokenizer_unicode
from pyllama.pretokenizers import known_names, splitter
from support.vocabularies import splitting_text

CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL],
    "qwen35": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + TAIL],
    "llama-bpe": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
SEED = 5


@pytest.mark.parametrize("pre", PUBLISHED)
def test_pieces_are_those_of_the_published_expressions(pre: str) -> None:
    reference = Sequence([Split(Regex(expression), "isolated") for expression in PUBLISHED[pre]])
    split = splitter(pre)
    rng = random.Random(SEED)
    for _ in range(400):
        text = splitting_text(rng, rng.choice([1, 2, 5, 30]))
        expected = [piece for piece, _ in reference.pre_tokenize_str(text)]
        assert split(text) == expected, f"{text!r}, seed {SEED}"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen2", "(x):\n", ["(x", "):\n"]),
        ("qwen2", "a->b", ["a", "->", "b"]),
        ("qwen2", "2024", ["2", "0", "2", "4"]),
        ("qwen2", "It'S we'LL", ["It", "'S", " we", "'LL"]),
        ("qwen2", "e\u0301", ["e", "\u0301"]),
        ("qwen35", "e\u0301", ["e\u0301"]),
        ("qwen2", "a   b", ["a", "  ", " b"]),
        ("qwen2", "a   ", ["a", "   "]),
        ("qwen2", "a \n  b", ["a", " \n", " ", " b"]),
        ("qwen2", "\tx", ["\tx"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("smollm", "ab  12", ["ab", "  ", "1", "2"]),
        ("smollm", "a\nb", ["a", "\n", "b"]),
        ("smollm", "It'S", ["It", "'", "S"]),
        ("gpt-2", "x 123", ["x", " 123"]),
        ("gpt-2", "a\x1cb", ["a", "\x1c", "b"]),  # a control character, not white space
        ("gpt-2", "a\u3000\u3000b", ["a", "\u3000", "\u3000", "b"]),
        ("default", "12345!?x", ["123", "45", "!?", "x"]),
        ("tekken", "fooBar", ["foo", "Bar"]),
    ],
)
def test_splitting_by_hand(pre: str, text: str, pieces: list[str]) -> None:
    assert splitter(pre)(text) == pieces


@pytest.mark.skipif(unicodedata.unidata_version > "15.1.0", reason="needs an interpreter with Unicode 15.1 or older")
def test_the_frozen_classes_agree_with_the_interpreter_where_it_knows_the_character() -> None:
    tables = {
        "L": tokenizer_unicode.LETTERS,
        "N": tokenizer_unicode.NUMBERS,
        "M": tokenizer_unicode.MARKS,
        "P": tokenizer_unicode.PUNCTUATION,
    }
    classes: dict[int, str] = {}
    for letter, table in tables.items():
        for entry in table.split():
            first, _, last = entry.partition("-")
            classes.update(dict.fromkeys(range(int(first, 16), int(last or first, 16) + 1), letter))
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category != "Cn":
            assert classes.get(code, "") == (category[0] if category[0] in tables else ""), f"U+{code:04X}"


@pytest.mark.parametrize("pre", known_names())
def test_pieces_concatenated_are_the_text(pre: str) -> None:
    split = splitter(pre)
    rng = random.Random(SEED)
    for _ in range(200):
        text = splitting_text(rng, 12, ("\udc80", "\udcff"))
        assert "".join(split(text)) == text, f"{text!r}, seed {SEED}"
    assert split("") == []


@pytest.mark.parametrize("pre", known_names())
@pytest.mark.parametrize("unit", ["A", "a", " ", "\n", "1", "!", "\u0301", "𐐀", " \n", "aA", "'"])
def test_a_long_run_is_split_in_linear_time(pre: str, unit: str) -> None:
    # Quadratic behaviour would take minutes at this length and run into the suite's timeout.
    text = unit * 200_000
    assert "".join(splitter(pre)(text)) == text
