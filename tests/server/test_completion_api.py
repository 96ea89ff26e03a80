"""`/completion`, `/completions`, `/v1/completions` over the fake engine: shapes, streams, stops, limits,
probabilities.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_engine import N_VOCAB, FakeSampler, forced_text, pseudo_random_token

from pyllama.server.loaded_model import defaults_from_metadata
from pyllama.server.settings import ServerSettings

NATIVE_KEYS = [
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
    "generation_settings", "prompt",
    "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached", "timings",
]  # fmt: skip
TIMING_KEYS = [
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
]  # fmt: skip


@pytest.mark.contract("completion 1")
def test_a_native_result_has_its_keys_in_order(serve: Any) -> None:
    result = serve().post("/completion", {"prompt": "hello", "n_predict": 8, "return_tokens": True}).json()
    assert list(result) == NATIVE_KEYS
    assert list(result["timings"]) == TIMING_KEYS
    assert (result["tokens_predicted"], result["tokens_evaluated"], result["tokens_cached"]) == (8, 5, 12)
    assert len(result["tokens"]) == 8
    assert (result["stop_type"], result["truncated"], result["prompt"]) == ("limit", False, "hello")
    assert result["generation_settings"]["n_predict"] == result["generation_settings"]["max_tokens"] == 8


@pytest.mark.contract("completion 3")
@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completions"])
@pytest.mark.parametrize("stop", [[], ["a"], ["ab", "e "]])
def test_a_streams_text_is_the_text_of_the_plain_answer(serve: Any, path: str, stop: list[str]) -> None:
    server = serve()
    body = {"prompt": "once upon", "n_predict": 60, "stop": stop, "seed": 7}
    plain = server.post(path, body).json()
    events = server.events(path, body)
    if path == "/v1/completions":
        assert events.pop() == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events) == plain["choices"][0]["text"]
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
        assert events[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    else:
        assert "".join(event["content"] for event in events) == plain["content"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert len(events) == plain["tokens_predicted"] + 1
        assert list(events[-1]) == NATIVE_KEYS
        assert (events[-1]["content"], events[-1]["tokens"]) == ("", [])


def test_one_partial_per_token_and_held_back_text_arrives_with_the_token_that_decides(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"The quick brown fox")})
    events = server.events("/completion", {"prompt": "say|", "n_predict": 50, "stop": ["own fox"]})
    contents = [event["content"] for event in events]
    assert "".join(contents) == "The quick br"
    assert contents[10:13] == ["b", "r", ""]
    assert events[-1]["stop_type"] == "word"
    assert events[-1]["stopping_word"] == "own fox"


def test_a_held_back_tail_is_released_when_the_generation_ends_otherwise(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"brown fo")})
    body = {"prompt": "say|", "n_predict": 50, "stop": ["own fox"]}
    assert server.post("/completion", body).json()["content"] == "brown fo"
    events = server.events("/completion", {**body, "n_predict": 5})
    assert "".join(event["content"] for event in events) == "brown"
    assert events[-1]["stop_type"] == "limit"


def test_a_character_cut_between_tokens_is_never_sent_in_parts(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text("a€😀b".encode())})
    events = server.events("/completion", {"prompt": "|", "n_predict": 50})
    assert [event["content"] for event in events] == ["a", "€", "😀", "b", "", ""]
    assert events[1]["tokens"] == ["€".encode()[-1]]
    assert [event["tokens_predicted"] for event in events] == [1, 4, 8, 9, 10, 10]


def test_the_end_token_stops_and_its_text_is_not_shown(serve: Any) -> None:
    result = (
        serve(engine={"next_token": forced_text(b"hi")}).post("/completion", {"prompt": "|", "n_predict": 9}).json()
    )
    assert (result["content"], result["stop_type"], result["tokens_predicted"]) == ("hi", "eos", 3)
    shown = serve(engine={"next_token": forced_text(b"hi")}, shows_special=True)
    assert shown.post("/completion", {"prompt": "|", "n_predict": 9}).json()["content"] == "hi</s>"


@pytest.mark.contract("metrics 5")
@pytest.mark.parametrize(("n_predict", "expected"), [(0, 1), (1, 1), (3, 3)])
def test_the_budget_counts_tokens_and_zero_gives_one(serve: Any, n_predict: int, expected: int) -> None:
    result = serve().post("/completion", {"prompt": "x", "n_predict": n_predict}).json()
    assert (result["tokens_predicted"], result["stop_type"]) == (expected, "limit")
    timings = result["timings"]
    if expected == 1:
        assert timings["predicted_per_second"] == timings["predicted_per_token_ms"] == 0
    else:
        assert timings["predicted_per_second"] == pytest.approx((expected - 1) / timings["predicted_ms"] * 1000)


@pytest.mark.contract("ctx_shift 2")
def test_without_a_budget_the_servers_counts_then_the_slot(serve: Any) -> None:
    assert serve(n_predict=5).post("/completion", {"prompt": "x"}).json()["tokens_predicted"] == 5
    result = serve(n_ctx=256).post("/completion", {"prompt": "12345678"}).json()
    assert (result["tokens_predicted"], result["truncated"], result["stop_type"]) == (248, True, "limit")
    plain = serve(n_ctx=256).post("/v1/completions", {"prompt": "12345678"}).json()
    assert plain["choices"][0]["finish_reason"] == "length"


@pytest.mark.contract("completion 11")
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(serve: Any, stream: bool) -> None:
    server = serve(n_ctx=512, n_ctx_slot=256)
    response = server.post("/completion", {"prompt": "x" * 256, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 256, 256)
    assert "exceeds the available context size" in error["message"]
    assert server.post("/completion", {"prompt": "x" * 255, "stream": stream}).status_code == 200


@pytest.mark.contract("completion 12", "completion 14")
@pytest.mark.parametrize(
    ("prompt", "n_results", "n_tokens"),
    [
        ("abc", 1, 3),
        ([97, 98, 99], 1, 3),
        ([97, "bc", 100], 1, 4),
        ({"prompt_string": "abc"}, 1, 3),
        (["abc"], 1, 3),
        (["abc", "abc"], 2, 3),
        ([[97, 98, 99], "abc"], 2, 3),
        ([[97, 98, 99], {"prompt_string": "abc"}], 2, 3),
        ([[97, "bc"], [97, "bc"]], 2, 3),
    ],
)
def test_prompt_shapes(serve: Any, prompt: Any, n_results: int, n_tokens: int) -> None:
    result = serve().post("/completion", {"prompt": prompt, "n_predict": 4, "temperature": 0}).json()
    results = [result] if n_results == 1 else result
    assert len(results) == n_results
    assert [r["index"] for r in results] == list(range(n_results))
    assert {r["tokens_evaluated"] for r in results} == {n_tokens}
    assert len({r["content"] for r in results}) == 1


@pytest.mark.contract("completion 13")
@pytest.mark.parametrize(
    "prompt",
    [[], 5, True, 1.5, {}, {"text": "x"}, [1, [2]], [1, None], [[], 1.5], [True], ["a", 5.5], [1, {"prompt_string":
    "x"}], {"prompt_string": "x", "multimodal_data": ["AA=="]}, {"prompt_string": 5}],
)  # fmt: skip
def test_other_prompt_shapes_are_refused(serve: Any, prompt: Any) -> None:
    response = serve().post("/completion", {"prompt": prompt, "n_predict": 1})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("token", [-1, 258, 999999999, 10**30, -5])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(serve: Any, token: int) -> None:
    server = serve()
    response = server.post("/completion", {"prompt": [1, token]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("Prompt contains invalid tokens")
    if abs(token) < 10**20:
        assert str(token) in response.json()["error"]["message"]
    assert server.post("/detokenize", {"tokens": [token]}).status_code == 400
    assert server.get("/health").status_code == 200


def test_a_string_gets_bos_and_only_in_first_place(serve: Any) -> None:
    server = serve(tokenizer={"add_bos": True})
    for prompt, expected in [
        ("ab", "<s>ab"),
        (["ab", "cd"], None),
        ([97, "b"], "ab"),
        (["a" + "b", [97]], None),
        ([97, 98], "ab"),
    ]:
        result = server.post("/completion", {"prompt": prompt, "n_predict": 1}).json()
        if expected is not None:
            assert result["prompt"] == expected
    assert server.post("/completion", {"prompt": ["x", 97], "n_predict": 1}).json()["prompt"] == "<s>xa"


def test_an_empty_prompt_gives_an_empty_answer(serve: Any) -> None:
    server = serve()
    result = server.post("/completion", {"prompt": "", "n_predict": 5}).json()
    assert (result["content"], result["stop_type"], result["tokens_predicted"]) == ("", "none", 0)
    assert server.events("/v1/completions", {"prompt": ""})[-1] == "[DONE]"


def test_several_choices_of_several_prompts_come_prompt_by_prompt(serve: Any) -> None:
    server = serve()
    body = {"prompt": ["one", "two"], "n": 2, "n_predict": 6, "seed": 5}
    results = server.post("/completion", body).json()
    assert [r["index"] for r in results] == [0, 1, 2, 3]
    assert [r["prompt"] for r in results] == ["one", "one", "two", "two"]
    lone = [
        server.post("/completion", {"prompt": "one", "n_predict": 6, "seed": 5 + k}).json()["content"] for k in (0, 1)
    ]
    assert [r["content"] for r in results[:2]] == lone
    streamed = {}
    for event in server.events("/completion", body):
        streamed[event["index"]] = streamed.get(event["index"], "") + event["content"]
    assert streamed == {r["index"]: r["content"] for r in results}
    plain = server.post("/v1/completions", body).json()
    assert [c["text"] for c in plain["choices"]] == [r["content"] for r in results]
    assert server.post("/completion", {**body, "n": 5}).status_code == 400


def test_choices_with_a_requested_slot_work_twice(serve: Any) -> None:
    server = serve(n_slots=2)
    for _ in range(2):
        choices = server.post("/v1/completions", {"prompt": "x", "n": 2, "id_slot": 0, "max_tokens": 2}).json()[
            "choices"
        ]
        assert [c["finish_reason"] for c in choices] == ["length", "length"]


@pytest.mark.contract("completion 17")
def test_response_fields_select_paths(serve: Any) -> None:
    server = serve()
    fields = ["content", "generation_settings/n_predict", "prompt", "nope/x", "content/x"]
    body = {"prompt": "abc", "n_predict": 3, "response_fields": fields}
    result = server.post("/completion", body).json()
    assert list(result) == ["content", "generation_settings/n_predict", "prompt"]
    assert result["generation_settings/n_predict"] == 3
    assert list(server.events("/completion", body)[-1]) == list(result)
    assert list(server.post("/completion", {**body, "response_fields": []}).json()) == NATIVE_KEYS


@pytest.mark.contract("completion 18", "completion 19")
def test_probabilities_come_per_token_in_both_forms(serve: Any) -> None:
    server = serve()
    body = {"prompt": "abc", "n_predict": 5, "n_probs": 10, "temperature": 0}
    result = server.post("/completion", body).json()
    records = result["completion_probabilities"]
    assert len(records) == 5
    assert "".join(record["token"] for record in records) == result["content"]
    for record in records:
        assert list(record) == ["id", "token", "bytes", "logprob", "top_logprobs"]
        assert record["logprob"] <= 0
        assert len(record["top_logprobs"]) == 10
        assert bytes(record["bytes"]).decode() == record["token"]
    events = server.events("/completion", body)
    assert [event["completion_probabilities"] for event in events[:-1]] == [[record] for record in records]
    assert "completion_probabilities" not in events[-1]
    post = server.post("/completion", {**body, "post_sampling_probs": True}).json()["completion_probabilities"][0]
    assert list(post) == ["id", "token", "bytes", "prob", "top_probs"]


def test_records_of_the_stop_string_are_left_out(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"one two")})
    body = {"prompt": "|", "n_predict": 20, "n_probs": 1, "stop": [" tw"]}
    result = server.post("/completion", body).json()
    assert result["content"] == "one"
    assert [record["token"] for record in result["completion_probabilities"]] == ["o", "n", "e"]


def test_openai_logprobs_are_filled_in_its_layout(serve: Any) -> None:
    server = serve()
    choice = server.post("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": 3}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert [record["token"] for record in logprobs["content"]] == logprobs["tokens"]
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert logprobs["text_offset"] == [0, 1, 2]
    events = server.events("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": 3})
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events[:3]] == [[0], [1], [2]]
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["choices"][0]["logprobs"] is None


@pytest.mark.contract("completion 8")
def test_seeds_repeat_and_differ(serve: Any) -> None:
    server = serve()

    def text(seed: int) -> str:
        return server.post("/completion", {"prompt": "x", "n_predict": 20, "seed": seed, "temperature": 1}).json()[
            "content"
        ]

    assert text(1) == text(1) != text(2)


@pytest.mark.contract("completion 22")
@pytest.mark.parametrize(
    "bias",
    [
        [[97, False], [98, -1e999]],
        [["ab", False]],
        {"97": False, "98": -100},
        {"ab": False},
        [["ab", -100], [5000, 1], ["x"], 5, [97]],
    ],
)
def test_logit_bias_in_every_spelling_bans_tokens(serve: Any, bias: Any) -> None:
    body = {"prompt": "x", "n_predict": 300, "temperature": 0, "logit_bias": bias}
    response = serve().client.post("/completion", content=json.dumps(body).replace("-Infinity", "-1e999"))
    content = response.json()["content"]
    assert "a" not in content
    assert "b" not in content
    assert "c" in content


@pytest.mark.contract("ignore_eos 1", "ignore_eos 2")
def test_ignore_eos_bans_end_tokens_and_shows_null_biases(serve: Any) -> None:
    server = serve(engine={"next_token": forced_text(b"hi")})
    result = server.post("/completion", {"prompt": "|", "n_predict": 5, "ignore_eos": True}).json()
    assert result["tokens_predicted"] == 5
    assert result["generation_settings"]["logit_bias"] == [{"bias": None, "token": 257}]
    result = server.post("/completion", {"prompt": "|", "n_predict": 5, "ignore_eos": False}).json()
    assert result["generation_settings"]["logit_bias"] == []


@pytest.mark.contract("metrics 7")
def test_progress_and_timings_in_a_stream(serve: Any) -> None:
    server = serve(n_batch=64)
    body = {"prompt": "y" * 180, "n_predict": 4, "return_progress": True, "timings_per_token": True}
    events = server.events("/completion", body)
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [(p["total"], p["cache"], p["processed"]) for p in progress] == [(180, 0, n) for n in (0, 64, 128, 180)]
    first = events[0]["timings"]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"], first["predicted_ms"]) == (0, 0, 0, 0)
    times = [event["timings"]["prompt_ms"] for event in events]
    assert times == sorted(times)
    assert times[-1] > 0
    assert all("timings" in event for event in events)


@pytest.mark.contract("own 13")
def test_n_indent_cuts_the_first_line_that_is_indented_less(serve: Any) -> None:
    text = b"if x:\n    a = 1\n    b = 2\n  c = 3\n"
    server = serve(engine={"next_token": forced_text(text)})
    body = {"prompt": "|", "n_predict": 100, "n_indent": 4}
    result = server.post("/completion", body).json()
    assert (result["content"], result["stop_type"]) == ("if x:\n    a = 1\n    b = 2\n", "limit")
    assert result["has_new_line"] is True
    assert "".join(event["content"] for event in server.events("/completion", body)) == result["content"]


@pytest.mark.contract("own 14")
def test_the_time_limit_acts_at_a_line_break(serve: Any) -> None:
    text = b"x" * 20 + b"\n" + b"y" * 20
    server = serve(engine={"next_token": forced_text(text), "step_seconds": 0.002})
    result = server.post("/completion", {"prompt": "|", "n_predict": 100, "t_max_predict_ms": 5}).json()
    assert (result["content"], result["stop_type"]) == ("x" * 20 + "\n", "limit")


@pytest.mark.contract("own 5")
def test_silence_is_filled_with_comment_lines(serve: Any) -> None:
    server = serve(engine={"step_seconds": 2.5})
    text = server.post("/completion", {"prompt": "x", "n_predict": 1, "stream": True, "sse_ping_interval": 1}).text
    assert text.startswith(":\n\n:\n\ndata: ")
    quiet = server.post("/completion", {"prompt": "x", "n_predict": 1, "stream": True, "sse_ping_interval": -1}).text
    assert quiet.startswith("data: ")


def test_verbose_adds_the_native_result(serve: Any) -> None:
    server = serve()
    result = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2, "verbose": True}).json()
    assert result["__verbose"]["prompt"] == "abc"
    assert "__verbose" not in server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}).json()
    body = {"prompt": "abc", "max_tokens": 2, "verbose": True, "n_probs": 1, "seed": 1, "return_progress": True}
    events = server.events("/v1/completions", body)[:-1]
    native = server.events("/completion", body)
    for event, expected in zip(events, native, strict=True):
        shown = event["__verbose"]
        assert list(shown) == list(expected)
        assert (shown["content"], shown["tokens"]) == (expected["content"], expected["tokens"])
        assert shown.get("completion_probabilities") == expected.get("completion_probabilities")


def test_a_failure_during_generation_is_sent_in_band_and_ends_the_stream(serve: Any) -> None:
    from pyllama.errors import DeviceError

    server = serve(engine={"step_seconds": 0.01})

    def fail_later(history: Any, sampler: Any) -> int:
        if len(history) > 5:
            server.engine.fails = DeviceError("the device is gone")
        return 97

    server.engine.next_token = fail_later
    events = server.events("/v1/completions", {"prompt": "abc", "max_tokens": 50})
    assert events[-1] == {"error": {"code": 500, "message": "the device is gone", "type": "server_error"}}
    assert "[DONE]" not in events
    assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 50}).status_code == 500
    server.wait_idle()


def test_a_full_queue_answers_503_with_retry_after(serve: Any) -> None:
    import threading

    server = serve(n_slots=1, max_queue=1, engine={"step_seconds": 0.02})
    threads = []
    for _ in range(2):
        thread = threading.Thread(target=server.post, args=("/completion", {"prompt": "x", "n_predict": 50}))
        thread.start()
        threads.append(thread)
        time.sleep(0.1)
    response = server.post("/completion", {"prompt": "x", "n_predict": 1})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "unavailable_error"
    for thread in threads:
        thread.join()
    assert server.post("/completion", {"prompt": "x", "n_predict": 1}).status_code == 200


@pytest.mark.contract("completion 15")
@pytest.mark.parametrize(("n_slots", "n_requests"), [(1, 3), (2, 2), (2, 4), (4, 2), (4, 6)])
def test_more_requests_than_slots_are_all_answered_by_all_slots(serve: Any, n_slots: int, n_requests: int) -> None:
    server = serve(n_slots=n_slots, engine={"step_seconds": 0.005})

    def ask(number: int) -> Any:
        return server.post("/completion", {"prompt": f"request {number}", "n_predict": 60})

    def n_processing() -> int:
        return sum(slot["is_processing"] for slot in server.get("/slots").json())

    with ThreadPoolExecutor(n_requests) as executor:
        answers = [executor.submit(ask, number) for number in range(n_requests)]
        deadline = time.monotonic() + 10
        seen = {n_processing()}
        while not all(answer.done() for answer in answers):
            assert time.monotonic() < deadline
            seen.add(n_processing())
    assert max(seen) == min(n_slots, n_requests)
    for number, answer in enumerate(answers):
        result = answer.result()
        assert result.status_code == 200
        assert result.json()["prompt"] == f"request {number}"
        assert len(result.json()["content"]) == 60


def test_echo_repeats_the_prompt_and_scores_its_tokens(serve: Any) -> None:
    """Known fault E16. The fake model gives one letter the logit 3 and all others 0."""
    server = serve()
    body = {"prompt": "hello" * 30, "max_tokens": 2, "echo": True, "logprobs": 2, "temperature": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"].startswith(body["prompt"])
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(152))
    assert logprobs["token_logprobs"][0] is None
    total = math.log(math.exp(3) + 257)
    for position in range(1, 150):
        history = list(body["prompt"][:position].encode())
        likely = pseudo_random_token(history, FakeSampler(258, temperature=0))
        expected = (3 if ord(body["prompt"][position]) == likely else 0) - total
        assert logprobs["token_logprobs"][position] == pytest.approx(expected, abs=1e-5)
        top = logprobs["content"][position]["top_logprobs"]
        assert top[0]["id"] == likely
        assert top[0]["logprob"] == pytest.approx(3 - total, abs=1e-5)
    events = server.events("/v1/completions", body)[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    streamed = [event["choices"][0]["logprobs"]["tokens"] for event in events[:-1]]
    assert [token for part in streamed for token in part] == logprobs["tokens"]
    plain = server.post("/v1/completions", {**body, "logprobs": None}).json()["choices"][0]
    assert plain["text"] == choice["text"]
    assert server.post("/completion", body).status_code == 501


@pytest.mark.contract("own 15")
def test_an_echoed_prompt_with_a_budget_of_0_is_scored_and_not_continued(serve: Any) -> None:
    server = serve()
    body = {"prompt": ["hello", "you"], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    answer = server.post("/v1/completions", body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "you"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [5, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 5)
    longer = server.post("/v1/completions", {**body, "max_tokens": 1}).json()["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:5] == answer["choices"][0]["logprobs"]["token_logprobs"]
    *partials, final = server.events("/v1/completions", {**body, "prompt": "hello"})[:-1]
    assert "".join(event["choices"][0]["text"] for event in partials) == "hello"
    assert (final["choices"][0]["text"], final["usage"]["completion_tokens"]) == ("", 0)
    plain = server.post("/v1/completions", {**body, "echo": False}).json()
    assert len(plain["choices"][0]["text"]) == 1


def test_every_sampler_of_a_request_reaches_the_engine(serve: Any) -> None:
    seen: list[dict[str, Any]] = []

    def next_token(history: Any, sampler: Any) -> int:
        seen.append(sampler.others)
        return 65

    server = serve(engine={"next_token": next_token})
    fields = {
        "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "top_n_sigma": 1.5, "typical_p": 0.5, "xtc_probability": 0.25,
        "xtc_threshold": 0.125, "dry_multiplier": 0.75, "dry_base": 1.5, "dry_allowed_length": 3,
        "dry_penalty_last_n": 100, "mirostat": 0, "mirostat_tau": 4.0, "mirostat_eta": 0.25, "adaptive_target": 0.5,
        "adaptive_decay": 0.75,
    }  # fmt: skip
    body = {"prompt": "x", "n_predict": 1, **fields, "samplers": "xdat", "dry_sequence_breakers": ["\n"]}
    result = server.post("/completion", body).json()
    names = ("xtc", "dry", "adaptive_p", "temperature")
    assert {name: seen[-1][name] for name in fields} == fields
    assert seen[-1]["samplers"] == names
    assert seen[-1]["dry_breakers"] is not None
    assert {name: result["generation_settings"][name] for name in fields} == fields
    assert result["generation_settings"]["samplers"] == list(names)
    server.post("/completion", {"prompt": "x", "n_predict": 1, "mirostat": 2, "dry_multiplier": 1})
    assert (seen[-1]["mirostat"], seen[-1]["dry_breakers"]) == (2, None)
    many = {"dry_multiplier": 1, "dry_sequence_breakers": [str(i) for i in range(1000)]}
    response = server.post("/completion", {"prompt": "x", "n_predict": 1, **many})
    assert response.status_code == 400
    assert "dry_sequence_breakers" in response.text


def test_the_models_own_sampling_values_replace_defaults_but_not_options() -> None:
    metadata = {
        "general.sampling.mirostat": 2, "general.sampling.mirostat_tau": 3.5, "general.sampling.mirostat_eta": 0.25,
        "general.sampling.xtc_probability": 0.5, "general.sampling.sequence": "xtc;temp",
    }  # fmt: skip
    settings = ServerSettings(model="x", given=frozenset({"mirostat_ent"}))
    sampling = defaults_from_metadata(settings, metadata).sampling
    assert (sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta) == (2, 5.0, 0.25)
    assert (sampling.xtc_probability, sampling.samplers) == (0.5, ("xtc", "temperature"))
    assert defaults_from_metadata(settings, {"general.sampling.mirostat": 9}).sampling.mirostat == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a"] * 1025}, "at most 1024 prompts"),
        ({"prompt": "a", "logit_bias": [[97, 1]] * (N_VOCAB + 1)}, "more biases than the vocabulary"),
        ({"prompt": "a", "logit_bias": {"a" * (N_VOCAB + 1): 1}}, "more biases than the vocabulary"),
    ],
)
def test_a_request_that_is_far_too_much_is_refused_at_once(serve: Any, body: dict[str, Any], words: str) -> None:
    response = serve().post("/completion", {"n_predict": 1, **body})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_largest_number_of_prompts_is_answered(serve: Any) -> None:
    assert len(serve().post("/completion", {"prompt": ["a"] * 1024, "n_predict": 1}).json()) == 1024
