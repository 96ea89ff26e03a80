"""DSpark drafters: logits, choices and confidences of a block against a NumPy restatement in f64, the drafts made of
them, and texts that they may not change. What DSpark shares with DFlash is the subject of
test_dflash and test_dflash_drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama import InvalidArgument, Llama, ModelError
from pyllama._engine import BlockDraft, DraftOrder, Engine, Model, Speculator, Work
from pyllama.speculation import SpeculationOptions
from support.decoded_file import Array
from support.dflash_forward import DFlashForward, MarkovChain, tapped_inputs
from support.draft_rounds import drafted, undrafted
from support.qwen35_forward import Qwen35Forward
from support.tiny_dflash import write_tiny_dflash
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama

TARGET_LAYERS = (1, 3)
TEXT = np.random.default_rng(17).integers(3, 290, 300).tolist()
SHAPE: dict[str, Any] = {"target_layers": TARGET_LAYERS, "version": 1, "block_size": 7, "markov_rank": 24, "window": 64}
FEWER = sorted(np.random.default_rng(3).choice(300, 120, replace=False).tolist())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recurrent = {"qwen35.attention.recurrent_layers": [True, True, True, False]}
    return write_tiny_hybrid(tmp_path_factory.mktemp("dspark") / "target.gguf", n_layer=4, metadata=recurrent)


@pytest.fixture(scope="module")
def streams(target: Path) -> list[Array]:
    return Qwen35Forward(target).layer_inputs(TEXT)


def write_drafter(path: Path, **changes: Any) -> Path:
    return write_tiny_dflash(path, **(SHAPE | changes))


def oracle(target: Path, drafter: Path) -> DFlashForward:
    weights = Qwen35Forward(target).weights
    return DFlashForward(drafter, weights["token_embd.weight"], weights["output.weight"])


def expected_chain(target: Path, drafter: Path, streams: list[Array], n: int, n_draft: int) -> MarkovChain:
    taps = tapped_inputs([stream[:n] for stream in streams], TARGET_LAYERS)
    return oracle(target, drafter).chain(TEXT[n], n_draft, taps)


def open_engine(target: Path, drafter: Path | None, **settings: Any) -> Engine:
    settings = {"n_ctx": 1024, "n_threads": 1, "type_k": "f32", "type_v": "f32", "swa_full": False} | settings
    return Engine(Model(target, drafter=drafter), **settings)


def block_of(target: Path, drafter: Path, n: int, n_draft: int) -> BlockDraft:
    engine = open_engine(target, drafter)
    engine.step([Work(0, TEXT[:n])])
    return engine.draft_blocks([(0, TEXT[n])], n_draft)[0]


def distance(found: BlockDraft, expected: MarkovChain) -> float:
    """Of scores and confidences, the largest; infinite where other tokens are chosen."""
    if found.tokens[:, 0].tolist() != expected.tokens:
        return np.inf
    logits = np.take_along_axis(expected.logits, found.tokens.astype(np.int64), 1)
    confidences = [] if found.confidences is None else found.confidences
    if len(confidences) != len(expected.confidences):
        return np.inf
    return max(
        np.abs(found.scores[:, 0] - logits).max(), np.abs(confidences - np.array(expected.confidences)).max(initial=0)
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "from the anchor": {},
    "from the row after the anchor": {"from_anchor": False},
    "without confidence": {"confidence_head": False},
    "whole context, own tables": {"window": None, "own_embeddings": True, "own_head": True},
    "smaller vocabulary": {"draft_to_target": FEWER},
    "scales of other versions": {"metadata": {"dflash.logit_scale": 0.3, "dflash.final_logit_softcapping": 2.0}},
}


@pytest.mark.parametrize("n", [1, 5, 290])
@pytest.mark.parametrize("variant", VARIANTS)
def test_choices_and_confidences_are_those_of_the_formulas(
    target: Path, streams: list[Array], tmp_path: Path, variant: str, n: int
) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", **VARIANTS[variant])
    for n_draft in (1, 6):
        expected = expected_chain(target, drafter, streams, n, n_draft)
        found = block_of(target, drafter, n, n_draft)
        assert distance(found, expected) < 3e-3
        best = np.sort(expected.logits, axis=1)[:, ::-1][:, : found.tokens.shape[1]]
        np.testing.assert_allclose(found.scores[:, 2], best, atol=3e-3)


def change(path: Path, name: str, change: Any) -> None:
    tensor = next(tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == name)
    change(tensor.data)


def rotate_rows(rows: Any) -> None:
    rows[:] = np.roll(rows, 1, axis=0)


def silence_bias(bias: Any) -> None:
    bias[:] = 0.0


FAULTS: dict[str, dict[str, Any]] = {
    "the row of another predecessor": {"change": ("markov_w1.weight", rotate_rows)},
    "the correction of another token": {"change": ("markov_w2.weight", rotate_rows)},
    "a confidence without its bias": {"change": ("conf_proj.bias", silence_bias)},
    "another anchor": {"shape": {"from_anchor": False}},
    "no confidence": {"shape": {"confidence_head": False}},
    "a causal block": {"shape": {"causal": True}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_planted_fault(target: Path, streams: list[Array], tmp_path: Path, fault: str) -> None:
    good = write_drafter(tmp_path / "good.gguf")
    bad = write_drafter(tmp_path / "bad.gguf", **FAULTS[fault].get("shape", {}))
    if "change" in FAULTS[fault]:
        change(bad, *FAULTS[fault]["change"])
    expected = expected_chain(target, good, streams, 50, 6)
    assert distance(block_of(target, good, 50, 6), expected) < 3e-3
    assert distance(block_of(target, bad, 50, 6), expected) > 0.03


def test_blocks_do_not_depend_on_company(target: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf")
    alone = block_of(target, drafter, 280, 7)
    engine = open_engine(target, drafter, n_ctx=4096, n_seq_max=3)
    for at in range(0, 280, 40):
        engine.step([Work(0, TEXT[at : at + 40])])
    engine.step([Work(1, TEXT[50:170])])
    engine.fork(0, 2, 280)
    for found in engine.draft_blocks([(1, 9), (2, TEXT[280]), (0, TEXT[280])], 7)[1:]:
        for ours, theirs in zip(found, alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("from_anchor", [True, False])
def test_drafts_are_those_of_the_formulas_round_after_round(target: Path, tmp_path: Path, from_anchor: bool) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", from_anchor=from_anchor)
    _, rounds = drafted(open_engine(target, drafter), "draft-dspark", {0: TEXT[:20]}, 60, most=7, temperature=0.0)
    forward, streams = oracle(target, drafter), Qwen35Forward(target).layer_inputs(rounds[-1].history)
    n_most = 7 if from_anchor else 6  # a block of 7 rows
    assert len(rounds) > 20
    for each in rounds:
        taps = tapped_inputs([stream[: len(each.history)] for stream in streams], TARGET_LAYERS)
        assert each.draft == forward.draft(each.last, n_most, taps)


@pytest.mark.parametrize("weight_type", ["f32", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 20, "seed": 5}])
def test_texts_are_those_without_drafts(
    tmp_path: Path, architecture: str, weight_type: str, sampling: dict[str, Any]
) -> None:
    write = write_tiny_llama if architecture == "llama" else write_tiny_hybrid
    target = write(tmp_path / "target.gguf", n_layer=4, weight_type=weight_type)
    drafter = write_drafter(tmp_path / "drafter.gguf", markov_rank=32, weight_type=weight_type)
    prompts = {seq_id: TEXT[9 * seq_id : 9 * seq_id + 230] for seq_id in range(3)}
    engine = open_engine(target, drafter, n_ctx=4096, n_seq_max=3, type_k="f16", type_v="f16")
    texts, rounds = drafted(engine, "draft-dspark", prompts, 50, most=5, **sampling)
    assert {len(each.draft) for each in rounds} == {5}
    plain = open_engine(target, None, type_k="f16", type_v="f16")
    for seq_id, prompt in prompts.items():
        assert texts[seq_id] == undrafted(plain, prompt, 50, **sampling)


def test_a_draft_ends_before_a_token_that_the_drafter_is_not_sure_of(target: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf")
    engine = open_engine(target, drafter)
    engine.step([Work(0, TEXT[:40])])
    (block,) = engine.draft_blocks([(0, 9)], 7)
    assert block.confidences is not None
    tokens, sure = block.tokens[:, 0].tolist(), block.confidences.tolist()
    assert max(sure) - min(sure) > 0.2
    for p_min in (0.0, *(value + step for value in sure for step in (-1e-6, 1e-6))):
        speculator = Speculator(engine, ("draft-dspark",), draft_n_max=7, draft_p_min=p_min)
        (draft,) = speculator.draft([DraftOrder(0, 9, 7)])
        assert draft.tokens == tokens[: next((i for i in range(7) if sure[i] < np.float32(p_min)), 7)]


def test_drafts_are_no_longer_than_the_block(target: Path, tmp_path: Path) -> None:
    for from_anchor, most in ((True, 7), (False, 6)):
        drafter = write_drafter(tmp_path / "drafter.gguf", from_anchor=from_anchor)
        engine = open_engine(target, drafter)
        assert Speculator(engine, ("draft-dspark",), draft_n_max=12).longest == most
        with pytest.raises(InvalidArgument, match=f"1 to {most}"):
            engine.draft_blocks([(0, 5)], most + 1)


def test_llama_drafts_with_the_type_that_the_file_says(target: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf")
    inferred = SpeculationOptions(draft_model=str(drafter), infers_type=True).resolved()
    assert inferred.types == ("draft-dspark",)
    assert not inferred.draws
    texts = []
    for draft_model in (None, drafter, inferred):
        llama = Llama(str(target), n_ctx=512, n_threads=1, draft_model=draft_model, verbose=False)
        texts.append(llama("the world", max_tokens=40, temperature=0.0)["choices"][0]["text"])
        llama.close()
    assert texts[0] == texts[1] == texts[2]


def test_a_limit_beyond_the_block_is_told(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf")
    for n_max, n_warnings in ((7, 0), (9, 1)):
        options = SpeculationOptions(("draft-dspark",), str(drafter), n_max=n_max)
        caplog.clear()
        Llama(str(target), n_ctx=512, n_threads=1, draft_model=options, verbose=False).close()
        assert sum("at most 7 tokens" in record.message for record in caplog.records) == n_warnings


def test_beside_a_model_on_several_devices_blocks_are_those_beside_one(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_drafter(tmp_path / "drafter.gguf")
    found = []
    for n_devices in (1, 2):
        devices = [f"CPU{i}" for i in range(n_devices)]
        model = Model(target, drafter=drafter, devices=devices, split_mode="tensor" if n_devices > 1 else "layer")
        engine = Engine(model, n_ctx=512, n_threads=1, type_k="f32", type_v="f32")
        engine.step([Work(0, TEXT[:80])])
        found.append(engine.draft_blocks([(0, 9)], 7)[0])
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=2e-3)
    np.testing.assert_allclose(found[0].confidences, found[1].confidences, atol=1e-3)


def test_what_is_missing_or_does_not_fit_is_said(target: Path, tmp_path: Path) -> None:
    plain = write_tiny_dflash(tmp_path / "dflash.gguf", target_layers=TARGET_LAYERS, version=1)
    unsure = write_drafter(tmp_path / "unsure.gguf", confidence_head=False)
    with pytest.raises(InvalidArgument, match="draft-dspark needs a DSpark drafter"):
        Speculator(open_engine(target, None), ("draft-dspark",))
    with pytest.raises(InvalidArgument, match="draft-dspark needs a DSpark drafter"):
        Speculator(open_engine(target, plain), ("draft-dspark",))
    with pytest.raises(InvalidArgument, match="draft-dflash needs a DFlash drafter"):
        Speculator(open_engine(target, unsure), ("draft-dflash",))
    with pytest.raises(InvalidArgument, match="no head of confidence: --spec-draft-p-min must be 0"):
        Speculator(open_engine(target, unsure), ("draft-dspark",), draft_p_min=0.5)
    with pytest.raises(InvalidArgument, match="draft-simple and draft-dspark need a draft model each"):
        _ = SpeculationOptions(("draft-dspark", "draft-simple"), str(unsure)).model_arguments
    for changes, message in (
        ({"confidence_head": False, "metadata": {"dflash.has_confidence_head": True}}, "conf_proj"),
        ({"version": 2}, "both DFlash2 and DSpark"),
        ({"metadata": {"dflash.hyper_connection.count": 4}}, "hyper-connections"),
    ):
        with pytest.raises(ModelError, match=message):
            Model(target, drafter=write_drafter(tmp_path / "drafter.gguf", **changes))
