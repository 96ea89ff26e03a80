"""`llama-gguf-split`: cuts a model into parts `OUT-00001-of-00003.gguf`, and joins parts to one file again.

Nothing appears under its final name before all of it is written; parts that do not belong together are refused before
anything is written. Joining what was split gives the original file again.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from pyllama.errors import GgufError, InvalidArgument
from pyllama.gguf import (
    SET_ID,
    GgufWriter,
    KeyValue,
    TensorInfo,
    TensorReader,
    TensorSpec,
    encoded_header,
    file_bytes,
    open_parts,
    shard_path,
    split_id,
    without_split_keys,
)

from .command_line import ArgumentParser, byte_progress, printable, run_command

DEFAULT_MAX_TENSORS = 128
MAX_PARTS = 65535  # the count is a u16


class Part(NamedTuple):
    path: Path
    key_values: list[KeyValue]
    tensors: list[TensorInfo]

    @property
    def specs(self) -> list[TensorSpec]:
        return [TensorSpec.of(tensor) for tensor in self.tensors]


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="llama-gguf-split", description="Split a GGUF file into parts, or merge parts.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--split", action="store_true", help="IN is a file, OUT a prefix (default)")
    mode.add_argument("--merge", action="store_true", help="IN is the first part, OUT a file")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--split-max-tensors", metavar="N", type=int, help=f"of a part (default {DEFAULT_MAX_TENSORS})")
    limit.add_argument("--split-max-size", metavar="N(M|G)", help="tensor data of a part in 10^6 or 10^9 bytes")
    parser.add_argument("--no-tensor-first-split", action="store_true", help="metadata alone in the first part")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written")
    parser.add_argument(
        "--delete-splits", action="store_true", help="remove the parts once the merged file is verified"
    )
    parser.add_argument("input", metavar="IN", type=Path)
    parser.add_argument("output", metavar="OUT", type=Path)
    options = parser.parse_args(argv)
    if options.merge:
        if options.split_max_tensors is not None or options.split_max_size is not None or options.no_tensor_first_split:
            parser.error("--merge takes no --split-max-tensors, --split-max-size and --no-tensor-first-split")
        merge(options.input, options.output, dry_run=options.dry_run, delete_splits=options.delete_splits)
        return 0
    if options.delete_splits:
        parser.error("--delete-splits goes with --merge")
    split(
        options.input,
        options.output,
        max_tensors=checked_count(options.split_max_tensors) if options.split_max_size is None else None,
        max_bytes=None if options.split_max_size is None else parse_size(options.split_max_size),
        empty_first=options.no_tensor_first_split,
        dry_run=options.dry_run,
    )
    return 0


def run() -> None:
    run_command(main)


def checked_count(count: int | None) -> int:
    if count is not None and count < 1:
        raise InvalidArgument(f"--split-max-tensors is {count}, expected at least 1")
    return DEFAULT_MAX_TENSORS if count is None else count


def parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([MG])", text)
    if match is None or int(match[1]) == 0:
        raise InvalidArgument(f"--split-max-size is '{printable(text)}', expected a number with M or G, like 2G")
    return int(match[1]) * (10**6 if match[2] == "M" else 10**9)


# Splitting.


def split(
    source: Path, prefix: Path, *, max_tensors: int | None, max_bytes: int | None, empty_first: bool, dry_run: bool
) -> None:
    open_parts(source)  # what is split already may be split in another way
    with TensorReader(source) as reader:
        groups = tensor_groups(reader, max_tensors, max_bytes)
        parts = plan_parts(reader, prefix, [[], *groups] if empty_first else groups)
        for part in parts:
            n_bytes = file_bytes(part.key_values, part.specs)
            print(f"{printable(str(part.path))}: {len(part.tensors)} tensors, {n_bytes} bytes")
        if dry_run:
            return
        for part in parts:
            if part.path.exists():
                raise InvalidArgument(f"{part.path}: exists already")
        write_parts(reader, parts)


def tensor_groups(reader: TensorReader, max_tensors: int | None, max_bytes: int | None) -> list[list[TensorInfo]]:
    """The tensors of each part, in file order."""
    alignment = reader.file.alignment
    groups: list[list[TensorInfo]] = [[]]
    group_bytes = 0
    for tensor in reader.tensors:
        n_bytes = tensor.n_bytes + -tensor.n_bytes % alignment
        if max_bytes is not None and n_bytes > max_bytes:
            raise InvalidArgument(
                f"tensor '{printable(tensor.name)}' of {n_bytes} bytes is larger than a part of {max_bytes} bytes"
            )
        if len(groups[-1]) == max_tensors or (max_bytes is not None and group_bytes + n_bytes > max_bytes):
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += n_bytes
    return groups


def plan_parts(reader: TensorReader, prefix: Path, groups: Sequence[list[TensorInfo]]) -> list[Part]:
    count = len(groups)
    if count > MAX_PARTS:
        raise InvalidArgument(f"{count} parts are too many, the format can count {MAX_PARTS}")
    own_keys = without_split_keys(reader.file.key_values)
    identity = split_id(own_keys, [TensorSpec.of(tensor) for tensor in reader.tensors])
    shared_keys = [entry for entry in own_keys if entry.key == "general.alignment"]
    return [
        Part(
            shard_path(prefix, index, count),
            [
                *(shared_keys if index else own_keys),
                KeyValue("split.no", "u16", index),
                KeyValue("split.count", "u16", count),
                KeyValue("split.tensors.count", "i32", len(reader.tensors)),
                KeyValue(SET_ID, "string", identity),
            ],
            tensors,
        )
        for index, tensors in enumerate(groups)
    ]


def write_parts(reader: TensorReader, parts: Sequence[Part]) -> None:
    writers: list[GgufWriter] = []
    try:
        with byte_progress("splitting", sum(tensor.n_bytes for tensor in reader.tensors)) as advance:
            for part in parts:
                writers.append(GgufWriter(part.path, part.key_values, part.specs))
                for tensor in part.tensors:
                    for piece in reader.pieces(tensor):
                        writers[-1].write(piece)
                        advance(len(piece))
                writers[-1].finish()
        for writer in writers:
            writer.commit()
    finally:
        for writer in writers:
            writer.discard()  # what was committed has no temporary file any more


# Merging.


def merge(first: Path, target: Path, *, dry_run: bool, delete_splits: bool) -> None:
    parts = open_parts(first)
    if "split.count" not in parts[0][1].metadata:
        raise InvalidArgument(f"{first}: is not split")
    with TensorReader(first) as reader:
        key_values = without_split_keys(reader.file.key_values)
        specs = [TensorSpec.of(tensor) for tensor in reader.tensors]
        for path, part in parts:
            print(f"{printable(str(path))}: {len(part.tensors)} tensors")
        print(f"{printable(str(target))}: {len(specs)} tensors, {file_bytes(key_values, specs)} bytes")
        if target.exists():
            raise InvalidArgument(f"{target}: exists already")
        if dry_run:
            return
        digests = []
        with (
            GgufWriter(target, key_values, specs) as writer,
            byte_progress("merging", sum(spec.n_bytes for spec in specs)) as advance,
        ):
            for tensor in reader.tensors:
                hasher = xxhash.xxh3_128()
                for piece in reader.pieces(tensor):
                    hasher.update(piece)
                    writer.write(piece)
                    advance(len(piece))
                digests.append(hasher.digest())
    if delete_splits:
        verify(target, encoded_header(key_values, specs), digests)
        for path, _ in parts:
            path.unlink()
            print(f"{printable(str(path))}: removed")


def verify(path: Path, header: bytes, digests: Sequence[bytes]) -> None:
    """Read the file back. Raises `GgufError` unless it holds exactly this metadata and these tensors."""
    with TensorReader(path, single_file=True) as reader:
        if encoded_header(reader.file.key_values, [TensorSpec.of(tensor) for tensor in reader.tensors]) != header:
            raise GgufError(f"{path}: metadata reads back changed; the parts are kept")
        with byte_progress("verifying", sum(tensor.n_bytes for tensor in reader.tensors)) as advance:
            for tensor, digest in zip(reader.tensors, digests, strict=True):
                hasher = xxhash.xxh3_128()
                for piece in reader.pieces(tensor):
                    hasher.update(piece)
                    advance(len(piece))
                if hasher.digest() != digest:
                    raise GgufError(f"{path}: tensor '{printable(tensor.name)}' reads back changed; the parts are kept")


if __name__ == "__main__":
    run()
