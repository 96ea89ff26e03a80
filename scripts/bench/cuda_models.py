#!/usr/bin/env python3
"""Decoding and prompts of whole models on a card, beside what its memory could give, measured in the same run.

    V100_KERNELS_DIR=DIR PYTHONPATH=tests:scripts/bench python scripts/bench/cuda_models.py \
        [--models qwen3.8-27b:Q8_0 ...] [--depths 0 16384 ...] [--rows 1] [--folder DIR]

The models have published shapes and random weights (`shaped_models.py`); tokens before a depth are pretended. "of copy"
is the bytes of weights, keys, values and states that a step reads over the time it takes, as a share of the copy
bandwidth. On cards newer than the V100 the tensor instruction is emulated: see `cuda_linear.py` for kernels without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import shaped_models
from cuda_linear import copy_bandwidth

from pyllama._engine import Engine, LogitsRow, Model, Work
from support.cuda_device import Card

PAGE = 256
KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


def cache_bytes(shape: shaped_models.Shape, depth: int, kv_type: str) -> float:
    """Keys, values and recurrent states that a token of one sequence reads, states written as well."""
    n_delta = sum((layer + 1) % shape.interval != 0 for layer in range(shape.layers)) if shape.is_hybrid else 0
    per_token = (shape.layers - n_delta) * 2 * shape.kv_heads * shape.head_dim * KV_BYTES[kv_type]
    return depth * per_token + n_delta * 2 * 4 * shape.value_heads * shape.state**2


def some_tokens(shape: shaped_models.Shape, count: int) -> list[int]:
    return [(7 * i + 1) % shape.vocab for i in range(count)]


def seconds_per_step(engine: Engine, logits: LogitsRow, tokens: list[int], steps: int) -> float:
    """Median time of a step that takes the tokens and leaves logits on the host: not all kernels here leave numbers."""
    times = []
    for step in range(steps + 3):
        begin = time.perf_counter()
        engine.step([Work(0, tokens, logits=logits)])
        if step >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def bench(path: Path, name: str, file_type: str, arguments: argparse.Namespace, bandwidth: float) -> None:
    shape = shaped_models.SHAPES[name]
    begin = time.perf_counter()
    read = shaped_models.write(path, shape, file_type)
    written = time.perf_counter()
    model = Model(path, devices=[arguments.device])
    print(
        f"{name} {file_type}: {path.stat().st_size / 1e9:.1f} GB, written in {written - begin:.1f} s, "
        f"loaded in {time.perf_counter() - written:.1f} s",
        flush=True,
    )
    for depth in arguments.depths:
        n_ctx = -(-(depth + arguments.prompt + 512) // PAGE) * PAGE
        engine = Engine(model, n_ctx=n_ctx, type_k=arguments.kv, type_v=arguments.kv, n_ubatch=arguments.ubatch)
        engine.pretend(0, depth)
        logits = LogitsRow()
        for rows in arguments.rows:
            seconds = seconds_per_step(engine, logits, some_tokens(shape, rows), arguments.steps)
            rate = (read + cache_bytes(shape, depth, arguments.kv)) / seconds
            print(
                f"  depth {depth:6}  rows {rows:3}  {seconds * 1e3:8.2f} ms  {rows / seconds:8.1f} tokens/s  "
                f"{rate / 1e9:6.0f} GB/s  {rate / bandwidth:6.1%} of copy",
                flush=True,
            )
        if arguments.prompt:
            tokens = some_tokens(shape, arguments.prompt)
            begin = time.perf_counter()
            engine.step([Work(0, tokens, logits=logits)])
            seconds = time.perf_counter() - begin
            print(
                f"  depth {depth:6}  prompt of {arguments.prompt}: {arguments.prompt / seconds:.0f} tokens/s",
                flush=True,
            )
        engine.close()
    model.close()
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m:Q8_0", "qwen3.8-27b:Q8_0", "qwen3.8-27b:Q4_K_M"])
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 16384, 131072, 261120])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt that is timed at each depth")
    parser.add_argument("--kv", default="q8_0", choices=KV_BYTES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    bandwidth = 1.0
    if arguments.device.startswith("CUDA"):
        card = Card(Path(os.environ["V100_KERNELS_DIR"]) / "kernels.archive")
        bandwidth = copy_bandwidth(card)
        print(f"{card.name}, {card.multiprocessors} SMs, copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    for model in arguments.models:
        name, file_type = model.split(":")
        bench(arguments.folder / f"{name}-{file_type}.gguf", name, file_type, arguments, bandwidth)


if __name__ == "__main__":
    main()
