"""Hand-made GGUF files, one or more per rule of the container: those a reader must refuse, and odd ones it must accept.

`RULES` says what each rule is about. Rules about models rather than containers (required keys, lengths of
tokenizer arrays, tensors that must not be empty) are tested where models are loaded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from unit import gguf_bytes as g

MAX_I64 = 2**63 - 1

RULES = {
    "layout": "shapes of a file that must be accepted",
    "split": "names, numbers and counts of the parts of a split model",
    "G01": "a file shorter than its header, or cut inside a record",
    "G02": "other magic bytes",
    "G03": "versions other than 2 and 3",
    "G04": "a file in the other byte order",
    "G05": "a negative or absurd number of keys or tensors",
    "G06": "more keys or tensors than the smallest records would allow",
    "G07": "a string longer than 2^30 bytes or than the rest of the file",
    "G08": "an array longer than 2^30 elements or than the rest of the file",
    "G09": "an unknown value or element type, an array of arrays",
    "G10": "an empty or duplicate key",
    "G11": "a key with a NUL byte (refused), invalid UTF-8 or great length (accepted)",
    "G12": "an alignment that is no u32, zero or no power of two",
    "G13": "unusual alignments up to 2^30",
    "G14": "a tensor name of 64 bytes or more",
    "G15": "an empty tensor name",
    "G16": "a duplicate tensor name, also across the parts of a split model",
    "G17": "more than 4 dimensions",
    "G18": "no dimensions: a scalar",
    "G19": "a negative dimension",
    "G20": "a dimension of 0: an empty tensor",
    "G21": "an element count above 2^63 - 1",
    "G22": "an unknown tensor type",
    "G23": "a tensor type that was removed from the format",
    "G24": "rows that are not whole blocks",
    "G25": "a byte size that overflows, alone, padded or summed up",
    "G26": "a data offset that is not where the previous tensor ends",
    "G27": "a file that ends before its data section",
    "G28": "tensor data outside the file",
    "G29": "a last tensor without padding, bytes after it",
    "G30": "a key of the wrong kind (here: those of split models)",
    "A1": "a product of dimensions that wraps to a small number",
    "A2": "a division by a zero dimension",
    "A3": "a key of length zero",
    "A4": "a gigabyte claimed by a tiny file",
    "A6": "sizes whose sum wraps to a small number",
    "A7": "an unbounded number of dimensions",
    "A8": "more dimensions than a fixed array holds",
}
"""What each rule is about. A rules: faults that other readers had."""

F32_DATA = struct.pack("<8f", *range(8))
ONE_TENSOR = g.tensor_info(b"weight", [8])


@dataclass(frozen=True, slots=True)
class Case:
    """A file and what the reader must say: `fault` is part of the message, None means accepted."""

    rule: str
    name: str
    content: bytes = field(repr=False)
    fault: str | None
    metadata_only: bool = False

    @property
    def id(self) -> str:
        return f"{self.rule}-{self.name.replace(' ', '-')}"


@dataclass(frozen=True, slots=True)
class SplitCase:
    """Files of a split model by name; `opened` is handed to the reader."""

    rule: str
    name: str
    files: dict[str, bytes] = field(repr=False)
    opened: str
    fault: str | None

    @property
    def id(self) -> str:
        return f"{self.rule}-{self.name.replace(' ', '-')}"


def one_tensor(
    dims: list[int], type_id: int = g.TYPE_F32, data: bytes = F32_DATA, *, n_dims: int | None = None
) -> bytes:
    return g.gguf_file((), [g.tensor_info(b"weight", dims, type_id, n_dims=n_dims)], data)


def two_tensors(first: bytes, second: bytes, data: bytes = F32_DATA + F32_DATA) -> bytes:
    return g.gguf_file((), [first, second], data)


def aligned_file(alignment: int) -> bytes:
    """Two one-byte tensors in a file with that alignment."""
    keys = [g.scalar(b"general.alignment", g.U32, alignment)]
    tensors = [g.tensor_info(b"a", [1], g.TYPE_I8), g.tensor_info(b"b", [1], g.TYPE_I8, offset=max(alignment, 1))]
    return g.gguf_file(keys, tensors, g.pad(b"\x01", alignment) + b"\x02", alignment=alignment)


def small_valid_file() -> bytes:
    """All value types, arrays, two quantised tensors and a float one; the last is not padded, so no prefix is valid."""
    keys = [
        g.string_value(b"general.architecture", b"llama"),
        g.scalar(b"general.alignment", g.U32, 32),
        *(
            g.scalar(f"number.{value_type}".encode(), value_type, 1)
            for value_type in (g.U8, g.I8, g.U16, g.I16, g.I32, g.F32)
        ),
        *(g.scalar(f"number.{value_type}".encode(), value_type, 1) for value_type in (g.BOOL, g.U64, g.I64, g.F64)),
        g.array_value(b"tokens", g.STRING, g.string(b"a") + g.string(b"") + g.string(b"\xff\xfe"), 3),
        g.array_value(b"scores", g.F32, g.pack(g.F32, 0.5, -1.5, 2.5), 3),
        g.string_value(b"empty", b""),
    ]
    tensors = [
        g.tensor_info(b"blk.0.ffn_up.weight", [32, 2], g.TYPE_Q4_0),
        g.tensor_info(b"blk.0.ffn_down.weight", [32, 1, 1, 1], g.TYPE_Q8_0, offset=64),
        g.tensor_info(b"output_norm.weight", [8], offset=128),
    ]
    return g.gguf_file(keys, tensors, g.pad(b"\x00\x3c" * 18) + g.pad(b"\x00\x34" * 17) + F32_DATA)


_long_name = b"n" * 64
_valid = g.gguf_file((), [ONE_TENSOR], F32_DATA)
_big_endian = b"GGUF" + struct.pack(">Iqq", 3, 0, 0)
_k_row = bytes(144)

REJECTED: tuple[Case, ...] = (
    Case("G01", "empty file", b"", "0 bytes is too short"),
    Case("G01", "magic only", b"GGUF", "4 bytes is too short"),
    Case("G01", "header of 23 bytes", g.gguf_file()[:23], "23 bytes is too short"),
    Case("G01", "truncated key", g.gguf_file([g.string_value(b"key", b"value")])[:-3], "file ends inside the value"),
    Case(
        "G01",
        "truncated tensor info",
        g.gguf_file((), [ONE_TENSOR], padded=False)[:-1],
        "file ends inside the data offset",
    ),
    Case("G02", "other magic", g.gguf_file(magic=b"GGML"), "'GGML', expected 'GGUF'"),
    Case("G02", "unprintable magic", g.gguf_file(magic=b"\x00\xffGU"), "'??GU', expected 'GGUF'"),
    Case("G03", "version 0", g.gguf_file(version=0), "version 0 is unknown"),
    Case("G03", "version 1", g.gguf_file(version=1), "version 1 is no longer supported"),
    Case("G03", "version 4", g.gguf_file(version=4), "version 4 is unknown"),
    Case("G04", "other byte order", _big_endian, "other byte order"),
    Case("G05", "negative tensor count", g.gguf_file(n_tensors=-1), "number of tensors is negative: -1"),
    Case(
        "G05",
        "negative key count",
        g.gguf_file(n_keys=-(2**63)),
        "number of metadata keys is negative: -9223372036854775808",
    ),
    Case("G05", "huge tensor count", g.gguf_file(n_tensors=MAX_I64), f"claims {MAX_I64} tensors"),
    Case("G05", "huge key count", g.gguf_file(n_keys=2**60), f"claims {2**60} metadata keys"),
    Case(
        "G06",
        "one key too many",
        g.gguf_file([g.scalar(b"k", g.U8, 1)], n_keys=2),
        "claims 2 metadata keys, but 14 bytes",
    ),
    Case(
        "G06",
        "one tensor too many",
        g.gguf_file((), [g.tensor_info(b"", [])], n_tensors=2, padded=False),
        "claims 2 tensors",
    ),
    Case(
        "G07", "key longer than the file", g.gguf_file([g.key_value(b"key", g.U8, b"\1", key_length=99)]), "99 bytes at"
    ),
    Case(
        "G07",
        "key length of all ones",
        g.gguf_file([g.key_value(b"key", g.U8, b"\1", key_length=2**64 - 1)]),
        "the limit is",
    ),
    Case(
        "G07",
        "string over the limit",
        g.gguf_file([g.string_value(b"key", b"v", length=2**30 + 1)]),
        "the limit is 1073741824",
    ),
    Case(
        "G07",
        "array string too long",
        g.gguf_file([g.array_value(b"key", g.STRING, g.string(b"v", length=9), 1)]),
        "9 bytes at",
    ),
    Case(
        "G07",
        "tensor name too long",
        g.gguf_file((), [g.tensor_info(b"w", [8], name_length=2**20)]),
        "1048576 bytes at",
    ),
    Case(
        "G08",
        "array over the limit",
        g.gguf_file([g.array_value(b"key", g.U8, b"", 2**30 + 1)]),
        "the limit is 1073741824",
    ),
    Case(
        "G08",
        "array one short",
        g.gguf_file([g.array_value(b"key", g.U32, bytes(15), 4)]),
        "file ends inside the array: 16",
    ),
    Case(
        "G08",
        "array bytes wrap",
        g.gguf_file([g.array_value(b"key", g.F64, bytes(8), 2**61 + 1)]),
        "the limit is 1073741824",
    ),
    Case(
        "G08",
        "too many strings",
        g.gguf_file([g.array_value(b"key", g.STRING, bytes(15), 2)]),
        "array of 2 strings, but only 15",
    ),
    Case("G09", "value type 13", g.gguf_file([g.key_value(b"key", 13, bytes(8))]), "value type 13 is unknown"),
    Case("G09", "value type -1", g.gguf_file([g.key_value(b"key", -1, bytes(8))]), "value type -1 is unknown"),
    Case(
        "G09",
        "element type 13",
        g.gguf_file([g.array_value(b"key", 13, bytes(8), 1)]),
        "array element type 13 is unknown",
    ),
    Case("G09", "nested array", g.gguf_file([g.array_value(b"key", g.ARRAY, bytes(12), 1)]), "arrays of arrays"),
    Case("G10", "empty key", g.gguf_file([g.scalar(b"", g.U32, 1)]), "key name is empty"),
    Case("G10", "duplicate key", g.gguf_file([g.scalar(b"twin", g.U32, 1)] * 2), "duplicate metadata key 'twin'"),
    Case(
        "G11",
        "key with NUL",
        g.gguf_file([g.scalar(b"general\0x", g.U32, 1)]),
        r"'general\x00x': key name contains a NUL",
    ),
    Case("G12", "alignment as u64", g.gguf_file([g.scalar(b"general.alignment", g.U64, 32)]), "type u64, expected u32"),
    Case("G12", "alignment as i32", g.gguf_file([g.scalar(b"general.alignment", g.I32, 32)]), "type i32, expected u32"),
    Case(
        "G12",
        "alignment as array",
        g.gguf_file([g.array_value(b"general.alignment", g.U32, bytes(4), 1)]),
        "type array, expected",
    ),
    Case(
        "G12",
        "alignment 0",
        g.gguf_file([g.scalar(b"general.alignment", g.U32, 0)]),
        "alignment is 0, expected a power of two",
    ),
    Case(
        "G12",
        "alignment 48",
        g.gguf_file([g.scalar(b"general.alignment", g.U32, 48)]),
        "alignment is 48, expected a power",
    ),
    Case(
        "G13",
        "alignment 2^31",
        g.gguf_file([g.scalar(b"general.alignment", g.U32, 2**31)]),
        "alignment is 2147483648, expected",
    ),
    Case(
        "G14",
        "name of 64 bytes",
        g.gguf_file((), [g.tensor_info(_long_name, [8])], F32_DATA),
        "name of 64 bytes is too long",
    ),
    Case(
        "G16",
        "duplicate tensor",
        two_tensors(ONE_TENSOR, g.tensor_info(b"weight", [8], offset=32)),
        "duplicate tensor name 'weight'",
    ),
    Case("G17", "5 dimensions", one_tensor([1, 1, 1, 1, 1]), "has 5 dimensions, the limit is 4"),
    Case("G19", "negative dimension", one_tensor([8, -1]), "shape [8, -1] has a negative dimension"),
    Case("G21", "32 bit overflow", one_tensor([2**32, 2**32]), "[4294967296, 4294967296] has more elements"),
    Case("G21", "overflow hidden by a zero", one_tensor([MAX_I64, 2, 0]), "has more elements"),
    Case("G22", "type -1", one_tensor([8], -1), "'weight': type id -1 is unknown"),
    Case("G22", "type 43", one_tensor([8], 43), "'weight': type id 43 is unknown"),
    *(
        Case("G23", f"type {removed}", one_tensor([32], removed), f"type id {removed} was removed")
        for removed in (4, 5)
    ),
    *(Case("G23", f"type {repacked}", one_tensor([32], repacked), "use Q4_0 instead") for repacked in (31, 32, 33)),
    *(Case("G23", f"type {repacked}", one_tensor([32], repacked), "use IQ4_NL instead") for repacked in (36, 37, 38)),
    Case(
        "G24",
        "part of a block",
        one_tensor([33], g.TYPE_Q4_0, bytes(36)),
        "rows of 33 values, expected a multiple of the 32",
    ),
    Case(
        "G24",
        "rows of half a block",
        one_tensor([128, 2], g.TYPE_Q4_K, _k_row),
        "rows of 128 values, expected a multiple of the 256",
    ),
    Case("G24", "quantised scalar", one_tensor([], g.TYPE_Q8_0, bytes(34)), "rows of 1 values"),
    Case("G25", "bytes overflow", one_tensor([2**62], g.TYPE_F64), "more bytes than can be addressed"),
    Case("G25", "padding overflows", one_tensor([2**61 - 1], g.TYPE_I64), "overflows a 64-bit file offset"),
    Case("G26", "gap", two_tensors(ONE_TENSOR, g.tensor_info(b"b", [8], offset=64)), "offset is 64, expected 32"),
    Case("G26", "overlap", two_tensors(ONE_TENSOR, g.tensor_info(b"b", [8], offset=0)), "offset is 0, expected 32"),
    Case(
        "G26",
        "unsorted",
        two_tensors(g.tensor_info(b"b", [8], offset=32), ONE_TENSOR),
        "'b': data offset is 32, expected 0",
    ),
    Case(
        "G26",
        "unaligned",
        two_tensors(g.tensor_info(b"a", [5]), g.tensor_info(b"b", [8], offset=20)),
        "offset is 20, expected 32",
    ),
    Case("G26", "huge offset", two_tensors(ONE_TENSOR, g.tensor_info(b"b", [8], offset=2**64 - 32)), "expected 32"),
    Case(
        "G27",
        "no padding",
        g.gguf_file((), [ONE_TENSOR], padded=False),
        "ends before its data section, which starts at 64",
    ),
    Case(
        "G28",
        "no data",
        g.gguf_file((), [ONE_TENSOR]),
        "'weight': data of 32 bytes at offset 64 lies outside the file of 64",
    ),
    Case("G28", "one byte short", _valid[:-1], "data of 32 bytes at offset 64 lies outside the file of 95 bytes"),
    Case(
        "A1",
        "element count wraps",
        one_tensor([MAX_I64, 2, 1, 1], g.TYPE_I8),
        "'weight': shape [9223372036854775807, 2, 1, 1]",
    ),
    Case("A3", "key of length 0", g.gguf_file([g.key_value(b"", g.STRING, g.string(b"x"))]), "key name is empty"),
    Case(
        "A4",
        "string of 1 GiB",
        g.gguf_file([g.string_value(b"key", bytes(100), length=2**30)]),
        "1073741824 bytes at offset",
    ),
    Case(
        "A4",
        "array of 1 GiB",
        g.gguf_file([g.array_value(b"key", g.U8, bytes(100), 2**30)]),
        "1073741824 bytes at offset",
    ),
    Case(
        "A4",
        "2^30 strings",
        g.gguf_file([g.array_value(b"key", g.STRING, bytes(100), 2**30)]),
        "array of 1073741824 strings",
    ),
    Case(
        "A6",
        "sizes add to 2^64",
        two_tensors(
            g.tensor_info(b"a", [2**63 - 32], g.TYPE_I8), g.tensor_info(b"b", [2**63 - 1], g.TYPE_I8, offset=2**63 - 32)
        ),
        "'b': size of 9223372036854775807 bytes at offset 9223372036854775776 of the data section overflows",
    ),
    Case(
        "A6",
        "sizes add to 2^64 by padding",
        two_tensors(
            g.tensor_info(b"a", [2**61 - 16], g.TYPE_I64), g.tensor_info(b"b", [8], g.TYPE_I8, offset=2**64 - 128)
        ),
        "'b': size of 8 bytes at offset 18446744073709551488 of the data section overflows",
    ),
    Case("A7", "n_dims of all ones", one_tensor([8], n_dims=0xFFFFFFFF), "has 4294967295 dimensions"),
    Case("A7", "a million dimensions", one_tensor([8], n_dims=1_000_000), "has 1000000 dimensions"),
    Case("A8", "9 dimensions", one_tensor([1] * 9), "has 9 dimensions"),
)

ACCEPTED: tuple[Case, ...] = (
    Case("G03", "version 2", g.gguf_file((), [ONE_TENSOR], F32_DATA, version=2), None),
    Case(
        "G08",
        "empty arrays",
        g.gguf_file([g.array_value(b"a", g.U8, b"", 0), g.array_value(b"b", g.STRING, b"", 0)]),
        None,
    ),
    Case("G11", "key that is not UTF-8", g.gguf_file([g.scalar(b"\xff\xfe", g.U32, 1)]), None),
    Case("G11", "key of 70000 bytes", g.gguf_file([g.scalar(b"k" * 70_000, g.U32, 1)]), None),
    *(Case("G13", f"alignment {alignment}", aligned_file(alignment), None) for alignment in (1, 8, 64, 2**20)),
    Case("G13", "alignment 2^30", g.gguf_file([g.scalar(b"general.alignment", g.U32, 2**30)]), None),
    Case("G14", "name of 63 bytes", g.gguf_file((), [g.tensor_info(_long_name[:63], [8])], F32_DATA), None),
    Case("G15", "empty tensor name", g.gguf_file((), [g.tensor_info(b"", [8])], F32_DATA), None),
    Case("G18", "no dimensions", one_tensor([], g.TYPE_F32, F32_DATA[:4]), None),
    Case("G20", "a zero dimension", one_tensor([8, 0, 3], g.TYPE_F32, b""), None),
    Case("G28", "no data, metadata only", g.gguf_file((), [ONE_TENSOR]), None, metadata_only=True),
    Case("G29", "unpadded end", one_tensor([5], g.TYPE_F32, F32_DATA[:20]), None),
    Case("G29", "trailing bytes", _valid + b"trailing", None),
    Case("A2", "zero dimension and empty name", g.gguf_file((), [g.tensor_info(b"", [1, 0])], bytes(9)), None),
    Case("layout", "no tensors and no padding", g.gguf_file([g.scalar(b"k", g.U8, 1)]), None),
    Case("layout", "every value type", small_valid_file(), None),
)


def split_file(
    number: int | None, count: int, total: int | None, tensors: list[bytes], *, extra: tuple[bytes, ...] = ()
) -> bytes:
    """A part of a split model; every tensor has 8 f32 values. None leaves a key out."""
    keys = [*extra, g.scalar(b"split.count", g.U16, count)]
    if number is not None:
        keys.append(g.scalar(b"split.no", g.U16, number))
    if total is not None:
        keys.append(g.scalar(b"split.tensors.count", g.I32, total))
    infos = [g.tensor_info(name, [8], offset=32 * index) for index, name in enumerate(tensors)]
    return g.gguf_file(keys, infos, F32_DATA * len(tensors))


_FIRST, _SECOND, _THIRD = (f"model-{part:05d}-of-00003.gguf" for part in (1, 2, 3))
SPLIT_KEY = g.string_value(b"general.architecture", b"llama")


def split_model(**changed: bytes | None) -> dict[str, bytes]:
    """Three parts, the first without tensors; `first`, `second`, `third` replace a part, None removes it."""
    parts: dict[str, bytes | None] = {
        "first": split_file(0, 3, 3, [], extra=(SPLIT_KEY,)),
        "second": split_file(1, 3, 3, [b"a", b"b"]),
        "third": split_file(2, 3, 3, [b"c"]),
    }
    parts |= changed
    names = {"first": _FIRST, "second": _SECOND, "third": _THIRD}
    return {names[part]: content for part, content in parts.items() if content is not None}


SPLITS: tuple[SplitCase, ...] = (
    SplitCase("split", "three parts", split_model(), _FIRST, None),
    SplitCase("split", "count of 0 is not split", {"any.gguf": split_file(0, 0, 1, [b"a"])}, "any.gguf", None),
    SplitCase("split", "count of 1 is not split", {"any.gguf": split_file(0, 1, 1, [b"a"])}, "any.gguf", None),
    SplitCase("split", "second part opened", split_model(), _SECOND, "is part 2 of 3"),
    SplitCase("split", "renamed", {"renamed.gguf": split_model()[_FIRST]}, "renamed.gguf", "invalid split file name"),
    SplitCase("split", "missing sibling", split_model(third=None), _FIRST, f"{_THIRD}: cannot open"),
    SplitCase(
        "split", "wrong number", split_model(third=split_file(1, 3, 3, [b"c"])), _FIRST, "split.no is 1, expected 2"
    ),
    SplitCase(
        "split", "no number", split_model(second=split_file(None, 3, 3, [b"c"])), _FIRST, "without the key split.no"
    ),
    SplitCase(
        "split", "wrong count", split_model(third=split_file(2, 4, 3, [b"c"])), _FIRST, "split.count is 4, but 3"
    ),
    SplitCase(
        "split",
        "tensor missing",
        split_model(third=split_file(2, 3, 3, [])),
        _FIRST,
        "split.tensors.count is 3, but the 3 parts hold 2",
    ),
    SplitCase(
        "split",
        "no tensor count",
        split_model(first=split_file(0, 3, None, [])),
        _FIRST,
        "without the key split.tensors.count",
    ),
    SplitCase(
        "G16", "name in two parts", split_model(third=split_file(2, 3, 3, [b"b"])), _FIRST, "duplicate tensor name 'b'"
    ),
    SplitCase(
        "G28",
        "part cut short",
        split_model(third=split_file(2, 3, 3, [b"c"])[:-1]),
        _FIRST,
        f"{_THIRD}: tensor 'c': data of 32",
    ),
    SplitCase(
        "G30",
        "count is a string",
        {"any.gguf": g.gguf_file([g.string_value(b"split.count", b"3")])},
        "any.gguf",
        "split.count has type string",
    ),
    SplitCase(
        "G30",
        "count is negative",
        {"any.gguf": g.gguf_file([g.scalar(b"split.count", g.I32, -3)])},
        "any.gguf",
        "split.count is -3",
    ),
)
