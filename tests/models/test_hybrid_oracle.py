"""Tiny random hybrids (`qwen35`, `qwen35moe`) against llama.cpp over the whole vocabulary, at every position.

As in test_families_oracle, with F16 KV on both sides. The negative controls change one tensor on our side only, each by
a mistake that a reader of these files could make, and must be noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, Model
from support.logits import log_softmax, position_logits
from support.rewritten_gguf import edit_one, rewrite
from support.tiny_hybrid import write_tiny_hybrid

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

N_TOKENS = 40
# Measured: 5e-8 to 2e-5, 3e-5, 5e-4. llama.cpp rounds activations to the type of F16 weights, and for Q8_0 to 8 bits by
# another rule than ours.
MAX_MEAN_KL = {"f32": 3e-5, "f16": 2e-4, "q8_0": 1e-3}

MOE: dict[str, Any] = {"architecture": "qwen35moe", "n_layer": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen35": {},
    "qwen35-f16": {"weight_type": "f16", "tied": True},
    "qwen35-one-key-head-per-value-head": {"n_key_head": 3, "n_value_head": 3, "n_layer": 4},
    "qwen35-three-value-heads-per-key-head": {"n_value_head": 6, "conv_kernel": 3, "n_layer": 4},
    "qwen35-array": {
        "n_layer": 4,
        "metadata": {"qwen35.attention.recurrent_layers": [False, True, True, False]},
    },
    "qwen35-ends-recurrent": {"n_layer": 4, "attention_interval": 3},
    "qwen35-mtp": {"n_layer": 4, "n_mtp": 1},
    "qwen35-yarn": {
        "n_layer": 4,
        "metadata": {
            "qwen35.rope.scaling.type": "yarn",
            "qwen35.rope.scaling.factor": 4.0,
            "qwen35.rope.scaling.original_context_length": 512,
        },
    },
    "qwen35moe": MOE,
    "qwen35moe-f16": {**MOE, "weight_type": "f16", "n_expert": 5, "n_expert_used": 3},
    "qwen35moe-fused": {**MOE, "fused_gate_up": True},
    "qwen35moe-mtp": {**MOE, "n_mtp": 1},
    # Logits of the usual spread, and no choice of experts for a rounded row to fall to either side of.
    "qwen35-q8_0": {"weight_type": "q8_0", "n_layer": 4, "logit_std": 1.0},
    "qwen35moe-q8_0": {**MOE, "weight_type": "q8_0", "logit_std": 1.0, "n_expert": 4, "n_expert_used": 4},
}


def random_tokens() -> list[int]:
    return np.random.default_rng(3).integers(3, 290, N_TOKENS).tolist()


def our_logits(path: Path) -> NDArray[np.float32]:
    model = Model(path)
    engine = Engine(model, n_ctx=512)
    logits = position_logits(engine, random_tokens())
    engine.close()
    model.close()
    return logits


def oracle_logprobs(path: Path, n_vocab: int) -> NDArray[np.float64]:
    tokens = random_tokens()
    logprobs = np.full((N_TOKENS, n_vocab), np.nan)
    with LlamaCppPeer(path, n_ctx=512, n_threads=1) as peer:
        for length in range(N_TOKENS):
            ids, values = zip(*peer.next_token_logprobs(tokens[: length + 1], n_vocab), strict=True)
            logprobs[length, list(ids)] = values
    assert np.isfinite(logprobs).all()
    return logprobs


def mean_divergence(expected: NDArray[np.float64], logits: NDArray[np.floating[Any]]) -> float:
    return float((np.exp(expected) * (expected - log_softmax(logits))).sum(axis=-1).mean())


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.float64]]:
    path = write_tiny_hybrid(tmp_path_factory.mktemp("oracle") / "model.gguf", n_layer=4)
    return path, oracle_logprobs(path, Model(path).n_vocab)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_agrees_with_llama_cpp(tmp_path: Path, variant: str) -> None:
    arguments = VARIANTS[variant]
    path = write_tiny_hybrid(tmp_path / "model.gguf", **arguments)
    logits = our_logits(path)
    divergence = mean_divergence(oracle_logprobs(path, logits.shape[1]), logits)
    assert divergence <= MAX_MEAN_KL[arguments.get("weight_type", "f32")]


def test_scales_beside_matrices_agree_with_llama_cpp(tmp_path: Path) -> None:
    path = write_tiny_hybrid(tmp_path / "model.gguf", "qwen35moe", n_layer=4)
    scales: dict[str, NDArray[np.float32]] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.startswith("blk.") and tensor.data.ndim > 1 and not re.search("conv1d|gate_inp", tensor.name):
            n = len(tensor.data) if tensor.data.ndim == 3 else 1  # one for each expert
            scales[tensor.name.removesuffix("weight") + "scale"] = np.linspace(0.7, 0.9, n, dtype=np.float32)
    scaled = rewrite(path, tmp_path / "scaled.gguf", architecture="qwen35moe", extra=scales)
    logits = our_logits(scaled)
    assert mean_divergence(oracle_logprobs(scaled, logits.shape[1]), logits) <= MAX_MEAN_KL["f32"]
    assert mean_divergence(log_softmax(logits), our_logits(path)) > 10 * MAX_MEAN_KL["f32"]


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_rounded_activations_are_no_further_from_exact_ones_than_llama_cpps(tmp_path: Path, architecture: str) -> None:
    """Random weights amplify rounding, and a mixture may choose another expert: here the measure is the same model with
    its weights decoded to F32, whose activations nobody rounds."""
    path = write_tiny_hybrid(tmp_path / "model.gguf", architecture, weight_type="q8_0")
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    decoded = rewrite(
        path,
        tmp_path / "decoded.gguf",
        architecture=architecture,
        tensors=lambda name, data: gguf.quants.dequantize(data, types[name]),
    )
    exact = log_softmax(our_logits(decoded))
    ours, oracle = our_logits(path), oracle_logprobs(path, exact.shape[1])
    assert mean_divergence(exact, ours) <= 2 * mean_divergence(exact, oracle)
    assert mean_divergence(oracle, ours) <= 2 * mean_divergence(exact, oracle)


def per_head(data: np.ndarray, n: int) -> np.ndarray:
    return data.reshape(n, -1, data.shape[-1])


def halves_for_heads(data: np.ndarray) -> np.ndarray:
    """attn_q as if all queries came before all gates."""
    return per_head(data, 8)[[0, 2, 4, 6, 1, 3, 5, 7]].reshape(data.shape)


def grouped_heads(data: np.ndarray) -> np.ndarray:
    """The value rows of attn_qkv as if neighbouring value heads shared a key head."""
    heads = per_head(data, 8)
    return heads[[0, 1, 2, 3, 4, 6, 5, 7]].reshape(data.shape)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("blk.3.attn_q.weight", halves_for_heads),
        ("blk.0.attn_qkv.weight", grouped_heads),
        ("blk.1.ssm_conv1d.weight", lambda taps: taps[:, ::-1].copy()),
        ("blk.1.ssm_a", lambda a: a * np.float32(1.1)),
        ("blk.2.ssm_dt.bias", np.zeros_like),
        ("blk.2.ssm_norm.weight", lambda w: w + np.float32(1)),
        ("blk.0.ssm_beta.weight", lambda w: w[::-1].copy()),
        ("blk.3.attn_k_norm.weight", lambda w: w[::-1].copy()),
    ],
)
def test_comparison_notices_a_mistake(
    four_layers: tuple[Path, NDArray[np.float64]],
    tmp_path: Path,
    name: str,
    mistake: Callable[[np.ndarray], np.ndarray],
) -> None:
    path, expected = four_layers
    wrong = rewrite(path, tmp_path / "wrong.gguf", architecture="qwen35", tensors=edit_one(name, mistake))
    assert mean_divergence(expected, our_logits(wrong)) > 10 * MAX_MEAN_KL["f32"]
