"""Prompts for filling in the middle are those of llama.cpp's server, on a tiny model with such tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from pyllama.server.infill_prompt import infill_prompt, read_infill
from pyllama.tokenizer import Tokenizer
from support.rewritten_gguf import rewrite
from support.tiny_llama import write_tiny_llama

xllamacpp = pytest.importorskip("xllamacpp", reason="needs the llama.cpp wheel")

N_CTX, N_BATCH = 2048, 512
NAMES = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")


def extra(name: str | None, n_words: int) -> dict[str, str]:
    text = "".join(f" the{i}" for i in range(n_words))
    return {"text": text} if name is None else {"text": text, "filename": name}


BODIES: tuple[dict[str, Any], ...] = (
    {"input_prefix": "def f(", "input_suffix": "return x\n"},
    {"input_prefix": "", "input_suffix": "", "prompt": "typed"},
    {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "input_extra": [extra("a.py", 3), extra(None, 2)]},
    {"input_prefix": "word " * 700, "input_suffix": "tail " * 300, "prompt": "c", "input_extra": [extra("x", 5)]},
)


@pytest.fixture(scope="module", params=[3, 5], ids=["texts only", "whole files"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address of llama.cpp's server, model with the first N of the special tokens)"""
    folder = tmp_path_factory.mktemp("infill")
    write_tiny_llama(folder / "plain.gguf")
    keys = {
        f"tokenizer.ggml.{name}_token_id": (gguf.GGUFValueType.UINT32, 260 + i)
        for i, name in enumerate(NAMES[: request.param])
    }
    model = rewrite(folder / "plain.gguf", folder / "infill.gguf", keys=keys)
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = N_CTX
    params.n_batch = N_BATCH
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.port = 0
    server = xllamacpp.Server(params)
    yield server.listening_address, model
    del server


def test_prompts_are_the_same(oracle: tuple[str, Path]) -> None:
    address, model = oracle
    fields = gguf.GGUFReader(model).fields
    tokenizer = Tokenizer.from_metadata({key: field.contents() for key, field in fields.items()})
    for body in BODIES:
        response = httpx.post(address + "/infill", json={**body, "n_predict": 1}, timeout=60)
        assert response.status_code == 200, response.text
        theirs = response.json()
        tokens = infill_prompt(
            read_infill(body), tokenizer, n_batch=N_BATCH, n_ctx=N_CTX, n_predict=1, suffix_first=False
        )
        assert len(tokens) == theirs["tokens_evaluated"]
        assert tokenizer.decode(tokens, special=True).decode("utf-8", "replace") == theirs["prompt"]
