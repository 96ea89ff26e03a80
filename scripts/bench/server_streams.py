#!/usr/bin/env python3
"""What the server costs: aggregate generation rate of N streams through `llama-server` against `Engine.step` alone.

Both sides generate the same number of tokens from the same prompts with the same sampler settings (greedy), N sequences
at a time. The rate counts from the moment the last stream has its first token until the first stream ends, so that all
N decode during the whole interval. The sides alternate. Output: a Markdown table.

    python scripts/bench/server_streams.py MODEL.gguf --streams 4 --repetitions 5
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pyllama._engine import Engine, Model, Sampler, Work


def overlapping_rate(times: list[list[float]]) -> float:
    """Tokens per second of all streams together while all were generating; `times[stream]` are its tokens' arrivals."""
    begin = max(stream[0] for stream in times)
    end = min(stream[-1] for stream in times)
    if end <= begin:
        raise RuntimeError("the streams did not overlap; ask for more tokens")
    return sum(begin < moment <= end for stream in times for moment in stream) / (end - begin)


def engine_rate(engine: Engine, n_vocab: int, prompts: list[list[int]], n_tokens: int) -> float:
    samplers = [Sampler(n_vocab, temperature=0.0, seed=1) for _ in prompts]
    pending = dict(enumerate(prompts))
    times: list[list[float]] = [[] for _ in prompts]
    for seq_id in pending:
        engine.clear(seq_id)
    for _ in range(n_tokens):
        outputs = engine.step([Work(seq_id, tokens, samplers[seq_id]) for seq_id, tokens in pending.items()])
        now = time.perf_counter()
        for output in outputs:
            samplers[output.seq_id].accept([output.token])
            pending[output.seq_id] = [output.token]
            times[output.seq_id].append(now)
    return overlapping_rate(times)


def open_stream(address: str, prompt: list[int], n_tokens: int) -> socket.socket:
    """Send one streamed completion request over a plain socket."""
    body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    payload = json.dumps(body | {"stream": True}).encode()
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=600)
    connection.sendall(
        f"POST /completion HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
        + payload
    )
    return connection


def server_rate(address: str, prompts: list[list[int]], n_tokens: int) -> float:
    """All streams are read by one thread that only counts events: client and server share the cores, so what the client
    spends is missing there. A character of several tokens comes as one event, which makes this rate a lower bound.
    """
    times: list[list[float]] = [[] for _ in prompts]
    with selectors.DefaultSelector() as selector:
        for stream, prompt in enumerate(prompts):
            selector.register(open_stream(address, prompt, n_tokens), selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                data = key.fileobj.recv(1 << 16)
                if data:
                    times[key.data] += [time.perf_counter()] * data.count(b"data: {")
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    if any(len(stream) < n_tokens // 2 for stream in times):
        raise RuntimeError(f"streams carried {[len(stream) for stream in times]} events, expected {n_tokens} each")
    return overlapping_rate(times)


@contextlib.contextmanager
def running_server(
    model: Path, *, n_streams: int, n_threads: int, n_ctx: int, options: Sequence[str] = ()
) -> Iterator[str]:
    """Start `llama-server` of this environment on a free port, wait until it is ready, yield "host:port", stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = shutil.which("llama-server", path=sysconfig.get_path("scripts"))
    command = [program] if program else [sys.executable, "-m", "pyllama.server"]
    command += [
        "-m",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-np",
        str(n_streams),
        "-t",
        str(n_threads),
        "-c",
        str(n_ctx),
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection(address, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"the server left with status {process.returncode}: {' '.join(command)}")
            if time.monotonic() > deadline:
                raise RuntimeError("the server was not ready after 60 s")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Aggregate rate of N streams through the server against the engine alone."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("-p", "--n-prompt", type=int, default=32)
    parser.add_argument("-n", "--n-generate", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    n_ctx = arguments.streams * 256 * -(-(arguments.n_prompt + arguments.n_generate + 1) // 256)
    model = Model(arguments.model, n_threads=arguments.threads)
    engine = Engine(model, n_ctx=n_ctx, n_seq_max=arguments.streams, n_threads=arguments.threads)
    rng = np.random.default_rng(1)
    alone, served = [], []
    with running_server(
        arguments.model, n_streams=arguments.streams, n_threads=arguments.threads, n_ctx=n_ctx
    ) as address:
        for repetition in range(-1, arguments.repetitions):  # repetition -1 warms both sides and is dropped
            prompts = rng.integers(100, model.n_vocab - 100, (arguments.streams, arguments.n_prompt)).tolist()
            rates = (
                engine_rate(engine, model.n_vocab, prompts, arguments.n_generate),
                server_rate(address, prompts, arguments.n_generate),
            )
            if repetition >= 0:
                alone.append(rates[0])
                served.append(rates[1])
    engine.close()
    model.close()
    print(
        f"{arguments.streams} streams, {arguments.threads} threads, {arguments.repetitions} alternating repetitions, "
        "tokens/s of all streams, min / median / max\n"
    )
    print("| model | engine alone | server | ratio of medians |\n|---|---|---|---|")
    columns = [f"{min(rates):.0f} / **{statistics.median(rates):.1f}** / {max(rates):.0f}" for rates in (alone, served)]
    ratio = statistics.median(served) / statistics.median(alone)
    print(f"| {arguments.model.stem} | {columns[0]} | {columns[1]} | {ratio:.3f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
