"""`llama-imatrix`: runs a model over a text and writes its importance matrix: which inputs of each weight matter.

Also merges matrices (--in-file, repeated), converts them (--output-format) and prints their statistics.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyllama.errors import InvalidArgument, ModelError
from pyllama.options import Options, parse_options
from pyllama.quantize.imatrix import Importance, ImportanceMatrix, read_imatrix, write_imatrix
from pyllama.quantize.imatrix_legacy import write_legacy_imatrix

from .command_line import run_command
from .imatrix_statistics import statistics_report
from .scoring import (
    Mean,
    Progress,
    ScoredModel,
    chunks_of,
    perplexity_text,
    scored_positions,
    text_of,
    token_logprobs,
)

if TYPE_CHECKING:
    from pyllama._engine import InputSums


def main(argv: Sequence[str]) -> int:
    options = parse_options("llama-imatrix", argv, os.environ)
    if options.show_statistics:
        if len(options.in_file) != 1:
            raise InvalidArgument("--show-statistics needs one matrix: give --in-file FILE")
        print(statistics_report(options.in_file[0], read_imatrix(options.in_file[0])))
        return 0
    if not Path(options.output_file).absolute().parent.is_dir():
        raise InvalidArgument(f"{options.output_file}: its folder does not exist")
    start = merged([read_imatrix(path) for path in options.in_file])
    if options.prompt or not options.in_file:
        collect(options, start)
    else:
        save(options, start)
    return 0


def run() -> None:
    run_command(main)


def collect(options: Options, start: ImportanceMatrix) -> None:
    """Run over the text, add to `start` and save."""
    from pyllama._engine import log_sum_exp

    text = text_of(options)
    progress, surprise = Progress(options), Mean()
    dataset = options.file or options.binary_file
    with ScoredModel(options, n_ctx=options.ctx_size, collect_importance=True) as model:
        tokens = model.encode(text, parse_special=options.parse_special)
        chunks = chunks_of(tokens[options.from_chunk * model.n_ctx :], model.n_ctx, options.chunks)
        first, end = scored_positions(model.n_ctx)

        def so_far(n_chunks: int) -> ImportanceMatrix:
            entries = collected(model.engine.importance(), process_output=options.process_output)
            return merged([start, ImportanceMatrix(entries, [dataset] if dataset else [], n_chunks, model.n_ctx)])

        progress.start(len(chunks), model.n_ctx)
        for number, chunk in enumerate(chunks, 1):
            # The logits of all rows are asked for, or the last layer would see only some.
            for position, logits in model.logits(chunk, 0, model.n_ctx):
                rows = slice(max(first - position, 0), max(end - position, 0))
                if options.ppl and len(scored := logits[rows]):
                    after = position + rows.start + 1
                    log_sums = log_sum_exp(scored)
                    surprise.add(-token_logprobs(scored, log_sums, chunk[after : after + len(scored)]))
            if options.ppl:
                print(f"[{number}]{math.exp(surprise.value):.4f},", end="", flush=True)
            if number == 1:
                progress.first_done(len(chunks))
            if number % options.output_frequency == 0 and number < len(chunks):
                save(options, so_far(number))
            if options.save_frequency and number % options.save_frequency == 0:
                save(options, so_far(number), suffix=f".at_{number}")
        save(options, so_far(len(chunks)))
    if options.ppl:
        print(f"\n{perplexity_text(surprise)}")


def collected(sums: "Mapping[str, InputSums]", *, process_output: bool) -> dict[str, Importance]:
    """Entries of the weights of the blocks, on request also of the output layer.

    Raises `ModelError` for sums that are not finite, and when nothing was seen.
    """
    entries = {}
    for name, (squares, n_rows) in sums.items():
        if not (process_output or name.startswith("blk.")):
            continue
        if not np.isfinite(squares).all():
            raise ModelError(f"the inputs of {name} are not finite: the model does not work on this text")
        entries[name] = Importance(squares.astype(np.float32), n_rows.astype(np.float32))
    if not entries:
        raise ModelError("nothing was collected: passes of fewer than 16 tokens do not count (-ub, -b, -c)")
    return entries


def merged(matrices: Sequence[ImportanceMatrix]) -> ImportanceMatrix:
    """Sums and counts added up. Raises `InvalidArgument` when two differ in the size of an entry or of their chunks."""
    entries: dict[str, Importance] = {}
    datasets: dict[str, None] = {}
    chunk_sizes = {matrix.chunk_size for matrix in matrices if matrix.chunk_size}
    if len(chunk_sizes) > 1:
        raise InvalidArgument(f"the matrices are of chunks of {' and '.join(map(str, sorted(chunk_sizes)))} tokens")
    for matrix in matrices:
        datasets.update(dict.fromkeys(matrix.datasets))
        for name, entry in matrix.entries.items():
            before = entries.get(name)
            if before is None:
                entries[name] = entry
                continue
            if before.in_sum2.shape != entry.in_sum2.shape:
                raise InvalidArgument(
                    f"entry '{name}' has {before.in_sum2.shape} values in one matrix, {entry.in_sum2.shape} in another"
                )
            entries[name] = Importance(before.in_sum2 + entry.in_sum2, before.counts + entry.counts)
    return ImportanceMatrix(
        entries, list(datasets), sum(matrix.chunk_count for matrix in matrices), max(chunk_sizes, default=0)
    )


def save(options: Options, matrix: ImportanceMatrix, *, suffix: str = "") -> None:
    write = write_legacy_imatrix if options.output_format == "dat" else write_imatrix
    write(options.output_file + suffix, matrix)


if __name__ == "__main__":
    run()
