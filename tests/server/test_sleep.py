"""`--sleep-idle-seconds`: the engine is closed when nothing is asked of it, and made again by the next request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import EmbeddingWork, FakeEngine, FakeHiddenPool, FakeRow, Work
from real_process import ServerProcess
from support_app import FakeServer

from pyllama.errors import ModelError
from pyllama.server.embedding_tasks import EmbeddingQueue
from pyllama.server.engine_loop import EngineLoop
from pyllama.server.loop_settings import LoopSettings

IDLE = 0.15  # seconds


class ClosingEngine(FakeEngine):
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def step(self, works: Any, n_passes: int = 1) -> Any:
        assert not self.is_closed
        return super().step(works, n_passes)

    def embed(self, works: Any) -> None:
        assert not self.is_closed
        super().embed(works)


class SleepyServer(FakeServer):
    """`engines`: all that were made. `fails`: what making the next one raises."""

    def __init__(self, **options: Any) -> None:
        super().__init__(loads=False, **options)
        self.engines: list[ClosingEngine] = []
        self.fails: Exception | None = None
        settings = LoopSettings(n_slots=4, n_ctx_slot=1024, n_batch=64, sleep_seconds=IDLE)
        engine = self.make_engine()
        self.engine_loop = EngineLoop(
            engine,
            settings,
            make_work=Work,
            make_row=FakeRow,
            deliver=self.state.deliver,
            make_engine=self.make_engine,
            embeddings=EmbeddingQueue(engine, range(4, 7), make_work=EmbeddingWork, make_pool=FakeHiddenPool),
        )
        self.engine_loop.start()
        self.load()

    def make_engine(self) -> ClosingEngine:
        if self.fails is not None:
            raise self.fails
        self.engines.append(ClosingEngine(n_ctx=1024, n_seq_max=7, n_batch=64))
        return self.engines[-1]

    @property
    def is_sleeping(self) -> bool:
        return self.get("/props").json()["is_sleeping"]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[SleepyServer]:
    sleepy = SleepyServer(has_metrics=True)
    yield sleepy
    sleepy.close()


BODY = {"prompt": "a long enough prompt " * 6, "n_predict": 20, "temperature": 0, "ignore_eos": True}


def test_an_idle_engine_is_closed_and_the_next_request_makes_one_and_has_the_same_text(server: SleepyServer) -> None:
    first = server.post("/completion", BODY).json()
    assert not server.is_sleeping
    wait_until(lambda: server.is_sleeping)
    assert [engine.is_closed for engine in server.engines] == [True]
    second = server.post("/completion", BODY).json()
    assert (second["content"], second["timings"]["cache_n"]) == (first["content"], 0)
    assert [engine.is_closed for engine in server.engines] == [True, False]
    wait_until(lambda: server.is_sleeping)
    assert [engine.is_closed for engine in server.engines] == [True, True]


def test_texts_to_embed_wake_it_too() -> None:
    server = SleepyServer(embeddings=True, pooling="mean")
    try:
        first = server.post("/embedding", {"content": "a text"}).json()
        wait_until(lambda: server.is_sleeping)
        assert server.post("/embedding", {"content": "a text"}).json() == first
        assert [engine.is_closed for engine in server.engines] == [True, False]
    finally:
        server.close()


def test_questions_about_the_server_neither_wake_it_nor_keep_it_awake(server: SleepyServer) -> None:
    for _ in range(int(4 * IDLE / 0.02)):
        for path in ("/health", "/props", "/v1/models", "/metrics", "/slots"):
            assert server.get(path).status_code == 200
        time.sleep(0.02)
    assert server.is_sleeping
    assert server.post("/tokenize", {"content": "abc"}).json()["tokens"] == list(b"abc")
    assert len(server.engines) == 1


@pytest.mark.contract("sleep 1")
def test_a_sleeping_server_says_so_and_a_completion_wakes_it(server: SleepyServer) -> None:
    wait_until(lambda: server.is_sleeping)
    assert server.get("/health").json() == {"status": "ok"}
    assert [model["id"] for model in server.get("/models").json()["data"]] == ["fake"]
    assert server.is_sleeping
    assert server.post("/completion", BODY).status_code == 200
    assert not server.is_sleeping


def metrics(server: SleepyServer) -> dict[str, float]:
    """Without those of the prompt cache, which goes to sleep too."""
    lines = [line.split() for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if "prompt_cache" not in name}


@pytest.mark.contract("sleep 2", "sleep 3")
def test_metrics_are_the_same_asleep_and_their_rates_count_from_the_last_scrape(server: SleepyServer) -> None:
    rate = "llamacpp:predicted_tokens_seconds"
    server.post("/completion", BODY)
    wait_until(lambda: server.is_sleeping)
    first, second = metrics(server), metrics(server)
    assert first[rate] > 0
    assert second[rate] == 0
    assert {name: value for name, value in first.items() if "tokens_seconds" not in name or "total" in name} == {
        name: value for name, value in second.items() if "tokens_seconds" not in name or "total" in name
    }
    assert metrics(server) == second
    assert server.is_sleeping
    assert server.post("/completion", {**BODY, "n_predict": 1}).status_code == 200
    awake = metrics(server)
    assert awake["llamacpp:tokens_predicted_total"] == second["llamacpp:tokens_predicted_total"] + 1
    assert awake[rate] == 0


@pytest.mark.contract("sleep 4")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_tokens_are_counted_in_sleep_without_waking(server: SleepyServer, path: str, body: dict[str, Any]) -> None:
    wait_until(lambda: server.is_sleeping)
    assert server.post(path, body).json()["input_tokens"] > 0
    assert server.is_sleeping


def test_a_long_answer_is_no_idleness() -> None:
    server = SleepyServer()
    try:
        server.engines[0].step_seconds = IDLE / 10
        assert server.post("/completion", {**BODY, "n_predict": 30}).json()["tokens_predicted"] == 30
        assert len(server.engines) == 1
    finally:
        server.close()


def test_a_model_that_cannot_be_loaded_again_fails_the_request_and_the_next_tries_again(server: SleepyServer) -> None:
    wait_until(lambda: server.is_sleeping)
    server.fails = ModelError("the file is gone")
    response = server.post("/completion", BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the model cannot be loaded again: the file is gone"
    assert server.is_sleeping
    server.fails = None
    assert server.post("/completion", BODY).json()["tokens_predicted"] == 20


def test_without_the_option_nothing_sleeps(serve: Any) -> None:
    server = serve()
    time.sleep(3 * IDLE)
    assert server.get("/props").json()["is_sleeping"] is False


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_a_sleeping_process_gives_the_memory_of_the_weights_back(smollm2_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    arguments = ("-m", str(smollm2_path), "-c", "512", "-t", "1", "--sleep-idle-seconds", "1")
    process = ServerProcess(tmp_path, *arguments)
    try:
        process.wait_ready()
        body = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}
        first = process.post("/completion", body).json()["content"]
        awake = resident_mib(process.process.pid)
        wait_until(lambda: httpx.get(process.url + "/props", timeout=20).json()["is_sleeping"])
        wait_until(lambda: resident_mib(process.process.pid) < awake - smollm2_path.stat().st_size / (2 << 20))
        assert process.post("/completion", body).json()["content"] == first
        assert "loading model" in process.log.partition("the model is unloaded")[2]
    finally:
        process.close()
    assert process.process.returncode == 0
