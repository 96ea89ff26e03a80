"""Tokenizers of converted checkpoints: ids equal to those of the `tokenizers` and `sentencepiece` libraries."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from pyllama._engine import GgufFile
from pyllama.convert.tokenizer.pre_tokenizer import pre_tokenizer_name
from pyllama.convert.tokenizer.sentencepiece_model import read_sentencepiece
from pyllama.errors import ModelError, TokenizerError
from pyllama.tokenizer import Tokenizer
from pyllama.tools.convert_hf_to_gguf import main
from support.checkpoints import CONFIGS, QWEN2_PATTERN, TOKENIZER_CONFIG, added_token, tokenizer_json, write_json
from support.prompts import PROMPTS
from support.tiny_llama import CHAT_TEMPLATE

GOLDEN = Path(__file__).parent.parent / "golden" / "convert"
TEXTS = (
    *PROMPTS.values(),
    "",
    "you'll see 12345 things,\r\n\r\n  WE'VE seen\t\tthem  \n",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "half a <|im_sta rt|> and <think>\n\n</think> between",
    "Ünïcödé ٣٤ ½ 漢字 👨‍👩‍👧 e\u0301",
)
LLAMA3_WORDS = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_WORDS = QWEN2_PATTERN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(**changes: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **changes}


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level()]}


PRE_TOKENIZERS = {
    "gpt-2": byte_level(use_regex=True),
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)],
    },
    "qwen2": split_by(QWEN2_PATTERN),
    "llama-bpe": split_by(LLAMA3_WORDS),
    "qwen35": split_by(QWEN35_WORDS),
    "tekken": split_by(TEKKEN_WORDS),
}


def convert(folder: Path, family: str, files: dict[str, Any], *arguments: str) -> dict[str, Any]:
    """Metadata of a vocabulary-only conversion of these files."""
    config = {**CONFIGS[family], "vocab_size": 320, **files.pop("config.json", {})}
    write_json(folder / "config.json", config)
    for name, value in files.items():
        if isinstance(value, bytes):
            (folder / name).write_bytes(value)
        else:
            write_json(folder / name, value)
    path = folder / "vocab.gguf"
    assert main([str(folder), "--vocab-only", "--outfile", str(path), *arguments]) == 0
    return GgufFile(path).metadata


def merging_everything(pre_tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Enough merges over the texts that a piece boundary in the wrong place shows; added tokens of both kinds."""
    description = tokenizer_json(pre_tokenizer=pre_tokenizer)
    vocabulary, merges = description["model"]["vocab"], description["model"]["merges"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in TEXTS:
        for encoded, _ in alphabet.pre_tokenize_str(text):
            for left, right in pairwise(encoded):
                if left + right not in vocabulary:
                    vocabulary[left + right] = len(vocabulary)
                    merges.append([left, right])
    count = len(vocabulary)
    description["added_tokens"] += [
        added_token(count, "<think>", special=False),
        added_token(count + 1, "</think>", special=False),
    ]
    return description


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level_ids_equal_those_of_the_library(tmp_path: Path, name: str) -> None:
    description = merging_everything(PRE_TOKENIZERS[name])
    files = {
        "tokenizer.json": description,
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "config.json": {"vocab_size": 4000},
    }
    metadata = convert(tmp_path, "qwen3", files)
    assert metadata["tokenizer.ggml.pre"] == name
    ours = Tokenizer.from_metadata(metadata)
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    for text in TEXTS:
        assert ours.encode(text, add_special=True, parse_special=True) == library.encode(text).ids, text


def test_unknown_pre_tokenizer_is_an_error_that_lists_its_rules_and_can_be_overridden(tmp_path: Path) -> None:
    files = {"tokenizer.json": tokenizer_json(r"\w+|\s+"), "tokenizer_config.json": TOKENIZER_CONFIG}
    with pytest.raises(TokenizerError, match=r"\\\\w\+\|\\\\s\+.*known are gpt-2, smollm, qwen2.*--pre"):
        convert(tmp_path, "qwen2", dict(files))
    assert convert(tmp_path, "qwen2", dict(files), "--pre", "gpt-2")["tokenizer.ggml.pre"] == "gpt-2"
    with pytest.raises(TokenizerError, match="unknown pre-tokenizer 'gpt-9'"):
        convert(tmp_path, "qwen2", dict(files), "--pre", "gpt-9")


@pytest.mark.parametrize(
    "description",
    [
        byte_level(use_regex=True, add_prefix_space=True),
        {"type": "Whitespace"},
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, byte_level()]},
        {**split_by(QWEN2_PATTERN)["pretokenizers"][0], "behavior": "MergedWithNext"},
        None,
    ],
)
def test_rules_that_no_pre_tokenizer_has_are_refused(description: Any) -> None:
    with pytest.raises(TokenizerError):
        pre_tokenizer_name(description)


def test_types_special_ids_and_padding_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    description = tokenizer_json()
    size = len(description["model"]["vocab"])
    description["added_tokens"] += [
        added_token(size, "<think>", special=False),
        added_token(size + 2, "<|unmarked|>", special=False),
    ]
    files = {
        "tokenizer.json": description,
        "tokenizer_config.json": TOKENIZER_CONFIG | {"unk_token": None},
        "special_tokens_map.json": {"unk_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 0]},
    }
    metadata = convert(tmp_path, "qwen2", files)
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    assert keys["model"] == "gpt2"
    assert len(keys["tokens"]) == len(keys["token_type"]) == 320
    assert keys["token_type"].tolist()[:4] == [3, 3, 3, 1]
    assert keys["token_type"].tolist()[size : size + 4] == [4, 5, 3, 5]
    assert keys["tokens"][size : size + 4] == ["<think>", f"[PAD{size + 1}]", "<|unmarked|>", f"[PAD{size + 3}]"]
    assert keys["eos_token_id"] == 2  # tokenizer_config.json comes first
    assert keys["unknown_token_id"] == 0  # then special_tokens_map.json
    assert keys["padding_token_id"] == 0
    assert keys["bos_token_id"] == 0  # config.json before generation_config.json
    assert keys["eot_token_id"] == 2
    assert keys["add_bos_token"] is False
    assert keys["merges"][:2] == ["t h", "th e"]


def test_post_processor_decides_whether_bos_and_eos_are_added(tmp_path: Path) -> None:
    special = {"id": "<|im_start|>", "type_id": 0}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": special}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    processor = {"type": "Sequence", "processors": [byte_level(), template]}
    description = tokenizer_json(post_processor=processor)
    config = TOKENIZER_CONFIG | {"bos_token": "<|im_start|>", "add_bos_token": False}
    metadata = convert(tmp_path, "llama", {"tokenizer.json": description, "tokenizer_config.json": config})
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.add_eos_token"] is False
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    assert Tokenizer.from_metadata(metadata).encode("you", add_special=True) == library.encode("you").ids


def test_merges_with_spaces_inside_their_parts_are_written_as_byte_level_text(tmp_path: Path) -> None:
    description = tokenizer_json()
    description["model"]["merges"].append(["a b", "c"])
    assert convert(tmp_path, "qwen2", {"tokenizer.json": description})["tokenizer.ggml.merges"][-1] == "aĠb c"


def test_sentencepiece_ids_equal_those_of_the_library(tmp_path: Path) -> None:
    model = (GOLDEN / "sentencepiece.model").read_bytes()
    files = {
        "config.json": {"vocab_size": 602, "bos_token_id": None, "eos_token_id": None},
        "tokenizer.model": model,
        "tokenizer_config.json": {"add_bos_token": True},
        "added_tokens.json": {"<extra>": 600},
    }
    metadata = convert(tmp_path, "llama", files)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.tokens"][600:] == ["<extra>", "[PAD601]"]
    assert metadata["tokenizer.ggml.token_type"].tolist()[600:] == [4, 5]
    assert metadata["tokenizer.ggml.token_type"].tolist()[:6] == [2, 3, 3, 4, 4, 6]
    assert metadata["tokenizer.ggml.scores"][600:].tolist() == [-1000.0, -10000.0]
    assert [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos")] == [0, 1, 2]
    ours = Tokenizer.from_metadata(metadata)
    assert ours.add_bos
    for text, ids in json.loads((GOLDEN / "sentencepiece_ids.json").read_text()).items():
        assert ours.encode(text, add_special=False, parse_special=False) == ids, text


def test_vocabulary_of_smollm2_equals_the_one_in_its_published_gguf_file(tmp_path: Path, smollm2_path: Path) -> None:
    published = GgufFile(smollm2_path).metadata
    tokens = published["tokenizer.ggml.tokens"]
    description = tokenizer_json(pre_tokenizer=PRE_TOKENIZERS["smollm"])
    description["model"] |= {
        "vocab": {text: token for token, text in enumerate(tokens)},
        "merges": published["tokenizer.ggml.merges"],
    }
    description["added_tokens"] = [added_token(token, tokens[token]) for token in range(17)]
    settings = {
        **{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
        **{"pad_token": "<|im_end|>", "add_prefix_space": False},
        "chat_template": published["tokenizer.chat_template"],
    }
    files = {"tokenizer.json": description, "tokenizer_config.json": settings}
    metadata = convert(tmp_path, "llama", files | {"config.json": {"vocab_size": len(tokens)}})
    for key in [key for key in published if key.startswith("tokenizer.")]:
        np.testing.assert_array_equal(metadata[key], published[key], err_msg=key)


def as_byte_fallback() -> dict[str, Any]:
    """The SentencePiece model as the BPE description that transformers makes of it."""
    pieces = read_sentencepiece(GOLDEN / "sentencepiece.model").pieces
    vocabulary = {piece.text.decode(): token for token, piece in enumerate(pieces)}
    merges = sorted(
        (-pieces[token].score, vocabulary[text[:cut]], text[:cut], text[cut:])
        for text, token in vocabulary.items()
        if pieces[token].type == 1
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    )
    spaces = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocabulary}
    return {
        "version": "1.0",
        "added_tokens": [added_token(token, pieces[token].text.decode()) for token in range(5)],
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {**model, "merges": [[left, right] for _, _, left, right in merges]},
    }


def test_byte_fallback_ids_equal_those_of_the_library(tmp_path: Path) -> None:
    description = as_byte_fallback()
    files = {"tokenizer.json": description, "config.json": {"vocab_size": 600}}
    metadata = convert(tmp_path, "llama", files)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is True
    assert metadata["tokenizer.ggml.token_type"].tolist()[:6] == [2, 3, 3, 3, 3, 6]
    ours = Tokenizer.from_metadata(metadata)
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    texts = [text for text in TEXTS if text] + ["a<|im_end|>b"]
    for text in texts:
        assert ours.encode(text, add_special=False, parse_special=True) == library.encode(text).ids, text


@pytest.mark.parametrize("cut", [1, 2, 9, 100, 4000])
def test_sentencepiece_file_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes((GOLDEN / "sentencepiece.model").read_bytes()[:-cut])
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        read_sentencepiece(path)


@pytest.mark.parametrize(
    "data", [b"", b"\x0a\xff\xff\xff\xff\x7f", b"\x80" * 12, b"\x0b", b"\x0a\x02\x0a\x01", b"\x08\x01"]
)
def test_malformed_sentencepiece_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        read_sentencepiece(path)


def test_chat_template_comes_from_the_configuration_or_its_own_files(tmp_path: Path) -> None:
    files: dict[str, Any] = {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": TOKENIZER_CONFIG}
    assert convert(tmp_path, "qwen3", dict(files))["tokenizer.chat_template"] == CHAT_TEMPLATE
    files["tokenizer_config.json"] = {"eos_token": "<|im_end|>"}
    files["chat_template.jinja"] = b"{{ messages }}"
    assert convert(tmp_path, "qwen3", dict(files))["tokenizer.chat_template"] == "{{ messages }}"
    named = [{"name": "default", "template": "A"}, {"name": "Tool-Use", "template": "B"}]
    files["tokenizer_config.json"] = {"chat_template": named}
    metadata = convert(tmp_path, "qwen3", files)
    assert metadata["tokenizer.chat_template"] == "A"
    assert metadata["tokenizer.chat_template.tooluse"] == "B"
    assert metadata["tokenizer.chat_templates"] == ["tooluse"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer: expected tokenizer.json"),
        ({"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}}, "a Unigram model is not supported"),
        ({"tokenizer.json": tokenizer_json(), "config.json": {"vocab_size": 100}}, "the model's vocab_size is 100"),
        ({"tokenizer.json": tokenizer_json(added_tokens=[{"id": "x", "content": "a"}])}, "has no id or no content"),
        (
            {
                "tokenizer.json": tokenizer_json(added_tokens=[added_token(10**9, "far")]),
                "config.json": {"vocab_size": 2 * 10**9},
            },
            "ids go up to 1000000000",
        ),
        (
            {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": {"eos_token": "</s>"}},
            "eos token '</s>' is not",
        ),
        ({"tokenizer.json": b"{"}, "not valid JSON"),
    ],
)
def test_unusable_tokenizer_files_are_errors(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises((TokenizerError, ModelError), match=message):
        convert(tmp_path, "qwen2", dict(files))
