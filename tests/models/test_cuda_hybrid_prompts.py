"""Prompts of hybrids on a CUDA device, which delta nets take in chunks: the machine's card, or the emulated device.

A piece of more than 64 tokens is a prompt. Against the CPU: mean KL divergence 1e-3, as in test_cuda_models.py; what
operands rounded to f16 add is below 1e-5. Bits: those of the same prompt, cut at other multiples of 64 or in other
company.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import Engine, Model, Sampler, Work, backend_info
from support.cuda_engine import cuda_devices
from support.logits import assert_same_bits, log_softmax, position_logits
from support.tiny_hybrid import write_tiny_hybrid

UNITS = (
    "rows", "rows_panel", "row_moves", "all_reduce", "panel", "repack", "kv_append", "delta_net", "delta_net_chunked",
    "causal_conv", "linear_f32", "linear_f16", "linear_row_f16", "linear_prompt_f16",
    "attention_decode_64", "attention_prompt_64",
)  # fmt: skip
SHAPE: dict[str, Any] = {
    "n_layer": 4, "attention_interval": 2, "n_embd": 128, "head_dim": 64, "n_head": 4, "n_head_kv": 2, "n_ff": 128,
    "n_key_head": 3, "n_value_head": 6, "state_size": 64, "weight_type": "f16",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    with cuda_devices(UNITS, EMULATED_CUDA_DEVICES="2"):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("cuda_hybrids") / "hybrid.gguf", **SHAPE)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    model = Model(path, devices=["CUDA0"])
    yield model
    model.close()


TOKENS: list[int] = np.random.default_rng(21).integers(3, 290, 300).tolist()


def last_logits(engine: Engine, tokens: list[int], seq_id: int = 0) -> NDArray[np.float32]:
    engine.decode(tokens, [seq_id] * len(tokens), [*[False] * (len(tokens) - 1), True])
    return engine.logits()


@pytest.fixture(scope="module")
def whole(model: Model) -> NDArray[np.float32]:
    """Logits of the tokens in one ubatch."""
    return position_logits(Engine(model, n_ctx=512, n_ubatch=512), TOKENS)


def test_logits_are_those_of_the_cpu_and_their_bits_are_those_of_chunks(
    path: Path, model: Model, whole: NDArray[np.float32]
) -> None:
    p = log_softmax(position_logits(Engine(Model(path), n_ctx=512), TOKENS))
    token_by_token = position_logits(Engine(model, n_ctx=512), TOKENS, chunk=64)
    for found in (whole, token_by_token):
        divergences = (np.exp(p) * (p - log_softmax(found))).sum(axis=-1)
        assert divergences.mean() <= 1e-3
        assert divergences.max() <= 1e-2
    assert not np.array_equal(whole, token_by_token)


@pytest.mark.parametrize("n_ubatch", [256, 200, 100])
def test_an_engine_cuts_prompts_where_that_changes_no_bit(
    model: Model, whole: NDArray[np.float32], n_ubatch: int
) -> None:
    found = position_logits(Engine(model, n_ctx=512, n_ubatch=n_ubatch), TOKENS)
    if n_ubatch == 100:  # no room for a cut that leaves two prompts
        assert not np.array_equal(found, whole)
    else:
        assert_same_bits(found, whole, f"ubatches of {n_ubatch}")


def test_prompts_have_the_same_bits_beside_others(model: Model) -> None:
    engine = Engine(model, n_ctx=2048, n_seq_max=4, n_ubatch=512)
    prompts = [TOKENS, TOKENS[37:137], TOKENS[:150]]
    held = {1: TOKENS[:37], 2: TOKENS[:9]}
    for seq_id, tokens in held.items():
        engine.decode(tokens, [seq_id] * len(tokens))
    states = {seq_id: engine.save_sequence(seq_id) for seq_id in held}
    alone = [last_logits(engine, tokens, seq_id) for tokens, seq_id in zip(prompts, (0, 1, 3), strict=True)]
    engine.clear(0)
    engine.clear(3)
    for seq_id, state in states.items():
        engine.load_sequence(seq_id, state)
    # 553 rows: the last does not fit the first ubatch.
    works = list(enumerate([*prompts[:2], TOKENS[9:12], prompts[2]]))
    engine.decode(
        [token for _, tokens in works for token in tokens],
        [seq_id for seq_id, tokens in works for _ in tokens],
        [i + 1 == len(tokens) for _, tokens in works for i in range(len(tokens))],
    )
    found = engine.logits()
    assert_same_bits(found[[0, 1, 3]], np.concatenate(alone), "beside others")


def test_a_saved_prompt_goes_on_with_the_same_bits(model: Model) -> None:
    engine, other = (Engine(model, n_ctx=1024, n_seq_max=2) for _ in range(2))
    engine.decode(TOKENS[:131])
    state = engine.save_sequence(0)
    expected = last_logits(engine, TOKENS[131:])
    other.load_sequence(1, state)
    assert_same_bits(last_logits(other, TOKENS[131:], 1), expected, "loaded into another engine")


def test_a_refused_draft_behind_a_prompt_leaves_the_state_of_the_prompt(model: Model) -> None:
    prompt, following = TOKENS[:90], TOKENS[90:93]
    plain, drafted = (Engine(model, n_ctx=512) for _ in range(2))
    (expected,) = plain.step([Work(0, prompt, Sampler(300, temperature=0.0))])
    refused = [(expected.token + 1) % 300] * 4
    (found,) = drafted.step([Work(0, prompt, Sampler(300, temperature=0.0), draft=refused)])
    assert found.token == expected.token
    assert_same_bits(last_logits(drafted, following), last_logits(plain, following), "after the draft")


def test_refused_drafts_of_several_sequences_leave_none_of_them_behind(model: Model) -> None:
    plain, drafted = (Engine(model, n_ctx=1024, n_seq_max=3) for _ in range(2))
    samplers = [Sampler(300, temperature=0.0) for _ in range(3)]
    for engine in (plain, drafted):
        for seq_id in range(3):
            engine.decode(TOKENS[: 20 + seq_id], [seq_id] * (20 + seq_id))
    expected = plain.step([Work(s, [TOKENS[40 + s]], sampler) for s, sampler in enumerate(samplers)])
    refused = [[(output.token + 1) % 300] * (4 + output.seq_id) for output in expected]
    works = [Work(s, [TOKENS[40 + s]], sampler, draft=refused[s]) for s, sampler in enumerate(samplers)]
    assert [output.token for output in drafted.step(works)] == [output.token for output in expected]
    for seq_id in range(3):
        logits = [last_logits(engine, TOKENS[50:53], seq_id) for engine in (plain, drafted)]
        assert_same_bits(logits[1], logits[0], f"sequence {seq_id}")


@pytest.mark.parametrize("tensor_split", [[1, 2], [0, 1]])
def test_uneven_shares_of_heads_give_the_logits_of_the_cpu(path: Path, tensor_split: list[int]) -> None:
    if "CUDA1" not in backend_info()["devices"]:
        pytest.skip("needs two devices")
    tokens = TOKENS[:100]
    p = log_softmax(position_logits(Engine(Model(path), n_ctx=512), tokens))
    model = Model(path, devices=["CUDA0", "CUDA1"], split_mode="tensor", tensor_split=tensor_split)
    q = log_softmax(position_logits(Engine(model, n_ctx=512), tokens))
    assert (np.exp(p) * (p - q)).sum(axis=-1).mean() <= 1e-3
