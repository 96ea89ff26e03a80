"""Finds the GGUF name of the pre-tokenizer that a tokenizer.json describes, by its rules and not by their effect."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyllama.errors import TokenizerError

from ..json_files import as_list, as_object

# A rule: the text of a regular expression that isolates its matches, or one of these.
GPT2_PATTERN = "<gpt-2 pattern>"
SINGLE_DIGITS = r"\p{N}"

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"

_NAMES: Mapping[tuple[str, ...], str] = {
    (GPT2_PATTERN,): "gpt-2",
    (SINGLE_DIGITS, GPT2_PATTERN): "smollm",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_SYMBOLS}|{_SPACES}",): "qwen2",
    (f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",): "llama-bpe",
    (
        f"{_CONTRACTIONS}|{_START}[\\p{{L}}\\p{{M}}]+|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{M}}\\p{{N}}]+[\\r\\n]*|{_SPACES}",
    ): "qwen35",
    (
        f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{_SPACES}",
    ): "tekken",
}

# Spellings of the same expression.
_EXPANDED_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2_TEXTS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


def pre_tokenizer_name(description: Any) -> str:
    """description: `pre_tokenizer` of a tokenizer.json. Raises `TokenizerError` that lists the rules when unknown."""
    rules = tuple(_rules(description))
    name = _NAMES.get(rules)
    if name is None:
        raise TokenizerError(
            f"tokenizer.json: no known pre-tokenizer has the rules {list(rules)}; "
            f"known are {', '.join(_NAMES.values())}; --pre NAME chooses one in spite of that"
        )
    return name


def _rules(description: Any) -> Iterator[str]:
    description = as_object(description, "tokenizer.json: pre_tokenizer")
    kind = description.get("type")
    if kind == "Sequence":
        for part in as_list(description.get("pretokenizers"), "tokenizer.json: pretokenizers"):
            yield from _rules(part)
    elif kind == "ByteLevel":
        if description.get("add_prefix_space", True):
            raise TokenizerError("tokenizer.json: ByteLevel with add_prefix_space has no form in GGUF files")
        if description.get("use_regex", True):
            yield GPT2_PATTERN
    elif kind == "Digits" and description.get("individual_digits"):
        yield SINGLE_DIGITS
    elif kind == "Split" and _isolates(description):
        yield _canonical(description["pattern"]["Regex"])
    else:
        yield f"{kind} {description}"


def _isolates(description: Mapping[str, Any]) -> bool:
    """Matches become pieces, and so does what lies between. Patterns that match everything may also drop the rest."""
    pattern = description.get("pattern")
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        return False
    return (description.get("behavior"), description.get("invert")) in (("Isolated", False), ("Removed", True))


def _canonical(pattern: str) -> str:
    pattern = pattern.replace(_EXPANDED_CONTRACTIONS, _CONTRACTIONS)
    return GPT2_PATTERN if pattern in _GPT2_TEXTS else pattern
