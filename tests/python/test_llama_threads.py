"""One `Llama` object in several threads: calls queue, streams keep their place, closing is safe (fake engine, which
raises when two threads are inside it)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyllama import llama as llama_module
from pyllama import llama_sequence
from pyllama.errors import InvalidArgument
from pyllama.llama import Llama
from pyllama.llama_stream import CallQueue, LockedStream
from support import fake_engine
from support.fake_engine import byte_tokens

PATIENCE = 60.0  # seconds until a thread counts as hanging


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Llama]:
    for module in (llama_module, llama_sequence):
        monkeypatch.setattr(module, "_engine", fake_engine)
    fake_engine.reset()
    path = tmp_path / "model.gguf"
    path.touch()
    with Llama(path, n_ctx=128) as opened:
        opened._sequence.engine.delay = 0.0002  # type: ignore[union-attr]
        yield opened
    fake_engine.reset()


def in_threads(work: Any, count: int) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(work, index) for index in range(count)]]


def test_eight_threads_of_twenty_calls_get_their_own_answers(llm: Llama) -> None:
    def expected(prompt: str) -> str:
        return llm(prompt, max_tokens=6, temperature=0)["choices"][0]["text"]

    answers = {f"prompt {index}>": expected(f"prompt {index}>") for index in range(16)}
    assert len(set(answers.values())) == len(answers)

    def work(index: int) -> None:
        choose = random.Random(index)
        for _ in range(20):
            prompt = choose.choice(list(answers))
            if choose.random() < 0.5:
                stream = llm(prompt, max_tokens=6, temperature=0, stream=True)
                text = ""
                cancel_after = choose.choice([1, 3, 100])
                for n_chunks, chunk in enumerate(stream):
                    text += chunk["choices"][0]["text"]
                    if n_chunks == cancel_after:
                        stream.close()
                assert answers[prompt] == text if cancel_after == 100 else answers[prompt].startswith(text)
            else:
                assert llm(prompt, max_tokens=6, temperature=0)["choices"][0]["text"] == answers[prompt]

    in_threads(work, 8)


def test_other_threads_wait_for_an_open_stream_and_run_after_it(llm: Llama) -> None:
    fake_engine.Model.answer = byte_tokens("hello")
    stream = llm("say>", stream=True)
    next(stream)
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(llm("say>", temperature=0)["choices"][0]["text"]))
    thread.start()
    time.sleep(0.05)
    assert answers == []
    stream.close()
    thread.join(PATIENCE)
    assert answers == ["hello"]


def test_stream_may_be_advanced_from_changing_threads(llm: Llama) -> None:
    fake_engine.Model.answer = byte_tokens("hello")
    stream = llm("say>", stream=True, temperature=0)
    texts: list[str] = []
    while True:
        thread = threading.Thread(target=lambda: texts.append(next(stream, None)))  # type: ignore[arg-type]
        thread.start()
        thread.join(PATIENCE)
        if texts[-1] is None:
            break
    assert "".join(chunk["choices"][0]["text"] for chunk in texts[:-1]) == "hello"  # type: ignore[index]
    assert llm("say>", temperature=0)["choices"][0]["text"] == "hello"


def test_closing_while_other_threads_compute_ends_their_calls(llm: Llama) -> None:
    fake_engine.Model.answer = byte_tokens("x" * 1000)
    llm._sequence.engine.delay = 0.005  # type: ignore[union-attr]
    started = threading.Barrier(5)

    def work(index: int) -> str:
        started.wait(PATIENCE)
        try:
            if index % 2:
                list(llm("say>", max_tokens=None, stream=True))
            else:
                llm("say>", max_tokens=None)
        except InvalidArgument as error:
            return str(error)
        return "finished"

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, index) for index in range(4)]
        started.wait(PATIENCE)
        time.sleep(0.02)
        llm.close()
        results = [future.result(PATIENCE) for future in futures]
    assert set(results) == {"this Llama object is closed"}


def test_event_loop_runs_on_while_tasks_generate_in_threads(llm: Llama) -> None:
    """64 tasks on one object: waiting for the object may not block the loop (a pool of threads waits)."""

    async def main() -> float:
        worst = 0.0
        done = asyncio.Event()

        async def heartbeat() -> None:
            nonlocal worst
            while not done.is_set():
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                worst = max(worst, time.perf_counter() - before - 0.005)

        beat = asyncio.create_task(heartbeat())
        await asyncio.gather(*(asyncio.to_thread(llm, f"task {index}>", max_tokens=4) for index in range(64)))
        done.set()
        await beat
        return worst

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) < 0.25


def test_exception_inside_a_stream_gives_its_place_back() -> None:
    queue = CallQueue()

    def items() -> Any:
        yield 1
        raise ValueError("broken")

    stream = LockedStream(queue, items())
    assert next(stream) == 1
    with pytest.raises(ValueError, match="broken"):
        next(stream)
    assert list(stream) == []
    with queue.call():
        assert queue.open_stream is None


def test_dropped_stream_gives_its_place_back() -> None:
    queue = CallQueue()
    stream = LockedStream(queue, (item for item in range(3)))
    next(stream)
    assert queue.open_stream is stream
    del stream
    assert queue.open_stream is None
    with queue.call():
        pass
