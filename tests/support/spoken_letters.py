"""Turns a tiny random model into one that says but six letters, so that drafters guess it right now and then.

All rows of the output matrix but six become small, and the six are three and their opposites: one of them always wins
clearly. A drafter that shares the matrix guesses among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from support.tiny_llama import byte_level_vocabulary

LETTERS = "abcde "
_Q8_0_BYTES = 34  # of a block; the first two are its scale


def letter_tokens(letters: str = LETTERS) -> list[int]:
    texts = byte_level_vocabulary().tokens
    return [texts.index("Ġ" if letter == " " else letter) for letter in letters]


def speak_letters(path: Path, tokens: Sequence[int] | None = None) -> Path:
    """Change the file in place: F32 or Q8_0. tokens: six of them; those at the end are the opposites of the first."""
    tokens = letter_tokens() if tokens is None else list(tokens)
    spoken, opposites = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    (head,) = (tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == "output.weight")
    rows = head.data
    kept = rows[spoken].copy()
    if head.tensor_type == gguf.GGMLQuantizationType.F32:
        rows[:] *= 0.001
        rows[spoken], rows[opposites] = kept, -kept
    elif head.tensor_type == gguf.GGMLQuantizationType.Q8_0:
        _scale_blocks(rows, 0.001)
        rows[spoken] = rows[opposites] = kept
        turned = rows[opposites].copy()
        _scale_blocks(turned, -1.0)
        rows[opposites] = turned
    else:
        raise ValueError(f"{path}: output.weight is {head.tensor_type.name}, expected F32 or Q8_0")
    return path


def _scale_blocks(rows: np.ndarray, factor: float) -> None:
    blocks = rows.reshape(-1, _Q8_0_BYTES)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)
    blocks[:, :2] = (scales * np.float16(factor)).astype(np.float16).view(np.uint8)
