"""The command line of `llama-quantize`: options first, then INPUT, OUTPUT, TYPE and a number of threads."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyllama.errors import InvalidArgument
from pyllama.gguf import KeyValue
from pyllama.options.values import parse_override
from pyllama.quantize.file_types import FILE_TYPES, FileType, find_file_type, parse_tensor_type
from pyllama.quantize.imatrix import read_imatrix
from pyllama.quantize.mixture import TypeOptions
from pyllama.quantize.plan import QuantizeOptions

_USAGE = "usage: llama-quantize [options] INPUT [OUTPUT] TYPE [NTHREADS]"

# Option -> (name of its value or "", help).
_OPTIONS: dict[str, tuple[str, str]] = {
    "--allow-requantize": ("", "convert tensors that are quantised already (losses add up)"),
    "--leave-output-tensor": ("", "copy output.weight as it is"),
    "--pure": ("", "the type's default for every tensor, no mixture"),
    "--strict": ("", "refuse to take another type where rows do not fit the one wanted"),
    "--imatrix": ("FILE", "importance matrix, as llama-imatrix writes it"),
    "--include-weights": ("TEXT", "use the importance only of tensors whose name contains TEXT (repeatable)"),
    "--exclude-weights": ("TEXT", "ignore the importance of tensors whose name contains TEXT (repeatable)"),
    "--output-tensor-type": ("T", "type of output.weight"),
    "--token-embedding-type": ("T", "type of the token embeddings"),
    "--tensor-type": ("PATTERN=T", "type of tensors whose name matches a regular expression (repeatable, first wins)"),
    "--tensor-type-file": ("FILE", "file of such entries, separated by white space"),
    "--prune-layers": ("L,L,...", "leave these layers out and number the rest anew"),
    "--keep-split": ("", "write the same parts as the input has"),
    "--override-kv": ("KEY=TYPE:VALUE", "metadata of the target; TYPE is int, float, bool or str (repeatable)"),
    "--dry-run": ("", "only print the sizes"),
    "--max-buffer-size": ("MIB", "rows read at once at most (never more than 64 MiB are)"),
    "--verbose": ("", "one line per tensor also on a terminal (-v)"),
}  # fmt: skip


class UsageError(InvalidArgument):
    """The command line is not understood: the usage is shown with the message."""


@dataclass(frozen=True, slots=True)
class Arguments:
    source: Path
    target: Path
    file_type: FileType
    n_threads: int = 0
    options: QuantizeOptions = field(default_factory=QuantizeOptions)
    dry_run: bool = False
    verbose: bool = False
    max_buffer_bytes: int = 8192 << 20


def usage() -> str:
    lines = [_USAGE, ""]
    for name, (value, text) in _OPTIONS.items():
        lines.append(f"  {f'{name} {value}'.rstrip():<32} {text}")
    lines += ["", "types (by name in any case or by number; size and rise of perplexity):"]
    for file_type in FILE_TYPES:
        number = "" if file_type.id is None else f"{file_type.id} or"
        lines.append(f"  {number:>5} {file_type.name:<9} : {file_type.note}")
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Raises `UsageError`, and what goes wrong with the files that options name."""
    given: dict[str, list[str]] = {}
    rest = list(argv)
    while rest and (rest[0].startswith("--") or rest[0] == "-v"):
        name = rest.pop(0)
        name = "--verbose" if name == "-v" else name
        if name == "--help":
            raise UsageError
        if name not in _OPTIONS:
            raise UsageError(f"unknown option '{name}'")
        if _OPTIONS[name][0] and not rest:
            raise UsageError(f"{name} needs a value")
        given.setdefault(name, []).append(rest.pop(0) if _OPTIONS[name][0] else "")
    source, target, file_type, n_threads = _positional(rest)
    return Arguments(
        source,
        target,
        file_type,
        n_threads,
        _quantize_options(given),
        dry_run="--dry-run" in given,
        verbose="--verbose" in given,
        max_buffer_bytes=_mebibytes(given.get("--max-buffer-size", ["8192"])[-1]),
    )


def _quantize_options(given: dict[str, list[str]]) -> QuantizeOptions:
    include, exclude = given.get("--include-weights", []), given.get("--exclude-weights", [])
    if include and exclude:
        raise UsageError("--include-weights and --exclude-weights cannot be used together")
    entries = list(given.get("--tensor-type", []))
    for path in given.get("--tensor-type-file", []):
        entries += Path(path).read_text(encoding="utf-8").split()
    types = TypeOptions(
        pure="--pure" in given,
        leave_output="--leave-output-tensor" in given,
        output_type=_last_type(given.get("--output-tensor-type")),
        embedding_type=_last_type(given.get("--token-embedding-type")),
        tensor_types=[_pattern_and_type(entry) for entry in entries],
    )
    options = QuantizeOptions(
        types=types,
        allow_requantize="--allow-requantize" in given,
        strict="--strict" in given,
        pruned_layers=frozenset(layer for text in given.get("--prune-layers", []) for layer in _layers(text)),
        keep_split="--keep-split" in given,
        overrides=[_override(text) for text in given.get("--override-kv", [])],
    )
    if "--imatrix" not in given:
        return options
    path = given["--imatrix"][-1]
    return replace(options, imatrix=read_imatrix(path).filtered(include, exclude), imatrix_path=path)


def _positional(rest: list[str]) -> tuple[Path, Path, FileType, int]:
    if len(rest) < 2:
        raise UsageError("INPUT and TYPE are needed")
    source, rest = Path(rest[0]), rest[1:]
    file_type = find_file_type(rest[0])
    if file_type is not None:
        target, rest = source.with_name(f"ggml-model-{file_type.name}.gguf"), rest[1:]
    else:
        target = Path(rest[0])
        if len(rest) < 2:
            raise UsageError(f"TYPE is missing ('{rest[0]}' is none)")
        file_type = find_file_type(rest[1])
        if file_type is None:
            raise UsageError(f"invalid type '{rest[1]}'")
        rest = rest[2:]
    if len(rest) > 1:
        raise UsageError(f"too many arguments: '{rest[1]}'")
    try:
        n_threads = int(rest[0]) if rest else 0
    except ValueError:
        raise UsageError(f"invalid number of threads '{rest[0]}'") from None
    return source, target, file_type, n_threads


def _last_type(texts: list[str] | None) -> str | None:
    return _tensor_type(texts[-1]) if texts else None


def _tensor_type(text: str) -> str:
    try:
        return parse_tensor_type(text)
    except InvalidArgument as error:
        raise UsageError(str(error)) from None


def _pattern_and_type(text: str) -> tuple[str, str]:
    pattern, equals, type_name = text.rpartition("=")
    if not (pattern and equals):
        raise UsageError(f"expected PATTERN=TYPE, found '{text}'")
    return pattern, _tensor_type(type_name)


def _layers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"expected layers to prune as in 3,4,5, found '{text}'")
    return [int(part) for part in parts]


def _override(text: str) -> KeyValue:
    try:
        key, value = parse_override(text)
    except ValueError as error:
        raise UsageError(f"--override-kv: {error}") from None
    if isinstance(value, bool):
        return KeyValue(key, "bool", value)
    if isinstance(value, int):
        return KeyValue(key, "u32", abs(value))  # as llama.cpp writes it
    return KeyValue(key, "f32" if isinstance(value, float) else "string", value)


def _mebibytes(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"invalid --max-buffer-size '{text}'")
    return int(text) << 20
