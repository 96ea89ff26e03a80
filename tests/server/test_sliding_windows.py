"""A model with sliding windows behind the server: the same answers with window-sized caches as with full ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_server import EngineServer

from support.tiny_models import write_tiny_model

WINDOW = {"gemma3.attention.sliding_window": 64}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, EngineServer]]:
    """With window-sized caches, and with full ones and no prompt cache."""
    path = tmp_path_factory.mktemp("models") / "windowed.gguf"
    write_tiny_model(path, "gemma3", n_layer=6, metadata=WINDOW)
    windowed = EngineServer(path, "-c", "4096")
    full = EngineServer(path, "-c", "4096", "--swa-full", "--cache-ram", "0")
    yield windowed, full
    windowed.close()
    full.close()


def random_tokens(n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 258, n_tokens).tolist()


@pytest.mark.contract("own 17")
def test_turns_edits_and_other_slots_are_answered_as_with_full_caches(
    servers: tuple[EngineServer, EngineServer],
) -> None:
    windowed, full = servers
    history = random_tokens(700, 1)
    turns = [history, history + random_tokens(300, 2), history + random_tokens(200, 3), history[:650]]
    for number, prompt in enumerate([*turns, *turns]):
        for slot in (0, 1):
            answer = windowed.complete(prompt, slot, n_predict=20, return_tokens=True)
            expected = full.complete(prompt, -1, n_predict=20, return_tokens=True, cache_prompt=False)
            assert answer["tokens"] == expected["tokens"]
            if number == 1 or (number, slot) in ((0, 1), (2, 1)):  # something to go on from: a slot, or a kept window
                assert answer["timings"]["cache_n"] >= 512
            assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == len(prompt)


def test_several_answers_to_one_prompt_share_its_window(servers: tuple[EngineServer, EngineServer]) -> None:
    body = {"prompt": random_tokens(500, 9), "n": 2, "max_tokens": 12, "temperature": 1.0, "seed": 4, "n_predict": 12}
    texts = [
        [choice["text"] for choice in s.client.post("/v1/completions", json=body).json()["choices"]] for s in servers
    ]
    assert texts[0] == texts[1]
