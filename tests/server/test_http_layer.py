"""The HTTP layer over the fake engine: order of checks, headers, CORS, keys, bodies, errors, metrics and other
information routes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer
from prometheus_client.parser import text_string_to_metric_families

from pyllama.chat_template import ChatTemplate
from pyllama.server.app import ROUTES
from pyllama.server.chat_templates import ServerTemplate
from pyllama.server.errors import ERRORS
from pyllama.server.metrics import METRICS
from pyllama.server.middleware import MAX_BODY_BYTES, BodyLimitMiddleware

NOT_FOUND = '{"error":{"message":"File Not Found","type":"not_found_error","code":404}}'


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nope"),
        ("GET", "/completion"),
        ("POST", "/health"),
        ("DELETE", "/props"),
        ("GET", "/health/"),
        ("GET", "/"),
    ],
)
def test_unknown_paths_and_methods_get_the_same_404(serve: Any, method: str, path: str) -> None:
    response = serve().client.request(method, path)
    assert (response.status_code, response.text) == (404, NOT_FOUND)
    assert response.headers["connection"] == "close"


@pytest.mark.contract("own 12")
def test_everything_is_503_until_the_model_is_ready(serve: Any) -> None:
    server = serve(loads=False, api_keys=("secret",))
    paths = [(method, path.format(id_slot=0)) for method, path, _ in ROUTES]
    for method, path in [*paths, ("GET", "/nope"), ("PUT", "/props"), ("GET", "/"), ("POST", "/tools")]:
        response = server.client.request(method, path, content=b"{")
        assert response.status_code == 503, path
        assert response.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        assert response.headers["retry-after"] == "1"
        assert server.client.options(path).status_code == 200
    server.load()
    assert server.get("/health").status_code == 200


def test_headers_that_every_answer_carries(serve: Any) -> None:
    response = serve().get("/health")
    assert response.headers["server"] == "llama.cpp"
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    assert response.headers["keep-alive"] == "timeout=5, max=100"
    assert "cache-control" not in response.headers


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 501, 503])
def test_every_error_closes_the_connection_and_has_the_headers_of_all_answers(serve: Any, status: int) -> None:
    """The order of checks: readiness, key, size, route, handler."""
    server = serve(loads=status != 503, api_keys=("secret",))
    headers = {"Origin": "http://page", "X-Api-Key": "wrong" if status in (401, 503) else "secret"}
    path = {401: "/nope", 404: "/nope", 501: "/rerank"}.get(status, "/tokenize")
    body: Any = b"{}" if status in (401, 404, 501) else b"["
    if status == 413:
        body, headers["Content-Length"] = b"", str(MAX_BODY_BYTES + 1)
    if status == 500:
        body, server.vocabulary.tokenizer.encode = b'{"content": "x"}', None
    response = server.client.post(path, content=body, headers=headers)
    assert response.status_code == response.json()["error"]["code"] == status
    assert response.headers["connection"] == "close"
    assert "keep-alive" not in response.headers
    assert response.headers["server"] == "llama.cpp"
    assert response.headers["access-control-allow-origin"] == "http://page"
    assert response.headers["content-type"] == "application/json; charset=utf-8"


def test_a_strangers_web_page_gets_no_credentials_without_a_key(serve: Any) -> None:
    """Known fault E23."""
    server = serve()
    response = server.get("/health", headers={"Origin": "https://evil.example"})
    assert response.headers["access-control-allow-origin"] == "*"
    response = server.client.options("/completion", headers={"Origin": "https://evil.example"})
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.headers["access-control-allow-credentials"] == "false"


@pytest.mark.contract("security 5")
def test_options_answers_for_every_path_without_a_key(serve: Any) -> None:
    server = serve(api_keys=("secret",))
    for origin in ("localhost", "web.mydomain.fr"):
        response = server.client.options("/completions", headers={"Origin": origin})
        assert (response.status_code, response.text) == (200, "")
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["access-control-allow-credentials"] == "true"
        assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
        assert response.headers["access-control-allow-headers"] == "*"
        assert response.headers["content-type"] == "text/html"


@pytest.mark.contract("security 6")
@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost", True), ("https://localhost:8080", True), ("http://127.0.0.1:3000", True),
        ("http://[::1]:1234", True),
        ("http://localhost.evil.com", False), ("http://notlocalhost", False), ("https://example.com", False),
        ("http://[bad", False),
    ],
)  # fmt: skip
def test_the_localhost_policy_echoes_local_origins_only(serve: Any, origin: str, allowed: bool) -> None:
    response = serve(cors_origins="localhost").get("/health", headers={"Origin": origin})
    assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("https://one.page", True), ("http://two.page:8080", True), ("http://127.0.0.1:99", True),
        ("https://two.page:8080", False), ("http://one.page", False), ("https://one.page.evil", False),
        ("https://three.page", False), ("*", False), ("", False),
    ],
)  # fmt: skip
def test_of_several_origins_a_page_sees_its_own(serve: Any, origin: str, allowed: bool) -> None:
    server = serve(cors_origins="https://one.page/, http://two.page:8080,localhost")
    for response in (
        server.get("/health", headers={"Origin": origin}),
        server.get("/nope", headers={"Origin": origin}),
    ):
        assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert response.headers["vary"] == "Origin"
    response = server.client.options("/completion", headers={"Origin": origin})
    assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
    assert response.headers["access-control-allow-credentials"] == "true"


def test_a_configured_origin_is_sent_as_it_is(serve: Any) -> None:
    response = serve(cors_origins="https://my.page").get("/health", headers={"Origin": "https://other"})
    assert response.headers["access-control-allow-origin"] == "https://my.page"


@pytest.mark.contract("security 1", "security 2", "security 3")
@pytest.mark.parametrize(
    ("method", "path", "public"),
    [
        ("GET", "/health", True), ("GET", "/v1/health", True), ("GET", "/props", False), ("GET", "/metrics", False),
        ("GET", "/models", False), ("GET", "/v1/models", False), ("GET", "/slots", False), ("GET", "/nope", False),
        ("POST", "/completion", False), ("POST", "/v1/chat/completions", False), ("POST", "/tokenize", False),
    ],
)  # fmt: skip
def test_only_the_health_paths_are_public(serve: Any, method: str, path: str, public: bool) -> None:
    """Known fault E24."""
    server = serve(api_keys=("first", "secret"), has_metrics=True)
    denied = server.client.request(method, path, json={})
    if public:
        assert denied.status_code == 200
        return
    assert denied.status_code == 401
    assert denied.text == '{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}'
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": "bearer secret"},
        {"X-Api-Key": "secre"},
        {"Authorization": "é"},
    ):
        encoded = {key: value.encode() for key, value in headers.items()}
        assert server.client.request(method, path, json={}, headers=encoded).status_code == 401
    for headers in (
        {"Authorization": "Bearer secret"},
        {"Authorization": "first"},
        {"X-Api-Key": "secret"},
        {"X-Api-Key": "Bearer first"},
    ):
        assert server.client.request(method, path, json={}, headers=headers).status_code != 401


def test_the_place_of_the_web_interface_is_public_and_empty(serve: Any) -> None:
    response = serve(api_keys=("secret",)).get("/")
    assert (response.status_code, response.text) == (404, NOT_FOUND)


@pytest.mark.contract("own 9")
def test_with_a_prefix_every_route_moves_and_health_needs_the_key(serve: Any) -> None:
    server = serve(api_prefix="/llm", api_keys=("secret",))
    assert server.get("/llm/health").status_code == 401
    assert server.get("/llm/health", headers={"X-Api-Key": "secret"}).status_code == 200
    assert server.get("/props", headers={"X-Api-Key": "secret"}).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b'"x"', b"null", b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}',
        b"\xff\xfe{}",
        b'{"prompt": "a\xff\xfeb"}', b'{"prompt": ' + b"[" * 100_000, b'{"prompt":' + b"9" * 10_000 + b"}",
        b'{"a":1}{"b":2}',
        b'{"\xff": 1, "prompt": "x"}', b'{"prompt": "x", "stop": "\xc3"}', "{\"prompt\": \"é\"}".encode("utf-16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/tokenize", "/detokenize", "/apply-template"])
def test_bodies_that_are_not_json_objects_get_400(serve: Any, path: str, body: bytes) -> None:
    """Known faults B6 and E7."""
    server = serve()
    response = server.client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert server.get("/health").status_code == 200


def test_lone_surrogates_become_replacement_characters(serve: Any) -> None:
    server = serve()
    response = server.client.post("/completion", content=b'{"prompt":"a\\ud800b","n_predict":1,"stop":["\\udfff"]}')
    assert response.status_code == 200
    assert response.json()["prompt"] == "a\ufffdb"
    assert response.json()["generation_settings"]["stop"] == ["\ufffd"]
    paired = server.client.post("/completion", content=b'{"prompt":"\\ud83d\\ude00","n_predict":1}')
    assert paired.json()["prompt"] == "\U0001f600"


@pytest.mark.contract("own 6")
def test_a_body_beyond_the_limit_gets_413(serve: Any) -> None:
    server = serve()
    small = BodyLimitMiddleware(server.app, max_bytes=100)
    from starlette.testclient import TestClient

    client = TestClient(small)
    body = b'{"content":"' + b"x" * 200 + b'"}'
    assert client.post("/tokenize", content=body).status_code == 413
    assert client.post("/tokenize", content=iter([body[:90], body[90:]])).status_code == 413
    assert client.post("/tokenize", content=b'{"content":"x"}').status_code == 200


def test_the_error_table_ends_with_the_catch_all_and_lists_no_class_after_its_base() -> None:
    classes = [kind for kind, _, _ in ERRORS]
    assert classes[-1] is Exception
    for index, kind in enumerate(classes):
        assert not any(issubclass(kind, earlier) for earlier in classes[:index])


def test_an_unexpected_fault_is_a_500_and_the_server_lives(serve: Any) -> None:
    server = serve()
    server.vocabulary.tokenizer.encode = None
    response = server.post("/completion", {"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert server.get("/health").status_code == 200


# ---- information routes


def test_props_keys_in_order(serve: Any) -> None:
    props = serve().get("/props").json()
    assert list(props) == [
        "default_generation_settings", "total_slots", "model_alias", "model_ftype", "model_path", "modalities",
        "media_marker", "endpoint_slots", "endpoint_props", "endpoint_metrics", "ui", "ui_settings", "chat_template",
        "chat_template_caps", "bos_token", "eos_token", "build_info", "is_sleeping", "cors_proxy_enabled",
    ]  # fmt: skip
    assert list(props["default_generation_settings"]) == ["params", "n_ctx"]
    assert "stop" not in props["default_generation_settings"]["params"]
    assert (props["total_slots"], props["model_path"], props["bos_token"]) == (4, "fake.gguf", "<s>")


@pytest.mark.contract("own 29")
def test_props_show_the_template_for_tools_where_there_is_one(serve: Any) -> None:
    server = serve()
    tokenizer = server.vocabulary.tokenizer
    assert "chat_template_tool_use" not in server.get("/props").json()
    template = ServerTemplate(ChatTemplate("plain"), tokenizer, ServerTemplate(ChatTemplate("with tools"), tokenizer))
    server.state.set_loaded(replace(server.state.loaded, chat_template=template))
    props = server.get("/props").json()
    assert list(props)[-1] == "chat_template_tool_use"
    assert (props["chat_template"], props["chat_template_tool_use"]) == ("plain", "with tools")


def test_changing_props_needs_the_option_and_does_nothing(serve: Any) -> None:
    assert serve().post("/props", {}).status_code == 501
    assert serve(has_props=True).post("/props", {}).json() == {"success": True}


@pytest.mark.contract("basic 4")
@pytest.mark.parametrize("path", ["/models", "/v1/models"])
def test_models_list_one_entry_named_by_the_first_alias(serve: Any, path: str) -> None:
    models = serve().get(path).json()
    assert list(models) == ["models", "object", "data"]
    assert models["data"][0]["id"] == models["models"][0]["name"] == "fake"
    assert list(models["data"][0]["meta"]) == [
        "vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size", "ftype",
    ]  # fmt: skip


@pytest.mark.contract("basic 5", "metrics 8")
def test_slots_show_what_ran_and_that_it_ended(serve: Any) -> None:
    server = serve(n_slots=2)
    before = server.get("/slots").json()
    assert [list(slot) for slot in before] == [["id", "n_ctx", "speculative", "is_processing"]] * 2
    server.post("/completion", {"prompt": "abc", "n_predict": 3})
    slot = server.get("/slots").json()[1]
    assert (slot["is_processing"], slot["n_prompt_tokens"], slot["params"]["n_predict"]) == (False, 3, 3)
    assert slot["next_token"] == [{"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}]
    assert "stop" not in slot["params"]
    assert slot["prefix_reuse"] == {"n_known": 0, "source": "nothing", "checkpoint": -1, "limit": "not cached"}
    server.post("/completion", {"prompt": "abcd", "n_predict": 3})
    slot = server.get("/slots").json()[1]
    assert slot["n_prompt_tokens_cache"] == slot["prefix_reuse"]["n_known"] == 3
    assert (slot["prefix_reuse"]["source"], slot["prefix_reuse"]["limit"]) == ("own", "prompt")
    assert serve(has_slots=False).get("/slots").status_code == 501


@pytest.mark.contract("own 21")
def test_slots_answer_while_busy_and_report_when_none_is_free(serve: Any) -> None:
    import threading
    import time

    server = serve(n_slots=1, engine={"step_seconds": 0.02})
    assert server.get("/slots?fail_on_no_slot=1").status_code == 200
    thread = threading.Thread(target=server.post, args=("/completion", {"prompt": "x", "n_predict": 30}))
    thread.start()
    time.sleep(0.15)
    slot = server.get("/slots").json()[0]
    assert slot["is_processing"]
    assert slot["next_token"][0]["n_decoded"] + slot["next_token"][0]["n_remain"] == 30
    response = server.get("/slots?fail_on_no_slot=1")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no slot available")
    thread.join()


def test_prompt_and_text_in_slots_only_for_debugging(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(n_slots=1)
    result = server.post("/completion", {"prompt": "abc", "n_predict": 3}).json()
    assert "prompt" not in server.get("/slots").json()[0]
    monkeypatch.setenv("LLAMA_SERVER_SLOTS_DEBUG", "1")
    slot = server.get("/slots").json()[0]
    assert (slot["prompt"], slot["generated"]) == ("abc", result["content"])


@pytest.mark.contract("metrics 1", "metrics 2", "metrics 3", "metrics 4")
def test_metrics_parse_with_the_official_parser_and_counters_add_up(serve: Any) -> None:
    """Known fault E25."""
    server = serve(has_metrics=True, n_slots=1)

    def scrape() -> dict[str, float]:
        response = server.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert response.headers["process-start-time-unix"].isdigit()
        kinds = {}
        values = {}
        for line in response.text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                kinds[name.removeprefix("llamacpp:")] = kind
            elif not line.startswith("#"):
                name, value = line.split()
                values[name.removeprefix("llamacpp:")] = float(value)
        assert [(name, kind) for name, kind, _, _ in METRICS] == list(kinds.items())
        assert list(values) == list(kinds)
        families = list(text_string_to_metric_families(response.text))
        assert len(families) == len(METRICS)
        assert {family.type for family in families} == {"counter", "gauge"}
        return values

    before = scrape()
    assert before["tokens_predicted_total"] == 0
    timings = [server.post("/completion", {"prompt": "abcdef", "n_predict": n}).json()["timings"] for n in (1, 4, 16)]
    after = scrape()
    assert after["prompt_tokens_total"] == sum(t["prompt_n"] for t in timings)
    assert after["prompt_tokens_cached_total"] == sum(t["cache_n"] for t in timings) > 0
    assert after["tokens_predicted_total"] == 21
    assert after["n_decode_total"] == 21
    assert after["n_tokens_max"] == 6 + 16
    assert after["prompt_cache_limit_bytes"] == 0
    assert after["requests_processing"] == after["requests_deferred"] == 0
    assert after["predicted_tokens_seconds"] > 0
    again = scrape()
    assert again["predicted_tokens_seconds"] == again["prompt_tokens_seconds"] == 0
    for name, kind, _, _ in METRICS:
        if kind == "counter":
            assert before[name] <= after[name] <= again[name]
    assert serve().get("/metrics").status_code == 501


@pytest.mark.contract("own 18")
def test_metrics_show_what_the_prompt_cache_takes(serve: Any) -> None:
    """Known fault F7: host memory that nobody can account for."""
    server = serve(has_metrics=True, n_slots=1, engine={"cache_tokens": 250})

    def cache() -> dict[str, float]:
        lines = [line.split() for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("llamacpp:prompt_cache_"): float(v) for name, v in lines if "prompt_cache" in name}

    assert cache() == {
        "limit_bytes": 250, "bytes": 0, "kv_bytes": 0, "checkpoint_bytes": 0, "checkpoints": 0, "evicted_total": 0,
    }  # fmt: skip
    for letter in "abc":
        server.post("/completion", {"prompt": letter * 100, "n_predict": 1})
    after = cache()
    assert after["bytes"] == after["kv_bytes"] == 200
    server.post("/completion", {"prompt": "d" * 100, "n_predict": 1})
    assert (cache()["bytes"], cache()["evicted_total"]) == (200, 1)


# ---- text utilities


@pytest.mark.contract("tokenize 1", "tokenize 2")
def test_tokenize_and_detokenize_are_inverse(serve: Any) -> None:
    server = serve(tokenizer={"add_bos": True})
    tokens = server.post("/tokenize", {"content": "hé<s>"}).json()["tokens"]
    assert tokens == [*"hé".encode(), 256]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"content": "hé<s>"}
    assert server.post("/tokenize", {"content": "h", "add_special": True}).json()["tokens"] == [256, 104]
    assert server.post("/tokenize", {"content": "<s>", "parse_special": False}).json()["tokens"] == list(b"<s>")
    assert server.post("/tokenize", {"content": [104, "i"]}).json()["tokens"] == [104, 105]
    pieces = server.post("/tokenize", {"content": "é<s>", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}, {"id": 256, "piece": "<s>"}]
    assert server.post("/tokenize", {}).json() == {"tokens": []}
    assert server.post("/detokenize", {}).json() == {"content": ""}
    assert server.post("/detokenize", {"tokens": [0xC3]}).json() == {"content": "\ufffd"}


@pytest.mark.contract("tokenize 3")
@pytest.mark.parametrize("text", ["你好世界", "🌍 🚀", "héllo 漢字 🙂 x"])
def test_every_token_has_a_piece_that_is_text_or_bytes(tiny_llama_path: Path, text: str) -> None:
    pytest.importorskip("pyllama._engine", reason="needs the native module")
    server = EngineServer(tiny_llama_path)
    try:
        tokens = server.client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
        ids = server.client.post("/tokenize", json={"content": text}).json()["tokens"]
        back = server.client.post("/detokenize", json={"tokens": ids}).json()["content"]
    finally:
        server.close()
    assert [token["id"] for token in tokens] == ids
    pieces = [piece.encode() if isinstance(piece := token["piece"], str) else bytes(piece) for token in tokens]
    assert all(pieces)
    assert all(token["id"] > 0 for token in tokens)
    assert b"".join(pieces).decode().strip() == back.strip() == text
    assert any(isinstance(token["piece"], list) for token in tokens)


@pytest.mark.parametrize("tokens", ["x", 5, {}, ["x"], [1.5], [True], [None], [[1]]])
def test_detokenize_refuses_what_is_not_a_list_of_ids(serve: Any, tokens: Any) -> None:
    assert serve().post("/detokenize", {"tokens": tokens}).status_code == 400


@pytest.mark.parametrize("content", [5, True, {}, [None], [[1]], [300], [-1]])
def test_tokenize_refuses_other_shapes(serve: Any, content: Any) -> None:
    assert serve().post("/tokenize", {"content": content}).status_code == 400


def test_there_are_no_adapters_to_list_or_to_scale(serve: Any) -> None:
    server = serve(api_keys=("secret",))
    headers = {"X-Api-Key": "secret"}
    assert server.get("/lora-adapters").status_code == 401
    assert server.get("/lora-adapters", headers=headers).json() == []
    assert server.post("/lora-adapters", [], headers=headers).json() == {"success": True}
    for body, message in (
        ({}, "Request body must be an array"),
        ("x", "Request body must be an array"),
        ([{"id": 0, "scale": 0.5}], "invalid adapter id 0: no adapter is loaded"),
    ):
        response = server.post("/lora-adapters", body, headers=headers)
        assert (response.status_code, response.json()["error"]["message"]) == (400, message)
    assert server.client.post("/lora-adapters", content=b"[", headers=headers).status_code == 400


def test_tags_are_in_the_list_of_models(serve: Any) -> None:
    assert serve().get("/v1/models").json()["data"][0]["tags"] == []
    assert serve(tags=("small", "text only")).get("/models").json()["data"][0]["tags"] == ["small", "text only"]
