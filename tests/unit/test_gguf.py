"""The GGUF reader through Python: values, shapes, offsets and data that were read, splits, faults.

Compared with files built byte by byte, and with the `gguf` package as writer. The same malformed files go through the
reader under sanitizers in tests/security/test_gguf_hostile.py; typed look-ups: tests/security/test_metadata_lookup.py.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from security.malformed_gguf import ACCEPTED, REJECTED, SPLITS, Case, SplitCase
from unit import gguf_bytes as g

from pyllama._engine import GgufFile, dequantize
from pyllama.errors import GgufError, InvalidArgument, PyllamaError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", REJECTED, ids=lambda case: case.id)
def test_malformed_file_is_refused_with_the_fault_named(tmp_path: Path, case: Case) -> None:
    path = write(tmp_path / "bad.gguf", case.content)
    with pytest.raises(GgufError) as caught:
        GgufFile(path, metadata_only=case.metadata_only)
    assert case.fault is not None
    assert case.fault in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_odd_but_valid_file_is_accepted(tmp_path: Path, case: Case) -> None:
    file = GgufFile(write(tmp_path / "odd.gguf", case.content), metadata_only=case.metadata_only)
    if not case.metadata_only:
        for tensor in file.tensors:
            assert len(file.tensor_bytes(tensor.name)) == tensor.n_bytes
    file.close()


@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.id)
def test_split_model_opens_or_its_fault_is_named(tmp_path: Path, case: SplitCase) -> None:
    for name, content in case.files.items():
        write(tmp_path / name, content)
    if case.fault is None:
        GgufFile(tmp_path / case.opened).close()
        return
    with pytest.raises(GgufError) as caught:
        GgufFile(tmp_path / case.opened)
    assert case.fault in str(caught.value)


def test_tensors_of_a_split_model_come_from_their_own_part(tmp_path: Path) -> None:
    (case,) = (case for case in SPLITS if case.name == "three parts")
    for name, content in case.files.items():
        write(tmp_path / name, content)
    file = GgufFile(tmp_path / case.opened)
    assert [(tensor.name, tensor.shard) for tensor in file.tensors] == [("a", 1), ("b", 1), ("c", 2)]
    parts = sorted(case.files)
    for tensor in file.tensors:
        stored = case.files[parts[tensor.shard]][tensor.offset : tensor.offset + tensor.n_bytes]
        assert file.tensor_bytes(tensor.name) == stored
    assert file.metadata["general.architecture"] == "llama"
    file.close()


def test_metadata_keeps_order_types_and_values(tmp_path: Path) -> None:
    keys = [
        g.scalar(b"u8", g.U8, 255),
        g.scalar(b"i8", g.I8, -128),
        g.scalar(b"u16", g.U16, 65535),
        g.scalar(b"i16", g.I16, -32768),
        g.scalar(b"u32", g.U32, 2**32 - 1),
        g.scalar(b"i32", g.I32, -(2**31)),
        g.scalar(b"f32", g.F32, 0.1),
        g.scalar(b"true", g.BOOL, 1),
        g.scalar(b"also true", g.BOOL, 255),
        g.scalar(b"false", g.BOOL, 0),
        g.string_value(b"text", "Grüße \N{SNOWMAN}\0 end".encode()),
        g.string_value(b"empty", b""),
        g.scalar(b"u64", g.U64, 2**64 - 1),
        g.scalar(b"i64", g.I64, -(2**63)),
        g.scalar(b"f64", g.F64, 0.1),
        g.array_value(b"strings", g.STRING, g.string(b"a") + g.string(b"") + g.string(b"\xff\xfe"), 3),
        g.array_value(b"bools", g.BOOL, b"\x00\x01\x07", 3),
        g.array_value(b"i16s", g.I16, g.pack(g.I16, -1, 2), 2),
        g.array_value(b"u64s", g.U64, g.pack(g.U64, 2**64 - 1), 1),
        g.array_value(b"f32s", g.F32, g.pack(g.F32, 0.5, -1.5), 2),
        g.array_value(b"none", g.F64, b"", 0),
    ]
    file = GgufFile(write(tmp_path / "keys.gguf", g.gguf_file(keys)))
    found = {key: list(value) if not np.isscalar(value) else value for key, value in file.metadata.items()}
    file.close()
    expected = {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": float(np.float32(0.1)),
        "true": True,
        "also true": True,
        "false": False,
        "text": "Grüße \N{SNOWMAN}\0 end",
        "empty": "",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "strings": ["a", "", b"\xff\xfe".decode("utf-8", "surrogateescape")],
        "bools": [False, True, True],
        "i16s": [-1, 2],
        "u64s": [2**64 - 1],
        "f32s": [0.5, -1.5],
        "none": [],
    }
    assert found == expected
    assert list(found) == list(expected)
    assert [key for key, value in found.items() if isinstance(value, bool)] == ["true", "also true", "false"]


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_tensors_lie_where_the_alignment_puts_them(tmp_path: Path, alignment: int) -> None:
    keys = [g.scalar(b"general.alignment", g.U32, alignment)]
    first, second = bytes(range(5)), bytes(range(100, 108))
    offset = len(g.pad(first, alignment))
    tensors = [g.tensor_info(b"a", [5], g.TYPE_I8), g.tensor_info(b"b", [2, 4], g.TYPE_I8, offset=offset)]
    content = g.gguf_file(keys, tensors, g.pad(first, alignment) + second, alignment=alignment)
    file = GgufFile(write(tmp_path / "aligned.gguf", content))
    assert file.alignment == alignment
    for tensor, data, shape in zip(file.tensors, (first, second), ((5,), (2, 4)), strict=True):
        assert (tensor.shape, tensor.type_name, tensor.n_bytes, tensor.offset % alignment) == (
            shape,
            "i8",
            len(data),
            0,
        )
        assert content[tensor.offset : tensor.offset + tensor.n_bytes] == data
        assert file.tensor_bytes(tensor.name) == data
    file.close()


@pytest.mark.parametrize("version", [2, 3])
def test_version_is_reported(tmp_path: Path, version: int) -> None:
    file = GgufFile(write(tmp_path / "v.gguf", g.gguf_file(version=version)))
    assert (file.version, file.alignment, file.metadata, file.tensors) == (version, 32, {}, [])
    file.close()


def test_file_of_the_gguf_package_is_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, (4, 256)).astype(np.float32)
    stored = {
        "blk.0.f32": (values, gguf.GGMLQuantizationType.F32),
        "blk.0.f16": (values.astype(np.float16), gguf.GGMLQuantizationType.F16),
    }
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"):
        quant_type = gguf.GGMLQuantizationType[name]
        stored[f"blk.0.{name.lower()}"] = (gguf.quants.quantize(values, quant_type), quant_type)
    path = tmp_path / "package.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "b", "ü"])
    for name, (data, quant_type) in stored.items():
        writer.add_tensor(name, data, raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile(path)
    assert file.metadata["tokens"] == ["a", "b", "ü"]
    assert [tensor.name for tensor in file.tensors] == list(stored)
    for tensor in file.tensors:
        data, quant_type = stored[tensor.name]
        assert (tensor.type_name, tensor.shape) == (quant_type.name.lower(), (256, 4))
        assert file.tensor_bytes(tensor.name) == data.tobytes()
    file.close()


def test_unknown_tensor_name_is_refused(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "none.gguf", g.gguf_file()))
    with pytest.raises(PyllamaError, match="absent"):
        file.tensor_bytes("absent")
    file.close()


@pytest.mark.parametrize("path", ["", "no/such/file.gguf", "/dev/null", "/"])
def test_path_that_is_no_regular_file_is_refused(path: str) -> None:
    with pytest.raises(GgufError):
        GgufFile(path)


def test_metadata_only_gives_no_data_beyond_the_file(tmp_path: Path) -> None:
    content = g.gguf_file((), [g.tensor_info(b"weight", [8])])
    file = GgufFile(write(tmp_path / "header.gguf", content), metadata_only=True)
    assert [(tensor.name, tensor.n_bytes) for tensor in file.tensors] == [("weight", 32)]
    with pytest.raises(GgufError, match=r"'weight': data of 32 bytes at offset 64 lies outside the file of 64 bytes"):
        file.tensor_bytes("weight")
    file.close()


def test_names_in_messages_are_escaped_and_cut(tmp_path: Path) -> None:
    key = b"\x1b[31m'\xff" + b"x" * 500
    content = g.gguf_file([g.scalar(key, g.U8, 1), g.scalar(key, g.U8, 1)])
    with pytest.raises(GgufError) as caught:
        GgufFile(write(tmp_path / "k.gguf", content))
    text = str(caught.value)
    assert r"'\x1b[31m\'\xffxxx" in text
    assert "(507 bytes)" in text
    assert text.isprintable()
    assert len(text) < len(str(tmp_path)) + 250


def test_claimed_sizes_do_not_grow_the_process(tmp_path: Path) -> None:
    """Files below 200 bytes that claim gigabytes; the limit is on the growth of the peak, in a process of its own."""
    paths = [
        str(write(tmp_path / f"{number}.gguf", case.content))
        for number, case in enumerate(case for case in REJECTED if case.rule in ("A1", "A4", "A6", "A7", "G05", "G08"))
    ]
    program = """if True:
        import re, sys
        from pyllama._engine import GgufFile
        from pyllama.errors import GgufError
        # Not ru_maxrss: that keeps the size of the process that started this one.
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
        before = peak()
        for path in sys.argv[1:]:
            try:
                GgufFile(path)
            except GgufError:
                continue
            raise SystemExit(f"{path} was accepted")
        print(peak() - before)
    """
    # In a directory without a source tree, so that the package under test is imported as it is here.
    command = [sys.executable, "-c", program, *paths]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 50 * 1024


def test_one_file_may_be_read_by_many_threads(tmp_path: Path) -> None:
    blocks = [bytes([number]) * 4096 for number in range(16)]
    infos = [g.tensor_info(f"t{number}".encode(), [4096], g.TYPE_I8, offset=4096 * number) for number in range(16)]
    file = GgufFile(write(tmp_path / "many.gguf", g.gguf_file((), infos, b"".join(blocks))))
    wrong: list[str] = []

    def read_all() -> None:
        for _ in range(50):
            for number, block in enumerate(blocks):
                if file.tensor_bytes(f"t{number}") != block:
                    wrong.append(f"t{number}")

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    file.close()


# Tensor of SmolLM2: sha256 of its bytes (start), first values, sum and sum of squares of all values in f64.
SMOLLM2_TENSORS = {
    "token_embd.weight": ("0d728edd2a012d16", (-0.10654449, 0.03297806, 0.0481987), -15353.044494, 520415.715448),
    "blk.0.attn_q.weight": ("a8a1da23623a6021", (-0.09631348, 0.15734863, -0.09631348), 59.223221, 26749.573275),
    "blk.29.ffn_down.weight": ("390f8753cf01dc75", (-0.27331543, 0.18627930, 0.18627930), 49.835709, 29667.074892),
    "output_norm.weight": ("3b87f8e27335e67f", (1.7578125, 1.8203125, 1.78125), 1038.332031, 1921.735550),
}


def test_real_model_has_its_known_metadata_and_tensors(smollm2_path: Path) -> None:
    file = GgufFile(smollm2_path)
    assert (file.version, file.alignment, len(file.metadata), len(file.tensors)) == (3, 32, 33, 272)
    assert file.metadata["llama.block_count"] == 30
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == float(np.float32(1e-5))
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.metadata["tokenizer.ggml.tokens"][49151] == "ectable"
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    tensors = {tensor.name: tensor for tensor in file.tensors}
    assert tensors["token_embd.weight"].offset == 1_785_664
    assert (tensors["token_embd.weight"].type_name, tensors["token_embd.weight"].shape) == ("q8_0", (576, 49152))
    for name, (digest, first_values, total, squares) in SMOLLM2_TENSORS.items():
        data = file.tensor_bytes(name)
        assert hashlib.sha256(data).hexdigest().startswith(digest), name
        values = dequantize(tensors[name].type_name, data, int(np.prod(tensors[name].shape))).astype(np.float64)
        assert values[:3] == pytest.approx(first_values, abs=1e-7), name
        assert values.sum() == pytest.approx(total, abs=2e-6), name
        assert np.square(values).sum() == pytest.approx(squares, abs=2e-6), name
    file.close()


def test_header_of_a_real_model_is_enough_for_its_metadata(smollm2_path: Path, tmp_path: Path) -> None:
    with smollm2_path.open("rb") as model:
        header = write(tmp_path / "header.gguf", model.read(1_785_664))
    with pytest.raises(GgufError, match=r"'token_embd\.weight': data of 30081024 bytes at offset 1785664 lies outside"):
        GgufFile(header)
    file = GgufFile(header, metadata_only=True)
    assert len(file.tensors) == 272
    file.close()


def test_value_errors_of_the_reader_are_catchable_as_one_family() -> None:
    assert issubclass(GgufError, PyllamaError)
    assert issubclass(InvalidArgument, PyllamaError)
