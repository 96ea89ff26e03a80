"""From a checkpoint's tokenizer files to the `tokenizer.*` keys of a GGUF file."""

from collections.abc import Sequence
from pathlib import Path

from pyllama.gguf import KeyValue

from ..config import Config
from .chat_templates import chat_template_keys
from .files import TokenizerFiles
from .special_tokens import special_token_keys
from .vocabulary import read_tokens


def tokenizer_keys(
    folder: Path, config: Config, vocab_size: int, kinds: Sequence[str], pre: str | None = None
) -> list[KeyValue]:
    """kinds: `sentencepiece`, `byte-fallback`, `byte-level`, those the family can use, in order of preference."""
    files = TokenizerFiles(folder, config)
    tokens = read_tokens(files, kinds, pre)
    tokens.pad(vocab_size)
    return [*tokens.key_values(), *special_token_keys(files, tokens), *chat_template_keys(files)]
