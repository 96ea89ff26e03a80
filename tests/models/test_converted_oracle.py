"""Random checkpoints of every family, converted to F16 and to Q8_0, against llama.cpp running the same files.

Over the whole vocabulary, at every position, with F16 KV on both sides. The logits have the usual spread, and a row
sees all experts and all blocks, so that no choice tips over where llama.cpp rounds activations by another rule than
ours. The negative control is the same file with other rope bases on our side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, GgufFile, Model
from pyllama.tools.convert_hf_to_gguf import main
from support.checkpoints import CONFIGS, safetensors_bytes, weights, write_checkpoint
from support.logits import kl_divergence, position_logits

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

N_TOKENS = 40
# Measured: 6e-7 to 2e-6, 2e-4 to 3e-4.
MAX_MEAN_KL = {"f16": 1e-4, "q8_0": 1e-3}
MIN_MEAN_KL_OF_A_MISTAKE = 1e-2  # measured: 1.5e-2 and more
WRONG_ROPE_BASE = 10.0


@dataclass(frozen=True)
class Family:
    """config: rows of whole Q8_0 blocks nearly everywhere. scales: factors of tensors of the checkpoint."""

    config: dict[str, Any]
    scales: Mapping[str, float] = field(default_factory=lambda: {"lm_head.weight": 1 / 2.4})


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 64}
# Half of a head's features rotate, and attention is not the last layer only: else a wrong rope would change little.
HALF_ROTARY = {**CONFIGS["qwen35"]["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
HYBRID = {
    **{"rope_parameters": HALF_ROTARY, "full_attention_interval": 2},
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 4},
}
# With embeddings as small as in the golden checkpoints 8-bit rounding grows through the delta nets: 1.2e-3 between the
# engines, while either was 3e-3 from the same weights with activations that nobody rounds.
HYBRID_SCALES = {"lm_head.weight": 1 / 2.4, "model.embed_tokens.weight": 3.0}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(CONFIGS["llama"]),
    "mixtral": Family(CONFIGS["mixtral"] | {"num_experts_per_tok": 4}),
    "qwen2": Family(CONFIGS["qwen2"]),
    "qwen3": Family(CONFIGS["qwen3"]),
    "qwen3moe": Family(CONFIGS["qwen3moe"] | EXPERTS),
    "gemma3": Family(CONFIGS["gemma3"], {"model.embed_tokens.weight": 1 / 2.4}),
    "qwen35": Family(CONFIGS["qwen35"] | HYBRID, HYBRID_SCALES),
    "qwen35moe": Family(CONFIGS["qwen35moe"] | EXPERTS | HYBRID, HYBRID_SCALES),
    "qwen4exp": Family(
        {
            **CONFIGS["qwen4exp"],
            **EXPERTS,
            **{"hc_lowrank": 32, "indexer_budget": 64, "heads_per_ngram": 1, "rope_parameters": HALF_ROTARY},
            **{"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        },
        {"lm_head.weight": 1 / 1.1},
    ),
}


def converted(folder: Path, family: Family, outtype: str) -> Path:
    write_checkpoint(folder, family.config)
    tensors = dict(weights(family.config))
    for name, scale in family.scales.items():
        tensors[name] = tensors[name] * np.float32(scale)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    path = folder / "out.gguf"
    assert main([str(folder), "--outtype", outtype, "--outfile", str(path)]) == 0
    return path


def share_of_bytes(file: GgufFile, type_name: str) -> float:
    sizes = {tensor.name: len(file.tensor_bytes(tensor.name)) for tensor in file.tensors}
    return sum(sizes[tensor.name] for tensor in file.tensors if tensor.type_name == type_name) / sum(sizes.values())


def our_logits(path: Path, tokens: list[int], **overrides: float) -> NDArray[np.float32]:
    model = Model(path, kv_overrides=overrides)
    engine = Engine(model, n_ctx=256, n_threads=1)
    logits = position_logits(engine, tokens)
    engine.close()
    model.close()
    return logits


@pytest.mark.parametrize("outtype", MAX_MEAN_KL)
@pytest.mark.parametrize("name", FAMILIES)
def test_converted_file_agrees_with_llama_cpp_which_notices_a_wrong_rope(
    tmp_path: Path, name: str, outtype: str
) -> None:
    path = converted(tmp_path, FAMILIES[name], outtype)
    file = GgufFile(path)
    assert share_of_bytes(file, outtype) > 0.9
    tokens = np.random.default_rng(3).integers(3, 290, N_TOKENS).tolist()
    logits = our_logits(path, tokens)
    assert 0.8 < logits.std() < 1.2
    with LlamaCppPeer(path, n_ctx=256, n_threads=1) as peer:
        rows = [peer.next_token_logprobs(tokens[: length + 1], logits.shape[1]) for length in range(N_TOKENS)]
    ids, logprobs = (np.asarray([[entry[i] for entry in row] for row in rows]) for i in range(2))
    assert ids.shape == logits.shape
    assert kl_divergence(ids, logprobs, logits).mean() <= MAX_MEAN_KL[outtype]

    bases = [key for key in file.metadata if ".rope.freq_base" in key]
    wrong = our_logits(path, tokens, **dict.fromkeys(bases, WRONG_ROPE_BASE))
    assert kl_divergence(ids, logprobs, wrong).mean() > MIN_MEAN_KL_OF_A_MISTAKE
