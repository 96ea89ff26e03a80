"""The pass over a file: bytes of its tensors, metadata, splits, refusals, memory, and what an interruption leaves.

Bytes are compared with `convert_rows` on whole tensors, whose own bytes the encoder tests check, and on a real model
with the C library (tests/models/test_quantize_smollm2.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import convert_rows
from pyllama.errors import GgufError, InvalidArgument
from pyllama.gguf import GgufFile, GgufWriter, KeyValue, TensorSpec, shard_path
from pyllama.quantize import pipeline
from pyllama.quantize.imatrix import Importance, ImportanceMatrix
from pyllama.quantize.mixture import TypeOptions
from pyllama.quantize.pipeline import Progress, quantize_file
from pyllama.quantize.plan import QuantizeOptions

ARCHITECTURE = KeyValue("general.architecture", "string", "llama")
N_LAYER = 3
KEYS = [
    ARCHITECTURE,
    KeyValue("llama.block_count", "u32", N_LAYER),
    KeyValue("llama.attention.head_count", "u32", 4),
    KeyValue("general.file_type", "u32", 1),
    KeyValue("general.name", "string", "tiny"),
]
DTYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "f64": np.float64}
Arrays = dict[str, NDArray[np.generic]]


def arrays(columns: int = 64, seed: int = 1) -> Arrays:
    """Weights of a small model, C order [.., rows, columns], in no useful order."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float16]:
        return rng.standard_normal(shape).astype(np.float16)

    found: Arrays = {"token_embd.weight": normal(40, columns), "output_norm.weight": normal(columns).astype(np.float32)}
    for layer in reversed(range(N_LAYER)):
        found[f"blk.{layer}.attn_q.weight"] = normal(48, columns)
        found[f"blk.{layer}.attn_norm.weight"] = normal(columns).astype(np.float32)
    found["output.weight"] = normal(40, columns)
    found["blk.0.ffn_up_exps.weight"] = normal(4, 24, columns)
    found["blk.0.routes"] = rng.integers(0, 9, (4, 8), np.int32)
    return found


def write(path: Path, tensors: Arrays, keys: Sequence[KeyValue] = KEYS) -> Path:
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    specs = [TensorSpec(name, names[array.dtype], array.shape[::-1]) for name, array in tensors.items()]
    with GgufWriter(path, keys, specs) as writer:
        for array in tensors.values():
            writer.write(array)
    return path


def write_split(prefix: Path, parts: Sequence[Arrays], keys: Sequence[KeyValue] = KEYS) -> Path:
    total = sum(map(len, parts))
    for index, part in enumerate(parts):
        split = [
            KeyValue("split.no", "u16", index),
            KeyValue("split.count", "u16", len(parts)),
            KeyValue("split.tensors.count", "i32", total),
        ]
        write(shard_path(prefix, index, len(parts)), part, [*(keys if index == 0 else []), *split])
    return shard_path(prefix, 0, len(parts))


def encoded(array: NDArray[np.generic], type_name: str, importance: NDArray[np.float32] | None = None) -> bytes:
    name = {np.dtype(dtype): name for name, dtype in DTYPES.items()}[array.dtype]
    if name == type_name:
        return array.tobytes()
    matrices = array.reshape(-1, *array.shape[-2:])
    weights = [None] * len(matrices) if importance is None else list(importance)
    return b"".join(
        convert_rows(name, matrix.tobytes(), type_name, array.shape[-1], importance=row_weights).tobytes()
        for matrix, row_weights in zip(matrices, weights, strict=True)
    )


def types_of(path: Path) -> dict[str, str]:
    return {info.name: info.type_name for info in GgufFile(path).tensors}


def assert_holds(path: Path, source: Arrays) -> None:
    """Every tensor has the bytes that its type gives the source's values."""
    file = GgufFile(path)
    assert {info.name for info in file.tensors} == source.keys()
    for info in file.tensors:
        assert file.tensor_bytes(info.name) == encoded(source[info.name], info.type_name), info.name


@pytest.mark.parametrize("slab_bytes", [1, 1000, 1 << 20])
def test_bytes_do_not_depend_on_slabs_or_threads(tmp_path: Path, slab_bytes: int) -> None:
    source = arrays()
    path = write(tmp_path / "in.gguf", source)
    for n_threads in (1, 3):
        target = tmp_path / f"out-{n_threads}.gguf"
        quantize_file(path, target, "Q5_0", n_threads=n_threads, max_slab_bytes=slab_bytes)
        assert_holds(target, source)
    assert (tmp_path / "out-1.gguf").read_bytes() == (tmp_path / "out-3.gguf").read_bytes()
    types = types_of(tmp_path / "out-1.gguf")
    assert types["blk.0.routes"] == "i32"
    assert types["blk.0.attn_norm.weight"] == "f32"
    assert types["blk.0.ffn_up_exps.weight"] == types["blk.1.attn_q.weight"] == "q5_0"


def test_tensors_are_ordered_by_block_and_keys_renewed(tmp_path: Path) -> None:
    tensors: Arrays = {f"blk.{layer}.attn_q.weight": np.ones((2, 32), np.float16) for layer in (10, 2, 1)}
    tensors |= {"output_norm.weight": np.ones(32, np.float32), "blk.2.attn_k.weight": np.ones((2, 32), np.float16)}
    keys = [*KEYS[:1], KeyValue("llama.block_count", "u32", 11), KeyValue("split.count", "u16", 0), *KEYS[2:]]
    path = write(tmp_path / "in.gguf", tensors, keys)
    options = QuantizeOptions(overrides=[KeyValue("general.name", "string", "new"), KeyValue("a.b", "u32", 5)])
    quantize_file(path, tmp_path / "out.gguf", "Q8_0", options=options)
    file = GgufFile(tmp_path / "out.gguf")
    assert [info.name for info in file.tensors] == [
        "output_norm.weight",
        "blk.1.attn_q.weight",
        "blk.2.attn_k.weight",
        "blk.2.attn_q.weight",
        "blk.10.attn_q.weight",
    ]
    assert [(entry.key, entry.type, entry.value) for entry in file.key_values] == [
        ("general.architecture", "string", "llama"),
        ("llama.block_count", "u32", 11),
        ("llama.attention.head_count", "u32", 4),
        ("general.quantization_version", "u32", 2),
        ("general.file_type", "u32", 7),
        ("general.name", "string", "new"),
        ("a.b", "u32", 5),
    ]


def test_copy_keeps_types_and_file_type(tmp_path: Path) -> None:
    source = arrays()
    quantize_file(write(tmp_path / "in.gguf", source), tmp_path / "out.gguf", "COPY")
    assert_holds(tmp_path / "out.gguf", source)
    assert set(types_of(tmp_path / "out.gguf").values()) == {"f16", "f32", "i32"}
    assert GgufFile(tmp_path / "out.gguf").metadata["general.file_type"] == 1


def test_alignment_of_the_source_is_kept(tmp_path: Path) -> None:
    source = arrays()
    path = write(tmp_path / "in.gguf", source, [*KEYS, KeyValue("general.alignment", "u32", 256)])
    quantize_file(path, tmp_path / "out.gguf", "Q4_0")
    file = GgufFile(tmp_path / "out.gguf")
    assert file.alignment == 256
    assert all(info.offset % 256 == 0 for info in file.tensors)
    assert_holds(tmp_path / "out.gguf", source)


def test_pruned_layers_are_left_out_and_the_rest_numbered_anew(tmp_path: Path) -> None:
    source = arrays()
    options = QuantizeOptions(pruned_layers=frozenset({0}))
    quantize_file(write(tmp_path / "in.gguf", source), tmp_path / "out.gguf", "Q8_0", options=options)
    file = GgufFile(tmp_path / "out.gguf")
    assert file.metadata["llama.block_count"] == N_LAYER - 1
    assert file.tensor_bytes("blk.0.attn_q.weight") == encoded(source["blk.1.attn_q.weight"], "q8_0")
    assert file.tensor_bytes("blk.1.attn_q.weight") == encoded(source["blk.2.attn_q.weight"], "q8_0")
    assert "blk.2.attn_q.weight" not in types_of(tmp_path / "out.gguf")
    with pytest.raises(InvalidArgument, match="no layer 3"):
        quantize_file(
            tmp_path / "in.gguf", tmp_path / "x.gguf", "Q8_0", options=QuantizeOptions(pruned_layers=frozenset({0, 3}))
        )


def importance(source: Arrays, *names: str) -> ImportanceMatrix:
    rng = np.random.default_rng(2)
    entries = {}
    for name in names or [name for name in source if name.endswith("weight") and source[name].ndim > 1]:
        n_mat = len(source[name]) if source[name].ndim == 3 else 1
        sums = rng.random((n_mat, source[name].shape[-1]), np.float32) + np.float32(0.01)
        entries[name] = Importance(sums, np.full(n_mat, 2, np.float32))
    return ImportanceMatrix(entries, ["data.txt"], chunk_count=3)


@pytest.mark.parametrize("slab_bytes", [400, 1 << 20])
def test_each_expert_has_its_own_importance(tmp_path: Path, slab_bytes: int) -> None:
    source, name = arrays(), "blk.0.ffn_up_exps.weight"
    matrix = importance(source)
    options = QuantizeOptions(imatrix=matrix, imatrix_path="some/im.gguf")
    path = write(tmp_path / "in.gguf", source)
    quantize_file(path, tmp_path / "out.gguf", "Q4_1", options=options, max_slab_bytes=slab_bytes)
    file = GgufFile(tmp_path / "out.gguf")
    weights = matrix.weights(name, 64, 4)
    assert file.tensor_bytes(name) == encoded(source[name], "q4_1", weights)
    assert file.tensor_bytes(name) != encoded(source[name], "q4_1")
    found = {key: value for key, value in file.metadata.items() if key.startswith("quantize.")}
    assert found == {
        "quantize.imatrix.file": "some/im.gguf",
        "quantize.imatrix.dataset": "data.txt",
        "quantize.imatrix.entries_count": len(matrix.entries),
        "quantize.imatrix.chunks_count": 3,
    }


@pytest.mark.parametrize(("file_type", "equal_to"), [("Q4_1", None), ("IQ2_XXS", 1.0)])
def test_importance_that_is_all_zero_counts_as_none(tmp_path: Path, file_type: str, equal_to: float | None) -> None:
    """A type that cannot do without weighs all columns alike."""
    source, name = arrays(columns=256), "blk.1.attn_q.weight"
    matrix = importance(source)
    matrix.entries[name].in_sum2[:] = 0
    path = write(tmp_path / "in.gguf", source)
    quantize_file(path, tmp_path / "out.gguf", file_type, options=QuantizeOptions(imatrix=matrix))
    weights = None if equal_to is None else np.full((1, 256), equal_to, np.float32)
    assert types_of(tmp_path / "out.gguf")[name] == file_type.lower()
    assert GgufFile(tmp_path / "out.gguf").tensor_bytes(name) == encoded(source[name], file_type.lower(), weights)


def test_an_entry_of_another_size_stops_the_run_but_for_the_embeddings(tmp_path: Path) -> None:
    source = arrays()
    path = write(tmp_path / "in.gguf", source)
    odd = Importance(np.ones((1, 32), np.float32), np.ones(1, np.float32))
    bad = ImportanceMatrix({"blk.0.attn_q.weight": odd})
    with pytest.raises(InvalidArgument, match=r"blk\.0\.attn_q\.weight.*32 values.*64"):
        quantize_file(path, tmp_path / "out.gguf", "Q4_0", options=QuantizeOptions(imatrix=bad))
    assert list(tmp_path.iterdir()) == [path]
    ignored = ImportanceMatrix({"token_embd.weight": odd})
    quantize_file(path, tmp_path / "out.gguf", "Q4_0", options=QuantizeOptions(imatrix=ignored))


def test_a_type_that_needs_importance_is_refused_without(tmp_path: Path) -> None:
    source = arrays(columns=256)
    path = write(tmp_path / "in.gguf", source)
    with pytest.raises(InvalidArgument, match=r"attn_q\.weight.*requires an imatrix"):
        quantize_file(path, tmp_path / "out.gguf", "IQ2_XXS")
    partly = QuantizeOptions(imatrix=importance(source, "blk.0.attn_q.weight"))
    with pytest.raises(InvalidArgument, match=r"ffn_up_exps\.weight.*requires an imatrix.*no entry"):
        quantize_file(path, tmp_path / "out.gguf", "IQ2_XXS", options=partly)
    assert list(tmp_path.iterdir()) == [path]
    plan = quantize_file(path, tmp_path / "out.gguf", "IQ2_XXS", dry_run=True)
    assert plan.unmet
    assert list(tmp_path.iterdir()) == [path]


def test_quantised_tensors_are_converted_only_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "in.gguf", arrays())
    quantize_file(path, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(InvalidArgument, match="requantizing from type q8_0 is disabled"):
        quantize_file(tmp_path / "q8.gguf", tmp_path / "q4.gguf", "Q4_0")
    assert not (tmp_path / "q4.gguf").exists()
    quantize_file(tmp_path / "q8.gguf", tmp_path / "q4.gguf", "Q4_0", options=QuantizeOptions(allow_requantize=True))
    assert types_of(tmp_path / "q4.gguf")["blk.0.attn_q.weight"] == "q4_0"
    quantize_file(tmp_path / "q8.gguf", tmp_path / "same.gguf", "Q8_0")  # nothing to convert
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "q8.gguf").read_bytes()


@pytest.mark.parametrize("columns", [14, 100, 4304])
def test_odd_widths_fall_back_are_counted_and_strictness_refuses(tmp_path: Path, columns: int) -> None:
    tensors: Arrays = {
        "mm.0.weight": np.ones((3, columns), np.float16),
        "blk.0.attn_q.weight": np.ones((9, 256), np.float16),
    }
    path = write(tmp_path / "in.gguf", tensors)
    forced = TypeOptions(tensor_types=[("mm", "q4_K")])
    plan = quantize_file(path, tmp_path / "out.gguf", "Q8_0", options=QuantizeOptions(types=forced))
    assert types_of(tmp_path / "out.gguf") == {"mm.0.weight": "f16", "blk.0.attn_q.weight": "q8_0"}
    assert plan.fallbacks == [("q4_K", "f16", 1)]
    assert plan.fallback_bits() == (3 * columns / plan.n_values, 4.5, 16)
    with pytest.raises(InvalidArgument, match=rf"mm\.0\.weight.*{columns}.*q4_K"):
        quantize_file(path, tmp_path / "x.gguf", "Q8_0", options=QuantizeOptions(types=forced, strict=True))
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "output_norm.weight"])
def test_values_that_are_not_finite_stop_the_run(tmp_path: Path, name: str, bad: float) -> None:
    source = arrays()
    source[name].reshape(-1)[[5, 17]] = bad
    path = write(tmp_path / "in.gguf", source)
    with pytest.raises(GgufError, match=rf"{name}.* 2 .*not finite"):
        quantize_file(path, tmp_path / "out.gguf", "Q4_0")
    assert list(tmp_path.iterdir()) == [path]


def test_overflow_of_halves_names_the_tensor_and_the_count(tmp_path: Path) -> None:
    source = arrays()
    source["blk.1.attn_q.weight"] = source["blk.1.attn_q.weight"].astype(np.float32)
    source["blk.1.attn_q.weight"][3, :5] = 65520
    path = write(tmp_path / "in.gguf", source)
    with pytest.raises(GgufError, match=r"blk\.1\.attn_q\.weight.* 5 values.*f16"):
        quantize_file(path, tmp_path / "out.gguf", "F16")
    assert list(tmp_path.iterdir()) == [path]
    source["blk.1.attn_q.weight"][3, :5] = 65519.9
    quantize_file(write(path, source), tmp_path / "out.gguf", "F16")


def test_an_input_is_never_overwritten(tmp_path: Path) -> None:
    source = arrays()
    path = write(tmp_path / "in.gguf", source)
    before = path.read_bytes()
    (tmp_path / "link.gguf").symlink_to(path)
    for target in (path, tmp_path / "link.gguf", tmp_path / "." / "in.gguf"):
        with pytest.raises(InvalidArgument, match="input and output files are the same"):
            quantize_file(path, target, "Q4_0")
    assert path.read_bytes() == before


def halves(source: Arrays) -> list[Arrays]:
    names = list(source)
    return [{name: source[name] for name in part} for part in (names[:5], names[5:9], names[9:])]


def test_a_split_input_becomes_one_file(tmp_path: Path) -> None:
    source = arrays()
    first = write_split(tmp_path / "in", halves(source))
    quantize_file(first, tmp_path / "out.gguf", "Q4_0")
    quantize_file(write(tmp_path / "whole.gguf", source), tmp_path / "expected.gguf", "Q4_0")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()


def test_a_split_input_can_keep_its_parts(tmp_path: Path) -> None:
    source = arrays()
    parts = halves(source)
    keys = [*KEYS, KeyValue("general.alignment", "u32", 64)]
    first = write_split(tmp_path / "in", parts, keys)
    # Alignment is a matter of each part.
    for index, part in enumerate(parts[1:], 1):
        path = shard_path(tmp_path / "in", index, 3)
        write(path, part, [keys[-1], *(entry for entry in GgufFile(path, single_file=True).key_values)])
    plan = quantize_file(first, tmp_path / "out.gguf", "Q4_0", options=QuantizeOptions(keep_split=True))
    assert [file.path.name for file in plan.files] == [f"out-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    assert_holds(plan.files[0].path, source)
    for file, part in zip(plan.files, parts, strict=True):
        alone = GgufFile(file.path, single_file=True)
        assert [info.name for info in alone.tensors] == list(part)
        assert alone.alignment == 64
    with pytest.raises(InvalidArgument, match="input and output files are the same"):
        quantize_file(first, tmp_path / "in.gguf", "Q4_0", options=QuantizeOptions(keep_split=True))


def test_no_part_appears_when_a_later_one_fails(tmp_path: Path) -> None:
    source = arrays()
    parts = halves(source)
    list(parts[2].values())[-2].reshape(-1)[0] = np.nan
    first = write_split(tmp_path / "in", parts)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(GgufError, match="not finite"):
        quantize_file(first, tmp_path / "out.gguf", "Q4_0", options=QuantizeOptions(keep_split=True))
    assert sorted(tmp_path.iterdir()) == before


def test_progress_covers_every_tensor_from_nothing_to_all(tmp_path: Path) -> None:
    seen: list[Progress] = []
    path = write(tmp_path / "in.gguf", arrays())
    plan = quantize_file(path, tmp_path / "out.gguf", "Q8_0", progress=seen.append, max_slab_bytes=1500)
    for index, tensor in enumerate(plan.tensors):
        done = [report.done_bytes for report in seen if report.tensor_index == index]
        assert done[0] == 0
        assert done == sorted(set(done))
        assert done[-1] == tensor.source.n_bytes


def test_an_error_while_writing_removes_the_unfinished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "in.gguf", arrays())

    class FullDisk(GgufWriter):
        def write(self, data: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipeline, "GgufWriter", FullDisk)
    with pytest.raises(OSError, match="No space left"):
        quantize_file(path, tmp_path / "out.gguf", "Q8_0")
    assert list(tmp_path.iterdir()) == [path]


def large_model(path: Path, n_bytes: int) -> Path:
    """One F32 matrix, written as a hole: all zeros."""
    spec = TensorSpec("blk.0.attn_q.weight", "f32", (4096, n_bytes // 4 // 4096))
    with GgufWriter(path, [], []) as writer:
        writer.write(b"")
    block = np.zeros(1 << 20, np.uint8)
    with GgufWriter(path, KEYS, [spec]) as writer:
        for _ in range(n_bytes // block.size):
            writer.write(block)
    return path


RUN_AND_MEASURE = """
import resource, sys
from pyllama.tools.quantize import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    n_bytes = 192 << 20
    path = large_model(tmp_path / "in.gguf", n_bytes)
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_MEASURE, str(path), str(tmp_path / "out.gguf"), "Q8_0", "2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown = int(done.stdout.split()[-1]) * 1024
    assert grown < n_bytes / 4, f"{grown >> 20} MiB for a tensor of {n_bytes >> 20} MiB"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_target(tmp_path: Path, number: signal.Signals) -> None:
    path = large_model(tmp_path / "in.gguf", 128 << 20)
    target = tmp_path / "out.gguf"
    target.write_bytes(b"older")
    process = subprocess.Popen(
        [sys.executable, "-m", "pyllama.tools.quantize", str(path), str(target), "Q4_0", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any(one.stat().st_size > 1 << 20 for one in tmp_path.glob(".out.gguf.*")):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "nothing is written"
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert target.read_bytes() == b"older"
    if number != signal.SIGKILL:
        assert sorted(one.name for one in tmp_path.iterdir()) == ["in.gguf", "out.gguf"]
        assert "Traceback" not in errors
