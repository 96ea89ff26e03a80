"""Our answers beside llama.cpp's own server (`xllamacpp`, a black box): same status, keys, order of keys, value types.

Texts of errors and small differences that docs/server.md lists are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_process import ServerProcess
from support_app import parse_named_events

xllamacpp = pytest.importorskip("xllamacpp", reason="needs the llama.cpp wheel")
pytest.importorskip("pyllama._engine", reason="needs the native module")

MESSAGES = [{"role": "user", "content": "Hi"}]
LONG = "word " * 3000


@pytest.fixture(scope="module")
def addresses(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(llama.cpp's server, ours)"""
    params = xllamacpp.CommonParams()
    params.model.path = str(smollm2_path)
    params.n_ctx = 2048
    params.n_parallel = 4
    params.cpuparams.n_threads = 1
    params.endpoint_metrics = True
    params.port = 0
    oracle = xllamacpp.Server(params)
    arguments = ("-m", str(smollm2_path), "-c", "2048", "-np", "4", "-t", "1", "--metrics")
    process = ServerProcess(tmp_path_factory.mktemp("server"), *arguments)
    try:
        process.wait_ready()
        yield oracle.listening_address, process.url
    finally:
        process.close()
        del oracle


def both(addresses: tuple[str, str], method: str, path: str, body: Any = None) -> tuple[httpx.Response, httpx.Response]:
    oracle, ours = (httpx.request(method, address + path, json=body, timeout=120) for address in addresses)
    return oracle, ours


def shape(value: Any) -> Any:
    """Keys in order and types of values; of an array the first element."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def without_additions(value: Any) -> Any:
    """`/v1/completions` adds OpenAI's arrays beside `content`."""
    if isinstance(value, dict):
        added = (
            ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            if "content" in value and "text_offset" in value
            else ()
        )
        return {key: without_additions(item) for key, item in value.items() if key not in added}
    if isinstance(value, list):
        return [without_additions(item) for item in value]
    return value


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/props", None),
        ("GET", "/v1/models", None),
        ("POST", "/completion", {"prompt": "Hello", "n_predict": 5, "n_probs": 2, "temperature": 0}),
        ("POST", "/completion", {"prompt": "Hello", "n_predict": 3, "n_probs": 2, "post_sampling_probs": True}),
        ("POST", "/completion", {"prompt": ["a", "b"], "n_predict": 2, "return_tokens": True}),
        ("POST", "/completion", {"prompt": "a", "n_predict": 2, "response_fields": ["content", "timings/prompt_n"]}),
        ("GET", "/slots", None),
        ("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 4, "logprobs": 1}),
        ("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 4, "n": 2}),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "verbose": True}),
        ("POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("POST", "/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("POST", "/v1/responses/input_tokens", {"input": "Hi"}),
        ("POST", "/v1/responses", {}),
        ("POST", "/v1/responses", {"input": [{"type": "x"}]}),
        ("POST", "/v1/responses", {"input": "x", "previous_response_id": "r"}),
        ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("POST", "/tokenize", {"content": "héllo 🌍", "with_pieces": True}),
        ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
        ("POST", "/apply-template", {"messages": MESSAGES}),
        ("GET", "/nope", None),
        ("POST", "/completion", {}),
        ("POST", "/completion", {"prompt": [-1]}),
        ("POST", "/completion", {"prompt": []}),
        ("POST", "/completion", {"prompt": 5}),
        ("POST", "/completion", {"prompt": LONG}),
        ("POST", "/completion", {"prompt": LONG, "stream": True}),
        ("POST", "/completion", {"prompt": "x", "temperature": "hot"}),
        ("POST", "/completion", {"prompt": "x", "n_predict": -5}),
        ("POST", "/completion", {"prompt": "x", "n": 99}),
        ("POST", "/completion", {"prompt": "x", "repeat_penalty": 0}),
        ("POST", "/completion", {"prompt": "x", "n": 0}),
        ("POST", "/completion", {"prompt": "x", "dry_sequence_breakers": []}),
        ("POST", "/completion", {"prompt": "x", "t_max_predict_ms": -2}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": None}], "max_tokens": 2}),
        ("POST", "/v1/audio/transcriptions", {}),
        ("POST", "/v1/systemone", {}),
        ("POST", "/v1/chat/completions", {}),
        ("POST", "/v1/chat/completions", {"messages": 5}),
        ("POST", "/v1/chat/completions", {"messages": [{}]}),
        ("POST", "/v1/chat/completions", {"messages": [{"content": "x"}]}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 2}),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "x"}}),
    ],
)
def test_plain_answers_have_the_same_status_keys_and_types(
    addresses: tuple[str, str], method: str, path: str, body: Any
) -> None:
    oracle, ours = both(addresses, method, path, body)
    assert ours.status_code == oracle.status_code
    assert ours.headers["content-type"] == oracle.headers["content-type"]
    assert shape(without_additions(ours.json())) == shape(oracle.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "Hello", "n_predict": 4}),
        ("/completion", {"prompt": "Hello", "n_predict": 4, "return_progress": True, "timings_per_token": True}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "verbose": True, "timings_per_token": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "verbose": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "timings_per_token": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "return_progress": True}),
    ],
)
def test_streams_have_the_same_events(addresses: tuple[str, str], path: str, body: Any) -> None:
    body = {**body, "stream": True, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    oracle, ours = (events(response) for response in both(addresses, "POST", path, body))
    for event in [*oracle, *ours]:
        if "prompt_progress" in event:
            event.pop("tokens", None)  # llama-server puts a placeholder there, we put nothing
    assert [shape(event) for event in ours] == [shape(event) for event in oracle]


def assert_holds(ours: Any, theirs: Any) -> None:
    """Everything that `theirs` has is in `ours`, with the same types."""
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            assert key in ours
            assert_holds(ours[key], value)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for own, their in zip(ours, theirs, strict=True):
            assert_holds(own, their)
    else:
        assert type(ours) is type(theirs)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 6}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "return_progress": True, "timings_per_token": True}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 6}),
    ],
)
def test_named_events_are_the_same_and_lack_nothing(addresses: tuple[str, str], path: str, body: Any) -> None:
    plain = both(addresses, "POST", path, {**body, "temperature": 0})
    assert_holds(plain[1].json(), plain[0].json())
    body = {**body, "stream": True, "temperature": 0, "cache_prompt": False}
    oracle, ours = (parse_named_events(response.text) for response in both(addresses, "POST", path, body))
    assert [name for name, _ in ours] == [name for name, _ in oracle]
    for (_, own), (_, their) in zip(ours, oracle, strict=True):
        assert_holds(own, their)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Hello"}]},
    ],
)
def test_message_prompts_are_as_long(addresses: tuple[str, str], body: Any) -> None:
    oracle, ours = both(addresses, "POST", "/v1/messages/count_tokens", body)
    assert ours.json() == oracle.json()


def test_metrics_have_the_same_names_order_and_types(addresses: tuple[str, str]) -> None:
    oracle, ours = both(addresses, "GET", "/metrics")
    theirs, own = ([line for line in r.text.splitlines() if line.startswith("# TYPE")] for r in (oracle, ours))
    assert own[: len(theirs)] == theirs
    assert all(line.startswith("# TYPE llamacpp:prompt_cache_") for line in own[len(theirs) :])


@pytest.mark.parametrize(
    "text", ["", "Hello world", " two  spaces\n\ttab", "你好 🌍 €", "<|im_start|>user<|im_end|>", "don't 12345"]
)
def test_tokens_are_the_same(addresses: tuple[str, str], text: str) -> None:
    for body in ({"content": text}, {"content": text, "add_special": True}, {"content": text, "parse_special": False}):
        oracle, ours = both(addresses, "POST", "/tokenize", body)
        assert ours.json() == oracle.json()


def test_facts_about_the_model_are_the_same(addresses: tuple[str, str]) -> None:
    oracle, ours = (response.json() for response in both(addresses, "GET", "/v1/models"))
    for name in ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size", "ftype"):
        assert ours["data"][0]["meta"][name] == oracle["data"][0]["meta"][name], name
    oracle, ours = (response.json() for response in both(addresses, "GET", "/props"))
    for name in (
        "model_ftype",
        "chat_template",
        "chat_template_caps",
        "bos_token",
        "eos_token",
        "total_slots",
        "modalities",
    ):
        assert ours[name] == oracle[name], name
