"""The fast paths against the plain reference implementation, and the instruction sets against each other.

Greedy text must be the same as with reference operations; among the fast instruction sets the logits must be the same
bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import Engine, Model, backend_info
from support.logits import assert_same_bits, greedy_tokens, position_logits
from support.logprob_goldens import GoldenPrompt, read_goldens
from support.tiny_llama import write_tiny_llama

N_TOKENS = 48
QUICK_PROMPTS = ("chat-question", "python-function")  # the reference is slow; the slow test takes all twenty
WEIGHT_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q6_k")
FAST_ISAS = tuple(isa for isa in backend_info()["available"] if isa != "reference")


def greedy_with(path: Path, isa: str, prompts: list[GoldenPrompt]) -> dict[str, list[int]]:
    model = Model(path, isa=isa)
    engine = Engine(model, n_ctx=1024)
    texts = {prompt.name: greedy_tokens(engine, prompt.tokens, N_TOKENS) for prompt in prompts}
    engine.close()
    model.close()
    return texts


def logits_with(path: Path, isa: str, tokens: list[int]) -> np.ndarray:
    """Logits of every position as one prompt, then of the first 24 token by token: both kinds of kernel."""
    model = Model(path, isa=isa)
    engine = Engine(model, n_ctx=512)
    logits = np.concatenate([position_logits(engine, tokens), position_logits(engine, tokens[:24], chunk=1)])
    engine.close()
    model.close()
    return logits


def test_greedy_text_is_that_of_the_reference(smollm2_path: Path) -> None:
    prompts = [golden for golden in read_goldens() if golden.name in QUICK_PROMPTS]
    assert len(prompts) == len(QUICK_PROMPTS)
    assert greedy_with(smollm2_path, "auto", prompts) == greedy_with(smollm2_path, "reference", prompts)


@pytest.mark.slow
def test_greedy_text_of_all_twenty_prompts_is_that_of_the_reference(smollm2_path: Path) -> None:
    prompts = read_goldens()
    fast, reference = greedy_with(smollm2_path, "auto", prompts), greedy_with(smollm2_path, "reference", prompts)
    different = [name for name in fast if fast[name] != reference[name]]
    assert not different, f"{len(different)} of {len(prompts)} differ: {different}"


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_instruction_sets_give_the_same_bits_on_a_tiny_model(tmp_path: Path, weight_type: str) -> None:
    width = 256 if weight_type.endswith("_k") else 96  # 96: a whole number of blocks of 32 but not of vectors of 64
    path = write_tiny_llama(tmp_path / "tiny.gguf", weight_type=weight_type, n_embd=width, n_ff=2 * width)
    tokens = np.random.default_rng(7).integers(3, 290, 100).tolist()
    expected = logits_with(path, FAST_ISAS[0], tokens)
    for isa in FAST_ISAS[1:]:
        assert_same_bits(logits_with(path, isa, tokens), expected, f"{isa} against {FAST_ISAS[0]}")


def test_instruction_sets_give_the_same_bits_on_smollm2(smollm2_path: Path, smollm2_q8_0_path: Path) -> None:
    tokens = next(golden.tokens for golden in read_goldens() if golden.name == "english-story")[:40]
    for path in (smollm2_path, smollm2_q8_0_path):
        expected = logits_with(path, FAST_ISAS[0], tokens)
        for isa in FAST_ISAS[1:]:
            assert_same_bits(logits_with(path, isa, tokens), expected, f"{path.name}: {isa} against {FAST_ISAS[0]}")
