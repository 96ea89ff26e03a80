"""`llama-bench`: prompt and generation speed of models, over every combination of the parameters given.

Prints a markdown table, csv, json, jsonl or sql with the columns that users of llama.cpp's program know.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from pyllama.download.model_options import with_local_models
from pyllama.errors import PyllamaError
from pyllama.options import Options, parse_options

from .bench_drafts import speculation_of
from .bench_matrix import BenchTest, expand
from .bench_output import Printer, make_printer
from .bench_run import Runner
from .cpu_info import physical_cores


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options("llama-bench", sys.argv[1:] if argv is None else argv, os.environ)
    printers: list[Printer] = [make_printer(options.output, sys.stdout, options)]
    if options.output_err != "none":
        printers.append(make_printer(options.output_err, sys.stderr, options))
    try:
        options = with_local_models(options, os.environ)
        tests = expand(options, default_threads=physical_cores())
        run_all(options, tests, printers, native=_native(), progress=sys.stderr if options.progress else None)
    except (PyllamaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run() -> None:
    sys.exit(main())


def run_all(
    options: Options,
    tests: Sequence[BenchTest],
    printers: Sequence[Printer],
    *,
    native: Any,
    progress: TextIO | None,
) -> None:
    """Measure `tests` in order and print each result as it comes. `native` is the module `pyllama._engine`."""
    for printer in printers:
        printer.header()
    with Runner(
        native,
        repetitions=options.repetitions,
        warmup=not options.no_warmup,
        numa=options.numa,
        priority=options.prio,
        speculation=None if (speculation := speculation_of(options)) is None else speculation.resolved(),
        progress=progress,
    ) as runner:
        for index, test in enumerate(tests):
            if options.delay and index:
                time.sleep(options.delay)
            result = runner.measure(test, label=f"{index + 1}/{len(tests)}")
            for printer in printers:
                printer.row(result)
    for printer in printers:
        printer.footer()


def _native() -> Any:
    from pyllama import _engine

    return _engine


if __name__ == "__main__":
    run()
