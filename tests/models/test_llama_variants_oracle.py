"""Tiny random `llama` models against llama.cpp: weight types, fused and biased projections, tied output, rope.

The whole vocabulary is compared at each of 40 positions, with F16 KV on both sides. The negative control is one wrong
rope base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, Model
from support.logits import kl_divergence, position_logits
from support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

N_TOKENS = 40
# Both sides round K and V to f16; sums differ in order. A plain NumPy forward pass measures 3e-6 to 6e-6 against the
# oracle. The oracle rounds activations to bf16 beside bf16 weights (8 bits of mantissa; NumPy pass: 1e-4) and to 8-bit
# blocks beside quantised ones (1e-3 to 7e-3 with random weights, which amplify it). The bounds leave a factor of 5;
# for quantised types 1.5.
MAX_MEAN_KL_FLOAT = 3e-5
MAX_MEAN_KL_BF16 = 5e-4
MAX_MEAN_KL_QUANTISED = 1e-2

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-heads": {"n_head": 8, "n_head_kv": 2, "n_embd": 128},
    "one-kv-head": {"n_head_kv": 1},
    "fused-qkv": {"fused_qkv": True},
    "qkv-bias": {"qkv_bias": True},
    "fused-qkv-bias": {"fused_qkv": True, "qkv_bias": True},
    "tied-output": {"tied": True},
    "wide-heads": {"head_dim": 32},
    "rope-divisors": {"rope_freqs": [1.0 + 0.5 * pair for pair in range(8)]},
    "rope-base": {"rope_freq_base": 500_000.0},
    "rope-linear": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "rope-legacy-linear": {"metadata": {"llama.rope.scale_linear": 2.0}},
    "rope-none": {"metadata": {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}},
    "rope-yarn": {
        "metadata": {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 512,
        }
    },
    "mixed-types": {"weight_type": "f16", "tensor_types": {"ffn_down.weight": "f32", "token_embd.weight": "bf16"}},
    "f32": {"weight_type": "f32"},
    "f16": {"weight_type": "f16"},
}
QUANTISED: dict[str, dict[str, Any]] = {
    **{weight_type: {"weight_type": weight_type} for weight_type in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")},
    **{
        weight_type: {"weight_type": weight_type, "n_embd": 256, "n_ff": 256}
        for weight_type in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
    },
    "q4_k-with-q6_k-down": {
        "weight_type": "q4_k",
        "n_embd": 256,
        "n_ff": 512,
        "tensor_types": {"ffn_down.weight": "q6_k"},
    },
}


def random_tokens() -> list[int]:
    return np.random.default_rng(3).integers(3, 290, N_TOKENS).tolist()


def oracle_logprobs(path: Path, tokens: list[int], n_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probabilities), each `[positions, n_vocab]`, falling."""
    with LlamaCppPeer(path, n_ctx=512, n_threads=1) as peer:
        rows = [peer.next_token_logprobs(tokens[: length + 1], n_vocab) for length in range(len(tokens))]
    return np.asarray([[token for token, _ in row] for row in rows]), np.asarray(
        [[value for _, value in row] for row in rows]
    )


def mean_kl(path: Path, **engine_arguments: Any) -> float:
    tokens = random_tokens()
    model = Model(path)
    engine = Engine(model, n_ctx=512, **engine_arguments)
    logits = position_logits(engine, tokens)
    engine.close()
    model.close()
    ids, logprobs = oracle_logprobs(path, tokens, logits.shape[1])
    assert ids.shape == logits.shape
    return float(kl_divergence(ids, logprobs, logits).mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_float_variant_agrees_with_llama_cpp(tmp_path: Path, variant: str) -> None:
    assert mean_kl(write_tiny_llama(tmp_path / "model.gguf", **VARIANTS[variant])) <= MAX_MEAN_KL_FLOAT


def test_bf16_weights_agree_with_llama_cpp(tmp_path: Path) -> None:
    assert mean_kl(write_tiny_llama(tmp_path / "model.gguf", weight_type="bf16")) <= MAX_MEAN_KL_BF16


@pytest.mark.parametrize("variant", QUANTISED)
def test_quantised_variant_agrees_with_llama_cpp(tmp_path: Path, variant: str) -> None:
    assert mean_kl(write_tiny_llama(tmp_path / "model.gguf", **QUANTISED[variant])) <= MAX_MEAN_KL_QUANTISED


def test_comparison_notices_a_wrong_rope_base(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf")
    assert mean_kl(path, rope_freq_base=9_000.0) > MAX_MEAN_KL_QUANTISED
