"""Gemma 3 270M against llama.cpp: real weights, sliding windows of 512 tokens, a SentencePiece vocabulary of 262144.

With the file's own types both sides round activations to 8 bits, each in its way; the same weights as F16 leave only
the rounding of K and V.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama import Llama
from pyllama._engine import Engine, Model
from pyllama.tools.perplexity import main as perplexity
from support import model_cache
from support.command import Caller
from support.logits import greedy_tokens, kl_divergence, position_logits
from support.prompts import PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")]

N_CTX = 1024
POSITIONS = (0, 5, 50, 300, 510, 511, 512, 513, 600, 699)  # around the window's first step and far beyond
N_SCORED = 256  # tokens of a chunk, of which the second half counts
# Of the perplexity. With 8-bit activations a token moves by about 0.1 nats, so few of them by about 1 %: ours is 43.20,
# llama.cpp's 42.61, that of the same weights as F16 43.29.
MAX_DISTANCE = {"q4_k_m": 3e-2, "f16": 3e-3}
MAX_MEAN_KL = {"q4_k_m": 3e-2, "f16": 5e-5}  # measured: 7e-3, 1e-5


@pytest.fixture(scope="module")
def q4_k_m_path() -> Path:
    return model_cache.cached_or_skip(model_cache.GEMMA3_270M_Q4_K_M)


@pytest.fixture(scope="module", params=MAX_MEAN_KL)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, q4_k_m_path: Path) -> Path:
    return q4_k_m_path if kind == "q4_k_m" else model_cache.cached_as(kind, q4_k_m_path)


@pytest.fixture(scope="module")
def peer(path: Path) -> Iterator[LlamaCppPeer]:
    with LlamaCppPeer(path, n_ctx=N_CTX, n_threads=2) as peer:
        yield peer


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = Engine(Model(path), n_ctx=N_CTX)
    yield engine
    engine.close()


def test_tokens_equal_those_of_llama_cpp(path: Path, peer: LlamaCppPeer) -> None:
    llama = Llama(path, n_ctx=256)
    for name, text in PROMPTS.items():
        assert llama.tokenize(text.encode()) == peer.tokenize(text, parse_special=False, add_special=True), name
    llama.close()


def test_logits_agree_on_both_sides_of_the_window(kind: str, engine: Engine, peer: LlamaCppPeer) -> None:
    tokens = peer.tokenize("\n\n".join(PROMPTS.values()), add_special=True)[: POSITIONS[-1] + 1]
    assert len(tokens) == POSITIONS[-1] + 1
    logits = position_logits(engine, tokens)[list(POSITIONS)]
    rows = [peer.next_token_logprobs(tokens[: position + 1], 300) for position in POSITIONS]
    ids, logprobs = (np.asarray([[entry[i] for entry in row] for row in rows]) for i in range(2))
    assert kl_divergence(ids, logprobs, logits).mean() <= MAX_MEAN_KL[kind]


def test_perplexity_is_that_of_llama_cpp(
    kind: str,
    path: Path,
    peer: LlamaCppPeer,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(PROMPTS.values()), encoding="utf-8")
    argv = ("-m", path, "-f", text, "-c", N_SCORED, "--chunks", 1)
    out = Caller(capfd, monkeypatch, str(tmp_path)).succeed(perplexity, *argv)
    ours = float(re.search(r"PPL = (\S+)", out)[1])
    tokens = peer.tokenize(text.read_text(encoding="utf-8"), add_special=True, parse_special=False)[:N_SCORED]
    scored = range(N_SCORED // 2 + 1, N_SCORED)
    surprise = [-peer.token_logprob(tokens[:position], tokens[position]) for position in scored]
    assert ours == pytest.approx(np.exp(np.mean(surprise)), rel=MAX_DISTANCE[kind])


def test_greedy_text_beyond_the_window_equals_that_of_llama_cpp(kind: str, engine: Engine, peer: LlamaCppPeer) -> None:
    if kind != "f16":
        pytest.skip("8-bit activations decide near ties differently")
    tokens = peer.tokenize("\n\n".join(PROMPTS.values()), add_special=True)[:600]
    for prompt in (tokens[:9], tokens[:70], tokens):
        assert greedy_tokens(engine, prompt, 32) == peer.greedy(prompt, 32)
