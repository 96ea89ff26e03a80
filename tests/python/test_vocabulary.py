"""Reading `tokenizer.ggml.*`: defaults, special tokens, and errors that name the key and the values at fault."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pyllama.errors import TokenizerError
from pyllama.pretokenizers import known_names
from pyllama.tokenizer_bpe import byte_characters
from pyllama.vocabulary import PRE_DEFAULTS, TokenType, Vocabulary

BYTES = list(byte_characters())


def metadata(**changes: Any) -> dict[str, Any]:
    """A valid byte-level vocabulary of 256 tokens; `None` removes a key."""
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": list(BYTES), "merges": ["a b"], **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def with_tokens(*texts: str, kind: TokenType = TokenType.NORMAL, **changes: Any) -> dict[str, Any]:
    types = [int(TokenType.NORMAL)] * 256 + [int(kind)] * len(texts)
    return metadata(tokens=[*BYTES, *texts], token_type=types, **changes)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    keys = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "a"], "scores": [0.0] * 4, "merges": None, "pre": None}
    return metadata(**{**keys, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"model": 7}, r"tokenizer\.ggml\.model: found int, expected str"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model: 'bert' is not supported; supported are 'gpt2'"),
        ({"pre": "nonsense"}, r"tokenizer\.ggml\.pre: unknown pre-tokenizer 'nonsense'; known are .*qwen35"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": []}, r"tokenizer\.ggml\.tokens: 0 elements"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens: found str, expected an array"),
        ({"tokens": ["a", b"b"]}, r"tokenizer\.ggml\.tokens\[1\]: found bytes, expected a string"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ["a b", "ab"]}, r"tokenizer\.ggml\.merges\[1\]: 'ab', expected two parts"),
        ({"token_type": [1] * 10}, r"tokenizer\.ggml\.token_type: 10 elements for 256 tokens"),
        ({"token_type": [1] * 257}, r"tokenizer\.ggml\.token_type: 257 elements for 256 tokens"),
        ({"token_type": ["x"] * 256}, r"tokenizer\.ggml\.token_type\[0\]: found str"),
        (
            {"token_type": np.ones(256, np.uint8)},
            r"tokenizer\.ggml\.token_type: elements are uint8, expected 32-bit integers",
        ),
        ({"token_type": np.ones(256, np.float32)}, r"tokenizer\.ggml\.token_type: elements are float32"),
        ({"suppress_tokens": np.ones(3, np.int8)}, r"tokenizer\.ggml\.suppress_tokens: elements are int8"),
        ({"bos_token_id": "1"}, r"tokenizer\.ggml\.bos_token_id: found str, expected an integer"),
        ({"add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token: found int 1, expected a bool"),
    ],
)
def test_unusable_byte_level_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Vocabulary.from_metadata(metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0] * 3}, r"tokenizer\.ggml\.scores: 3 elements for 4 tokens"),
        ({"scores": np.zeros(4, np.uint8)}, r"tokenizer\.ggml\.scores: elements are uint8, expected 32-bit floats"),
        ({"scores": [0.0, 1.0, float("nan"), 0.0]}, r"tokenizer\.ggml\.scores\[2\]: not a number"),
        ({"scores": [None] * 4}, r"tokenizer\.ggml\.scores\[0\]: found NoneType"),
    ],
)
def test_unusable_scores_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Vocabulary.from_metadata(sentencepiece(**changes))


@pytest.mark.parametrize("scores", [np.zeros(4, np.float32), np.zeros(4, np.int32), [0, 1, 2, 3]])
def test_scores_may_be_floats_or_integers(scores: Any) -> None:
    assert len(Vocabulary.from_metadata(sentencepiece(scores=scores)).scores) == 4


@pytest.mark.parametrize("text", ["<0x-1>", "<0xZZ>", "<0x1>", "<0x100>", "<0x 1>", "0x41", "<0x+1>", "<0x４１>"])
def test_a_byte_token_must_be_two_hexadecimal_digits(text: str) -> None:
    with pytest.raises(TokenizerError, match=r"tokens\[256\]: byte token with text .* expected '<0xHH>'"):
        Vocabulary.from_metadata(with_tokens(text, kind=TokenType.BYTE))


def test_every_pre_tokenizer_has_defaults_and_rules() -> None:
    assert set(known_names()) == set(PRE_DEFAULTS)


def test_a_missing_pre_tokenizer_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Vocabulary.from_metadata(metadata(pre=None)).pre == "default"
    assert "tokenizer.ggml.pre is missing" in caplog.text


@pytest.mark.parametrize("token", [256, 2**31, -1])
def test_a_special_id_outside_the_vocabulary_is_ignored_with_a_warning(
    token: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        vocabulary = Vocabulary.from_metadata(metadata(padding_token_id=token))
    assert "pad" not in vocabulary.special
    assert f"padding_token_id: id {token} is outside 0..255" in caplog.text


def test_defaults_beyond_a_small_vocabulary_are_absent() -> None:
    vocabulary = Vocabulary.from_metadata(metadata(tokens=list("abc"), add_bos_token=True))
    assert "bos" not in vocabulary.special
    assert not vocabulary.add_bos


def test_suppressed_ids_outside_the_vocabulary_are_ignored() -> None:
    assert Vocabulary.from_metadata(metadata(suppress_tokens=[3, 300, -1])).suppress_ids == {3}


def test_repeated_texts_are_tolerated_and_the_lowest_id_stands_for_them() -> None:
    vocabulary = Vocabulary.from_metadata(with_tokens("ab", "ab", "a"))
    assert vocabulary.ids["ab"] == 256
    assert vocabulary.ids["a"] == BYTES.index("a")


def test_an_empty_token_text_gets_a_name() -> None:
    assert Vocabulary.from_metadata(with_tokens("", "x y")).texts[256] == "[EMPTY_256]"


def test_merge_parts_are_cut_at_the_first_space_after_the_first_character() -> None:
    assert Vocabulary.from_metadata(metadata(merges=["a b", "  c", "d  e"])).merges == [
        ("a", "b"),
        (" ", "c"),
        ("d", " e"),
    ]


@pytest.mark.parametrize(
    ("pre", "ignore_merges", "add_bos", "clean_spaces"),
    [
        ("qwen2", False, False, False),
        ("qwen35", False, False, False),
        ("smollm", False, False, False),
        ("llama-bpe", True, True, True),
        ("tekken", True, True, False),
        ("gpt-2", False, False, True),
        ("default", False, False, True),
    ],
)
def test_the_pre_tokenizer_decides_other_defaults(
    pre: str, ignore_merges: bool, add_bos: bool, clean_spaces: bool
) -> None:
    vocabulary = Vocabulary.from_metadata(metadata(pre=pre))
    found = (vocabulary.ignore_merges, vocabulary.add_bos, vocabulary.clean_spaces)
    assert found == (ignore_merges, add_bos, clean_spaces)


def test_metadata_overrides_the_defaults() -> None:
    vocabulary = Vocabulary.from_metadata(
        metadata(pre="llama-bpe", add_bos_token=False, add_eos_token=True, bos_token_id=3, eos_token_id=np.uint32(4))
    )
    assert (vocabulary.add_bos, vocabulary.add_eos) == (False, True)
    assert (vocabulary.special["bos"], vocabulary.special["eos"]) == (3, 4)


def test_sentencepiece_defaults() -> None:
    vocabulary = Vocabulary.from_metadata(sentencepiece())
    assert vocabulary.special == {"bos": 1, "eos": 2, "unk": 0}
    assert (vocabulary.add_bos, vocabulary.add_eos, vocabulary.add_space_prefix) == (True, False, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eot", "<|im_end|>"),
        ("eot", "<end_of_turn>"),
        ("eom", "<|eom_id|>"),
        ("fim_pre", "<|fim_prefix|>"),
        ("fim_suf", "<SUF>"),
        ("fim_mid", "<fim-middle>"),
        ("fim_rep", "<|repo_name|>"),
        ("fim_sep", "<|file_sep|>"),
    ],
)
def test_special_tokens_are_found_by_text_and_become_control_tokens(name: str, text: str) -> None:
    vocabulary = Vocabulary.from_metadata(with_tokens(text))
    assert vocabulary.special[name] == 256
    assert vocabulary.types[256] == TokenType.CONTROL


def test_an_id_in_the_metadata_beats_detection_by_text() -> None:
    assert Vocabulary.from_metadata(with_tokens("<|im_end|>", eot_token_id=5)).special["eot"] == 5


def test_qwen_vocabularies_end_generation_at_their_five_tokens() -> None:
    texts = ("<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    vocabulary = Vocabulary.from_metadata(
        with_tokens("<|im_start|>", *texts, "<|fim_prefix|>", kind=TokenType.CONTROL, eos_token_id=258)
    )
    assert {vocabulary.texts[token] for token in vocabulary.eog_ids} == set(texts)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|return|>", "<|call|>", "<|end|>"), {"<|return|>", "<|call|>"}),
        (("<|calls|>", "<|flush|>", "<|end|>"), {"<|calls|>", "<|flush|>"}),
        (("<|call|>", "<|end|>"), {"<|call|>", "<|end|>"}),
        (("<|tool_response>", "</s>"), {"<|tool_response>"}),
        (("</s>",), {"</s>"}),
    ],
)
def test_channel_and_tool_formats_keep_message_ends_out_of_the_end_set(texts: tuple[str, ...], ends: set[str]) -> None:
    vocabulary = Vocabulary.from_metadata(with_tokens(*texts, eos_token_id=256))
    assert {vocabulary.texts[token] for token in vocabulary.eog_ids} == ends
