#!/usr/bin/env python3
"""What a drafter costs that never guesses right: the rate of a server with one against that of the same without it.

    python scripts/bench/useless_drafter.py MODEL.gguf [--streams 1 4] [--rounds 4]

The drafter is a tiny random model with the vocabulary of MODEL, written for the occasion, or looks up n-grams of texts
that are drawn at a high temperature and do not repeat themselves. The server decides what pays (`--spec-adaptive`).
There is one server, in this process, whose drafter is taken away for every second round: two processes of the same
program differ by 3 to 16 percent for as long as they live. In a round each stream sends a request as soon as it has
the answer to the one before. Output: a Markdown row per drafter and number of streams.
The first ratio is that of all rounds, what is learned at the beginning included, the second the median of the pairs of
rounds; "nothing" is no drafter, for a comparison. 0.95 must be reached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/server"))

from engine_server import EngineServer

from pyllama._engine import GgufFile
from pyllama.gguf import GgufWriter, KeyValue, TensorSpec

KINDS = {
    "nothing": (),
    "draft model": ("--spec-type", "draft-simple", "--spec-draft-n-max", "7"),
    "n-grams": ("--spec-type", "ngram-simple,ngram-mod,ngram-cache", "--spec-ngram-simple-size-n", "2"),
}
HIDDEN = 64
REQUESTS = 6  # of a stream in a round


def write_drafter(path: Path, model: Path) -> None:
    """A llama of one layer with random F32 weights."""
    keys = [entry for entry in GgufFile(model, metadata_only=True).key_values if entry.key.startswith("tokenizer.")]
    (tokens,) = (entry.value for entry in keys if entry.key == "tokenizer.ggml.tokens")
    sizes = {"context_length": 8192, "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": 2 * HIDDEN}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 2, "vocab_size": len(tokens)}
    keys += [KeyValue(f"llama.{key}", "u32", value) for key, value in sizes.items()]
    keys.append(KeyValue("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5))
    keys.insert(0, KeyValue("general.architecture", "string", "llama"))
    shapes = {"token_embd": (HIDDEN, len(tokens)), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}_norm": (HIDDEN,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (HIDDEN, 2 * HIDDEN) for name in ("gate", "up")}
    shapes["blk.0.ffn_down"] = (2 * HIDDEN, HIDDEN)
    specs = [TensorSpec(f"{name}.weight", "f32", shape) for name, shape in shapes.items()]
    rng = np.random.default_rng(20261130)
    with GgufWriter(path, keys, specs) as writer:
        for spec in specs:
            values = rng.standard_normal(spec.shape[::-1], dtype=np.float32) * np.float32(HIDDEN**-0.5)
            writer.write(np.ones(spec.shape, np.float32) if len(spec.shape) == 1 else values)
        writer.finish()


class Rounds(NamedTuple):
    """Seconds of each round without and with the drafter, and what became of its drafts."""

    without: list[float]
    drafting: list[float]
    n_drafted: int
    n_accepted: int


def complete(server: EngineServer, prompt: str, seed: int, n_tokens: int) -> dict[str, float]:
    return server.complete(prompt, n_predict=n_tokens, temperature=1.5, seed=seed)["timings"]


def seconds_of_round(
    server: EngineServer, index: int, n_streams: int, n_tokens: int, n_requests: int = REQUESTS
) -> tuple[float, int, int]:
    """n_requests of each stream, all streams at once; what was drafted and stood."""
    started = time.perf_counter()
    with ThreadPoolExecutor(n_streams) as clients:
        timings = list(
            clients.map(
                lambda i: complete(server, f"Story {index} of {i}: Once", 100 * index + i, n_tokens),
                range(n_streams * n_requests),
            )
        )
    drafted, accepted = (sum(int(t.get(name, 0)) for t in timings) for name in ("draft_n", "draft_n_accepted"))
    return time.perf_counter() - started, drafted, accepted


def measure(server: EngineServer, n_rounds: int, n_streams: int, n_tokens: int) -> Rounds:
    loop = server.state.loaded.engine_loop
    speculation = loop._speculation
    seconds: tuple[list[float], list[float]] = ([], [])
    counts = [0, 0]
    loop._speculation = None
    seconds_of_round(server, 0, n_streams, 16, 1)  # warm
    for index in range(1, n_rounds + 1):
        for side in (0, 1) if index % 2 else (1, 0):  # nothing is computed between rounds
            loop._speculation = speculation if side else None
            elapsed, *found = seconds_of_round(server, index, n_streams, n_tokens)
            seconds[side].append(elapsed)
            counts = [count + more for count, more in zip(counts, found, strict=True)]
    loop._speculation = speculation
    return Rounds(*seconds, *counts)


def row(rounds: Rounds, n_tokens: int) -> str:
    rates = [n_tokens * len(seconds) / sum(seconds) for seconds in (rounds.without, rounds.drafting)]
    pairs = [without / drafting for without, drafting in zip(rounds.without, rounds.drafting, strict=True)]
    return (
        f"{rates[0]:.1f} | {rates[1]:.1f} | {rates[1] / rates[0]:.3f} | {statistics.median(pairs):.3f} "
        f"| {rounds.n_accepted} of {rounds.n_drafted}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("-n", "--n-generate", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=1)
    arguments = parser.parse_args()
    n_tokens = REQUESTS * arguments.n_generate  # of a stream in a round
    print("| drafter | streams | tokens/s without | with | ratio | of pairs | stood |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        drafter = Path(folder) / "drafter.gguf"
        write_drafter(drafter, arguments.model)
        for kind, options in KINDS.items():
            more = ("--spec-draft-model", str(drafter)) if kind == "draft model" else ()
            for n_streams in arguments.streams:
                sizes = ("-t", str(arguments.threads), "-np", str(n_streams), "-c", str(2048 * n_streams))
                server = EngineServer(arguments.model, *sizes, *options, *more)
                try:
                    rounds = measure(server, arguments.rounds, n_streams, arguments.n_generate)
                finally:
                    server.close()
                print(f"| {kind} | {n_streams} | {row(rounds, n_streams * n_tokens)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
