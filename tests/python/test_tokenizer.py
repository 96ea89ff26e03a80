"""`Tokenizer` on vocabularies small enough to see: special tokens, byte exactness, merging, pieces, errors."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from pyllama import tokenizer_bpe
from pyllama.errors import InvalidArgument, TokenizerError
from pyllama.pretokenizers import known_names
from pyllama.tokenizer import Tokenizer
from pyllama.tokenizer_bpe import byte_characters
from pyllama.vocabulary import TokenType
from support import vocabularies

BYTES = list(byte_characters())
CONTROL, NORMAL, UNKNOWN, USER_DEFINED = TokenType.CONTROL, TokenType.NORMAL, TokenType.UNKNOWN, TokenType.USER_DEFINED


def byte_level(
    *extra: tuple[str, TokenType], merges: tuple[str, ...] = ("a b",), drop: str = "", **changes: Any
) -> Tokenizer:
    """256 byte tokens less `drop`, then `extra`; qwen2 rules."""
    tokens = [character for character in BYTES if character not in drop]
    types = [int(NORMAL)] * len(tokens) + [int(kind) for _, kind in extra]
    keys = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens + [text for text, _ in extra],
        "token_type": types,
        "merges": list(merges),
        **changes,
    }
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def sentencepiece(**changes: Any) -> Tokenizer:
    return Tokenizer.from_metadata(vocabularies.sentencepiece_metadata(**changes))


def texts(tokenizer: Tokenizer, text: str | bytes, **switches: bool) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, **switches)]


# Special tokens


def test_control_tokens_are_plain_text_unless_asked_for() -> None:
    tokenizer = byte_level(("<|im_end|>", CONTROL), ("<unk>", UNKNOWN))
    assert texts(tokenizer, "a<|im_end|><unk>", parse_special=True) == ["a", "<|im_end|>", "<unk>"]
    assert len(texts(tokenizer, "a<|im_end|><unk>")) == 16


def test_user_defined_tokens_are_always_recognised() -> None:
    tokenizer = byte_level(("<think>", USER_DEFINED))
    assert texts(tokenizer, "a<think>b") == ["a", "<think>", "b"]


def test_normal_tokens_are_not_matched_across_pieces() -> None:
    assert "<x>" not in texts(byte_level(("<x>", NORMAL)), "<x>", parse_special=True)


def test_the_longer_special_token_wins_wherever_it_stands() -> None:
    tokenizer = byte_level(("abcd", CONTROL), ("bcdef", CONTROL), ("cd", CONTROL))
    assert texts(tokenizer, "abcdef abcd cd", parse_special=True) == ["a", "bcdef", "Ġ", "abcd", "Ġ", "cd"]


def test_repeated_and_overlapping_occurrences_are_taken_from_the_left() -> None:
    tokenizer = byte_level(("aa", CONTROL))
    assert texts(tokenizer, "aaaaa", parse_special=True) == ["aa", "aa", "a"]


def test_many_special_tokens_in_a_long_text_are_found_quickly() -> None:
    tokenizer = byte_level(*((f"<unused{n}>", CONTROL) for n in range(5000)))
    text = "<b>" * 20_000 + "<unused4999>"
    assert texts(tokenizer, text, parse_special=True)[-1] == "<unused4999>"


def test_bos_and_eos_are_added_on_request_only() -> None:
    tokenizer = byte_level(
        ("<s>", CONTROL), ("</s>", CONTROL), bos_token_id=256, eos_token_id=257, add_bos_token=True, add_eos_token=True
    )
    assert texts(tokenizer, "a", add_special=True) == ["<s>", "a", "</s>"]
    assert texts(tokenizer, "a") == ["a"]
    assert texts(tokenizer, "", add_special=True) == ["<s>", "</s>"]


# Bytes in, the same bytes out


@pytest.mark.parametrize("pre", known_names())
def test_decoding_gives_back_any_bytes(pre: str) -> None:
    tokenizer = Tokenizer.from_metadata(vocabularies.byte_level_metadata(pre))
    rng = random.Random(3)
    samples = [rng.randbytes(rng.randrange(40)) for _ in range(150)]
    samples += [vocabularies.splitting_text(rng, 10).encode() for _ in range(100)]
    samples += [
        b"",
        b"\xff",
        b"\xc3",
        b"\xe2\x82",
        b"a\xf0\x9f\x98b",
        bytes(range(256)),
        b"<|im_start|>\xff<think>",
        b" '\xffs 1 .",
    ]
    for data in samples:
        for parse_special in (False, True):
            tokens = tokenizer.encode(data, parse_special=parse_special)
            assert tokenizer.decode(tokens, special=True) == data
            assert b"".join(tokenizer.piece(token, special=True) for token in tokens) == data


def test_surrogate_escapes_stand_for_bytes_and_other_surrogates_become_the_replacement_character() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == b"a\xffb"
    assert tokenizer.decode(tokenizer.encode("\udcc3\udca9")) == "é".encode()
    assert tokenizer.decode(tokenizer.encode("a\ud800\udfff")) == "a\ufffd\ufffd".encode()


def test_text_and_its_utf8_bytes_give_the_same_ids() -> None:
    tokenizer = Tokenizer.from_metadata(vocabularies.byte_level_metadata("qwen35"))
    text = vocabularies.splitting_text(random.Random(1), 200)
    assert tokenizer.encode(text) == tokenizer.encode(text.encode())


def test_pieces_that_are_parts_of_a_character_stay_apart() -> None:
    tokenizer = byte_level()
    pieces = [tokenizer.piece(token) for token in tokenizer.encode("😀")]
    assert pieces == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


# Merging


def test_lower_ranks_merge_first_and_ties_from_the_left() -> None:
    extra = tuple((text, NORMAL) for text in ("ab", "bc", "aa", "abc"))
    assert texts(byte_level(*extra, merges=("b c", "a b", "a a")), "abc") == ["a", "bc"]
    assert texts(byte_level(*extra, merges=("a b", "b c", "ab c")), "abc") == ["abc"]
    assert texts(byte_level(*extra, merges=("a a",)), "aaaaa") == ["aa", "aa", "a"]


def test_ignore_merges_takes_a_whole_piece_that_no_merge_reaches() -> None:
    assert texts(byte_level(("hello", NORMAL), pre="llama-bpe"), "hello") == ["hello"]
    assert texts(byte_level(("hello", NORMAL), pre="qwen2"), "hello") == list("hello")


def test_a_merge_whose_result_is_no_token_falls_back_to_bytes() -> None:
    tokenizer = byte_level(("abc", NORMAL), merges=("a b", "ab c"))
    assert texts(tokenizer, "abc ab") == ["abc", "Ġ", "a", "b"]


def test_a_byte_without_token_is_dropped_and_its_neighbours_do_not_merge() -> None:
    tokenizer = byte_level(("ab", NORMAL), drop="x")
    assert texts(tokenizer, "axbab") == ["a", "b", "ab"]


def test_plain_merging_equals_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = vocabularies.byte_level_metadata("gpt-2")
    fast = Tokenizer.from_metadata(metadata)
    monkeypatch.setattr(tokenizer_bpe, "_library_merge", lambda vocabulary: None)
    plain = Tokenizer.from_metadata(metadata)
    rng = random.Random(11)
    for _ in range(300):
        text = vocabularies.splitting_text(rng, 15)
        assert fast.encode(text) == plain.encode(text), repr(text)


def test_a_piece_of_many_characters_is_merged_in_reasonable_time() -> None:
    tokenizer = byte_level(("aa", NORMAL), ("aaaa", NORMAL), merges=("a a", "aa aa"))
    assert tokenizer.encode("a" * 400_000) == [257] * 100_000


def test_sentencepiece_merges_a_long_word_in_reasonable_time() -> None:
    tokenizer = sentencepiece()
    word = "ab12" * 25_000
    assert tokenizer.decode(tokenizer.encode(word)) == word.encode()


def test_the_piece_cache_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_bpe, "CACHED_PIECES", 10)
    tokenizer = byte_level()
    text = " ".join(str(n) + "x" * n for n in range(100))
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()
    assert len(tokenizer._encoder._pieces) <= 10


def test_one_tokenizer_serves_several_threads() -> None:
    tokenizer = Tokenizer.from_metadata(vocabularies.byte_level_metadata("qwen2"))
    rng = random.Random(2)
    samples = [vocabularies.splitting_text(rng, 50) for _ in range(100)]
    expected = [tokenizer.encode(text) for text in samples]
    fresh = Tokenizer.from_metadata(vocabularies.byte_level_metadata("qwen2"))
    found: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, [fresh.encode(text) for text in samples]))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n] == expected for n in range(4))


# SentencePiece


def test_the_prefix_space_goes_in_front_and_after_special_tokens_and_is_taken_away_again() -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode("a<think>b")
    assert b"".join(map(tokenizer.piece, tokens)) == b" a<think> b"
    assert tokenizer.decode(tokenizer.encode("a b")) == b"a b"
    without = sentencepiece(add_space_prefix=False)
    assert b"".join(map(without.piece, without.encode("a<think>b"))) == b"a<think>b"


def test_characters_outside_a_sentencepiece_vocabulary_become_byte_tokens() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    assert texts(tokenizer, "ß") == ["<0xC3>", "<0x9F>"]
    assert tokenizer.decode(tokenizer.encode(b"\xff\xfe")) == b"\xff\xfe"


def test_a_byte_that_a_sentencepiece_vocabulary_cannot_express_is_an_error() -> None:
    keys = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "▁", "a"], "scores": [0.0] * 5}
    tokenizer = Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    with pytest.raises(TokenizerError, match="no token for byte 0x62"):
        tokenizer.encode("ab")


# Pieces and decoding


def test_control_tokens_are_silent_unless_special_and_others_as_their_type_says() -> None:
    kinds = ("UNDEFINED", "NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED")
    tokenizer = byte_level(*((f"t{kind}", TokenType[kind]) for kind in kinds))
    plain = [tokenizer.piece(256 + n) for n in range(len(kinds))]
    special = [tokenizer.piece(256 + n, special=True) for n in range(len(kinds))]
    assert plain == [b"", b"tNORMAL", b"", b"", b"tUSER_DEFINED", b""]
    assert special == [b"", b"tNORMAL", b"tUNKNOWN", b"tCONTROL", b"tUSER_DEFINED", b""]


def test_a_character_that_stands_for_no_byte_shows_in_the_piece() -> None:
    assert byte_level(("Ġ→x", NORMAL)).piece(256) == b" [UNK_BYTE_0xe28692" + "Ġ→x".encode() + b"]x"


def test_space_cleaning_is_done_only_on_request() -> None:
    tokenizer = byte_level(pre="gpt-2")
    tokens = tokenizer.encode("a . it 's ' b we 're don 't")
    assert tokenizer.decode(tokens) == b"a . it 's ' b we 're don 't"
    assert tokenizer.decode(tokens, clean_spaces=None) == b"a. it's'b we're don 't"
    assert byte_level(pre="qwen2").decode(tokens, clean_spaces=None) == b"a . it 's ' b we 're don 't"


@pytest.mark.parametrize("token", [-1, -5, 256, 999_999_999, 2**63])
def test_an_id_outside_the_vocabulary_is_named(token: int) -> None:
    tokenizer = byte_level()
    for call in (tokenizer.piece, tokenizer.token_text, tokenizer.is_control, lambda bad: tokenizer.decode([65, bad])):
        with pytest.raises(InvalidArgument, match=rf"token id {token} .* expected 0\.\.255"):
            call(token)


def test_end_of_generation_and_control_queries() -> None:
    tokenizer = byte_level(("<|im_end|>", CONTROL), eos_token_id=256)
    assert tokenizer.is_eog(256)
    assert not tokenizer.is_eog(255)
    assert not tokenizer.is_eog(-1)
    assert tokenizer.is_control(256)
    assert (tokenizer.eos_id, tokenizer.eot_id, tokenizer.pad_id) == (256, 256, None)
