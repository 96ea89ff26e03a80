"""Synthetic vocabularies (GGUF metadata as Python values), texts for every splitting rule, a writer for other loaders.

The byte-level vocabulary joins any two of the bytes in these texts, in a random order of ranks: a piece boundary put in
the wrong place shows in the ids.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pyllama.tokenizer_bpe import byte_characters
from pyllama.vocabulary import TokenType

SPECIAL_TOKENS = (
    ("<|im_start|>", TokenType.CONTROL),
    ("<|im_end|>", TokenType.CONTROL),
    ("<unk>", TokenType.UNKNOWN),
    ("<think>", TokenType.USER_DEFINED),
    ("</think>", TokenType.USER_DEFINED),
    ("<tool", TokenType.USER_DEFINED),
    ("tool_call>", TokenType.CONTROL),
    ("  x", TokenType.USER_DEFINED),
)

SPLITTING_ALPHABET = (
    *(
        "a",
        "b",
        "E",
        "Z",
        "s",
        "'s",
        "'S",
        "'lL",
        "'re",
        "'VE",
        "'",
        "é",
        "ß",
        "ſ",
        "İ",
        "ǅ",
        "ʰ",
        "漢",
        "字",
        "か",
        "ا",
        "ע",
        "ा",
    ),
    *(
        "\u0301",
        "\u0300",
        "😀",
        "👨‍👩‍👧",
        "\U00020000",
        "\U0001d400",
        "\U0001e100",
        "\ufffd",
        "\u200b",
        "\ufeff",
        "\x00",
        "\x1c",
    ),
    *(
        "1",
        "2",
        "9",
        "٣",
        "²",
        "Ⅷ",
        "½",
        "\U00011066",
        " ",
        "  ",
        "   ",
        "\n",
        "\r",
        "\r\n",
        "\n\n",
        "\t",
        "\x0b",
        "\x85",
        "\u00a0",
    ),
    *(
        "\u2028",
        "\u3000",
        "!",
        "?",
        ".",
        "...",
        "->",
        "(",
        ")",
        ":",
        "$",
        "+",
        "=",
        "^",
        "~",
        "|",
        "<",
        ">",
        "_",
        "#",
        "/",
        "//",
    ),
)


def splitting_text(rng: random.Random, length: int, extra: tuple[str, ...] = ()) -> str:
    return "".join(rng.choice((*SPLITTING_ALPHABET, *extra)) for _ in range(length))


def byte_level_metadata(pre: str, *, seed: int = 7, **changes: Any) -> dict[str, Any]:
    """256 bytes, pairs of those that `SPLITTING_ALPHABET` uses, 3000 longer tokens, `SPECIAL_TOKENS` last.

    `changes` are `tokenizer.ggml.` keys.
    """
    rng = random.Random(seed)
    characters = byte_characters()
    used = [characters[byte] for byte in sorted(set("".join(SPLITTING_ALPHABET).encode()))]
    pairs = [(left, right) for left in used for right in used]
    rng.shuffle(pairs)
    tokens = [*characters, *(left + right for left, right in pairs)]
    merges = [f"{left} {right}" for left, right in pairs]
    known = set(tokens)
    for _ in range(3000):
        left, right = rng.choice(tokens), rng.choice(tokens)
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    types = [int(TokenType.NORMAL)] * len(tokens)
    for text, kind in SPECIAL_TOKENS:
        tokens.append(text)
        types.append(int(kind))
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "token_type": types, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def sentencepiece_metadata(
    *, seed: int = 7, equal_scores: bool = False, spaces_inside: bool = False, **changes: Any
) -> dict[str, Any]:
    """Byte tokens, characters, 1500 words. equal_scores: few distinct scores; spaces_inside: words may span spaces."""
    rng = random.Random(seed)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    scores = [0.0] * len(tokens)
    characters = [*"▁▁▁abEZst'12é漢字か😀!?.,-<>|\n", "\u0301"]
    words = [character for character in characters if rng.random() < 0.9]
    words += ["".join(rng.choice(characters) for _ in range(rng.choice([2, 2, 2, 3, 3, 4]))) for _ in range(1500)]
    for word in dict.fromkeys(words):
        if len(word) > 1 and "▁" in word.lstrip("▁") and not spaces_inside:
            continue
        tokens.append(word)
        types.append(TokenType.NORMAL)
        scores.append(float(rng.randrange(-6, 0)) if equal_scores else -100 * rng.random())
    for text, kind in (*SPECIAL_TOKENS[3:], ("<end_of_turn>", TokenType.NORMAL)):
        tokens.append(text)
        types.append(kind)
        scores.append(0.0)
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [int(kind) for kind in types],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def write_vocabulary_model(path: Path, metadata: dict[str, Any]) -> None:
    """A one-layer `llama` model of zeros around the vocabulary: the least that other loaders accept."""
    import gguf
    import numpy as np

    width = 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value[0], str):
            writer.add_array(key, [text.encode("utf-8", "surrogateescape") for text in value])
        else:
            writer.add_array(key, value)
    count = len(metadata["tokenizer.ggml.tokens"])
    writer.add_tensor("token_embd.weight", np.zeros((count, width), np.float16))
    writer.add_tensor("output_norm.weight", np.zeros(width, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((width, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
