#!/usr/bin/env python3
"""What a drafter costs that never guesses right: the rate of a server with one against a server without speculation.

    python scripts/bench/useless_drafter.py MODEL.gguf [--streams 1 4]

The drafter is a tiny random model with the vocabulary of MODEL, written for the occasion, or looks up n-grams of texts
that are drawn at a high temperature and do not repeat themselves. The server decides what pays (`--spec-adaptive`).
Both servers run all the time, and their requests alternate. Output: a Markdown row per drafter and number of streams;
the ratios are those of all requests, learning included: of the times, and of what the processor spent, which says more
on a machine that others use. 0.95 must be reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyllama._engine import GgufFile
from pyllama.gguf import GgufWriter, KeyValue, TensorSpec

KINDS = {
    "draft model": ("--spec-type", "draft-simple", "--spec-draft-n-max", "7"),
    "n-grams": ("--spec-type", "ngram-simple,ngram-mod,ngram-cache", "--spec-ngram-simple-size-n", "2"),
}
HIDDEN = 64


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


class Server(NamedTuple):
    address: str
    pid: int

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(model: Path, n_threads: int, n_slots: int, *arguments: str) -> Iterator[Server]:
    """On a free port."""
    command = [sys.executable, "-P", "-m", "pyllama.server", "-m", str(model), "--port", "0", "-t", str(n_threads)]
    command += ["-np", str(n_slots), "-c", str(2048 * n_slots), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout:
            if "listening on http" in line:
                break
        else:
            raise RuntimeError(f"the server left with status {process.wait()}")
        # Nobody reads what it says later: the pipe must not fill up.
        with ThreadPoolExecutor(1) as reader:
            reader.submit(lambda: [None for _ in process.stdout])
            yield Server(line.split("listening on ")[1].split()[0], process.pid)
            process.terminate()
    finally:
        process.terminate()
        process.wait(30)


def complete(address: str, prompt: str, seed: int, n_tokens: int) -> dict[str, float]:
    body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 1.5, "seed": seed, "ignore_eos": True}
    request = urllib.request.Request(
        address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["timings"]


def seconds_of_round(address: str, index: int, n_streams: int, n_tokens: int) -> tuple[float, int, int]:
    """All streams at once; what was drafted and stood."""
    started = time.perf_counter()
    with ThreadPoolExecutor(n_streams) as clients:
        timings = list(
            clients.map(
                lambda stream: complete(address, f"Story {index} of {stream}: Once", 100 * index + stream, n_tokens),
                range(n_streams),
            )
        )
    drafted, accepted = (sum(int(t.get(name, 0)) for t in timings) for name in ("draft_n", "draft_n_accepted"))
    return time.perf_counter() - started, drafted, accepted


def measure(servers: tuple[Server, Server], n_rounds: int, n_streams: int, n_tokens: int) -> str:
    totals, counts = [0.0, 0.0], [0, 0]
    for server in servers:
        seconds_of_round(server.address, 0, n_streams, 16)  # warm
    spent = [-server.processor_seconds() for server in servers]
    for index in range(1, n_rounds + 1):
        for side in (0, 1) if index % 2 else (1, 0):
            seconds, drafted, accepted = seconds_of_round(servers[side].address, index, n_streams, n_tokens)
            totals[side] += seconds
            counts = [counts[0] + drafted, counts[1] + accepted]
    spent = [before + server.processor_seconds() for before, server in zip(spent, servers, strict=True)]
    rates = [n_rounds * n_streams * n_tokens / total for total in totals]
    ratios = f"{rates[1] / rates[0]:.3f} | {spent[0] / spent[1]:.3f}"
    return f"{rates[0]:.1f} | {rates[1]:.1f} | {ratios} | {counts[1]} of {counts[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("-n", "--n-generate", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=1)
    arguments = parser.parse_args()
    print("| drafter | streams | tokens/s without | with | ratio | of processor time | stood |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        drafter = Path(folder) / "drafter.gguf"
        write_drafter(drafter, arguments.model)
        for kind, options in KINDS.items():
            more = ("--spec-draft-model", str(drafter)) if kind == "draft model" else ()
            for n_streams in arguments.streams:
                common = (arguments.model, arguments.threads, n_streams)
                with running(*common) as plain, running(*common, *options, *more) as drafting:
                    row = measure((plain, drafting), arguments.rounds, n_streams, arguments.n_generate)
                print(f"| {kind} | {n_streams} | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
