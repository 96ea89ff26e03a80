"""-hf, -hff, -hft, -mu, --offline, --cache-list and the cache behind them, in every program that has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pyllama.download.cache import cache_list, model_cache
from pyllama.download.model_options import choose_model, with_local_models
from pyllama.download.session import Patience, Session
from pyllama.errors import DownloadError, InvalidArgument
from pyllama.options import parse
from support.hub_server import Answer, HubServer, running_hub

REPO = "user/model-GGUF"
FILES = {
    "m-Q4_K_M.gguf": b"GGUF four",
    "m-Q8_0.gguf": b"GGUF eight",
    "big/m-BF16-00001-of-00002.gguf": b"GGUF one",
    "big/m-BF16-00002-of-00002.gguf": b"GGUF two",
    "mmproj-F16.gguf": b"GGUF eyes",
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("HF_", "LLAMA_", "MODEL")):
            monkeypatch.delenv(name)
    # The pauses between attempts of a test are short; those of a program are not changed.
    monkeypatch.setattr(Session.__init__, "__defaults__", (Patience(attempts=2, timeout=1.0, first_pause=0.001),))


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running_hub() as server:
        server.repos[REPO] = dict(FILES)
        yield server


@pytest.fixture
def environ(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "LLAMA_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}


def local(environ: Mapping[str, str], *argv: str, tool: str = "llama-server") -> Path:
    """What a program started with `argv` loads."""
    return Path(choose_model(parse(tool, argv, environ, config_files=()), environ).fetch(lambda line: None))


def contents(path: Path) -> bytes:
    return path.read_bytes()


# ------------------------------------------------------------------------------------------------ repositories


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["-hf", REPO], "m-Q4_K_M.gguf"),
        (["-hf", REPO + ":latest"], "m-Q4_K_M.gguf"),
        (["-hfr", REPO + ":q8_0"], "m-Q8_0.gguf"),
        (["--hf-repo", REPO + ":BF16"], "big/m-BF16-00001-of-00002.gguf"),
        (["-hf", REPO + ":Q8_0", "-hff", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (["-hf", REPO, "--hf-file", "big/m-BF16-00002-of-00002.gguf"], "big/m-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_repository_becomes_a_local_file(environ: dict[str, str], argv: list[str], name: str) -> None:
    path = local(environ, *argv)
    assert path.as_posix().endswith(f"/{name}")
    assert contents(path) == FILES[name]


def test_all_shards_of_a_model_lie_side_by_side(environ: dict[str, str]) -> None:
    folder = local(environ, "-hf", REPO + ":BF16").parent
    assert {path.name: contents(path) for path in folder.iterdir()} == {
        name.removeprefix("big/"): data for name, data in FILES.items() if "BF16" in name
    }


def test_what_is_there_is_not_fetched_again(hub: HubServer, environ: dict[str, str]) -> None:
    first = local(environ, "-hf", REPO)
    assert local(environ, "-hf", REPO) == first
    assert len(hub.file_requests()) == 1


def test_a_new_revision_fetches_only_what_changed(hub: HubServer, environ: dict[str, str]) -> None:
    first = local(environ, "-hf", REPO + ":BF16")
    hub.repos[REPO]["big/m-BF16-00002-of-00002.gguf"] = b"GGUF new"
    second = local(environ, "-hf", REPO + ":BF16")
    assert first != second
    assert [contents(path) for path in sorted(second.parent.iterdir())] == [b"GGUF one", b"GGUF new"]
    assert len(hub.file_requests()) == 3


def test_the_token_of_the_command_line_wins(hub: HubServer, environ: dict[str, str]) -> None:
    local({**environ, "HF_TOKEN": "hf_one"}, "-hf", REPO, "-hft", "hf_two")
    assert {headers["authorization"] for _, headers in hub.requests} == {"Bearer hf_two"}
    hub.requests.clear()
    local({**environ, "HF_TOKEN": "hf_one"}, "-hf", REPO)
    assert {headers["authorization"] for _, headers in hub.requests} == {"Bearer hf_one"}


def test_a_hub_without_checksums_still_serves(hub: HubServer, environ: dict[str, str]) -> None:
    hub.tells_checksums = False
    assert contents(local(environ, "-hf", REPO)) == b"GGUF four"
    assert contents(local(environ, "-hf", REPO, "--offline")) == b"GGUF four"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-hf", REPO + ":Q9"], f"{REPO}: there is no Q9 model; there are: .*m-Q8_0"),
        (["-hf", REPO, "-hff", "x.gguf"], "there is no file x.gguf"),
        (["-hf", "user/none"], "failed to fetch model metadata: .*not found"),
        (["-hf", "model"], "is not a repository"),
        (["-hf", "../x"], "is not a repository"),
        (["-mu", "ftp://host/x.gguf"], "not an http or https URL"),
        (["-mu", "http://host/%2e%2e/x.gguf"], "not allowed"),
        (["-mu", "http://host/"], "not allowed"),
    ],
)
def test_what_cannot_be_had_is_one_error(environ: dict[str, str], argv: list[str], message: str) -> None:
    with pytest.raises(DownloadError, match=message):
        local(environ, *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no model given"),
        (["-hff", "x.gguf"], "--hf-file needs a repository"),
        (["-hf", REPO, "-m", "x.gguf"], "given twice"),
        (["-hf", REPO, "-mu", "http://host/x.gguf"], "given twice"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], argv: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        local(environ, *argv)


def test_a_local_file_needs_no_hub_and_keeps_its_spelling(hub: HubServer, environ: dict[str, str]) -> None:
    options = parse("llama-server", ["-m", "./some//file.gguf", "--offline"], environ, config_files=())
    assert choose_model(options, environ).fetch() == "./some//file.gguf"
    assert hub.requests == []


# ------------------------------------------------------------------------------------------------ offline


def test_offline_uses_the_cache_and_no_network(hub: HubServer, environ: dict[str, str]) -> None:
    paths = {quant: local(environ, "-hf", f"{REPO}:{quant}") for quant in ("Q8_0", "BF16")}
    hub.requests.clear()
    assert {quant: local(environ, "-hf", f"{REPO}:{quant}", "--offline") for quant in paths} == paths
    assert local({**environ, "LLAMA_ARG_OFFLINE": "1"}, "-hf", f"{REPO}:Q8_0") == paths["Q8_0"]
    assert hub.requests == []


def test_offline_without_the_model_is_an_error(hub: HubServer, environ: dict[str, str]) -> None:
    for argv in (["-hf", REPO], ["-hf", REPO + ":Q8_0"], ["-mu", hub.endpoint + "/m.gguf"]):
        with pytest.raises(DownloadError, match="--offline forbids"):
            local(environ, *argv, "--offline")
    local(environ, "-hf", REPO)
    with pytest.raises(DownloadError, match=f"{REPO}:Q8_0 is not in the cache"):
        local(environ, "-hf", REPO + ":Q8_0", "--offline")
    assert len(hub.file_requests()) == 1


def test_an_incomplete_model_is_not_in_the_cache(hub: HubServer, environ: dict[str, str]) -> None:
    path = local(environ, "-hf", REPO + ":BF16")
    path.with_name("m-BF16-00002-of-00002.gguf").unlink()
    with pytest.raises(DownloadError, match="is not in the cache"):
        local(environ, "-hf", REPO + ":BF16", "--offline")
    assert ":BF16" not in cache_list(environ)


def test_the_cache_serves_while_the_hub_is_down(
    hub: HubServer, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = local(environ, "-hf", REPO)
    hub.api_answers = [Answer(status=503)] * 9
    assert local(environ, "-hf", REPO) == path
    assert f"using {path}" in capsys.readouterr().err
    with pytest.raises(DownloadError, match="503"):
        local(environ, "-hf", REPO + ":Q8_0")


# ------------------------------------------------------------------------------------------------ URLs


def test_a_url_becomes_a_local_file(hub: HubServer, environ: dict[str, str]) -> None:
    hub.urls["/some folder/m.gguf"] = b"GGUF by URL"
    url = hub.endpoint + "/some%20folder/m.gguf?download=true"
    path = local(environ, "-mu", url)
    assert contents(path) == b"GGUF by URL"
    assert path == Path(environ["LLAMA_CACHE"]) / f"127.0.0.1_{hub.port}" / "some folder" / "m.gguf"
    assert local(environ, "--model-url", url, "--offline") == path


def test_a_url_with_a_path_is_kept_there(hub: HubServer, environ: dict[str, str], tmp_path: Path) -> None:
    hub.urls["/m.gguf"] = b"GGUF by URL"
    target = tmp_path / "mine" / "named.gguf"
    assert local(environ, "-mu", hub.endpoint + "/m.gguf", "-m", str(target)) == target
    assert contents(target) == b"GGUF by URL"


def test_a_url_of_one_shard_brings_them_all(hub: HubServer, environ: dict[str, str]) -> None:
    for index in (1, 2, 3):
        hub.urls[f"/x/m-0000{index}-of-00003.gguf"] = b"GGUF %d" % index
    path = local(environ, "-mu", hub.endpoint + "/x/m-00002-of-00003.gguf?key=1")
    assert path.name == "m-00001-of-00003.gguf"
    assert [contents(shard) for shard in sorted(path.parent.glob("*.gguf"))] == [b"GGUF 1", b"GGUF 2", b"GGUF 3"]


def test_a_url_of_the_hub_is_verified_and_gets_the_token_another_does_not(
    hub: HubServer, environ: dict[str, str]
) -> None:
    environ["HF_TOKEN"] = "hf_secret"
    hub.answers = [Answer(redirect="localhost"), Answer(body=b"GGUF wrong"[: len(FILES["m-Q8_0.gguf"])])] * 2
    with pytest.raises(DownloadError, match="sha256 is"):
        local(environ, "-mu", f"{hub.endpoint}/{REPO}/resolve/main/m-Q8_0.gguf")
    assert hub.requests[0][1]["authorization"] == "Bearer hf_secret"
    hub.requests.clear()
    hub.urls["/m.gguf"] = b"GGUF elsewhere"
    local(environ, "-mu", f"http://localhost:{hub.port}/m.gguf")
    assert "authorization" not in hub.requests[0][1]


# ------------------------------------------------------------------------------------------------ the cache


def test_the_cache_list_names_models_by_repository_and_quant(hub: HubServer, environ: dict[str, str]) -> None:
    assert cache_list(environ) == "number of models in cache: 0"
    for quant in ("Q8_0", "BF16", "Q4_K_M"):
        local(environ, "-hf", f"{REPO}:{quant}")
    hub.repos[REPO]["README.md"] = b"a new revision"
    local(environ, "-hf", REPO)
    hub.urls["/m.gguf"] = b"GGUF by URL"
    local(environ, "-mu", hub.endpoint + "/m.gguf")
    assert cache_list(environ).splitlines() == [
        "number of models in cache: 4",
        f"   1. {REPO}:BF16",
        f"   2. {REPO}:Q4_K_M",
        f"   3. {REPO}:Q8_0",
        f"   4. 127.0.0.1_{hub.port}/m.gguf",
    ]


@pytest.mark.parametrize(("program", "flag"), [("pyllama.server", "-cl"), ("pyllama.tools.cli", "--cache-list")])
def test_programs_print_the_cache_list_and_end_with_0(
    environ: dict[str, str], tmp_path: Path, program: str, flag: str
) -> None:
    local(environ, "-hf", REPO)
    result = subprocess.run(
        [sys.executable, "-m", program, flag],
        env={**os.environ, **environ},
        cwd=tmp_path,  # not the source tree, which has no compiled extension
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"number of models in cache: 1\n   1. {REPO}:Q4_K_M\n"


@pytest.mark.parametrize(
    ("environ", "repositories", "urls"),
    [
        ({"LLAMA_CACHE": "/l", "HF_HOME": "/h"}, "/l", "/l"),
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h", "HOME": "/u"}, "/c", "/u/.cache/llama.cpp"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub", "/x/llama.cpp"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/u"}, "/x/huggingface/hub", "/x/llama.cpp"),
        ({"HOME": "/u"}, "/u/.cache/huggingface/hub", "/u/.cache/llama.cpp"),
    ],
)
def test_the_cache_is_where_users_of_other_programs_have_it(
    environ: dict[str, str], repositories: str, urls: str
) -> None:
    cache = model_cache(environ)
    assert (str(cache.repositories), str(cache.urls)) == (repositories, urls)


def test_huggingface_hub_finds_what_we_fetched(hub: HubServer, environ: dict[str, str]) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    path = local(environ, "-hf", REPO)
    found = huggingface_hub.hf_hub_download(
        REPO, "m-Q4_K_M.gguf", cache_dir=environ["LLAMA_CACHE"], local_files_only=True
    )
    assert Path(found) == path
    report = huggingface_hub.scan_cache_dir(environ["LLAMA_CACHE"])
    assert [(repo.repo_id, repo.nb_files) for repo in report.repos] == [(REPO, 1)]
    assert report.warnings == []


def test_we_find_what_huggingface_hub_fetched(hub: HubServer, environ: dict[str, str]) -> None:
    repository = Path(environ["LLAMA_CACHE"]) / "models--user--model-GGUF"
    for folder in ("blobs", "refs", f"snapshots/{'a' * 40}"):
        (repository / folder).mkdir(parents=True)
    (repository / "blobs" / "x").write_bytes(b"GGUF")
    (repository / "refs" / "main").write_text("a" * 40)
    name = repository / "snapshots" / ("a" * 40) / "m-Q5_0.gguf"
    name.symlink_to("../../blobs/x")
    assert local(environ, "-hf", REPO, "--offline") == name


# ------------------------------------------------------------------------------------------------ the programs


def test_bench_takes_repositories_beside_files(hub: HubServer, environ: dict[str, str]) -> None:
    argv = ["-m", "a.gguf", "-hf", REPO, "-hf", f"{REPO}:Q8_0"]
    options = with_local_models(parse("llama-bench", argv, environ, config_files=()), environ)
    assert [Path(path).name for path in options.model] == ["a.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]
    argv = ["-hf", REPO, "-hff", "m-Q8_0.gguf", "-hft", "hf_x", "--offline"]
    options = with_local_models(parse("llama-bench", argv, environ, config_files=()), environ)
    assert [Path(path).name for path in options.model] == ["m-Q8_0.gguf"]
    with pytest.raises(InvalidArgument, match="2 times"):
        with_local_models(parse("llama-bench", [*argv, "-hff", "x"], environ, config_files=()), environ)
    with pytest.raises(InvalidArgument, match="no model"):
        with_local_models(parse("llama-bench", [], environ, config_files=()), environ)


@pytest.mark.parametrize("program", ["pyllama.server", "pyllama.tools.cli", "pyllama.tools.bench"])
def test_programs_end_with_one_line_and_1_when_a_model_cannot_be_had(
    environ: dict[str, str], tmp_path: Path, program: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", program, "-hf", "user/none"],
        env={**os.environ, **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert re.fullmatch(r"error: failed to fetch model metadata: .*not found \(404\)\n", result.stderr)


def test_a_program_with_a_local_file_does_not_import_the_http_client(tmp_path: Path) -> None:
    code = """
import sys
from pyllama.download.model_options import choose_model
from pyllama.options import parse
choose_model(parse("llama-cli", ["-m", "x"], {}, config_files=()), {}).fetch()
assert "httpx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
