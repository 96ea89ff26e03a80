"""The official Python clients of OpenAI and Anthropic, unmodified, against the server on real connections.

Texts come from the fake engine, which can be made to say anything; answers that keep to a schema come from a tiny model
with random weights, which has no reason to keep to one.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from fake_engine import forced_text
from pydantic import BaseModel, Field
from real_process import ServerProcess
from support_app import CALLING_TEMPLATE

Listen = Callable[..., Any]

THINKING = CALLING_TEMPLATE + "{# <think> </think> #}"
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]


class Weather(BaseModel):
    """Weather of a place."""

    city: str
    days: int


def saying(listen: Listen, text: str, template: str = CALLING_TEMPLATE, **options: Any) -> Any:
    engine = {"next_token": forced_text(text.encode(), after=b"^"), **options.pop("engine", {})}
    return listen(template=template, engine=engine, n_ctx=4096, n_slots=2, **options)


def endless(listen: Listen, **options: Any) -> Any:
    """A server whose answers go on, a token every 2 ms, for longer than any test."""
    return listen(n_ctx=65536, n_slots=2, engine={"step_seconds": 0.002}, **options)


def of_openai(server: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0, **options})


def of_anthropic(server: Any, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": server.url, "api_key": "none", "max_retries": 0, **options})


# ---- tool calls


def test_openai_chat_calls_a_tool_and_goes_on_with_its_result(listen: Listen) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    with of_openai(saying(listen, f"I look.\n{CALL}")) as client:
        plain = client.chat.completions.parse(model="any", messages=QUESTION, tools=tools)
        (choice,) = plain.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.function.parsed_arguments == Weather(city="Paris", days=2)

        kinds: list[str] = []
        with client.chat.completions.stream(model="any", messages=QUESTION, tools=tools) as stream:
            kinds += [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        assert streamed.content == choice.message.content
        assert streamed.tool_calls is not None
        assert streamed.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments

        messages = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
        again = client.chat.completions.create(model="any", messages=messages, tools=tools)
        assert again.usage is not None
        assert plain.usage is not None
        assert again.usage.prompt_tokens > plain.usage.prompt_tokens


def test_openai_responses_call_a_tool_and_go_on_with_its_result(listen: Listen) -> None:
    tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]  # type: ignore[operator]
    with of_openai(saying(listen, CALL)) as client:
        plain = client.responses.parse(model="any", input=QUESTION, tools=tools)  # type: ignore[arg-type]
        (call,) = [item for item in plain.output if item.type == "function_call"]
        assert call.parsed_arguments == Weather(city="Paris", days=2) or json.loads(call.arguments)["days"] == 2
        with client.responses.stream(model="any", input=QUESTION, tools=tools) as stream:  # type: ignore[arg-type]
            for _ in stream:
                pass
            final = stream.get_final_response()
        assert [item.type for item in final.output] == [item.type for item in plain.output]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
        history: list[Any] = [*QUESTION, *(item.to_dict() for item in plain.output), result]
        again = client.responses.create(model="any", input=history, tools=tools)  # type: ignore[arg-type]
        assert again.status == "completed"


def test_anthropic_messages_call_a_tool_and_go_on_with_its_result(listen: Listen) -> None:
    tools: list[Any] = [{"name": "Weather", "description": "Weather", "input_schema": Weather.model_json_schema()}]
    options: dict[str, Any] = {"model": "any", "max_tokens": 500, "tools": tools}
    with of_anthropic(saying(listen, f"I look.\n{CALL}")) as client:
        plain = client.messages.create(messages=QUESTION, **options)
        assert plain.stop_reason == "tool_use"
        assert [block.type for block in plain.content] == ["text", "tool_use"]
        call: Any = plain.content[1]
        assert (call.name, call.input) == ("Weather", {"city": "Paris", "days": 2})
        with client.messages.stream(messages=QUESTION, **options) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        streamed: Any = final.content
        assert (text, streamed[1].input, final.stop_reason) == ("I look.", call.input, "tool_use")
        assert final.usage.output_tokens == plain.usage.output_tokens
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
        history = [*QUESTION, {"role": "assistant", "content": plain.content}, {"role": "user", "content": [result]}]
        counted = client.messages.count_tokens(model="any", messages=history, tools=tools)
        assert counted.input_tokens > client.messages.count_tokens(model="any", messages=QUESTION).input_tokens
        assert client.messages.create(messages=history, **options).stop_reason == "tool_use"


def test_anthropic_gets_thoughts_as_a_block_before_the_text(listen: Listen) -> None:
    with of_anthropic(saying(listen, "<think>\nHm.\n</think>\n\nYes.", THINKING)) as client:
        options: dict[str, Any] = {"model": "any", "messages": QUESTION, "max_tokens": 400}
        plain: Any = client.messages.create(**options)
        assert [block.type for block in plain.content] == ["thinking", "text"]
        assert (plain.content[0].thinking, plain.content[1].text) == ("Hm.", "Yes.")
        with client.messages.stream(**options) as stream:
            final: Any = stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in plain.content]


# ---- answers that keep to a schema


class Verdict(BaseModel):
    answer: Literal["yes", "no", "perhaps"]
    sure: bool
    marks: list[Literal[1, 2, 3]] = Field(max_length=3)


class Opinion(BaseModel):
    """Without limits of length, which Anthropic's client does not send but holds the answer to."""

    answer: Literal["yes", "no", "perhaps"]
    sure: bool
    mark: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def tiny(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    process = ServerProcess(
        tmp_path_factory.mktemp("tiny"), "-m", str(tiny_llama_path), "-t", "1", "-c", "4096", "-np", "2",
        "--embeddings", "--pooling", "mean", "--api-key", "secret", "--alias", "tiny",
    )  # fmt: skip
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def tiny_openai(tiny: ServerProcess) -> Iterator[openai.OpenAI]:
    with of_openai(tiny, api_key="secret") as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_openai_parses_structured_chats_and_responses(tiny_openai: openai.OpenAI, seed: int) -> None:
    chat = tiny_openai.chat.completions.parse(
        model="any", messages=QUESTION, response_format=Verdict, seed=seed, max_tokens=400
    )
    assert isinstance(chat.choices[0].message.parsed, Verdict)
    with tiny_openai.chat.completions.stream(
        model="any", messages=QUESTION, response_format=Verdict, seed=seed, max_tokens=400
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == chat.choices[0].message.parsed
    response = tiny_openai.responses.parse(
        model="any", input=QUESTION, text_format=Verdict, max_output_tokens=400, extra_body={"seed": seed}
    )
    assert response.output_parsed == chat.choices[0].message.parsed


@pytest.mark.parametrize("seed", range(3))
def test_anthropic_parses_structured_messages(tiny: ServerProcess, seed: int) -> None:
    with of_anthropic(tiny, api_key="secret") as client:
        parsed = client.messages.parse(model="any", messages=QUESTION, max_tokens=400, output_format=Opinion)
        assert isinstance(parsed.parsed_output, Opinion)


@pytest.mark.parametrize(
    "config",
    ["x", {"format": 1}, {"format": {"type": "text"}}, {"format": {"type": "json_schema"}}, {"effort": 3}],
)
def test_an_output_config_that_cannot_be_followed_is_refused_by_name(serve: Any, config: Any) -> None:
    body = {"messages": QUESTION, "max_tokens": 4, "output_config": config}
    response = serve().post("/v1/messages", body)
    assert response.status_code == 400
    assert "output_config" in response.json()["error"]["message"]


# ---- embeddings, models


def test_openai_embeddings_of_one_and_many_texts(tiny_openai: openai.OpenAI) -> None:
    one = tiny_openai.embeddings.create(model="any", input="first")
    many = tiny_openai.embeddings.create(model="any", input=["first", "second", "third"], encoding_format="float")
    assert [entry.index for entry in many.data] == [0, 1, 2]
    assert one.data[0].embedding == pytest.approx(many.data[0].embedding, abs=1e-6)
    assert sum(value * value for value in one.data[0].embedding) == pytest.approx(1, abs=1e-5)
    short = tiny_openai.embeddings.create(model="any", input="first", dimensions=8)
    assert len(short.data[0].embedding) == 8


def test_clients_list_the_model(tiny: ServerProcess, tiny_openai: openai.OpenAI) -> None:
    assert [model.id for model in tiny_openai.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        tiny_openai.models.retrieve("tiny")  # llama-server has no such path


# ---- errors


def test_errors_are_the_classes_of_the_openai_client(tiny: ServerProcess, tiny_openai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        tiny_openai.chat.completions.create(model="any", messages=QUESTION, temperature="hot")  # type: ignore[call-overload]
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as too_long:
        tiny_openai.completions.create(model="any", prompt="word " * 5000, stream=True)
    assert too_long.value.type == "exceed_context_size_error"
    with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
        of_openai(tiny, api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        tiny_openai.files.list()
    with pytest.raises(openai.InternalServerError, match="suffix") as unsupported:
        tiny_openai.completions.create(model="any", prompt="a", suffix="b")
    assert unsupported.value.status_code == 501


def test_errors_are_the_classes_of_the_anthropic_client(tiny: ServerProcess) -> None:
    options: dict[str, Any] = {"model": "any", "messages": QUESTION, "max_tokens": 4}
    with of_anthropic(tiny, api_key="secret") as client:
        assert client.messages.create(**options).usage.output_tokens <= 4
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
            client.messages.create(**options, stop_sequences=[1])  # type: ignore[list-item]
        with pytest.raises(anthropic.BadRequestError, match="exceeds the available context size"):
            client.messages.create(model="any", max_tokens=4, messages=[{"role": "user", "content": "word " * 5000}])
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("tiny")
    with of_anthropic(tiny, api_key="wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**options)


def test_a_failure_in_a_stream_is_an_error_of_the_client(listen: Listen) -> None:
    server = endless(listen)
    with of_openai(server) as client:
        stream = client.chat.completions.create(model="any", messages=QUESTION, stream=True)
        next(stream)
        server.engine.fails = RuntimeError("the device fell off")
        with pytest.raises(openai.APIError, match="fell off"):
            for _ in stream:
                pass
    with of_anthropic(server) as client2:
        events = client2.messages.create(model="any", messages=QUESTION, max_tokens=30000, stream=True)
        next(iter(events))
        server.engine.fails = RuntimeError("the device fell off")
        with pytest.raises(anthropic.APIError, match="fell off"):
            for _ in events:
                pass
    server.wait_idle()


@pytest.mark.parametrize("client_of", [of_openai, of_anthropic])
def test_a_client_tries_again_after_503_as_long_as_the_server_asks(listen: Listen, client_of: Any) -> None:
    server = listen(loads=False, n_slots=1)
    client = client_of(server, max_retries=4)
    loader = threading.Timer(0.3, server.load)
    loader.start()
    began = time.monotonic()
    try:
        if client_of is of_openai:
            client.chat.completions.create(model="any", messages=QUESTION, max_tokens=2)
        else:
            client.messages.create(model="any", messages=QUESTION, max_tokens=2)
    finally:
        loader.join()
        client.close()
    assert time.monotonic() - began >= 0.9  # Retry-After: 1


def test_without_retries_503_is_an_error_that_says_when_to_come_back(listen: Listen) -> None:
    with of_openai(listen(loads=False)) as client, pytest.raises(openai.InternalServerError) as caught:
        client.models.list()
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")


# ---- leaving


def assert_ends_soon(server: Any) -> None:
    """No slot works, after a few steps at most; an answer would go on for a minute."""
    n_steps = server.engine.n_steps
    server.wait_idle(5)
    assert server.engine.n_steps - n_steps < 500


def test_closing_a_stream_frees_its_slot(listen: Listen) -> None:
    server = endless(listen)
    with of_openai(server) as client:
        starts: list[Callable[[], openai.Stream[Any]]] = [
            lambda: client.chat.completions.create(model="any", messages=QUESTION, stream=True),
            lambda: client.completions.create(model="any", prompt="x", stream=True),
            lambda: client.responses.create(model="any", input="x", stream=True),
        ]
        for start in starts:
            stream = start()
            next(iter(stream))
            assert server.engine_loop.n_busy == 1
            stream.close()
            assert_ends_soon(server)
    with of_anthropic(server) as client2:
        with client2.messages.stream(model="any", messages=QUESTION, max_tokens=30000) as events:
            next(iter(events))
            assert server.engine_loop.n_busy == 1
        assert_ends_soon(server)


def test_a_client_that_runs_out_of_patience_frees_its_slot(listen: Listen) -> None:
    server = endless(listen)
    with of_openai(server, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="any", messages=QUESTION)
    assert_ends_soon(server)


# ---- asynchronous clients


def test_asynchronous_clients_stream_side_by_side_and_can_be_cancelled(listen: Listen) -> None:
    server = listen(n_ctx=16384, n_slots=4, engine={"step_seconds": 0.001})

    async def openai_text(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        options: dict[str, Any] = {"model": "any", "prompt": f"{number}: ", "max_tokens": 30, "temperature": 0}
        plain = await client.completions.create(**options)
        stream = await client.completions.create(**options, stream=True)
        return plain.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    async def anthropic_text(client: anthropic.AsyncAnthropic, number: int) -> tuple[str, str]:
        options: dict[str, Any] = {"model": "any", "max_tokens": 30, "extra_body": {"temperature": 0}}
        options["messages"] = [{"role": "user", "content": f"{number}"}]
        plain: Any = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            return plain.content[0].text, await stream.get_final_text()

    async def work() -> list[tuple[str, str]]:
        async with (
            openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as first,
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as second,
        ):
            pairs = await asyncio.gather(
                *(openai_text(first, number) for number in range(6)),
                *(anthropic_text(second, number) for number in range(6)),
            )
            task = asyncio.create_task(first.completions.create(model="any", prompt="x", max_tokens=10000))
            while not server.engine_loop.n_busy:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return pairs

    pairs = asyncio.run(work())
    assert all(plain == streamed != "" for plain, streamed in pairs)
    assert len({plain for plain, _ in pairs}) > 6
    assert_ends_soon(server)
