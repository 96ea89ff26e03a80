"""`gguf-dump` and the command line that all GGUF tools share. Oracle of the JSON: the program of the gguf package."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from security.malformed_gguf import ACCEPTED, REJECTED, Case
from unit import gguf_bytes as g

from pyllama.errors import GgufError
from pyllama.gguf import GgufFile, GgufWriter, KeyValue, TensorSpec
from pyllama.tools import gguf, gguf_dump, gguf_split
from pyllama.tools.command_line import printable, run_command
from support.file_tools import run_tool, write_model
from support.measured import run_measured


def dumped(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run_tool(gguf_dump.main, *arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("options", [["--json"], ["--json", "--json-array"], ["--json", "--no-tensors"]], ids=str)
def test_json_has_all_that_the_package_prints(
    tiny_llama_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    command = [sys.executable, "-m", "gguf.scripts.gguf_dump", *options, str(tiny_llama_path)]
    expected = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = json.loads(dumped(capsys, *options, tiny_llama_path))
    for name, tensor in found["tensors"].items():
        assert tensor.pop("data_offset") % 32 == 0, name
        assert tensor.pop("n_bytes") == 4 * np.prod(tensor["shape"]), name
    assert found == expected


def test_text_shows_keys_types_values_and_tensors(tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = GgufFile(tiny_llama_path)
    lines = dumped(capsys, tiny_llama_path).splitlines()
    assert lines[0].startswith(f"{tiny_llama_path}: GGUF version 3, little-endian, {len(file.metadata)} keys, ")
    assert any(line.endswith("general.architecture = 'llama'") and "STRING" in line for line in lines)
    assert any(line.endswith("llama.block_count = 2") and "UINT32" in line for line in lines)
    for tensor in file.tensors:
        (line,) = (line for line in lines if line.endswith(f"| {tensor.name}"))
        for part in (str(tensor.n_bytes), str(tensor.offset), ", ".join(f"{size:5}" for size in tensor.shape), "F32"):
            assert part in line
    assert not any("output_norm" in line for line in dumped(capsys, "--no-tensors", tiny_llama_path).splitlines())


def test_long_values_are_cut_and_odd_characters_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.gguf"
    keys = [
        g.string_value(b"vendor.\x1b[31mkey", b"a\nb\\c\xff \xe2\x80\xae \xc3\xbc"),
        g.string_value(b"vendor.long", b"x" * 500),
        g.array_value(b"vendor.numbers", g.U8, bytes(range(200)), 200),
        g.array_value(b"vendor.texts", g.STRING, g.string(b"\xfe|\x00"), 1),
        g.scalar(b"vendor.nan", g.F64, float("nan")),
    ]
    path.write_bytes(g.gguf_file(keys, [g.tensor_info(b"\x07\xff", [1])], bytes(4)))
    text = dumped(capsys, path)
    assert text.isascii() is False
    assert all(line.isprintable() for line in text.splitlines())
    assert r"vendor.\x1b[31mkey = 'a\nb\\c\xff \u202e ü'" in text
    assert f"vendor.long = '{'x' * 60}'... (500 characters)" in text
    assert "|      200 | vendor.numbers = [0, 1, 2, 3, 4, 5, ...]" in text
    assert r"| \x07\xff" in text

    found = json.loads(dumped(capsys, "--json-array", path))
    assert found["metadata"]["vendor.\x1b[31mkey"]["value"] == "a\nb\\c\\xff \u202e ü"
    assert found["metadata"]["vendor.numbers"]["value"] == list(range(200))
    assert found["metadata"]["vendor.nan"]["value"] == "nan"
    assert "value" not in json.loads(dumped(capsys, "--json", path))["metadata"]["vendor.numbers"]

    markdown = dumped(capsys, "--markdown", path)
    assert r"'\xfe\|\x00'" in markdown
    assert {line.replace(r"\|", "").count("|") for line in markdown.splitlines() if line.startswith("|")} == {6, 7}


def test_every_escape_is_printable_and_distinct() -> None:
    characters = [chr(code) for code in (*range(0x300), *range(0xDC80, 0xDD00), 0x202E, 0xFFFF, 0xE0001, 0x1F600)]
    shown = [printable(character) for character in characters]
    assert all(text.isprintable() for text in shown)
    assert len(set(shown)) == len(characters)


@pytest.mark.parametrize(("option", "expected"), [("--data-offset", "128"), ("--data-alignment", "64")])
def test_single_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, expected: str) -> None:
    key = KeyValue("general.alignment", "u32", 64)
    with GgufWriter(tmp_path / "a.gguf", [key], [TensorSpec("t", "i8", (1,))]) as writer:
        writer.write(b"x")
    assert dumped(capsys, option, tmp_path / "a.gguf") == f"{expected}\n"


def test_file_without_data_is_shown(tiny_llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = dumped(capsys, tiny_llama_path)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_llama_path.read_bytes()[: int(dumped(capsys, "--data-offset", tiny_llama_path)) + 100])
    assert dumped(capsys, cut).split(": ", 1)[1] == whole.split(": ", 1)[1]
    with pytest.raises(GgufError):
        GgufFile(cut)


def test_any_part_of_a_split_model_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "m.gguf", [TensorSpec(f"t{index}", "f32", (4,)) for index in range(3)])
    gguf_split.main(["--split-max-tensors", "1", str(model), str(tmp_path / "s")])
    capsys.readouterr()
    (tmp_path / "s-00003-of-00003.gguf").unlink()
    for number in (1, 2):
        text = dumped(capsys, tmp_path / f"s-0000{number}-of-00003.gguf")
        assert f"1 tensors, alignment 32, data at {text.split('data at ')[1].split(',')[0]}, part {number} of 3" in text
        assert text.endswith(f"| t{number - 1}\n")


@pytest.mark.parametrize("case", [*ACCEPTED, *REJECTED], ids=lambda case: case.id)
def test_hostile_files_end_in_output_or_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Case
) -> None:
    """All tools that read: no other exception than those that become an `error:` line may come out of them."""
    path = tmp_path / "case.gguf"
    path.write_bytes(case.content)
    commands = [["dump"], ["dump", "--markdown"], ["dump", "--json-array"], ["check"], ["hash"]]
    for command in commands:
        code = run_tool(gguf.main, *command, path)
        captured = capsys.readouterr()
        assert captured.err.count("\n") == (code if command != ["check"] else 0), command
        if command[0] == "dump":
            assert (code == 0) == (case.fault is None or case.rule == "G28")
        if command == ["dump", "--json-array"] and code == 0:
            json.loads(captured.out)


# Size: the header is all that may be read.


def write_sparse(path: Path, n_tokens: int, total_bytes: int) -> None:
    count = 1000
    rows = total_bytes // count // 4096 // 4
    infos = [
        g.tensor_info(f"blk.{index}.weight".encode(), [4096, rows], offset=index * rows * 4096 * 4)
        for index in range(count)
    ]
    texts = b"".join(g.string(f"token {index}".encode()) for index in range(n_tokens))
    keys = [
        g.array_value(b"tokenizer.ggml.tokens", g.STRING, texts, n_tokens),
        g.array_value(b"tokenizer.ggml.scores", g.F32, bytes(4 * n_tokens), n_tokens),
    ]
    path.write_bytes(g.gguf_file(keys, infos))
    os.truncate(path, total_bytes + path.stat().st_size)


@pytest.mark.parametrize("option", ["--no-tensors", "--json"])
def test_fifty_gigabytes_and_a_large_vocabulary_are_shown_at_once(tmp_path: Path, option: str) -> None:
    """CPU seconds, not wall time: the machine may be busy. The file takes no space on the disk."""
    path = tmp_path / "huge.gguf"
    write_sparse(path, n_tokens=250_000, total_bytes=50 * 10**9)
    assert path.stat().st_size > 50 * 10**9
    done = run_measured("pyllama.tools.gguf_dump", option, path, folder=tmp_path)
    path.unlink()
    assert done.status == 0
    assert b"tokenizer.ggml.tokens" in done.output
    assert done.cpu_seconds < 1.0
    assert done.peak_bytes < 200 << 20


# The command line.


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "no command given"),
        (["dunp"], "'dunp' is no command"),
        (["dump"], "required: model"),
        (["dump", "--jso", "x"], "unrecognized arguments: --jso"),
        (["dump", "no/such.gguf"], "no/such.gguf"),
        (["split", "--split-max-tensors", "many", "a", "b"], "invalid int value"),
        (["hash", "a", "b"], "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    assert run_tool(gguf.main, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert fault in captured.err


@pytest.mark.parametrize("command", gguf.COMMANDS)
def test_help_of_every_command(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run_tool(gguf.main, command, "--help") == 0
    assert "usage: " in capsys.readouterr().out
    assert run_tool(gguf.main, "--help") == 0
    assert command in capsys.readouterr().out


def test_installed_programs_exist() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    programs = dict(re.findall(r'^(\S+) = "(pyllama\.tools\.gguf\S*)"$', text, re.MULTILINE))
    assert set(programs) == {
        "llama-gguf", "llama-gguf-hash", "llama-gguf-split", "gguf-dump", "gguf-new-metadata", "gguf-set-metadata",
    }  # fmt: skip
    for target in programs.values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_interrupt_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: object) -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_command(main, [])
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_reader_that_has_gone_is_no_message(tiny_llama_path: Path, tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m pyllama.tools.gguf dump --json-array '{tiny_llama_path}' | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert result.stderr == ""
