#!/usr/bin/env python3
"""Prompt processing and generation beside llama.cpp: same model, same machine, same minute.

Ours and the peer's measurements alternate, so that a disturbed minute hits both (at a depth the peer's come together).
ppN: one prompt of N random tokens; tgN: N tokens one at a time, without sampling; both after `depth` tokens of context.
Output: a Markdown table with minimum, median and maximum, the ratio of medians, and the least and the geometric mean of
the ratios.

    python scripts/bench/compare_llama_cpp.py -t 1,2 -r 5 MODEL.gguf [MODEL.gguf ...]
    python scripts/bench/compare_llama_cpp.py -d 4096 -ctk f16,q8_0 --peer-bench BUILD/bin/llama-bench MODEL.gguf

The peer is the `xllamacpp` wheel (its server's `timings`; no depth, f16 KV only) or, with `--peer-bench`, the program
`llama-bench` of a llama.cpp built for this machine, which is faster. Only one side computes at a time.

`--ceilings PROGRAM` (ceilings.cpp beside this file) measures the machine's limits in every repetition and adds what our
side reaches of them: reading each weight once per generated token, and the multiplications of the prompt as int8 dots.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.llama_cpp_peer import LlamaCppPeer  # needs the path set above
from pyllama._engine import Engine, Model, backend_info
from pyllama.gguf import TensorReader

Rates = tuple[float, float]  # tokens per second of prompt and generation


class Case(NamedTuple):
    path: Path
    n_threads: int
    depth: int
    kv_type: str


class Test(NamedTuple):
    n_prompt: int
    n_generate: int

    @property
    def names(self) -> tuple[str, str]:
        return f"pp{self.n_prompt}", f"tg{self.n_generate}"


def random_tokens(n_vocab: int, count: int) -> list[int]:
    return np.random.default_rng(1).integers(0, n_vocab, count).tolist()


@contextmanager
def our_side(case: Case, test: Test) -> Iterator[Callable[[], Rates]]:
    model = Model(case.path, n_threads=case.n_threads)
    n_ctx = case.depth + max(test.n_prompt, test.n_generate)
    engine = Engine(
        model,
        n_ctx=2 * n_ctx,
        n_seq_max=2,
        n_threads=case.n_threads,
        type_k=case.kv_type,
        type_v=case.kv_type,
        n_batch=n_ctx,
    )
    tokens = random_tokens(model.n_vocab, n_ctx)
    if case.depth:
        engine.decode(tokens[: case.depth])

    def measure() -> Rates:
        engine.fork(0, 1, case.depth)  # a recurrent state can be shared but not cut back
        prompt_tokens = tokens[case.depth : case.depth + test.n_prompt]
        start = time.perf_counter()
        engine.decode(prompt_tokens, [1] * len(prompt_tokens))  # only the last row makes logits, as in a server
        prompt = time.perf_counter() - start
        engine.fork(0, 1, case.depth)
        start = time.perf_counter()
        for token in tokens[case.depth : case.depth + test.n_generate]:
            engine.decode([token], [1])
            engine.logits()
        return test.n_prompt / prompt, test.n_generate / (time.perf_counter() - start)

    try:
        measure()  # warm
        yield measure
    finally:
        engine.close()
        model.close()


@contextmanager
def wheel_peer(case: Case, test: Test) -> Iterator[Callable[[], Rates]]:
    if case.depth or case.kv_type != "f16":
        raise SystemExit("error: a depth or a KV type needs --peer-bench")
    n_ctx = test.n_prompt + test.n_generate + 64
    with LlamaCppPeer(case.path, n_ctx=n_ctx, n_threads=case.n_threads) as peer:
        tokens = random_tokens(1000, test.n_prompt)

        def measure() -> Rates:
            prompt = peer.timings(tokens, 1)["prompt_per_second"]
            return prompt, peer.timings(tokens[:1], test.n_generate)["predicted_per_second"]

        measure()
        yield measure


def bench_peer(program: Path, repetitions: int) -> Callable[[Case, Test], object]:
    @contextmanager
    def peer(case: Case, test: Test) -> Iterator[Callable[[], Rates]]:
        # A filled context is kept between the repetitions of one process only: with a depth all are run at once.
        at_once = repetitions if case.depth else 1
        rates: list[Rates] = []
        command = [str(program), "-m", str(case.path), "-r", str(at_once), "-o", "jsonl", "-t", str(case.n_threads)]
        command += ["-p", str(test.n_prompt), "-n", str(test.n_generate), "-d", str(case.depth)]
        command += ["-ctk", case.kv_type, "-ctv", case.kv_type, *(["-fa", "on"] if case.kv_type != "f16" else [])]

        def measure() -> Rates:
            if not rates:
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                if result.returncode:
                    raise SystemExit(f"error: {' '.join(command)}: {result.stderr.strip()[-500:]}")
                rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
                rates.extend(zip(rows[0]["samples_ts"], rows[1]["samples_ts"], strict=True))
            return rates.pop(0)

        yield measure

    return peer


class Ceilings:
    """The machine's limits in every repetition, and the work of a model to hold against them."""

    def __init__(self, program: Path, case: Case) -> None:
        self._command = [str(program), str(case.n_threads)]
        with TensorReader(case.path) as reader:
            matrices = [tensor for tensor in reader.tensors if len(tensor.shape) == 2]
        has_output = any(tensor.name == "output.weight" for tensor in matrices)
        read = [tensor for tensor in matrices if not (has_output and tensor.name == "token_embd.weight")]
        self._bytes_per_token = sum(tensor.n_bytes for tensor in read)
        inner = [tensor for tensor in read if tensor.name.startswith("blk.")]
        self._operations_per_token = 2 * sum(tensor.shape[0] * tensor.shape[1] for tensor in inner)
        self._limits: list[tuple[float, float]] = []

    def measure(self) -> None:
        result = json.loads(subprocess.run(self._command, capture_output=True, text=True, check=True).stdout)
        self._limits.append((result["int8_dot_gop_s"] * 1e9, result["read_gb_s"] * 1e9))

    def fractions(self, rates: Sequence[float]) -> list[str]:
        """Of the prompt's and the generation's median rate."""
        dot, read = (statistics.median(column) for column in zip(*self._limits, strict=True))
        prompt = rates[0] * self._operations_per_token / dot
        generation = rates[1] * self._bytes_per_token / read
        return [f"{prompt:.0%} of {dot / 1e9:.0f} Gop/s", f"{generation:.0%} of {read / 1e9:.1f} GB/s"]


def spread(rates: list[float]) -> str:
    return f"{min(rates):.1f} / **{statistics.median(rates):.1f}** / {max(rates):.1f}"


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare with llama.cpp on the same machine; prints a Markdown table.")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-generate", type=int, default=128)
    parser.add_argument("-t", "--threads", type=words, default=["2"])
    parser.add_argument("-d", "--depth", type=words, default=["0"])
    parser.add_argument("-ctk", "--kv-type", type=words, default=["f16"])
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--peer-bench", type=Path, help="llama-bench of a native build; default: the wheel's server")
    parser.add_argument("--ceilings", type=Path, help="the compiled ceilings.cpp")
    arguments = parser.parse_args()
    peer_side = bench_peer(arguments.peer_bench, arguments.repetitions) if arguments.peer_bench else wheel_peer
    test = Test(arguments.n_prompt, arguments.n_generate)
    print(f"isa {backend_info()['isa']}, {arguments.repetitions} alternating repetitions, tokens/s\n")
    print("| model | threads | depth | KV | test | pyllama | llama.cpp | ratio | of the ceiling |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios = []
    for path, n_threads, depth, kv_type in product(
        arguments.models, map(int, arguments.threads), map(int, arguments.depth), arguments.kv_type
    ):
        case = Case(path, n_threads, depth, kv_type)
        ceilings = Ceilings(arguments.ceilings, case) if arguments.ceilings else None
        pairs = []
        with our_side(case, test) as ours, peer_side(case, test) as peers:
            for _ in range(arguments.repetitions):
                pairs.append((ours(), peers()))
                if ceilings:
                    ceilings.measure()
        medians = [[statistics.median(pair[side][i] for pair in pairs) for i in (0, 1)] for side in (0, 1)]
        fractions = ceilings.fractions(medians[0]) if ceilings else ["", ""]
        for i, name in enumerate(test.names):
            ratios.append(medians[0][i] / medians[1][i])
            rates = " | ".join(spread([pair[side][i] for pair in pairs]) for side in (0, 1))
            place = f"| {path.stem} | {n_threads} | {depth} | {kv_type} | {name} "
            print(f"{place}| {rates} | {ratios[-1]:.2f} | {fractions[i]} |", flush=True)
    print(f"\nratio: least {min(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
