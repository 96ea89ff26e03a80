"""`draft-dflash`: the drafts that are walked through a drafter's lattice, and texts that they may not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import InvalidArgument, Llama
from pyllama._engine import DraftOrder, Engine, MemoryNeeds, Model, Sampler, Speculator, Work
from pyllama.speculation import SpeculationOptions
from support import draft_rounds
from support.dflash_forward import DFlashForward, Lattice, tapped_inputs
from support.qwen35_forward import Qwen35Forward
from support.tiny_dflash import write_tiny_dflash
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

TARGET_LAYERS = (1, 3)
RECURRENT = {"qwen35.attention.recurrent_layers": [True, True, True, False]}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its drafter."""
    folder = tmp_path_factory.mktemp("dflash_drafts")
    target = write_tiny_hybrid(folder / "target.gguf", n_layer=4, metadata=RECURRENT)
    return target, write_tiny_dflash(folder / "drafter.gguf", target_layers=TARGET_LAYERS, window=64)


def random_prompt(seed: int, n_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, n_tokens).tolist()


def open_engine(target: Path, drafter: Path | None, **settings: Any) -> Engine:
    settings = {"n_ctx": 2048, "n_seq_max": 4, "n_threads": 1, "swa_full": False} | settings
    return Engine(Model(target, drafter=drafter), **settings)


def undrafted(target: Path, prompt: list[int], n_tokens: int, **sampling: Any) -> list[int]:
    return draft_rounds.undrafted(open_engine(target, None), prompt, n_tokens, **sampling)


def drafted(
    engine: Engine, prompts: dict[int, list[int]], n_tokens: int, *, samples: bool = False, **sampling: Any
) -> tuple[dict[int, list[int]], list[draft_rounds.Round]]:
    return draft_rounds.drafted(engine, "draft-dflash", prompts, n_tokens, samples=samples, **sampling)


@pytest.mark.parametrize("version", [1, 2])
def test_drafts_are_those_of_the_formulas_round_after_round(hybrid: tuple[Path, Path], version: int) -> None:
    target, drafter = hybrid
    if version == 1:
        drafter = write_tiny_dflash(
            target.with_name("first.gguf"), target_layers=TARGET_LAYERS, version=1, block_size=16
        )
    prompt = random_prompt(1, 20)
    engine = open_engine(target, drafter, type_k="f32", type_v="f32")
    _, rounds = drafted(engine, {0: prompt}, 100, temperature=0.0)
    forward = Qwen35Forward(target)
    oracle = DFlashForward(drafter, forward.weights["token_embd.weight"], forward.weights["output.weight"])
    streams = forward.layer_inputs(rounds[-1][0])
    assert len(rounds) > 20
    for history, last, draft, _ in rounds:
        taps = tapped_inputs([stream[: len(history)] for stream in streams], TARGET_LAYERS)
        assert draft == oracle.draft(last, 7, taps)


@pytest.mark.parametrize("n_sequences", [1, 4])
@pytest.mark.parametrize("weight_type", ["f32", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen35", "qwen35moe"])
def test_texts_are_those_without_drafts(tmp_path: Path, architecture: str, weight_type: str, n_sequences: int) -> None:
    path = tmp_path / "target.gguf"
    if architecture == "llama":
        write_tiny_llama(path, n_layer=4, weight_type=weight_type)
    elif architecture.startswith("qwen35"):
        write_tiny_hybrid(path, architecture, n_layer=4, weight_type=weight_type)
    else:
        write_tiny_model(path, architecture, weight_type=weight_type)
    drafter = write_tiny_dflash(
        tmp_path / "drafter.gguf", target_layers=(1, 0), window=64, selector_rank=32, weight_type=weight_type
    )
    prompts = {seq_id: random_prompt(seq_id, 230 + 9 * seq_id) for seq_id in range(n_sequences)}
    engine = open_engine(path, drafter, n_ctx=4096)
    texts, rounds = drafted(engine, prompts, 80, temperature=0.0)
    assert {len(draft) for _, _, draft, _ in rounds} == {7}
    for seq_id, prompt in prompts.items():
        assert texts[seq_id] == undrafted(path, prompt, 80, temperature=0.0)


def test_what_stands_is_what_the_target_says_and_saves_rounds(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=(1, 3), window=None)
    engine = open_engine(target, drafter)
    _, rounds = drafted(engine, {0: random_prompt(5, 30)}, 200, temperature=0.0)
    n_accepted = sum(stood for *_, stood in rounds)
    assert len(rounds) + n_accepted >= 199
    for history, last, draft, stood in rounds[:-1]:
        following = undrafted(target, [*history, last], stood + 1, temperature=0.0) if stood else []
        assert draft[:stood] == following[:stood]


def test_drawn_tokens_have_the_probabilities_of_the_lattice(hybrid: tuple[Path, Path]) -> None:
    target, drafter = hybrid
    engine = open_engine(target, drafter)
    engine.step([Work(0, random_prompt(2, 40))])
    speculator = Speculator(engine, ("draft-dflash",), draft_n_max=2, draft_samples=True)
    ((tokens, scores, _),) = engine.draft_blocks([(0, 9)], 2)
    temperature, n_draws = 1.5, 1200
    counts = np.zeros((5, 5), int)
    for seed in range(n_draws):
        speculator.begin(0)
        (draft,) = speculator.draft([DraftOrder(0, 9, 2, temperature, seed)])
        first, second = (int(np.flatnonzero(tokens[i] == draft.tokens[i])[0]) for i in range(2))
        counts[first, second] += 1
        for row, at in ((0, 0), (1, first)):
            shares = np.exp((scores[row, at] - scores[row, at].max()) / temperature)
            shares /= shares.sum()
            assert [token for token, _ in draft.proposals[row]] == tokens[row].tolist()
            np.testing.assert_allclose([share for _, share in draft.proposals[row]], shares, atol=1e-6)
    chances = np.empty((5, 5))
    for first in range(5):
        shares = [np.exp((s - s.max()) / temperature) for s in (scores[0, 0], scores[1, first])]
        chances[first] = shares[0][first] / shares[0].sum() * shares[1] / shares[1].sum()
    expected = chances * n_draws
    large = expected > 5
    statistic = ((counts - expected)[large] ** 2 / expected[large]).sum()
    assert statistic < 2.2 * large.sum() + 10


def test_drawn_drafts_repeat_with_the_seed(hybrid: tuple[Path, Path]) -> None:
    target, drafter = hybrid
    prompts = {0: random_prompt(3, 50)}
    sampling = {"temperature": 1.0, "top_k": 20, "seed": 11}
    runs = [drafted(open_engine(target, drafter), prompts, 60, samples=True, **sampling)[0][0] for _ in range(2)]
    assert runs[0] == runs[1]


def test_low_confidence_ends_a_draft(hybrid: tuple[Path, Path]) -> None:
    target, drafter = hybrid
    engine = open_engine(target, drafter)
    engine.step([Work(0, random_prompt(4, 40))])
    ((tokens, scores, _),) = engine.draft_blocks([(0, 9)], 7)
    walk, at, confidences = Lattice(tokens, scores).greedy_walk(), 0, []
    for row in range(7):
        row_scores = scores[row, at]
        confidences.append(float(1 / np.exp(row_scores - row_scores.max()).sum()))
        at = int(row_scores.argmax())
    for p_min in (0.0, 0.3, 0.6, 0.99):
        speculator = Speculator(engine, ("draft-dflash",), draft_n_max=7, draft_p_min=p_min)
        (draft,) = speculator.draft([DraftOrder(0, 9, 7)])
        n_sure = next((i for i, confidence in enumerate(confidences) if confidence < p_min), 7)
        assert draft.tokens == walk[:n_sure]


def test_llama_drafts_with_a_drafters_file(hybrid: tuple[Path, Path]) -> None:
    target, drafter = hybrid
    texts = []
    for draft_model in (None, drafter, SpeculationOptions(("draft-dflash",), str(drafter), n_max=5)):
        llama = Llama(str(target), n_ctx=512, n_threads=1, draft_model=draft_model, verbose=False)
        texts.append(llama("the world", max_tokens=60, temperature=0.0)["choices"][0]["text"])
        llama.close()
    assert texts[0] == texts[1] == texts[2]


def cpus(split_mode: str, *tensor_split: int, **more: Any) -> dict[str, Any]:
    devices = [f"CPU{i}" for i in range(len(tensor_split))]
    return {"devices": devices, "split_mode": split_mode, "tensor_split": tensor_split, **more}


@pytest.mark.parametrize(
    ("architecture", "split"),
    [
        ("llama", cpus("tensor", 1, 1)),
        ("llama", cpus("tensor", 3, 1, 2)),
        ("qwen35moe", cpus("tensor", 0, 1)),
        ("qwen35moe", cpus("tensor", 2, 1)),
        ("qwen35moe", cpus("tensor", 1, 1, tensor_overrides=[(r"ffn_.*_exps", "CPU")])),
        ("llama", cpus("layer", 1, 1)),
        ("llama", cpus("layer", 3, 1)),  # layers 1 and 3 of 0-2 and 3
        ("llama", cpus("layer", 1, 2, 1)),
        ("qwen35moe", cpus("layer", 1, 1)),
        ("qwen35moe", cpus("layer", 1, 3, device_layers=4)),
        ("qwen35moe", cpus("layer", 0, 1)),
        ("llama", cpus("none", 1, device_layers=1)),  # the output matrix alone
        ("llama", cpus("layer", 1, 1, tensor_overrides=[("^output", "CPU"), (r"blk\.3\.ffn", "CPU")])),
    ],
    ids=str,
)
def test_beside_a_model_on_several_devices_texts_are_those_without_drafts(
    tmp_path: Path, architecture: str, split: dict[str, Any]
) -> None:
    """The drafter is on one device; what it tells is what it tells beside a model on one, up to rounding."""
    path = tmp_path / "target.gguf"
    if architecture == "llama":
        write_tiny_llama(path, n_layer=4)
    else:
        write_tiny_hybrid(path, architecture, n_layer=4)
    shape: dict[str, Any] = {"target_layers": (1, 3), "window": 64, "own_head": len(split["devices"]) > 2}
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", **shape)
    settings: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 4, "n_threads": 1, "type_k": "f32", "type_v": "f32"}

    def engine(file: Path | None, **placement: Any) -> Engine:
        return Engine(Model(path, drafter=file, **placement), **settings)

    prompts = {seq_id: random_prompt(seq_id, 40 + 9 * seq_id) for seq_id in range(2)}
    several, one, plain = engine(drafter, **split), engine(drafter), engine(None, **split)
    for seq_id, prompt in prompts.items():
        for each in (several, one):
            each.step([Work(seq_id, prompt)])
    found, expected = (each.draft_blocks([(0, 9), (1, 77)], 7) for each in (several, one))
    for (tokens, scores, _), (other_tokens, other_scores, _) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tokens, other_tokens)
        np.testing.assert_allclose(scores, other_scores, atol=2e-3)
    for seq_id in prompts:
        several.clear(seq_id)
    texts, rounds = drafted(several, prompts, 24, temperature=0.0)
    assert {len(draft) for _, _, draft, _ in rounds} == {7}
    samplers = {seq_id: Sampler(300, temperature=0.0) for seq_id in prompts}
    pending, straight = dict(prompts), {seq_id: [] for seq_id in prompts}
    for _ in range(24):
        for output in plain.step([Work(seq_id, pending[seq_id], samplers[seq_id]) for seq_id in prompts]):
            pending[output.seq_id] = [output.token]
            straight[output.seq_id].append(output.token)
    assert texts == straight


def test_a_context_beside_several_devices_is_shifted_with_the_drafters_keys(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=(1, 3), window=None)
    found = []
    for split in (cpus("none", 1), cpus("tensor", 1, 1), cpus("layer", 1, 1), cpus("layer", 3, 1)):
        model = Model(target, drafter=drafter, **split)
        engine = Engine(model, n_ctx=512, n_threads=1, type_k="f32", type_v="f32")
        engine.step([Work(0, random_prompt(6, 80))])
        engine.shift(0, 10, 30)
        found.append(engine.draft_blocks([(0, 9)], 7)[0])
    for tokens, scores, _ in found[1:]:
        np.testing.assert_array_equal(found[0][0], tokens)
        np.testing.assert_allclose(found[0][1], scores, atol=2e-3)


def test_the_drafter_lies_where_the_output_matrix_is(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", target_layers=(1, 3))
    for split, home in (
        (cpus("layer", 1, 1), 1),
        (cpus("layer", 1, 1, device_layers=3), 2),  # behind the host
        (cpus("tensor", 1, 1), 0),
        (cpus("tensor", 0, 1), 1),
    ):
        plain, drafted = Model(target, **split), Model(target, drafter=drafter, **split)
        more = [with_it - without for with_it, without in zip(drafted.rank_bytes, plain.rank_bytes, strict=True)]
        assert [n > 0 for n in more] == [rank == home for rank in range(len(plain.devices))]
        for model, file in ((plain, None), (drafted, drafter)):
            for need, matrices in zip(
                MemoryNeeds(target, drafter=file).of(n_ctx=512, **split), model.rank_bytes, strict=True
            ):
                assert matrices <= need.weights <= 1.1 * matrices + 20_000


def test_what_is_missing_is_said(hybrid: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = hybrid
    with pytest.raises(InvalidArgument, match="needs a DFlash drafter"):
        Speculator(open_engine(target, None), ("draft-dflash",))
    with pytest.raises(InvalidArgument, match="no room for a block"):
        Speculator(open_engine(target, drafter, n_ubatch=4), ("draft-dflash",), draft_n_max=7)
    with pytest.raises(InvalidArgument, match="needs a drafter"):
        Llama(str(target), draft_model=SpeculationOptions(("draft-dflash",)), verbose=False)
    with pytest.raises(InvalidArgument, match="no file"):
        Llama(str(target), draft_model=SpeculationOptions(("draft-dflash",), str(tmp_path / "none")), verbose=False)
