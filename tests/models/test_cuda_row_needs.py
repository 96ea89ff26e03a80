"""Draws from a CUDA device, of whose logits only the parts come to the host that samplers need: the machine's card, or
the emulated device. The same texts as from whole rows, which `decode` brings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import Engine, LogitsRow, Model, Sampler, Work, backend_info
from pyllama.errors import PyllamaError
from support.cuda_engine import cuda_devices
from support.tiny_models import write_tiny_model

UNITS = (
    "rows", "rows_panel", "row_moves", "all_reduce", "panel", "repack", "kv_append", "linear_f32",
    "linear_f16", "linear_row_f16", "linear_prompt_f16", "attention_decode_64", "attention_prompt_64",
)  # fmt: skip
SHAPE: dict[str, Any] = {
    "n_embd": 128, "head_dim": 64, "n_head": 4, "n_head_kv": 2, "n_ff": 128, "n_layer": 2, "weight_type": "f16",
    "n_vocab": 5000,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    with cuda_devices(UNITS, EMULATED_CUDA_DEVICES="2"):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("row_needs") / "model.gguf", "llama", n_expert=0, **SHAPE)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    model = Model(path, devices=["CUDA0"])
    yield model
    model.close()


CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 40, "seed": 3},
    "penalties": {"top_k": 20, "temperature": 1.5, "seed": 4, "repeat_penalty": 1.4, "presence_penalty": 0.5},
    "greedy with penalties": {"temperature": 0.0, "repeat_penalty": 1.5, "frequency_penalty": 2.0},
    "bias": {"top_k": 10, "seed": 5, "logit_bias": [(7, 8.0), (4999, 9.0), (30, float("-inf"))]},
    "whole row": {"top_k": 0, "seed": 6, "top_p": 0.9},
    "xtc": {"top_k": 30, "seed": 7, "xtc_probability": 0.7, "xtc_threshold": 0.05, "temperature": 2.0},
}


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 4990, 10 + seed).tolist()


def text_of_whole_rows(engine: Engine, sampler: Sampler, tokens: list[int], n_tokens: int) -> list[int]:
    text: list[int] = []
    pending = tokens
    while len(text) < n_tokens:
        engine.decode(pending, [0] * len(pending), [*[False] * (len(pending) - 1), True])
        text.append(sampler.sample(engine.logits()[0]))
        sampler.accept(text[-1:])
        pending = text[-1:]
    engine.clear(0)
    return text


def test_slots_with_other_chains_get_the_texts_of_whole_rows(model: Model) -> None:
    n_tokens = 14
    alone = Engine(model, n_ctx=1024)
    expected = [
        text_of_whole_rows(alone, Sampler(5000, **chain), prompt(slot), n_tokens)
        for slot, chain in enumerate(CHAINS.values())
    ]
    # More rows than that are tiles of a product, whose sums are rounded otherwise than those of a row alone.
    engine = Engine(model, n_ctx=4096, n_seq_max=len(CHAINS), n_ubatch=64)
    samplers = [Sampler(5000, **chain) for chain in CHAINS.values()]
    texts: list[list[int]] = [[] for _ in CHAINS]
    for _ in range(n_tokens):
        works = [Work(slot, texts[slot][-1:] or prompt(slot), sampler) for slot, sampler in enumerate(samplers)]
        for output in engine.step(works):
            texts[output.seq_id].append(output.token)
    assert texts == expected
    assert len({tuple(text) for text in texts}) == len(texts)


@pytest.mark.parametrize("name", ["greedy", "penalties", "bias"])
def test_drafts_are_verified_as_by_whole_rows(model: Model, name: str) -> None:
    expected = text_of_whole_rows(Engine(model, n_ctx=512), Sampler(5000, **CHAINS[name]), prompt(1), 20)
    engine, sampler = Engine(model, n_ctx=512), Sampler(5000, **CHAINS[name])
    text = [engine.step([Work(0, prompt(1), sampler)])[0].token]
    while len(text) < 20:
        draft = [*expected[len(text) : len(text) + 3], 77, 78]  # some that stand, then others
        text += [output.token for output in engine.step([Work(0, text[-1:], sampler, draft=draft)])]
    assert text[:20] == expected


@pytest.mark.parametrize("post_sampling", [False, True])
def test_probabilities_are_those_of_whole_rows_bit_for_bit(model: Model, post_sampling: bool) -> None:
    engine, tokens, kept = Engine(model, n_ctx=512), prompt(2), LogitsRow()
    chains = [
        {"top_k": 12, "seed": 9},
        {"temperature": 0.0},
        CHAINS["penalties"],
        {"top_k": 3, "logit_bias": [(4, 20.0)]},
    ]
    for n_probs, chain in zip((5, 1, 30, 200), chains, strict=True):
        (found,) = engine.step([Work(0, tokens, Sampler(5000, **chain), n_probs, post_sampling)])
        engine.clear(0)
        engine.step([Work(0, tokens, None, logits=kept)])
        engine.clear(0)
        assert found == kept.draw(0, Sampler(5000, **chain), n_probs, post_sampling)


def test_masks_ban_on_the_device_what_they_ban_in_whole_rows(model: Model) -> None:
    engine, tokens = Engine(model, n_ctx=1024, n_seq_max=2), prompt(5)
    masks = np.random.default_rng(8).integers(0, 2**32, (8, 157), np.uint32)
    masks &= np.random.default_rng(9).integers(0, 2**32, (8, 157), np.uint32)
    for chain in ({"temperature": 0.0}, CHAINS["penalties"]):
        samplers = [Sampler(5000, **chain) for _ in range(3)]
        expected: list[int] = []
        for mask in masks:
            samplers[0].set_mask(mask)
            row = last_row(engine, [*tokens, *expected])
            expected.append(samplers[0].sample(row))
            samplers[0].accept(expected[-1:])
            assert mask[expected[-1] // 32] >> (expected[-1] % 32) & 1
        text: list[int] = []
        for mask in masks:
            samplers[1].set_mask(mask)
            works = [Work(0, text[-1:] or tokens, samplers[1]), Work(1, [9], Sampler(5000, temperature=0.0))]
            text.append(engine.step(works)[0].token)
        assert text == expected
        engine.clear(0)
        engine.clear(1)
        text = [output.token for output in engine.step(
            [Work(0, tokens, samplers[2], draft=[*expected[:4], 11], masks=masks[:6])]
        )]  # fmt: skip
        assert text == expected[: len(text)]
        assert len(text) >= 5
        engine.clear(0)


def last_row(engine: Engine, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    engine.decode(tokens, [0] * len(tokens), [*[False] * (len(tokens) - 1), True])
    row = engine.logits()[0]
    engine.clear(0)
    return row


@pytest.mark.parametrize("devices_of_model", [["CUDA0", "CUDA1"], ["CPU", "CUDA0"]])
def test_ranks_with_parts_of_the_vocabulary_draw_what_whole_rows_draw(path: Path, devices_of_model: list[str]) -> None:
    if missing := set(devices_of_model) - {*backend_info()["devices"], "CPU"}:
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    model = Model(path, devices=devices_of_model, split_mode="tensor")
    for name in ("penalties", "bias", "whole row"):
        expected = text_of_whole_rows(Engine(model, n_ctx=512), Sampler(5000, **CHAINS[name]), prompt(3), 3)
        engine, sampler = Engine(model, n_ctx=512), Sampler(5000, **CHAINS[name])
        text: list[int] = []
        for _ in range(3):
            text += [output.token for output in engine.step([Work(0, text[-1:] or prompt(3), sampler)])]
        assert text == expected, name
    model.close()


def test_a_row_with_nan_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "nan.gguf", "llama", n_expert=0, **SHAPE)
    data = bytearray(path.read_bytes())
    data[-256:] = np.full(128, np.nan, np.float16).tobytes()  # the last row of the last matrix
    path.write_bytes(data)
    engine = Engine(Model(path, devices=["CUDA0"]), n_ctx=512)
    with pytest.raises(PyllamaError, match="NaN") as from_part:
        engine.step([Work(0, prompt(4), Sampler(5000, temperature=0.0))])
    with pytest.raises(PyllamaError) as from_row:
        Sampler(5000, temperature=0.0).sample(last_row(engine, prompt(4)))
    assert str(from_part.value) == str(from_row.value)
