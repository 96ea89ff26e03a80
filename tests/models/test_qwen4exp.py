"""`qwen4exp` on tiny random models: against the forward pass written in NumPy and f64, and against llama.cpp.

With F32 weights and caches what remains against NumPy is the rounding of f32. The index heads are so many that scores
differ; a choice of other blocks changes logits by far more than any bound here, as the last tests show.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, Model, Sampler, Work
from support.logits import assert_same_bits, log_softmax, position_logits
from support.qwen4exp_forward import Qwen4ExpForward
from support.rewritten_gguf import edit_one, rewrite
from support.tiny_qwen4exp import EOS, NgramMemory, TinyQwen4Exp, write_tiny_qwen4exp

N_TOKENS = 60
BUDGET = 32 + 3  # tokens that a row sees at most, in blocks of 4 and the incomplete one
PLAIN = TinyQwen4Exp()


def random_tokens(n_tokens: int = N_TOKENS, seed: int = 3) -> list[int]:
    """With an end of text inside, and a token twice in a row."""
    tokens = np.random.default_rng(seed).integers(3, 290, n_tokens).tolist()
    tokens[20] = EOS
    tokens[30] = tokens[31]
    return tokens


def our_logits(path: Path, tokens: list[int], cache_type: str = "f16", **arguments: Any) -> NDArray[np.float32]:
    model = Model(path)
    engine = Engine(model, n_ctx=512, type_k=cache_type, type_v=cache_type)
    logits = position_logits(engine, tokens, **arguments)
    engine.close()
    model.close()
    return logits


def distances(found: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """Relative, of each position."""
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)


SHAPES = {
    "four-streams": PLAIN,
    "two-streams": replace(PLAIN, n_streams=2, low_rank=20),
    "three-streams-attention-last-but-one": replace(PLAIN, n_streams=3, n_layer=5, interval=2),
    "blocks-of-two": replace(PLAIN, block=2, top_k=20),
    "blocks-of-eight": replace(PLAIN, block=8, top_k=16),
    "bigrams": replace(PLAIN, memory=NgramMemory(layer=2, ngram_size=2, heads=4)),
    "four-grams-short-taps": replace(
        PLAIN,
        memory=NgramMemory(
            ngram_size=4,
            heads=2,
            conv_kernel=2,
            multipliers=(0x7FFF_FFFF_FFFF_FFE7, 0x1234_5678_9ABC_DEF1, 3, 5),
            vocab_sizes=(89, 97, 101, 103, 107, 109),
            table_rows=640,
            row_features=12,
        ),
    ),
    "without-memory": replace(PLAIN, memory=None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_forward_pass_in_f64(tmp_path: Path, name: str) -> None:
    path = write_tiny_qwen4exp(tmp_path / "model.gguf", SHAPES[name])
    tokens = random_tokens()
    logits = our_logits(path, tokens, "f32")
    assert distances(logits, Qwen4ExpForward(path).logits(tokens)).max() <= 2e-5
    for chunk in (1, 13):
        assert_same_bits(our_logits(path, tokens, "f32", chunk=chunk), logits, f"chunks of {chunk}")


@pytest.mark.parametrize("cache_type", ["f16", "bf16", "q8_0"])
def test_rounded_caches_change_little_while_everything_is_seen(tmp_path: Path, cache_type: str) -> None:
    path = write_tiny_qwen4exp(tmp_path / "model.gguf")
    tokens = random_tokens()[:BUDGET]
    found = our_logits(path, tokens, cache_type)
    limit = {"f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2}[cache_type]
    assert 0 < distances(found, Qwen4ExpForward(path).logits(tokens)).max() <= limit


def test_fused_experts_and_blocks_of_prediction_change_nothing(tmp_path: Path) -> None:
    shape = replace(PLAIN, memory=NgramMemory(heads=1, vocab_sizes=(211, 199)), mtp=True)
    path = write_tiny_qwen4exp(tmp_path / "model.gguf", shape, weight_type="f16", fused_gate_up=True)
    tokens = random_tokens()
    assert distances(our_logits(path, tokens, "f32"), Qwen4ExpForward(path).logits(tokens)).max() <= 2e-5


def test_attention_is_dense_up_to_the_budget_and_sparse_beyond(tmp_path: Path) -> None:
    tokens = random_tokens()
    sparse = our_logits(write_tiny_qwen4exp(tmp_path / "sparse.gguf"), tokens)
    wide = our_logits(write_tiny_qwen4exp(tmp_path / "wide.gguf", replace(PLAIN, top_k=1024)), tokens)
    no_index = np.zeros(PLAIN.n_layer, np.int64).tolist()
    dense_file = write_tiny_qwen4exp(tmp_path / "dense.gguf", metadata={"qwen4exp.attention.compress_ratios": no_index})
    dense = our_logits(dense_file, tokens)
    assert_same_bits(wide, dense, "a budget for everything and no indexer")
    assert_same_bits(sparse[:BUDGET], dense[:BUDGET], "up to the budget")
    assert np.median(distances(sparse[BUDGET:], dense[BUDGET:])) > 0.1


def test_among_equal_scores_the_first_blocks_are_chosen(tmp_path: Path) -> None:
    """Without queries all scores are 0: the first eight blocks and what follows the last complete one."""
    path = write_tiny_qwen4exp(tmp_path / "model.gguf")
    for layer in (1, 3):
        edit = edit_one(f"blk.{layer}.indexer.q_proj.weight", np.zeros_like)
        path = rewrite(path, tmp_path / f"equal{layer}.gguf", architecture="qwen4exp", tensors=edit)
    tokens = random_tokens()
    forward = Qwen4ExpForward(path)
    chosen = forward.chosen_tokens("blk.1.", np.ones((N_TOKENS, PLAIN.n_embd)))
    assert chosen[-2] == [*range(32), *range(56, 59)]
    assert distances(our_logits(path, tokens, "f32"), forward.logits(tokens)).max() <= 2e-5


def test_equal_prompts_at_once_give_one_distinct_answer(tmp_path: Path) -> None:
    model = Model(write_tiny_qwen4exp(tmp_path / "model.gguf"))
    engine = Engine(model, n_ctx=1024, n_seq_max=4, n_ubatch=16)
    pending: dict[int, list[int]] = dict.fromkeys(range(4), random_tokens())
    answers: dict[int, list[int]] = {seq_id: [] for seq_id in pending}
    samplers = {seq_id: Sampler(model.n_vocab, temperature=0.0) for seq_id in pending}
    for _ in range(16):
        for output in engine.step([Work(seq_id, pending[seq_id], samplers[seq_id]) for seq_id in pending]):
            answers[output.seq_id].append(output.token)
            pending[output.seq_id] = [output.token]
    assert len({tuple(answer) for answer in answers.values()}) == 1
    assert len(set(answers[0])) > 1


def oracle_logprobs(path: Path, tokens: list[int], n_vocab: int) -> NDArray[np.float64]:
    logprobs = np.full((len(tokens), n_vocab), np.nan)
    with LlamaCppPeer(path, n_ctx=512, n_threads=1) as peer:
        for length in range(len(tokens)):
            ids, values = zip(*peer.next_token_logprobs(tokens[: length + 1], n_vocab), strict=True)
            logprobs[length, list(ids)] = values
    assert np.isfinite(logprobs).all()
    return logprobs


def mean_divergence(expected: NDArray[np.float64], logits: NDArray[np.floating[Any]]) -> float:
    return float((np.exp(expected) * (expected - log_softmax(logits))).sum(axis=-1).mean())


ORACLE_FILES: dict[str, dict[str, Any]] = {
    "f32": {},
    "f16": {"weight_type": "f16", "shape": replace(PLAIN, mtp=True), "fused_gate_up": True},
    # Logits of the usual spread, and no choice of experts or blocks for a rounded row to fall to either side of.
    "q8_0": {
        "weight_type": "q8_0",
        "shape": replace(
            PLAIN,
            n_expert=4,
            n_expert_used=4,
            top_k=64,
            memory=NgramMemory(heads=1, vocab_sizes=(211, 199)),
            logit_std=1.0,
        ),
    },
}
MAX_MEAN_KL = {"f32": 1e-5, "f16": 1e-4, "q8_0": 1e-3}


@pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("name", ORACLE_FILES)
def test_logits_agree_with_llama_cpp(tmp_path: Path, name: str) -> None:
    path = write_tiny_qwen4exp(tmp_path / "model.gguf", **ORACLE_FILES[name])
    tokens = random_tokens()
    logits = our_logits(path, tokens)
    assert mean_divergence(oracle_logprobs(path, tokens, logits.shape[1]), logits) <= MAX_MEAN_KL[name]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("blk.1.hc_attn_inject.weight", lambda w: w[::-1].copy()),
        ("blk.2.hc_ffn_norm.weight", lambda w: np.roll(w, PLAIN.n_embd)),
        ("blk.0.ple_conv1d.weight", lambda taps: taps[:, ::-1].copy()),
        ("blk.0.ple_norm_query.weight", lambda w: np.roll(w, PLAIN.n_embd)),
        ("blk.3.indexer.k_norm.weight", lambda w: w[::-1].copy()),
        ("output_hc_norm.weight", lambda w: np.roll(w, PLAIN.n_embd)),
    ],
)
def test_comparison_notices_a_mistake(tmp_path: Path, name: str, mistake: Any) -> None:
    path = write_tiny_qwen4exp(tmp_path / "model.gguf")
    wrong = rewrite(path, tmp_path / "wrong.gguf", architecture="qwen4exp", tensors=edit_one(name, mistake))
    tokens = random_tokens()
    assert distances(our_logits(wrong, tokens, "f32"), Qwen4ExpForward(path).logits(tokens)).max() > 1e-2


def test_the_memory_table_may_be_of_any_type(tmp_path: Path) -> None:
    types = ["f32", "f16", "q8_0", "q4_0"]
    memory = NgramMemory(heads=1, vocab_sizes=(211, 199))
    tokens = random_tokens()
    for table_type in types:
        path = write_tiny_qwen4exp(
            tmp_path / f"{table_type}.gguf",
            replace(PLAIN, memory=memory),
            tensor_types={"per_layer_token_embd.weight": table_type},
        )
        assert distances(our_logits(path, tokens, "f32"), Qwen4ExpForward(path).logits(tokens)).max() <= 2e-5
