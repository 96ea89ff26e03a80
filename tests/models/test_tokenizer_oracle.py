"""Tokenizer against llama.cpp: the same ids and texts for the SmolLM2 vocabulary and for synthetic ones of every kind.

The synthetic vocabularies show every piece boundary (see `support/vocabularies.py`), so these tests pin the splitting
of each pre-tokenizer, SentencePiece merging, special tokens, and the clean-up in detokenization.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pyllama.pretokenizers import known_names
from pyllama.tokenizer import Tokenizer
from pyllama.vocabulary import DETECTED_TEXTS
from support import vocabularies, vocabulary_oracle

pytestmark = pytest.mark.skipif(not vocabulary_oracle.is_available(), reason="needs the xllamacpp package")

SEED = 20260101
SPECIAL_TEXTS = (
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "<think>",
    "</think>",
    "<tool_call>",
    "  x",
    "<s>",
    "</s>",
    "<0x41>",
    "▁",
)


def random_texts(count: int, *, alphabet: tuple[str, ...] | None = None) -> list[str]:
    rng = random.Random(SEED)
    lengths = (1, 2, 3, 5, 8, 20, 100)
    if alphabet:
        return ["".join(rng.choices(alphabet, k=rng.choice(lengths))) for _ in range(count)]
    blocks = [
        (0x20, 0x7F),
        (0x80, 0x800),
        (0x800, 0xD800),
        (0xE000, 0x10000),
        (0x10000, 0x20000),
        (0x20, 0x21),
        (0x0A, 0x0B),
    ]
    texts = [vocabularies.splitting_text(rng, rng.choice(lengths), SPECIAL_TEXTS) for _ in range(count // 2)]
    for _ in range(count - len(texts)):
        texts.append("".join(chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.choice(lengths))))
    return texts


def assert_same(metadata: dict[str, Any], model: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata)
    oracle = vocabulary_oracle.ask(model, [text.encode() for text in texts])
    assert [tokenizer.add_bos, tokenizer.add_eos] == oracle["flags"]
    assert sorted(tokenizer.eog_ids) == oracle["eog"]
    for name, token in oracle["ids"].items():
        found_id = getattr(tokenizer, f"{name}_id")
        if (
            name == "eot" and found_id is not None
        ):  # llama.cpp takes any of several candidates: a matter of its hash order
            assert tokenizer.token_text(token) in DETECTED_TEXTS["eot"]
        else:
            assert found_id == (None if token < 0 else token), f"{name}_id"
    for text, answer in zip(texts, oracle["answers"], strict=True):
        for switches, expected in answer["encode"].items():
            add_special, parse_special = (digit == "1" for digit in switches)
            found = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
            assert found == expected, (
                f"encode {text!r} add_special={add_special} parse_special={parse_special} seed={SEED}"
            )
        tokens = answer["encode"]["11"]
        for switches, expected in answer["decode"].items():
            special, remove_special = (digit == "1" for digit in switches)
            decoded = tokenizer.decode(tokens, special=special, remove_special=remove_special, clean_spaces=None)
            assert decoded == expected.encode("latin-1"), (
                f"decode of {text!r} special={special} remove={remove_special}"
            )


@pytest.mark.parametrize("pre", known_names())
def test_byte_level_vocabulary_gives_the_ids_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    metadata = vocabularies.byte_level_metadata(pre)
    vocabularies.write_vocabulary_model(tmp_path / "vocabulary.gguf", metadata)
    assert_same(metadata, tmp_path / "vocabulary.gguf", random_texts(150))


def test_a_wrong_splitting_rule_is_noticed(tmp_path: Path) -> None:
    """Negative control: the texts must tell qwen2 from qwen35, which differ in combining marks only."""
    metadata = vocabularies.byte_level_metadata("qwen2")
    vocabularies.write_vocabulary_model(tmp_path / "vocabulary.gguf", metadata)
    metadata["tokenizer.ggml.pre"] = "qwen35"
    with pytest.raises(AssertionError, match="encode"):
        assert_same(metadata, tmp_path / "vocabulary.gguf", random_texts(150))


@pytest.mark.parametrize("add_space_prefix", [None, False], ids=["prefix", "no-prefix"])
@pytest.mark.parametrize("equal_scores", [False, True], ids=["scores", "equal-scores"])
@pytest.mark.parametrize("spaces_inside", [False, True], ids=["words", "spaces-inside"])
def test_sentencepiece_vocabulary_gives_the_ids_of_llama_cpp(
    add_space_prefix: bool | None, equal_scores: bool, spaces_inside: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {} if add_space_prefix is None else {"add_space_prefix": add_space_prefix}
    metadata = vocabularies.sentencepiece_metadata(equal_scores=equal_scores, spaces_inside=spaces_inside, **changes)
    vocabularies.write_vocabulary_model(tmp_path / "vocabulary.gguf", metadata)
    alphabet = (*"abEZst'12é漢字か😀!?.,-<>|\nß  q", "\u0301", "  ", "   ", *SPECIAL_TEXTS, "<end_of_turn>")
    assert_same(metadata, tmp_path / "vocabulary.gguf", random_texts(150, alphabet=alphabet))


def test_bos_and_eos_are_added_and_removed_as_llama_cpp_does(tmp_path: Path) -> None:
    bos = len(vocabularies.byte_level_metadata("qwen2")["tokenizer.ggml.tokens"]) - len(vocabularies.SPECIAL_TOKENS)
    changes = {"bos_token_id": bos, "eos_token_id": bos + 1, "add_bos_token": True, "add_eos_token": True}
    metadata = vocabularies.byte_level_metadata("qwen2", **changes)
    vocabularies.write_vocabulary_model(tmp_path / "vocabulary.gguf", metadata)
    assert_same(metadata, tmp_path / "vocabulary.gguf", random_texts(30))


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    import gguf

    metadata: dict[str, Any] = {}
    for key, field in gguf.GGUFReader(smollm2_path).fields.items():
        if not key.startswith("tokenizer."):
            continue
        if field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
            metadata[key] = [bytes(field.parts[index]).decode("utf-8", "surrogateescape") for index in field.data]
        else:
            metadata[key] = field.contents()
    return metadata


def mixed_corpus(size: int) -> str:
    """About `size` bytes: prose, code, numbers, CJK, right-to-left and combining scripts, emoji, spaces, tokens."""
    rng = random.Random(SEED)
    words = "the of internationalization is it's they'll WE'RE don't naïve Straße Ελλάδα привет мир and; so: why? (yes)"
    samples = (
        *words.split(),
        "def f(x):\n\treturn x ** 2  # squares\n\n",
        "for (int i = 0; i < n; ++i) { a[i] -> b; }\n",
        '{"key": [1, 2.5e-3, null]}\n',
        "这是一个测试。我们想看看分词，怎么样？",
        "日本語の文章をここに書きます。",
        "한국어 문장입니다.",
        "שלום עולם ",
        "مرحبا بالعالم ",
        "हिन्दी में पाठ ",
        "ภาษาไทย",
        "e\u0301a\u0300o\u0308",
        "😀👨‍👩‍👧🏳️‍🌈",
        "3.14159 1,000,000 ٣٤٥ Ⅷ½² 0xFF",
        "<|im_start|>user\n",
        "<|im_end|>\n",
        "<|endoftext|>",
        "<file_sep>",
    )
    parts: list[str] = []
    length = 0
    while length < size:
        part = rng.choice(samples) + rng.choice(
            (" ", " ", " ", "  ", "\n", "\n\n", "\t", "      ", "\r\n", "\u3000", "")
        )
        if rng.random() < 0.05:
            part += vocabularies.splitting_text(rng, 20)
        parts.append(part)
        length += len(part.encode())
    return "".join(parts)


def test_smollm2_tokenizes_a_megabyte_as_llama_cpp_does(smollm2_path: Path, smollm2_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(smollm2_metadata)
    corpus = mixed_corpus(1_000_000)
    oracle = vocabulary_oracle.ask(smollm2_path, [corpus.encode()], decode=False)
    for parse_special in (False, True):
        found = tokenizer.encode(corpus, parse_special=parse_special)
        assert found == oracle["answers"][0]["encode"][f"0{parse_special:d}"], (
            f"parse_special={parse_special} seed={SEED}"
        )
        assert tokenizer.decode(found, special=True) == corpus.encode()


def test_smollm2_has_the_special_tokens_of_llama_cpp(smollm2_path: Path, smollm2_metadata: dict[str, Any]) -> None:
    assert_same(smollm2_metadata, smollm2_path, random_texts(100))
