"""`gguf-dump`: metadata and tensor list of one GGUF file as text, JSON or Markdown. Never touches tensor data.

Works on any part of a split model and on files whose data is missing or cut. JSON has the layout of the program of the
same name in the `gguf` package, with `data_offset` and `n_bytes` of tensors added.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyllama.gguf import GgufFile, KeyValue, TensorInfo, encoded_header, entry_offsets

from .command_line import ArgumentParser, printable, run_command

MAX_ELEMENTS = 6  # of an array shown as text
MAX_TEXT = 60  # characters of a string shown as text

TYPE_LABELS = {
    "u8": "UINT8", "i8": "INT8", "u16": "UINT16", "i16": "INT16", "u32": "UINT32", "i32": "INT32", "f32": "FLOAT32",
    "bool": "BOOL", "string": "STRING", "u64": "UINT64", "i64": "INT64", "f64": "FLOAT64",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="gguf-dump", description="Show metadata and tensors of a GGUF file.")
    parser.add_argument("model", type=Path, help="GGUF file; of a split model, any part")
    parser.add_argument("--no-tensors", action="store_true", help="leave the tensors out")
    parser.add_argument("--json", action="store_true", help="JSON, without the values of arrays")
    parser.add_argument("--json-array", action="store_true", help="JSON with the values of arrays")
    parser.add_argument("--data-offset", action="store_true", help="only the offset of the data section")
    parser.add_argument("--data-alignment", action="store_true", help="only the alignment of the data section")
    parser.add_argument("--markdown", action="store_true", help="Markdown tables")
    options = parser.parse_args(argv)

    header = read_header(options.model)
    tensors = [] if options.no_tensors else header.tensors
    if options.data_offset:
        print(header.data_offset)
    elif options.data_alignment:
        print(header.alignment)
    elif options.json or options.json_array:
        json.dump(as_json(header, tensors, arrays=options.json_array), sys.stdout, allow_nan=False)
        print()
    elif options.markdown:
        print_lines(as_markdown(header, tensors))
    else:
        print_lines(as_text(header, tensors))
    return 0


def run() -> None:
    run_command(main)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


class Header(NamedTuple):
    name: str
    version: int
    alignment: int
    keys: list[KeyValue]
    tensors: list[TensorInfo]

    @property
    def data_offset(self) -> int:
        """Start of the data section; where it would be in a file without tensors."""
        if self.tensors:
            return self.tensors[0].offset
        end = len(encoded_header(self.keys, ()))
        return end + -end % self.alignment


def read_header(path: Path) -> Header:
    file = GgufFile(path, metadata_only=True, single_file=True)
    return Header(str(path), file.version, file.alignment, file.key_values, file.tensors)


# Text and Markdown.


def as_text(header: Header, tensors: Sequence[TensorInfo]) -> Iterator[str]:
    yield f"{printable(header.name)}: {summary(header)}"
    yield f"* {len(header.keys)} keys"
    for number, entry in enumerate(header.keys, 1):
        value = value_text(entry)
        yield f"{number:7}: {type_label(entry):<10} | {n_values(entry):8} | {printable(entry.key)} = {value}"
    if tensors:
        yield f"* {len(tensors)} tensors: bytes | offset | shape | type | name"
    for number, tensor in enumerate(tensors, 1):
        shape = ", ".join(f"{size:5}" for size in tensor.shape)
        type_name = tensor.type_name.upper()
        yield (
            f"{number:7}: {tensor.n_bytes:12} | {tensor.offset:14} | {shape:<26} | {type_name:<7} | "
            f"{printable(tensor.name)}"
        )


def as_markdown(header: Header, tensors: Sequence[TensorInfo]) -> Iterator[str]:
    yield from (f"# {cell(header.name)}", "", f"{summary(header)}.", "", "## Metadata", "")
    yield from ("| no. | type | count | key | value |", "|---:|:---|---:|:---|:---|")
    for number, entry in enumerate(header.keys, 1):
        value = in_table(value_text(entry))
        yield f"| {number} | {type_label(entry)} | {n_values(entry)} | {cell(entry.key)} | {value} |"
    if tensors:
        yield from ("", "## Tensors", "")
        yield from ("| no. | name | shape | type | offset | bytes |", "|---:|:---|:---|:---|---:|---:|")
    for number, tensor in enumerate(tensors, 1):
        shape = " x ".join(map(str, tensor.shape))
        yield (
            f"| {number} | {cell(tensor.name)} | {shape} | {tensor.type_name.upper()} | {tensor.offset} | "
            f"{tensor.n_bytes} |"
        )


def summary(header: Header) -> str:
    text = (
        f"GGUF version {header.version}, little-endian, {len(header.keys)} keys, {len(header.tensors)} tensors, "
        f"alignment {header.alignment}, data at {header.data_offset}"
    )
    values = {entry.key: entry.value for entry in header.keys}
    count, index = (values.get(key) for key in ("split.count", "split.no"))
    if isinstance(count, int) and isinstance(index, int) and count > 1:
        text += f", part {index + 1} of {count}"
    return text


def cell(text: str) -> str:
    return in_table(printable(text))


def in_table(shown: str) -> str:
    return shown.replace("|", "\\|").replace("`", "\\`")


def type_label(entry: KeyValue) -> str:
    element = entry.type.removesuffix("[]")
    return TYPE_LABELS[element] if element == entry.type else f"[{TYPE_LABELS[element]}]"


def n_values(entry: KeyValue) -> int:
    return len(entry.value) if entry.type.endswith("[]") else 1


def value_text(entry: KeyValue) -> str:
    if not entry.type.endswith("[]"):
        return scalar_text(entry.value)
    shown = entry.value[:MAX_ELEMENTS]
    elements = [scalar_text(value) for value in (shown if isinstance(shown, list) else shown.tolist())]
    if len(entry.value) > MAX_ELEMENTS:
        elements.append("...")
    return f"[{', '.join(elements)}]"


def scalar_text(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    if len(value) <= MAX_TEXT:
        return f"'{printable(value)}'"
    return f"'{printable(value[:MAX_TEXT])}'... ({len(value)} characters)"


# JSON.


def as_json(header: Header, tensors: Sequence[TensorInfo], *, arrays: bool) -> dict[str, Any]:
    """The counts of the header come first among the keys, as keys of their own."""
    keys = header.keys
    counts = (("version", "UINT32", 4, header.version), ("tensor_count", "UINT64", 8, len(header.tensors)))
    metadata: dict[str, Any] = {}
    for key, type_name, offset, value in (*counts, ("kv_count", "UINT64", 16, len(keys))):
        metadata[f"GGUF.{key}"] = {"index": len(metadata), "type": type_name, "offset": offset, "value": value}
    for entry, (offset, _) in zip(keys, entry_offsets(keys), strict=True):
        type_name = TYPE_LABELS.get(entry.type, "ARRAY")
        record: dict[str, Any] = {"index": len(metadata), "type": type_name, "offset": offset}
        if entry.type.endswith("[]"):
            record["array_types"] = [TYPE_LABELS[entry.type.removesuffix("[]")]]
        if arrays or not entry.type.endswith("[]"):
            record["value"] = json_value(entry.value)
        metadata[unicode_text(entry.key)] = record
    listed = {}
    offset = len(encoded_header(keys, ()))
    for index, tensor in enumerate(tensors):
        listed[unicode_text(tensor.name)] = {
            "index": index,
            "shape": list(tensor.shape),
            "type": tensor.type_name.upper(),
            "offset": offset,  # of its record in the header
            "data_offset": tensor.offset,
            "n_bytes": tensor.n_bytes,
        }
        # Record: length and name, number of dimensions and dimensions, type, offset.
        offset += 24 + len(tensor.name.encode("utf-8", "surrogateescape")) + 8 * len(tensor.shape)
    return {"filename": unicode_text(header.name), "endian": "LITTLE", "metadata": metadata, "tensors": listed}


def json_value(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become strings."""
    if isinstance(value, str):
        return unicode_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return value
    return [json_value(element) for element in (value if isinstance(value, list) else value.tolist())]


def unicode_text(text: str) -> str:
    """Bytes that are not UTF-8 as `\\xNN`: lone surrogates are no valid JSON text."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


if __name__ == "__main__":
    run()
