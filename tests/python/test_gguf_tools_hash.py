"""`llama-gguf-hash`: sums of raw tensor bytes, in the lines of llama.cpp's program; manifests."""

from __future__ import annotations

import hashlib
import sys
import uuid
from pathlib import Path

import pytest
import xxhash

from pyllama.gguf import GgufFile, KeyValue, TensorSpec
from pyllama.tools import gguf_hash
from support.file_tools import run_tool, write_model

SPECS = [TensorSpec("a", "f32", (5,)), TensorSpec("b:c", "q4_0", (32, 3)), TensorSpec("empty", "f32", (0,))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", SPECS)


def lines(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[str]:
    assert run_tool(gguf_hash.main, *arguments) == code
    return capsys.readouterr().out.splitlines()


def test_sums_are_of_the_raw_bytes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = GgufFile(model)
    data = {spec.name: file.tensor_bytes(spec.name) for spec in SPECS}
    whole = b"".join(data.values())
    subjects = {f"{model}:{name}": blob for name, blob in data.items()} | {str(model): whole}
    algorithms = {"xxh64": xxhash.xxh64, "sha1": hashlib.sha1, "sha256": hashlib.sha256}
    expected = [
        f"{algorithm:<8}  {function(blob).hexdigest()}  {subject}"
        for subject, blob in subjects.items()
        for algorithm, function in algorithms.items()
    ]
    assert lines(capsys, "--all", model) == expected
    assert lines(capsys, "--manifest", model) == expected
    assert lines(capsys, model) == [line for line in expected if line.startswith("xxh64")]
    assert lines(capsys, "--sha1", "--no-layer", model) == [expected[-2]]
    namespace = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")
    digest = hashlib.sha1(namespace.bytes + whole).digest()
    assert lines(capsys, "--uuid", model) == [f"uuid      {uuid.UUID(bytes=digest[:16], version=5)}  {model}"]


def test_metadata_does_not_count(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_model(tmp_path / "other.gguf", SPECS, [KeyValue("general.name", "string", "x" * 1000)])
    digests = [[line.split()[1] for line in lines(capsys, "--all", path)] for path in (model, other)]
    assert digests[0] == digests[1]


def test_pieces_make_no_difference(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = lines(capsys, "--all", model)
    monkeypatch.setattr("pyllama.gguf.reader.TensorReader.pieces.__defaults__", (16,))
    assert lines(capsys, "--all", model) == expected


def test_progress_bar_keeps_out_of_the_output(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = lines(capsys, "--all", model)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run_tool(gguf_hash.main, "--all", model) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == expected
    assert "hashing" in captured.err


def write_manifest(model: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Path:
    manifest = model.with_suffix(".manifest")
    manifest.write_text("\n".join(lines(capsys, *options, model)))
    return manifest


def test_manifest_of_the_same_data_is_met(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(model, capsys, "--all")
    moved = model.parent / "elsewhere"
    moved.mkdir()
    model = model.rename(moved / model.name)
    found = lines(capsys, "--check", manifest, model)
    assert found[0] == f"manifest  {manifest}  sha256  sha1  xxh64"
    assert [line.split()[0] for line in found[1:5]] == ["sha256"] * 4
    assert all(line.endswith("  -  Ok") for line in found[1:5])
    assert found[5:] == ["", f"Verification results for {manifest} - Success"]
    assert [line.split()[0] for line in lines(capsys, "-c", manifest, "--xxh64", model)[1:5]] == ["xxh64"] * 4


def test_manifest_of_totals_only_is_met(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(model, capsys, "--sha1", "--uuid", "--no-layer")
    assert len(lines(capsys, "-c", manifest, "--sha1", "--uuid", model)) == 1 + 2 + 2


def test_changed_byte_is_found_in_its_tensor(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(model, capsys, "--all")
    content = bytearray(model.read_bytes())
    content[GgufFile(model).tensors[1].offset] ^= 1
    model.write_bytes(content)
    found = lines(capsys, "-c", manifest, model, code=1)
    assert ["Not ok" in line for line in found[1:5]] == [False, True, False, True]
    assert found[-1].endswith("Failure")


@pytest.mark.parametrize(
    ("content", "fault"),
    [("", "no line is about m.gguf"), ("sha1 00 other.gguf:a\n", "no line is about"), ("hello\n", "line 1 is not")],
)
def test_manifest_of_something_else_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], content: str, fault: str
) -> None:
    manifest = model.with_suffix(".manifest")
    manifest.write_text(content)
    assert run_tool(gguf_hash.main, "-c", manifest, model) == 1
    assert fault in capsys.readouterr().err


def test_tensor_that_the_manifest_lacks_is_a_fault(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(model, capsys, "--sha1")
    manifest.write_text("".join(line for line in manifest.read_text().splitlines(True) if ":b:c" not in line))
    assert "Not in manifest" in lines(capsys, "-c", manifest, model, code=1)[2]
