"""The API as a small model of random weights answers it: what the acceptance suite of llama-server asks for and the
fake engine cannot show, because it needs real numbers, a real vocabulary or a process of its own.

The settings are those of that suite: slots of 256 tokens, batches of 32, seed 42.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engine_server import EngineServer
from real_process import ServerProcess
from support_app import parse_events

from pyllama.tools import gguf_split
from support.tiny_models import write_tiny_model

pytest.importorskip("pyllama._engine", reason="needs the native module")

SETTINGS = ("-c", "512", "-b", "32", "-np", "2", "-n", "64", "--seed", "42", "--alias", "tinyllama-2", "--slots")
CONVERSATION = [
    {"role": "system", "content": "You read the book."},
    {"role": "user", "content": "What is the best book?"},
]

Start = Callable[..., EngineServer]


@pytest.fixture
def start(tiny_llama_path: Path) -> Iterator[Start]:
    """`start(*arguments)` -> an `EngineServer`; all of them are closed at the end of the test."""
    servers: list[EngineServer] = []

    def start_one(*arguments: str, model: Path = tiny_llama_path) -> EngineServer:
        servers.append(EngineServer(model, *SETTINGS, *arguments))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def post(server: EngineServer, path: str, **body: Any) -> Any:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: EngineServer, messages: list[dict[str, Any]] = CONVERSATION, **body: Any) -> Any:
    return post(server, "/v1/chat/completions", messages=messages, **body)


def stream(server: EngineServer, path: str, **body: Any) -> list[Any]:
    response = server.client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return parse_events(response.text)


def n_shared(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


# ---- process and information


@pytest.fixture
def has_ipv6_loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"needs an IPv6 loopback address: {error}")


@pytest.mark.contract("basic 2")
@pytest.mark.usefixtures("has_ipv6_loopback")
def test_addresses_of_the_command_line_beat_the_environment_and_each_streams_with_the_key(
    tiny_llama_path: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = ("-m", str(tiny_llama_path), *SETTINGS, "--host", "127.0.0.1,::1", "--api-key", "secret")
    process = ServerProcess(tmp_path, *arguments, port=port, environment={"LLAMA_ARG_HOST": "192.0.2.1"})
    try:
        process.wait_ready()

        def ask(url: str) -> None:
            with httpx.Client(base_url=url, timeout=60) as client:
                assert client.get("/health").status_code == 200
                assert client.post("/v1/completions", json={}).status_code == 401
                body = {"prompt": "the world", "max_tokens": 8, "stream": True}
                answer = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
                assert len(parse_events(answer.text)) > 2

        with ThreadPoolExecutor(2) as executor:
            list(executor.map(ask, (f"http://127.0.0.1:{port}", f"http://[::1]:{port}")))
        assert "LLAMA_ARG_HOST" in process.log  # a warning names the variable that does not count
    finally:
        process.close()


@pytest.mark.contract("basic 3", "basic 8")
def test_properties_and_the_list_of_models_say_what_was_given(start: Start, tiny_llama_path: Path) -> None:
    server = start("--alias", "tinyllama-2,fim,code", "--tags", "chat,fim,small")
    props = server.client.get("/props").json()
    assert props["model_path"] == str(tiny_llama_path)
    assert props["model_alias"] == "code"
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["seed"] == 42
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], set(model["aliases"])) == ("code", {"tinyllama-2", "fim", "code"})
    assert set(model["tags"]) == {"chat", "fim", "small"}
    assert chat(server, max_tokens=1)["model"] == "code"


@pytest.mark.contract("basic 6")
def test_a_model_in_three_files_answers_as_the_whole_one(start: Start, tiny_llama_path: Path, tmp_path: Path) -> None:
    assert gguf_split.main(["--split-max-tensors", "8", str(tiny_llama_path), str(tmp_path / "part")]) == 0
    parts = sorted(tmp_path.glob("part-00001-of-*.gguf"))
    assert "-of-00003" in parts[0].name
    body = {"prompt": "the world", "n_predict": 16, "temperature": 0, "return_tokens": True}
    whole, split = (post(server, "/completion", **body) for server in (start(), start(model=parts[0])))
    assert split["tokens"] == whole["tokens"]
    assert len(split["tokens"]) == 16


# ---- chats


TEMPLATES = {
    "the file's": ([], "<|im_start|>user\nWhat is the best book?<|im_end|>\n<|im_start|>assistant\n"),
    "chatml": (["--chat-template", "chatml"], "<|im_start|>user\nWhat is the best book?<|im_end|>\n"),
    "without jinja": (["--no-jinja"], "<|im_start|>user\nWhat is the best book?<|im_end|>\n<|im_start|>assistant\n"),
    "constant": (["--chat-template", "{{ 'This is not a chat template, it is' }}"], "it is"),
}


@pytest.mark.contract("chat 1", "chat 24")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_counts_the_tokens_of_its_template(start: Start, name: str) -> None:
    arguments, text = TEMPLATES[name]
    server = start("--jinja", *arguments)
    joined = [CONVERSATION[0], {"role": "user", "content": "What is\nthe best book?"}]
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book?"}]
    fields = {"max_tokens": 8, "ignore_eos": True, "model": "unknown", "verbose": True}
    conversations = (CONVERSATION, joined, [CONVERSATION[0], {"role": "user", "content": parts}])
    answers = [chat(server, messages, **fields) for messages in conversations]
    for answer in answers:
        prompt = answer["__verbose"]["prompt"]
        tokens = post(server, "/tokenize", content=prompt, add_special=True)["tokens"]
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        assert answer["usage"]["completion_tokens"] == 8
        assert "cmpl" in answer["id"]
        assert answer["system_fingerprint"].startswith("b")
        assert (answer["choices"][0]["message"]["role"], answer["choices"][0]["finish_reason"]) == (
            "assistant", "length",
        )  # fmt: skip
    assert text in answers[0]["__verbose"]["prompt"]
    assert answers[1]["__verbose"]["prompt"] == answers[2]["__verbose"]["prompt"]
    if name == "constant":
        assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    assert "__verbose" not in chat(server, **{**fields, "verbose": False})


@pytest.mark.contract("chat 2")
def test_cached_tokens_are_counted_up_to_where_prompts_part_and_the_last_is_computed(start: Start) -> None:
    server = start("-np", "1")
    endings = ("the best", "the best", "the worst book", "another book")
    seen: list[list[int]] = []
    for ending in endings:
        answer = chat(server, [{"role": "user", "content": f"What is {ending}"}], max_tokens=4, verbose=True)
        prompt = post(server, "/tokenize", content=answer["__verbose"]["prompt"])["tokens"]
        shared = max((n_shared(prompt, earlier) for earlier in seen), default=0)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        assert usage["prompt_tokens_details"]["cached_tokens"] == min(shared, len(prompt) - 1)
        assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == len(prompt)
        seen.append(prompt)


@pytest.mark.contract("chat 5", "chat 6", "chat 7")
def test_a_template_by_name_is_rendered_exactly_and_an_answer_continued(start: Start) -> None:
    server = start("--chat-template", "llama3", "-lv", "10")
    head = (
        "<|start_header_id|>system<|end_header_id|>\n\nYou read the book.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is the best book?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert chat(server, max_tokens=1)["__verbose"]["prompt"].endswith(head)
    for content, text in (
        ("Whill", "Whill"),
        ([{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}], "Wh\n\nill"),
    ):
        messages = [*CONVERSATION, {"role": "assistant", "content": content}]
        for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
            prompt = chat(server, messages, max_tokens=1, **fields)["__verbose"]["prompt"]
            assert prompt.endswith(head + text)


@pytest.mark.contract("chat 9")
def test_command_r_is_rendered_exactly(start: Start) -> None:
    server = start("--chat-template", "command-r")
    assert post(server, "/apply-template", messages=CONVERSATION)["prompt"] == (
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You read the book.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>What is the best book?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    )


@pytest.mark.contract("chat 18", "completion 22")
def test_banned_words_do_not_appear_in_a_chat(start: Start) -> None:
    server = start()
    fields = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    free = chat(server, **fields, logprobs=True, top_logprobs=0)["choices"][0]
    banned = {record["id"] for record in free["logprobs"]["content"]}
    assert banned
    for bias in ({str(token): -100 for token in banned}, [[token, False] for token in banned]):
        choice = chat(server, **fields, logit_bias=bias, logprobs=True, top_logprobs=0)["choices"][0]
        assert len(choice["logprobs"]["content"]) == 64
        assert banned.isdisjoint(record["id"] for record in choice["logprobs"]["content"])


@pytest.mark.contract("chat 19", "chat 20", "ctx_shift 3")
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_chat_beyond_the_slot_is_refused_by_its_size(start: Start, fields: dict[str, bool]) -> None:
    server = start()
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "the world"} for i in range(201)]
    response = server.client.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    error = response.json()["error"]
    assert (error["code"], error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 256)
    assert error["n_prompt_tokens"] > 256
    assert "exceeds the available context size (256 tokens)" in error["message"]
    assert f"request ({error['n_prompt_tokens']} tokens)" in error["message"]


@pytest.mark.contract("chat 21", "metrics 7")
def test_progress_begins_at_the_cached_tokens_and_ends_at_the_total(start: Start) -> None:
    server = start("-c", "256", "-np", "1", "-b", "64")
    text = "the other world is " * 20
    for n_events, cached in ((4, False), (2, True)):
        body = {"max_tokens": 2, "return_progress": True, "timings_per_token": True}
        content = text + ("and so on" if cached else "")
        events = stream(server, "/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)[:-1]
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        timings = [event["timings"] for event in events if "prompt_progress" in event]
        assert len(progress) == n_events
        assert len({(p["total"], p["cache"]) for p in progress}) == 1
        assert progress[0]["processed"] == progress[0]["cache"]
        assert (progress[0]["cache"] > 0) == cached
        assert progress[-1]["processed"] == progress[-1]["total"] > 0
        processed = [p["processed"] for p in progress]
        assert processed == sorted(set(processed))
        assert [timings[0][name] for name in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")] == [0] * 4
        times = [event["timings"]["prompt_ms"] for event in events if "timings" in event]
        assert times == sorted(times)
        assert times[-1] > 0


@pytest.mark.contract("chat 22")
def test_two_choices_on_a_named_slot_twice(start: Start) -> None:
    server = start()
    for _ in range(2):
        choices = chat(server, n=2, id_slot=0, max_tokens=4, ignore_eos=True)["choices"]
        assert [(c["index"], c["message"]["role"], c["finish_reason"]) for c in choices] == [
            (0, "assistant", "length"), (1, "assistant", "length"),
        ]  # fmt: skip


@pytest.mark.contract("chat 23")
def test_input_tokens_of_a_chat_are_those_that_it_costs(start: Start) -> None:
    server = start()
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        counted = post(server, path, messages=CONVERSATION)
        assert counted == {"input_tokens": counted["input_tokens"], "object": "response.input_tokens"}
        assert counted["input_tokens"] > 5
    assert chat(server, max_tokens=1)["usage"]["prompt_tokens"] == counted["input_tokens"]


# ---- completions


@pytest.mark.contract("completion 1", "completion 2")
@pytest.mark.parametrize(("n_predict", "returns_tokens"), [(8, False), (64, True)])
def test_a_completion_says_what_it_computed_plain_and_streamed(
    start: Start, n_predict: int, returns_tokens: bool
) -> None:
    server = start()
    body = {"prompt": "the hello of the world", "n_predict": n_predict, "ignore_eos": True}
    prompt = post(server, "/tokenize", content=body["prompt"], add_special=True)["tokens"]
    plain = post(server, "/completion", **body, return_tokens=returns_tokens, cache_prompt=False)
    assert (plain["timings"]["prompt_n"], plain["timings"]["predicted_n"]) == (len(prompt), n_predict)
    assert plain["truncated"] is False
    assert isinstance(plain["has_new_line"], bool)
    assert len(plain["tokens"]) == (n_predict if returns_tokens else 0)
    assert all(type(token) is int for token in plain["tokens"])
    *partials, final = stream(server, "/completion", **body, cache_prompt=False)
    assert {event["stop"] for event in partials} == {False}
    assert all(event["tokens"] and all(type(token) is int for token in event["tokens"]) for event in partials)
    assert (final["stop"], final["stop_type"], final["truncated"]) == (True, "limit", False)
    assert (final["timings"]["prompt_n"], final["timings"]["predicted_n"]) == (len(prompt), n_predict)
    settings = final["generation_settings"]
    assert (settings["n_predict"], settings["seed"]) == (n_predict, 42)
    assert (settings["adaptive_target"], settings["adaptive_decay"]) == (-1, pytest.approx(0.9))
    assert settings["stream"] is True
    assert "".join(event["content"] for event in partials) == plain["content"]


@pytest.mark.contract("completion 9")
def test_the_size_of_a_batch_does_not_change_a_text(start: Start) -> None:
    body = {"prompt": "the other world is " * 8, "n_predict": 32, "temperature": 1, "return_tokens": True}
    answers = [post(start("-b", n), "/completion", **body)["tokens"] for n in ("16", "32", "512")]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.contract("completion 7", "completion 10")
@pytest.mark.parametrize("n_slots", ["1", "2"])
def test_a_cached_prompt_gives_the_text_of_a_computed_one(start: Start, n_slots: str) -> None:
    server = start("-np", n_slots, "-c", "1024")
    body = {"prompt": "the other world is " * 8, "n_predict": 40, "temperature": 1, "return_tokens": True}
    fresh, cached, again = (post(server, "/completion", **body, cache_prompt=c) for c in (False, True, True))
    computed = post(server, "/completion", **body, cache_prompt=False)
    assert again["timings"]["cache_n"] > 0
    assert computed["timings"]["cache_n"] == 0
    assert fresh["tokens"] == cached["tokens"] == again["tokens"] == computed["tokens"]


@pytest.mark.contract("completion 21")
def test_asking_for_samplers_on_the_device_changes_no_text(start: Start) -> None:
    asked, plain = start("--backend_sampling"), start()
    body = {"prompt": "the other world is", "n_predict": 32, "temperature": 1, "return_tokens": True, "n_probs": 3}
    answers = [post(asked, "/completion", **body)]
    answers += [post(plain, "/completion", **body, backend_sampling=value) for value in (True, False)]
    assert [answer["generation_settings"]["backend_sampling"] for answer in answers] == [True, True, False]
    for answer in answers[:2]:
        assert answer["tokens"] == answers[2]["tokens"]
        assert answer["completion_probabilities"] == answers[2]["completion_probabilities"]


@pytest.mark.contract("ctx_shift 2", "ctx_shift 4")
def test_without_the_shift_texts_end_where_the_slot_does(start: Start) -> None:
    server = start("-n", "128")
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    short = post(server, "/completion", prompt=prompt, n_predict=64, ignore_eos=True)
    assert (short["tokens_predicted"], short["truncated"]) == (64, False)
    whole = post(start("-n", "-1"), "/completion", prompt=prompt, n_predict=-1, ignore_eos=True)
    assert (whole["tokens_predicted"], whole["truncated"], whole["stop_type"]) == (248, True, "limit")
    *partials, final = stream(server, "/v1/completions", prompt=prompt, n_predict=256, ignore_eos=True)[:-1]
    assert final["choices"][0]["finish_reason"] == "length"
    assert {event["choices"][0]["finish_reason"] for event in partials} == {None}
    assert "".join(event["choices"][0]["text"] for event in partials)


@pytest.mark.contract("completion 24")
def test_computed_and_cached_tokens_of_random_prompts_add_up(start: Start) -> None:
    server = start("-c", "1024", "--kv-unified")
    rng = np.random.default_rng(3)
    words = ("the", "hello", "world", "is", "on", "in", "you", "and")
    prompts = [" ".join(rng.choice(words, rng.integers(20, 90))) for _ in range(16)]
    lengths = [len(post(server, "/tokenize", content=prompt, add_special=True)["tokens"]) for prompt in prompts]

    def ask(prompt: str) -> Any:
        return post(server, "/completion", prompt=prompt, n_predict=10, ignore_eos=True)["timings"]

    for _ in range(2):
        with ThreadPoolExecutor(4) as executor:
            timings = list(executor.map(ask, prompts))
        assert [t["prompt_n"] + t["cache_n"] for t in timings] == lengths
        assert {t["predicted_n"] for t in timings} == {10}
        assert all(t["prompt_n"] >= 1 for t in timings)


@pytest.mark.contract("metrics 5", "metrics 6")
@pytest.mark.parametrize("n_predict", [1, 8, 16])
def test_every_timing_is_a_number_and_rates_leave_the_first_token_out(start: Start, n_predict: int) -> None:
    timings = post(start(), "/completion", prompt="the world", n_predict=n_predict, ignore_eos=True)["timings"]
    assert all(isinstance(value, (int, float)) and np.isfinite(value) and value >= 0 for value in timings.values())
    assert timings["prompt_ms"] > 0
    assert timings["prompt_per_token_ms"] > 0
    if n_predict == 1:
        assert timings["predicted_per_second"] == timings["predicted_per_token_ms"] == 0
    else:
        rate = (n_predict - 1) / timings["predicted_ms"] * 1000
        assert timings["predicted_per_second"] == pytest.approx(rate, rel=1e-6)
        assert timings["predicted_per_token_ms"] == pytest.approx(1000 / rate, rel=1e-6)


# ---- embeddings and reranking


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3.gguf", "qwen3", n_labels=2)


@pytest.mark.contract("embedding 1", "embedding 14")
def test_one_text_has_one_vector_of_length_1_and_equal_texts_equal_ones(start: Start, embedder: Path) -> None:
    server = start("--embeddings", "--pooling", "last", "-ub", "32", model=embedder)
    (entry,) = post(server, "/v1/embeddings", input="I believe the meaning of life is")["data"]
    assert len(entry["embedding"]) > 1
    assert np.linalg.norm(entry["embedding"]) == pytest.approx(1, abs=1e-3)
    data = post(server, "/v1/embeddings", input=["I believe the meaning of life is"] * 5)["data"]
    assert [item["embedding"] for item in data] == [entry["embedding"]] * 5


@pytest.mark.contract("embedding 3", "embedding 13")
def test_long_texts_are_embedded_with_flash_attention(start: Start, embedder: Path) -> None:
    arguments = ("--embeddings", "--pooling", "mean", "-c", "1024", "-b", "300", "-ub", "300", "-fa", "on")
    server = start(*arguments, model=embedder)
    texts = ["the " * n for n in (253, 254, 255, 256)]
    data = post(server, "/v1/embeddings", input=texts)["data"]
    assert [entry["index"] for entry in data] == [0, 1, 2, 3]
    assert np.linalg.norm([entry["embedding"] for entry in data], axis=1) == pytest.approx(1, abs=1e-3)
    response = server.client.post("/v1/embeddings", json={"input": "the " * 2000})
    assert response.status_code == 400
    assert "too large" in response.json()["error"]["message"]


@pytest.mark.contract("rerank 1", "rerank 6")
@pytest.mark.parametrize(("top_n", "n_results"), [(None, 4), (2, 2), (4, 4), (99, 4)])
def test_documents_rank_the_same_in_both_forms(start: Start, embedder: Path, top_n: int | None, n_results: int) -> None:
    server = start("--reranking", "-ub", "32", model=embedder)
    documents = ["A machine is a physical system.", "the", "Learning is the world.", "le monde"]
    body = {"query": "Machine learning is", **({"top_n": top_n} if top_n else {})}
    results = post(server, "/rerank", documents=documents, **body)["results"]
    alone = [post(server, "/rerank", query=body["query"], documents=[document]) for document in documents]
    scores = [answer["results"][0]["relevance_score"] for answer in alone]
    assert len(set(scores)) == 4
    order = sorted(range(4), key=lambda i: -scores[i])[:n_results]
    assert results == [{"index": i, "relevance_score": scores[i]} for i in order]
    assert post(server, "/rerank", texts=documents, **body) == [{"index": i, "score": scores[i]} for i in order]
