"""`llama-gguf check`: is a GGUF file, with all parts of a split model, sound from the first byte to the last?

One line per fault on stdout: a broken container (where checking must end), scales or values that are not finite,
padding that is not zero, bytes after the end, sums other than a manifest's.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pyllama import _engine
from pyllama.errors import GgufError
from pyllama.gguf import PIECE_BYTES, TensorInfo, TensorReader, TensorSpec, encoded_header, open_parts, type_traits

from .command_line import ArgumentParser, byte_progress, printable, run_command
from .gguf_hash import UUID, Hasher, Manifest, Sum, available_kinds, lists_tensors, read_manifest, verdict


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="llama-gguf check", description="Check whole GGUF files.")
    parser.add_argument("models", nargs="+", metavar="FILE", type=Path, help="of a split model, the first part")
    parser.add_argument("--manifest", type=Path, help="sums that llama-gguf-hash wrote")
    options = parser.parse_args(argv)
    good = True
    for model in options.models:
        n_faults = 0
        for fault in faults(model, options.manifest):
            print(fault, flush=True)
            n_faults += 1
        if not n_faults:
            print(f"{printable(str(model))}: ok", flush=True)
        good = good and not n_faults
    return 0 if good else 1


def run() -> None:
    run_command(main)


def faults(model: Path, manifest_path: Path | None) -> Iterator[str]:
    try:
        parts = [path for path, _ in open_parts(model)]
    except GgufError as error:
        yield str(error)
        return
    for path in parts:
        manifest = read_manifest(manifest_path, path) if manifest_path is not None else {}
        with TensorReader(path, single_file=True) as reader:
            for fault in part_faults(reader, manifest):
                yield f"{printable(str(path))}: {fault}"


def part_faults(reader: TensorReader, manifest: Manifest) -> Iterator[str]:
    kinds = available_kinds(manifest)[:1]
    tensor_kinds = [kind for kind in kinds if kind != UUID and lists_tensors(manifest)]
    whole = {kind: Hasher(kind) for kind in kinds}
    with byte_progress(reader.path.name, sum(tensor.n_bytes for tensor in reader.tensors)) as advance:
        for tensor in reader.tensors:
            single = {kind: Hasher(kind) for kind in tensor_kinds}
            n_bad = 0
            for piece in reader.pieces(tensor):
                n_bad += count_non_finite(tensor, piece)
                for hasher in (*single.values(), *whole.values()):
                    hasher.update(piece)
                advance(len(piece))
            if n_bad:
                unit = "blocks" if type_traits[tensor.type_name].is_quantized else "values"
                yield f"tensor '{printable(tensor.name)}': {n_bad} {unit} are not finite"
            yield from sum_faults(manifest, tensor.name, single)
    yield from sum_faults(manifest, "", whole)
    yield from padding_faults(reader)


def count_non_finite(tensor: TensorInfo, piece: bytearray) -> int:
    traits = type_traits[tensor.type_name]
    return _engine.count_non_finite(tensor.type_name, piece, len(piece) // traits.block_bytes * traits.block_values)


def padding_faults(reader: TensorReader) -> Iterator[str]:
    """Bytes of the file that belong to nothing: zero between tensors, none after the last one's padding."""
    alignment = reader.file.alignment
    end = len(encoded_header(reader.file.key_values, [TensorSpec.of(tensor) for tensor in reader.tensors]))
    owner = "the header"
    file_size = reader.path.stat().st_size
    with open(reader.path, "rb") as file:
        for tensor in [*reader.tensors, None]:
            padded_end = end + -end % alignment
            file.seek(end)
            n_bad = 0
            while padding := file.read(min(PIECE_BYTES, padded_end - file.tell())):  # of the last one it may be missing
                n_bad += len(padding) - padding.count(0)
            if n_bad:
                yield f"padding after {owner}: {n_bad} bytes are not zero"
            if tensor is not None:
                end = tensor.offset + tensor.n_bytes
                owner = f"tensor '{printable(tensor.name)}'"
            elif file_size > padded_end:
                yield f"{file_size - padded_end} bytes follow the end of the data at {padded_end}"


def sum_faults(manifest: Manifest, tensor: str, hashers: Mapping[str, Hasher]) -> Iterator[str]:
    for kind, hasher in hashers.items():
        result = verdict(manifest, Sum(kind, tensor, hasher.text()))
        if result != "Ok":
            subject = f"tensor '{printable(tensor)}'" if tensor else "all tensors"
            yield f"{subject}: {kind} {hasher.text()}: {result}"


if __name__ == "__main__":
    run()
