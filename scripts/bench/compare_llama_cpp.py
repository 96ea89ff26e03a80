#!/usr/bin/env python3
"""Prompt processing and generation beside llama.cpp: same model, same machine, same minute.

Ours and the peer's measurements alternate, so that a disturbed minute hits both. pp: one prompt of N random tokens into
an empty context. tg: N tokens one at a time from an empty context (depth 0), without sampling on our side; the peer's
figures are its server's `timings`, which start after a one-token prompt. Output: a Markdown table with medians, spread
and the ratio of medians.

    python scripts/bench/compare_llama_cpp.py --repetitions 7 MODEL.gguf [MODEL.gguf ...]

Needs the `xllamacpp` wheel. The peer spins on its threads while it works and sleeps when idle; only one side computes
at a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.llama_cpp_peer import LlamaCppPeer  # needs the path set above
from pyllama._engine import Engine, Model, backend_info


class OurSide:
    def __init__(self, path: Path, n_threads: int, n_ctx: int) -> None:
        self.model = Model(path, n_threads=n_threads)
        self.engine = Engine(self.model, n_ctx=n_ctx, n_threads=n_threads)

    def prompt_rate(self, tokens: list[int]) -> float:
        """Tokens per second of one prompt; only its last row makes logits, as in a server."""
        self.engine.clear(0)
        start = time.perf_counter()
        self.engine.decode(tokens)
        return len(tokens) / (time.perf_counter() - start)

    def generation_rate(self, tokens: list[int]) -> float:
        """Tokens per second of single-token decodes; each makes and copies one row of logits."""
        self.engine.clear(0)
        self.engine.decode(tokens[:1])
        start = time.perf_counter()
        for token in tokens[1:]:
            self.engine.decode([token])
            self.engine.logits()
        return (len(tokens) - 1) / (time.perf_counter() - start)


def compare(
    path: Path, *, n_prompt: int, n_generate: int, n_threads: int, repetitions: int
) -> dict[str, tuple[list[float], list[float]]]:
    """test name -> (our rates, the peer's rates), in tokens per second."""
    rng = np.random.default_rng(1)
    names = (f"pp{n_prompt}", f"tg{n_generate}")
    ours: dict[str, list[float]] = {name: [] for name in names}
    peers: dict[str, list[float]] = {name: [] for name in names}
    n_ctx = max(n_prompt, n_generate) + 256
    us = OurSide(path, n_threads, n_ctx)
    with LlamaCppPeer(path, n_ctx=n_ctx, n_threads=n_threads) as peer:
        for repetition in range(-1, repetitions):  # repetition -1 warms both sides and is dropped
            prompt = rng.integers(100, us.model.n_vocab - 100, n_prompt).tolist()
            chain = rng.integers(100, us.model.n_vocab - 100, n_generate + 1).tolist()
            rates = {
                names[0]: (us.prompt_rate(prompt), peer.timings(prompt, 1)["prompt_per_second"]),
                names[1]: (us.generation_rate(chain), peer.timings(chain[:1], n_generate)["predicted_per_second"]),
            }
            if repetition >= 0:
                for name, (our_rate, peer_rate) in rates.items():
                    ours[name].append(our_rate)
                    peers[name].append(peer_rate)
    us.engine.close()
    us.model.close()
    return {name: (ours[name], peers[name]) for name in names}


def spread(rates: list[float]) -> str:
    return f"{min(rates):.0f} / **{statistics.median(rates):.1f}** / {max(rates):.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare with llama.cpp on the same machine; prints a Markdown table.")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-generate", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.repetitions < 5:
        parser.error(f"--repetitions is {arguments.repetitions}; medians need at least 5")
    print(
        f"isa {backend_info()['isa']}, {arguments.threads} threads, {arguments.repetitions} alternating repetitions, "
        "tokens/s min / median / max\n"
    )
    print("| model | test | pyllama | llama.cpp | ratio of medians |\n|---|---|---|---|---|")
    for path in arguments.models:
        results = compare(
            path,
            n_prompt=arguments.n_prompt,
            n_generate=arguments.n_generate,
            n_threads=arguments.threads,
            repetitions=arguments.repetitions,
        )
        for name, (ours, peers) in results.items():
            ratio = statistics.median(ours) / statistics.median(peers)
            print(f"| {path.stem} | {name} | {spread(ours)} | {spread(peers)} | {ratio:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
