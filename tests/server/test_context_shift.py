"""Context shift in the server: full slots go on without some of their tokens, by llama-server's arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import N_VOCAB, PAGE, FakeSampler, pseudo_random_token
from real_process import ServerProcess
from test_engine_loop import Bench, letters

from pyllama.server.generation import Failed
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama

Serve = Callable[..., Any]


def shifted_tokens(
    prompt: list[int], n: int, n_ctx: int, *, n_keep: int = 0, n_discard: int = 0, seed: int = 1, temperature: float = 0
) -> tuple[list[int], list[tuple[int, int]]]:
    """What a sequence alone would generate in a context of `n_ctx`, and its shifts (kept, discarded)."""
    sampler = FakeSampler(N_VOCAB, seed=seed, temperature=temperature)
    history, generated, shifts = list(prompt), [], []
    for _ in range(n):
        if len(history) >= n_ctx:
            kept = min(len(prompt) if n_keep < 0 else n_keep, n_ctx - 4)
            n_left = len(history) - 1 - kept
            discarded = min(n_discard or n_left // 2, n_left - 1)
            del history[kept : kept + discarded]
            shifts.append((kept, discarded))
        generated.append(pseudo_random_token(history, sampler))
        history.append(generated[-1])
    return generated, shifts


@pytest.mark.contract("ctx_shift 1")
def test_generation_goes_on_beyond_the_slot(serve: Serve) -> None:
    """The case of llama-server's own tests: 226 tokens of prompt and 96 more in a slot of 256."""
    server = serve(context_shift=True, n_ctx_slot=256)
    prompt = "x" * 226
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 96, "temperature": 0}).json()
    expected, shifts = shifted_tokens(list(prompt.encode()), 96, 256)
    assert answer["content"].encode() == bytes(expected)
    assert shifts == [(0, 127)] == [shift[1:] for shift in server.engine.shifts]
    assert (answer["truncated"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 96)
    assert (answer["timings"]["prompt_n"], answer["timings"]["predicted_n"]) == (226, 96)
    assert answer["prompt"] == prompt
    assert answer["tokens_cached"] == 226 + 95 - 127


@pytest.mark.contract("ctx_shift 2")
def test_without_the_option_a_full_slot_ends_the_generation(serve: Serve) -> None:
    server = serve(n_ctx_slot=256)
    answer = server.post("/completion", {"prompt": "x" * 226, "n_predict": 96, "temperature": 0}).json()
    assert (answer["truncated"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 30)
    short = serve(context_shift=True, n_ctx_slot=256).post("/completion", {"prompt": "x" * 226, "n_predict": 30}).json()
    assert (short["truncated"], short["tokens_predicted"]) == (False, 30)


def test_a_prompt_that_fills_the_slot_is_refused_all_the_same(serve: Serve) -> None:
    server = serve(context_shift=True, n_ctx_slot=256)
    assert server.post("/completion", {"prompt": "x" * 256}).json()["error"]["type"] == "exceed_context_size_error"
    answer = server.post("/completion", {"prompt": "x" * 255, "n_predict": 3, "temperature": 0}).json()
    assert answer["content"].encode() == bytes(shifted_tokens([120] * 255, 3, 256)[0])


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, (0, 127)),
        ({"n_keep": 10}, (10, 122)),
        ({"n_keep": -1}, (100, 77)),
        ({"n_keep": 2**31 - 1}, (252, 1)),
        ({"n_discard": 5}, (0, 5)),
        ({"n_discard": 2**31 - 1}, (0, 254)),
        ({"n_keep": 250, "n_discard": 2**31 - 1}, (250, 4)),
    ],
)
def test_what_is_kept_and_dropped(serve: Serve, fields: dict[str, int], kept: tuple[int, int]) -> None:
    """Known fault E30: no value reaches beyond the sequence."""
    server = serve(context_shift=True, n_ctx_slot=256)
    answer = server.post("/completion", {"prompt": "x" * 100, "n_predict": 500, "temperature": 0, **fields}).json()
    expected, shifts = shifted_tokens([120] * 100, 500, 256, **fields)
    assert shifts[0] == kept
    assert [shift[1:] for shift in server.engine.shifts] == shifts
    assert answer["content"].encode() == bytes(expected)


def test_a_bos_token_is_kept_and_the_option_is_the_default_of_the_field(serve: Serve) -> None:
    server = serve(context_shift=True, n_ctx_slot=256, adds_bos=True, defaults={"n_keep": 7})
    server.post("/completion", {"prompt": "x" * 100, "n_predict": 200, "temperature": 0})
    assert server.engine.shifts[0][1:] == (8, 123)


def test_streams_and_chats_go_on_too(serve: Serve) -> None:
    server = serve(context_shift=True, n_ctx_slot=256)
    body = {"prompt": "x" * 100, "temperature": 0}
    plain = server.post("/completion", {**body, "n_predict": 400, "return_tokens": True}).json()
    events = server.events("/completion", {**body, "n_predict": 400})
    assert "".join(event["content"] for event in events) == plain["content"]
    assert len(plain["tokens"]) == 400
    chat = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 700}
    ).json()
    assert chat["usage"]["completion_tokens"] == 700
    assert chat["choices"][0]["finish_reason"] == "length"


def test_what_was_moved_is_not_taken_for_a_prefix(serve: Serve) -> None:
    """The moved tokens have seen the dropped ones: the same tokens as a prompt are computed anew."""
    server = serve(context_shift=True, n_ctx_slot=256, n_slots=1)
    body = {"prompt": "x" * 100, "n_predict": 200, "n_keep": 40, "temperature": 0, "return_tokens": True}
    first = server.post("/completion", body).json()
    server.wait_idle()
    history = [120] * 100 + first["tokens"][:-1]
    _, shifts = shifted_tokens([120] * 100, 200, 256, n_keep=40)
    for kept, discarded in shifts:
        assert kept == 40
        del history[kept : kept + discarded]
    again = server.post("/completion", {"prompt": history, "n_predict": 1, "temperature": 0}).json()
    assert again["timings"]["cache_n"] == 40


def test_a_random_load_with_shifts_gives_every_sequence_its_own_text() -> None:
    rng = random.Random(1)
    bench = Bench(n_slots=4, n_ctx=6 * PAGE, n_batch=100, max_passes=3)
    bench.n_ctx = 200  # of a slot; the pool holds them all
    requests = []
    for _ in range(40):
        prompt = letters(rng, rng.randrange(1, 199))
        n_predict, n_keep = rng.choice([1, 30, 150, 400]), rng.choice([-1, 0, 20])
        n_cmpl = rng.choice([1, 1, 2])
        request = bench.request(prompt, n_predict=n_predict, n_keep=n_keep, n_cmpl=n_cmpl, temperature=0.5)
        for generation in request.generations:
            generation.shifts_context = True
        bench.loop.submit(request)
        requests.append((request, prompt, n_predict, n_keep))
        for _ in range(rng.randrange(20)):
            bench.loop.iterate()
            bench.check_slots()
    bench.run()
    assert not any(isinstance(event, Failed) for event in bench.events)
    for request, prompt, n_predict, n_keep in requests:
        for choice, generation in enumerate(request.generations):
            expected, shifts = shifted_tokens(prompt, n_predict, 200, n_keep=n_keep, seed=1 + choice, temperature=0.5)
            assert generation.generated == expected
            assert generation.prompt == prompt
            assert generation.truncated == bool(shifts)
    assert len(bench.engine.shifts) > 40
    bench.drop_caches()
    assert len(bench.engine.pool.free) == 6


# ---- the native engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("server")
    path = write_tiny_llama(directory / "model.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    arguments = ("-m", str(path), "-c", "768", "-np", "3", "-t", "1", "--context-shift", "--keep", "20", "-lv", "4")
    process = ServerProcess(directory, *arguments)
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


def test_all_slots_generate_through_several_shifts(server: ServerProcess) -> None:
    bodies = [
        {"prompt": f"the world is {i}", "n_predict": 900, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        for i in range(3)
    ]
    alone = [server.post("/completion", body).json() for body in bodies]
    with ThreadPoolExecutor(3) as executor:
        together = list(executor.map(lambda body: server.post("/completion", body).json(), bodies))
    for a, b in zip(alone, together, strict=True):
        assert a["content"] == b["content"]
        assert (b["tokens_predicted"], b["truncated"], b["stop_type"]) == (900, True, "limit")
    assert server.log.count("context shift, n_keep = 21") > 3 * 2 * 4


def test_a_model_that_cannot_shift_stops_at_the_end_of_the_slot(tmp_path: Path) -> None:
    """Known fault F18: a warning at the start, and no abort."""
    path = write_tiny_hybrid(tmp_path / "hybrid.gguf")
    process = ServerProcess(tmp_path, "-m", str(path), "-c", "256", "-np", "1", "-t", "1", "--context-shift")
    try:
        process.wait_ready()
        assert "--context-shift has no effect" in process.log
        assert "qwen35" in process.log
        for _ in range(2):
            body = {"prompt": "the world", "n_predict": -1, "ignore_eos": True, "cache_prompt": False}
            answer = process.post("/completion", body).json()
            assert (answer["truncated"], answer["stop_type"]) == (True, "limit")
            assert answer["tokens_evaluated"] + answer["tokens_predicted"] == 256
    finally:
        process.close()
