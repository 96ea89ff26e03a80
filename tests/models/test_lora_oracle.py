"""LoRA adapters beside llama.cpp with the same files: probabilities after a prompt, scale by scale.

test_lora compares with merged models; here the meaning of alpha, ranks, experts and embeddings is llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, LoraAdapter, Model
from support.adapters import LOOKED_UP, random_matrices, write_adapter
from support.logits import kl_divergence, position_logits
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

MOST_KL = 1e-4  # measured: up to 1.5e-5; llama.cpp keeps keys and values in F16
PROMPT = np.random.default_rng(12).integers(3, 290, 30).tolist()
SCALES = ((0.0, 0.0), (1.0, 0.0), (0.4, -0.8))

CASES: dict[str, tuple[str, Callable[..., Path], dict[str, Any]]] = {
    "llama": ("llama", write_tiny_llama, {}),
    "mixtral": ("llama", write_tiny_model, {"architecture": "llama"}),
    "gemma3": ("gemma3", write_tiny_model, {"architecture": "gemma3", "head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_probabilities_agree_with_llama_cpp(case: str, tmp_path: Path) -> None:
    architecture, write, arguments = CASES[case]
    path = write(tmp_path / "model.gguf", **arguments)
    names = {
        "1": lambda name: name.startswith("blk.") and "norm" not in name and "ffn_gate_inp" not in name,
        "2": lambda name: name in (LOOKED_UP, "output.weight", "blk.1.attn_v.weight"),
    }
    files = [
        write_adapter(tmp_path / f"{name}.gguf", random_matrices(path, chosen, rank=rank), architecture=architecture)
        for (name, chosen), rank in zip(names.items(), (4, 6), strict=True)
    ]
    model = Model(path)
    engine = Engine(model, n_ctx=256, adapters=[LoraAdapter(model, file) for file in files])
    plain = position_logits(engine, PROMPT)[-1:]
    with LlamaCppPeer(path, n_ctx=256, n_threads=1, adapters=files) as peer:
        letter = peer.tokenize("a")[0]
        for scales in SCALES:
            engine.clear(0)
            engine.set_adapters(0, scales)
            ours = position_logits(engine, PROMPT)[-1:]
            body = {"prompt": PROMPT, "n_predict": 1, "n_probs": model.n_vocab, "temperature": 0.0}
            lora = [{"id": index, "scale": scale} for index, scale in enumerate(scales)]
            answer = peer.post("/completion", {**body, "logit_bias": [[letter, 1000.0]], "lora": lora})
            entries = answer["completion_probabilities"][0]["top_logprobs"]
            ids, logprobs = (np.asarray([[entry[key] for entry in entries]]) for key in ("id", "logprob"))
            assert kl_divergence(ids, logprobs, ours)[0] < MOST_KL, scales
            if any(scales):
                assert kl_divergence(ids, logprobs, plain)[0] > 100 * MOST_KL, "the adapters must matter"
    engine.close()
    model.close()
