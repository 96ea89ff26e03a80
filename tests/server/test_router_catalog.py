"""Which models a router finds, what they are called, and with which arguments their processes start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllama.options import parse
from pyllama.server.router.catalog import CatalogModel, Sources, list_item
from pyllama.server.router.presets import CatalogError, command_line

REVISION = "0" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return put(tmp_path / "models")


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


def cache(tmp_path: Path, *files: str, repo: str = "user/model") -> Path:
    return put(tmp_path / "cache" / f"models--{repo.replace('/', '--')}" / "snapshots" / REVISION, *files)


def read(tmp_path: Path, *argv: str, models_dir: Path | None = None, preset: str = "") -> dict[str, CatalogModel]:
    path = tmp_path / "preset.ini"
    path.write_text(preset)
    sources = Sources(
        {"LLAMA_CACHE": str(tmp_path / "cache")},
        str(models_dir or ""),
        str(path) if preset else "",
        command_line(argv),
    )
    return sources.read()


def arguments(model: CatalogModel) -> str:
    return " ".join(model.arguments)


def test_models_of_the_cache_have_their_repository_and_quant_as_name(tmp_path: Path) -> None:
    snapshot = cache(tmp_path, "m-q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")
    put(snapshot, "half-F16-00001-of-00002.gguf", "mmproj-F16.gguf")
    models = read(tmp_path)
    assert list(models) == ["user/model:Q4_0", "user/model:Q8_0"]
    assert models["user/model:Q8_0"].source == "cache"
    assert arguments(models["user/model:Q8_0"]) == f"--model {snapshot}/m-Q8_0-00001-of-00002.gguf"


def test_a_folder_holds_files_and_folders_with_one_model_each(tmp_path: Path, folder: Path) -> None:
    put(folder, "a.gguf", "notes.txt", "mmproj-x.gguf", "s-00001-of-00002.gguf", "s-00002-of-00002.gguf")
    put(folder, "big/w-00001-of-00002.gguf", "big/w-00002-of-00002.gguf", "big/mmproj-w.gguf", "empty/readme")
    models = read(tmp_path, models_dir=folder)
    assert {name: model.file for name, model in models.items()} == {
        "a": folder / "a.gguf",
        "s": folder / "s-00001-of-00002.gguf",
        "big": folder / "big/w-00001-of-00002.gguf",
    }
    assert {model.source for model in models.values()} == {"models_dir"}


@pytest.mark.parametrize(
    ("files", "words"),
    [(["a.gguf", "a/x.gguf"], "two models are called a"), (["a/x.gguf", "a/y.gguf"], "holds 2 models, expected one")],
)
def test_a_folder_that_is_ambiguous_is_refused(tmp_path: Path, folder: Path, files: list[str], words: str) -> None:
    with pytest.raises(CatalogError, match=words):
        read(tmp_path, models_dir=put(folder, *files))


def test_a_missing_folder_or_preset_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no directory"):
        read(tmp_path, models_dir=tmp_path / "missing")
    with pytest.raises(CatalogError, match=r"missing\.ini: No such file"):
        Sources({"LLAMA_CACHE": "x"}, models_preset=str(tmp_path / "missing.ini")).read()


PRESET = """
version = 1
c = 1024

[*]
LLAMA_ARG_THREADS = 3
metrics = 1

[small]
model = /m/small.gguf
alias = s,tiny
ctx_size = 512
no-slots = true
load-on-startup = true
stop-timeout = 3

[user/other:q8_0]
metrics = off
api-key = secret
port = 99
"""


def test_sections_name_models_and_inherit_what_is_for_all(tmp_path: Path) -> None:
    models = read(tmp_path, preset=PRESET)
    small, other = models["small"], models["user/other:Q8_0"]
    assert arguments(small) == "--threads 3 --metrics --model /m/small.gguf --ctx-size 512 --no-slots"
    assert (small.aliases, small.loads_on_startup, small.stop_timeout) == (("s", "tiny"), True, 3)
    assert arguments(other) == "--hf-repo user/other:Q8_0 --ctx-size 1024 --threads 3"
    assert (other.loads_on_startup, other.stop_timeout, other.source) == (False, 10, "preset")


def test_the_command_line_of_the_router_wins_and_keeps_its_own_options(tmp_path: Path) -> None:
    argv = ["-c", "256", "--models-max", "2", "--port", "0", "--api-key", "k", "--slots", "--log-file", "x"]
    models = read(tmp_path, *argv, preset=PRESET)
    assert arguments(models["small"]).endswith("--model /m/small.gguf --ctx-size 256 --slots")


def test_arguments_mean_what_the_section_says(tmp_path: Path) -> None:
    lines = [
        "model = m.gguf",
        "temp = 0.5",
        "no-cache-prompt = 1",
        "cont-batching = 0",
        "override-kv = a=int:1,b=str:x",
    ]
    lines += ["logit-bias = 7+1", "samplers = top_k;temperature", 'chat-template-kwargs = {"a": "b c"}', "s = 7"]
    (model,) = read(tmp_path, "-l", "8-1", preset="[x]\n" + "\n".join(lines)).values()
    options: Any = parse("llama-server", model.arguments, {}, config_files=())
    assert (options.model, options.temperature, options.seed) == ("m.gguf", 0.5, 7)
    assert (options.cache_prompt, options.cont_batching) == (False, False)
    assert options.override_kv == (("a", 1), ("b", "x"))
    assert options.logit_bias == ((8, -1.0),)
    assert options.samplers == ("top_k", "temperature")
    assert options.chat_template_kwargs == '{"a": "b c"}'
    assert options.notices == ()


def test_a_section_called_like_a_known_model_gives_it_options(tmp_path: Path, folder: Path) -> None:
    snapshot = cache(tmp_path, "m-Q4_0.gguf")
    put(folder, "a.gguf")
    models = read(tmp_path, models_dir=folder, preset="[a]\nc = 512\n[user/model:q4_0]\nc = 256\n")
    assert arguments(models["a"]) == f"--model {folder}/a.gguf --ctx-size 512"
    assert arguments(models["user/model:Q4_0"]) == f"--model {snapshot}/m-Q4_0.gguf --ctx-size 256"
    assert {model.source for model in models.values()} == {"preset"}


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("[x]\nmodel = a\nno-such-key = 1", "unknown key 'no-such-key'"),
        ("[x]\nc = 1", r"\[x\] says no model"),
        ("[x]\nmodel = a\n[x]\nmodel = b", "section 'x' already exists"),
        ("[x]\nmodel = a\nmodel = b", "option 'model' in section 'x' already exists"),
        ("[x]\nmodel = a\n[y]\nmodel = b\nalias = x", "the alias x of y is taken by x"),
        ("[x]\nmodel = a\nalias = z\n[y]\nmodel = b\nalias = z", "the alias z of y is taken by x"),
        ("[x]\nmodel = a\nmetrics = maybe", "metrics: expected one of"),
        ("[x]\nmodel = a\nstop-timeout = soon", "stop-timeout: expected an integer"),
        ("[x]\nmodel = a\nstop-timeout = -1", "at least 0"),
        ("[u/m:q8_0]\n[u/m:Q8_0]\n", "two sections are called u/m:Q8_0"),
        ("[x\nmodel = a", "preset.ini"),
        ("words", "preset.ini"),
    ],
)
def test_a_wrong_preset_file_is_refused_with_the_reason(tmp_path: Path, preset: str, words: str) -> None:
    with pytest.raises(CatalogError, match=words) as caught:
        read(tmp_path, preset=preset)
    assert "preset.ini" in str(caught.value) or "alias" in str(caught.value)


@pytest.mark.contract("router 13")
@pytest.mark.parametrize("everywhere", [False, True])
def test_cached_twins_of_presets_are_hidden_on_request(tmp_path: Path, everywhere: bool) -> None:
    snapshot = cache(tmp_path, "m-Q4_0.gguf", "m-Q8_0.gguf", "m-F16.gguf")
    key = "dedup-cache-models = 1\n"
    head = "[*]\n" + key if everywhere else ""
    own = "" if everywhere else key
    sections = f"[x]\nhf-repo = user/model:q4_0\n{own}[y]\nmodel = {snapshot}/m-Q8_0.gguf\n{own}"
    hidden = {name for name, model in read(tmp_path, preset=head + sections).items() if model.is_hidden}
    assert hidden == {"user/model:Q4_0", "user/model:Q8_0"}
    assert not any(model.is_hidden for model in read(tmp_path, preset=sections.replace(key, "")).values())


@pytest.mark.parametrize(
    "line",
    [
        "slot-save-path = /tmp", "log-file = /tmp/x", "api-key-file = /etc/passwd", "model = /etc/passwd",
        "host = 0.0.0.0",
        "chat-template-file = /etc/passwd", "grammar-file = /etc/passwd", "tools = all", "mcp-servers-json = {}",
        "model-url = http://169.254.169.254/", "hf-token = x", "ui-mcp-proxy = 1", "path = /", "models-dir = /",
        "rpc = host:1", "lora = /x", "mmproj = /x", "LLAMA_ARG_MODEL = /etc/passwd",
    ],
)  # fmt: skip
@pytest.mark.parametrize("section", ["", "[*]\n", "[user/model]\n"])
def test_a_preset_of_a_hub_may_not_reach_into_this_machine(tmp_path: Path, line: str, section: str) -> None:
    path = tmp_path / "preset.ini"
    path.write_text(section + line + "\n")
    with pytest.raises(CatalogError, match="a preset of a hub may not set this option"):
        Sources({"LLAMA_CACHE": str(tmp_path / "cache")}, "", str(path), preset_from_hub=True).read()


def test_a_preset_of_a_hub_says_how_a_model_answers(tmp_path: Path) -> None:
    path = tmp_path / "preset.ini"
    path.write_text("version = 1\n[*]\nctx-size = 4096\n[user/model:q4_0]\ntemp = 0.7\nspec-draft-n-max = 4\n")
    models = Sources({"LLAMA_CACHE": str(tmp_path / "cache")}, "", str(path), preset_from_hub=True).read()
    assert "--hf-repo user/model:Q4_0 --ctx-size 4096 --temp" in arguments(models["user/model:Q4_0"])


@pytest.mark.parametrize("name", ["a", "a,b", 'say "hi"', " a", "a b"])
def test_any_name_arrives_whole_as_an_alias(name: str) -> None:
    assert parse("llama-server", ["--alias", list_item(name)], {}, config_files=()).alias == (name,)


def test_removing_a_cached_model_keeps_what_others_need(tmp_path: Path) -> None:
    from pyllama.download.cache import ModelCache

    models = ModelCache(tmp_path / "cache", tmp_path / "cache")
    for revision, name, content in (("1", "m-Q4_0.gguf", "x"), ("2", "m-Q4_0.gguf", "y"), ("2", "m-Q8_0.gguf", "x")):
        blob = models.blob("user/model", content)
        put(blob.parent, content)
        models.link(models.snapshot("user/model", revision) / name, blob)
    assert list(models.models()) == ["user/model:Q4_0", "user/model:Q8_0"]
    models.remove("user/model:Q4_0")
    assert list(models.models()) == ["user/model:Q8_0"]
    assert [path.name for path in models.blob("user/model", "x").parent.iterdir()] == ["x"]
    with pytest.raises(KeyError):
        models.remove("user/model:Q4_0")
