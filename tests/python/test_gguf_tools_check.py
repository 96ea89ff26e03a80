"""`llama-gguf check`: every kind of damage is one line, sound files are `ok`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from unit import gguf_bytes as g

from pyllama.gguf import GgufFile, KeyValue, TensorSpec
from pyllama.tools import gguf_check, gguf_hash, gguf_split
from support.file_tools import run_tool, write_model
from support.measured import run_measured
from support.tiny_llama import write_tiny_llama

SPECS = [TensorSpec("a", "f32", (5,)), TensorSpec("b", "q4_0", (32, 3)), TensorSpec("c", "f16", (3,))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", SPECS)


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = run_tool(gguf_check.main, *arguments)
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out.splitlines()


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


@pytest.mark.parametrize("alignment", [1, 32, 4096])
def test_sound_files_are_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str], alignment: int) -> None:
    keys = [KeyValue("general.alignment", "u32", alignment)]
    models = [write_model(tmp_path / "a.gguf", SPECS, keys), write_model(tmp_path / "empty.gguf", [], keys)]
    assert checked(capsys, *models) == (0, [f"{path}: ok" for path in models])


def test_missing_padding_of_the_last_tensor_is_allowed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = GgufFile(model).tensors[-1]
    edit(model, lambda content: content.__delitem__(slice(last.offset + last.n_bytes, None)))
    assert checked(capsys, model) == (0, [f"{model}: ok"])


def test_values_and_scales_that_are_not_finite_are_counted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = GgufFile(model).tensors

    def spoil(content: bytearray) -> None:
        content[a.offset : a.offset + 8] = np.array([np.inf, np.nan], np.float32).tobytes()
        content[b.offset + 18 : b.offset + 20] = np.array([np.nan], np.float16).tobytes()
        content[c.offset + 4 : c.offset + 6] = np.array([-np.inf], np.float16).tobytes()

    edit(model, spoil)
    assert checked(capsys, model) == (
        1,
        [
            f"{model}: tensor 'a': 2 values are not finite",
            f"{model}: tensor 'b': 1 blocks are not finite",
            f"{model}: tensor 'c': 1 values are not finite",
        ],
    )


def test_data_is_checked_in_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama.gguf.reader.TensorReader.pieces.__defaults__", (1000,))
    model = write_model(tmp_path / "m.gguf", [TensorSpec("a", "q6_K", (256, 40)), TensorSpec("b", "f32", (9999,))])
    assert checked(capsys, model)[0] == 0
    tensor = GgufFile(model).tensors[0]

    def spoil(content: bytearray) -> None:
        for block in (0, 17, 39):
            at = tensor.offset + block * 210 + 208
            content[at : at + 2] = np.array([np.inf], np.float16).tobytes()

    edit(model, spoil)
    assert checked(capsys, model) == (1, [f"{model}: tensor 'a': 3 blocks are not finite"])


def test_bytes_between_and_after_tensors_are_reported(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = model.stat().st_size
    a, b, _ = GgufFile(model).tensors

    def spoil(content: bytearray) -> None:
        content[a.offset - 1] = 1
        content[a.offset + a.n_bytes : a.offset + a.n_bytes + 2] = b"xy"
        content[b.offset + b.n_bytes] = 7
        content[-1] = 9
        content += b"tail"

    edit(model, spoil)
    assert checked(capsys, model) == (
        1,
        [
            f"{model}: padding after the header: 1 bytes are not zero",
            f"{model}: padding after tensor 'a': 2 bytes are not zero",
            f"{model}: padding after tensor 'b': 1 bytes are not zero",
            f"{model}: padding after tensor 'c': 1 bytes are not zero",
            f"{model}: 4 bytes follow the end of the data at {size}",
        ],
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda content: content.__setitem__(0, 0), "not a GGUF file"),
        (lambda content: content.__delitem__(slice(-100, None)), "lies outside the file"),
        (lambda content: content.__delitem__(slice(150, None)), "file ends inside"),
    ],
)
def test_broken_container_is_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], change: Callable[[bytearray], None], fault: str
) -> None:
    edit(model, change)
    code, lines = checked(capsys, model)
    assert (code, len(lines)) == (1, 1)
    assert lines[0].startswith(f"{model}: ")
    assert fault in lines[0]


def test_good_files_are_checked_after_a_bad_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = model.with_name("bad.gguf")
    bad.write_bytes(b"GGUF")
    code, lines = checked(capsys, bad, model)
    assert code == 1
    assert lines[1:] == [f"{model}: ok"]


def test_all_parts_of_a_split_model_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "m.gguf", SPECS)
    assert run_tool(gguf_split.main, "--split-max-tensors", 1, model, tmp_path / "s") == 0
    parts = sorted(tmp_path.glob("s-*"))
    assert checked(capsys, parts[0]) == (0, [f"{parts[0]}: ok"])
    edit(parts[2], lambda content: content.extend(b"x"))
    edit(parts[1], lambda content: content.extend(b"xy"))
    lines = checked(capsys, parts[0])[1]
    assert [line.split(": ")[0] for line in lines] == [str(parts[1]), str(parts[2])]
    parts[1].unlink()
    assert checked(capsys, parts[0]) == (1, [f"{parts[1]}: part 2 of 3 is missing"])


def test_manifest_tells_which_tensor_changed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(gguf_hash.main, "--all", model) == 0
    manifest = model.with_suffix(".manifest")
    manifest.write_text(capsys.readouterr().out)
    assert checked(capsys, "--manifest", manifest, model) == (0, [f"{model}: ok"])
    edit(model, lambda content: content.__setitem__(GgufFile(model).tensors[1].offset + 5, 0xFF))
    code, lines = checked(capsys, "--manifest", manifest, model)
    assert code == 1
    assert [line.split(": ")[1] for line in lines] == ["tensor 'b'", "all tensors"]
    assert all(": sha256 " in line and "Not ok" in line for line in lines)


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """One row of 300 MB: neither tensor nor row fits into the limit. The file takes no space on the disk."""
    model = tmp_path / "m.gguf"
    model.write_bytes(g.gguf_file((), [g.tensor_info(b"t", [75_000_000])]))
    os.truncate(model, model.stat().st_size + 300_000_000)
    done = run_measured("pyllama.tools.gguf_check", model, folder=tmp_path)
    assert done.status == 0
    assert done.output.decode() == f"{model}: ok\n"
    assert done.peak_bytes < 200 << 20


@pytest.mark.parametrize("weight_type", ["f16", "q4_k", "q6_k", "q8_0"])
def test_models_of_the_gguf_package_are_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weight_type: str
) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf", n_embd=256, n_ff=256, weight_type=weight_type)
    assert checked(capsys, model) == (0, [f"{model}: ok"])
