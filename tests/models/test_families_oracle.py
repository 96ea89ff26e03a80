"""Tiny random models of qwen2, qwen3, gemma3 and those with experts, against llama.cpp over the whole vocabulary.

As in test_llama_variants_oracle: 40 positions, F16 KV on both sides, float weights, because random weights amplify
the oracle's rounding of activations. Negative controls change one hyperparameter on our side only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, Model
from support.logits import kl_divergence, position_logits
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

N_TOKENS = 40
MAX_MEAN_KL = 3e-5  # measured: 1e-6 to 6e-6

GEMMA = {"architecture": "gemma3", "n_layer": 7, "head_dim": 32, "tied": True}
WINDOW = {"gemma3.attention.sliding_window": 8}
PATTERN = "gemma3.attention.sliding_window_pattern"
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {"architecture": "qwen2"},
    "qwen2-tied-yarn": {
        "architecture": "qwen2",
        "tied": True,
        "metadata": {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 512,
        },
    },
    "qwen3": {"architecture": "qwen3", "head_dim": 32},
    "qwen3-f16": {"architecture": "qwen3", "weight_type": "f16", "tied": True},
    "qwen3moe": {"architecture": "qwen3moe", "head_dim": 32},
    "qwen3moe-one-of-three": {"architecture": "qwen3moe", "n_expert": 3, "n_expert_used": 1},
    "qwen3moe-all-of-four": {"architecture": "qwen3moe", "n_expert": 4, "n_expert_used": 4, "weight_type": "f16"},
    "mixtral": {"architecture": "llama"},
    "gemma3": {**GEMMA, "metadata": WINDOW},
    "gemma3-without-window": GEMMA,
    "gemma3-period": {**GEMMA, "metadata": {**WINDOW, PATTERN: 2}},
    "gemma3-array": {**GEMMA, "metadata": {**WINDOW, PATTERN: [True, False, False, True, True, False, True]}},
    "gemma3-rope": {
        **GEMMA,
        "metadata": {
            **WINDOW,
            "gemma3.rope.freq_base_swa": 500.0,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    },
    "gemma3-capped": {**GEMMA, "tied": False, "metadata": {**WINDOW, "gemma3.final_logit_softcapping": 3.0}},
}


def mean_kl(path: Path, **overrides: int | float) -> float:
    tokens = np.random.default_rng(3).integers(3, 290, N_TOKENS).tolist()
    model = Model(path, kv_overrides=overrides)
    engine = Engine(model, n_ctx=512)
    logits = position_logits(engine, tokens)
    engine.close()
    model.close()
    with LlamaCppPeer(path, n_ctx=512, n_threads=1) as peer:
        rows = [peer.next_token_logprobs(tokens[: length + 1], logits.shape[1]) for length in range(N_TOKENS)]
    ids, logprobs = (np.asarray([[entry[i] for entry in row] for row in rows]) for i in range(2))
    assert ids.shape == logits.shape
    return float(kl_divergence(ids, logprobs, logits).mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_agrees_with_llama_cpp(tmp_path: Path, variant: str) -> None:
    assert mean_kl(write_tiny_model(tmp_path / "model.gguf", **VARIANTS[variant])) <= MAX_MEAN_KL


@pytest.mark.parametrize(
    ("variant", "key", "value"),
    [
        ("gemma3", "gemma3.attention.sliding_window", 9),
        ("gemma3", "gemma3.rope.freq_base_swa", 9_000.0),
        ("gemma3-capped", "gemma3.final_logit_softcapping", 3.1),
        ("qwen3moe", "qwen3moe.expert_used_count", 3),
    ],
)
def test_comparison_notices_a_wrong_hyperparameter(tmp_path: Path, variant: str, key: str, value: int | float) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", **VARIANTS[variant])
    assert mean_kl(path, **{key: value}) > 10 * MAX_MEAN_KL
