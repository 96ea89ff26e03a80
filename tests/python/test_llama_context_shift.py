"""`Llama(context_shift=True)` on the native engine: answers longer than the context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyllama import InvalidArgument
from pyllama._engine import Engine, Model
from pyllama.llama import Llama
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama

N_CTX = 256
PROMPT = list(range(20, 120))


def expected_tokens(path: Path, n_tokens: int, n_keep: int) -> tuple[list[int], int]:
    """Greedy continuation of PROMPT by the engine alone, and the number of tokens dropped."""
    model = Model(path)
    engine = Engine(model, n_ctx=N_CTX)
    tokens, n_discarded = list(PROMPT), 0
    engine.decode(tokens)
    drawn: list[int] = []
    while len(drawn) < n_tokens:
        drawn.append(int(np.argmax(engine.logits()[-1])))
        held = engine.length(0)
        if held + 1 >= N_CTX:
            discarded = (held - n_keep) // 2
            engine.shift(0, n_keep, discarded)
            n_discarded += discarded
        engine.decode(drawn[-1:])
    engine.close()
    model.close()
    return drawn, n_discarded


@pytest.mark.parametrize(("n_keep", "kept"), [(0, 0), (30, 30), (-1, 100)])
def test_answers_go_on_beyond_the_context(tiny_llama_path: Path, n_keep: int, kept: int) -> None:
    expected, _ = expected_tokens(tiny_llama_path, 601, kept)
    with Llama(tiny_llama_path, n_ctx=N_CTX, n_threads=1, context_shift=True, n_keep=n_keep) as llm:
        stream = llm.generate(PROMPT, temp=0.0)
        drawn = [token for token, _ in zip(stream, range(600), strict=False)]
        stream.close()
        assert drawn == expected[:600]
        assert llm.n_tokens + llm.n_discarded in (len(PROMPT) + 599, len(PROMPT) + 600)
        assert llm.n_tokens < N_CTX
        # The object goes on as any other: what was moved is not taken for the beginning of another prompt.
        again = llm.create_completion(PROMPT, max_tokens=5, temperature=0, logprobs=1)["choices"][0]
    with Llama(tiny_llama_path, n_ctx=N_CTX, n_threads=1) as fresh:
        assert again == fresh.create_completion(PROMPT, max_tokens=5, temperature=0, logprobs=1)["choices"][0]


def test_a_completion_may_ask_for_more_than_the_context(tmp_path: Path) -> None:
    # A letter is always the most likely token, so that nothing ends the answer.
    path = write_tiny_llama(tmp_path / "model.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    options = {"temperature": 0, "logit_bias": {68: 1000.0}}
    with Llama(path, n_ctx=N_CTX, n_threads=1, context_shift=True) as llm:
        answer = llm.create_completion("the world", max_tokens=700, **options)
        assert answer["choices"][0]["text"] == "A" * 700
        assert answer["choices"][0]["finish_reason"] == "length"
        assert llm.n_discarded > 500
        assert llm.input_ids[0] == llm.token_bos()
    with Llama(path, n_ctx=N_CTX, n_threads=1) as llm:
        answer = llm.create_completion("the world", max_tokens=700, **options)
        assert answer["usage"]["total_tokens"] == N_CTX


def test_what_excludes_a_shift_is_refused(tiny_llama_path: Path, tmp_path: Path) -> None:
    hybrid = write_tiny_hybrid(tmp_path / "hybrid.gguf")
    with pytest.raises(InvalidArgument, match="qwen35"):
        Llama(hybrid, n_ctx=N_CTX, context_shift=True)
    with pytest.raises(InvalidArgument, match="logits_all"):
        Llama(tiny_llama_path, n_ctx=N_CTX, context_shift=True, logits_all=True)
    with pytest.raises(InvalidArgument, match="n_keep"):
        Llama(tiny_llama_path, n_ctx=N_CTX, context_shift=True, n_keep=-2)
