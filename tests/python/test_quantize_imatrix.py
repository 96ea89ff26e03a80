"""Importance matrices: both file forms read back what was written, damaged files are refused by name."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pyllama.errors import GgufError, InvalidArgument
from pyllama.gguf import GgufFile, GgufWriter, KeyValue, TensorSpec
from pyllama.quantize.imatrix import Importance, ImportanceMatrix, read_imatrix, write_imatrix


def matrix(seed: int = 1) -> ImportanceMatrix:
    rng = np.random.default_rng(seed)

    def entry(n_mat: int, columns: int) -> Importance:
        counts = rng.integers(1, 500, n_mat).astype(np.float32)
        return Importance(rng.random((n_mat, columns), np.float32) * 9, counts)

    entries = {"blk.1.ffn_up_exps.weight": entry(4, 32), "blk.0.attn_q.weight": entry(1, 64)}
    return ImportanceMatrix(entries, ["a.txt", "b.txt"], chunk_count=7, chunk_size=512)


def legacy_bytes(entries: dict[str, tuple[int, list[float]]], tail: bytes = b"") -> bytes:
    parts = [struct.pack("<i", len(entries))]
    for name, (n_calls, values) in entries.items():
        parts.append(struct.pack(f"<i{len(name)}sii", len(name), name.encode(), n_calls, len(values)))
        parts.append(np.asarray(values, "<f4").tobytes())
    return b"".join(parts) + tail


def test_gguf_form_reads_back(tmp_path: Path) -> None:
    path, written = tmp_path / "imatrix.gguf", matrix()
    write_imatrix(path, written)
    found = read_imatrix(path)
    assert (found.datasets, found.chunk_count, found.chunk_size) == (["a.txt", "b.txt"], 7, 512)
    assert found.entries.keys() == written.entries.keys()
    for name, entry in written.entries.items():
        assert np.array_equal(found.entries[name].in_sum2, entry.in_sum2)
        assert np.array_equal(found.entries[name].counts, entry.counts)


def test_gguf_form_has_the_layout_that_other_programs_read(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "imatrix.gguf", matrix())
    file = GgufFile(tmp_path / "imatrix.gguf")
    assert file.metadata["general.type"] == "imatrix"
    assert [(info.name, info.type_name, info.shape) for info in file.tensors] == [
        ("blk.0.attn_q.weight.in_sum2", "f32", (64, 1)),
        ("blk.0.attn_q.weight.counts", "f32", (1, 1)),
        ("blk.1.ffn_up_exps.weight.in_sum2", "f32", (32, 4)),
        ("blk.1.ffn_up_exps.weight.counts", "f32", (1, 4)),
    ]


def test_weights_are_means_and_ones_for_an_expert_never_used() -> None:
    entry = Importance(np.asarray([[2, 4], [6, 8]], np.float32), np.asarray([4, 0], np.float32))
    found = ImportanceMatrix({"a.weight": entry}).weights("a.weight", 2, 2)
    assert found is not None
    assert found.tolist() == [[0.5, 1], [1, 1]]
    assert ImportanceMatrix({"a.weight": entry}).weights("b.weight", 2, 2) is None


def test_an_entry_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"blk\.0\.attn_q\.weight.*64.*32"):
        matrix().weights("blk.0.attn_q.weight", 32, 1)


def test_filters_take_parts_of_names() -> None:
    assert list(matrix().filtered(include=["ffn", "none"]).entries) == ["blk.1.ffn_up_exps.weight"]
    assert list(matrix().filtered(exclude=["ffn"]).entries) == ["blk.0.attn_q.weight"]
    assert len(matrix().filtered().entries) == 2


def test_legacy_form_gives_means(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    tail = struct.pack("<ii5s", 9, 5, b"w.txt")
    path.write_bytes(legacy_bytes({"a.weight": (4, [2.0, 8.0]), "b.weight": (0, [3.0, 5.0, 7.0, 9.0])}, tail))
    found = read_imatrix(path)
    assert (found.datasets, found.chunk_count) == (["w.txt"], 9)
    for name, columns, n_mat, expected in (("a.weight", 2, 1, [[0.5, 2]]), ("b.weight", 2, 2, [[3, 5], [7, 9]])):
        weights = found.weights(name, columns, n_mat)
        assert weights is not None
        assert weights.tolist() == expected


def test_legacy_form_without_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(legacy_bytes({"a.weight": (4, [2.0, 8.0])}))
    assert (read_imatrix(path).datasets, read_imatrix(path).chunk_count) == ([], 0)


def test_every_truncation_of_a_legacy_file_is_refused(tmp_path: Path) -> None:
    path, tail = tmp_path / "imatrix.dat", struct.pack("<ii5s", 9, 5, b"w.txt")
    data = legacy_bytes({"a.weight": (4, [2.0, 8.0]), "b.weight": (1, [1.0])}, tail)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size == len(data) - len(tail):  # a whole file of the older kind
            assert read_imatrix(path).datasets == []
        else:
            with pytest.raises(GgufError, match="not an imatrix file"):
                read_imatrix(path)


@pytest.mark.parametrize("data", [struct.pack("<i", -3), struct.pack("<ii", 1, -1), struct.pack("<ii", 1, 2**31 - 1)])
def test_absurd_lengths_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.dat").write_bytes(data + bytes(64))
    with pytest.raises(GgufError, match="not an imatrix file"):
        read_imatrix(tmp_path / "x.dat")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_values_that_cannot_be_weights_are_refused(tmp_path: Path, bad: float) -> None:
    written = matrix()
    written.entries["blk.0.attn_q.weight"].in_sum2[0, 3] = bad
    write_imatrix(tmp_path / "imatrix.gguf", written)
    with pytest.raises(GgufError, match=r"blk\.0\.attn_q\.weight.*not finite or are negative"):
        read_imatrix(tmp_path / "imatrix.gguf")


KEYS = [
    KeyValue("imatrix.datasets", "string[]", ["a"]),
    KeyValue("imatrix.chunk_count", "u32", 1),
    KeyValue("imatrix.chunk_size", "u32", 1),
]


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        (KEYS[1:], [("a.in_sum2", "f32", 4), ("a.counts", "f32", 1)], "imatrix.datasets"),
        (KEYS, [("a.in_sum2", "f32", 4)], "'a.counts' is missing"),
        (KEYS, [("a.counts", "f32", 1)], "'a.in_sum2' is missing"),
        (KEYS, [("a.in_sum2", "f16", 4), ("a.counts", "f32", 1)], "'a.in_sum2' is f16"),
        (KEYS, [("a.in_sum2", "f32", 4), ("a.counts", "f32", 3)], "4 values for 3 matrices"),
        (KEYS, [("other", "f32", 4)], "no importance data"),
    ],
)
def test_gguf_files_that_are_no_imatrix_are_refused(
    tmp_path: Path, keys: list[KeyValue], tensors: list[tuple[str, str, int]], message: str
) -> None:
    specs = [TensorSpec(name, type_name, (size,)) for name, type_name, size in tensors]
    with GgufWriter(tmp_path / "x.gguf", keys, specs) as writer:
        for spec in specs:
            writer.write(bytes(spec.n_bytes))
    with pytest.raises(GgufError, match=message):
        read_imatrix(tmp_path / "x.gguf")
