"""The vocabulary of a checkpoint as `tokenizer.ggml.*` keys: byte-level BPE, SentencePiece, BPE with byte fallback."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyllama.errors import TokenizerError
from pyllama.gguf import KeyValue
from pyllama.pretokenizers import known_names
from pyllama.vocabulary import PRE_DEFAULTS, PREFIX, SPM_SPACE, TokenType, byte_of_token

from ..json_files import as_list, as_object
from .files import AddedToken, TokenizerFiles
from .pre_tokenizer import pre_tokenizer_name
from .sentencepiece_model import read_sentencepiece

logger = logging.getLogger(__name__)

ADDED_SCORE = -1000.0
PADDING_SCORE = -10000.0


@dataclass
class Tokens:
    """Tokens by id, and how they are merged. `special`: ids that the vocabulary itself names."""

    model: str  # tokenizer.ggml.model
    pre: str
    texts: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    add_space_prefix: bool | None = None
    remove_extra_whitespaces: bool | None = None
    special: dict[str, int] = field(default_factory=dict)

    def pad(self, size: int) -> None:
        """Give every row of the embedding table a token. Raises `TokenizerError` when there are too few rows."""
        if len(self.texts) > size:
            raise TokenizerError(f"the tokenizer has {len(self.texts)} tokens, the model's vocab_size is {size}")
        for token in range(len(self.texts), size):
            self.texts.append(f"[PAD{token}]")
            self.types.append(int(TokenType.UNUSED))
            if self.scores is not None:
                self.scores.append(PADDING_SCORE)

    def key_values(self) -> list[KeyValue]:
        keys = [
            KeyValue(PREFIX + "model", "string", self.model),
            KeyValue(PREFIX + "pre", "string", self.pre),
            KeyValue(PREFIX + "tokens", "string[]", self.texts),
        ]
        if self.scores is not None:
            keys.append(KeyValue(PREFIX + "scores", "f32[]", self.scores))
        keys.append(KeyValue(PREFIX + "token_type", "i32[]", self.types))
        if self.merges is not None:
            keys.append(KeyValue(PREFIX + "merges", "string[]", self.merges))
        for name in ("add_space_prefix", "remove_extra_whitespaces"):
            if (value := getattr(self, name)) is not None:
                keys.append(KeyValue(PREFIX + name, "bool", value))
        return keys


def read_tokens(files: TokenizerFiles, kinds: Sequence[str], pre: str | None) -> Tokens:
    """kinds: what the family's loaders accept, in order of preference. pre: a name instead of the one found."""
    for kind in kinds:
        tokens = _READERS[kind](files, pre)
        if tokens is not None:
            return tokens
    found = _model(files)
    if found:
        raise TokenizerError(f"{files.path('tokenizer.json')}: a {found.get('type')} model is not supported")
    raise TokenizerError(
        f"{files.folder}: no tokenizer: expected tokenizer.json"
        + (" or tokenizer.model" if "sentencepiece" in kinds else "")
    )


def _read_byte_level(files: TokenizerFiles, pre: str | None) -> Tokens | None:
    model = _bpe_model(files)
    if model is None or model.get("byte_fallback"):
        return None
    if pre is None:
        pre = pre_tokenizer_name(files.tokenizer.get("pre_tokenizer"))
    elif pre not in known_names():
        raise TokenizerError(f"unknown pre-tokenizer {pre!r}; known are {', '.join(known_names())}")
    if model.get("ignore_merges", (ignores := PRE_DEFAULTS[pre].ignore_merges)) is not ignores:
        logger.warning("ignore_merges is %s in tokenizer.json, but not for %s", not ignores, pre)
    base = {token: (text, TokenType.NORMAL) for token, text in _by_id(model).items()}
    texts, types = _with_added(base, files.added)
    # A space within a part is written as byte-level texts write it.
    merges = [" ".join(part.replace(" ", "\u0120") for part in parts) for parts in _merges(model)]
    prefix = files.tokenizer_config.get("add_prefix_space")
    return Tokens("gpt2", pre, texts, types, merges=merges, add_space_prefix=prefix if prefix is False else None)


def _read_sentencepiece(files: TokenizerFiles, pre: str | None) -> Tokens | None:
    path = files.path("tokenizer.model")
    if not path.is_file():
        return None
    model = read_sentencepiece(path)
    pieces = [(piece.text.decode("utf-8", "surrogateescape"), piece.type) for piece in model.pieces]
    texts, types = _with_added(dict(enumerate(pieces)), files.added)
    scores = [piece.score for piece in model.pieces] + [ADDED_SCORE] * (len(texts) - len(model.pieces))
    return Tokens(
        "llama",
        "default",
        texts,
        types,
        scores=scores,
        add_space_prefix=model.add_space_prefix,
        remove_extra_whitespaces=model.remove_extra_whitespaces,
        special=model.special,
    )


def _read_byte_fallback(files: TokenizerFiles, pre: str | None) -> Tokens | None:
    """A SentencePiece vocabulary that was written as BPE: the rank of a merge becomes the score of what it makes."""
    model = _bpe_model(files)
    if model is None or not model.get("byte_fallback"):
        return None
    base: dict[int, tuple[str, int]] = {}
    for token, text in _by_id(model).items():
        kind = TokenType.NORMAL if byte_of_token(text) is None else TokenType.BYTE
        base[token] = (text, TokenType.UNKNOWN if text == model.get("unk_token") else kind)
    texts, types = _with_added(base, files.added)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(model)):
        ranks.setdefault(left + right, rank)
    scores = [float(-ranks.get(text, len(ranks) + token)) for token, text in enumerate(texts)]
    return Tokens("llama", "default", texts, types, scores=scores, add_space_prefix=_prepends_space(files.tokenizer))


_READERS: Mapping[str, Callable[[TokenizerFiles, str | None], Tokens | None]] = {
    "sentencepiece": _read_sentencepiece,
    "byte-fallback": _read_byte_fallback,
    "byte-level": _read_byte_level,
}


def _bpe_model(files: TokenizerFiles) -> Mapping[str, Any] | None:
    model = _model(files)
    return model if model.get("type", "BPE") == "BPE" and model.get("vocab") else None


def _model(files: TokenizerFiles) -> Mapping[str, Any]:
    return as_object(files.tokenizer.get("model"), "tokenizer.json: model")


def _by_id(model: Mapping[str, Any]) -> dict[int, str]:
    vocabulary = as_object(model["vocab"], "tokenizer.json: vocab")
    by_id = {token: text for text, token in vocabulary.items() if type(token) is int and token >= 0}
    if len(by_id) < len(vocabulary):
        raise TokenizerError("tokenizer.json: the ids of the vocabulary are not distinct numbers from 0 on")
    return by_id


def _with_added(base: Mapping[int, tuple[str, int]], added: Mapping[int, AddedToken]) -> tuple[list[str], list[int]]:
    """Texts and types of ids 0 to the highest; gaps are unused tokens. A type other than NORMAL in `base` stays."""
    count = max([*base, *added], default=-1) + 1
    if count > 2 * (len(base) + len(added)) + 1024:
        raise TokenizerError(f"ids go up to {count - 1}, but there are only {len(base) + len(added)} tokens")
    tokens = [base.get(token, (f"[PAD{token}]", TokenType.UNUSED)) for token in range(count)]
    for token, entry in added.items():
        text, kind = tokens[token]
        if text != entry.text or kind == TokenType.NORMAL:
            tokens[token] = (entry.text, TokenType.CONTROL if entry.is_control else TokenType.USER_DEFINED)
    return [text for text, _ in tokens], [int(kind) for _, kind in tokens]


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs in order of rank, from either form: lists of two, or texts with a space between the parts."""
    for rank, merge in enumerate(as_list(model.get("merges"), "tokenizer.json: merges")):
        parts = merge
        if isinstance(merge, str) and " " in merge[1:]:
            space = merge.index(" ", 1)
            parts = [merge[:space], merge[space + 1 :]]
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise TokenizerError(f"tokenizer.json: merge {rank} is {merge!r:.60}, expected two texts")
        yield parts[0], parts[1]


def _prepends_space(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a space is put before the text: by a Prepend normaliser, or by a Metaspace pre-tokenizer."""
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    for part in (*normalizers, *_parts(tokenizer.get("pre_tokenizer"), "pretokenizers")):
        if part.get("type") == "Prepend" and part.get("prepend") == SPM_SPACE:
            return True
        if part.get("type") == "Metaspace":
            default = "always" if part.get("add_prefix_space", True) else "never"
            return bool(part.get("prepend_scheme", default) != "never")
    return False


def _parts(description: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a description, sequences (whose steps are under `inner`) flattened."""
    step = as_object(description, f"tokenizer.json: a step of the {inner}")
    if step.get("type") == "Sequence":
        for part in as_list(step.get(inner), f"tokenizer.json: {inner}"):
            yield from _parts(part, inner)
    else:
        yield step
