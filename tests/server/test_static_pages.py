"""The files of `--path`: what is served, what stays inside, and that the API comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pyllama.options import parse_options
from pyllama.server.router.app import RouterState, create_router_app
from pyllama.server.router.catalog import Sources
from pyllama.server.settings import ServerSettings, SettingsError, settings_from_options

NOT_FOUND = '{"error":{"message":"File Not Found","type":"not_found_error","code":404}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`site` with some files; `secret.txt` is beside it, and `site/link.txt` leads there."""
    site = tmp_path / "site"
    (site / "sub").mkdir(parents=True)
    (site / "index.html").write_text("<p>start</p>")
    (site / "app.js").write_text("run()")
    (site / "props").write_text("hidden by the API")
    (site / "sub" / "index.html").write_text("<p>sub</p>")
    (site / "404.html").write_text("<p>lost</p>")
    (tmp_path / "secret.txt").write_text("secret")
    (site / "link.txt").symlink_to(tmp_path / "secret.txt")
    (site / "out").symlink_to(tmp_path)
    return site


def test_files_are_served_with_their_types_and_folders_by_their_index(serve: Any, folder: Path) -> None:
    server = serve(static_path=str(folder))
    start, script = server.get("/"), server.get("/app.js")
    assert (start.text, start.headers["content-type"]) == ("<p>start</p>", "text/html; charset=utf-8")
    assert script.text == "run()"
    assert "javascript" in script.headers["content-type"]
    assert script.headers["server"] == "llama.cpp"
    assert server.get("/sub/").text == server.get("/sub").text == "<p>sub</p>"
    unchanged = server.get("/app.js", headers={"If-None-Match": script.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_the_api_comes_before_files(serve: Any, folder: Path) -> None:
    server = serve(static_path=str(folder))
    assert server.get("/props").json()["total_slots"] == 4
    assert server.post("/completion", {"prompt": "a", "n_predict": 1}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/nope", "/sub/nope.html", "/app.js/more", "/link.txt", "/out/secret.txt", "/out/", "/%2e%2e/secret.txt",
        "/sub/%2e%2e/%2e%2e/secret.txt", "/..%2fsecret.txt", "/%2fetc/passwd", "//etc/passwd", "/a%00b",
        "/" + "x" * 5000,
    ],
)  # fmt: skip
def test_what_is_not_in_the_folder_is_the_usual_404(serve: Any, folder: Path, path: str) -> None:
    response = serve(static_path=str(folder)).get(path)
    assert (response.status_code, response.text) == (404, NOT_FOUND)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_files_are_only_read(serve: Any, folder: Path, method: str) -> None:
    response = serve(static_path=str(folder)).client.request(method, "/app.js")
    assert (response.status_code, response.text) == (404, NOT_FOUND)


def test_only_the_start_page_is_public_and_a_prefix_moves_all(serve: Any, folder: Path) -> None:
    server = serve(static_path=str(folder), api_keys=("secret",))
    assert (server.get("/").status_code, server.get("/app.js").status_code) == (200, 401)
    assert server.get("/app.js", headers={"X-Api-Key": "secret"}).text == "run()"
    moved = serve(static_path=str(folder), api_prefix="/llm")
    assert moved.get("/llm/app.js").text == "run()"
    assert moved.get("/llm/").text == "<p>start</p>"
    assert (moved.get("/app.js").status_code, moved.get("/llm/props").status_code) == (404, 200)


def test_a_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    options = parse_options("llama-server", ["--path", missing], {}, config_files=())
    with pytest.raises(SettingsError, match=f"--path: there is no directory {missing}"):
        settings_from_options(options, "m.gguf")


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_router_serves_files_and_passes_everything_else_on(folder: Path, tmp_path: Path, prefix: str) -> None:
    environ = {"LLAMA_CACHE": str(tmp_path / "cache")}
    settings = ServerSettings(model="none", static_path=str(folder), api_prefix=prefix)

    def no_process(arguments: Any, on_state: Any) -> Any:
        raise AssertionError("no model is asked for")

    state = RouterState(settings, Sources(environ, "", "", ()), no_process, max_models=1, autoload=False)
    with TestClient(create_router_app(state)) as client:
        assert client.get(prefix + "/").text == "<p>start</p>"
        assert client.get(prefix + "/app.js").text == "run()"
        assert client.get(prefix + "/props").json()["role"] == "router"
        for path in ("/slots", "/%2e%2e/secret.txt", "/link.txt"):
            assert client.get(prefix + path).status_code in (400, 404)
        response = client.post(prefix + "/completion", json={"model": "unknown"})
        assert "unknown" in response.json()["error"]["message"]


@pytest.mark.contract("security 1")
def test_the_service_worker_of_another_interface_is_ended_without_a_key(serve: Any, tmp_path: Path) -> None:
    for folder in ("", str(tmp_path)):
        response = serve(static_path=folder, api_keys=("secret",)).get("/sw.js")
        assert response.status_code == 200
        assert "unregister()" in response.text
        assert response.headers["content-type"].startswith("text/javascript")
        assert response.headers["cache-control"] == "no-cache"
    (tmp_path / "sw.js").write_text("// mine")
    assert serve(static_path=str(tmp_path), api_keys=("secret",)).get("/sw.js").text == "// mine"
