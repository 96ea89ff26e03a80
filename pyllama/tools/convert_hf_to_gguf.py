"""`convert-hf-to-gguf`: a model folder as transformers saves it becomes a GGUF file, or several.

Options and the names of output files are those that users of llama.cpp's converter know.
"""

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyllama.convert import OUT_TYPES, Conversion, OutputFile, split, supported, write
from pyllama.errors import InvalidArgument

from .command_line import ArgumentParser, byte_progress, printable, run_command

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.print_supported_models:
        print("\n".join(supported()))
        return 0
    if options.model is None:
        raise InvalidArgument("no model given; use convert-hf-to-gguf FOLDER")
    if options.mtp and options.no_mtp:
        raise InvalidArgument("--mtp and --no-mtp exclude each other")
    for given, name in ((options.no_lazy, "--no-lazy"), (options.use_temp_file, "--use-temp-file")):
        if given:
            print(f"warning: {name} has no effect: tensors are always streamed", file=sys.stderr)
    limit = parse_size(options.split_max_size)
    with (
        _warnings_on_stderr(),
        Conversion(
            options.model,
            outtype=options.outtype,
            vocab_only=options.vocab_only,
            pre=options.pre,
            model_name=options.model_name,
            metadata=options.metadata,
            mtp="only" if options.mtp else "drop" if options.no_mtp else "keep",
            target=options.target_model_dir,
        ) as conversion,
    ):
        path = output_path(options.outfile, conversion)
        files = split(
            path,
            conversion.key_values,
            conversion.tensors,
            max_bytes=limit,
            max_tensors=options.split_max_tensors,
            tensors_first_file=not options.no_tensor_first_split,
        )
        if options.verbose:
            _describe(conversion, files)
        if options.dry_run:
            print("\n".join(f"{file.path}: {len(file.tensors)} tensors, {file.n_bytes} bytes" for file in files))
            return 0
        with byte_progress(path.name, sum(spec.n_bytes for _, spec in conversion.tensors)) as advance:
            write(files, conversion.checkpoint, advance)
    print("\n".join(f"{file.path}: {file.n_bytes} bytes" for file in files))
    return 0


def run() -> None:
    run_command(main)


def parse_size(text: str) -> int:
    """Bytes of `N`, `NK`, `NM` or `NG` (decimal units)."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if match is None:
        raise InvalidArgument(f"--split-max-size: {text!r} is not a number with K, M or G")
    return int(match[1]) * _UNITS[match[2]]


def output_path(outfile: str | None, conversion: Conversion) -> Path:
    """In the checkpoint's folder unless said otherwise; {ftype}, {outtype} and, in capitals, {FTYPE} are filled in."""
    if outfile is None:
        return conversion.folder / conversion.default_file_name
    for name in ("ftype", "outtype"):
        outfile = outfile.replace(f"{{{name}}}", conversion.outtype)
        outfile = outfile.replace(f"{{{name.upper()}}}", conversion.outtype.upper())
    path = Path(outfile)
    return path / conversion.default_file_name if path.is_dir() else path


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """What the conversion has to say, one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    log = logging.getLogger("pyllama.convert")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _describe(conversion: Conversion, files: Sequence[OutputFile]) -> None:
    for entry in conversion.key_values:
        text = f"[{len(entry.value)} elements]" if entry.type.endswith("[]") else str(entry.value)
        print(f"{entry.key} = {printable(text[:100])}", file=sys.stderr)
    for file in files:
        for tensor, spec in file.tensors:
            print(f"{file.path.name}: {tensor.name} {spec.type_name} {list(spec.shape)}", file=sys.stderr)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="convert-hf-to-gguf", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="FOLDER", help="folder with config.json, tokenizer and *.safetensors")
    add("--outfile", metavar="FILE", help="file to write, or folder for it; {ftype} becomes the type (default: FOLDER)")
    add(
        "--outtype",
        choices=OUT_TYPES,
        default="auto",
        help="type of matrices (default: auto, the checkpoint's 16 bits)",
    )
    add("--vocab-only", action="store_true", help="write the vocabulary without tensors")
    add("--split-max-size", default="0", metavar="N(K|M|G)", help="begin another file beyond so many bytes of tensors")
    add("--split-max-tensors", type=_count, default=0, metavar="N", help="begin another file after so many tensors")
    add("--no-tensor-first-split", action="store_true", help="of several files the first holds no tensors")
    add("--dry-run", action="store_true", help="print the files that would be written")
    add("--metadata", type=Path, metavar="FILE", help="JSON file of general.* keys that replace those found")
    add("--model-name", metavar="NAME", help="name of the model instead of the folder's")
    add("--mtp", action="store_true", help="write only the blocks for multi-token prediction, to mtp-NAME.gguf")
    add("--no-mtp", action="store_true", help="leave out the blocks for multi-token prediction")
    add("--target-model-dir", type=Path, metavar="FOLDER", help="of a drafter: the model that it is made for")
    add("--pre", metavar="NAME", help="tokenizer.ggml.pre, when the pre-tokenizer is not recognised")
    add("--print-supported-models", action="store_true", help="list the architectures that can be converted")
    add("--verbose", action="store_true", help="print every key and tensor")
    add("--no-lazy", action="store_true", help="accepted without effect")
    add("--use-temp-file", action="store_true", help="accepted without effect")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


if __name__ == "__main__":
    run()
