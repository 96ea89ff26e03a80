#!/usr/bin/env python3
"""What clients with a recursive grammar cost the others: the gaps between the tokens of a free stream, alone and beside
one that has to keep to all of JSON in GBNF, which takes milliseconds per token on a large vocabulary.

    python scripts/bench/grammar_streams.py MODEL.gguf --constrained 1

Output: a Markdown row per case with the free stream's rate, its gaps, and the rate of the constrained streams.
`--server` takes another program, to compare two builds on the same machine in the same minutes.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import shutil
import statistics
import subprocess
import sysconfig
import threading
import time
from pathlib import Path

GRAMMAR = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" blank (pair ("," blank pair)*)? "}" blank
pair ::= string ":" blank value
array ::= "[" blank (value ("," blank value)*)? "]" blank
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" blank
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? blank
blank ::= [ \t\n]*
"""


def read_stream(
    port: int, body: dict[str, object], times: list[float], ends: threading.Event | None = None
) -> list[float]:
    """Append the arrival times of one stream's partial results to `times`, until it ends or `ends` is set."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(
        "POST", "/completion", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    for line in response:
        if line.startswith(b"data: "):
            times.append(time.perf_counter())
        if ends is not None and ends.is_set():
            break
    connection.close()
    return times


def constrained_client(port: int, index: int, ends: threading.Event, counts: list[float]) -> None:
    seed = index
    while not ends.is_set():
        body = {"prompt": f"Answer {index}:", "n_predict": 200, "grammar": GRAMMAR, "temperature": 1.5, "seed": seed}
        read_stream(port, body, counts, ends)
        seed += 100


def measure(port: int, n_constrained: int, n_tokens: int) -> str:
    ends = threading.Event()
    counts: list[float] = []
    clients = [threading.Thread(target=constrained_client, args=(port, i, ends, counts)) for i in range(n_constrained)]
    for client in clients:
        client.start()
    while n_constrained and len(counts) < 3 * n_constrained:
        time.sleep(0.01)
    body = {"prompt": "Once upon a time", "n_predict": n_tokens, "ignore_eos": True, "temperature": 0}
    times = read_stream(port, body, [])
    n_beside = sum(times[0] < moment <= times[-1] for moment in counts)
    ends.set()
    for client in clients:
        client.join()
    gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(times))
    seconds = times[-1] - times[0]
    return (
        f"| {n_constrained} | {(len(times) - 1) / seconds:.1f} | {statistics.median(gaps):.1f} | "
        f"{gaps[int(0.95 * len(gaps))]:.1f} | {n_beside / seconds:.1f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--constrained", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("-n", "--n-generate", type=int, default=150)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--server", default=shutil.which("llama-server", path=sysconfig.get_path("scripts")))
    parser.add_argument("--port", type=int, default=18123)
    arguments = parser.parse_args()
    command = [arguments.server, "-m", str(arguments.model), "--port", str(arguments.port), "-c", "8192", "-np", "4"]
    command += ["-t", str(arguments.threads), "--host", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server left with status {process.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", arguments.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                time.sleep(0.1)
        warm = {"prompt": "x", "n_predict": 3, "grammar": GRAMMAR}
        read_stream(arguments.port, warm, [])
        print("| constrained streams | free tokens/s | median gap ms | 95th percentile | constrained tokens/s |")
        print("|---|---|---|---|---|")
        for n_constrained in arguments.constrained:
            print(measure(arguments.port, n_constrained, arguments.n_generate), flush=True)
    finally:
        process.terminate()
        process.wait(30)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
