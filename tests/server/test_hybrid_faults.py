"""Faults of prompt caches and recurrent states that other servers had, on the real engine with a tiny hybrid model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer

from support.tiny_hybrid import write_tiny_hybrid

pytest.importorskip("pyllama._engine", reason="needs the native module")

LETTERS = range(3 + ord("A"), 3 + ord("Z"))  # tokens of single letters
OPENER = 1  # <|im_start|>


@pytest.fixture
def start(tiny_hybrid_path: Path) -> Iterator[Callable[..., EngineServer]]:
    """`start(*arguments, model=...)`: a server with metrics; two slots and 2048 tokens unless said otherwise."""
    servers: list[EngineServer] = []

    def start_one(*arguments: str, model: Path = tiny_hybrid_path) -> EngineServer:
        servers.append(EngineServer(model, "--metrics", *arguments))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.choice(LETTERS) for _ in range(n)]


def tokens_of(server: EngineServer, prompt: list[int], n: int = 8, **fields: Any) -> list[int]:
    return server.complete(prompt, n_predict=n, return_tokens=True, **fields)["tokens"]


def cold(server: EngineServer, prompt: list[int], n: int = 8, **fields: Any) -> list[int]:
    return tokens_of(server, prompt, n, cache_prompt=False, **fields)


def test_equal_prompts_at_once_get_one_answer_and_different_ones_their_own(start: Callable[..., EngineServer]) -> None:
    """Known fault F10: slots read each other's recurrent state."""
    server = start("-np", "4", "-c", "8192")
    rng = random.Random(1)
    same = words(rng, 150)
    prompts = [[OPENER, *words(rng, 40 + 13 * i), OPENER, *words(rng, 9)] for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        equal = list(pool.map(lambda _: tuple(tokens_of(server, same, 20)), range(8)))
        together = list(pool.map(lambda prompt: tokens_of(server, prompt, 20), prompts))
        again = list(pool.map(lambda prompt: tokens_of(server, prompt, 20), prompts))
    assert len(set(equal)) == 1
    assert list(equal[0]) == cold(server, same, 20)
    assert together == again == [cold(server, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_no_client_gets_anothers_text_under_mixed_load(
    start: Callable[..., EngineServer], tiny_llama_path: Path, tiny_hybrid_path: Path, kind: str
) -> None:
    """Known fault F12: requests of all sizes from 8 clients in a pool that is too small for them."""
    model = tiny_llama_path if kind == "llama" else tiny_hybrid_path
    server = start("-np", "4", "-c", "1024", "-kvu", "--cache-ram", "2", model=model)
    rng = random.Random(2)
    shared = [words(rng, n) for n in (5, 60, 280, 400)]
    prompts = []
    for nonce in range(200 if kind == "llama" else 60):
        digits = [3 + ord(c) for c in f"{nonce:03}"]
        prompts.append([*rng.choice(shared), OPENER, *digits, *words(rng, rng.randrange(0, 60))])
    lengths = [rng.choice([1, 3, 12]) for _ in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt, n: tokens_of(server, prompt, n), prompts, lengths))
    usage = server.metrics()
    assert 0 < usage["prompt_cache_bytes"] <= usage["prompt_cache_limit_bytes"] == 2 << 20
    assert usage["prompt_cache_evicted_total"] > 0
    reference = start("-np", "1", "-c", "1024", "--cache-ram", "0", model=model)
    for prompt, n, answer in zip(prompts, lengths, answers, strict=True):
        assert answer == cold(reference, prompt, n)


def test_two_prompts_with_probabilities_start_in_one_step(start: Callable[..., EngineServer]) -> None:
    """Known fault F13."""
    server = start()
    rng = random.Random(3)
    prompts = [words(rng, 40), words(rng, 40)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda p: server.complete(p, n_probs=3, temperature=0), prompts))
    for prompt, answer in zip(prompts, together, strict=True):
        alone = server.complete(prompt, n_probs=3, cache_prompt=False)
        assert answer["completion_probabilities"] == alone["completion_probabilities"]
        assert len(answer["completion_probabilities"]) == 8


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_warm_answer_is_the_cold_one_to_the_last_bit(
    start: Callable[..., EngineServer], tiny_llama_path: Path, tiny_hybrid_path: Path, kind: str
) -> None:
    """Known fault F17: prompts that share beginnings of every kind, with slots and host memory taking turns."""
    server = start("-c", "2048", model=tiny_llama_path if kind == "llama" else tiny_hybrid_path)
    rng = random.Random(4)
    parts = [[OPENER, *words(rng, rng.randrange(3, 200))] for _ in range(12)]
    sources = set()
    for _ in range(20):
        prompt = [token for part in rng.sample(parts, rng.randrange(1, 4)) for token in part]
        prompt += words(rng, rng.randrange(1, 4))
        fields = {"n_probs": 2, "n_predict": 6}
        for _ in range(2):
            warm = server.complete(prompt, rng.randrange(2), **fields)
            sources |= {slot["prefix_reuse"]["source"] for slot in server.client.get("/slots").json()
                        if "prefix_reuse" in slot}  # fmt: skip
            fresh = server.complete(prompt, **fields, cache_prompt=False)
            assert warm["completion_probabilities"] == fresh["completion_probabilities"]
    assert sources >= {"own", "other", "host"}


def test_every_length_of_a_prompt_works_cold_and_warm(start: Callable[..., EngineServer]) -> None:
    """Known fault F19: all lengths up to three micro-batches, against micro-batches of one token."""
    server, single = start("-b", "16", "-ub", "16"), start("-b", "16", "-ub", "1")
    text = [OPENER, *words(random.Random(5), 20), OPENER, *words(random.Random(6), 30)]
    for length in range(1, 49):
        expected = cold(single, text[:length], 2)
        assert cold(server, text[:length], 2) == expected
        assert tokens_of(server, text[:length], 2) == expected
        assert tokens_of(server, text[:length], 2, id_slot=length % 2) == expected


def test_generating_past_the_end_of_the_context_stops_with_length(start: Callable[..., EngineServer]) -> None:
    """Known fault F18: where a context cannot be shifted, no client reaches more than the end of its answer."""
    server = start("-c", "256", "-np", "1")
    answer = server.complete(words(random.Random(7), 20), n_predict=1000)
    assert (answer["stop_type"], answer["truncated"]) == ("limit", True)
    assert answer["timings"]["predicted_n"] == 256 - 20
    chat = {"messages": [{"role": "user", "content": "A" * 60}], "max_tokens": 1000, "ignore_eos": True}
    result = server.client.post("/v1/chat/completions", json=chat).json()
    assert result["choices"][0]["finish_reason"] == "length"


def test_many_short_requests_over_few_slots_and_then_a_longer_one(start: Callable[..., EngineServer]) -> None:
    """Known fault F8: whatever is left of earlier prompts, the answer is that of an empty server."""
    server = start("-np", "3", "-c", "1024", "-kvu", "--cache-ram", "1", "--ctx-checkpoints", "3")
    rng = random.Random(8)
    base = [OPENER, *words(rng, 300), OPENER, *words(rng, 400)]
    reference = start("-np", "1", "-c", "1024", "--no-cache-prompt", "--cache-ram", "0")
    for _ in range(30):
        prompt = [*base[: rng.choice([1, 4, 30, 256, 301, 302, 512, 600])], *words(rng, rng.randrange(1, 6))]
        answer = tokens_of(server, prompt, rng.choice([1, 2, 9]), id_slot=rng.choice([-1, 0, 1, 2]))
        assert answer == tokens_of(reference, prompt, len(answer))
    longer = [*base, *words(rng, 200)]
    assert tokens_of(server, longer) == tokens_of(reference, longer)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS in /proc/self/status")


def test_the_cache_in_host_memory_stays_within_its_limit(start: Callable[..., EngineServer], tmp_path: Path) -> None:
    """Known fault F6: checkpoints count, and nothing is kept that does not fit. A state takes 0.4 MB here."""
    limit = 16 << 20
    model = write_tiny_hybrid(tmp_path / "m.gguf", n_layer=4, state_size=64, n_key_head=4, n_value_head=8)
    server = start("--cache-ram", "16", "-np", "1", "-c", "512", model=model)
    rng = random.Random(9)

    def ask() -> None:
        tokens_of(server, [OPENER, *words(rng, 20), OPENER, *words(rng, 20), OPENER, *words(rng, 9)], 2)

    ask()
    before = resident_bytes()
    for _ in range(60):
        ask()
        usage = server.metrics()
        assert usage["prompt_cache_bytes"] <= limit
    assert usage["prompt_cache_bytes"] > limit / 2
    assert usage["prompt_cache_checkpoint_bytes"] > usage["prompt_cache_kv_bytes"] > 0
    assert usage["prompt_cache_evicted_total"] > 20
    assert resident_bytes() - before <= 1.1 * limit


def test_nothing_is_given_up_for_what_does_not_fit(start: Callable[..., EngineServer], tmp_path: Path) -> None:
    """Known fault F6: a single state larger than the limit is not kept, and the prompt is computed."""
    model = write_tiny_hybrid(tmp_path / "m.gguf", n_layer=4, state_size=128, n_key_head=8, n_value_head=16)
    server = start("--cache-ram", "1", "-np", "1", model=model)
    prompt = [OPENER, *words(random.Random(10), 50), OPENER, *words(random.Random(11), 50)]
    answer = tokens_of(server, prompt)
    assert tokens_of(server, prompt) == answer
    assert server.metrics()["prompt_cache_checkpoints"] == 0
    slot = server.client.get("/slots").json()[0]
    assert (slot["n_prompt_tokens_cache"], slot["prefix_reuse"]["limit"]) == (0, "no checkpoint")


def test_choices_of_one_prompt_are_those_of_lone_requests(start: Callable[..., EngineServer]) -> None:
    server = start("-np", "3", "-c", "2048")
    prompt = [OPENER, *words(random.Random(10), 280), OPENER, *words(random.Random(11), 5)]
    body = {"prompt": prompt, "n_predict": 10, "temperature": 1.0, "seed": 7, "return_tokens": True}
    for _ in range(2):
        together = server.client.post("/completion", json={**body, "n_cmpl": 3}).json()
        alone = [server.client.post("/completion", json={**body, "seed": 7 + k}).json() for k in range(3)]
        assert [choice["tokens"] for choice in together] == [choice["tokens"] for choice in alone]


def test_without_room_for_states_a_start_says_so_and_answers_are_right(
    start: Callable[..., EngineServer], caplog: pytest.LogCaptureFixture
) -> None:
    for arguments in (("--cache-ram", "0"), ("--ctx-checkpoints", "0")):
        caplog.clear()
        with caplog.at_level("WARNING", "pyllama.server.srv"):
            server = start(*arguments)
        assert "--cache-ram and --ctx-checkpoints" in caplog.text
        prompt = [OPENER, *words(random.Random(12), 50), OPENER, *words(random.Random(13), 50)]
        answer = cold(server, prompt)
        assert tokens_of(server, [*prompt, *answer], 2) == cold(server, [*prompt, *answer], 2)
        assert tokens_of(server, prompt) == answer
        assert server.metrics()["prompt_cache_checkpoints"] == 0


def test_the_size_of_the_cache_is_in_the_start_log_and_the_metrics(
    start: Callable[..., EngineServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known fault F7: in a container of 2 GB the default is 512 MiB."""
    monkeypatch.setattr("pyllama.host_memory.available_bytes", lambda: 2 << 30)
    for arguments, words_logged, limit in (
        ((), "at most 512 MiB of host memory (--cache-ram changes that)", 512 << 20),
        (("--cache-ram", "8192"), "at most 8192 MiB", 8192 << 20),
        (("--cache-ram", "0"), "it is off", 0),
        (("--cache-ram", "-1"), "no limit", float("inf")),
    ):
        caplog.clear()
        with caplog.at_level("INFO", "pyllama.server.srv"):
            server = start(*arguments)
        assert words_logged in caplog.text
        assert server.metrics()["prompt_cache_limit_bytes"] == limit
