"""Probabilities after context shifts against llama.cpp: the same tokens are dropped and the rest moves in the same way.

A bias makes both sides draw the same letter again and again; the probabilities are those before the bias. F16 KV on
both sides, so that keys are rounded once per shift on both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, Model
from support.logits import kl_divergence
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

N_CTX, N_PROMPT, N_PREDICT = 256, 200, 200
MAX_MEAN_KL = 3e-4  # measured: 3e-6 to 1.4e-4

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_freqs": np.linspace(1, 8, 8).tolist()},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "head_dim": 32},
    "gemma3": {"architecture": "gemma3", "n_layer": 2, "head_dim": 32, "tied": True},
}


def our_logits(path: Path, prompt: list[int], letter: int, n_keep: int) -> np.ndarray:
    """After the prompt and after each drawn letter but the last, by the server's arithmetic."""
    model = Model(path)
    engine = Engine(model, n_ctx=N_CTX)
    engine.decode(prompt)
    rows = [engine.logits()[0]]
    while len(rows) < N_PREDICT:
        held = engine.length(0)
        if held + 1 >= N_CTX:
            engine.shift(0, n_keep, (held - n_keep) // 2)
        engine.decode([letter])
        rows.append(engine.logits()[0])
    engine.close()
    model.close()
    return np.stack(rows)


def write_variant(path: Path, variant: str) -> Path:
    options = VARIANTS[variant]
    return write_tiny_llama(path, **options) if variant == "llama" else write_tiny_model(path, **options)


def divergence_after_shifts(path: Path, n_keep: int, our_n_keep: int) -> np.ndarray:
    """Of each generated token; checks those before the first shift."""
    prompt = np.random.default_rng(8).integers(3, 290, N_PROMPT).tolist()
    with LlamaCppPeer(path, n_ctx=N_CTX, n_threads=1, context_shift=True) as peer:
        letter = peer.tokenize("a")[0]
        logits = our_logits(path, prompt, letter, our_n_keep)
        body = {"prompt": prompt, "n_predict": N_PREDICT, "n_probs": logits.shape[1], "temperature": 0.0}
        answer = peer.post("/completion", {**body, "n_keep": n_keep, "logit_bias": [[letter, 1000.0]]})
    assert answer["truncated"]
    rows = [row["top_logprobs"] for row in answer["completion_probabilities"]]
    assert len(rows) == N_PREDICT
    ids, logprobs = (np.asarray([[entry[key] for entry in row] for row in rows]) for key in ("id", "logprob"))
    divergence = kl_divergence(ids, logprobs, logits)
    n_before = N_CTX - N_PROMPT
    assert divergence[:n_before].mean() <= MAX_MEAN_KL
    return divergence[n_before:]


@pytest.mark.parametrize("n_keep", [0, 17])
@pytest.mark.parametrize("variant", VARIANTS)
def test_probabilities_after_shifts_agree_with_llama_cpp(tmp_path: Path, variant: str, n_keep: int) -> None:
    path = write_variant(tmp_path / "model.gguf", variant)
    assert divergence_after_shifts(path, n_keep, n_keep).mean() <= MAX_MEAN_KL


def test_the_comparison_notices_one_other_token(tmp_path: Path) -> None:
    path = write_variant(tmp_path / "model.gguf", "llama")
    assert divergence_after_shifts(path, 17, 18).mean() > 5 * MAX_MEAN_KL
