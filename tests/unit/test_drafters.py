"""What the drafters guess: each rule on texts where its guess is known, or restated in a few lines of Python.

That guesses change no text is the subject of test_draft_verification and test_speculation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import DraftOrder, Engine, Model, Sampler, Speculator, Work, speculation_types
from pyllama.errors import InvalidArgument
from support.logits import greedy_tokens
from support.qwen4exp_forward import Qwen4ExpForward
from support.qwen35_forward import Qwen35Forward
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_qwen4exp import TinyQwen4Exp, write_tiny_qwen4exp

PAGE = 256


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[Model]:
    model = Model(tiny_llama_path)
    yield model
    model.close()


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = Engine(model, n_ctx=4 * PAGE, n_seq_max=2, n_threads=1)
    yield engine
    engine.close()


def drafts_of(speculator: Speculator, engine: Engine, text: list[int], most: int = 64, **order: Any) -> list[int]:
    """What may follow `text`, whose last token is not computed yet."""
    engine.clear(0)
    engine.decode(text[:-1])
    (draft,) = speculator.draft([DraftOrder(0, text[-1], most, **order)])
    return list(draft.tokens)


def random_text(n_tokens: int, seed: int, n_kinds: int = 4) -> list[int]:
    return (np.random.default_rng(seed).integers(0, n_kinds, n_tokens) + 40).tolist()


def restated_simple(text: list[int], n: int, m: int) -> list[int]:
    history = text[:-1]
    if len(history) <= n + m + 1:
        return []
    ngram = text[-n:]
    for at in range(len(history) - n - 1, 0, -1):
        if history[at : at + n] == ngram:
            found = history[at + n : at + n + m]
            return found if len(found) >= n else []
    return []


def test_ngram_simple_drafts_what_followed_the_newest_occurrence(engine: Engine) -> None:
    n_found = 0
    for n, m in ((1, 3), (2, 2), (3, 5)):
        speculator = Speculator(engine, ["ngram-simple"], ngram_simple=(n, m))
        for seed in range(40):
            text = random_text(5 + seed, seed)
            expected = restated_simple(text, n, m)
            assert drafts_of(speculator, engine, text) == expected, (n, m, seed)
            n_found += bool(expected)
    assert n_found > 40


def test_a_draft_is_cut_to_what_is_asked_for(engine: Engine) -> None:
    speculator = Speculator(engine, ["ngram-simple"], ngram_simple=(2, 6))
    text = [50, 51, 52, 53, 54, 55, 56, 57] * 3
    assert drafts_of(speculator, engine, text, 4) == [50, 51, 52, 53]
    assert drafts_of(speculator, engine, text, 0) == []


@pytest.mark.parametrize("name", ["ngram-map-k", "ngram-map-k4v"])
def test_ngram_maps_draft_a_repeated_text_and_learn_from_refusals(engine: Engine, name: str) -> None:
    options = {"ngram_map_k": (3, 4, 1), "ngram_map_k4v": (3, 4, 1)}
    speculator = Speculator(engine, [name], **options)
    text = [60, 61, 62, 63, 64, 65, 66, 67, 68] * 4
    assert drafts_of(speculator, engine, text) == [60, 61, 62, 63]
    speculator.accept(0, 4, 2)
    assert drafts_of(speculator, engine, text) == [60, 61]  # as many as stood the last time
    speculator.accept(0, 2, 0)
    assert drafts_of(speculator, engine, text) == []


def test_ngram_map_k4v_wants_a_continuation_that_clearly_leads(engine: Engine) -> None:
    key = [70, 71]
    often, seldom = [72, 73, 74], [75, 76, 77]
    filler = iter(range(100, 290))

    def text(*continuations: list[int]) -> list[int]:
        parts = [[*key, *continuation, next(filler)] for continuation in continuations]
        return [90, 91, *(token for part in parts for token in part), *key]

    speculator = Speculator(engine, ["ngram-map-k4v"], ngram_map_k4v=(2, 3, 1))
    assert drafts_of(speculator, engine, text(often, seldom, often)) == often
    speculator = Speculator(engine, ["ngram-map-k4v"], ngram_map_k4v=(2, 3, 1))
    assert drafts_of(speculator, engine, text(often, seldom, seldom, often)) == []
    speculator = Speculator(engine, ["ngram-map-k4v"], ngram_map_k4v=(2, 3, 2))
    assert drafts_of(speculator, engine, text(often, often)) == []  # met once, two hits are wanted


@pytest.mark.parametrize("name", ["ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "ngram-simple"])
def test_a_sequence_that_was_cut_and_went_on_otherwise_is_drafted_by_what_it_holds(engine: Engine, name: str) -> None:
    sizes = {"ngram_simple": (2, 3), "ngram_map_k": (2, 3, 1), "ngram_map_k4v": (2, 3, 1), "ngram_mod": (2, 1, 8)}
    speculator = Speculator(engine, [name], **sizes)
    for seed in range(30):
        text = random_text(20 + seed % 7 * 9, seed, n_kinds=3)
        draft = drafts_of(speculator, engine, text)
        assert all(0 <= token < 300 for token in draft)
        if name not in ("ngram-mod", "ngram-cache"):  # those remember other texts, or make up chains
            joined = ",".join(map(str, text))
            assert ",".join(map(str, draft)) in joined


def test_ngram_mod_shares_what_it_has_seen_between_sequences(engine: Engine) -> None:
    speculator = Speculator(engine, ["ngram-mod"], ngram_mod=(3, 2, 6))
    text = list(range(100, 140))
    engine.decode(text)
    speculator.begin(0)
    engine.decode([110, 111, 112], [1, 1, 1])
    (draft,) = speculator.draft([DraftOrder(1, 113, 64)])
    assert draft.tokens == [114, 115, 116, 117, 118, 119]
    engine.clear(1)
    engine.decode([134, 135, 136], [1, 1, 1])
    (draft,) = speculator.draft([DraftOrder(1, 137, 64)])
    assert draft.tokens == [138, 139]
    (draft,) = speculator.draft([DraftOrder(1, 200, 64)])
    assert draft.tokens == []
    for _ in range(5):  # bad rounds, after which the pool is given up
        (draft,) = speculator.draft([DraftOrder(1, 137, 64)])
        speculator.accept(1, 2, 0)
    (draft,) = speculator.draft([DraftOrder(1, 137, 64)])
    assert draft.tokens == []


def lookup_file(path: Path, counts: dict[tuple[int, ...], dict[int, int]]) -> Path:
    data = b""
    for ngram, followers in counts.items():
        data += struct.pack("=4i", *(ngram + (-1,) * (4 - len(ngram))))
        data += struct.pack("=i", len(followers))
        data += b"".join(struct.pack("=2i", token, count) for token, count in followers.items())
    path.write_bytes(data)
    return path


def test_ngram_cache_counts_the_text_and_reads_lookup_files(engine: Engine, tmp_path: Path) -> None:
    text = [50, 51, 52, 53, 60, 50, 51, 52, 53, 60, 50, 51, 52]
    speculator = Speculator(engine, ["ngram-cache"])
    assert drafts_of(speculator, engine, text) == [53, 60, 50, 51, 52, 53, 60, 50]
    unknown = [200, 201]
    assert drafts_of(speculator, engine, unknown) == []
    static = lookup_file(tmp_path / "static", {(200, 201): {202: 5, 203: 1}, (201, 202): {204: 1, 205: 1}})
    speculator = Speculator(engine, ["ngram-cache"], lookup_static=static)
    assert drafts_of(speculator, engine, unknown) == [202, 204]  # half of the counts are enough there
    strict = lookup_file(tmp_path / "strict", {(201,): {210: 4}, (200, 201): {211: 2}})
    speculator = Speculator(engine, ["ngram-cache"], lookup_dynamic=strict)
    assert drafts_of(speculator, engine, unknown) == [210]  # two samples of two tokens are too few


def test_the_dynamic_lookup_file_takes_in_what_was_generated(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "dynamic"
    speculator = Speculator(engine, ["ngram-cache"], lookup_dynamic=path)
    drafts_of(speculator, engine, [50, 51, 52, 53] * 6)
    speculator.save()
    fresh = Speculator(engine, ["ngram-cache"], lookup_dynamic=path)
    assert drafts_of(fresh, engine, [51, 52, 53])[:4] == [50, 51, 52, 53]


@pytest.mark.parametrize(
    "data", [b"\x01\x02", struct.pack("=5i", 1, -1, -1, -1, 3), struct.pack("=5i", 1, -1, -1, -1, -3)]
)
def test_a_broken_lookup_file_is_refused_by_name(engine: Engine, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument, match="broken"):
        Speculator(engine, ["ngram-cache"], lookup_static=path)
    with pytest.raises(InvalidArgument, match="missing"):
        Speculator(engine, ["ngram-cache"], lookup_static=tmp_path / "missing")


def test_types_have_their_precedence_whatever_order_they_are_given_in(engine: Engine) -> None:
    names = ["ngram-cache", "ngram-mod", "ngram-map-k4v", "ngram-map-k", "ngram-simple"]
    speculator = Speculator(engine, names, ngram_simple=(2, 3), ngram_mod=(2, 1, 4))
    assert speculator.names == names[::-1] == list(speculation_types[:5])
    assert speculator.longest == 48
    text = [50, 51, 52, 53, 54, 55] * 3
    assert drafts_of(speculator, engine, text) == text[:3]
    speculator.accept(0, 3, 1)
    told = {s.name: (s.n_drafts, s.n_tokens, s.n_accepted_tokens, s.accepted_at) for s in speculator.statistics()}
    assert told["ngram-simple"] == (1, 3, 1, [1, 0, 0])
    assert told["ngram-cache"] == (0, 0, 0, [])
    assert Speculator(engine, ["ngram-mod", "none"]).names == []
    for types, message in (
        (["ngram"], "'ngram' is not a type"),
        (["draft-simple"], "needs a draft model"),
        (["draft-mtp"], "needs a model with a block"),
        (["draft-eagle3"], "needs an EAGLE-3 drafter"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Speculator(engine, types)
    with pytest.raises(InvalidArgument, match="size n is 0"):
        Speculator(engine, ["ngram-simple"], ngram_simple=(0, 3))


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_a_draft_model_says_what_it_would_say_alone(tmp_path: Path, engine: Engine, architecture: str) -> None:
    path = tmp_path / "draft.gguf"
    write_tiny_llama(path, seed=5) if architecture == "llama" else write_tiny_hybrid(path, n_layer=4)
    with_draft = Model(path)
    draft_engine = Engine(with_draft, n_ctx=4 * PAGE, n_seq_max=4, n_batch=7, n_threads=1)
    alone = Engine(with_draft, n_ctx=4 * PAGE, n_threads=1)
    speculator = Speculator(engine, ["draft-simple"], draft=draft_engine, draft_n_max=5)
    for seed in range(6):  # the texts have beginnings in common, and not
        text = [*random_text(8, seed // 2, 200), *random_text(3 + seed, seed, 200)]
        assert drafts_of(speculator, engine, text) == greedy_tokens(alone, text, 5)
        assert drafts_of(speculator, engine, text, 2) == greedy_tokens(alone, text, 2)
    speculator = Speculator(engine, ["draft-simple"], draft=draft_engine, draft_n_max=5, draft_n_min=3)
    assert drafts_of(speculator, engine, text, 2) == []
    speculator = Speculator(engine, ["draft-simple"], draft=draft_engine, draft_n_max=5, draft_p_min=1.0)
    assert drafts_of(speculator, engine, text) == []


def test_drafts_that_are_drawn_come_with_what_they_were_drawn_from(engine: Engine, tmp_path: Path) -> None:
    draft_model = Model(write_tiny_llama(tmp_path / "draft.gguf", seed=5))
    draft_engine = Engine(draft_model, n_ctx=PAGE, n_seq_max=2, n_threads=1)
    speculator = Speculator(engine, ["draft-simple"], draft=draft_engine, draft_n_max=4, draft_samples=True)
    engine.decode([50, 51, 52])
    drafts = [speculator.draft([DraftOrder(0, 53, 4, 1.5, 7)])[0] for _ in range(20)]
    assert len({tuple(draft.tokens) for draft in drafts}) > 10
    for draft in drafts:
        for token, proposal in zip(draft.tokens, draft.proposals, strict=True):
            assert token in [candidate for candidate, _ in proposal]
            assert len(proposal) == 10
            assert sum(probability for _, probability in proposal) == pytest.approx(1.0, abs=1e-5)
    speculator.begin(0)  # equal requests shall repeat
    assert speculator.draft([DraftOrder(0, 53, 4, 1.5, 7)]) == drafts[:1]
    assert speculator.draft([DraftOrder(0, 53, 4, 0.0, 7)])[0].proposals == []


def write_predicting(path: Path, architecture: str, **options: Any) -> Path:
    """A model of four layers and a block of multi-token prediction."""
    if architecture == "qwen4exp":
        return write_tiny_qwen4exp(path, TinyQwen4Exp(mtp=True, **options))
    return write_tiny_hybrid(path, architecture, n_layer=4, n_mtp=1, **options)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "qwen4exp"])
def test_a_block_of_multi_token_prediction_drafts_the_same_however_its_text_came_in(
    tmp_path: Path, architecture: str
) -> None:
    model = Model(write_predicting(tmp_path / "mtp.gguf", architecture), load_mtp=True)
    text = random_text(40, 3, 200)

    def drafts(chunks: list[int], n_wrong: int = 0) -> tuple[list[int], list[int]]:
        engine = Engine(model, n_ctx=PAGE, n_seq_max=2, n_ubatch=64, n_threads=1)
        speculator = Speculator(engine, ["draft-mtp"], draft_n_max=4)
        banned = [290 + i for i in range(n_wrong)]
        sampler = Sampler(model.n_vocab, temperature=0.0, logit_bias=[(token, -math.inf) for token in banned])
        at = 0
        for size in chunks:
            if n_wrong:  # refused drafts leave no trace
                engine.step([Work(0, text[at : at + size], sampler, draft=banned)])
            else:
                engine.decode(text[at : at + size])
            at += size
        assert engine.length(0) == 39
        engine.fork(0, 1, 39)
        first, second = speculator.draft([DraftOrder(0, text[39], 4), DraftOrder(1, text[39], 2)])
        assert engine.length(0) == 39
        assert first == speculator.draft([DraftOrder(0, text[39], 4)])[0]
        engine.close()
        return first.tokens, second.tokens

    expected, short = drafts([39])
    assert len(expected) == 4
    assert short == expected[:2]
    assert drafts([1] * 39) == (expected, short)
    assert drafts([5, 30, 4]) == (expected, short)
    assert drafts([3] * 13, n_wrong=3) == (expected, short)
    model.close()


def assert_predicts(path: Path, oracle: Qwen35Forward | Qwen4ExpForward, n_texts: int, **options: Any) -> None:
    """The block of multi-token prediction of a model that is opened with `options` drafts what the oracle does."""
    model = Model(path, load_mtp=True, **options)
    engine = Engine(model, n_ctx=PAGE, n_threads=1, type_k="f32", type_v="f32")
    speculator = Speculator(engine, ["draft-mtp"], draft_n_max=5)
    for seed in range(n_texts):
        text = random_text(6 + 5 * seed, seed, 200)
        assert drafts_of(speculator, engine, text) == oracle.predicted(text, 5)
    engine.close()
    model.close()


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_a_block_of_multi_token_prediction_drafts_what_its_definition_says(tmp_path: Path, architecture: str) -> None:
    recurrent = {f"{architecture}.attention.recurrent_layers": [True, True, True, False, False]}
    path = write_tiny_hybrid(tmp_path / "mtp.gguf", architecture, n_layer=4, n_mtp=1, metadata=recurrent)
    oracle = Qwen35Forward(path)
    for isa in ("reference", "auto"):
        assert_predicts(path, oracle, n_texts=4, isa=isa)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_block_behind_several_streams_drafts_what_its_definition_says(tmp_path: Path, is_sparse: bool) -> None:
    path = write_predicting(tmp_path / "mtp.gguf", "qwen4exp", top_k=16 if is_sparse else 256)
    oracle = Qwen4ExpForward(path)
    for isa in ("reference", "auto"):
        assert_predicts(path, oracle, n_texts=7, isa=isa)
    if is_sparse:  # the texts are long enough for that to matter
        text = random_text(36, 6, 200)
        assert oracle.predicted(text, 5) != Qwen4ExpForward(path, dense=True).predicted(text, 5)


CPUS = [f"CPU{i}" for i in range(3)]
SPLITS: list[dict[str, Any]] = [
    *({"devices": CPUS[:n], "split_mode": mode} for n in (2, 3) for mode in ("tensor", "layer")),
    {"devices": CPUS[:1], "device_layers": 1},  # the block is with the last layer, on the host
    {"devices": CPUS[:2], "device_layers": 3},
    {"devices": CPUS[:1], "tensor_overrides": [(r"blk\.4\.ffn_", "CPU")]},  # of the block alone
    {"devices": CPUS[:2], "tensor_overrides": [(r"blk\.4\.", "CPU"), (r"blk\.0\.ffn_", "CPU")]},
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_split_model_predicts_as_one_device_does(tmp_path: Path, split: dict[str, Any]) -> None:
    path = write_tiny_hybrid(
        tmp_path / "mtp.gguf",
        n_layer=4,
        n_mtp=1,
        n_head=6,
        n_head_kv=3,
        n_key_head=3,
        n_value_head=6,
        metadata={"qwen35.attention.recurrent_layers": [True, True, True, False, False]},
    )
    assert_predicts(path, Qwen35Forward(path), n_texts=3, **split)


@pytest.mark.parametrize("split", [*SPLITS[:4], SPLITS[5]], ids=str)
def test_a_split_model_of_several_streams_predicts_as_one_device_does(tmp_path: Path, split: dict[str, Any]) -> None:
    path = write_predicting(tmp_path / "mtp.gguf", "qwen4exp", top_k=16)
    assert_predicts(path, Qwen4ExpForward(path), n_texts=6, **split)
