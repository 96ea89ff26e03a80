"""Limits on thoughts: fields, options, the forced end, and its end on demand."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer
from fake_engine import forced_text

USER = {"role": "user", "content": "hi"}
CHATS = "/v1/chat/completions"

# Opens the block in the prompt.
OPENING = """\
{%- for m in messages -%}{{- m.role ~ '|' ~ (m.content or '').split('</think>')[-1] ~ '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant|<think>\\n' -}}{%- endif -%}
"""
# Leaves the block to the model.
SILENT = OPENING.replace("|<think>\\n'", "|'")


def saying(serve: Any, template: str, text: str, **options: Any) -> Any:
    """A server whose model writes that text, but goes on from where a forced text left it."""
    engine = {"next_token": forced_text(text.encode()), **options.pop("engine", {})}
    return serve(template=template, engine=engine, n_ctx=4096, **options)


def message(server: Any, **fields: Any) -> tuple[dict[str, Any], int]:
    """The message and the tokens it took; checks that the stream says the same."""
    body = {"messages": [USER], "max_tokens": 200, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    plain = answer["choices"][0]["message"]
    sums = {"content": "", "reasoning_content": ""}
    for event in server.events("/v1/chat/completions", body)[:-1]:
        for kind in sums:
            sums[kind] += event["choices"][0]["delta"].get(kind) or ""
    assert sums == {"content": plain["content"], "reasoning_content": plain.get("reasoning_content", "")}
    return plain, answer["usage"]["completion_tokens"]


THOUGHTS = "0123456789 and so on, without end"


@pytest.mark.contract("own 24")
@pytest.mark.parametrize("name", ["reasoning_budget_tokens", "thinking_budget_tokens"])
def test_thoughts_end_when_their_tokens_are_used_up(serve: Any, name: str) -> None:
    # The line break of the prompt is between the tags too, and counts.
    server = saying(serve, OPENING, "<think>\n" + THOUGHTS)
    answer, n_tokens = message(server, **{name: 6})
    assert answer["reasoning_content"] == "01234"
    assert answer["content"].startswith(THOUGHTS[5 + len("</think>") :])  # what the model would have gone on with
    assert n_tokens > 5 + len("</think>")
    answer, _ = message(saying(serve, SILENT, "<think>\n" + THOUGHTS), **{name: 6})
    assert answer["reasoning_content"] == "01234"
    for unlimited in ({name: -1}, {name: 1000}):
        answer, _ = message(server, **unlimited)
        assert answer == {"role": "assistant", "content": "", "reasoning_content": THOUGHTS}


@pytest.mark.parametrize("template", [OPENING, SILENT])
def test_a_budget_of_zero_ends_the_block_at_once(serve: Any, template: str) -> None:
    server = saying(serve, template, "<think>\n" + THOUGHTS)
    answer, _ = message(server, reasoning_budget_tokens=0)
    assert "reasoning_content" not in answer
    assert answer["content"]


def test_the_message_stands_before_the_end_and_request_and_server_may_say_it(serve: Any) -> None:
    defaults = {"reasoning_budget_tokens": 3, "reasoning_budget_message": " Enough."}
    server = saying(serve, OPENING, "<think>\n" + THOUGHTS, defaults=defaults)
    assert message(server)[0]["reasoning_content"] == "01 Enough."
    assert message(server, reasoning_budget_tokens=-1)[0]["reasoning_content"] == "01 Enough."
    other = message(server, reasoning_budget_tokens=5, reasoning_budget_message=" é!")[0]
    assert other["reasoning_content"] == "0123 é!"
    assert message(server, reasoning_budget_message="")[0]["reasoning_content"] == "01"


def test_a_character_is_completed_before_the_end_is_forced(serve: Any) -> None:
    server = saying(serve, OPENING, "<think>\n漢字漢字")
    for budget, thoughts in ((2, "漢"), (3, "漢"), (4, "漢"), (5, "漢字")):
        assert message(server, reasoning_budget_tokens=budget)[0]["reasoning_content"] == thoughts


def test_a_model_that_ends_its_thoughts_in_time_is_left_alone(serve: Any) -> None:
    text = "<think>\nshort\n</think>\n\nYes, <think> is a tag."
    for template in (OPENING, SILENT):
        answer, _ = message(saying(serve, template, text), reasoning_budget_tokens=20)
        assert answer == {"role": "assistant", "content": "Yes, <think> is a tag.", "reasoning_content": "short"}


def test_thoughts_that_are_continued_count(serve: Any) -> None:
    server = saying(serve, OPENING, "<think>\n" + THOUGHTS)
    continued = {"role": "assistant", "content": "", "reasoning_content": "0123"}
    body = {"messages": [USER, continued], "reasoning_budget_tokens": 8, "max_tokens": 60}
    answer = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert answer["reasoning_content"] == "456"


def test_native_requests_name_the_tags_themselves(serve: Any) -> None:
    server = saying(serve, OPENING, THOUGHTS)
    tags = {"reasoning_budget_start_tag": "[", "reasoning_budget_end_tags": ["]", "}"]}
    body = {"prompt": "x|[", "n_predict": 8, "generation_prompt": "[", "reasoning_budget_tokens": 3, **tags}
    server.engine.next_token = forced_text(b"[" + THOUGHTS.encode())
    assert server.post("/completion", body).json()["content"].startswith("012]")
    body = {**body, "generation_prompt": "", "prompt": "x|", "reasoning_budget_message": "!"}
    assert server.post("/completion", body).json()["content"].startswith("[012!]")
    without_tags = {key: value for key, value in body.items() if key not in tags}
    assert server.post("/completion", without_tags).json()["content"] == "[0123456"
    for bad in ({"reasoning_budget_end_tags": [""]}, {"reasoning_budget_tokens": -2}, {"reasoning_budget_end_tags": 5}):
        assert server.post("/completion", {**body, **bad}).status_code == 400


class HeldText:
    """As `forced_text`, but the model stops before the token at `place` until `go_on` is set."""

    def __init__(self, text: str, place: int) -> None:
        self._next_token, self._place = forced_text(text.encode()), place
        self.is_there, self.go_on = threading.Event(), threading.Event()

    def __call__(self, history: Sequence[int], sampler: Any) -> int:
        if history[::-1].index(ord("|")) == self._place:
            self.is_there.set()
            assert self.go_on.wait(60)
        return self._next_token(history, sampler)


@contextlib.contextmanager
def thinking(serve: Any, **fields: Any) -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """A server amid thoughts, the id of their chat, and a function that has the chat finished: its answer."""
    model = HeldText("<think>\n" + "so " * 300, place=30)
    server = serve(template=OPENING, engine={"next_token": model})
    body = {"messages": [USER], "max_tokens": 100, **fields}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, CHATS, body)

        def finish() -> Any:
            model.go_on.set()
            return answer.result(60).json()

        try:
            assert model.is_there.wait(60)
            (completion_id,) = server.state.running
            yield server, completion_id, finish
        finally:
            model.go_on.set()


@pytest.mark.contract("own 22")
def test_a_running_block_is_ended_on_demand(serve: Any) -> None:
    with thinking(serve, reasoning_control=True) as (server, completion_id, finish):
        demand = {"id": completion_id, "action": "reasoning_end"}
        assert server.post(CHATS + "/control", demand).json() == {"success": True}
        result = finish()
    assert result["id"] == completion_id
    thoughts = "<think>\n" + "so " * 300
    # The token being drawn comes yet; after the end the model goes on with its text.
    assert result["choices"][0]["message"]["reasoning_content"] == thoughts[len("<think>\n") : 31].strip()
    assert result["choices"][0]["message"]["content"].startswith(thoughts[31 + len("</think>") :][:20].strip())
    assert not server.state.running
    gone = server.post(CHATS + "/control", demand)
    assert gone.json() == {"success": False, "message": "no active completion for this id"}


def test_only_what_allows_it_is_controlled(serve: Any) -> None:
    with thinking(serve) as (server, completion_id, finish):
        refused = server.post(CHATS + "/control", {"id": completion_id, "action": "reasoning_end"}).json()
        assert refused == {"success": False, "message": "reasoning control not enabled for this completion"}
        assert set(finish()["choices"][0]["message"]["reasoning_content"].split()) <= {"so", "s"}
    for body, text in (
        ({"action": "reasoning_end"}, "missing completion id"),
        ({"id": "", "action": "reasoning_end"}, "missing completion id"),
        ({"id": "x", "action": "stop"}, "unknown control action"),
    ):
        response = server.post(CHATS + "/control", body)
        assert (response.status_code, response.json()["error"]["message"]) == (400, text)


def test_the_option_holds_on_a_real_model_whatever_its_tokens(tiny_llama_path: Path) -> None:
    """Random weights never end a block by themselves; the engine's tokens are no single characters."""
    server = EngineServer(
        tiny_llama_path, "--reasoning-budget", "20", "--reasoning-budget-message", " (stop)", "--chat-template", OPENING
    )
    try:
        body = {"messages": [USER], "max_tokens": 60, "temperature": 1.0}
        for seed in range(4):
            answer = server.client.post("/v1/chat/completions", json={**body, "seed": seed}).json()
            message = answer["choices"][0]["message"]
            assert message["reasoning_content"].endswith("(stop)"), message
            assert message["content"]
    finally:
        server.close()
