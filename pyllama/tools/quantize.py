"""`llama-quantize`: a model file in another tensor type, or a mixture of types."""

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyllama.quantize.pipeline import quantize_file

from .command_line import run_command
from .quantize_arguments import Arguments, UsageError, parse_arguments, usage
from .quantize_report import print_plan, print_summary, reporter


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(usage())
        if str(error):
            print(f"error: {error}", file=sys.stderr)
        return 1
    with _terminated_cleanly():
        seconds = _quantize(arguments)
    print(f"\nquantize time = {1000 * seconds:8.2f} ms\n   total time = {1000 * (time.monotonic() - start):8.2f} ms")
    return 0


def run() -> None:
    run_command(main)


def _quantize(arguments: Arguments) -> float:
    """Seconds it took, once it is done and reported."""
    source, target, name = arguments.source, arguments.target, arguments.file_type.name
    if arguments.dry_run:
        print(f"calculating quantization size for '{source}' as {name}", file=sys.stderr)
    else:
        print(f"quantizing '{source}' to '{target}' as {name}", file=sys.stderr)
    start = time.monotonic()
    with reporter(verbose=arguments.verbose) as report:
        plan = quantize_file(
            source,
            target,
            arguments.file_type,
            n_threads=arguments.n_threads,
            options=arguments.options,
            progress=report,
            dry_run=arguments.dry_run,
            max_slab_bytes=arguments.max_buffer_bytes,
        )
    if arguments.dry_run:
        print_plan(plan)
    print_summary(plan)
    return time.monotonic() - start


@contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """SIGTERM leaves like an error does: unfinished files are removed."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    run()
