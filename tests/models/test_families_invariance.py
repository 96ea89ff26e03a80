"""All families keep the engine's promises: a row's bits depend neither on its neighbours, the chunking of the prompt,
the micro-batch and the threads nor on the instruction set; sequences can be forked and saved.

Experts see rows grouped by whatever else is in the batch; sliding windows cross pages of 256 tokens here; recurrent
states pass from chunk to chunk and from ubatch to ubatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import Engine, Model, backend_info
from support.logits import assert_same_bits, position_logits
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import write_tiny_qwen4exp

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architecture": "qwen2", "weight_type": "q8_0"},
    "qwen3": {"architecture": "qwen3", "weight_type": "f16", "head_dim": 48},
    "qwen3moe-f32": {"architecture": "qwen3moe", "n_expert": 5, "n_expert_used": 3},
    "qwen3moe-q4_k": {"architecture": "qwen3moe", "weight_type": "q4_k", "n_embd": 256, "n_ff": 256},
    "qwen3moe-mixed": {
        "architecture": "qwen3moe",
        "weight_type": "q4_0",
        "tensor_types": {"ffn_gate_exps.weight": "q8_0", "ffn_up_exps.weight": "f16", "ffn_down_exps.weight": "q5_1"},
    },
    "mixtral": {"architecture": "llama", "weight_type": "q5_0"},
    "gemma3": {
        "architecture": "gemma3",
        "n_layer": 7,
        "tied": True,
        "weight_type": "q8_0",
        "metadata": {"gemma3.attention.sliding_window": 70, "gemma3.final_logit_softcapping": 4.0},
    },
    "qwen35": {"architecture": "qwen35", "n_layer": 5, "attention_interval": 3, "weight_type": "q8_0"},
    "qwen35moe": {"architecture": "qwen35moe", "n_layer": 3, "attention_interval": 2, "n_value_head": 6},
    # A fused tensor, blocks beyond the budget from the 36th token on.
    "qwen4exp": {
        "architecture": "qwen4exp",
        "weight_type": "q8_0",
        "tensor_types": {"per_layer_token_embd.weight": "f16"},
        "fused_gate_up": True,
    },
}
N_NEIGHBOURS = 7


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arguments = dict(FAMILIES[request.param])
    path = tmp_path_factory.mktemp("families") / "model.gguf"
    if arguments["architecture"] == "qwen4exp":
        del arguments["architecture"]
        return write_tiny_qwen4exp(path, **arguments)
    write = write_tiny_hybrid if arguments["architecture"].startswith("qwen35") else write_tiny_model
    return write(path, **arguments)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    model = Model(path)
    yield model
    model.close()


def random_tokens(n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, n_tokens).tolist()


def test_chunks_of_any_size_give_the_same_bits(model: Model) -> None:
    tokens = random_tokens(300, seed=11)
    engine = Engine(model, n_ctx=512)
    expected = position_logits(engine, tokens)
    for chunk in (1, 2, 3, 5, 8, 17, 64, 100, 256):
        assert_same_bits(position_logits(engine, tokens, chunk=chunk), expected, f"chunks of {chunk}")
    engine.close()


@pytest.mark.parametrize("chunk", [1, 8])
def test_neighbours_do_not_change_bits(model: Model, chunk: int) -> None:
    tokens = random_tokens(120, seed=12)
    engine = Engine(model, n_ctx=2560, n_seq_max=N_NEIGHBOURS + 1)
    alone = position_logits(engine, tokens)
    engine.clear(0)
    for seq_id in range(1, N_NEIGHBOURS + 1):  # different lengths: positions and windows differ inside a batch
        engine.decode(random_tokens(20 * seq_id, seed=seq_id), [seq_id] * (20 * seq_id))
    rows = []
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        others = [(token, seq_id) for seq_id in range(1, N_NEIGHBOURS + 1) for token in random_tokens(2, seed=start)]
        engine.decode(
            [*[token for token, _ in others], *piece],
            [*[seq_id for _, seq_id in others], *[0] * len(piece)],
            [*[False] * len(others), *[True] * len(piece)],
        )
        rows.append(engine.logits())
    engine.close()
    assert_same_bits(np.concatenate(rows), alone, f"beside {N_NEIGHBOURS} others, {chunk} tokens at a time")


@pytest.mark.parametrize("settings", [{"n_threads": 2}, {"n_threads": 3, "n_ubatch": 37}], ids=str)
def test_threads_and_micro_batch_do_not_change_bits(model: Model, settings: dict[str, int]) -> None:
    tokens = random_tokens(200, seed=13)
    results = []
    for arguments in ({"n_threads": 1}, settings):
        engine = Engine(model, n_ctx=512, **arguments)
        results.append(position_logits(engine, tokens))
        engine.close()
    assert_same_bits(results[1], results[0], str(settings))


def test_every_instruction_set_gives_the_bits_of_the_reference(path: Path) -> None:
    tokens = random_tokens(90, seed=14)
    results = {}
    for isa in backend_info()["available"]:
        model = Model(path, isa=isa)
        engine = Engine(model, n_ctx=256, n_threads=2)
        results[isa] = position_logits(engine, tokens)
        engine.close()
        model.close()
    for isa, logits in results.items():
        assert_same_bits(logits, results["reference"], isa)


def test_a_saved_and_a_forked_sequence_continue_with_the_same_bits(model: Model) -> None:
    tokens = random_tokens(290, seed=15)
    engine = Engine(model, n_ctx=2048, n_seq_max=3)
    expected = position_logits(engine, tokens)[-1:]
    position_logits(engine, tokens[:-1])
    engine.fork(0, 1, len(tokens) - 1)
    engine.load_sequence(2, engine.save_sequence(1))
    for seq_id in (1, 2):
        engine.decode(tokens[-1:], [seq_id], [True])
        assert_same_bits(engine.logits(), expected, f"sequence {seq_id}")
    engine.close()
