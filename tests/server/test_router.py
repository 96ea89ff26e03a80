"""The router and its children as processes, with tiny models: answers, slots, failures, ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from real_process import ServerProcess
from support_app import parse_events

from support.hub_server import HubServer, running_hub
from support.tiny_llama import write_tiny_llama

pytest.importorskip("pyllama._engine", reason="needs the native module")

BODY = {"prompt": "hello world", "n_predict": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models a, b and c, which answer differently, and one that is no model."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc", 1):
        write_tiny_llama(folder / f"{name}.gguf", seed=seed)
    (folder / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    return folder


def start_router(
    folder: Path, models: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> ServerProcess:
    """Every model with one thread and little context; the cache is empty."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("HF_") and name != "HF_ENDPOINT":
                patch.delenv(name)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        folder_of_models = ("--models-dir", str(models))
        router = ServerProcess(folder, *folder_of_models, "-t", "1", "-c", "1024", *arguments, environment=environment)
    router.wait_ready()
    return router


@pytest.fixture(scope="module")
def router(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """At most two models at once; x is a with other options."""
    folder = tmp_path_factory.mktemp("router")
    (folder / "slots").mkdir()
    preset = folder / "preset.ini"
    preset.write_text(
        f"[x]\nmodel = {models}/a.gguf\nalias = first,extra\nmetrics = 1\nparallel = 1\nstop-timeout = 1\n"
    )
    process = start_router(
        folder, models, "--models-preset", str(preset), "--models-max", "2", "--slot-save-path", str(folder / "slots")
    )
    yield process
    process.close()


@pytest.fixture
def launch(models: Path, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    processes: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        processes.append(start_router(tmp_path, models, *arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def statuses(router: ServerProcess, **options: Any) -> dict[str, Any]:
    listed = httpx.get(router.url + "/models", timeout=30, **options).json()["data"]
    return {model["id"]: model["status"]["value"] for model in listed}


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_status(router: ServerProcess, name: str, status: str, **options: Any) -> None:
    wait_for(lambda: statuses(router, **options)[name] == status)


def children(router: ServerProcess) -> list[int]:
    """Process ids of the router's children."""
    path = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


# ---- one router for all


@pytest.mark.contract("router 1")
def test_the_router_answers_for_itself(router: ServerProcess) -> None:
    assert httpx.get(router.url + "/health").json() == {"status": "ok"}
    props = httpx.get(router.url + "/props").json()
    assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 2, True)
    assert props["build_info"].startswith("b")
    assert httpx.get(router.url + "/").status_code == 404
    listed = {model["id"]: model for model in httpx.get(router.url + "/v1/models").json()["data"]}
    assert list(listed) == ["a", "b", "broken", "c", "x"]
    assert listed["x"]["aliases"] == ["extra", "first"]
    assert listed["x"]["source"] == "preset"
    assert "metrics = 1" in listed["x"]["status"]["preset"]
    assert listed["a"]["source"] == "models_dir"


def test_the_model_of_the_body_or_the_query_or_an_alias_answers(router: ServerProcess) -> None:
    a = router.post("/completion", {**BODY, "model": "a"}).json()
    assert a["model"] == "a"
    by_alias = router.post("/completion", {**BODY, "model": "first"}).json()
    assert by_alias["model"] == "x"
    assert by_alias["content"] == a["content"]
    b = router.post("/completion?model=b", BODY).json()
    assert b["model"] == "b"
    assert b["content"] != a["content"]
    props = httpx.get(router.url + "/props", params={"model": "b"}, timeout=30).json()
    assert props["model_path"].endswith("b.gguf")


@pytest.mark.contract("router 2")
def test_streams_arrive_whole_and_with_their_headers(router: ServerProcess) -> None:
    plain = router.post("/completion", {**BODY, "model": "a"}).json()
    streamed = router.post("/completion", {**BODY, "model": "a", "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    assert streamed.headers["server"] == "llama.cpp"
    assert "".join(event["content"] for event in parse_events(streamed.text)) == plain["content"]
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        chunks = client.chat.completions.create(
            model="a", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
        )
        assert {chunk.model for chunk in chunks} == {"a"}


@pytest.mark.contract("router 2")
def test_requests_without_a_usable_model_are_refused(router: ServerProcess) -> None:
    missing = "model name is missing from the request"
    assert message(router.post("/completion", BODY), 400) == missing
    assert message(httpx.get(router.url + "/slots"), 400) == missing
    assert message(router.post("/completion", {**BODY, "model": 3}), 400) == missing
    assert message(router.post("/completion", {**BODY, "model": "nobody"}), 400) == "model 'nobody' not found"
    assert "not valid JSON" in message(httpx.post(router.url + "/completion", content=b"{"), 400)
    assert httpx.get(router.url + "/no/such/path?model=a", timeout=30).status_code == 404
    assert message(router.post("/models/load", {"model": "nobody"}), 404) == "File Not Found"
    assert "not found" in message(router.post("/models/unload", {"model": "nobody"}), 400)
    assert "not a model of the cache" in message(httpx.delete(router.url + "/models?model=a"), 500)
    assert "exists already" in message(router.post("/models", {"model": "a"}), 400)
    assert "is not a repository" in message(router.post("/models", {"model": "no-repository"}), 400)


def test_errors_of_the_child_are_passed_on(router: ServerProcess) -> None:
    assert message(router.post("/completion", {"model": "a"}), 400) == "key 'prompt' not found"
    too_long = router.post("/completion", {**BODY, "model": "a", "prompt": [5] * 2000})
    assert message(too_long, 400)
    assert too_long.json()["error"]["type"] == "exceed_context_size_error"


def test_slot_files_work_through_the_router(router: ServerProcess) -> None:
    """J10: `/slots/0?action=save` with the model in the body."""
    held = {}
    for name in ("a", "b"):
        held[name] = router.post("/completion", {**BODY, "model": name, "id_slot": 0}).json()["tokens_cached"]
        saved = router.post("/slots/0?action=save", {"model": name, "filename": name}).json()
        assert (saved["id_slot"], saved["n_saved"]) == (0, held[name])
    restored = router.post("/slots/1?action=restore&model=a", {"filename": "a"}).json()
    assert (restored["id_slot"], restored["n_restored"]) == (1, held["a"])
    refused = router.post("/slots/1?action=restore", {"model": "a", "filename": "b"})
    assert "another model" in message(refused, 400)
    assert router.post("/slots/0?action=erase", {"model": "b"}).json()["n_erased"] == held["b"]
    slots = httpx.get(router.url + "/slots", params={"model": "a"}, timeout=30).json()
    assert len(slots) == 4


@pytest.mark.contract("router 4")
def test_loading_over_the_limit_unloads_the_model_unused_for_longest(router: ServerProcess) -> None:
    for name in ("a", "b", "a", "c"):
        router.post("/tokenize", {"model": name, "content": "x"})
    assert {name for name, status in statuses(router).items() if status == "loaded"} == {"a", "c"}
    assert len([pid for pid in children(router) if is_alive(pid)]) == 2


def test_a_client_that_leaves_ends_the_generation_in_the_child(router: ServerProcess) -> None:
    router.post("/tokenize", {"model": "x", "content": "x"})
    endless = {**BODY, "model": "x", "n_predict": 900, "stream": True, "t_max_predict_ms": 0}
    with httpx.stream("POST", router.url + "/completion", json=endless, timeout=30) as response:
        next(response.iter_bytes())
    slots_url = router.url + "/slots?model=x"
    wait_for(lambda: not any(slot["is_processing"] for slot in httpx.get(slots_url, timeout=30).json()))
    metrics = httpx.get(router.url + "/metrics", params={"model": "x"}, timeout=30).text
    assert "llamacpp:requests_processing 0" in metrics


def test_a_model_that_cannot_be_loaded_is_reported(router: ServerProcess) -> None:
    assert "model 'broken' failed to load, exit code 1" in message(router.post("/completion?model=broken", BODY), 500)
    (status,) = [
        model["status"] for model in httpx.get(router.url + "/models").json()["data"] if model["id"] == "broken"
    ]
    assert (status["value"], status["exit_code"], status["failed"]) == ("unloaded", 1, True)
    assert "exiting due to model loading error" in router.log


@pytest.mark.contract("router 3", "own 32")
def test_load_and_unload_in_the_background_with_events(router: ServerProcess) -> None:
    states: list[Any] = []
    ready = threading.Event()

    def listen() -> None:
        with httpx.stream("GET", router.url + "/models/sse", timeout=30) as response:
            for line in response.iter_lines():
                event = json.loads(line.removeprefix("data: ")) if line else {"model": ""}
                ready.set()
                if event["model"] == "b" and (event["event"], event["data"]) not in states:
                    states.append((event["event"], event["data"]))
                if event["model"] == "b" and event["data"] == {"status": "unloaded"} and len(states) > 2:
                    return

    if statuses(router)["b"] == "loaded":
        router.post("/models/unload", {"model": "b"})
        wait_status(router, "b", "unloaded")
    listener = threading.Thread(target=listen)
    listener.start()
    assert ready.wait(10)
    assert router.post("/models/load", {"model": "b"}).json() == {"success": True}
    assert "already running" in message(router.post("/models/load", {"model": "b"}), 400)
    wait_status(router, "b", "loaded")
    assert router.post("/models/unload", {"model": "b"}).json() == {"success": True}
    wait_status(router, "b", "unloaded")
    assert "not running" in message(router.post("/models/unload", {"model": "b"}), 400)
    listener.join(10)
    assert states == [
        ("model_status", {"status": "unloaded"}),
        ("status_change", {"status": "loading"}),
        ("status_change", {"status": "loaded"}),
        ("status_change", {"status": "unloaded"}),
    ]


def test_a_child_answers_nobody_but_the_router(router: ServerProcess) -> None:
    router.post("/tokenize", {"model": "a", "content": "x"})
    ports = [line.partition("port ")[2] for line in router.log.splitlines() if " a is loaded, port " in line]
    child = f"http://127.0.0.1:{ports[-1]}"
    assert httpx.get(child + "/health", timeout=10).status_code == 200
    assert httpx.get(child + "/slots", timeout=10).status_code == 401


def test_a_child_that_is_killed_is_reported_and_started_again(router: ServerProcess) -> None:
    before = set(children(router))
    router.post("/models/unload", {"model": "x"})
    wait_status(router, "x", "unloaded")
    router.post("/tokenize", {"model": "x", "content": "x"})
    (pid,) = set(children(router)) - before
    results: list[httpx.Response | Exception] = []

    def ask() -> None:
        try:
            results.append(router.post("/completion", {**BODY, "model": "x", "n_predict": 900}))
        except httpx.TransportError as error:
            results.append(error)

    os.kill(pid, signal.SIGSTOP)  # so that the request is surely in flight
    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    thread.join(20)
    assert isinstance(results[0], httpx.Response)
    assert "did not answer" in message(results[0], 500)
    wait_status(router, "x", "unloaded")
    assert router.post("/completion", {**BODY, "model": "x"}).status_code == 200


@pytest.mark.contract("own 33")
def test_a_child_that_hangs_is_killed_when_its_time_to_stop_is_over(router: ServerProcess) -> None:
    router.post("/models/unload", {"model": "x"})
    wait_status(router, "x", "unloaded")
    before = set(children(router))
    router.post("/tokenize", {"model": "x", "content": "x"})
    (pid,) = set(children(router)) - before
    os.kill(pid, signal.SIGSTOP)
    router.post("/models/unload", {"model": "x"})
    wait_status(router, "x", "unloaded")
    assert not is_alive(pid)
    assert "did not end within 1 seconds and is killed" in router.log


# ---- routers of their own


@pytest.mark.contract("router 10", "router 11")
def test_without_autoload_a_key_is_asked_and_models_load_only_when_told(launch: Callable[..., ServerProcess]) -> None:
    router = launch("--no-models-autoload", "--api-key", "secret", "--api-prefix", "/p", "--cors-origins", "localhost")
    url, key = router.url + "/p", {"Authorization": "Bearer secret"}
    assert message(httpx.post(url + "/completion", json={**BODY, "model": "a"}), 401) == "Invalid API Key"
    with httpx.Client(base_url=url, headers=key, timeout=30) as client:
        assert message(client.post("/completion", json={**BODY, "model": "a"}), 400) == "model is not loaded"
        for origin, allowed in (("http://localhost:3000", True), ("http://localhost.evil.com", False)):
            answer = client.get("/models", headers={"Origin": origin})
            assert ("access-control-allow-origin" in answer.headers) is allowed
        answer = client.post("/completion?autoload=true", json={**BODY, "model": "a"}, headers={"Origin": "http://x"})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert client.post("/completion", json={**BODY, "model": "a"}).status_code == 200
        assert client.post("/models/load", json={"model": "b"}).json() == {"success": True}
        wait_for(lambda: {m["id"]: m["status"]["value"] for m in client.get("/models").json()["data"]}["b"] == "loaded")
        assert client.post("/completion", json={**BODY, "model": "b"}).status_code == 200
        assert client.post("/models/unload", json={"model": "b"}).json() == {"success": True}
        for path in ("/models", "/models/load", "/models/unload", "/tokenize"):
            assert httpx.post(url + path, json={"model": "b"}).status_code == 401
        assert httpx.get(url + "/models/sse").status_code == 401


@pytest.mark.contract("router 12")
def test_a_preset_is_read_again_and_models_load_at_the_start(
    launch: Callable[..., ServerProcess], models: Path, tmp_path: Path
) -> None:
    preset = tmp_path / "preset.ini"
    preset.write_text(f"[old]\nmodel = {models}/a.gguf\n[kept]\nmodel = {models}/b.gguf\nload-on-startup = 1\n")
    router = launch("--models-preset", str(preset))
    wait_status(router, "kept", "loaded")
    preset.write_text(f"[kept]\nmodel = {models}/b.gguf\n[new]\nmodel = {models}/c.gguf\n")
    httpx.get(router.url + "/models?reload=1")
    assert {"kept", "new", "old"} & set(statuses(router)) == {"kept", "new"}
    assert statuses(router)["kept"] == "loaded"
    preset.write_text("[broken\n")
    assert "preset.ini" in message(httpx.get(router.url + "/models?reload=1"), 500)
    assert "kept" in statuses(router)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_router(launch: Callable[..., ServerProcess], number: signal.Signals) -> None:
    router = launch()
    for name in ("a", "b"):
        router.post("/models/load", {"model": name})
    wait_status(router, "a", "loaded")
    pids = children(router)
    assert len(pids) == 2  # b may still be loading
    with httpx.stream("GET", router.url + "/models/sse", timeout=20):  # somebody still listens
        router.process.send_signal(number)
        assert router.wait_exit(15) == (0 if number == signal.SIGTERM else -number)
    wait_for(lambda: not any(map(is_alive, pids)), 10)


@pytest.mark.contract("router 16")
def test_a_model_is_downloaded_served_and_deleted(
    launch: Callable[..., ServerProcess], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with running_hub() as hub:
        hub.repos["user/tiny"] = {"tiny-F32.gguf": (models / "a.gguf").read_bytes()}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        router = launch()
        assert "user/none" in message(router.post("/models", {"model": "user/none"}), 400)
        assert router.post("/models", {"model": "user/tiny:f32"}).json() == {"success": True}
        wait_for(lambda: statuses(router).get("user/tiny:F32") == "unloaded")
    assert "exists already" in message(router.post("/models", {"model": "user/tiny:F32"}), 400)
    answer = router.post("/completion", {**BODY, "model": "user/tiny:f32"}).json()
    assert answer["model"] == "user/tiny:F32"
    assert httpx.delete(router.url + "/models", params={"model": "user/tiny:F32"}).json() == {"success": True}
    assert "user/tiny:F32" not in statuses(router)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 1000] == []


@contextlib.contextmanager
def hub_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """An imitation of the hub that routers which start now use."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.mark.contract("router 15")
def test_a_download_at_the_limit_of_models_disturbs_nobody(
    launch: Callable[..., ServerProcess], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_of(monkeypatch) as hub:
        hub.repos["user/tiny"] = {"tiny-F32.gguf": (models / "b.gguf").read_bytes()}
        router = launch("--models-max", "1")
        router.post("/tokenize", {"model": "a", "content": "x"})
        (pid,) = children(router)
        name, told = "user/tiny:F32", []
        with httpx.stream("GET", router.url + "/models/sse", timeout=30) as response:
            assert router.post("/models", {"model": name}).json() == {"success": True}
            for line in response.iter_lines():
                event = json.loads(line.removeprefix("data: ")) if line else {"model": ""}
                if event["model"] == name:
                    told.append(event["event"])
                    if event["event"] == "download_finished":
                        break
    assert told[0] == "status_change"
    assert "download_progress" in told[:-1]
    assert statuses(router) | {"broken": ""} == {
        "a": "loaded",
        "b": "unloaded",
        "broken": "",
        "c": "unloaded",
        name: "unloaded",
    }
    assert children(router) == [pid]
    assert router.post("/completion", {**BODY, "model": name}).json()["model"] == name
    assert statuses(router)["a"] == "unloaded"


@pytest.mark.contract("router 13")
def test_a_hidden_twin_of_a_preset_still_answers(
    launch: Callable[..., ServerProcess], models: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "cache/huggingface/hub/models--user--tiny/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "tiny-F32.gguf").symlink_to(models / "a.gguf")
    preset = tmp_path / "preset.ini"
    preset.write_text("[mine]\nhf-repo = user/tiny:F32\ndedup-cache-models = 1\n")
    router = launch("--models-preset", str(preset), "--offline")
    assert "user/tiny:F32" not in statuses(router)
    assert router.post("/completion", {**BODY, "model": "user/tiny:F32"}).json()["model"] == "user/tiny:F32"
    assert router.post("/completion", {**BODY, "model": "mine"}).json()["model"] == "mine"
    preset.write_text("[mine]\nhf-repo = user/tiny:F32\n")
    httpx.get(router.url + "/models?reload=1")
    assert "user/tiny:F32" in statuses(router)


def test_a_sleeping_model_is_shown_so_and_wakes_for_a_request(launch: Callable[..., ServerProcess]) -> None:
    router = launch("--sleep-idle-seconds", "1")
    first = router.post("/completion", {**BODY, "model": "a"}).json()
    wait_status(router, "a", "sleeping")
    assert httpx.get(router.url + "/props", params={"model": "a"}, timeout=30).json()["is_sleeping"] is True
    assert statuses(router)["a"] == "sleeping"
    assert router.post("/completion", {**BODY, "model": "a"}).json()["content"] == first["content"]
    assert statuses(router)["a"] == "loaded"
    wait_status(router, "a", "sleeping")
    assert router.post("/models/unload", {"model": "a"}).json() == {"success": True}
    wait_status(router, "a", "unloaded")
    assert "is killed" not in router.log


@pytest.mark.contract("router 14")
def test_a_repository_of_presets_is_served_as_a_router(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_CACHE": ""}
    arguments = ("-hf", "user/presets", "-t", "1")
    with hub_of(monkeypatch) as hub:
        hub.repos["user/tiny"] = {"tiny-F32.gguf": (models / "a.gguf").read_bytes()}
        text = "[*]\nctx-size = 512\n[user/tiny:f32]\nalias = default\n[warm]\nhf-repo = user/tiny:F32\ntemp = 2\n"
        hub.repos["user/presets"] = {"preset.ini": text.encode(), "README.md": b"hello"}
        router = ServerProcess(tmp_path / "first", *arguments, environment=cache)
        try:
            router.wait_ready()
            assert httpx.get(router.url + "/props", timeout=20).json()["role"] == "router"
            assert set(statuses(router)) == {"user/tiny:F32", "warm"}
            answer = router.post("/completion", {**BODY, "model": "default"}).json()
            assert answer["model"] == "user/tiny:F32"
            props = httpx.get(router.url + "/props", params={"model": "warm", "autoload": 1}, timeout=60).json()
            settings = props["default_generation_settings"]
            assert (settings["n_ctx"], settings["params"]["temperature"]) == (512, 2.0)
            assert "holds presets" in message(router.post("/models", {"model": "user/presets"}), 400)
        finally:
            router.close()
    again = ServerProcess(tmp_path / "second", *arguments, "--offline", environment=cache)
    try:
        again.wait_ready()
        assert router.process.returncode == 0
        assert {"user/tiny:F32", "warm"} <= set(statuses(again))
        assert again.post("/completion", {**BODY, "model": "warm"}).json()["model"] == "warm"
    finally:
        again.close()
