"""`llama-gguf-hash`: checksums of the tensor data of one GGUF file, tensor by tensor and of all together.

Metadata does not count, so sums stay the same when it is edited. The UUID (version 5) is of all tensors together only:
it names the model's content, it does not secure it.
"""

import hashlib
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from pyllama.errors import InvalidArgument
from pyllama.gguf import TensorReader

from .command_line import ArgumentParser, byte_progress, printable, run_command

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "xxh64": xxhash.xxh64,
    "sha1": hashlib.sha1,
    "sha256": hashlib.sha256,
}
UUID = "uuid"
UUID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "en.wikipedia.org/wiki/Llama.cpp")
STRONGEST_FIRST = ("sha256", "sha1", "xxh64", UUID)


class Sum(NamedTuple):
    algorithm: str
    tensor: str  # empty: of all tensors
    digest: str

    def line(self, file: Path) -> str:
        return f"{self.algorithm:<8}  {self.digest}  {printable(f'{file}:{self.tensor}' if self.tensor else str(file))}"


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(
        prog="llama-gguf-hash",
        description="Checksums of tensor data. Kind: xxh64, with --check the strongest.",
    )
    parser.add_argument("model", type=Path, help="GGUF file; of a split model, the part to hash")
    kinds = parser.add_argument_group("kinds")
    kinds.add_argument("--all", "--manifest", action="store_true", help="xxh64, sha1 and sha256, for --check")
    for kind in (*ALGORITHMS, UUID):
        kinds.add_argument(f"--{kind}", action="store_true")
    parser.add_argument("--no-layer", action="store_true", help="only of all tensors together")
    parser.add_argument("-c", "--check", type=Path, metavar="MANIFEST", help="compare with an earlier output")
    options = parser.parse_args(argv)

    kinds_given = [kind for kind in (*ALGORITHMS, UUID) if getattr(options, kind) or (options.all and kind != UUID)]
    with TensorReader(options.model, single_file=True) as reader:
        if options.check is not None:
            return check(reader, options.check, kinds_given, per_tensor=not options.no_layer)
        for entry in sums(reader, kinds_given or ["xxh64"], per_tensor=not options.no_layer):
            print(entry.line(options.model), flush=True)
    return 0


def run() -> None:
    run_command(main)


class Hasher:
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._hash = hashlib.sha1(UUID_NAMESPACE.bytes) if kind == UUID else ALGORITHMS[kind]()

    def update(self, data: bytes | bytearray) -> None:
        self._hash.update(data)

    def text(self) -> str:
        if self._kind == UUID:
            return str(uuid.UUID(bytes=self._hash.digest()[:16], version=5))
        return str(self._hash.hexdigest())


def sums(reader: TensorReader, kinds: Sequence[str], *, per_tensor: bool) -> Iterator[Sum]:
    """Of each tensor in file order, then of all. Reads the data once; the kinds are computed side by side."""
    whole = {kind: Hasher(kind) for kind in kinds}
    tensor_kinds = [kind for kind in kinds if kind != UUID] if per_tensor else []
    with ThreadPoolExecutor() as pool, byte_progress("hashing", sum(t.n_bytes for t in reader.tensors)) as advance:
        for tensor in reader.tensors:
            single = {kind: Hasher(kind) for kind in tensor_kinds}
            for piece in reader.pieces(tensor):
                list(pool.map(lambda hasher, data=piece: hasher.update(data), (*single.values(), *whole.values())))
                advance(len(piece))
            yield from (Sum(kind, tensor.name, hasher.text()) for kind, hasher in single.items())
    yield from (Sum(kind, "", hasher.text()) for kind, hasher in whole.items())


# Manifests.

Manifest = Mapping[tuple[str, str], str]  # (algorithm, tensor or "") -> digest


def read_manifest(path: Path, model: Path) -> Manifest:
    """The lines about the file named like `model`, in whatever folder it was. Raises `InvalidArgument` for others."""
    found: dict[tuple[str, str], str] = {}
    name = printable(model.name)
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), 1):
        if not line.strip():
            continue
        fields = line.split(None, 2)
        if len(fields) < 3 or fields[0] not in STRONGEST_FIRST:
            raise InvalidArgument(f"{path}: line {number} is not 'KIND DIGEST FILE:TENSOR': {printable(line[:80])}")
        subject = "/" + fields[2]
        if subject.endswith(f"/{name}"):
            found[fields[0], ""] = fields[1]
        elif (start := subject.find(f"/{name}:")) >= 0:
            found[fields[0], subject[start + len(name) + 2 :]] = fields[1]
    if not found:
        raise InvalidArgument(f"{path}: no line is about {model.name}")
    return found


def available_kinds(manifest: Manifest) -> list[str]:
    """The strongest first."""
    return [kind for kind in STRONGEST_FIRST if any(algorithm == kind for algorithm, _ in manifest)]


def lists_tensors(manifest: Manifest) -> bool:
    return any(tensor for _, tensor in manifest)


def verdict(manifest: Manifest, entry: Sum) -> str:
    """`Ok`, or what is wrong."""
    expected = manifest.get((entry.algorithm, printable(entry.tensor)))
    if expected is None:
        return "Not in manifest"
    return "Ok" if expected == entry.digest else f"Not ok, the manifest says {expected}"


def check(reader: TensorReader, path: Path, kinds: Sequence[str], *, per_tensor: bool) -> int:
    manifest = read_manifest(path, reader.path)
    available = available_kinds(manifest)
    print(f"manifest  {printable(str(path))}  {'  '.join(available)}")
    good = True
    for entry in sums(reader, kinds or available[:1], per_tensor=per_tensor and lists_tensors(manifest)):
        result = verdict(manifest, entry)
        good = good and result == "Ok"
        print(f"{entry.line(reader.path)}  -  {result}", flush=True)
    print(f"\nVerification results for {printable(str(path))} - {'Success' if good else 'Failure'}")
    if not good:
        print(f"error: {reader.path}: does not match {path}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    run()
