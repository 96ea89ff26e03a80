"""`llama-perplexity`: how well a model predicts a text, and how far it is from another model (KL divergence).

The text is cut into chunks of -c tokens, each computed from an empty context; the second half of every chunk is scored.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from pyllama.errors import InvalidArgument
from pyllama.options import Options, parse_options

from .command_line import run_command
from .kl_divergence import CHUNK_TITLE, chunk_line, compare_rows, concatenated, report, summarise
from .logits_file import LogitsHeader, LogitsReader, check_vocabulary, encode_rows, saved_rows
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


def main(argv: Sequence[str]) -> int:
    options = parse_options("llama-perplexity", argv, os.environ)
    if options.kl_divergence:
        compare(options)
    else:
        score(options)
    return 0


def run() -> None:
    run_command(main)


def score(options: Options) -> None:
    """Print the perplexity of the text; with --save-all-logits also write the log-probabilities."""
    from pyllama._engine import log_sum_exp

    text = text_of(options)
    if options.logits_file and not Path(options.logits_file).absolute().parent.is_dir():
        raise InvalidArgument(f"{options.logits_file}: its folder does not exist")
    progress, surprise = Progress(options), Mean()
    with ScoredModel(options, n_ctx=options.ctx_size) as model:
        chunks = chunks_of(model.encode(text, parse_special=False), model.n_ctx, options.chunks)
        first, end = scored_positions(model.n_ctx)
        header = LogitsHeader(model.n_vocab, chunks)
        progress.start(len(chunks), model.n_ctx)
        with saved_rows(options.logits_file, header) if options.logits_file else nullcontext() as save_rows:
            for number, chunk in enumerate(chunks, 1):
                for position, logits in model.logits(chunk, first, end):
                    log_sums = log_sum_exp(logits)
                    following = chunk[position + 1 : position + 1 + len(logits)]
                    surprise.add(-token_logprobs(logits, log_sums, following))
                    if save_rows is not None:
                        save_rows(encode_rows(logits, log_sums))
                print_chunk(number, model.n_ctx, surprise, lines=options.ppl_output_type == 1)
                if number == 1:
                    progress.first_done(len(chunks))
    print(f"\n{perplexity_text(surprise)}")


def print_chunk(number: int, n_ctx: int, surprise: Mean, *, lines: bool) -> None:
    """The running figure after chunk `number` (from 1)."""
    value = np.exp(surprise.value)
    if lines:
        print(f"{number * n_ctx:8d}  {value:.4f}  {surprise.value:4f}  {surprise.error:4f}", flush=True)
    else:
        print(f"[{number}]{value:.4f},", end="", flush=True)


def compare(options: Options) -> None:
    """Print how the model differs from the log-probabilities in the file of --kl-divergence-base."""
    from pyllama._engine import log_sum_exp

    if not options.logits_file:
        raise InvalidArgument("--kl-divergence needs saved log-probabilities: give --kl-divergence-base FILE")
    progress = Progress(options)
    with LogitsReader(options.logits_file) as base:
        header = base.header
        chunks = header.chunks if options.chunks < 0 else header.chunks[: options.chunks]
        if not len(chunks):
            raise InvalidArgument("--chunks 0 leaves nothing to compute")
        if options.given("ctx_size") and options.ctx_size != header.n_ctx:
            progress.note(f"note: chunks have {header.n_ctx} tokens, as in {options.logits_file}")
        with ScoredModel(options, n_ctx=header.n_ctx) as model:
            check_vocabulary(header, model.n_vocab)
            first, end = scored_positions(header.n_ctx)
            progress.start(len(chunks), header.n_ctx)
            print(CHUNK_TITLE)
            parts = []
            for number, chunk in enumerate(chunks, 1):
                for position, logits in model.logits(chunk, first, end):
                    following = chunk[position + 1 : position + 1 + len(logits)]
                    parts.append(compare_rows(logits, log_sum_exp(logits), base.read(len(logits)), following))
                so_far = concatenated(parts)
                print(chunk_line(number, summarise(so_far)), flush=True)
                if number == 1:
                    progress.first_done(len(chunks))
    print(f"\n{report(so_far, summarise(so_far))}")


if __name__ == "__main__":
    run()
