"""A step that verifies drafts gives the text and the state of one that never saw a draft, bit for bit.

Drafts here are planted: right ones, wrong ones, right up to some place. What drafters make of texts is the subject of
`test_drafters`, the server's use of them that of `test_speculation`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import Engine, Model, Sampler, SyntheticAcceptance, Work
from pyllama.errors import ContextFull, InvalidArgument
from support.rollback_stress import planted, random_prompt, stress
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import write_tiny_qwen4exp

PAGE = 256
ARCHITECTURES = ("llama", "qwen3", "gemma3", "qwen35", "qwen35moe")
CASES = [*itertools.product(ARCHITECTURES, ("f32", "q8_0")), ("qwen4exp", "f32")]


def write(path: Path, architecture: str, weight_type: str = "f32") -> Path:
    if architecture == "llama":
        return write_tiny_llama(path, weight_type=weight_type)
    if architecture.startswith("qwen35"):
        return write_tiny_hybrid(path, architecture, n_layer=5, attention_interval=3, weight_type=weight_type)
    if architecture == "qwen4exp":
        return write_tiny_qwen4exp(path)
    return write_tiny_model(path, architecture, weight_type=weight_type)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Model]]:
    folder = tmp_path_factory.mktemp("verification")
    opened = {
        (architecture, weight_type): Model(
            write(folder / f"{architecture}-{weight_type}.gguf", architecture, weight_type)
        )
        for architecture, weight_type in CASES
    }
    yield opened
    for model in opened.values():
        model.close()


def open_engine(model: Model, **options: Any) -> Engine:
    return Engine(model, n_ctx=4 * PAGE, n_seq_max=4, n_ubatch=64, n_threads=1, **options)


def undrafted(model: Model, prompt: list[int], n_tokens: int, n_probs: int = 0, **sampling: Any) -> list[Any]:
    engine = open_engine(model)
    sampler = Sampler(model.n_vocab, **sampling)
    sampler.accept(prompt)
    pending, found = prompt, []
    for _ in range(n_tokens):
        (output,) = engine.step([Work(0, pending, sampler, n_probs)])
        found.append(output)
        pending = [output.token]
    engine.close()
    return found


def drafted(
    model: Model, engine: Engine, sequences: dict[int, tuple[list[int], list[Any]]], rng: random.Random, **sampling: Any
) -> dict[int, list[Any]]:
    """Every sequence of (prompt, its undrafted outputs) with planted drafts, all of them in one step."""
    samplers, pending, found = {}, {}, {}
    for seq_id, (prompt, _) in sequences.items():
        samplers[seq_id] = Sampler(model.n_vocab, **sampling)
        samplers[seq_id].accept(prompt)
        pending[seq_id], found[seq_id] = prompt, []
    while any(len(found[seq_id]) < len(expected) for seq_id, (_, expected) in sequences.items()):
        work = []
        for seq_id, (_, expected) in sequences.items():
            n_left = len(expected) - len(found[seq_id])
            if not n_left:
                continue
            tokens = [output.token for output in expected]
            at = len(found[seq_id])
            draft = planted(rng, tokens, at, model.n_vocab, min(15, n_left - 1)) if at > 0 else []
            n_probs = len(expected[0].top)
            work.append(Work(seq_id, pending[seq_id], samplers[seq_id], n_probs, draft=draft))
        for output in engine.step(work):
            found[output.seq_id].append(output)
            pending[output.seq_id] = [output.token]
        for seq_id, (prompt, _) in sequences.items():
            assert engine.length(seq_id) == len(prompt) + len(found[seq_id]) - 1
    return found


@pytest.mark.parametrize(("architecture", "weight_type"), CASES)
def test_drafted_texts_are_those_of_undrafted_runs_with_their_log_probabilities(
    models: dict[tuple[str, str], Model], architecture: str, weight_type: str
) -> None:
    model = models[architecture, weight_type]
    for n_sequences, sampling in itertools.product(
        (1, 4), ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "repeat_penalty": 1.2, "repeat_last_n": 32})
    ):
        sequences = {}
        for seq_id in range(n_sequences):
            prompt = random_prompt(model, 9 + 31 * seq_id, seed=seq_id)
            sequences[seq_id] = (prompt, undrafted(model, prompt, 40, 3, **sampling))
        engine = open_engine(model)
        found = drafted(model, engine, sequences, random.Random(n_sequences), **sampling)
        engine.close()
        assert found == {
            seq_id: [output._replace(seq_id=seq_id) for output in expected]
            for seq_id, (_, expected) in sequences.items()
        }


@pytest.mark.parametrize("architecture", ["qwen35", "qwen4exp", "llama"])
def test_states_after_many_refused_drafts_equal_straight_ones(
    models: dict[tuple[str, str], Model], architecture: str
) -> None:
    """`scripts/check_speculation.py` tries 10^4."""
    assert stress(models[architecture, "f32"], 1200) >= 1200


def test_bad_drafts_are_refused_before_anything_is_computed(models: dict[tuple[str, str], Model]) -> None:
    model = models["qwen35", "f32"]
    engine = open_engine(model)
    sampler = Sampler(model.n_vocab, temperature=0.0)
    engine.step([Work(0, [5, 6, 7])])
    for work, n_passes, message in (
        (Work(0, [8], None, draft=[9]), 1, "no sampler"),
        (Work(0, [8], sampler, draft=[model.n_vocab]), 1, "outside the vocabulary"),
        (Work(0, [8], sampler, draft=[9] * 64), 1, "65 rows, n_ubatch is 64"),
        (Work(0, [8], sampler, draft=[9, 10], proposals=[[(9, 1.0)]]), 1, "1 proposals"),
        (Work(0, [8], sampler, draft=[9]), 2, "takes 1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            engine.step([work], n_passes)
        assert engine.length(0) == 3
    engine.close()


def test_a_step_that_finds_no_page_leaves_sampler_and_sequence_as_they_were(
    models: dict[tuple[str, str], Model],
) -> None:
    model = models["llama", "f32"]
    engine = Engine(model, n_ctx=PAGE, n_ubatch=64)
    prompt = random_prompt(model, PAGE - 3, seed=5)
    sampling = {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.3}
    sampler, other = Sampler(model.n_vocab, **sampling), Sampler(model.n_vocab, **sampling)
    (first,) = engine.step([Work(0, prompt, sampler)])
    with pytest.raises(ContextFull):
        engine.step([Work(0, [first.token], sampler, draft=[4, 5, 6, 7])])
    assert engine.length(0) == len(prompt)
    (second,) = engine.step([Work(0, [first.token], sampler)])
    engine.clear(0)
    assert [first.token] == [output.token for output in engine.step([Work(0, prompt, other)])]
    assert [second.token] == [output.token for output in engine.step([Work(0, [first.token], other)])]
    engine.close()


def test_no_draft_stands_behind_a_token_that_ends_the_text(models: dict[tuple[str, str], Model]) -> None:
    for architecture in ("llama", "qwen35"):
        model = models[architecture, "f32"]
        prompt = random_prompt(model, 12, seed=2)
        tokens = [output.token for output in undrafted(model, prompt, 8, temperature=0.0)]
        end = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
        engine = open_engine(model)
        sampler = Sampler(model.n_vocab, temperature=0.0)
        engine.step([Work(0, prompt, sampler)])
        outputs = engine.step([Work(0, tokens[:1], sampler, draft=tokens[1:8], ends=[tokens[end]])])
        assert [output.token for output in outputs] == tokens[1 : end + 1]
        assert engine.length(0) == len(prompt) + end
        engine.close()


def test_synthetic_acceptance_follows_its_rates_whatever_the_model_says(models: dict[tuple[str, str], Model]) -> None:
    model = models["qwen3", "f32"]
    engine = open_engine(model)
    sampler = Sampler(model.n_vocab, temperature=0.0)
    engine.step([Work(0, [5, 6, 7])])
    synthetic = SyntheticAcceptance([0.8, 0.5, 0.0], 1)
    n_rounds, counts = 300, [0, 0, 0, 0]
    for _ in range(n_rounds):
        outputs = engine.step([Work(0, [8], sampler, draft=[9, 10, 11], synthetic=synthetic)])
        counts[len(outputs) - 1] += 1
        engine.truncate(0, 3)
    assert counts[3] == 0
    assert abs(counts[1] + counts[2] - 0.8 * n_rounds) < 30
    assert abs(counts[2] - 0.4 * n_rounds) < 34
    with pytest.raises(InvalidArgument, match=r"rate is 1\.5"):
        SyntheticAcceptance([1.5], 1)
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_with_a_mask_for_each_row_the_text_is_that_of_one_mask_after_the_other(
    models: dict[tuple[str, str], Model], architecture: str, temperature: float
) -> None:
    """Each token decides what may follow it, as with a grammar."""
    model, rng = models[architecture, "f32"], random.Random(7)
    n_words = -(-model.n_vocab // 32)

    def mask_after(token: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(token).integers(0, 2**32, n_words, np.uint32) & np.uint32(0x0F0F0F0F)

    prompt = random_prompt(model, 40, 3)
    engine, sampler = open_engine(model), Sampler(model.n_vocab, temperature=temperature, seed=5)
    expected, pending = [], prompt
    for _ in range(120):
        sampler.set_mask(mask_after(pending[-1]))
        (output,) = engine.step([Work(0, pending, sampler, 2)])
        expected.append(output)
        pending = [output.token]
    engine.close()
    tokens = [output.token for output in expected]
    engine, sampler = open_engine(model), Sampler(model.n_vocab, temperature=temperature, seed=5)
    sampler.set_mask(mask_after(prompt[-1]))
    found = engine.step([Work(0, prompt, sampler, 2)])
    n_rounds = 0
    while len(found) < len(expected):
        draft = planted(rng, tokens, len(found), model.n_vocab, min(7, len(expected) - len(found) - 1))
        last = found[-1].token
        sampler.set_mask(mask_after(last))
        masks = np.array([mask_after(token) for token in (last, *draft)]) if draft else None
        found += engine.step([Work(0, [last], sampler, 2, draft=draft, masks=masks)])
        n_rounds += 1
    assert found == expected
    assert n_rounds < 80
    engine.close()


def test_masks_of_another_size_are_refused(models: dict[tuple[str, str], Model]) -> None:
    model = models["llama", "f32"]
    engine, sampler = open_engine(model), Sampler(model.n_vocab, temperature=0.0)
    engine.step([Work(0, [5, 6, 7], sampler)])
    words = -(-model.n_vocab // 32)
    for draft, shape in (([1, 2], (2, words)), ([1, 2], (3, words - 1)), ([], (1, words)), ([1], (2, 0))):
        with pytest.raises(InvalidArgument, match="masks of"):
            engine.step([Work(0, [8], sampler, draft=draft, masks=np.ones(shape, np.uint32))])
    assert engine.length(0) == 3
    engine.close()
