"""v100-get-models: which files it fetches, from where, what it converts, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama.download.bars import Bars
from pyllama.download.progress import Lines, bytes_text
from pyllama.errors import DownloadError
from pyllama.tools import get_models
from support.hub_server import Answer, HubServer, cut, running_hub

TARGET, DRAFTER = "unsloth/Qwen3.8-27B-GGUF", "z-lab/Qwen3.8-27B-DFlash2-GGUF"
NAME = "Qwen3.8-27B"
FILES = {
    TARGET: {
        f"{NAME}-Q8_0.gguf": b"GGUF q8",
        f"{NAME}-UD-Q4_K_M.gguf": b"GGUF q4",
        f"BF16/{NAME}-BF16-00001-of-00002.gguf": b"GGUF 1",
        f"BF16/{NAME}-BF16-00002-of-00002.gguf": b"GGUF 2",
        "mmproj-BF16.gguf": b"GGUF eyes bf16",
        "mmproj-F16.gguf": b"GGUF eyes f16",
    },
    DRAFTER: {f"{NAME}-DFlash2-BF16.gguf": b"GGUF draft", f"{NAME}-DFlash2-Q4_K_M.gguf": b"GGUF small draft"},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("HF_", "MODEL")):
            monkeypatch.delenv(name)
    with running_hub() as server:
        server.repos = {repo: dict(files) for repo, files in FILES.items()}
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """The calls of `quantize_file`, which only copies."""
    calls: list[tuple[str, str, str]] = []

    def quantize_file(source: Path, target: Path, file_type: str, **options: Any) -> None:
        calls.append((source.name, target.name, file_type))
        target.write_bytes(source.read_bytes().replace(b"draft", b"f16 draft"))

    pipeline = ModuleType("pyllama.quantize.pipeline")
    pipeline.quantize_file = quantize_file  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyllama.quantize.pipeline", pipeline)
    return calls


Calls = list[tuple[str, str, str]]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("source", ["ms", "hf"])
def test_target_and_drafter_come_from_either_hub_and_the_drafter_becomes_f16(
    hub: HubServer, conversions: Calls, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get_models.main(["-s", source]) == 0
    drafter = f"{NAME}-DFlash2-BF16.gguf"
    assert files_in(Path("models")) == {
        f"{NAME}-Q8_0.gguf": b"GGUF q8",
        drafter: b"GGUF draft",
        f"{NAME}-DFlash2-F16.gguf": b"GGUF f16 draft",
    }
    assert conversions == [(drafter, f"{NAME}-DFlash2-F16.gguf", "F16")]
    assert capsys.readouterr().out == f"models/{NAME}-Q8_0.gguf\nmodels/{NAME}-DFlash2-F16.gguf\n"
    is_modelscope = any("/api/v1/models/" in path for path, _ in hub.requests)
    assert is_modelscope == (source == "ms")


def test_a_second_run_fetches_and_converts_nothing(hub: HubServer, conversions: Calls) -> None:
    get_models.main([])
    n_requests = len(hub.file_requests())
    assert get_models.main([]) == 0
    assert len(hub.file_requests()) == n_requests
    assert len(conversions) == 1


def test_a_newer_drafter_is_converted_again(hub: HubServer, conversions: Calls) -> None:
    get_models.main([])
    hub.repos[DRAFTER][f"{NAME}-DFlash2-BF16.gguf"] = b"GGUF better draft"
    get_models.main([])
    assert files_in(Path("models"))[f"{NAME}-DFlash2-F16.gguf"] == b"GGUF better f16 draft"


def test_quant_folder_and_projector_can_be_chosen(hub: HubServer, conversions: Calls, tmp_path: Path) -> None:
    assert get_models.main(["--quant", "Q4_K_M", "-d", str(tmp_path / "here"), "--mmproj"]) == 0
    assert set(files_in(tmp_path / "here")) == {
        f"{NAME}-UD-Q4_K_M.gguf",
        f"{NAME}-DFlash2-BF16.gguf",
        f"{NAME}-DFlash2-F16.gguf",
        "mmproj-F16.gguf",
    }


def test_other_repositories_replace_the_defaults(hub: HubServer, conversions: Calls) -> None:
    hub.repos["me/mine"] = {"mine-Q8_0.gguf": b"GGUF mine"}
    assert get_models.main(["--target", "me/mine", "--drafter", f"{DRAFTER}:{NAME}-DFlash2-Q4_K_M.gguf"]) == 0
    assert set(files_in(Path("models"))) == {"mine-Q8_0.gguf", f"{NAME}-DFlash2-Q4_K_M.gguf"}
    assert conversions == []


def test_models_on_the_command_line_are_fetched_instead(hub: HubServer, conversions: Calls) -> None:
    hub.repos["me/mine"] = {"sub/mine-Q5_0.gguf": b"GGUF mine"}
    assert get_models.main(["me/mine", f"{TARGET}:BF16"]) == 0
    assert files_in(Path("models")) == {
        "mine-Q5_0.gguf": b"GGUF mine",
        f"{NAME}-BF16-00001-of-00002.gguf": b"GGUF 1",
        f"{NAME}-BF16-00002-of-00002.gguf": b"GGUF 2",
    }
    assert conversions == []


def test_two_files_of_one_name_are_an_error(hub: HubServer) -> None:
    hub.repos["me/mine"] = {f"{NAME}-Q8_0.gguf": b"GGUF mine"}
    with pytest.raises(DownloadError, match=r"two files would be named models/Qwen3\.8-27B-Q8_0\.gguf"):
        get_models.main(["me/mine", f"{TARGET}:Q8_0"])


def test_the_path_of_llama_quantize_is_accepted_with_a_notice(
    hub: HubServer, conversions: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get_models.main(["-q", "/usr/bin/llama-quantize"]) == 0
    assert "-q has no effect" in capsys.readouterr().err


def test_an_interrupted_download_resumes(hub: HubServer, conversions: Calls) -> None:
    hub.repos[TARGET][f"{NAME}-Q8_0.gguf"] = b"GGUF" + bytes(200_000)
    hub.answers = [cut(50_000), Answer(status=404, body=b"")]
    with pytest.raises(DownloadError):
        get_models.main([TARGET + ":Q8_0"])
    assert get_models.main([TARGET + ":Q8_0"]) == 0
    assert hub.file_requests()[-1]["range"] == "bytes=50000-"


def test_ctrl_c_ends_with_130_and_keeps_what_came(hub: HubServer) -> None:
    hub.repos["me/mine"] = {"mine-Q8_0.gguf": b"GGUF" + bytes(3_000_000)}
    hub.answer = Answer(seconds_per_block=0.05)
    process = subprocess.Popen(
        [sys.executable, "-m", "pyllama.tools.get_models", "me/mine"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 130
    assert Path("models/mine-Q8_0.gguf.partial").exists()


@pytest.mark.parametrize("argv", [["-s", "x"], ["--quant", "q2"], ["--nonsense"], ["user/none"], ["a/b", "--mmproj"]])
def test_every_failure_is_one_line_and_code_1(hub: HubServer, argv: list[str]) -> None:
    script = Path(__file__).parents[2] / "scripts" / "v100-get-models.sh"
    program = Path(sys.executable).with_name("v100-get-models")
    command = [str(script)] if program.exists() else [sys.executable, "-m", "pyllama.tools.get_models"]
    environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    result = subprocess.run([*command, *argv], env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_help_names_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        get_models.main(["-h"])
    assert caught.value.code == 0
    assert TARGET in capsys.readouterr().out


def write_bf16(path: Path, values: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor("blk.0.ffn_up.weight", bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_conversion_keeps_the_values(tmp_path: Path) -> None:
    values = np.linspace(-2, 2, 64 * 32, dtype=np.float32).reshape(32, 64).view(np.uint32) & 0xFFFF0000
    write_bf16(tmp_path / "d-BF16.gguf", values.view(np.float32))
    made = get_models.f16_drafter(tmp_path / "d-BF16.gguf")
    assert made.name == "d-F16.gguf"
    tensor = gguf.GGUFReader(made).tensors[0]
    assert tensor.tensor_type == gguf.GGMLQuantizationType.F16
    np.testing.assert_array_equal(tensor.data, values.view(np.float32).astype(np.float16))


# ------------------------------------------------------------------------------------------------ progress


def test_without_a_terminal_progress_is_a_line_per_tenth() -> None:
    lines: list[str] = []
    report = Lines(lines.append)
    for done in range(0, 1001):
        report.update("m", done * 1_000_000, 1_000_000_000)
    report.finish("m", 1_000_000_000)
    assert lines[0] == "m: 0 B of 1.0 GB"
    assert lines[-1] == "m: complete, 1.0 GB"
    assert len(lines) == 11


def test_on_a_terminal_progress_is_a_bar_per_file() -> None:
    import io

    from rich.console import Console

    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=100)) as report:
        report.update("[m]-Q8_0.gguf", 5, 10)
        report.update("other.gguf", 5, None)
        report.note("a [note]")
        report.finish("[m]-Q8_0.gguf", 10)
    assert "[m]-Q8_0.gguf" in screen.getvalue()
    assert "a [note]" in screen.getvalue()


def test_sizes_read_as_on_the_hubs() -> None:
    texts = [bytes_text(count) for count in (0, 999, 1000, 16_540_000_000, 5 * 10**15)]
    assert texts == ["0 B", "999 B", "1.0 kB", "16.5 GB", "5000.0 TB"]
