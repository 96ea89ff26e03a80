"""Perplexity of SmolLM2 against llama.cpp's log-probabilities of the same tokens after the same contexts.

Slow: the oracle lists its whole vocabulary once per scored token.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import GgufFile
from pyllama.tokenizer import Tokenizer
from pyllama.tools.perplexity import main
from support.command import Caller
from support.prompts import PROMPTS

N_CTX = 64
N_CHUNKS = 1

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")]


@pytest.mark.parametrize(
    ("model_fixture", "tolerance"),
    # Figures of so short a text: f16 or 8-bit rounding of activations moves single tokens by a few percent.
    [("smollm2_f16_path", 0.003), ("smollm2_q8_0_path", 0.01), ("smollm2_path", 0.03)],
)
def test_perplexity_is_that_of_llama_cpp(
    model_fixture: str,
    tolerance: float,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path: Path = request.getfixturevalue(model_fixture)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(PROMPTS.values()), encoding="utf-8")
    argv = ("-m", path, "-f", text, "-c", N_CTX, "--chunks", N_CHUNKS)
    out = Caller(capfd, monkeypatch, str(tmp_path)).succeed(main, *argv)
    ours = float(re.search(r"PPL = (\S+)", out)[1])

    tokens = Tokenizer.from_metadata(GgufFile(path).metadata).encode(text.read_text(encoding="utf-8"), add_special=True)
    surprise = []
    with LlamaCppPeer(path, n_threads=1) as peer:
        for start in range(0, N_CHUNKS * N_CTX, N_CTX):
            for end in range(start + N_CTX // 2 + 1, start + N_CTX):
                listed = dict(peer.next_token_logprobs(tokens[start:end], 49152))
                surprise.append(-listed[tokens[end]])
    assert ours == pytest.approx(np.exp(np.mean(surprise)), rel=tolerance)
