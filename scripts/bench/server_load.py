#!/usr/bin/env python3
"""Many clients on one server: throughput, latencies and every answer outside the contract, beside llama.cpp's server.

Each client sends one request after another for the given time: streamed chats and completions, half of them behind a
shared system message, with lengths drawn from a generator seeded by client and request number, so that both servers get
the same requests. A share of the requests is cancelled after some tokens, read slowly, or dropped before the answer
begins. A 503 with `Retry-After` is within the contract: the client waits and asks again. Anything else that is not a
complete, well-formed stream is counted as an error and printed, and makes the exit status 1.

Rates count the events that carry text, which for both servers is one per token (a character of several tokens is one
event). The servers run one after the other, `--rounds` times in turn. Output: a Markdown table.

    python scripts/bench/server_load.py MODEL.gguf --clients 64 --seconds 600 --peer
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama_cpp_peer import LlamaCppPeer
from server_streams import running_server

WORDS = [
    "river",
    "stone",
    "lamp",
    "harbour",
    "winter",
    "engine",
    "paper",
    "garden",
    "signal",
    "copper",
    "mountain",
    "letter",
    "window",
    "bridge",
    "forest",
    "silver",
    "market",
    "thunder",
    "pencil",
    "island",
    "candle",
    "meadow",
    "anchor",
    "violin",
    "basket",
    "compass",
    "feather",
    "kitchen",
    "rocket",
    "saddle",
    "tunnel",
]
SYSTEM = "You answer in one paragraph and in plain words. " + " ".join(WORDS * 4)
RETRY_LIMIT_S = 30.0


@dataclasses.dataclass
class Load:
    """What the clients saw. Times in seconds; `tokens` counts events with text, also those of cancelled requests."""

    first_token: list[float] = dataclasses.field(default_factory=list)
    latency: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    completed: int = 0
    cancelled: int = 0
    refused: int = 0
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """How one request is made and read."""

    path: str
    body: bytes
    n_tokens: int
    drop_before_answer: bool
    cancel_after: int | None
    pause_s: float


def behaviour(client: int, number: int, *, plain: bool) -> Behaviour:
    """The request `number` of `client`, the same on every run. plain: no cancels, slow readers or drops."""
    rng = random.Random(f"{client}/{number}")
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(10, 200)))
    n_tokens = rng.randint(8, 64)
    fields: dict[str, object] = {"stream": True, "temperature": 0.8, "seed": rng.randrange(1 << 31), "ignore_eos": True}
    if rng.random() < 0.5:
        path = "/v1/chat/completions"
        messages = [{"role": "user", "content": f"Write about: {words}"}]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        fields |= {"messages": messages, "max_tokens": n_tokens}
    else:
        path = "/completion"
        shared = SYSTEM if rng.random() < 0.5 else ""
        fields |= {"prompt": f"{shared} {words}", "n_predict": n_tokens}
    fate = 1.0 if plain else rng.random()
    return Behaviour(
        path,
        json.dumps(fields).encode(),
        n_tokens,
        drop_before_answer=fate < 0.05,
        cancel_after=rng.randint(1, n_tokens) if 0.05 <= fate < 0.2 else None,
        pause_s=0.05 if 0.2 <= fate < 0.25 else 0.0,
    )


class Refused(Exception):
    """503 with the seconds after which to ask again."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.split(":", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), {name.lower(): value.strip() for name, value in fields}


async def one_request(host: str, port: int, request: Behaviour, load: Load) -> None:
    """Send one request and read its stream. Raises Refused on 503, ValueError on an answer outside the contract."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        head = (
            f"POST {request.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(request.body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + request.body)
        await writer.drain()
        if request.drop_before_answer:
            load.cancelled += 1
            return
        status, headers = await read_head(reader)
        if status == 503 and "retry-after" in headers:
            raise Refused(float(headers["retry-after"]))
        if status != 200:
            raise ValueError(f"status {status}: {(await reader.read(500))!r}")
        n_tokens, last = 0, b""
        async for line in reader:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            last = line
            # Looking for the text of an event with a search keeps the client's share of the cores small.
            if b'"content":"' not in line or b'"content":""' in line:
                continue
            n_tokens += 1
            load.tokens += 1
            if n_tokens == 1:
                load.first_token.append(time.perf_counter() - start)
            if request.cancel_after is not None and n_tokens >= request.cancel_after:
                load.cancelled += 1
                return
            if request.pause_s:
                await asyncio.sleep(request.pause_s)
        event = json.loads(last.removeprefix(b"data: "))
        ended = (
            event.get("stop") is True
            if request.path == "/completion"
            else event["choices"] == [] or (event["choices"][0].get("finish_reason") == "length")
        )
        if not ended:
            raise ValueError(f"{request.path} ended without its last event: {last[:300]!r}")
        load.completed += 1
        if not request.pause_s:
            load.latency.append(time.perf_counter() - start)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def client(number: int, address: str, deadline: float, load: Load, *, plain: bool) -> None:
    host, port = address.removeprefix("http://").split(":")
    index = 0
    while time.perf_counter() < deadline:
        try:
            await one_request(host, int(port), behaviour(number, index, plain=plain), load)
        except Refused as refused:
            load.refused += 1
            await asyncio.sleep(min(refused.seconds, RETRY_LIMIT_S))
            continue
        except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            load.errors[f"{type(error).__name__}: {error}"[:300]] += 1
        index += 1


async def drive(address: str, n_clients: int, seconds: float, *, plain: bool) -> Load:
    load = Load()
    start = time.perf_counter()
    await asyncio.gather(*(client(i, address, start + seconds, load, plain=plain) for i in range(n_clients)))
    load.seconds = time.perf_counter() - start
    return load


def percentiles(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return " / ".join(f"{cuts[at - 1]:.2f}" for at in (50, 95, 99))


def row(name: str, load: Load) -> str:
    return (
        f"| {name} | {load.tokens / load.seconds:.1f} | {load.completed / load.seconds:.2f} | "
        f"{percentiles(load.first_token)} | {percentiles(load.latency)} | {load.completed} | {load.cancelled} | "
        f"{load.refused} | {load.errors.total()} |"
    )


@contextlib.contextmanager
def peer_server(arguments: argparse.Namespace) -> Iterator[str]:
    with LlamaCppPeer(
        arguments.model, n_ctx=arguments.ctx, n_threads=arguments.threads, n_parallel=arguments.slots
    ) as peer:
        yield peer.address


def main() -> int:
    parser = argparse.ArgumentParser(description="Many clients on a server, beside llama.cpp's on request.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0, help="per server and round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("-c", "--ctx", type=int, default=8192)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="no cancels, slow readers or drops")
    parser.add_argument("--peer", action="store_true", help="the same load on llama.cpp's server")
    parser.add_argument("server_options", nargs="*", help="after --: further options of our server")
    arguments = parser.parse_args()

    def ours() -> contextlib.AbstractContextManager[str]:
        return running_server(
            arguments.model,
            n_streams=arguments.slots,
            n_threads=arguments.threads,
            n_ctx=arguments.ctx,
            options=arguments.server_options,
        )

    sides: dict[str, Callable[[], contextlib.AbstractContextManager[str]]] = {"pyllama": ours}
    if arguments.peer:
        sides["llama.cpp"] = lambda: peer_server(arguments)
    print(
        f"{arguments.clients} clients, {arguments.slots} slots, {arguments.threads} threads, {arguments.seconds:g} s; "
        "seconds are p50 / p95 / p99\n\n| server | tokens/s | requests/s | first token, s | whole answer, s | "
        "completed | cancelled | refused (503) | errors |\n|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    errors: collections.Counter[str] = collections.Counter()
    for _ in range(arguments.rounds):
        for name, start in sides.items():
            with start() as address:
                load = asyncio.run(drive(address, arguments.clients, arguments.seconds, plain=arguments.plain))
            print(row(name, load), flush=True)
            if name == "pyllama":
                errors += load.errors
    for message, count in errors.most_common():
        print(f"{count} x {message}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
