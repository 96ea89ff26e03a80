"""`llama-gguf-split`: parts and the merged file hold the same bytes; sets that do not belong together are refused.

Oracles: the `gguf` package reads parts and merged files, llama.cpp (xllamacpp) computes with a split model.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama.gguf import GgufFile, GgufWriter, KeyValue, TensorSpec, with_key
from pyllama.tools import gguf as gguf_tools
from pyllama.tools import gguf_split
from support.file_tools import run_tool, write_model
from support.tiny_llama import write_tiny_llama

SPECS = [TensorSpec(f"t{index}", "f32", (index % 4 * 25,)) for index in range(10)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", SPECS, [KeyValue("x.tokens", "string[]", ["a", "b"])])


def split(model: Path, *options: object, prefix: str = "s") -> list[Path]:
    assert run_tool(gguf_split.main, *options, model, model.with_name(prefix)) == 0
    return sorted(model.parent.glob(f"{prefix}-0*.gguf"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message; nothing may have been written."""
    folder = Path(str(arguments[-1])).parent
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    capsys.readouterr()
    assert run_tool(gguf_split.main, *arguments) == 1
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    return capsys.readouterr().err


def tensor_names(parts: list[Path]) -> list[list[str]]:
    return [[tensor.name for tensor in GgufFile(part, single_file=True).tensors] for part in parts]


@pytest.mark.parametrize(
    "options",
    [[], ["--split-max-tensors", 1], ["--split-max-tensors", 3, "--no-tensor-first-split"], ["--split-max-size", "1M"]],
    ids=str,
)
def test_merging_gives_the_original_file_again(model: Path, options: list[object]) -> None:
    parts = split(model, *options)
    merged = model.with_name("merged.gguf")
    assert run_tool(gguf_split.main, "--merge", parts[0], merged) == 0
    assert merged.read_bytes() == model.read_bytes()
    assert all(part.exists() for part in parts)


@settings(max_examples=15, deadline=None)
@given(
    n_values=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    max_tensors=st.integers(1, 5),
    alignment=st.sampled_from([1, 32, 256]),
    empty_first=st.booleans(),
)
def test_any_model_comes_back(
    tmp_path_factory: pytest.TempPathFactory, n_values: list[int], max_tensors: int, alignment: int, empty_first: bool
) -> None:
    folder = tmp_path_factory.mktemp("split")
    specs = [TensorSpec(f"t{index}", "i8", (size,)) for index, size in enumerate(n_values)]
    model = write_model(folder / "m.gguf", specs, [KeyValue("general.alignment", "u32", alignment)])
    parts = split(model, "--split-max-tensors", max_tensors, *["--no-tensor-first-split"] * empty_first)
    groups = [[spec.name for spec in specs[at : at + max_tensors]] for at in range(0, len(specs), max_tensors)]
    assert tensor_names(parts) == [[]] * empty_first + groups
    original, joined = GgufFile(model), GgufFile(parts[0])
    for spec in specs:
        assert joined.tensor_bytes(spec.name) == original.tensor_bytes(spec.name)
    assert run_tool(gguf_split.main, "--merge", parts[0], folder / "merged.gguf") == 0
    assert (folder / "merged.gguf").read_bytes() == model.read_bytes()
    shutil.rmtree(folder)


def test_parts_carry_the_keys_of_the_format(model: Path) -> None:
    parts = split(model, "--split-max-tensors", 4)
    assert [part.name for part in parts] == [f"s-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for index, part in enumerate(parts):
        fields = gguf.GGUFReader(part).fields
        values = {name: (field.types[0].name, field.contents()) for name, field in fields.items() if "split." in name}
        identity = values.pop("split.set_id")
        assert identity[0] == "STRING"
        assert values == {
            "split.no": ("UINT16", index),
            "split.count": ("UINT16", 3),
            "split.tensors.count": ("INT32", 10),
        }
        assert ("general.architecture" in fields) == (index == 0)


def test_size_limit_counts_padded_bytes_and_refuses_a_tensor_beyond_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [600_000, 399_968, 1, 31, 999_969, 5]
    specs = [TensorSpec(f"t{index}", "i8", (size,)) for index, size in enumerate(sizes)]
    parts = split(write_model(tmp_path / "m.gguf", specs), "--split-max-size", "1M")
    # 600000 + 399968 + 32 padded bytes are exactly the limit; 999969 is padded to it.
    assert tensor_names(parts) == [["t0", "t1", "t2"], ["t3"], ["t4"], ["t5"]]
    model = write_model(tmp_path / "large.gguf", [TensorSpec("large", "i8", (1_000_001,))])
    assert "tensor 'large' of 1000032 bytes is larger" in refused(
        capsys, "--split-max-size", "1M", model, tmp_path / "x"
    )


def test_dry_run_prints_the_plan_and_writes_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(gguf_split.main, "--dry-run", "--split-max-tensors", 6, model, model.with_name("s")) == 0
    assert list(model.parent.iterdir()) == [model]
    plan = capsys.readouterr().out
    parts = split(model, "--split-max-tensors", 6)
    assert capsys.readouterr().out == plan
    assert plan == "".join(
        f"{part}: {n} tensors, {part.stat().st_size} bytes\n" for part, n in zip(parts, (6, 4), strict=True)
    )
    target = model.with_name("merged.gguf")
    assert run_tool(gguf_split.main, "--merge", "--dry-run", parts[0], target) == 0
    assert f"{target}: 10 tensors, {model.stat().st_size} bytes" in capsys.readouterr().out
    assert not target.exists()


def test_delete_splits_removes_the_parts_of_a_verified_file(model: Path) -> None:
    parts = split(model, "--split-max-tensors", 3)
    merged = model.with_name("merged.gguf")
    assert run_tool(gguf_tools.main, "merge", "--delete-splits", parts[0], merged) == 0
    assert merged.read_bytes() == model.read_bytes()
    assert not any(part.exists() for part in parts)


@pytest.mark.parametrize("spoil", ["tensor 't5'", "metadata"])
def test_parts_are_kept_when_the_merged_file_reads_back_wrong(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    parts = split(model, "--split-max-tensors", 3)
    merged = model.with_name("merged.gguf")
    commit = GgufWriter.commit

    def commit_and_spoil(writer: GgufWriter) -> None:
        commit(writer)
        content = bytearray(merged.read_bytes())
        content[GgufFile(merged).tensors[5].offset if spoil == "tensor 't5'" else content.index(b"llama")] ^= 1
        merged.write_bytes(content)

    monkeypatch.setattr(GgufWriter, "commit", commit_and_spoil)
    assert run_tool(gguf_split.main, "--merge", "--delete-splits", parts[0], merged) == 1
    assert f"{spoil} reads back changed; the parts are kept" in capsys.readouterr().err
    assert all(part.exists() for part in parts)


def test_split_model_is_split_anew(model: Path) -> None:
    parts = split(model, "--split-max-tensors", 3)
    again = model.with_name("again")
    assert run_tool(gguf_tools.main, "split", "--split-max-tensors", 5, parts[0], again) == 0
    merged = model.with_name("merged.gguf")
    assert run_tool(gguf_split.main, "--merge", f"{again}-00001-of-00002.gguf", merged) == 0
    assert merged.read_bytes() == model.read_bytes()


def test_existing_files_are_not_replaced(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = split(model, "--split-max-tensors", 5)
    assert "exists already" in refused(capsys, "--merge", parts[0], model)
    parts[0].unlink()
    assert "-00002-of-00002.gguf: exists" in refused(capsys, "--split-max-tensors", 5, model, model.with_name("s"))


def test_failing_write_leaves_no_part(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.preadv, []

    def read_until_the_disk_fails(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) > 5:
            raise OSError(5, "Input/output error")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("pyllama.gguf.reader.os.preadv", read_until_the_disk_fails)
    assert "Input/output error" in refused(capsys, "--split-max-tensors", 2, model, model.with_name("s"))
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--split-max-tensors", 0], "expected at least 1"),
        (["--split-max-size", "2K"], "expected a number with M or G"),
        (["--split-max-size", "0G"], "expected a number with M or G"),
        (["--split-max-size", "1G", "--split-max-tensors", 3], "not allowed with"),
        (["--split", "--merge"], "not allowed with"),
        (["--merge", "--split-max-tensors", 3], "--merge takes no"),
        (["--delete-splits"], "goes with --merge"),
        (["--merge"], "is not split"),
    ],
    ids=str,
)
def test_contradictory_options_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], options: list[object], fault: str
) -> None:
    assert fault in refused(capsys, *options, model, model.with_name("x"))


# Sets that do not belong together: the part at fault is named and nothing is written.


@pytest.fixture
def two_quants(tmp_path: Path) -> dict[str, list[Path]]:
    """The same model as q4_0 and as q8_0, three parts each."""
    parts = {}
    for name in ("q4_0", "q8_0"):
        folder = tmp_path / name
        folder.mkdir()
        write_tiny_llama(folder / "m.gguf", n_layer=4, weight_type=name)
        n_tensors = len(GgufFile(folder / "m.gguf").tensors)
        parts[name] = split(folder / "m.gguf", "--split-max-tensors", -(-n_tensors // 3))
        assert len(parts[name]) == 3
    return parts


def test_missing_part_is_named(two_quants: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]) -> None:
    parts = two_quants["q4_0"]
    parts[1].unlink()
    assert f"{parts[1]}: part 2 of 3 is missing" in refused(capsys, "--merge", parts[0], parts[0].with_name("out.gguf"))


def test_swapped_parts_are_named(two_quants: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]) -> None:
    parts = two_quants["q4_0"]
    aside = parts[1].rename(parts[1].with_name("aside"))
    parts[2].rename(parts[1])
    aside.rename(parts[2])
    message = refused(capsys, "--merge", parts[0], parts[0].with_name("out.gguf"))
    assert f"{parts[1]}: split.no is 2, expected 1" in message


def test_opening_another_part_than_the_first_is_refused(
    two_quants: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    part = two_quants["q4_0"][1]
    assert "is part 2 of 3" in refused(capsys, "--merge", part, part.with_name("out.gguf"))


def test_first_part_under_another_name_is_refused(
    two_quants: dict[str, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    part = two_quants["q4_0"][0].rename(two_quants["q4_0"][0].with_name("renamed.gguf"))
    message = refused(capsys, "--merge", part, part.with_name("out.gguf"))
    assert "must end in '-00001-of-00003.gguf'" in message


def without_identity(part: Path) -> None:
    """As other programs write parts: the same file without our key."""
    file = GgufFile(part, single_file=True)
    blobs = [file.tensor_bytes(tensor.name) for tensor in file.tensors]
    entries = [entry for entry in file.key_values if entry.key != "split.set_id"]
    specs = [TensorSpec.of(tensor) for tensor in file.tensors]
    with GgufWriter(part, entries, specs) as writer:
        for blob in blobs:
            writer.write(blob)


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("with_identity", [True, False], ids=["ours", "other program"])
def test_part_of_another_quantisation_is_named(
    two_quants: dict[str, list[Path]], capsys: pytest.CaptureFixture[str], index: int, with_identity: bool
) -> None:
    parts = two_quants["q4_0"]
    shutil.copy(two_quants["q8_0"][index], parts[index])
    if not with_identity:
        for part in parts:
            without_identity(part)
    message = refused(capsys, "--merge", parts[0], parts[0].with_name("out.gguf"))
    assert message.startswith(f"error: {parts[index]}: ")
    assert ("split.set_id is" if with_identity else "is q8_0 here, q4_0 in the other parts") in message


def test_mixtures_of_types_are_no_fault(tmp_path: Path) -> None:
    """Layers of one file may differ in some matrices, as the _M mixtures do."""
    types = {f"blk.{layer}.{name}": "q8_0" for layer in (2, 3) for name in ("ffn_down.weight", "attn_v.weight")}
    model = write_tiny_llama(tmp_path / "m.gguf", n_layer=4, weight_type="q4_0", tensor_types=types)
    parts = split(model, "--split-max-tensors", 13)
    for part in parts:
        without_identity(part)
    assert run_tool(gguf_split.main, "--merge", parts[0], tmp_path / "merged.gguf") == 0


def test_part_of_another_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = []
    for name, count in (("a", 9), ("b", 8)):
        folder = tmp_path / name
        folder.mkdir()
        sets.append(split(write_model(folder / "m.gguf", SPECS[:count]), "--split-max-tensors", 3))
    shutil.copy(sets[1][2], sets[0][2])
    message = refused(capsys, "--merge", sets[0][0], tmp_path / "a" / "out.gguf")
    assert f"{sets[0][2]}: split.tensors.count is 8, expected 9" in message


def test_tensor_in_two_parts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(2):
        keys = [KeyValue("split.no", "u16", index), KeyValue("split.count", "u16", 2)]
        keys.append(KeyValue("split.tensors.count", "i32", 2))
        write_model(tmp_path / f"s-0000{index + 1}-of-00002.gguf", [TensorSpec("same", "f32", (4,))], keys)
    message = refused(capsys, "--merge", tmp_path / "s-00001-of-00002.gguf", tmp_path / "out.gguf")
    assert "s-00002-of-00002.gguf: tensor 'same' is in s-00001-of-00002.gguf as well" in message


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize("damaged", [0, 1])
def test_split_keys_of_a_wrong_kind_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, damaged: int
) -> None:
    for index in range(2):
        values = {"split.no": index, "split.count": 2, "split.tensors.count": 2}
        keys = [KeyValue(name, "i32", value) for name, value in values.items()]
        if index == damaged:
            keys = with_key(keys, key, "i32[]", [1, 2])
        write_model(tmp_path / f"s-0000{index + 1}-of-00002.gguf", [TensorSpec(f"t{index}", "f32", (4,))], keys)
    message = refused(capsys, "--merge", tmp_path / "s-00001-of-00002.gguf", tmp_path / "out.gguf")
    assert key in message
    assert message.count("\n") == 1


def test_llama_cpp_computes_the_same_with_parts(tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs the llama.cpp wheel")
    model = write_tiny_llama(tmp_path / "m.gguf")
    parts = split(model, "--split-max-tensors", 7)
    texts = []
    for path in (model, parts[0]):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.port = 256, 1, False, 0
        params.cpuparams.n_threads = 1
        server = xllamacpp.Server(params)
        answer = server.handle_completions({"prompt": "the world", "max_tokens": 32, "temperature": 0})
        texts.append(answer["choices"][0]["text"])
        del server
    assert len(texts[0]) > 0
    assert texts[0] == texts[1]
