"""`Llama` on a real model: sensible chat, streams, saved states, probabilities, a running event loop, memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama.llama import Llama

QUESTION = [{"role": "user", "content": "What is 2+2?"}]
STORY = "Once upon a time, a small robot lived at the edge of a quiet forest. Every morning it walked to the river and"


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[Llama]:
    with Llama(smollm2_path, n_ctx=1024) as opened:
        yield opened


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS in /proc/self/status")


def test_chat_answers_sensibly(llm: Llama) -> None:
    response = llm.create_chat_completion(QUESTION, temperature=0, max_tokens=40)
    assert "4" in response["choices"][0]["message"]["content"]
    assert response["choices"][0]["finish_reason"] == "stop"
    text = llm("The capital of France is", max_tokens=4, temperature=0)["choices"][0]["text"]
    assert text.startswith(" Paris")


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.0, "seed": 42}, {"temperature": 0, "stop": ["robot"]}]
)
def test_streamed_chat_is_the_plain_chat(llm: Llama, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Tell a story about a robot. Use emoji."}]
    plain = llm.create_chat_completion(messages, max_tokens=32, **options)["choices"][0]
    chunks = list(llm.create_chat_completion(messages, max_tokens=32, stream=True, **options))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == plain["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == plain["finish_reason"]


def test_repeated_question_gives_the_same_answer_from_the_reused_prefix(llm: Llama) -> None:
    answers = [llm.create_chat_completion(QUESTION, temperature=0, max_tokens=24)["choices"] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


def test_native_and_numpy_log_probabilities_agree(llm: Llama) -> None:
    """The engine's own against f64 log-softmax of the logits it hands out."""
    prompt = llm.tokenize(STORY.encode())
    logprobs = llm(prompt, max_tokens=6, temperature=0, logprobs=5)["choices"][0]["logprobs"]
    answer = list(llm.eval_tokens)[len(prompt) :]
    llm.reset()
    llm.eval(prompt)
    for index, token in enumerate(answer):
        row = llm.scores[-1].astype(np.float64)
        row -= np.logaddexp.reduce(row)
        assert logprobs["token_logprobs"][index] == pytest.approx(row[token], abs=1e-5)
        best = np.argsort(-row, kind="stable")[:5]
        assert list(logprobs["top_logprobs"][index].values()) == pytest.approx(row[best].tolist(), abs=1e-5)
        llm.eval([token])


def test_saved_state_goes_on_identically(llm: Llama, smollm2_path: Path) -> None:
    llm(STORY, max_tokens=20, temperature=0)
    state = llm.save_state()
    llm.set_seed(9)
    expected = list(itertools.islice(llm.generate([], temp=0.8, reset=False), 16))
    with Llama(smollm2_path, n_ctx=4096) as other:
        other.load_state(state)
        other.set_seed(9)
        assert list(itertools.islice(other.generate([], temp=0.8, reset=False), 16)) == expected
    # Whole pages of 256 tokens with f16 keys and values, 30 layers x 3 heads x 64 each, and little more.
    pages = -(-state.n_tokens // 256)
    assert state.llama_state_size < pages * 256 * 30 * 3 * 64 * 2 * 2 + 65536


def test_event_loop_keeps_beating_while_threads_generate(llm: Llama) -> None:
    """A prompt pass that held the interpreter lock would stop the heartbeat for as long as the pass takes."""
    prompts = [llm.tokenize(f"Chapter {index}. {STORY * 8}".encode()) for index in range(6)]

    async def main() -> tuple[list[float], float]:
        late: list[float] = []
        done = asyncio.Event()

        async def heartbeat() -> None:
            while not done.is_set():
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                late.append(time.perf_counter() - before - 0.005)

        beat = asyncio.create_task(heartbeat())
        started = time.perf_counter()
        await asyncio.gather(*(asyncio.to_thread(llm, prompt, max_tokens=1) for prompt in prompts))
        passes = (time.perf_counter() - started) / len(prompts)
        done.set()
        await beat
        return sorted(late), passes

    late, seconds_per_prompt = asyncio.run(main())
    assert late[int(len(late) * 0.9)] < 0.05
    assert late[-1] < max(seconds_per_prompt / 2, 0.1), (
        f"{late[-1]:.3f} s late; a prompt takes {seconds_per_prompt:.3f} s"
    )


def test_thirty_loads_leave_no_memory_behind(smollm2_path: Path) -> None:
    def load() -> None:
        with Llama(smollm2_path, n_ctx=256) as llm:
            llm(STORY, max_tokens=2, temperature=0)

    for _ in range(3):
        load()
    gc.collect()
    before = resident_bytes()
    for _ in range(30):
        load()
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 60 << 20, f"grew by {grown / 2**20:.1f} MiB; the weights are 94 MiB"
