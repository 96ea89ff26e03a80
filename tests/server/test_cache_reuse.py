"""`--cache-reuse` and `n_cache_reuse`: runs that a slot holds elsewhere are moved behind the common beginning."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer

from pyllama.errors import InvalidArgument
from support.tiny_hybrid import write_tiny_hybrid

FILES = [(letter + string.digits) * 8 for letter in "abcd"]  # 88 tokens each
FIRST = "".join(FILES) + "end"
SECOND = "".join(FILES[1:]) + "end."  # the first file is gone


def complete(server: Any, prompt: str, **fields: Any) -> Any:
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 3, "id_slot": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def n_cached(server: Any, prompt: str, **fields: Any) -> int:
    return complete(server, prompt, **fields)["timings"]["cache_n"]


@pytest.mark.contract("own 16")
def test_a_run_behind_a_gap_is_reused_where_the_request_asks_for_it(serve: Any) -> None:
    server = serve()
    complete(server, FIRST)
    assert n_cached(server, SECOND, n_cache_reuse=256) == 267
    complete(server, FIRST)
    assert n_cached(server, SECOND, n_cache_reuse=300) == 0
    complete(server, FIRST)
    assert n_cached(server, SECOND) == 0
    complete(server, FIRST)
    assert n_cached(server, SECOND, n_cache_reuse=256, cache_prompt=False) == 0


def test_the_next_prompt_goes_on_from_moved_tokens(serve: Any) -> None:
    server = serve()
    complete(server, FIRST)
    complete(server, SECOND, n_cache_reuse=64)
    assert n_cached(server, SECOND + "more", n_cache_reuse=64) == len(SECOND)
    assert n_cached(server, SECOND + "more and more") == 0  # who does not ask for them gets exact ones only


def test_the_option_sets_the_default_and_a_request_lifts_it(serve: Any) -> None:
    server = serve(defaults={"n_cache_reuse": 64})
    complete(server, FIRST)
    assert n_cached(server, SECOND) == 267
    complete(server, FIRST, n_cache_reuse=0)
    assert n_cached(server, SECOND, n_cache_reuse=0) == 0


def test_a_model_that_cannot_shift_refuses_the_field(serve: Any) -> None:
    server = serve(engine={"is_recurrent": True})
    answer = server.post("/completion", {"prompt": "x", "n_predict": 1, "n_cache_reuse": 64})
    assert answer.status_code == 400
    assert "n_cache_reuse" in answer.json()["error"]["message"]
    complete(server, "x", n_cache_reuse=0)


def test_the_real_engine_reuses_the_run(tiny_llama_path: Path) -> None:
    server = EngineServer(tiny_llama_path, "--cache-reuse", "16", "-np", "1")
    try:
        words = ["the", "world", "is", "one", "of", "them", "and", "you", "are", "not", "in", "it"]
        server.complete(" ".join(words * 6), n_predict=2)
        second = " ".join((words * 6)[9:])
        timings = server.complete(second, n_predict=2)["timings"]
        assert timings["cache_n"] > 16
    finally:
        server.close()


def test_a_model_that_cannot_shift_refuses_the_start(tmp_path: Path) -> None:
    path = write_tiny_hybrid(tmp_path / "hybrid.gguf")
    with pytest.raises(InvalidArgument, match="--cache-reuse"):
        EngineServer(path, "--cache-reuse", "64")
