"""DFlash and DFlash2 against llama.cpp: the same target and drafter files, greedy, give the same texts, and of as many
drafted tokens as many stand.

A random drafter never guesses one of 300 tokens. So the targets say but six: all other rows of the output matrix,
which the drafter shares, are small, and the six are three and their opposites, so that one of them always wins clearly.
K and V are F32 on both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from engine_server import EngineServer

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from support.tiny_dflash import write_tiny_dflash
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

SPOKEN, OPPOSITES = [40, 120, 230], [77, 199, 260]
N_PREDICT = 60


def write_target(path: Path, architecture: str) -> Path:
    if architecture == "llama":
        write_tiny_llama(path, n_layer=4)
    elif architecture.startswith("qwen35"):
        write_tiny_hybrid(path, architecture, n_layer=4)
    else:
        write_tiny_model(path, architecture, n_layer=4)
    head = next(tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == "output.weight")
    spoken = head.data[SPOKEN].copy()
    head.data[:] *= 0.001
    head.data[SPOKEN], head.data[OPPOSITES] = spoken, -spoken
    return path


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(20261130)
    return [rng.integers(3, 290, length).tolist() for length in (1, 12, 30, 70, 150)]


DRAFTERS: dict[str, dict[str, Any]] = {
    "second": {"target_layers": (1, 3), "window": None},
    "second, windowed": {"target_layers": (3, 1, 2), "window": 32},
    "first": {"target_layers": (1, 3), "window": None, "version": 1},
}


Answer = tuple[list[int], int, int]  # tokens, drafted, accepted


def answers(server: LlamaCppPeer | EngineServer) -> list[Answer]:
    found = []
    for prompt in prompts():
        body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0.0, "cache_prompt": False}
        body |= {"return_tokens": True, "ignore_eos": True}
        is_peer = isinstance(server, LlamaCppPeer)
        answer = server.post("/completion", body) if is_peer else server.complete(**body)
        timings = answer["timings"]
        found.append((answer["tokens"], timings["draft_n"], timings["draft_n_accepted"]))
    return found


def own_answers(target: Path, drafter: Path, n_draft: int) -> list[Answer]:
    server = EngineServer(
        *(target, "-np", "1", "-ctk", "f32", "-ctv", "f32", "--spec-type", "draft-dflash", "-md", str(drafter)),
        *("--spec-draft-n-max", str(n_draft), "--no-spec-adaptive"),
    )
    try:
        return answers(server)
    finally:
        server.close()


def n_equal(found: list[Answer], expected: list[Answer]) -> int:
    return sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("architecture", "drafter", "n_draft"),
    [
        ("llama", "second, windowed", 3),
        ("llama", "first", 7),
        ("qwen3", "second", 5),
        ("qwen35", "second", 7),
        ("qwen35", "second, windowed", 7),
        ("qwen35moe", "second", 2),
        ("qwen35moe", "first", 7),
    ],
)
def test_as_much_of_the_drafts_stands_as_with_llama_cpp(
    tmp_path: Path, architecture: str, drafter: str, n_draft: int
) -> None:
    target = write_target(tmp_path / "target.gguf", architecture)
    file = write_tiny_dflash(tmp_path / "drafter.gguf", **DRAFTERS[drafter])
    with LlamaCppPeer(
        target, n_ctx=512, n_threads=1, f32_cache=True, spec_type="draft-dflash", drafter=file, n_draft=n_draft
    ) as peer:
        expected = answers(peer)
    found = own_answers(target, file, n_draft)
    assert n_equal(found, expected) >= len(expected) - 1  # one near tie; llama.cpp is off by 1e-3 in a logit
    assert sum(n_accepted for _, _, n_accepted in found) > 20


def test_a_drafter_that_is_a_little_different_gets_other_counts(tmp_path: Path) -> None:
    """So that equal counts say something: one convolution of one layer is left out."""
    target = write_target(tmp_path / "target.gguf", "llama")
    file = write_tiny_dflash(tmp_path / "drafter.gguf", **DRAFTERS["second"])
    found = own_answers(target, file, 7)
    kernel = next(tensor for tensor in gguf.GGUFReader(file, "r+").tensors if tensor.name == "blk.1.attn_conv_base")
    kernel.data[1, 1] = 0.0
    assert n_equal(own_answers(target, file, 7), found) < 2
