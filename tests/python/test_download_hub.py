"""What the two hubs tell of a repository, where tokens go, and what is no answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyllama.download.fetch import fetch
from pyllama.download.hub import Hub, hugging_face, modelscope
from pyllama.download.progress import Lines
from pyllama.download.session import Patience, Session, Unreachable, origin, shown
from pyllama.download.transfer import Job
from pyllama.errors import DownloadError
from support.hub_server import Answer, HubServer, running_hub, sha256

QUICK = Patience(attempts=3, timeout=1.0, first_pause=0.001)
REPO = "user/model-GGUF"
FILES = {
    "README.md": b"text",
    "m-Q4_K_M.gguf": b"GGUF four",
    "Q8_0/m-Q8_0-00001-of-00002.gguf": b"GGUF one",
    "Q8_0/m-Q8_0-00002-of-00002.gguf": b"GGUF two",
    "with space+%.gguf": b"GGUF odd name",
}
GGUF = {path: data for path, data in FILES.items() if path.endswith(".gguf")}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with running_hub() as hub:
        hub.repos[REPO] = dict(FILES)
        yield hub


def face(server: HubServer, **environ: str) -> Hub:
    return hugging_face({"HF_ENDPOINT": server.endpoint + "/", **environ})


def scope(server: HubServer, **environ: str) -> Hub:
    return modelscope({"MODELSCOPE_ENDPOINT": server.endpoint, **environ})


on_both_hubs = pytest.mark.parametrize("make", [face, scope])
Make = Callable[..., Hub]


def listed(hub: Hub, repo: str = REPO) -> Any:
    with Session(QUICK) as session:
        return hub.list_files(session, repo)


@on_both_hubs
def test_a_listing_has_the_gguf_files_with_size_and_checksum(server: HubServer, make: Make) -> None:
    listing = listed(make(server))
    assert {path: (file.size, file.sha256) for path, file in listing.files.items()} == {
        path: (len(data), sha256(data)) for path, data in GGUF.items()
    }
    assert listing.revision == (server.commit(REPO) if make is face else "master")


@on_both_hubs
def test_every_listed_file_can_be_fetched(server: HubServer, make: Make, tmp_path: Path) -> None:
    hub = make(server)
    with Session(QUICK) as session:
        listing = hub.list_files(session, REPO)
        jobs = [Job(file, tmp_path / path, hub.access) for path, file in listing.files.items()]
        fetch(jobs, session, Lines(lambda line: None))
    assert {path: (tmp_path / path).read_bytes() for path in GGUF} == GGUF


@pytest.mark.parametrize("page_size", [1, 2, 100])
def test_a_listing_in_pages_is_read_to_its_end(server: HubServer, page_size: int) -> None:
    server.page_size = page_size
    assert set(listed(face(server)).files) == set(GGUF)


@on_both_hubs
def test_a_hub_without_checksums_still_has_sizes(server: HubServer, make: Make) -> None:
    server.tells_checksums = False
    assert {file.sha256 for file in listed(make(server)).files.values()} == {None}


@on_both_hubs
def test_an_unknown_repository_is_an_error(server: HubServer, make: Make) -> None:
    with pytest.raises(DownloadError, match=r"user/none.*not found \(404\)"):
        listed(make(server), "user/none")


@on_both_hubs
@pytest.mark.parametrize(("body", "kind"), [(b"<html>Welcome</html>", "text/html"), (b"", "text/plain")])
def test_a_page_in_place_of_json_is_an_error(server: HubServer, make: Make, body: bytes, kind: str) -> None:
    server.api_answers = [Answer(status=200, body=body, headers={"Content-Type": kind})]
    with pytest.raises(DownloadError, match=f"the answer is {kind}, not JSON"):
        listed(make(server))


WRONG_SHAPES = [
    b"[]",
    b"{}",
    b"null",
    b"1",
    b'{"Code": 200, "Data": [1], "sha": 1}',
    b'{"Code": 200, "Data": {"Files": [1]}, "sha": "main"}',
    b"[" * 100_000,
]


@on_both_hubs
@pytest.mark.parametrize("body", WRONG_SHAPES)
def test_json_of_another_shape_is_an_error(server: HubServer, make: Make, body: bytes) -> None:
    server.api_answers = [Answer(status=200, body=body)]
    with pytest.raises(DownloadError):
        listed(make(server))


@on_both_hubs
@pytest.mark.parametrize("path", ["../../evil.gguf", "/etc/evil.gguf", "C:\\evil.gguf", "a/../evil.gguf"])
def test_a_path_that_leaves_its_folder_is_refused(server: HubServer, make: Make, path: str) -> None:
    server.repos[REPO][path] = b"GGUF"
    with pytest.raises(DownloadError, match="not allowed"):
        listed(make(server))


@on_both_hubs
def test_a_hub_in_trouble_is_asked_again(server: HubServer, make: Make) -> None:
    server.api_answers = [Answer(status=503), Answer(status=429, headers={"Retry-After": "0"})]
    assert set(listed(make(server)).files) == set(GGUF)


def test_a_hub_that_stays_in_trouble_is_unreachable(server: HubServer) -> None:
    server.api_answers = [Answer(status=500)] * 9
    with pytest.raises(Unreachable, match="after 3 attempts"):
        listed(face(server))


@on_both_hubs
def test_a_message_of_the_hub_is_passed_on(server: HubServer, make: Make) -> None:
    server.api_answers = [Answer(status=200, body=b'{"Code": 10010205001, "Message": "no such model"}')]
    with pytest.raises(DownloadError, match="no such model" if make is scope else "no text in 'sha'"):
        listed(make(server))


# ------------------------------------------------------------------------------------------------ tokens, redirects


def fetch_one(server: HubServer, hub: Hub, target: Path) -> None:
    with Session(QUICK) as session:
        file = hub.list_files(session, REPO).files["m-Q4_K_M.gguf"]
        fetch([Job(file, target, hub.access)], session, Lines(lambda line: None))


@pytest.mark.parametrize(
    ("make", "variable", "header", "value"),
    [
        (face, "HF_TOKEN", "authorization", "Bearer hf_secret"),
        (scope, "MODELSCOPE_API_TOKEN", "cookie", "m_session_id=hf_secret"),
    ],
)
def test_a_token_goes_to_its_hub_and_to_no_other_host(
    server: HubServer, make: Make, variable: str, header: str, value: str, tmp_path: Path
) -> None:
    server.answers = [Answer(redirect="localhost")]
    fetch_one(server, make(server, **{variable: "hf_secret"}), tmp_path / "m")
    sent = [headers.get(header) for _, headers in server.requests]
    hosts = [headers["host"].partition(":")[0] for _, headers in server.requests]
    assert all(token == value for token in sent[:-1])
    assert (hosts[-2:], sent[-1]) == (["127.0.0.1", "localhost"], None)
    assert not any("hf_secret" in str(headers) for _, headers in server.requests[-1:])
    assert (tmp_path / "m").read_bytes() == FILES["m-Q4_K_M.gguf"]


def test_a_token_goes_to_no_other_port(server: HubServer, tmp_path: Path) -> None:
    with running_hub() as other:
        other.urls["/file"] = FILES["m-Q4_K_M.gguf"]
        server.answers = [Answer(redirect=other.endpoint + "/file")]
        fetch_one(server, face(server, HF_TOKEN="hf_secret"), tmp_path / "m")
        assert "authorization" not in other.requests[0][1]


def test_a_token_survives_a_redirect_on_its_own_host(server: HubServer, tmp_path: Path) -> None:
    server.answers = [Answer(redirect="127.0.0.1")]
    fetch_one(server, face(server, HF_TOKEN="hf_secret"), tmp_path / "m")
    assert server.requests[-1][1]["authorization"] == "Bearer hf_secret"


@on_both_hubs
@pytest.mark.parametrize("token", ["a b", "x\ny", "tök", "a;b"])
def test_a_token_with_impossible_characters_is_refused_and_not_shown(server: HubServer, make: Make, token: str) -> None:
    with pytest.raises(DownloadError, match="characters") as caught:
        make(server, HF_TOKEN=token, MODELSCOPE_API_TOKEN=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_of_every_kind_are_followed(server: HubServer, tmp_path: Path, status: int) -> None:
    server.answers = [Answer(redirect="localhost", status=status)]
    fetch_one(server, face(server), tmp_path / "m")
    assert (tmp_path / "m").exists()


def test_redirects_in_a_circle_end(server: HubServer, tmp_path: Path) -> None:
    server.answer = Answer(redirect="127.0.0.1")
    with pytest.raises(DownloadError, match="more than 10 redirects"):
        fetch_one(server, face(server), tmp_path / "m")


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/x", "javascript://x"])
def test_a_redirect_to_something_else_than_http_is_refused(server: HubServer, tmp_path: Path, target: str) -> None:
    server.answers = [Answer(redirect=target)]
    with pytest.raises(DownloadError, match="not safe"):
        fetch_one(server, face(server), tmp_path / "m")


def test_https_is_never_left_for_http(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://huggingface.co/x"})

    with Session(QUICK) as session:
        monkeypatch.setattr(session, "_client", httpx.Client(transport=httpx.MockTransport(answer)))
        with pytest.raises(DownloadError, match="redirected from https to http"):
            hugging_face({}).list_files(session, REPO)


# ------------------------------------------------------------------------------------------------ addresses


def test_model_endpoint_wins_over_hf_endpoint() -> None:
    assert hugging_face({}).endpoint == "https://huggingface.co"
    assert hugging_face({"HF_ENDPOINT": "https://mirror/"}).endpoint == "https://mirror"
    environ = {"HF_ENDPOINT": "https://mirror", "MODEL_ENDPOINT": "https://other"}
    assert hugging_face(environ).endpoint == "https://other"


def test_modelscope_as_model_endpoint_speaks_its_own_language() -> None:
    hub = hugging_face({"MODEL_ENDPOINT": "https://www.modelscope.cn/"})
    assert (type(hub), hub.endpoint) == (type(modelscope({})), "https://www.modelscope.cn")
    assert modelscope({"MODELSCOPE_DOMAIN": "www.modelscope.ai"}).endpoint == "https://www.modelscope.ai"


@pytest.mark.parametrize("endpoint", ["mirror", "ftp://mirror", "https://", "http://x:port"])
def test_an_endpoint_that_is_no_url_is_an_error(endpoint: str) -> None:
    with pytest.raises(DownloadError, match="URL"):
        hugging_face({"HF_ENDPOINT": endpoint})


def test_messages_show_urls_without_secrets() -> None:
    assert shown("https://user:pw@host:1/a/b?token=x#y") == "https://host:1/a/b"
    assert origin("https://HOST/a") == "https://host:443"


def test_a_proxy_of_the_environment_is_used(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.endpoint)
    assert set(listed(hugging_face({"HF_ENDPOINT": "http://hub.invalid"})).files) == set(GGUF)
    assert server.requests[0][0].startswith("http://hub.invalid/api/models/")


def test_a_proxy_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://proxy")
    with pytest.raises(DownloadError, match="proxy settings"):
        Session()


def test_the_next_page_is_asked_of_the_mirror_that_is_used(server: HubServer) -> None:
    server.page_size = 2
    server.link_host = "https://huggingface.co"
    assert set(listed(face(server)).files) == set(GGUF)
