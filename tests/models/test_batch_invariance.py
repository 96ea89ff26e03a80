"""A row's logits have the same bits whatever is computed with it: neighbours, chunks, micro-batches, threads.

Tiny models cover the weight types; SmolLM2 covers real widths. Whether the logits are right is test_logits_oracle's
subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyllama._engine import Engine, Model, Sampler, Work
from support.logits import assert_same_bits, position_logits
from support.logprob_goldens import read_goldens
from support.tiny_llama import write_tiny_llama

WEIGHT_TYPES = (
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4", "tq1_0", "tq2_0", "iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
)  # fmt: skip
CHUNKS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33, 63, 64)
N_NEIGHBOURS = 7


def random_tokens(n_vocab: int, n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, n_vocab, n_tokens).tolist()


@pytest.fixture(scope="module", params=WEIGHT_TYPES)
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    block_size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[request.param.upper()]]
    width = max(block_size, 64)
    path = tmp_path_factory.mktemp("invariance") / f"{request.param}.gguf"
    model = Model(write_tiny_llama(path, weight_type=request.param, n_embd=width, n_ff=2 * width))
    yield model
    model.close()


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    model = Model(smollm2_path)
    yield model
    model.close()


@pytest.fixture(scope="module")
def essay() -> list[int]:
    """A real prompt of more than one page (256 tokens)."""
    return next(golden.tokens for golden in read_goldens() if golden.name == "english-essay")


def logits_beside_neighbours(model: Model, tokens: list[int], chunk: int) -> np.ndarray:
    """Logits of `tokens` as sequence 3; each decode call also has rows of seven other sequences, interleaved."""
    engine = Engine(model, n_ctx=2048, n_seq_max=N_NEIGHBOURS + 1)
    others = {
        seq_id: random_tokens(model.n_vocab, len(tokens), seed=seq_id)
        for seq_id in range(N_NEIGHBOURS + 1)
        if seq_id != 3
    }
    for seq_id, other in others.items():  # different lengths: positions differ inside a batch
        engine.decode(other[: 5 * seq_id + 1], [seq_id] * (5 * seq_id + 1))
    rows = []
    for start in range(0, len(tokens), chunk):
        batch: list[tuple[int, int]] = []
        for offset in range(start, min(start + chunk, len(tokens))):
            batch += [
                (others[seq_id][offset], seq_id) if seq_id != 3 else (tokens[offset], 3)
                for seq_id in range(N_NEIGHBOURS + 1)
            ]
        engine.decode(
            [token for token, _ in batch], [seq_id for _, seq_id in batch], [seq_id == 3 for _, seq_id in batch]
        )
        rows.append(engine.logits())
    engine.close()
    return np.concatenate(rows)


def test_tiny_model_chunks_of_any_size_give_the_same_bits(tiny_model: Model) -> None:
    tokens = random_tokens(tiny_model.n_vocab, 300, seed=11)
    engine = Engine(tiny_model, n_ctx=512)
    expected = position_logits(engine, tokens)
    for chunk in (*CHUNKS, 65, 100, 256, 299):
        assert_same_bits(position_logits(engine, tokens, chunk=chunk), expected, f"chunks of {chunk}")
    engine.close()


@pytest.mark.parametrize("chunk", [1, 4, 8, 40])
def test_tiny_model_beside_seven_others_gives_the_same_bits(tiny_model: Model, chunk: int) -> None:
    tokens = random_tokens(tiny_model.n_vocab, 80, seed=12)
    engine = Engine(tiny_model, n_ctx=512)
    alone = position_logits(engine, tokens)
    engine.close()
    assert_same_bits(
        logits_beside_neighbours(tiny_model, tokens, chunk), alone, f"beside 7 others, {chunk} tokens at a time"
    )


@pytest.mark.parametrize(
    "settings", [{"n_threads": 1}, {"n_threads": 2}, {"n_threads": 3}, {"n_ubatch": 32}, {"n_ubatch": 100}], ids=str
)
def test_tiny_model_threads_and_micro_batch_do_not_change_bits(tiny_model: Model, settings: dict[str, int]) -> None:
    tokens = random_tokens(tiny_model.n_vocab, 200, seed=13)
    results = []
    for arguments in ({}, settings):
        engine = Engine(tiny_model, n_ctx=512, **arguments)
        results.append(position_logits(engine, tokens))
        engine.close()
    assert_same_bits(results[1], results[0], str(settings))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_chunking_gives_the_same_bits_with_each_kv_type(tmp_path: Path, kv_type: str) -> None:
    model = Model(write_tiny_llama(tmp_path / "wide-heads.gguf", n_embd=128))  # heads of 32: a whole quant block
    tokens = random_tokens(model.n_vocab, 300, seed=14)
    engine = Engine(model, n_ctx=512, type_k=kv_type, type_v=kv_type)
    expected = position_logits(engine, tokens)
    for chunk in (1, 7, 64, 256):
        assert_same_bits(position_logits(engine, tokens, chunk=chunk), expected, f"{kv_type} KV, chunks of {chunk}")
    engine.close()
    model.close()


def test_smollm2_chunks_of_1_to_64_give_the_same_bits(smollm2: Model, essay: list[int]) -> None:
    engine = Engine(smollm2, n_ctx=512)
    expected = position_logits(engine, essay)
    assert_same_bits(position_logits(engine, essay, chunk=1), expected, "token by token")
    # Every row count from 1 to 64, across the page border: n rows against the same rows of the whole prompt.
    engine.clear(0)
    engine.decode(essay[:256])
    for n_rows in range(1, 65):
        start = 256 - n_rows // 2  # never rises, so truncating reaches it
        engine.truncate(0, start)
        engine.decode(essay[start : start + n_rows], None, [True] * n_rows)
        assert_same_bits(engine.logits(), expected[start : start + n_rows], f"{n_rows} rows at position {start}")
    engine.close()


def test_smollm2_beside_seven_others_gives_the_same_bits(smollm2: Model, essay: list[int]) -> None:
    tokens = essay[:48]
    engine = Engine(smollm2, n_ctx=512)
    alone = position_logits(engine, tokens)
    engine.close()
    for chunk in (1, 16):
        assert_same_bits(
            logits_beside_neighbours(smollm2, tokens, chunk), alone, f"beside 7 others, {chunk} tokens at a time"
        )


def test_steps_with_eight_sequences_draw_the_tokens_and_logprobs_of_each_alone(smollm2: Model) -> None:
    """Prompts join while others decode, as the server's scheduler does it."""
    prompts = {seq_id: golden.tokens[:60] for seq_id, golden in enumerate(read_goldens()[: N_NEIGHBOURS + 1])}
    n_tokens = 16

    def run(seq_ids: list[int]) -> dict[int, list[tuple[int, float]]]:
        engine = Engine(smollm2, n_ctx=4096, n_seq_max=N_NEIGHBOURS + 1)
        greedy = Sampler(smollm2.n_vocab, temperature=0.0, seed=1)
        drawn: dict[int, list[tuple[int, float]]] = {seq_id: [] for seq_id in seq_ids}
        arrivals = list(seq_ids)
        pending: dict[int, list[int]] = {}
        while arrivals or pending:
            if arrivals:
                arrival = arrivals.pop(0)
                pending[arrival] = prompts[arrival]
            work = [Work(seq_id, tokens, greedy) for seq_id, tokens in pending.items()]
            for output in engine.step(work):
                drawn[output.seq_id].append((output.token, output.logprob))
                pending[output.seq_id] = [output.token]
            pending = {seq_id: tokens for seq_id, tokens in pending.items() if len(drawn[seq_id]) < n_tokens}
        engine.close()
        return drawn

    together = run(list(prompts))
    for seq_id in prompts:
        assert together[seq_id] == run([seq_id])[seq_id], f"sequence {seq_id}"
