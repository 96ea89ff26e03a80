"""The server as its own process with the SmolLM2 model: start, signals, the official OpenAI client, caches,
cancellation, equal texts.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from real_process import ServerProcess
from support_app import parse_events, parse_named_events

pytest.importorskip("pyllama._engine", reason="needs the native module")


# One compute thread: on a busy machine several of them wait for one another, and nothing here measures speed.
@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("server"),
        "-m",
        str(smollm2_path),
        "-c",
        "4096",
        "-t",
        "2",
        "--alias",
        "smol",
        "--metrics",
        "--cache-ram",
        "64",
    )
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as openai_client:
        yield openai_client


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


# ---- start and end


@pytest.mark.contract("basic 1")
def test_every_path_is_503_while_the_model_loads_then_health_is_ok(smollm2_path: Path, tmp_path: Path) -> None:
    process = ServerProcess(tmp_path, "-m", str(smollm2_path), "-c", "512", port=free_port())
    try:
        seen: list[int] = []
        deadline = time.monotonic() + 60
        while not seen or seen[-1] != 200:
            assert time.monotonic() < deadline, process.log
            assert process.process.poll() is None, process.log
            try:
                seen.append(httpx.get(process.url + "/health", timeout=10).status_code)
            except httpx.TransportError:
                continue
        assert set(seen) == {503, 200}
        assert seen == sorted(seen, reverse=True)
    finally:
        process.close()


@pytest.mark.contract("own 11")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "missing.gguf"], "missing.gguf"),
        (["-m", "garbage.gguf"], "garbage.gguf"),
        (["--no-such-option"], "no-such-option"),
        (["--models-preset", "garbage.gguf"], "garbage.gguf"),
    ],
)
def test_a_start_that_fails_ends_with_exit_code_1_and_a_reason(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "garbage.gguf").write_bytes(b"not a model" * 100)
    process = ServerProcess(tmp_path, *arguments)
    try:
        assert process.wait_exit() == 1
        assert words in process.log
        assert "Traceback" not in process.log
    finally:
        process.close()


def test_a_port_in_use_ends_with_exit_code_1(smollm2_path: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = ServerProcess(tmp_path, "-m", str(smollm2_path), port=port)
        try:
            assert process.wait_exit() == 1
            assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in process.log
        finally:
            process.close()


@pytest.mark.contract("own 11")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_code_0_also_while_it_generates(
    smollm2_path: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = ServerProcess(tmp_path, "-m", str(smollm2_path), "-c", "2048", "-t", "1")
    try:
        process.wait_ready()
        results: list[Any] = []

        def ask() -> None:
            try:
                results.append(
                    process.post("/completion", {"prompt": "Once upon a time", "n_predict": 1500, "ignore_eos": True})
                )
            except httpx.TransportError as error:
                results.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not any(slot["is_processing"] for slot in httpx.get(process.url + "/slots", timeout=10).json()):
            time.sleep(0.02)
        process.process.send_signal(number)
        assert process.wait_exit(5) == 0
        thread.join()
        assert isinstance(results[0], httpx.TransportError) or results[0].status_code == 503
    finally:
        process.close()


@pytest.mark.contract("own 11")
def test_a_signal_while_the_model_loads_ends_the_process(smollm2_path: Path, tmp_path: Path) -> None:
    process = ServerProcess(tmp_path, "-m", str(smollm2_path), "-c", "512", port=free_port())
    try:
        deadline = time.monotonic() + 30
        while True:
            assert time.monotonic() < deadline, process.log
            try:
                assert httpx.get(process.url + "/health", timeout=10).status_code == 503, (
                    "it loads too fast for this test"
                )
                break
            except httpx.TransportError:
                continue
        process.process.send_signal(signal.SIGTERM)
        assert process.wait_exit(5) in (-signal.SIGTERM, 0)  # 0: it was ready just then
    finally:
        process.close()


@pytest.mark.contract("own 10")
def test_the_command_line_beats_the_environment_which_beats_the_configuration_file(
    tiny_llama_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "config.ini").write_text(
        "alias = file\nparallel = 3\nctx-size = 1536\nno-such-key = 1\n[*]\nmetrics = true\n[other]\nparallel = 7\n"
    )
    process = ServerProcess(
        tmp_path,
        *("-m", str(tiny_llama_path), "--alias", "line", "-t", "1"),
        environment={"LLAMA_ARG_N_PARALLEL": "2", "LLAMA_ARG_ALIAS": "environment"},
    )
    try:
        process.wait_ready()
        props = httpx.get(process.url + "/props", timeout=20).json()
        assert (props["model_alias"], props["total_slots"]) == ("line", 2)
        assert props["default_generation_settings"]["n_ctx"] == 768
        assert httpx.get(process.url + "/metrics", timeout=20).status_code == 200
        assert f"using config file: {folder / 'config.ini'}" in process.log
        assert "no-such-key" in process.log
        assert "LLAMA_ARG_ALIAS" in process.log
    finally:
        process.close()


@pytest.mark.contract("own 11")
def test_a_second_signal_ends_at_once_with_code_1(smollm2_path: Path, tmp_path: Path) -> None:
    process = ServerProcess(tmp_path, "-m", str(smollm2_path), "-c", "2048")
    try:
        process.wait_ready()
        # A connection that never finishes its request keeps the graceful end waiting for its time limit.
        with socket.create_connection(("127.0.0.1", int(process.url.rpartition(":")[2]))) as connection:
            connection.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.3)
            process.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            process.process.send_signal(signal.SIGTERM)
            assert process.wait_exit(2) == 1
        assert "Received second interrupt, terminating immediately." in process.log
    finally:
        process.close()


@pytest.mark.contract("security 4", "own 8")
def test_a_key_and_several_addresses(smollm2_path: Path, tmp_path: Path) -> None:
    port = free_port()
    path = tmp_path / "s.sock"
    process = ServerProcess(
        tmp_path, "-m", str(smollm2_path), "-c", "512", "--api-key", "secret", "--host", f"127.0.0.1,{path}", port=port
    )
    try:
        process.wait_ready()
        transport = httpx.HTTPTransport(uds=str(path))
        with (
            httpx.Client(transport=transport, base_url="http://local") as unix,
            httpx.Client(base_url=process.url) as tcp,
        ):
            for http in (unix, tcp):
                assert http.get("/health").status_code == 200
                assert http.post("/v1/completions", json={}).status_code == 401
        with openai.OpenAI(base_url=process.url, api_key="secret", max_retries=0) as with_key:
            assert with_key.models.list().data[0].object == "model"
    finally:
        process.close()


# ---- the official client


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol"]


@pytest.mark.contract("completion 4", "completion 5")
def test_openai_completion_plain_and_streamed_give_the_same_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "any", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(**options)
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 8
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_openai_completion_logprobs(client: openai.OpenAI) -> None:
    result = client.completions.create(model="any", prompt="x", max_tokens=2, logprobs=3)
    logprobs = result.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == result.choices[0].text
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs or [])


@pytest.mark.contract("chat 4", "chat 16", "chat 17")
def test_openai_chat_plain_and_streamed_give_the_same_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": "Say hello in French."}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
    }
    plain = client.chat.completions.create(**options)
    message = plain.choices[0].message
    assert message.role == "assistant"
    assert plain.system_fingerprint is not None
    assert plain.system_fingerprint.startswith("b")
    records = plain.choices[0].logprobs.content  # type: ignore[union-attr]
    assert "".join(record.token for record in records or []) == message.content
    assert all(record.logprob <= 0 and len(record.top_logprobs) == 5 for record in records or [])
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_the_models_end_of_turn_is_not_part_of_an_answer(client: openai.OpenAI) -> None:
    """Known fault C11."""
    result = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "Answer with one word: what colour is the sky?"}],
        max_tokens=200,
        temperature=0,
    )
    assert result.choices[0].finish_reason == "stop"
    assert "im_end" not in (result.choices[0].message.content or "")


def test_openai_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}], temperature="hot")  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.completions.create(model="any", prompt="word " * 5000)


@pytest.mark.contract("responses 1", "responses 2")
def test_openai_responses_plain_and_streamed_give_the_text_of_the_chat(client: openai.OpenAI) -> None:
    question = "Say hello in French."
    options: dict[str, Any] = {"model": "any", "input": question, "max_output_tokens": 12, "temperature": 0}
    plain = client.responses.create(**options)
    chat = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": question}], max_tokens=12, temperature=0
    )
    assert plain.output_text == chat.choices[0].message.content != ""
    assert plain.usage is not None
    assert chat.usage is not None
    assert plain.usage.input_tokens == chat.usage.prompt_tokens
    events = list(client.responses.create(**options, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == plain.output_text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == plain.output_text
    with client.responses.stream(**{**options, "input": [{"role": "user", "content": question}]}) as stream:
        assert stream.get_final_response().output_text == plain.output_text
    follow_up = [
        {"role": "user", "content": question},
        *plain.to_dict()["output"],
        {"role": "user", "content": "Again."},
    ]  # type: ignore[misc]
    again = client.responses.create(**{**options, "input": follow_up})
    assert again.usage is not None
    assert again.usage.input_tokens > plain.usage.input_tokens
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**options, previous_response_id="resp_1")


def test_anthropic_messages_plain_and_streamed_give_the_text_of_the_chat(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Say hello in French."}], "max_tokens": 12, "temperature": 0}
    chat = server.post("/v1/chat/completions", body).json()
    plain = server.post("/v1/messages", body).json()
    text = plain["content"][0]["text"]
    assert text == chat["choices"][0]["message"]["content"] != ""
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert counted == chat["usage"]["prompt_tokens"]
    assert plain["usage"]["input_tokens"] + plain["usage"]["cache_read_input_tokens"] == counted
    events = parse_named_events(server.post("/v1/messages", {**body, "stream": True}).text)
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == text
    assert events[-1][0] == "message_stop"


# ---- generation


def test_greedy_texts_are_the_same_alone_and_beside_seven_others(server: ServerProcess) -> None:
    prompts = [f"Here is fact number {i} about the number {i * 7}:" for i in range(8)]

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "cache_prompt": False}
        return server.post("/completion", body).json()["content"]

    alone = [ask(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone


@pytest.mark.contract("completion 7")
def test_a_follow_up_computes_only_what_is_new_and_says_the_same(server: ServerProcess) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    first = server.post("/completion", {"prompt": text, "n_predict": 8, "temperature": 0}).json()
    again = server.post("/completion", {"prompt": text, "n_predict": 8, "temperature": 0}).json()
    assert again["timings"]["prompt_n"] == 1
    assert again["timings"]["cache_n"] == first["tokens_evaluated"] - 1
    assert again["content"] == first["content"]
    fresh = server.post("/completion", {"prompt": text, "n_predict": 8, "temperature": 0, "cache_prompt": False}).json()
    assert fresh["timings"]["cache_n"] == 0
    assert fresh["content"] == first["content"]


def test_choices_with_a_seed_are_the_ones_of_lone_requests(server: ServerProcess) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 10, "temperature": 1.0, "seed": 7}
    together = [result["content"] for result in server.post("/completion", {**body, "n_cmpl": 3}).json()]
    alone = [server.post("/completion", {**body, "seed": 7 + k}).json()["content"] for k in range(3)]
    assert together == alone
    assert len(set(together)) == 3


def test_top_k_0_keeps_every_candidate(server: ServerProcess) -> None:
    """Known fault D14."""
    body = {
        "prompt": "Once upon a",
        "n_predict": 1,
        "temperature": 5,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "return_tokens": True,
    }
    tokens = {server.post("/completion", {**body, "seed": seed}).json()["tokens"][0] for seed in range(50)}
    assert len(tokens) > 40


@pytest.mark.contract("own 2")
def test_a_streams_text_is_the_text_of_the_plain_answer_for_any_characters(server: ServerProcess) -> None:
    body = {
        "prompt": "Repeat: 你好 🌍 €\n你好 🌍 €\n你好",
        "n_predict": 24,
        "temperature": 1.5,
        "seed": 3,
        "stop": ["\n\n"],
    }
    plain = server.post("/completion", body).json()
    events = parse_events(server.post("/completion", {**body, "stream": True}).text)
    assert "".join(event["content"] for event in events) == plain["content"]


@pytest.mark.contract("completion 20")
def test_probabilities_match_between_tokens_and_sum_up(server: ServerProcess) -> None:
    body = {"prompt": "The capital of France is", "n_predict": 3, "n_probs": 10, "temperature": 0}
    result = server.post("/completion", body).json()
    for record in result["completion_probabilities"]:
        values = [top["logprob"] for top in record["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert record["id"] == record["top_logprobs"][0]["id"]
        assert record["logprob"] == pytest.approx(values[0])
    post = server.post("/completion", {**body, "temperature": 1, "top_k": 5, "post_sampling_probs": True}).json()
    for record in post["completion_probabilities"]:
        assert sum(top["prob"] for top in record["top_probs"]) == pytest.approx(1, abs=1e-3)


def test_scores_of_prompt_tokens_are_those_of_their_generation(server: ServerProcess) -> None:
    """Known fault E16: what a greedy answer reported about its tokens, `echo` reports of the same prompt tokens."""
    tokens = server.post("/tokenize", {"content": "The capital of France is"}).json()["tokens"]
    body = {
        "prompt": tokens,
        "n_predict": 12,
        "n_probs": 1,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    answer = server.post("/completion", body).json()
    body = {"prompt": tokens + answer["tokens"], "max_tokens": 1, "logprobs": 1, "echo": True}
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    scored = logprobs["token_logprobs"][len(tokens) : len(tokens) + 12]
    assert scored == pytest.approx([r["logprob"] for r in answer["completion_probabilities"]], abs=1e-4)
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])


def test_many_random_tokens_are_refused_for_their_number_only(server: ServerProcess) -> None:
    """Known fault E35."""
    rng = random.Random(0)
    body = {
        "prompt": [rng.randrange(17, 49152) for _ in range(40960)],
        "ignore_eos": True,
        "stream": True,
        "max_tokens": 5,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["n_prompt_tokens"] == 40960
    body["prompt"] = body["prompt"][:300]
    assert parse_events(server.post("/v1/completions", body).text)[-1] == "[DONE]"


@pytest.mark.contract("completion 23")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(server: ServerProcess, stream: bool) -> None:
    body = json.dumps({"prompt": "Once upon a time", "n_predict": 3000, "ignore_eos": True, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while not any(slot["is_processing"] for slot in httpx.get(server.url + "/slots", timeout=10).json()):
            time.sleep(0.02)
    server.wait_idle(2)


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xff\xfe"}', b'{"prompt": [-1]}', b'{"prompt": [999999999]}', b"\x00" * 100]
)
def test_bad_bytes_and_bad_tokens_leave_the_server_alive(server: ServerProcess, body: bytes) -> None:
    assert httpx.post(server.url + "/completion", content=body, timeout=30).status_code == 400
    assert httpx.get(server.url + "/health", timeout=10).status_code == 200


def test_tokens_there_and_back(server: ServerProcess) -> None:
    text = "What's this? 你好 🌍\n\tcode = f(x)"
    tokens = server.post("/tokenize", {"content": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"] == text
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens


def test_the_models_own_template_is_applied(server: ServerProcess) -> None:
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    assert server.post("/apply-template", body).json()["prompt"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.contract("completion 16")
def test_a_small_shared_pool_serves_four_long_requests_completely(smollm2_path: Path, tmp_path: Path) -> None:
    """Known fault E13: nobody fails, and the texts are those of lone requests."""
    process = ServerProcess(tmp_path, "-m", str(smollm2_path), "-c", "256", "-np", "4", "-kvu", "-t", "1")
    try:
        process.wait_ready()
        prompts = [f"Number {i}. " + "Tell me a story. " * 15 for i in range(4)]

        def ask(prompt: str) -> dict[str, Any]:
            body = {"prompt": prompt, "n_predict": 90, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            return process.post("/completion", body).json()

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            together = list(pool.map(ask, prompts))
        assert [result["timings"]["predicted_n"] for result in together] == [90] * 4
        assert [result["content"] for result in together] == [ask(prompt)["content"] for prompt in prompts]
    finally:
        process.close()


def resident_bytes(process_id: int) -> int:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see the memory of a process")
def test_clients_that_come_and_go_leave_all_slots_free_and_memory_flat(server: ServerProcess) -> None:
    """Twice the same load of 8 clients with 20 requests each, some of which leave early.

    The first load fills the prompt cache to its limit.
    """

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=120) as http:
            for turn in range(20):
                prompt = f"Client {number} says, for the time number {turn}, that"
                n = rng.randrange(1, 12)
                body = {"prompt": prompt, "n_predict": n, "temperature": 0, "stream": rng.random() < 0.5}
                if rng.random() < 0.3:
                    body.update(n_predict=3000, stream=False, ignore_eos=True)
                    with pytest.raises(httpx.TimeoutException):
                        http.post("/completion", json=body, timeout=0.05)
                    continue
                response = http.post("/completion", json=body)
                assert response.status_code == 200
                result = parse_events(response.text)[-1] if body["stream"] else response.json()
                assert result["prompt"] == prompt
                assert result["tokens_predicted"] <= n

    def load() -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(client, range(8)))
        server.wait_idle()

    load()
    before = resident_bytes(server.process.pid)
    load()
    grown = resident_bytes(server.process.pid) - before
    assert grown < 16 * 2**20, f"{grown / 2**20:.1f} MiB more after a second load like the first"
