"""The command line of llama-quantize: positions, options, messages, exit codes, lines on both outputs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pyllama.errors import GgufError
from pyllama.gguf import GgufFile, KeyValue
from pyllama.quantize.file_types import FILE_TYPES
from pyllama.quantize.imatrix import Importance, ImportanceMatrix, write_imatrix
from pyllama.tools.quantize import main
from pyllama.tools.quantize_arguments import UsageError, parse_arguments, usage
from support.file_tools import run_tool
from support.quantize_shapes import ModelShape, write_model

SHAPE = ModelShape(n_layer=2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in.gguf", SHAPE)


@pytest.mark.parametrize(
    ("arguments", "target", "file_type", "n_threads"),
    [
        (["d/in.gguf", "Q4_0"], "d/ggml-model-Q4_0.gguf", "Q4_0", 0),
        (["in.gguf", "q4_k_m"], "ggml-model-Q4_K_M.gguf", "Q4_K_M", 0),
        (["in.gguf", "15"], "ggml-model-Q4_K.gguf", "Q4_K", 0),
        (["in.gguf", "Q8_0", "3"], "ggml-model-Q8_0.gguf", "Q8_0", 3),
        (["in.gguf", "out.gguf", "7"], "out.gguf", "Q8_0", 0),
        (["in.gguf", "out", "copy", "-2"], "out", "COPY", -2),
    ],
)
def test_positions(arguments: list[str], target: str, file_type: str, n_threads: int) -> None:
    found = parse_arguments(arguments)
    assert (str(found.source), str(found.target)) == (arguments[0], target)
    assert (found.file_type.name, found.n_threads) == (file_type, n_threads)


def test_options_come_first_and_take_the_next_argument(tmp_path: Path) -> None:
    (tmp_path / "types").write_text("attn_q=q5_0\n  ffn_.*=Q8_0\t")
    found = parse_arguments(
        ["--pure", "--leave-output-tensor", "--allow-requantize", "--strict", "--keep-split", "--dry-run", "-v",
         "--output-tensor-type", "Q6_K", "--token-embedding-type", "q5_k", "--tensor-type", "a=b=q4_0",
         "--tensor-type-file", str(tmp_path / "types"), "--prune-layers", "3,1", "--max-buffer-size", "16",
         "--override-kv", "a=int:-7", "--override-kv", "b=float:1.5", "--override-kv", "c=bool:true",
         "--override-kv", "d=str:x=y:z", "in.gguf", "Q4_0"]
    )  # fmt: skip
    options = found.options
    assert found.dry_run
    assert found.verbose
    assert found.max_buffer_bytes == 16 << 20
    assert options.types.pure
    assert options.types.leave_output
    assert (options.types.output_type, options.types.embedding_type) == ("q6_K", "q5_K")
    assert options.types.tensor_types == [("a=b", "q4_0"), ("attn_q", "q5_0"), ("ffn_.*", "q8_0")]
    assert options.allow_requantize
    assert options.strict
    assert options.keep_split
    assert options.pruned_layers == {1, 3}
    assert options.overrides == [
        KeyValue("a", "u32", 7), KeyValue("b", "f32", 1.5), KeyValue("c", "bool", True),
        KeyValue("d", "string", "x=y:z"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "INPUT and TYPE"),
        (["in.gguf"], "INPUT and TYPE"),
        (["in.gguf", "out.gguf"], "TYPE is missing"),
        (["in.gguf", "out.gguf", "BAD"], "invalid type 'BAD'"),
        (["in.gguf", "Q4_0", "x"], "number of threads 'x'"),
        (["in.gguf", "Q4_0", "1", "2"], "too many"),
        (["--zork", "in.gguf", "Q4_0"], "--zork"),
        (["--pure=1", "in.gguf", "Q4_0"], "--pure=1"),
        (["--imatrix"], "--imatrix needs a value"),
        (["--include-weights", "a", "--exclude-weights", "b", "in.gguf", "Q4_0"], "cannot be used together"),
        (["--output-tensor-type", "bla", "in.gguf", "Q4_0"], "'bla'"),
        (["--token-embedding-type", "i32", "in.gguf", "Q4_0"], "'i32'"),
        (["--tensor-type", "foo", "in.gguf", "Q4_0"], "PATTERN=TYPE"),
        (["--tensor-type", "foo=zz", "in.gguf", "Q4_0"], "'zz'"),
        (["--prune-layers", "1,x", "in.gguf", "Q4_0"], "1,x"),
        (["--override-kv", "a=b", "in.gguf", "Q4_0"], "a=b"),
        (["--override-kv", "a=bool:1", "in.gguf", "Q4_0"], "true or false"),
        (["--max-buffer-size", "0", "in.gguf", "Q4_0"], "--max-buffer-size '0'"),
    ],
)
def test_what_is_not_understood_shows_the_usage_and_ends_with_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_arguments(arguments)
    assert run_tool(main, *arguments) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: llama-quantize")
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_help_lists_every_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(main, "--help") == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    for file_type in FILE_TYPES:
        assert re.search(rf"\b{file_type.name}\b .*: {re.escape(file_type.note)}", printed.out)
    assert max(map(len, usage().splitlines())) <= 120


def test_lines_of_a_run(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(main, model, "Q4_0") == 0
    printed = capsys.readouterr()
    assert re.fullmatch(r"\nquantize time = +\d+\.\d\d ms\n   total time = +\d+\.\d\d ms\n", printed.out)
    lines = printed.err.splitlines()
    target = model.with_name("ggml-model-Q4_0.gguf")
    assert lines[0] == f"quantizing '{model}' to '{target}' as Q4_0"
    assert lines[2] == (
        "[   2/  19] output_norm.weight                   - [   256,      1,      1,      1], type =    f32, "
        "size =    0.001 MiB"
    )
    assert lines[4] == (
        "[   4/  19] blk.0.attn_k.weight                  - [   256,      2,      1,      1], type =    f16, "
        "converting to q4_0 .. size =     0.00 MiB ->     0.00 MiB"
    )
    file = GgufFile(model)
    n_bytes = sum(info.n_bytes for info in file.tensors)
    n_values = sum(int(np.prod(info.shape)) for info in file.tensors)
    assert lines[-2] == f"model size  = {n_bytes / 2**20:8.2f} MiB ({8 * n_bytes / n_values:.2f} BPW)"
    assert lines[-1].startswith("quant size  = ")
    assert {info.name for info in GgufFile(target).tensors} == {info.name for info in file.tensors}


def test_a_dry_run_writes_nothing_and_tells_what_is_missing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(main, "--dry-run", model, "IQ2_XXS") == 0
    printed = capsys.readouterr()
    assert list(model.parent.iterdir()) == [model]
    lines = printed.err.splitlines()
    assert lines[0] == f"calculating quantization size for '{model}' as IQ2_XXS"
    assert lines[4].endswith("type =    f16, size =     0.00 MiB ->     0.00 MiB (iq2_xxs)")
    assert "requires an imatrix" in printed.err


def test_fallbacks_are_warned_about_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "in.gguf", ModelShape(n_layer=2, n_ff=224))
    assert run_tool(main, "--pure", "--tensor-type", "ffn_down=q4_K", model, "Q8_0") == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum("rows of 224 values are not whole q4_K blocks, falling back to q5_0" in line for line in lines) == 2
    assert "warning: 2 of 19 tensor(s) required fallback quantization" in lines
    assert "     q4_K -> q5_0    2 tensor(s)" in lines
    assert re.fullmatch(r"  \d+\.\d % of the weights take 5\.50 bits each instead of 4\.50", lines[-1])
    assert run_tool(main, "--strict", "--tensor-type", "ffn_down=q4_K", model, tmp_path / "x.gguf", "Q8_0") == 1
    assert "--strict allows no fallback" in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{dir}/none.gguf", "Q4_0"], "none.gguf"),
        (["{dir}/in.gguf", "{dir}/in.gguf", "Q4_0"], "input and output files are the same"),
        (["{dir}/in.gguf", "{dir}/no/out.gguf", "Q4_0"], "No such file or directory"),
        (["--imatrix", "{dir}/none", "{dir}/in.gguf", "Q4_0"], "none"),
        (["--imatrix", "{dir}/in.gguf", "{dir}/in.gguf", "Q4_0"], "not an imatrix file"),
        (["--tensor-type-file", "{dir}/none", "{dir}/in.gguf", "Q4_0"], "none"),
        (["--prune-layers", "2", "{dir}/in.gguf", "Q4_0"], "no layer 2"),
        (["{dir}/in.gguf", "{dir}/out.gguf", "Q2_K_S"], "requires an imatrix"),
    ],
)
def test_failures_are_one_line_and_code_1(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tool(main, *(argument.format(dir=model.parent) for argument in arguments)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize(
    ("option", "kept"),
    [([], 2), (["--include-weights", "attn_v"], 1), (["--exclude-weights", "attn_v", "--exclude-weights", "ffn"], 0)],
)
def test_filters_of_the_importance(model: Path, option: list[str], kept: int) -> None:
    entry = Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32))
    path = model.with_name("imatrix.gguf")
    names = ("blk.0.attn_v.weight", "blk.1.ffn_up.weight")
    write_imatrix(path, ImportanceMatrix(dict.fromkeys(names, entry), ["d"], 1, 512))
    assert run_tool(main, "--imatrix", path, *option, model, "Q4_0") == 0
    metadata = GgufFile(model.with_name("ggml-model-Q4_0.gguf")).metadata
    assert metadata["quantize.imatrix.entries_count"] == kept
    assert metadata["quantize.imatrix.file"] == str(path)


def test_keeping_the_split_of_a_single_file_numbers_it(model: Path) -> None:
    assert run_tool(main, "--keep-split", model, "Q4_0") == 0
    assert run_tool(main, "--keep-split", model, model.with_name("out.gguf"), "Q4_0") == 0
    names = {path.name for path in model.parent.iterdir()}
    assert names == {"in.gguf", "ggml-model-Q4_0-00001-of-00001.gguf", "out-00001-of-00001.gguf"}
    assert not any(key.startswith("split.") for key in GgufFile(model.with_name("out-00001-of-00001.gguf")).metadata)


def test_a_damaged_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(GgufError, match=r"in\.gguf"):
        main([str(tmp_path / "in.gguf"), "Q4_0"])
    assert capsys.readouterr().out == ""
