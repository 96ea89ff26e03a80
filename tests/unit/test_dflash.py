"""DFlash drafters: what the engine's blocks give against a NumPy restatement in f64, and what may not change them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import InvalidArgument, ModelError
from pyllama._engine import Engine, Model, Sampler, Work
from support.dflash_forward import DFlashForward, Lattice, tapped_inputs
from support.qwen35_forward import Qwen35Forward
from support.tiny_dflash import write_tiny_dflash
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama

TARGET_LAYERS = (1, 6, 3)
TEXT = np.random.default_rng(7).integers(3, 290, 300).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(
        tmp_path_factory.mktemp("dflash") / "target.gguf",
        n_layer=8,
        metadata={"qwen35.attention.recurrent_layers": [True, True, True, False] * 2},
    )


@pytest.fixture(scope="module")
def streams(target: Path) -> Callable[[int], list[Any]]:
    """The inputs of the target's layers over the first n tokens of the text."""
    forward = Qwen35Forward(target)
    whole = forward.layer_inputs(TEXT)
    return lambda n: [layer[:n] for layer in whole]


def expected(target: Path, drafter: Path, streams: list[Any], anchor: int, n_draft: int) -> Lattice:
    weights = Qwen35Forward(target).weights
    forward = DFlashForward(drafter, weights["token_embd.weight"], weights["output.weight"])
    return forward.lattice(anchor, n_draft, tapped_inputs(streams, TARGET_LAYERS))


def engine_with(target: Path, drafter: Path, **settings: Any) -> Engine:
    settings = {"n_ctx": 1024, "n_threads": 2, "type_k": "f32", "type_v": "f32", "swa_full": False} | settings
    return Engine(Model(target, n_threads=2, drafter=drafter), **settings)


def append(engine: Engine, tokens: list[int], seq_id: int = 0, cut: int = 100) -> None:
    for at in range(0, len(tokens), cut):
        engine.step([Work(seq_id, tokens[at : at + cut])])


VARIANTS: dict[str, dict[str, Any]] = {
    "windowed": {},
    "whole context": {"window": None},
    "some layers windowed": {"windowed": (True, False)},
    "causal": {"causal": True},
    "four taps, groups of 8": {"conv_taps": 4, "conv_group": 8},
    "values from keys": {"shared_kv": True},
    "own embeddings and head": {"own_embeddings": True, "own_head": True},
    "norms behind layers": {"post_norms": True},
    "scales and cap": {"metadata": {"dflash.embedding_scale": 1.7, "dflash.logit_scale": 0.8,
                                    "dflash.final_logit_softcapping": 5.0, "dflash.attention.value_scale": 0.6,
                                    "dflash.attention.scale": 0.3}},
    "sections of time alone": {"rope_sections": (16, 0, 0, 0)},
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 5, 290])
@pytest.mark.parametrize("variant", VARIANTS)
def test_candidates_and_scores_are_those_of_the_formulas(
    target: Path, streams: Callable[[int], list[Any]], tmp_path: Path, variant: str, n: int
) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS, **VARIANTS[variant])
    engine = engine_with(target, drafter)
    append(engine, TEXT[:n])
    (found,) = engine.draft_blocks([(0, TEXT[n])], 7)
    lattice = expected(target, drafter, streams(n), TEXT[n], 7)
    tokens, scores, _ = found
    np.testing.assert_array_equal(tokens, lattice.candidates)
    np.testing.assert_allclose(scores, lattice.scores, rtol=0, atol=3e-3)
    assert Lattice(tokens, scores).greedy_walk() == lattice.greedy_walk()


@pytest.mark.parametrize(
    "fault",
    [
        {"dflash.target_layers": [1, 6, 4]},
        {"dflash.target_layers": [6, 1, 3]},
        {"dflash.attention.sliding_window": 15},
        {"dflash.attention.causal": True},
        {"tokenizer.ggml.mask_token_id": 1},
        {"dflash.rope.freq_base": 20000.0},
    ],
)
def test_the_comparison_sees_a_planted_fault(
    target: Path, streams: Callable[[int], list[Any]], tmp_path: Path, fault: dict[str, Any]
) -> None:
    good = write_tiny_dflash(tmp_path / "good.gguf", target_layers=TARGET_LAYERS)
    bad = write_tiny_dflash(tmp_path / "bad.gguf", target_layers=TARGET_LAYERS, metadata=fault)
    engine = engine_with(target, bad)
    append(engine, TEXT[:50])
    ((tokens, scores, _),) = engine.draft_blocks([(0, TEXT[50])], 7)
    lattice = expected(target, good, streams(50), TEXT[50], 7)
    assert not np.array_equal(tokens, lattice.candidates) or np.abs(scores - lattice.scores).max() > 0.03


def test_the_first_version_has_logits_for_scores(
    target: Path, streams: Callable[[int], list[Any]], tmp_path: Path
) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS, version=1, block_size=16)
    engine = engine_with(target, drafter)
    append(engine, TEXT[:40])
    ((tokens, scores, _),) = engine.draft_blocks([(0, TEXT[40])], 15)
    weights = Qwen35Forward(target).weights
    forward = DFlashForward(drafter, weights["token_embd.weight"], weights["output.weight"])
    taps = tapped_inputs(streams(40), TARGET_LAYERS)
    logits = forward.logits(forward.block_states(TEXT[40], 15, taps)[1:])
    assert tokens[:, 0].tolist() == forward.draft(TEXT[40], 15, taps)
    np.testing.assert_allclose(scores[:, 3], np.take_along_axis(logits, tokens.astype(np.int64), 1), atol=2e-3)


def test_a_smaller_vocabulary_of_its_own_is_mapped(
    target: Path, streams: Callable[[int], list[Any]], tmp_path: Path
) -> None:
    ids = sorted(np.random.default_rng(3).choice(300, 120, replace=False).tolist())
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS, draft_to_target=ids)
    engine = engine_with(target, drafter)
    append(engine, TEXT[:33])
    ((tokens, scores, _),) = engine.draft_blocks([(0, TEXT[33])], 7)
    lattice = expected(target, drafter, streams(33), TEXT[33], 7)
    np.testing.assert_array_equal(tokens, lattice.candidates)
    np.testing.assert_allclose(scores, lattice.scores, atol=3e-3)


def test_blocks_do_not_depend_on_company_cuts_or_history(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    alone = engine_with(target, drafter)
    append(alone, TEXT[:280])
    expected_block = alone.draft_blocks([(0, 5)], 7)[0]
    engine = engine_with(target, drafter, n_ctx=4096, n_seq_max=3)
    append(engine, TEXT[:280], cut=7)
    append(engine, TEXT[50:170], 1)
    engine.fork(0, 2, 280)
    for _ in range(2):  # a block leaves no trace
        blocks = engine.draft_blocks([(1, 9), (2, 5), (0, 5)], 7)
        for found in blocks[1:]:
            np.testing.assert_array_equal(found[0], expected_block[0])
            np.testing.assert_array_equal(found[1], expected_block[1])
    assert [engine.length(seq_id) for seq_id in range(3)] == [280, 120, 280]


def test_the_target_says_the_same_with_a_drafter(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)

    def greedy(model: Model, *, drafts: bool) -> list[int]:
        engine = Engine(model, n_ctx=1024, n_threads=2, swa_full=False)
        sampler = Sampler(model.n_vocab, temperature=0.0, seed=1)
        tokens, pending = [], TEXT[:60]
        for _ in range(30):
            (output,) = engine.step([Work(0, pending, sampler)])
            tokens.append(output.token)
            pending = [output.token]
            if drafts:
                engine.draft_blocks([(0, output.token)], 7)
        return tokens

    assert greedy(Model(target, drafter=drafter), drafts=True) == greedy(Model(target), drafts=False)


def test_a_prefix_from_host_memory_brings_what_the_drafter_took_in(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=(0, 3), window=None)
    engine = engine_with(target, drafter, cache_bytes=1 << 26, n_seq_max=2, n_ctx=2048)
    append(engine, TEXT)
    cold = engine.draft_blocks([(0, 5)], 7)[0]
    engine.release(0)
    reuse = engine.reuse_prefix(1, TEXT, len(TEXT))
    append(engine, TEXT[reuse.length :], 1)
    assert reuse.length >= 256
    warm = engine.draft_blocks([(1, 5)], 7)[0]
    np.testing.assert_array_equal(warm[1], cold[1])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"n_embd": 32, "conv_group": 8}, "width"),
        ({"target_layers": (1, 8)}, "layer 8"),
        ({"metadata": {"dflash.conv_group_size": 7}}, "conv_group_size"),
        ({"sinks": True}, "sinks"),
        ({"metadata": {"dflash.target_layers": 3}}, "target_layers"),
        ({"metadata": {"tokenizer.ggml.mask_token_id": 300}}, "mask_token_id"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    target: Path, tmp_path: Path, shape: dict[str, Any], message: str
) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", **({"target_layers": TARGET_LAYERS} | shape))
    with pytest.raises(ModelError, match=message):
        Model(target, drafter=drafter)


def test_a_drafter_by_itself_is_refused_with_its_use(tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    with pytest.raises(ModelError, match=r"drafter; it speeds up another model \(--spec-draft-model\)"):
        Model(drafter)


def test_wrong_calls_are_refused(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    with pytest.raises(ModelError, match="not that of a drafter"):
        Model(target, drafter=target)
    with pytest.raises(InvalidArgument, match="without a drafter"):
        Engine(Model(target), n_ctx=256).draft_blocks([(0, 5)], 7)
    engine = engine_with(target, drafter)
    for n_draft in (0, 8):
        with pytest.raises(InvalidArgument, match="1 to 7"):
            engine.draft_blocks([(0, 5)], n_draft)
